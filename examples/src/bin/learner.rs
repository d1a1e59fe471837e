//! Burn's own `Learner` on volumes split over ranks: `learner --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    burn_spatial_examples::learner::main()
}
