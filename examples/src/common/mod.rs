//! What the programs share: ranks, data on the grid, training, checkpoints, reports.

pub mod checkpoint;
pub mod cli;
pub mod compare;
pub mod data;
pub mod error;
pub mod exact;
mod launcher;
pub mod plot;
pub mod ranks;
pub mod report;
pub mod trace;
pub mod training;

use std::path::Path;
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

/// Runs a program, with a timeline of its ranks in the folder `timeline`. An error is one line on stderr and exit code 1.
pub fn main(timeline: Option<&Path>, program: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    let run = |timeline| {
        let result = program();
        // Writes the rest of it.
        drop(timeline);
        result
    };
    match trace::start(timeline).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // HDF5's words have line breaks.
            eprintln!("error: {}", error.to_string().split('\n').map(str::trim).collect::<Vec<_>>().join(" "));
            ExitCode::FAILURE
        }
    }
}
