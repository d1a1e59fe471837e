//! Which files make a set.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{At, DataError};
use crate::random;

/// The files of `folder` that end in `.hdf5` or `.h5`, sorted by name. `rank` is for messages.
///
/// # Errors
/// [`DataError`] when the folder is missing or unreadable, or has no such file.
pub fn list_files(folder: &Path, rank: usize) -> Result<Vec<PathBuf>, DataError> {
    let at = || At::file(folder, rank);
    let entries = fs::read_dir(folder).and_then(|entries| entries.map(|e| e.map(|e| e.path())).collect::<Result<Vec<_>, _>>());
    let mut files = entries.map_err(|e| match e.kind() {
        ErrorKind::NotFound => DataError::MissingFolder { at: at() },
        _ => DataError::Unreadable { at: at(), cause: e.to_string() },
    })?;
    files.retain(|path| path.extension().is_some_and(|end| end == "hdf5" || end == "h5"));
    files.sort();
    if files.is_empty() { Err(DataError::NoFiles { at: at() }) } else { Ok(files) }
}

/// The files `names` of `folder`, in the order given: an explicit training or test set. `rank` is for messages.
///
/// # Errors
/// [`DataError::Missing`] for the first name that is no file.
pub fn pick_files(folder: &Path, names: &[impl AsRef<Path>], rank: usize) -> Result<Vec<PathBuf>, DataError> {
    let pick = |name: &Path| {
        let path = folder.join(name);
        if path.is_file() { Ok(path) } else { Err(DataError::Missing { at: At::file(&path, rank) }) }
    };
    names.iter().map(|name| pick(name.as_ref())).collect()
}

/// Splits `files` at random into a training and a test set, each in the order of `files`. The test set gets
/// `test_fraction` of them, rounded; the choice depends on the number of files and the seed alone.
pub fn split_files(files: Vec<PathBuf>, test_fraction: f64, seed: u64) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let tests = (files.len() as f64 * test_fraction.clamp(0.0, 1.0)).round() as usize;
    let mut is_test = vec![false; files.len()];
    let order = random::permutation(files.len(), &mut random::stream(seed, b"split\0\0\0", 0));
    order[..tests].iter().for_each(|i| is_test[*i] = true);
    let mut marks = is_test.into_iter();
    let (test, train) = files.into_iter().partition(|_| marks.next() == Some(true));
    (train, test)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_is_whole_and_repeatable() {
        let files: Vec<PathBuf> = (0..20).map(|i| format!("{i:02}.h5").into()).collect();
        let (train, test) = split_files(files.clone(), 0.25, 3);
        assert_eq!((train.len(), test.len()), (15, 5));
        assert!(train.is_sorted() && test.is_sorted());
        let mut all = [train.clone(), test.clone()].concat();
        all.sort();
        assert_eq!(all, files);
        assert_eq!(split_files(files.clone(), 0.25, 3), (train, test.clone()));
        assert_ne!(split_files(files.clone(), 0.25, 4).1, test);
        assert_eq!(split_files(files, 0.0, 3).1.len(), 0);
    }

    #[test]
    fn folders_are_listed_by_name() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(list_files(folder.path(), 0), Err(DataError::NoFiles { .. })));
        for name in ["b.h5", "a.hdf5", "c.hdf5", "notes.txt", "d.hdf5.partial"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let names: Vec<_> = list_files(folder.path(), 0).unwrap().iter().map(|p| p.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["a.hdf5", "b.h5", "c.hdf5"]);
        assert!(matches!(list_files(&folder.path().join("x"), 0), Err(DataError::MissingFolder { .. })));
        assert_eq!(pick_files(folder.path(), &["c.hdf5", "b.h5"], 0).unwrap().len(), 2);
        let error = pick_files(folder.path(), &["c.hdf5", "x.h5"], 5).unwrap_err().to_string();
        assert!(error.contains("x.h5") && error.contains("rank 5"), "{error}");
    }
}
