//! Random programs and windows on thread ranks against plain Burn: see `burn_spatial_tests::programs`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    burn_spatial_tests::programs::verify::main(&arguments)
}
