//! Networks for volumes, as Burn modules: plain on a plain backend, split over ranks on `Spatial<B>`.
#![warn(missing_docs)]

pub mod cosmoflow;
pub mod loss;
pub mod metric;
pub mod unet;
pub mod weights;

pub use burn_spatial::optim::Adam;
pub use cosmoflow::{CosmoFlow, CosmoFlowConfig, CosmoFlowRecord};
pub use unet::{ConvBlock, UNet3d, UNet3dConfig, UNet3dRecord};
