//! Reading blocks, from good and from damaged files.

mod common;

use std::fs;
use std::path::Path;

use burn_spatial_io::{
    ChannelAxis, CosmoFlowDataset, CosmoFlowOptions, DataError, IndexBox, SampleSource, Transform, VolumeReader, VolumeShape, open_file,
};
use common::{counter, dataset, open, set, whole, write};
use hdf5_metno as hdf5;

fn read(file: &dyn VolumeReader, bounds: IndexBox, transform: Transform) -> Result<Vec<f32>, DataError> {
    let mut out = Vec::new();
    file.read(bounds, transform, &mut Vec::new(), &mut out)?;
    Ok(out)
}

/// The message of opening `path` and reading all of it.
fn message(path: &Path) -> String {
    let all = || {
        let file = open_file(path, 3)?;
        let volume = file.volume("full", ChannelAxis::Auto)?;
        file.labels("unitPar")?;
        read(&*volume, whole(&*volume), Transform::Log1p)
    };
    let error = all().expect_err("the file is damaged");
    let text = error.to_string();
    assert!(text.contains("rank 3") && text.contains(&*path.file_name().unwrap().to_string_lossy()), "{text}");
    text
}

#[test]
fn channels_last_become_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counter.hdf5");
    counter(&path, [2, 2, 2, 4]);
    let file = open(&path);
    assert_eq!(file.shape(), VolumeShape { channels: 4, extent: [2; 3] });
    let raw = file.read_raw::<i16>(whole(&*file)).unwrap();
    let at = |c: usize, d: usize, h: usize, w: usize| raw[((c * 2 + d) * 2 + h) * 2 + w];
    assert_eq!(at(3, 1, 0, 1), 23);
    assert_eq!(at(0, 0, 1, 0), 8);
    assert_eq!(read(&*file, whole(&*file), Transform::Identity).unwrap(), raw.iter().map(|v| f32::from(*v)).collect::<Vec<_>>());
    let part = IndexBox { start: [1, 0, 1], extent: [1, 2, 1] };
    assert_eq!(file.read_raw::<i16>(part).unwrap(), [20, 28, 21, 29, 22, 30, 23, 31]);
}

#[test]
fn channels_first_stay() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lbann.hdf5");
    let values: Vec<f32> = (0..4 * 27).map(|v| v as f32).collect();
    write(&path, [4, 3, 3, 3], &values, &[0.1f64, 0.2, 0.3]);
    let file = open(&path);
    assert_eq!(file.shape(), VolumeShape { channels: 4, extent: [3; 3] });
    let part = IndexBox { start: [1, 2, 0], extent: [1, 1, 2] };
    assert_eq!(file.read_raw::<f32>(part).unwrap(), [15.0, 16.0, 42.0, 43.0, 69.0, 70.0, 96.0, 97.0]);
    assert_eq!(read(&*file, part, Transform::Log1p).unwrap()[0], 16f32.ln());
    assert_eq!(open_file(&path, 3).unwrap().labels("unitPar").unwrap(), [0.1, 0.2, 0.3]);
    let ints: Vec<i16> = (0..4 * 27).collect();
    let path = folder.path().join("lbann16.hdf5");
    write(&path, [4, 3, 3, 3], &ints, &[0.1f32]);
    assert_eq!(open(&path).read_raw::<i16>(part).unwrap(), [15, 16, 42, 43, 69, 70, 96, 97]);
}

#[test]
fn int16_is_exact() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ints.hdf5");
    write(&path, [1, 1, 3, 1], &[-1i16, 0, 32767], &[0.0f32]);
    let file = open_file(&path, 0).unwrap().volume("full", ChannelAxis::Last).unwrap();
    assert_eq!(file.read_raw::<i16>(whole(&*file)).unwrap(), [-1, 0, 32767]);
    assert_eq!(read(&*file, whole(&*file), Transform::Identity).unwrap(), [-1.0, 0.0, 32767.0]);
    let counts = read(&*file, IndexBox { start: [0, 0, 1], extent: [1, 1, 2] }, Transform::Log1p).unwrap();
    assert_eq!(counts, [0.0, 10.397_207_7f64 as f32]);
    let error = read(&*file, whole(&*file), Transform::Log1p).unwrap_err();
    assert_eq!(error, DataError::Negative { at: file.at(), position: [0; 4], value: -1.0 });
    assert!(matches!(file.read_raw::<f32>(whole(&*file)), Err(DataError::Type { .. })));
}

#[test]
fn every_plane_is_read_when_ranks_do_not_divide() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep.hdf5");
    let values: Vec<i16> = (0..10 * 2 * 2 * 4).map(|i| i / 16).collect();
    write(&path, [10, 2, 2, 4], &values, &[0.0f32]);
    let file = open(&path);
    let blocks: Vec<Vec<i16>> = (0..4)
        .map(|coord| common::rank([4, 1, 1], [coord, 0, 0]).block(file.shape().extent))
        .map(|bounds| file.read_raw(bounds).unwrap())
        .collect();
    assert_eq!(blocks.iter().map(|bounds| bounds.len() / 16).collect::<Vec<_>>(), [3, 3, 2, 2]);
    // The column of channel 0 at height 0, width 0.
    let column = blocks.iter().flat_map(|bounds| bounds[..bounds.len() / 4].iter().step_by(4));
    assert_eq!(column.map(|v| i32::from(*v)).sum::<i32>(), 45);
}

#[test]
fn blocks_tile_the_volume() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("odd.hdf5");
    counter(&path, [5, 7, 6, 3]);
    let file = open(&path);
    let all: Vec<i16> = file.read_raw(whole(&*file)).unwrap();
    for coords in (0..12).map(|i| [i / 6, i / 2 % 3, i % 2]) {
        let bounds = common::rank([2, 3, 2], coords).block([5, 7, 6]);
        let [d, h, w] = bounds.extent;
        let block: Vec<i16> = file.read_raw(bounds).unwrap();
        for (i, value) in block.iter().enumerate() {
            let place = [i / (d * h * w), bounds.start[0] + i / (h * w) % d, bounds.start[1] + i / w % h, bounds.start[2] + i % w];
            assert_eq!(*value, all[((place[0] * 5 + place[1]) * 7 + place[2]) * 6 + place[3]]);
        }
    }
}

#[test]
fn reused_buffers_read_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counter.hdf5");
    counter(&path, [6, 5, 7, 4]);
    let bounds = IndexBox { start: [1, 0, 2], extent: [4, 5, 3] };
    let (mut scratch, mut out) = (Vec::new(), Vec::new());
    let file = open(&path);
    for bounds in [whole(&*file), bounds, whole(&*file)] {
        file.read(bounds, Transform::Identity, &mut scratch, &mut out).unwrap();
        assert!(out.iter().zip(file.read_raw::<i16>(bounds).unwrap()).all(|(a, b)| *a == f32::from(b)));
        assert_eq!(out.len(), 4 * bounds.voxels());
    }
}

#[test]
fn threads_read_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counter.hdf5");
    counter(&path, [8, 8, 8, 4]);
    let shared = open(&path);
    let all: Vec<i16> = shared.read_raw(whole(&*shared)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (shared, all, path) = (&shared, &all, &path);
            scope.spawn(move || {
                for i in 0..50 {
                    let start = [i % 8, (i + thread) % 8, (3 * i) % 8];
                    let bounds = IndexBox { start, extent: [1, 1, 1] };
                    let own = (i % 2 == 0).then(|| open(path));
                    let voxel: Vec<i16> = own.as_ref().unwrap_or(shared).read_raw(bounds).unwrap();
                    let expected = (0..4).map(|c| all[((c * 8 + start[0]) * 8 + start[1]) * 8 + start[2]]);
                    assert_eq!(voxel, expected.collect::<Vec<_>>());
                }
            });
        }
    });
}

#[test]
fn compressed_chunks_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chunks.hdf5");
    let values: Vec<i16> = (0..4 * 512).collect();
    {
        let file = hdf5::File::create(&path).unwrap();
        let builder = file.new_dataset::<i16>().shape((8, 8, 8, 4)).chunk((3, 4, 8, 4)).shuffle().deflate(4);
        builder.create("full").unwrap().write_raw(&values).unwrap();
    }
    let file = open(&path);
    let voxel = file.read_raw::<i16>(IndexBox { start: [5, 2, 7], extent: [1; 3] }).unwrap();
    let first = ((5 * 8 + 2) * 8 + 7) * 4;
    assert_eq!(voxel, [first, first + 1, first + 2, first + 3]);
}

#[test]
fn files_that_are_not_there_or_not_hdf5() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    assert!(message(&path("nope.hdf5")).contains("no such file"));
    fs::create_dir(path("folder.hdf5")).unwrap();
    assert!(message(&path("folder.hdf5")).contains("not a file"));
    std::os::unix::fs::symlink(path("loop.hdf5"), path("loop.hdf5")).unwrap();
    assert!(message(&path("loop.hdf5")).contains("cannot be opened"));
    for (name, bytes) in [("text.hdf5", &b"hello\n"[..]), ("empty.hdf5", b"")] {
        fs::write(path(name), bytes).unwrap();
        assert!(message(&path(name)).contains("not a whole HDF5 file"));
    }
    counter(&path("good.hdf5"), [8, 8, 8, 4]);
    let bytes = fs::read(path("good.hdf5")).unwrap();
    for (name, length) in [("half.hdf5", bytes.len() / 2), ("head.hdf5", 16), ("tail.hdf5", bytes.len() - 1)] {
        fs::write(path(name), &bytes[..length]).unwrap();
        assert!(message(&path(name)).contains("not a whole HDF5 file"));
    }
}

#[test]
fn files_that_may_not_be_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret.hdf5");
    counter(&path, [2, 2, 2, 4]);
    // Someone writes it.
    let lock = fs::File::open(&path).unwrap();
    lock.lock().unwrap();
    assert!(message(&path).contains("another program writes it"));
    drop(lock);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    // The superuser may read anything.
    if fs::File::open(&path).is_err() {
        assert!(message(&path).contains("cannot be opened: Permission denied"));
    }
}

#[test]
fn datasets_of_the_wrong_kind() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let labels = [0.5f32];

    let file = hdf5::File::create(path("other.hdf5")).unwrap();
    file.new_dataset_builder().with_data(&labels).create("unitPar").unwrap();
    drop(file);
    let text = message(&path("other.hdf5"));
    assert!(text.contains("dataset 'full': no such dataset; the file has unitPar"), "{text}");

    let file = hdf5::File::create(path("group.hdf5")).unwrap();
    file.create_group("full").unwrap();
    drop(file);
    assert!(message(&path("group.hdf5")).contains("dataset 'full': reading failed"));

    let file = hdf5::File::create(path("flat.hdf5")).unwrap();
    file.new_dataset::<i16>().shape((8, 8, 8)).create("full").unwrap();
    drop(file);
    let text = message(&path("flat.hdf5"));
    assert!(text.contains("expected 4 dimensions, found 3 [8, 8, 8]"), "{text}");

    write(&path("nothing.hdf5"), [0, 2, 2, 4], &[0i16; 0], &labels);
    assert!(message(&path("nothing.hdf5")).contains("[0, 2, 2, 4]"));

    write(&path("f64.hdf5"), [1, 1, 1, 2], &[1.0f64, 2.0], &labels);
    assert!(message(&path("f64.hdf5")).contains(
        "expected elements of type int16 or float32, found float64; rewrite it as one of these, with NumPy by .astype('float32')"
    ));
    write(&path("u16.hdf5"), [1, 1, 1, 2], &[1u16, 2], &labels);
    assert!(message(&path("u16.hdf5")).contains("found uint16"));
}

#[test]
fn values_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut counts = vec![0i16; 2 * 3 * 4 * 2];
    counts[((3 + 2) * 4 + 3) * 2 + 1] = -7;
    write(&path("negative.hdf5"), [2, 3, 4, 2], &counts, &[0.5f32]);
    let file = open_file(&path("negative.hdf5"), 3).unwrap().volume("full", ChannelAxis::Last).unwrap();
    // The position is the one in the whole volume, whatever the block.
    let block = IndexBox { start: [1, 1, 2], extent: [1, 2, 2] };
    let text = read(&*file, block, Transform::Log1p).unwrap_err().to_string();
    assert!(text.contains("found -7 at channel 1, depth 1, height 2, width 3"), "{text}");

    for (bad, found) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf"), (-0.5, "-0.5")] {
        let mut values = vec![1f32; 2 * 27];
        values[27 + 9 + 3 + 2] = bad;
        write(&path("floats.hdf5"), [2, 3, 3, 3], &values, &[0.5f32]);
        let text = message(&path("floats.hdf5"));
        assert!(text.contains(&format!("found {found} at channel 1, depth 1, height 1, width 2")), "{text}");
    }
    let file = open(&path("floats.hdf5"));
    assert_eq!(read(&*file, whole(&*file), Transform::Identity).unwrap()[41], -0.5);
    let outside = IndexBox { start: [0, 0, 2], extent: [1, 1, 2] };
    assert!(matches!(read(&*file, outside, Transform::Log1p), Err(DataError::Block { volume: [3, 3, 3], .. })));
    let far = IndexBox { start: [usize::MAX, 0, 0], extent: [1; 3] };
    assert!(matches!(file.read_raw::<f32>(far), Err(DataError::Block { .. })));
}

#[test]
fn labels_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write::<_, f32>(&path("none.hdf5"), [1, 1, 1, 2], &[1i16, 2], &[]);
    let text = message(&path("none.hdf5"));
    assert!(text.contains("dataset 'unitPar': the file has no labels under this name; it has full"), "{text}");
    write(&path("nan.hdf5"), [1, 1, 1, 2], &[1i16, 2], &[0.5, f64::NAN]);
    assert!(message(&path("nan.hdf5")).contains("found NaN at position 1"));
    write(&path("huge.hdf5"), [1, 1, 1, 2], &[1i16, 2], &[1e300f64]);
    assert!(message(&path("huge.hdf5")).contains("found inf at position 0"));
    write(&path("ints.hdf5"), [1, 1, 1, 2], &[1i16, 2], &[1i32]);
    assert!(message(&path("ints.hdf5")).contains("expected elements of type float32 or float64, found int32"));
    let file = hdf5::File::create(path("square.hdf5")).unwrap();
    file.new_dataset::<i16>().shape((1, 1, 1, 2)).create("full").unwrap();
    file.new_dataset::<f32>().shape((2, 2)).create("unitPar").unwrap();
    drop(file);
    assert!(message(&path("square.hdf5")).contains("expected 1 dimensions, found 2"));
}

#[test]
fn damaged_insides() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gzip.hdf5");
    let values: Vec<i16> = (0..16 * 16 * 16 * 4i64).map(|i| (i * i * 7919 % 50) as i16).collect();
    let damage = {
        let file = hdf5::File::create(&path).unwrap();
        file.new_dataset_builder().with_data(&[0.5f32]).create("unitPar").unwrap();
        let builder = file.new_dataset::<i16>().shape((16, 16, 16, 4)).chunk((4, 16, 16, 4)).deflate(4);
        let data = builder.create("full").unwrap();
        data.write_raw(&values).unwrap();
        file.flush().unwrap();
        let chunk = data.chunk_info(2).unwrap();
        assert_eq!(chunk.offset, [8, 0, 0, 0]);
        let (start, size) = (chunk.addr as usize, chunk.size as usize);
        start + size / 4..start + size / 2
    };
    let mut bytes = fs::read(&path).unwrap();
    bytes[damage].fill(0);
    fs::write(&path, &bytes).unwrap();
    let text = message(&path);
    assert!(text.contains("dataset 'full': reading failed") && text.contains("; rewrite it with gzip"), "{text}");
    // The other chunks are whole.
    let file = open(&path);
    assert_eq!(file.read_raw::<i16>(IndexBox { start: [15; 3], extent: [1; 3] }).unwrap(), values[values.len() - 4..]);

    let path = folder.path().join("meta.hdf5");
    counter(&path, [8, 8, 8, 4]);
    let mut bytes = fs::read(&path).unwrap();
    bytes[96..800].iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 151 % 251) as u8);
    fs::write(&path, &bytes).unwrap();
    message(&path);
}

#[test]
fn files_that_differ_from_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = set(folder.path(), 2, 4);
    let other = folder.path().join("other.hdf5");
    write(&other, [5, 5, 5, 2], &[0i16; 250], &[0.0f32]);
    files.push(other.clone());
    let error = dataset(files.clone()).try_get(2).unwrap_err().to_string();
    assert!(error.contains("other.hdf5, dataset 'full'") && error.contains("rank 3"), "{error}");
    assert!(error.contains("expected the shape [2, 4, 4, 4] of the first file"), "{error}");
    assert!(error.contains("box000.hdf5, found the shape [2, 5, 5, 5]"), "{error}");

    write(&other, [4, 4, 4, 2], &[0i16; 128], &[0.0f32, 1.0]);
    let error = dataset(files.clone()).try_get(2).unwrap_err().to_string();
    assert!(error.contains("dataset 'unitPar': expected 1 labels") && error.contains("[2]"), "{error}");
    assert_eq!(dataset(files).try_get(9).unwrap_err(), DataError::Index { rank: 3, index: 9, len: 3 });

    write(&other, [4, 4, 5, 2], &[0i16; 160], &[0.0f32]);
    let new = |files, cubic| CosmoFlowDataset::new(files, common::WHOLE, CosmoFlowOptions { cubic, ..CosmoFlowOptions::default() });
    let error = new(vec![other.clone()], true).unwrap_err().to_string();
    assert!(error.contains("expected equal extents") && error.contains("[2, 4, 4, 5]"), "{error}");
    assert_eq!(new(vec![other], false).unwrap().shape().extent, [4, 4, 5]);
    assert_eq!(new(vec![], false).unwrap_err(), DataError::EmptySet { rank: 3 });
}
