//! Volumes out of the blocks of all ranks into one HDF5 file.

use std::fs;
use std::path::{Path, PathBuf};

use burn_spatial::comm::CommError;
use burn_spatial::mesh::{Mesh, MeshAxis};
use hdf5_metno as hdf5;

use crate::block::BlockSpec;
use crate::slab::{self, Number};

/// Why a volume could not be written: the same on every rank.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The file system or HDF5 refuses.
    #[error("rank {rank}: {}, dataset '{dataset}': writing failed: {cause}", path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// The dataset.
        dataset: String,
        /// The rank that could not write.
        rank: usize,
        /// The system's or HDF5's words.
        cause: String,
    },
    /// Ranks could not talk.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Writes a volume of `extent` voxels along depth, height and width, of which every rank holds `block`, its
/// [`BlockSpec::slab`], row-major, as the dataset `dataset` of the new file `path`; one that is there is replaced.
/// Collective.
///
/// Rank 0 makes the file with one contiguous dataset; then the ranks open it one after another, each writes its block
/// and closes it. No rank holds more than its block, and serial HDF5 suffices: only one rank at a time has the file
/// open. Of ranks that hold the same block (other groups of the data axis, axes too thin to split) the first writes.
/// All this happens beside `path`, and is renamed at the end: a file of that name is whole.
///
/// # Errors
/// [`WriteError`], the same on every rank.
///
/// # Panics
/// When `block` has another number of voxels than this rank's part.
pub fn write_volume<T: Number>(path: &Path, dataset: &str, extent: [usize; 3], block: &[T], mesh: &Mesh) -> Result<(), WriteError> {
    let spec = BlockSpec::of(mesh);
    let own = spec.slab(extent);
    assert_eq!(block.len(), own.voxels(), "the block of rank {} in a volume of {extent:?} is {:?}", mesh.rank(), own.extent);
    let splits = spec.splits(extent);
    let first = mesh.coord(MeshAxis::Data) == 0 && (0..3).all(|axis| splits[axis] || spec.coords[axis] == 0);
    let partial = beside(path);
    let turn = |rank: usize, work: &dyn Fn() -> Result<(), String>| {
        let mut cause = Vec::new();
        if mesh.rank() == rank {
            cause = work().err().unwrap_or_default().into_bytes();
        }
        let cause = mesh.world().broadcast(rank, cause)?;
        if cause.is_empty() {
            return Ok(());
        }
        let cause = String::from_utf8_lossy(&cause).into_owned();
        Err(WriteError::Failed { path: path.to_owned(), dataset: dataset.to_owned(), rank, cause })
    };
    let all = || {
        turn(0, &|| create::<T>(&partial, dataset, extent).map_err(|e| e.to_string()))?;
        for rank in 0..mesh.grid().ranks() {
            turn(rank, &|| if first { put(&partial, dataset, own.start, own.extent, block).map_err(|e| e.to_string()) } else { Ok(()) })?;
        }
        turn(0, &|| fs::rename(&partial, path).map_err(|e| e.to_string()))
    };
    let result = all();
    if result.is_err() && mesh.rank() == 0 {
        // The first error is the one to tell.
        let _ = fs::remove_file(&partial);
    }
    result
}

/// Where a file is made before it is whole.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    partial.into()
}

fn create<T: Number>(path: &Path, dataset: &str, [d, h, w]: [usize; 3]) -> hdf5::Result<()> {
    let file = hdf5::File::create(path)?;
    file.new_dataset::<T>().shape((d, h, w)).create(dataset)?;
    file.close()
}

fn put<T: Number>(path: &Path, dataset: &str, start: [usize; 3], extent: [usize; 3], block: &[T]) -> hdf5::Result<()> {
    let file = hdf5::File::open_rw(path)?;
    slab::write(&file.dataset(dataset)?, &start, &extent, block)?;
    file.close()
}
