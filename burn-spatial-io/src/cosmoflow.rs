//! Sets of CosmoFlow files: volumes with labels.

use serde::{Deserialize, Serialize};

use crate::dataset::{Sample, SampleOptions, VolumeDataset};
use crate::error::DataError;
use crate::format::{ChannelAxis, DataFile, IndexBox, VolumeReader};
use crate::transform::Transform;

/// Samples are volumes with labels, which all ranks read whole.
pub type CosmoFlowDataset = VolumeDataset<CosmoFlowOptions>;

/// How the files of a set are read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CosmoFlowOptions {
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

impl Default for CosmoFlowOptions {
    /// `full` and `unitPar`, counts as `ln(1 + x)`, any shape.
    fn default() -> Self {
        CosmoFlowOptions {
            volume: "full".into(),
            labels: "unitPar".into(),
            channels: ChannelAxis::Auto,
            transform: Transform::Log1p,
            cubic: false,
        }
    }
}

impl SampleOptions for CosmoFlowOptions {
    fn volume(&self, file: &dyn DataFile) -> Result<Box<dyn VolumeReader>, DataError> {
        file.volume(&self.volume, self.channels)
    }

    fn transform(&self) -> Transform {
        self.transform
    }

    fn beside(&self) -> &str {
        &self.labels
    }

    fn check_beside(&self, file: &dyn DataFile, volume: &dyn VolumeReader) -> Result<usize, DataError> {
        let shape = volume.shape();
        let [d, h, w] = shape.extent;
        if self.cubic && (d != h || h != w) {
            let expected = "equal extents along depth, height and width".into();
            return Err(DataError::Shape { at: volume.at(), expected, shape: shape.dims().to_vec() });
        }
        Ok(file.labels(&self.labels)?.len())
    }

    fn read_beside(
        &self,
        file: &dyn DataFile,
        _: &dyn VolumeReader,
        _: IndexBox,
        _: &mut Vec<u8>,
        sample: &mut Sample,
    ) -> Result<(), DataError> {
        sample.labels = file.labels(&self.labels)?;
        Ok(())
    }
}
