//! `cargo xtask verify`: many random programs and windows against one rank.

use std::process::Command;

use crate::Failure;
use crate::cargo::{cargo, programs};
use crate::setup;

/// What is run unless `options` say otherwise.
const DEFAULTS: [&str; 4] = ["--programs", "100000", "--windows", "100000"];

/// Runs `random_programs` with `options`; whether nothing failed.
pub fn run(options: &[&str]) -> Result<bool, Failure> {
    let environment = setup::run()?;
    let build = ["build", "--release", "-p", "burn-spatial-tests", "--bin", "random_programs"];
    if !cargo(&environment).args(build).status()?.success() {
        return Err("the programs cannot be built".into());
    }
    let mut command = Command::new(programs(&environment, "release")?.join("random_programs"));
    environment.apply(&mut command);
    // A later option counts.
    Ok(command.args(DEFAULTS).args(options).status()?.success())
}
