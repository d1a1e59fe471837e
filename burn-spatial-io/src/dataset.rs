//! Sets of volume files as Burn datasets.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use burn::data::dataset::Dataset;

use crate::error::DataError;
use crate::format::{DataFile, IndexBox, VolumeReader, VolumeShape, open_file};
use crate::rank::GridRank;
use crate::transform::Transform;

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
    /// The labels, the same on all ranks; empty where the set has none.
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
    ///
    /// # Errors
    /// [`DataError`] when there is no such sample or it cannot be read.
    fn try_get(&self, index: usize) -> Result<Sample, DataError>;

    /// How many samples there are, the same on all ranks.
    fn len(&self) -> usize;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What the samples of a [`VolumeDataset`] are: which volume of a file, and what is read beside it.
pub trait SampleOptions: Send + Sync {
    /// Opens the file at `path`, whatever its format. `rank` is for messages.
    ///
    /// # Errors
    /// As for [`open_file`].
    fn open(&self, path: &Path, rank: usize) -> Result<Box<dyn DataFile>, DataError> {
        open_file(path, rank)
    }

    /// Opens the volume in `file`.
    ///
    /// # Errors
    /// As for [`DataFile::volume`].
    fn volume(&self, file: &dyn DataFile) -> Result<Box<dyn VolumeReader>, DataError>;

    /// What is done to the voxels.
    fn transform(&self) -> Transform;

    /// The name of what is read beside the volume.
    fn beside(&self) -> &str;

    /// Checks the volume and what is beside it, and returns how many labels there are.
    ///
    /// # Errors
    /// [`DataError`] when the file makes no sample.
    fn check_beside(&self, file: &dyn DataFile, volume: &dyn VolumeReader) -> Result<usize, DataError>;

    /// Reads into `sample` what belongs to the voxels `bounds` of `volume`: [`Sample::labels`] or [`Sample::classes`].
    ///
    /// # Errors
    /// [`DataError`] when it cannot be read.
    fn read_beside(
        &self,
        file: &dyn DataFile,
        volume: &dyn VolumeReader,
        bounds: IndexBox,
        scratch: &mut Vec<u8>,
        sample: &mut Sample,
    ) -> Result<(), DataError>;
}

/// One rank's view of a set of volume files: sample i is its block of file i, with what `S` says beside it.
#[derive(Debug)]
pub struct VolumeDataset<S> {
    files: Vec<PathBuf>,
    rank: GridRank,
    options: S,
    shape: VolumeShape,
    labels: usize,
    /// Buffers for elements as stored, which threads take and give back.
    scratch: Mutex<Vec<Vec<u8>>>,
}

impl<S: SampleOptions> VolumeDataset<S> {
    /// A set of `files`, of which `rank` reads its blocks. Opens the first file: all others must have its shape and its
    /// number of labels. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when there is no file, or when the first makes no sample.
    pub fn new(files: Vec<PathBuf>, rank: GridRank, options: S) -> Result<Self, DataError> {
        let first = files.first().ok_or(DataError::EmptySet { rank: rank.rank })?;
        let file = options.open(first, rank.rank)?;
        let volume = options.volume(&*file)?;
        let (shape, labels) = (volume.shape(), options.check_beside(&*file, &*volume)?);
        Ok(VolumeDataset { files, rank, options, shape, labels, scratch: Mutex::default() })
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

    fn read(&self, index: usize, scratch: &mut Vec<u8>) -> Result<Sample, DataError> {
        let out_of_range = || DataError::Index { rank: self.rank.rank, index, len: self.files.len() };
        let path = self.files.get(index).ok_or_else(out_of_range)?;
        let file = self.options.open(path, self.rank.rank)?;
        let volume = self.options.volume(&*file)?;
        let (shape, first) = (volume.shape(), self.files[0].display());
        if shape != self.shape {
            let expected = format!("the shape {:?} of the first file, {first}", self.shape.dims());
            return Err(DataError::Shape { at: volume.at(), expected, shape: shape.dims().to_vec() });
        }
        let bounds = self.rank.block(shape.extent);
        let own = VolumeShape { extent: bounds.extent, ..shape };
        let mut sample = Sample { id: index, shape: own.dims(), volume: shape.dims(), ..Sample::default() };
        self.options.read_beside(&*file, &*volume, bounds, scratch, &mut sample)?;
        if sample.labels.len() != self.labels {
            let expected = format!("{} labels as in the first file, {first}", self.labels);
            let at = file.at(self.options.beside());
            return Err(DataError::Shape { at, expected, shape: vec![sample.labels.len()] });
        }
        volume.read(bounds, self.options.transform(), scratch, &mut sample.block)?;
        Ok(sample)
    }
}

impl<S: SampleOptions> SampleSource for VolumeDataset<S> {
    fn try_get(&self, index: usize) -> Result<Sample, DataError> {
        let pool = || self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = pool().pop().unwrap_or_default();
        let sample = self.read(index, &mut scratch);
        pool().push(scratch);
        sample
    }

    fn len(&self) -> usize {
        self.files.len()
    }
}

impl<S: SampleOptions> Dataset<Sample> for VolumeDataset<S> {
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

#[cfg(test)]
mod tests {
    use burn_spatial::mesh::Grid;

    use super::*;
    use crate::memory::{Memory, MemoryFile};
    use crate::{CosmoFlowOptions, SegmentationOptions};

    /// Files in memory, read as `S` says. Those whose names end in `long` have two labels, those in `thin` fewer planes.
    struct InMemory<S>(S);

    impl<S: SampleOptions> SampleOptions for InMemory<S> {
        fn open(&self, path: &Path, _: usize) -> Result<Box<dyn DataFile>, DataError> {
            let planes = if path.ends_with("thin") { 4 } else { 5 };
            let counts: Vec<u16> = (0..planes * 2).collect();
            let classes: Vec<u8> = counts.iter().map(|count| (count % 3) as u8).collect();
            let labels = if path.ends_with("long") { vec![0.5, 1.0] } else { vec![0.25] };
            let extents = [1, usize::from(planes), 1, 2];
            let (volume, classes) = (Memory::new(extents, false, &counts), Memory::new(extents, false, &classes));
            Ok(Box::new(MemoryFile { volume, classes, labels }))
        }

        fn volume(&self, file: &dyn DataFile) -> Result<Box<dyn VolumeReader>, DataError> {
            self.0.volume(file)
        }

        fn transform(&self) -> Transform {
            self.0.transform()
        }

        fn beside(&self) -> &str {
            self.0.beside()
        }

        fn check_beside(&self, file: &dyn DataFile, volume: &dyn VolumeReader) -> Result<usize, DataError> {
            self.0.check_beside(file, volume)
        }

        fn read_beside(
            &self,
            file: &dyn DataFile,
            volume: &dyn VolumeReader,
            bounds: IndexBox,
            scratch: &mut Vec<u8>,
            sample: &mut Sample,
        ) -> Result<(), DataError> {
            self.0.read_beside(file, volume, bounds, scratch, sample)
        }
    }

    fn dataset<S: SampleOptions>(options: S) -> VolumeDataset<InMemory<S>> {
        let files = ["a", "long", "thin"].map(PathBuf::from).into();
        // The second of two ranks along depth: planes 3 and 4.
        VolumeDataset::new(files, GridRank { grid: Grid([1, 2, 1, 1]), rank: 1 }, InMemory(options)).unwrap()
    }

    #[test]
    fn samples_of_any_format_have_labels_or_classes() {
        let labelled = dataset(CosmoFlowOptions { transform: Transform::Identity, ..CosmoFlowOptions::default() });
        let sample = labelled.try_get(0).unwrap();
        assert_eq!((sample.shape, sample.volume, labelled.label_count()), ([1, 2, 1, 2], [1, 5, 1, 2], 1));
        assert_eq!((sample.block, sample.labels, sample.classes), (vec![6.0, 7.0, 8.0, 9.0], vec![0.25], vec![]));
        let error = labelled.try_get(1).unwrap_err().to_string();
        assert!(error.contains("dataset 'unitPar': expected 1 labels as in the first file, a, found the shape [2]"), "{error}");
        let error = labelled.try_get(2).unwrap_err().to_string();
        assert!(error.contains("expected the shape [1, 5, 1, 2] of the first file, a, found the shape [1, 4, 1, 2]"), "{error}");

        let segmented = dataset(SegmentationOptions::default());
        let sample = Dataset::get(&segmented, 1).unwrap();
        assert_eq!((sample.block, sample.labels, sample.classes), (vec![6.0, 7.0, 8.0, 9.0], vec![], vec![0, 1, 2, 0]));
        assert!(Dataset::get(&segmented, 3).is_none());
        assert_eq!(segmented.try_get(3).unwrap_err(), DataError::Index { rank: 1, index: 3, len: 3 });
    }
}
