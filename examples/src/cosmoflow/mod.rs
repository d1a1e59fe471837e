//! CosmoFlow: training, evaluation, synthetic universes and dry runs, under `mpirun` or on threads.

pub mod augment;
pub mod checkpoint;
pub mod cli;
pub mod compare;
pub mod data;
pub mod error;
pub mod evaluate;
pub mod layout;
pub mod plot;
pub mod ranks;
pub mod report;
pub mod synth;
pub mod train;

use std::process::ExitCode;

use burn::backend::{Autodiff, Flex};
use burn_spatial::Spatial;
use clap::Parser;

use cli::{Cli, Command};
pub use error::Error;

/// The backend without gradients.
pub type Inner = Spatial<Flex>;
/// The backend that trains.
pub type Backend = Autodiff<Inner>;

/// Parses the command line and runs it. An error is one line on stderr and exit code 1.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing_subscriber::filter::LevelFilter::WARN).init();
    let result = match cli.command {
        Command::Train(args) => ranks::start(&args.ranks, |rank| train::run(rank, &args)),
        Command::Eval(args) => ranks::start(&args.ranks, |rank| evaluate::run(rank, &args)),
        Command::CompareRanks(args) => ranks::start(&args.ranks, |rank| compare::run(rank, &args)),
        Command::Synth(args) => synth::run(&args),
        Command::Layout(args) => layout::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
