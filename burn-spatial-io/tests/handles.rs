//! Reading leaves nothing open. Alone in its process: it counts all handles.

mod common;

use burn_spatial_io::SampleSource;
use hdf5_metno as hdf5;
use hdf5_metno_sys::h5f::{H5F_OBJ_ALL, H5Fget_obj_count};

/// Open files, groups, datasets, types and attributes; file descriptors.
fn handles() -> [usize; 2] {
    // SAFETY: counts the handles of all files; the lock is held.
    let objects = hdf5::sync::sync(|| unsafe { H5Fget_obj_count(H5F_OBJ_ALL.into(), H5F_OBJ_ALL) });
    [objects.try_into().unwrap(), std::fs::read_dir("/proc/self/fd").unwrap().count()]
}

#[test]
fn reads_leave_nothing_open() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = common::set(folder.path(), 3, 4);
    let bad = folder.path().join("bad.hdf5");
    common::write(&bad, [4, 4, 4, 2], &[-1i16; 128], &[0.0f32]);
    files.push(bad);
    let other = folder.path().join("other.hdf5");
    common::write(&other, [2, 2, 2, 2], &[0i16; 16], &[0.0f32]);
    files.push(other);
    let dataset = common::dataset(files);
    dataset.try_get(0).unwrap();
    let before = handles();
    for i in 0..2000 {
        assert_eq!(dataset.try_get(i % 3).unwrap().block.len(), 128);
        if i % 4 == 0 {
            assert!(dataset.try_get(3).is_err());
            assert!(dataset.try_get(4).is_err());
        }
    }
    assert_eq!(handles(), before);
}
