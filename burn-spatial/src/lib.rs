//! Hybrid-parallel training of large 3D CNNs for Burn: a backend decorator whose tensors keep their global shape
//! while every rank stores its block.
#![warn(missing_docs)]

pub mod backend;
pub mod comm;
pub mod device;
mod gradients;
pub mod halo;
pub mod kernels;
pub mod kind;
pub mod launch;
pub mod layout;
pub mod mesh;
pub mod nn;
mod ops;
pub mod optim;
pub mod place;
mod random;
mod redistribute;
pub mod stats;
pub mod tensor;

pub use backend::Spatial;
pub use device::SpatialDevice;
pub use layout::Layout;
pub use mesh::{Grid, Mesh};
pub use place::SpatialBackend;
