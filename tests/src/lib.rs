//! What is checked across ranks: the same functions run on threads (`cargo test`) and under `mpirun` (the binaries),
//! against fixtures with right values and against one rank.
#![warn(missing_docs)]

pub mod burn_modules;
pub mod comm_checks;
pub mod e2e;
pub mod fixtures;
pub mod fixtures_loss;
pub mod grid;
pub mod half;
pub mod layers;
pub mod modules;
pub mod npz;
pub mod ops;
pub mod planes;
pub mod programs;
pub mod random_windows;
pub mod second_thread;
pub mod suite;
pub mod windows;
