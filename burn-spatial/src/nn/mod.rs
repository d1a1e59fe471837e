//! Modules that Burn lacks, for the inner backends, `Spatial<B>` and `Autodiff` of either.
//!
//! Burn 0.21 has no 3D pooling, and its convolutions refuse asymmetric and periodic padding. The modules here have
//! both; they run on any [`WindowBackend`].

mod autodiff;
mod conv;
pub mod plain;
mod pool;
mod window;

pub use conv::{PaddedConv3d, PaddedConv3dConfig, PaddedConv3dRecord, Padding3d, padded_conv3d};
pub use pool::{AvgPool3d, AvgPool3dConfig, MaxPool3d, MaxPool3dConfig, avg_pool3d, max_pool3d};
pub use window::{ConvSpec, PaddingMode, PoolSpec, SpecError, WindowBackend, same_padding};
