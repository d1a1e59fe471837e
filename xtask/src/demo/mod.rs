//! `cargo xtask demo`: trains a network on small volumes on four ranks, and compares ranks.

mod cosmoflow;
mod unet3d;

use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Failure;
use crate::cargo::{cargo, programs};
use crate::job::{self, Show, mpirun};
use crate::setup::{self, Environment};

const RANKS: usize = 4;
/// What `metrics.json` calls the difference between grids in float32, as in training, and in float64; their options, and
/// what rounding stays below. A voxel that rounding moves across the kink of a ReLU, or past another in a maximum, in
/// rare weights and batches, makes a gradient jump: the limit in float32 leaves room for a few, that in float64 for none.
const RANKS_AGREE: [(&str, &[&str], f64); 2] = [("ranks_max_rel_diff", &[], 1e-3), ("ranks_max_rel_diff_float64", &["--float64"], 1e-9)];

/// Runs the demo of the program `name`; whether it met its goal.
pub fn run(name: &str, out: &Path) -> Result<bool, Failure> {
    match name {
        "cosmoflow" => cosmoflow::run(&Demo::start(name, out)?),
        "unet3d" => unet3d::run(&Demo::start(name, out)?),
        other => Err(format!("there is no demo {other}, only cosmoflow and unet3d").into()),
    }
}

/// A program that is built, and where its results go.
struct Demo {
    environment: Environment,
    program: PathBuf,
    out: PathBuf,
    start: Instant,
}

impl Demo {
    fn start(name: &str, out: &Path) -> Result<Demo, Failure> {
        let environment = setup::run()?;
        fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
        let out = out.canonicalize()?;
        if !cargo(&environment).args(["build", "--release", "--workspace", "--bin", name]).status()?.success() {
            return Err(format!("{name} cannot be built").into());
        }
        let program = programs(&environment, "release")?.join(name);
        Ok(Demo { environment, program, out, start: Instant::now() })
    }

    /// A file or folder among the results.
    fn path(&self, name: &str) -> PathBuf {
        self.out.join(name)
    }

    /// The program on `ranks` ranks.
    fn on(&self, ranks: usize, command: &str) -> Command {
        let mut job = mpirun(&self.environment, ranks, &self.program);
        job.arg(command);
        job
    }

    /// Makes `count` samples from number `start` on in `folder`, which holds no others then.
    fn synth(&self, folder: &Path, start: usize, count: usize, options: &[&str]) -> Result<(), Failure> {
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        let numbers = ["--start".to_owned(), start.to_string(), "--count".to_owned(), count.to_string()];
        finished(Command::new(&self.program).arg("synth").arg("--out").arg(folder).args(numbers).args(options), "making samples")
    }

    /// Trains on all ranks on `train`, tested with `test`; what metrics.json says then.
    fn train(&self, grid: &str, [train, test]: [&Path; 2], options: &[&str]) -> Result<Value, Failure> {
        println!("\ntraining on {RANKS} ranks, grid {grid}");
        let mut training = self.on(RANKS, "train");
        training
            .arg("--data")
            .arg(train)
            .arg("--test-data")
            .arg(test)
            .arg("--out")
            .arg(&self.out)
            .args(["--grid", grid, "--overwrite"])
            .args(options);
        if !std::io::stdout().is_terminal() {
            training.arg("--no-progress");
        }
        finished(&mut training, "the training")?;
        read_json(&self.path("metrics.json"))
    }

    /// Compares one step on 1 rank and on all, and puts the largest relative difference into `report`, which becomes
    /// metrics.json; whether they agree.
    fn compare(&self, grid: &str, data: &Path, options: &[&str], mut report: Value) -> Result<bool, Failure> {
        println!("\none training step from the same weights on 1 rank and on {RANKS}");
        let step = |ranks: usize, grid: &str, dtype: &[&str], against: Option<&Path>| -> Result<Vec<String>, Failure> {
            let mut command = self.on(ranks, "compare-ranks");
            command.arg("--data").arg(data).args(options).args(dtype).args(["--grid", grid]);
            command.arg("--out").arg(self.path(&format!("step-{ranks}.safetensors")));
            if let Some(other) = against {
                command.arg("--against").arg(other);
            }
            let outcome = job::run(&mut command, Duration::from_secs(300), Show::Nothing)?;
            if !outcome.success() {
                return Err(format!("the step on {ranks} ranks failed:\n{}", outcome.stderr.join("\n")).into());
            }
            Ok(outcome.stdout)
        };
        let mut same = true;
        println!("largest relative difference over loss, gradients and running statistics:");
        for (key, dtype, limit) in RANKS_AGREE {
            step(1, "1x1x1x1", dtype, None)?;
            let lines = step(RANKS, grid, dtype, Some(&self.path("step-1.safetensors")))?;
            let difference = lines.iter().find_map(|line| difference(line)).ok_or("compare-ranks printed no difference")?;
            println!("  in {} {difference:.1e}", if dtype.is_empty() { "float32" } else { "float64" });
            report[key] = difference.into();
            if difference.is_nan() || difference > limit {
                println!("FAILED: the number of ranks makes a difference of more than {limit:.0e}");
                same = false;
            }
        }
        fs::write(self.path("metrics.json"), serde_json::to_string_pretty(&report)?)?;
        Ok(same)
    }

    /// Says what lies where: names and what they are.
    fn results(&self, results: &[(&str, &str)]) {
        println!("\n{} s without the build; results in {}:", self.start.elapsed().as_secs(), self.out.display());
        for (name, what) in results {
            println!("  {name:<16} {what}");
        }
    }
}

fn read_json(path: &Path) -> Result<Value, Failure> {
    let text = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(serde_json::from_slice(&text)?)
}

/// Runs `command` with its output in the user's terminal.
fn finished(command: &mut Command, what: &str) -> Result<(), Failure> {
    let status = command.status().map_err(|error| format!("{what} could not be started: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{what} failed: {status}").into()) }
}

/// The number of `largest relative difference 1.2e-6, in gradient/conv1`.
fn difference(line: &str) -> Option<f64> {
    line.strip_prefix("largest relative difference ")?.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_difference_is_read() {
        assert_eq!(difference("largest relative difference 1.250e-6, in gradient/conv1.weight"), Some(1.25e-6));
        assert_eq!(difference("4 universes"), None);
    }
}
