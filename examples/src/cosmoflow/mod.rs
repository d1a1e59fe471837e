//! CosmoFlow: training, evaluation, synthetic universes and dry runs, under `mpirun` or on threads.

pub mod augment;
pub mod cli;
pub mod data;
pub mod evaluate;
pub mod layout;
pub mod plot;
pub mod synth;
pub mod train;

use std::process::ExitCode;

use clap::Parser;

use crate::common::{self, ranks};
use cli::{Cli, Command};

/// Parses the command line and runs it. An error is one line on stderr and exit code 1.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let timeline = match &cli.command {
        Command::Train(args) => args.run.trace.clone(),
        _ => None,
    };
    common::main(timeline.as_deref(), || match cli.command {
        Command::Train(args) => ranks::start(&args.ranks, |rank| train::run(rank, &args)),
        Command::Eval(args) => ranks::start(&args.ranks, |rank| evaluate::run(rank, &args)),
        Command::CompareRanks(args) => ranks::start(&args.ranks, |rank| train::compare_ranks(rank, &args)),
        Command::Synth(args) => synth::run(&args),
        Command::Layout(args) => layout::run(&args),
    })
}
