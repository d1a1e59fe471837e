//! Modules that Burn lacks, for the inner backends, `Spatial<B>` and `Autodiff` of either.
//!
//! Burn 0.21 has no 3D pooling and no 3D interpolation, and its convolutions refuse asymmetric padding and padding with
//! anything but zeros. The modules here have all that; they run on any [`WindowBackend`]. [`batch_norm`] and
//! [`activated_conv3d`] are Burn's with an activation, in few passes over memory.

mod autodiff;
mod conv;
pub(crate) mod norm;
pub mod plain;
mod pool;
mod upsample;
mod window;

pub use crate::window::{ConvSpec, PaddingMode, PoolSpec, SpecError, UpsampleMode, UpsampleSpec, same_padding};
pub use conv::{PaddedConv3d, PaddedConv3dConfig, PaddedConv3dRecord, Padding3d, activated_conv3d, padded_conv3d};
pub use norm::{NormBackend, NormSpec, batch_norm};
pub use pool::{AvgPool3d, AvgPool3dConfig, MaxPool3d, MaxPool3dConfig, avg_pool3d, max_pool3d};
pub use upsample::{Upsample3d, Upsample3dConfig, upsample3d};
pub use window::{WindowBackend, whole_volume};
