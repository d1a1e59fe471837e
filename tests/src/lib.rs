//! What is checked across ranks: the same functions run on threads (`cargo test`) and under `mpirun` (the binaries).

pub mod comm_checks;
