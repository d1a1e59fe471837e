//! Input and output for [`burn_spatial`]: every rank reads and writes its own block of every sample.
//!
//! - [`VolumeFile`] reads blocks out of HDF5 volumes (serial HDF5: each rank opens the file by itself);
//! - [`CosmoFlowDataset`] and [`SegmentationDataset`] make a set of such files a Burn dataset, [`VolumeBatcher`] makes
//!   tensors of the samples;
//! - [`EpochPlan`] says which samples a rank reads at which step, [`Loader`] reads them ahead of need, in order;
//! - [`write_volume`] writes a volume out of the blocks of all ranks;
//! - [`synth`] makes small volumes to train on.
#![warn(missing_docs)]

mod batch;
mod dataset;
mod error;
mod loader;
mod plan;
mod random;
mod rank;
mod segmentation;
mod slab;
pub mod synth;
mod volume;
mod write;

pub use batch::{CosmoFlowBatch, Place, PlaceOnMesh, PlaceWhole, SegmentationBatch, VolumeBatcher};
pub use dataset::{CosmoFlowDataset, DatasetOptions, Sample, SampleSource, list_files, pick_files, split_files};
pub use error::{At, DataError};
pub use loader::{Epoch, Loader, LoaderOptions};
pub use plan::{BatchPart, EpochPlan, IdsError, check_ids};
pub use rank::GridRank;
pub use segmentation::{SegmentationDataset, SegmentationOptions};
pub use slab::Number;
pub use volume::{ChannelAxis, Element, IndexBox, Scratch, Transform, VolumeFile, VolumeShape};
pub use write::{WriteError, whole_file, whole_file_as, write_volume};
