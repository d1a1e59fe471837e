//! Sets of volumes with the class of each voxel.

use std::path::PathBuf;

use burn::data::dataset::Dataset;
use serde::{Deserialize, Serialize};

use crate::dataset::{Sample, SampleSource, ScratchPool};
use crate::error::DataError;
use crate::rank::GridRank;
use crate::volume::{ChannelAxis, Scratch, Transform, VolumeFile, VolumeShape};

/// How the files of a set are read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SegmentationOptions {
    /// Name of the volume, `(depth, height, width)` or `(channels, depth, height, width)`, int16 or float32.
    pub volume: String,
    /// Name of the classes, `(depth, height, width)`, integers or floats.
    pub segmentation: String,
    /// How many classes there are.
    pub classes: usize,
    /// What voxels that do not count hold.
    pub ignored: Option<i64>,
}

impl Default for SegmentationOptions {
    /// `volume` and `segmentation`, three classes, every voxel counts.
    fn default() -> Self {
        SegmentationOptions { volume: "volume".into(), segmentation: "segmentation".into(), classes: 3, ignored: None }
    }
}

impl SegmentationOptions {
    /// Opens the volume of the file at `path`. `rank` is for messages.
    ///
    /// # Errors
    /// As for [`VolumeFile::open`].
    pub fn open(&self, path: &std::path::Path, rank: usize) -> Result<VolumeFile, DataError> {
        VolumeFile::open(path, &self.volume, ChannelAxis::Optional, rank)
    }

    /// The shape of the volume of the file at `path`, after a look at all but the values of volume and classes.
    ///
    /// # Errors
    /// As for [`VolumeFile::open`] and [`VolumeFile::check_classes`].
    pub fn check(&self, path: &std::path::Path, rank: usize) -> Result<VolumeShape, DataError> {
        let file = self.open(path, rank)?;
        file.check_classes(&self.segmentation)?;
        Ok(file.shape())
    }
}

/// One rank's view of a set of files with a volume and the class of each voxel, both read as this rank's block alone:
/// sample i is its block of file i. Values are as stored.
#[derive(Debug)]
pub struct SegmentationDataset {
    files: Vec<PathBuf>,
    rank: GridRank,
    options: SegmentationOptions,
    shape: VolumeShape,
    scratch: ScratchPool,
}

impl SegmentationDataset {
    /// A set of `files`, of which `rank` reads its blocks. Opens the first file: all others
    /// must have its shape. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when there is no file, or when the first cannot be read.
    pub fn new(files: Vec<PathBuf>, rank: GridRank, options: SegmentationOptions) -> Result<Self, DataError> {
        let first = files.first().ok_or(DataError::EmptySet { rank: rank.rank })?;
        let shape = options.check(first, rank.rank)?;
        Ok(SegmentationDataset { files, rank, options, shape, scratch: ScratchPool::default() })
    }

    /// Channels and extent of every whole volume.
    pub fn shape(&self) -> VolumeShape {
        self.shape
    }

    /// The files, sample by sample.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    fn read(&self, index: usize, scratch: &mut Scratch) -> Result<Sample, DataError> {
        let out_of_range = || DataError::Index { rank: self.rank.rank, index, len: self.files.len() };
        let path = self.files.get(index).ok_or_else(out_of_range)?;
        let file = self.options.open(path, self.rank.rank)?;
        let whole = |shape: VolumeShape| [shape.channels, shape.extent[0], shape.extent[1], shape.extent[2]];
        if file.shape() != self.shape {
            let expected = format!("the shape {:?} of the first file, {}", whole(self.shape), self.files[0].display());
            return Err(DataError::Shape { at: file.at(), expected, shape: whole(file.shape()).to_vec() });
        }
        let slab = self.rank.block(self.shape.extent);
        let classes = file.classes(&self.options.segmentation, slab, self.options.classes, self.options.ignored)?;
        let mut block = Vec::new();
        file.read(slab, Transform::Identity, scratch, &mut block)?;
        let [d, h, w] = slab.extent;
        let shape = [self.shape.channels, d, h, w];
        Ok(Sample { id: index, block, shape, volume: whole(self.shape), classes, ..Sample::default() })
    }
}

impl SampleSource for SegmentationDataset {
    fn try_get(&self, index: usize) -> Result<Sample, DataError> {
        self.scratch.lend(|scratch| self.read(index, scratch))
    }

    fn len(&self) -> usize {
        self.files.len()
    }
}

impl Dataset<Sample> for SegmentationDataset {
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
