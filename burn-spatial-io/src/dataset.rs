//! Sets of volume files as Burn datasets.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use burn::data::dataset::Dataset;
use serde::{Deserialize, Serialize};

use crate::error::{At, DataError};
use crate::random;
use crate::rank::GridRank;
use crate::volume::{ChannelAxis, Scratch, Transform, VolumeFile, VolumeShape};

/// A rank's block of one sample, with the sample's labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Number of the sample in its set.
    pub id: usize,
    /// The block, row-major `[channels, depth, height, width]`.
    pub block: Vec<f32>,
    /// Shape of the block: channels, depth, height, width.
    pub shape: [usize; 4],
    /// Shape of the whole volume.
    pub volume: [usize; 4],
    /// The labels, the same on all ranks.
    pub labels: Vec<f32>,
    /// The class of each voxel of the block, row-major; empty where the set has none.
    pub classes: Vec<i32>,
    /// Size of the global batch this sample was dealt out of. `None` (all of the batch is on this rank) until
    /// [`crate::Loader`] sets it.
    pub global_batch: Option<usize>,
}

/// Something that [`Sample`]s are read from, on any thread.
pub trait SampleSource: Send + Sync {
    /// Reads this rank's block of sample `index`. Not collective.
    fn try_get(&self, index: usize) -> Result<Sample, DataError>;

    /// How many samples there are, the same on all ranks.
    fn len(&self) -> usize;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How the files of a set are read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DatasetOptions {
    /// Name of the volume.
    pub volume: String,
    /// Name of the labels.
    pub labels: String,
    /// Where the volume's channels are.
    pub channels: ChannelAxis,
    /// What is done to voxels.
    pub transform: Transform,
    /// Whether volumes have to be cubes.
    pub cubic: bool,
}

impl Default for DatasetOptions {
    /// `full` and `unitPar`, counts as `ln(1 + x)`, any shape.
    fn default() -> Self {
        DatasetOptions {
            volume: "full".into(),
            labels: "unitPar".into(),
            channels: ChannelAxis::Auto,
            transform: Transform::Log1p,
            cubic: false,
        }
    }
}

/// One rank's view of a set of CosmoFlow files: sample i is its block of file i.
#[derive(Debug)]
pub struct CosmoFlowDataset {
    files: Vec<PathBuf>,
    rank: GridRank,
    options: DatasetOptions,
    shape: VolumeShape,
    labels: usize,
    scratch: ScratchPool,
}

impl CosmoFlowDataset {
    /// A set of `files`, of which `rank` reads its blocks. Opens the first file: all others
    /// must have its shape and its number of labels. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when there is no file, or when the first cannot be read or has no labels or, with
    /// [`DatasetOptions::cubic`], is no cube.
    pub fn new(files: Vec<PathBuf>, rank: GridRank, options: DatasetOptions) -> Result<Self, DataError> {
        let first = files.first().ok_or(DataError::EmptySet { rank: rank.rank })?;
        let file = VolumeFile::open(first, &options.volume, options.channels, rank.rank)?;
        let shape = file.shape();
        let [d, h, w] = shape.extent;
        if options.cubic && (d != h || h != w) {
            let expected = "equal extents along depth, height and width".into();
            return Err(DataError::Shape { at: file.at(), expected, shape: vec![shape.channels, d, h, w] });
        }
        let labels = file.labels(&options.labels)?.len();
        Ok(CosmoFlowDataset { files, rank, options, shape, labels, scratch: ScratchPool::default() })
    }

    /// Channels and extent of every whole volume.
    pub fn shape(&self) -> VolumeShape {
        self.shape
    }

    /// How many labels a sample has.
    pub fn label_count(&self) -> usize {
        self.labels
    }

    /// The files, sample by sample.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    fn read(&self, index: usize, scratch: &mut Scratch) -> Result<Sample, DataError> {
        let out_of_range = || DataError::Index { rank: self.rank.rank, index, len: self.files.len() };
        let path = self.files.get(index).ok_or_else(out_of_range)?;
        let file = VolumeFile::open(path, &self.options.volume, self.options.channels, self.rank.rank)?;
        let whole = |shape: VolumeShape| [shape.channels, shape.extent[0], shape.extent[1], shape.extent[2]];
        if file.shape() != self.shape {
            let expected = format!("the shape {:?} of the first file, {}", whole(self.shape), self.files[0].display());
            return Err(DataError::Shape { at: file.at(), expected, shape: whole(file.shape()).to_vec() });
        }
        let labels = file.labels(&self.options.labels)?;
        if labels.len() != self.labels {
            let at = At::dataset(path, &self.options.labels, self.rank.rank);
            let expected = format!("{} labels as in the first file, {}", self.labels, self.files[0].display());
            return Err(DataError::Shape { at, expected, shape: vec![labels.len()] });
        }
        let slab = self.rank.block(self.shape.extent);
        let mut block = Vec::new();
        file.read(slab, self.options.transform, scratch, &mut block)?;
        let [d, h, w] = slab.extent;
        let shape = [self.shape.channels, d, h, w];
        Ok(Sample { id: index, block, shape, volume: whole(self.shape), labels, classes: Vec::new(), global_batch: None })
    }
}

/// Buffers that threads take and give back.
#[derive(Debug, Default)]
pub(crate) struct ScratchPool(Mutex<Vec<Scratch>>);

impl ScratchPool {
    /// Lends one to `work`.
    pub(crate) fn lend<T>(&self, work: impl FnOnce(&mut Scratch) -> T) -> T {
        let pool = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = pool().pop().unwrap_or_default();
        let result = work(&mut scratch);
        pool().push(scratch);
        result
    }
}

impl SampleSource for CosmoFlowDataset {
    fn try_get(&self, index: usize) -> Result<Sample, DataError> {
        self.scratch.lend(|scratch| self.read(index, scratch))
    }

    fn len(&self) -> usize {
        self.files.len()
    }
}

impl Dataset<Sample> for CosmoFlowDataset {
    /// Sample `index`, `None` past the end.
    ///
    /// # Panics
    /// With the message of [`DataError`] when the sample cannot be read: `None` would end the epoch in silence.
    /// [`SampleSource::try_get`] returns the error instead.
    fn get(&self, index: usize) -> Option<Sample> {
        (index < self.files.len()).then(|| self.try_get(index).unwrap_or_else(|error| panic!("{error}")))
    }

    fn len(&self) -> usize {
        self.files.len()
    }
}

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
