//! Hybrid-parallel training of large 3D CNNs for Burn: a backend decorator whose tensors keep their global shape
//! while every rank stores its block.
#![warn(missing_docs)]

pub mod comm;
pub mod kernels;
pub mod launch;
pub mod mesh;
pub mod nn;
