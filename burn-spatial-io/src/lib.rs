//! Input for [`burn_spatial`]: every rank reads its own block of every sample.
//!
//! - [`VolumeFile`] reads blocks out of HDF5 volumes (serial HDF5: each rank opens the file by itself);
//! - [`CosmoFlowDataset`] makes a set of such files a Burn dataset, [`CosmoFlowBatcher`] makes tensors of the samples;
//! - [`EpochPlan`] says which samples a rank reads at which step, [`Loader`] reads them ahead of need, in order;
//! - [`synth`] makes small universes to train on.
#![warn(missing_docs)]

mod batch;
mod block;
mod dataset;
mod error;
mod loader;
mod plan;
mod random;
pub mod synth;
mod volume;

pub use batch::{CosmoFlowBatch, CosmoFlowBatcher, Place, PlaceWhole};
pub use block::BlockSpec;
pub use dataset::{CosmoFlowDataset, DatasetOptions, Sample, SampleSource, list_files, pick_files, split_files};
pub use error::{At, DataError};
pub use loader::{Epoch, Loader, LoaderOptions};
pub use plan::{BatchPart, DataGroup, EpochPlan, IdsError, check_ids};
pub use volume::{ChannelAxis, Element, Hyperslab, Scratch, Transform, VolumeFile, VolumeShape};
