//! Everything a checkout is used for with one command: `cargo xtask setup | demo | test`.

mod cargo;
mod demo;
mod job;
mod setup;
mod test;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Sets up, shows and tests burn-spatial")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Looks for MPI, HDF5, libclang and pkg-config, and installs what is missing where it may
    Setup,
    /// Makes small universes, trains on 4 ranks, and shows how well it predicts and that ranks do not matter
    Demo {
        /// Where the results go
        #[arg(long, default_value = "demo-out")]
        out: PathBuf,
    },
    /// Runs all tests: cargo's, then the programs under mpirun on 1, 2, 4 and 8 ranks
    Test,
}

/// An error for the one who typed the command.
type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Setup => setup::run().map(|environment| {
            println!("everything that is needed is there");
            environment.print();
            true
        }),
        Command::Demo { out } => demo::run(&out),
        Command::Test => test::run(),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
