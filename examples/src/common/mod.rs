//! What the programs share: ranks, data on the grid, training, checkpoints, reports.

pub mod checkpoint;
pub mod cli;
pub mod compare;
pub mod data;
pub mod error;
pub mod plot;
pub mod ranks;
pub mod report;
pub mod training;

use std::process::ExitCode;

use burn::backend::{Autodiff, Flex};
use burn_spatial::Spatial;

pub use error::Error;

/// The backend without gradients.
pub type Inner = Spatial<Flex>;
/// The backend that trains.
pub type Backend = Autodiff<Inner>;
/// Where a rank computes.
pub type Device = burn::tensor::Device<Backend>;

/// Runs a program. An error is one line on stderr and exit code 1.
pub fn main(program: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing_subscriber::filter::LevelFilter::WARN).init();
    match program() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
