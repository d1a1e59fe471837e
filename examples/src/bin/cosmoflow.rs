//! Trains CosmoFlow on volumes split over ranks: `cosmoflow --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    burn_spatial_examples::cosmoflow::main()
}
