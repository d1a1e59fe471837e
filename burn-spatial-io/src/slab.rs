//! One HDF5 call on a box of a dataset, into and out of buffers of ours, which the safe interface does not offer.

use hdf5_metno as hdf5;
use hdf5_metno::SliceOrIndex;
use hdf5_metno_sys::h5d::{H5Dread, H5Dwrite};
use hdf5_metno_sys::h5p::H5P_DEFAULT;

/// Numbers: types of which every bit pattern is a value.
pub trait Number: hdf5::H5Type + Copy + Default + sealed::Sealed {}

mod sealed {
    /// Keeps [`super::Number`] to numbers.
    pub trait Sealed {}
}

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl sealed::Sealed for $type {}
        impl Number for $type {}
    )*};
}

numbers!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// The selections of the box in the file and of all of the buffer in memory.
fn spaces(dataset: &hdf5::Dataset, start: &[usize], count: &[usize]) -> hdf5::Result<[hdf5::Dataspace; 2]> {
    let ranges: Vec<SliceOrIndex> = start.iter().zip(count).map(|(s, n)| (*s..s + n).into()).collect();
    Ok([dataset.space()?.select(hdf5::Hyperslab::from(ranges))?, hdf5::Dataspace::try_new(count)?])
}

/// Reads the box at `start` of `count` elements along each axis, stored as `T`, into `out` of that many elements.
pub(crate) fn read<T: Number>(dataset: &hdf5::Dataset, start: &[usize], count: &[usize], out: &mut [T]) -> hdf5::Result<()> {
    let [file_space, memory_space] = spaces(dataset, start, count)?;
    let element = hdf5::Datatype::from_type::<T>()?;
    assert_eq!(out.len(), count.iter().product::<usize>());
    hdf5::sync::sync(|| {
        // SAFETY: all handles are open and the library's lock is held. `out` holds exactly the elements that
        // `memory_space` describes, of the type `element`, for which every bit pattern is a value.
        let code = unsafe { H5Dread(dataset.id(), element.id(), memory_space.id(), file_space.id(), H5P_DEFAULT, out.as_mut_ptr().cast()) };
        hdf5::h5check(code).map(|_| ())
    })
}

/// Writes `data` into the box at `start` of `count` elements along each axis.
pub(crate) fn write<T: Number>(dataset: &hdf5::Dataset, start: &[usize], count: &[usize], data: &[T]) -> hdf5::Result<()> {
    let [file_space, memory_space] = spaces(dataset, start, count)?;
    let element = hdf5::Datatype::from_type::<T>()?;
    assert_eq!(data.len(), count.iter().product::<usize>());
    hdf5::sync::sync(|| {
        // SAFETY: as in `read`; `data` is read only.
        let code = unsafe { H5Dwrite(dataset.id(), element.id(), memory_space.id(), file_space.id(), H5P_DEFAULT, data.as_ptr().cast()) };
        hdf5::h5check(code).map(|_| ())
    })
}
