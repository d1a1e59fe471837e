//! Benchmarks: `bench --help`.

use std::process::ExitCode;

use burn_spatial::comm::Comm;
use burn_spatial_benches::{kernels, step, totals};
use clap::{Parser, Subcommand};

/// As in the training programs.
#[global_allocator]
static BUFFERS: burn_spatial::buffers::Buffers = burn_spatial::buffers::Buffers;

#[derive(Parser)]
#[command(name = "bench", about = "Benchmarks, as ratios of one run", max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// GFLOP/s of each kernel beside a matrix product
    Kernels(kernels::Args),
    /// Seconds of a training step, on one process and on two
    Step(step::Args),
    /// One setting of `step`, as JSON
    OneStep(step::OneArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Kernels(args) => kernels::run(&args),
        Command::Step(args) => step::run(&args),
        Command::OneStep(args) => {
            totals::start();
            ranks(|comm| step::one(&args, comm))
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(feature = "mpi")]
fn ranks(program: impl Fn(Comm) -> Result<(), String> + Sync) -> Result<(), String> {
    burn_spatial::launch::mpi(program).map_err(|error| error.to_string())
}

#[cfg(not(feature = "mpi"))]
fn ranks(program: impl Fn(Comm) -> Result<(), String> + Sync) -> Result<(), String> {
    burn_spatial::launch::threads(1, program).map(drop).map_err(|error| error.to_string())
}
