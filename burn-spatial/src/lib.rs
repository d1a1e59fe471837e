//! Hybrid-parallel training of large 3D CNNs for Burn: a backend decorator whose tensors keep their global shape
//! while every rank stores its block.
//!
//! `Autodiff<Spatial<B>>` takes the place of `Autodiff<B>`; model code stays generic over `B: Backend` and unchanged. A
//! program gives the same numbers on any grid of ranks, up to rounding.
//!
//! ```
//! use burn::backend::{Autodiff, Flex};
//! use burn::nn::BatchNormConfig;
//! use burn::tensor::Tensor;
//! use burn_spatial::mesh::MeshError;
//! use burn_spatial::{Grid, Mesh, Spatial, SpatialDevice, launch, place};
//!
//! type B = Autodiff<Spatial<Flex>>;
//!
//! // Two ranks, threads of this process; `launch::mpi` runs the ranks that mpirun started.
//! let maxima = launch::threads(2, |comm| {
//!     let mesh = Mesh::new(comm, Grid([1, 2, 1, 1]))?; // data x depth x height x width
//!     let device = SpatialDevice::new(Default::default(), mesh)?;
//!     let volume = Tensor::<B, 5>::ones([1, 4, 9, 8, 8], &device);
//!     let volume = place::split(volume); // the depth of 9 as 5 and 4
//!     let x = BatchNormConfig::new(4).init(&device).forward(volume); // statistics of all 9 planes
//!     assert_eq!(x.dims(), [1, 4, 9, 8, 8]);
//!     Ok::<f32, MeshError>(x.abs().max().into_scalar())
//! });
//! assert_eq!(maxima.unwrap(), [0.0, 0.0]);
//! ```
//!
//! # Where to find what
//!
//! - [`mesh`]: the process grid; [`device`]: a rank's device, its counters and strict mode; [`launch`]: starting ranks and
//!   ending them together; [`comm`]: communicators over MPI (feature `mpi`) and threads;
//! - [`layout`]: how a global tensor lies on the grid; [`place`]: laying tensors out, and asking how they lie;
//! - [`nn`]: what Burn lacks: 3D pools and interpolation, convolutions with asymmetric, periodic, mirrored and replicated
//!   padding;
//! - [`optim`]: gradients as optimizers and norms need them;
//! - [`window`]: which inputs an output reads; [`transfer`]: who sends which box to whom; [`kernels`]: local convolutions, pools and interpolations;
//! - [`stats`]: what a rank has counted.
//!
//! # What is collective
//!
//! Operations on split tensors, and reading them, are: all ranks run the same program in the same order. Operations on full
//! tensors, asking for a layout, and dropping a tensor are local.
//!
//! # Features
//!
//! - `mpi`: ranks started by `mpirun` or `srun`; needs an MPI library and libclang to build;
//! - `cuda`: `Spatial<Cuda>`; builds without a CUDA toolkit.
#![warn(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]
#![warn(unsafe_op_in_unsafe_fn)]

mod adam;
pub mod backend;
pub mod buffers;
pub mod comm;
mod copies;
pub mod device;
mod gradients;
pub mod kernels;
pub mod kind;
pub mod launch;
pub mod layout;
pub mod mesh;
mod mix;
pub mod nn;
mod ops;
pub mod optim;
pub mod place;
mod random;
mod seat;
mod split_inputs;
pub mod stats;
pub mod tensor;
pub mod trace;
pub mod transfer;
pub mod window;

pub use backend::Spatial;
pub use device::SpatialDevice;
pub use layout::Layout;
pub use mesh::{Grid, Mesh};
pub use place::SpatialBackend;

/// The example of the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
