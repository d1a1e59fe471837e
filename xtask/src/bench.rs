//! `cargo xtask bench`: builds the benchmarks and runs them.

use crate::Failure;
use crate::cargo::{cargo, programs};
use crate::setup;

/// Runs `bench` with `arguments`; whether it succeeded.
pub fn run(arguments: &[&str]) -> Result<bool, Failure> {
    let environment = setup::run()?;
    let mut build = cargo(&environment);
    build.args(["build", "--release", "--workspace", "--bin", "bench"]);
    if has_avx512() {
        // The yard-stick has to use what the machine has; elsewhere the feature only takes time to build.
        build.args(["--features", "burn-spatial-benches/avx512"]);
    }
    if !build.status()?.success() {
        return Err("the benchmarks cannot be built".into());
    }
    let mut bench = std::process::Command::new(programs(&environment, "release")?.join("bench"));
    environment.apply(&mut bench);
    Ok(bench.args(arguments).status()?.success())
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}
