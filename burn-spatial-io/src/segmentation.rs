//! Sets of volumes with the class of each voxel.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::dataset::{Sample, SampleOptions, VolumeDataset};
use crate::error::DataError;
use crate::format::{ChannelAxis, DataFile, IndexBox, VolumeReader, VolumeShape};
use crate::transform::Transform;

/// Samples are volumes with the class of each voxel, both read as this rank's block alone. Voxels are as stored.
pub type SegmentationDataset = VolumeDataset<SegmentationOptions>;

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
    /// The shape of the volume of the file at `path`, after a check of all but the values of volume and classes. `rank`
    /// is for messages. Not collective.
    ///
    /// # Errors
    /// As for [`crate::open_file`], [`DataFile::volume`] and [`DataFile::segmentation`], and when the classes have
    /// another extent than the volume.
    pub fn check(&self, path: &Path, rank: usize) -> Result<VolumeShape, DataError> {
        let file = self.open(path, rank)?;
        let volume = self.volume(&*file)?;
        self.check_beside(&*file, &*volume)?;
        Ok(volume.shape())
    }

    /// The classes of `volume`.
    fn classes(&self, file: &dyn DataFile, volume: &dyn VolumeReader) -> Result<Box<dyn VolumeReader>, DataError> {
        let classes = file.segmentation(&self.segmentation)?;
        let (extent, found) = (volume.shape().extent, classes.shape().extent);
        if found != extent {
            let expected = format!("the extent {extent:?} of the dataset '{}'", self.volume);
            return Err(DataError::Shape { at: classes.at(), expected, shape: found.to_vec() });
        }
        Ok(classes)
    }
}

impl SampleOptions for SegmentationOptions {
    fn volume(&self, file: &dyn DataFile) -> Result<Box<dyn VolumeReader>, DataError> {
        file.volume(&self.volume, ChannelAxis::Optional)
    }

    fn transform(&self) -> Transform {
        Transform::Identity
    }

    fn beside(&self) -> &str {
        &self.segmentation
    }

    fn check_beside(&self, file: &dyn DataFile, volume: &dyn VolumeReader) -> Result<usize, DataError> {
        self.classes(file, volume).map(|_| 0)
    }

    fn read_beside(
        &self,
        file: &dyn DataFile,
        volume: &dyn VolumeReader,
        bounds: IndexBox,
        scratch: &mut Vec<u8>,
        sample: &mut Sample,
    ) -> Result<(), DataError> {
        sample.classes = self.classes(file, volume)?.read_classes(bounds, self.classes, self.ignored, scratch)?;
        Ok(())
    }
}
