//! Burn's own `Learner` on volumes split over ranks: `learner --help`.

use std::process::ExitCode;

/// Large tensors are made anew in every step.
#[global_allocator]
static BUFFERS: burn_spatial::buffers::Buffers = burn_spatial::buffers::Buffers;

fn main() -> ExitCode {
    burn_spatial_examples::learner::main()
}
