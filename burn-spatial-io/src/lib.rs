//! Input and output for [`burn_spatial`]: every rank reads and writes its own block of every sample.
//!
//! - [`open_file`] opens a file, of which each rank reads index boxes of volumes ([`VolumeReader`]);
//! - [`VolumeDataset`] makes a set of such files a Burn dataset: [`CosmoFlowDataset`] with labels, [`SegmentationDataset`]
//!   with the class of each voxel; [`VolumeBatcher`] makes tensors of the samples;
//! - [`EpochPlan`] says which samples a rank reads at which step, [`Loader`] reads them ahead of need, in order;
//! - [`write_volume`] writes a volume out of the blocks of all ranks;
//! - [`synth`] makes small volumes to train on.
//!
//! Which block of a volume and which samples of a batch a rank reads follows from its [`GridRank`].
#![warn(missing_docs)]

mod batch;
mod cosmoflow;
mod dataset;
mod error;
mod files;
mod format;
mod loader;
#[cfg(test)]
mod memory;
mod plan;
mod random;
mod rank;
mod segmentation;
pub mod synth;
mod transform;
mod write;

pub use batch::{CosmoFlowBatch, Place, PlaceOnMesh, PlaceWhole, SegmentationBatch, VolumeBatcher};
pub use cosmoflow::{CosmoFlowDataset, CosmoFlowOptions};
pub use dataset::{Sample, SampleOptions, SampleSource, VolumeDataset};
pub use error::{At, DataError};
pub use files::{list_files, pick_files, split_files};
pub use format::{ChannelAxis, DataFile, IndexBox, VolumeReader, VolumeShape, open_file};
pub use loader::{Epoch, Loader, LoaderOptions};
pub use plan::{BatchPart, EpochPlan, IdsError, check_ids};
pub use rank::GridRank;
pub use segmentation::{SegmentationDataset, SegmentationOptions};
pub use transform::{Number, Transform};
pub use write::{WriteError, whole_file, whole_file_as, write_volume};
