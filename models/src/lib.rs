//! Networks for volumes, as Burn modules: plain on a plain backend, split over ranks on `Spatial<B>`.
#![warn(missing_docs)]

mod adam;
pub mod cosmoflow;
pub mod weights;

pub use adam::Adam;
pub use cosmoflow::{CosmoFlow, CosmoFlowConfig, CosmoFlowRecord};
