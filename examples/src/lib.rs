//! The training programs, as a library so that tests run them too.
#![warn(missing_docs)]

pub mod common;
pub mod cosmoflow;
pub mod learner;
pub mod unet3d;

/// The examples of the guide are tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide.md")]
struct Guide;
