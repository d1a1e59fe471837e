//! Everything a checkout is used for with one command: `cargo xtask setup | demo | test | verify | bench`.
//!
//! It runs before anything else is there, so it depends on next to nothing and compiles in seconds.

mod bench;
mod cargo;
mod demo;
mod job;
mod setup;
mod test;
mod verify;

use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  setup             looks for MPI, HDF5, libclang and pkg-config, and installs what is missing where it may
  demo [cosmoflow | unet3d] [--out DIR]
                    makes small volumes, trains on 4 ranks, shows how well the network predicts, and that the number of
                    ranks does not matter; results go to DIR (demo-out): CosmoFlow, or the 3D U-Net
  bench (kernels | step) [OPTIONS]
                    measures kernels beside a matrix product, or training steps on one process and on two: with --help
                    the options, with --json FILE rows for programs
  test              runs all tests: cargo's, then the programs under mpirun on 1, 2, 4 and 8 ranks
  verify [--programs N] [--windows N] [--minutes N] [--seed N] [--failures N] [--jobs N]
                    runs random programs and windows (100,000 each) on 1 to 8 thread ranks against plain Burn, for so many
                    minutes at most, and makes small what fails";

/// An error for the one who typed the command.
type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["setup"] => setup::run().map(|environment| {
            environment.print();
            true
        }),
        ["demo"] => demo::run("cosmoflow", Path::new("demo-out")),
        ["demo", "--out", out] => demo::run("cosmoflow", Path::new(out)),
        ["demo", name] => demo::run(name, Path::new("demo-out")),
        ["demo", name, "--out", out] => demo::run(name, Path::new(out)),
        ["bench", what @ ("kernels" | "step"), ref options @ ..] => bench::run(&[&[what], options].concat()),
        ["test"] => test::run(),
        ["verify", ref options @ ..] => verify::run(options),
        ["help" | "-h" | "--help"] => {
            println!("{USAGE}");
            Ok(true)
        }
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
