//! One HDF5 call on a box of a dataset, into and out of buffers of ours, which the safe interface does not offer.

use burn::tensor::DType;
use hdf5_metno as hdf5;
use hdf5_metno::SliceOrIndex;
use hdf5_metno::types::{FloatSize, IntSize, TypeDescriptor};
use hdf5_metno_sys::h5d::{H5Dread, H5Dwrite};
use hdf5_metno_sys::h5p::H5P_DEFAULT;

use crate::transform::Number;

/// HDF5's names of the numbers.
const TYPES: [(DType, TypeDescriptor); 10] = [
    (DType::I8, TypeDescriptor::Integer(IntSize::U1)),
    (DType::I16, TypeDescriptor::Integer(IntSize::U2)),
    (DType::I32, TypeDescriptor::Integer(IntSize::U4)),
    (DType::I64, TypeDescriptor::Integer(IntSize::U8)),
    (DType::U8, TypeDescriptor::Unsigned(IntSize::U1)),
    (DType::U16, TypeDescriptor::Unsigned(IntSize::U2)),
    (DType::U32, TypeDescriptor::Unsigned(IntSize::U4)),
    (DType::U64, TypeDescriptor::Unsigned(IntSize::U8)),
    (DType::F32, TypeDescriptor::Float(FloatSize::U4)),
    (DType::F64, TypeDescriptor::Float(FloatSize::U8)),
];

/// The number that HDF5 calls so.
pub(super) fn dtype(stored: &TypeDescriptor) -> Option<DType> {
    TYPES.into_iter().find(|(_, name)| name == stored).map(|(dtype, _)| dtype)
}

fn descriptor(dtype: DType) -> TypeDescriptor {
    let found = TYPES.into_iter().find(|(number, _)| *number == dtype);
    found.expect("only numbers are read and written").1
}

/// The type of the elements in memory, and the selections of the box in the file and of all of the buffer.
fn spaces(
    dataset: &hdf5::Dataset,
    element: DType,
    start: &[usize],
    count: &[usize],
) -> hdf5::Result<(hdf5::Datatype, [hdf5::Dataspace; 2])> {
    let ranges: Vec<SliceOrIndex> = start.iter().zip(count).map(|(s, n)| (*s..s + n).into()).collect();
    let spaces = [dataset.space()?.select(hdf5::Hyperslab::from(ranges))?, hdf5::Dataspace::try_new(count)?];
    Ok((hdf5::Datatype::from_descriptor(&descriptor(element))?, spaces))
}

/// Reads the box at `start` of `count` elements along each axis, stored as `element`, into `out` of that many elements.
pub(super) fn read(dataset: &hdf5::Dataset, element: DType, start: &[usize], count: &[usize], out: &mut [u8]) -> hdf5::Result<()> {
    let (memory_type, [file_space, memory_space]) = spaces(dataset, element, start, count)?;
    assert_eq!(out.len(), count.iter().product::<usize>() * memory_type.size());
    hdf5::sync::sync(|| {
        // SAFETY: all handles are open and the library's lock is held. `out` holds exactly the bytes of the elements that
        // `memory_space` describes, of the type `memory_type`, and any bytes are values of u8.
        let code =
            unsafe { H5Dread(dataset.id(), memory_type.id(), memory_space.id(), file_space.id(), H5P_DEFAULT, out.as_mut_ptr().cast()) };
        hdf5::h5check(code).map(|_| ())
    })
}

/// Writes `data` into the box at `start` of `count` elements along each axis.
pub(crate) fn write<T: Number>(dataset: &hdf5::Dataset, start: &[usize], count: &[usize], data: &[T]) -> hdf5::Result<()> {
    let (memory_type, [file_space, memory_space]) = spaces(dataset, T::DTYPE, start, count)?;
    assert_eq!(data.len(), count.iter().product::<usize>());
    hdf5::sync::sync(|| {
        // SAFETY: as in `read`; `data` holds numbers of the type `memory_type` and is read only.
        let code =
            unsafe { H5Dwrite(dataset.id(), memory_type.id(), memory_space.id(), file_space.id(), H5P_DEFAULT, data.as_ptr().cast()) };
        hdf5::h5check(code).map(|_| ())
    })
}

/// Makes the contiguous dataset `name` of `extent` numbers.
pub(crate) fn create<T: Number>(file: &hdf5::File, name: &str, [d, h, w]: [usize; 3]) -> hdf5::Result<hdf5::Dataset> {
    file.new_dataset_builder().empty_as(descriptor(T::DTYPE)).shape((d, h, w)).create(name)
}
