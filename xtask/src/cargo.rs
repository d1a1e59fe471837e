//! Calls of cargo.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;
use crate::setup::Environment;

/// The root of the checkout.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// `cargo`, at the root of the checkout.
pub fn cargo(environment: &Environment) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    environment.apply(&mut command).current_dir(root());
    // A test program's own cargo variables must not reach the children's builds.
    command.env_remove("CARGO_MANIFEST_DIR");
    command
}

/// The folder of built programs of `profile`: `debug` or `release`.
pub fn programs(environment: &Environment, profile: &str) -> Result<PathBuf, Failure> {
    let output = cargo(environment).args(["metadata", "--format-version", "1", "--no-deps"]).output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let folder = metadata["target_directory"].as_str().ok_or("cargo metadata names no target directory")?;
    Ok(Path::new(folder).join(profile))
}
