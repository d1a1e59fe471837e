//! The training programs, as a library so that tests run them too.
#![warn(missing_docs)]

pub mod common;
pub mod cosmoflow;
pub mod unet3d;
