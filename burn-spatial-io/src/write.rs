//! Volumes out of the blocks of all ranks into one HDF5 file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use burn_spatial::comm::{Alive, CommError, broadcast_of};
use burn_spatial::mesh::Mesh;
use hdf5_metno as hdf5;

use crate::format;
use crate::rank::GridRank;
use crate::transform::Number;

/// Bytes written at once, about: between them the other ranks hear that this one is alive.
const PART: usize = 64 << 20;

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
    /// The communication failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Writes a volume of `extent` voxels along depth, height and width, of which every rank holds `block`, its
/// [`GridRank::block`], row-major, as the dataset `dataset` of the new file `path`; one that is there is replaced.
/// Collective.
///
/// Rank 0 makes the file with one contiguous dataset; then the ranks open it one after another, each writes its block
/// and closes it. No rank holds more than its block, and serial HDF5 suffices: only one rank at a time has the file
/// open. Of ranks that hold the same block (other groups of the data axis, axes too thin to split) the first writes.
/// All this happens beside `path`, and is renamed at the end: a file of that name is whole. A rank whose turn takes long is
/// waited for as long as it gets on.
///
/// # Errors
/// [`WriteError`], the same on every rank.
///
/// # Panics
/// When `block` has another number of voxels than this rank's part.
pub fn write_volume<T: Number>(path: &Path, dataset: &str, extent: [usize; 3], block: &[T], mesh: &Mesh) -> Result<(), WriteError> {
    let rank = GridRank::of(mesh);
    let own = rank.block(extent);
    assert_eq!(block.len(), own.voxels(), "the block of rank {} in a volume of {extent:?} is {:?}", mesh.rank(), own.extent);
    let first = rank.is_first_with(extent);
    let partial = beside(path);
    let turn = |rank: usize, work: &dyn Fn(&mut Alive<'_>) -> Result<(), String>| {
        let cause = broadcast_of(&**mesh.world(), rank, |alive| work(alive).err().unwrap_or_default().into_bytes())?;
        if cause.is_empty() {
            return Ok(());
        }
        let cause = String::from_utf8_lossy(&cause).into_owned();
        Err(WriteError::Failed { path: path.to_owned(), dataset: dataset.to_owned(), rank, cause })
    };
    let all = || {
        turn(0, &|_| create::<T>(&partial, dataset, extent).map_err(|e| e.to_string()))?;
        for rank in 0..mesh.grid().ranks() {
            turn(rank, &|alive| match first {
                true => put(&partial, dataset, own.start, own.extent, block, alive),
                false => Ok(()),
            })?;
        }
        turn(0, &|_| publish(&partial, path).map_err(|e| e.to_string()))
    };
    let result = all();
    if result.is_err() && mesh.rank() == 0 {
        // The first error is the one to tell.
        let _ = fs::remove_file(&partial);
    }
    result
}

/// Where a file is made before it is whole.
fn beside(path: &Path) -> PathBuf {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    partial.into()
}

/// Lets `write` write a file beside `path`, and renames it to that when it is whole and on the disk; what is left of one
/// that failed is removed. `failed` makes the error of what the file system refuses.
///
/// # Errors
/// That of `write`, or what `failed` makes.
pub fn whole_file<E>(path: &Path, write: impl FnOnce(&Path) -> Result<(), E>, failed: impl FnOnce(io::Error) -> E) -> Result<(), E> {
    whole_file_as(&beside(path), path, write, failed)
}

/// [`whole_file`], made as `partial`: for writers that look at the end of the name. In the folder of `path`.
///
/// # Errors
/// As for [`whole_file`].
pub fn whole_file_as<E>(
    partial: &Path,
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), E>,
    failed: impl FnOnce(io::Error) -> E,
) -> Result<(), E> {
    let result = write(partial).and_then(|()| publish(partial, path).map_err(failed));
    if result.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(partial);
    }
    result
}

/// Renames a file that is complete. Some file systems tell only now that it does not fit. The name is on the disk, too,
/// when this returns.
fn publish(partial: &Path, path: &Path) -> io::Result<()> {
    fs::File::open(partial)?.sync_all()?;
    fs::rename(partial, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all() {
        // The file system keeps folders by ways of its own.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        result => result,
    }
}

/// Lets `write` write into `file`, and closes it; `write` returns its datasets. HDF5 writes small ones only when they are
/// closed, where the handle's drop ignores a full disk: the flush, while they are open, does not.
pub(crate) fn fill<T>(file: hdf5::File, write: impl FnOnce(&hdf5::File) -> hdf5::Result<T>) -> hdf5::Result<()> {
    let datasets = write(&file)?;
    file.flush()?;
    drop(datasets);
    file.close()
}

fn create<T: Number>(path: &Path, dataset: &str, extent: [usize; 3]) -> hdf5::Result<()> {
    let file = hdf5::File::create(path)?;
    fill(file, |file| format::create::<T>(file, dataset, extent))
}

/// Writes a block in parts of some planes, with a sign of life after each.
fn put<T: Number>(
    path: &Path,
    dataset: &str,
    [first, row, column]: [usize; 3],
    [_, h, w]: [usize; 3],
    block: &[T],
    alive: &mut Alive<'_>,
) -> Result<(), String> {
    let planes = (PART / (h * w * size_of::<T>()).max(1)).max(1);
    let mut ended = Ok(());
    let file = hdf5::File::open_rw(path).map_err(|e| e.to_string())?;
    let written = fill(file, |file| {
        let data = file.dataset(dataset)?;
        for (i, part) in block.chunks((planes * h * w).max(1)).enumerate() {
            format::write(&data, &[first + i * planes, row, column], &[part.len() / (h * w), h, w], part)?;
            ended = alive.beat();
            if ended.is_err() {
                break;
            }
        }
        Ok(data)
    });
    written.map_err(|e| e.to_string()).and(ended.map_err(|e| e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let names = || fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
        let half = |partial: &Path| fs::write(partial, "half").and_then(|()| Err(io::Error::other("no space")));
        assert_eq!(whole_file(&path, half, |e| e).unwrap_err().to_string(), "no space");
        assert!(names().is_empty(), "{:?}", names());
        whole_file(&path, |partial| fs::write(partial, "whole"), |e| e).unwrap();
        assert!(whole_file(&path, half, |e| e).is_err());
        assert_eq!((fs::read(&path).unwrap(), names()), (b"whole".to_vec(), vec!["a".into()]));
        let other = folder.path().join("partial.a");
        whole_file_as(&other, &path, |partial| fs::write(partial, "again"), |e| e).unwrap();
        assert_eq!((fs::read(&path).unwrap(), names()), (b"again".to_vec(), vec!["a".into()]));
    }
}
