//! `cargo xtask demo`: learns cosmological parameters from small universes on four ranks, and compares ranks.

use std::fs;
use std::io::IsTerminal;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Failure;
use crate::cargo::{cargo, programs};
use crate::job::{self, Show, mpirun};
use crate::setup::{self, Environment};

/// The grid of the demo: halves of the batch, halves of the depth.
const GRID: &str = "2x2x1x1";
const RANKS: usize = 4;
const TRAINED_ON: usize = 128;
const HELD_OUT: usize = 32;
/// The network with half the paper's channels and units, small enough for two cores and five minutes. Without batch norm
/// it takes far longer to tell Omega_m from sigma_8; with it, so few universes need no dropout.
const TRAINING: &[&str] = &["--batch-norm", "--scale", "2", "--batch", "8", "--lr", "1e-3", "--epochs", "30", "--dropout", "0"];
/// The mean error has to be at most this part of a constant's.
const GOAL: f64 = 0.5;
/// Rounding, summed in another order, stays below. A voxel that rounding moves across the kink of a leaky ReLU does not,
/// in rare weights and batches: its gradient jumps.
const RANKS_AGREE: f64 = 1e-3;

/// Runs the demo; whether it met its goal.
pub fn run(out: &Path) -> Result<bool, Failure> {
    let environment = setup::run()?;
    fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let out = &out.canonicalize()?;
    if !cargo(&environment).args(["build", "--release", "--workspace", "--bin", "cosmoflow"]).status()?.success() {
        return Err("cosmoflow cannot be built".into());
    }
    let program = programs(&environment, "release")?.join("cosmoflow");
    let start = Instant::now();
    let (train, test) = (out.join("universes/train"), out.join("universes/test"));
    // The held-out universes are the next of the same set.
    universes(&program, &train, 0, TRAINED_ON)?;
    universes(&program, &test, TRAINED_ON, HELD_OUT)?;

    println!("\ntraining on {RANKS} ranks, grid {GRID}");
    let mut training = mpirun(&environment, RANKS, &program);
    training
        .arg("train")
        .arg("--data")
        .arg(&train)
        .arg("--test-data")
        .arg(&test)
        .arg("--out")
        .arg(out)
        .args(["--grid", GRID])
        .args(TRAINING);
    if !std::io::stdout().is_terminal() {
        training.arg("--no-progress");
    }
    finished(&mut training, "the training")?;
    let metrics = out.join("metrics.json");
    let mut report: Value = serde_json::from_slice(&fs::read(&metrics).map_err(|error| format!("{}: {error}", metrics.display()))?)?;
    let good = judge(&report)?;

    println!("\none training step from the same weights on 1 rank and on {RANKS}");
    let difference = compare(&environment, &program, &train, out)?;
    println!("largest relative difference over loss, gradients and running statistics: {difference:.1e}");
    report["ranks_max_rel_diff"] = difference.into();
    fs::write(&metrics, serde_json::to_string_pretty(&report)?)?;

    println!("\n{} s without the build; results in {}:", start.elapsed().as_secs(), out.display());
    println!("  loss.png        the loss of every step");
    println!("  predicted.png   predicted against true parameters of the held-out universes");
    println!("  metrics.json    errors, times, memory, communication");
    println!("  checkpoint.bin  the trained network: cosmoflow eval --checkpoint, cosmoflow train --resume");
    println!("  universes       what it was trained on and tested with");
    if difference.is_nan() || difference > RANKS_AGREE {
        println!("FAILED: the number of ranks makes a difference of more than {RANKS_AGREE:.0e}");
        return Ok(false);
    }
    Ok(good)
}

/// Runs `command` with its output in the user's terminal.
fn finished(command: &mut Command, what: &str) -> Result<(), Failure> {
    let status = command.status().map_err(|error| format!("{what} could not be started: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{what} failed: {status}").into()) }
}

/// Makes `count` universes from number `start` on in `folder`, which holds no others then.
fn universes(program: &Path, folder: &Path, start: usize, count: usize) -> Result<(), Failure> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    let numbers = ["--start".to_owned(), start.to_string(), "--count".to_owned(), count.to_string()];
    let mut synth = Command::new(program);
    synth.arg("synth").arg("--out").arg(folder).args(numbers);
    synth.args(["--grid-size", "32", "--cell", "4", "--spread", "0.3", "--vary", "Omega_m,sigma_8", "--fixed-box"]);
    finished(&mut synth, "making universes")
}

/// Prints each parameter's error against that of a constant; whether their mean is at most half and each is below.
fn judge(report: &Value) -> Result<bool, Failure> {
    let errors = |name: &str| report[name].as_object().ok_or_else(|| format!("metrics.json has no {name}"));
    let (own, constant) = (errors("test_mse")?, errors("constant_mse")?);
    let (mut sums, mut each) = ([0.0; 2], !own.is_empty());
    println!("\nmean square errors of {HELD_OUT} held-out universes, against predicting the mean of the training set:");
    for (name, error) in own {
        let number = |value: Option<&Value>| value.and_then(Value::as_f64).ok_or_else(|| format!("metrics.json has no error of {name}"));
        let pair = [number(Some(error))?, number(constant.get(name))?];
        println!("  {name:<10} {:.4} against {:.4}, {:.2} times", pair[0], pair[1], pair[0] / pair[1]);
        each &= pair[0] < pair[1];
        sums = [sums[0] + pair[0], sums[1] + pair[1]];
    }
    let ratio = sums[0] / sums[1];
    let good = each && ratio <= GOAL;
    println!("  {:<10} {ratio:.2} times; the goal is at most {GOAL}, and each below 1: {}", "mean", if good { "met" } else { "MISSED" });
    Ok(good)
}

/// The largest relative difference of one step's results on 1 rank and on all.
fn compare(environment: &Environment, program: &Path, data: &Path, out: &Path) -> Result<f64, Failure> {
    let step = |ranks: usize, grid: &str, against: Option<&Path>| -> Result<Vec<String>, Failure> {
        let mut command = mpirun(environment, ranks, program);
        command.arg("compare-ranks").arg("--data").arg(data).args(["--batch-norm", "--seed", "2", "--grid", grid]);
        command.arg("--out").arg(out.join(format!("step-{ranks}.safetensors")));
        if let Some(other) = against {
            command.arg("--against").arg(other);
        }
        let outcome = job::run(&mut command, Duration::from_secs(300), Show::Nothing)?;
        if !outcome.success() {
            return Err(format!("the step on {ranks} ranks failed:\n{}", outcome.stderr.join("\n")).into());
        }
        Ok(outcome.stdout)
    };
    step(1, "1x1x1x1", None)?;
    let lines = step(RANKS, GRID, Some(&out.join("step-1.safetensors")))?;
    lines.iter().find_map(|line| difference(line)).ok_or_else(|| "compare-ranks printed no difference".into())
}

/// The number of `largest relative difference 1.2e-6, in gradient/conv1`.
fn difference(line: &str) -> Option<f64> {
    line.strip_prefix("largest relative difference ")?.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_goal_is_half_in_the_mean_and_less_in_each() {
        let report = |own: [f64; 2]| json!({"test_mse": {"a": own[0], "b": own[1]}, "constant_mse": {"a": 0.3, "b": 0.3}});
        assert!(judge(&report([0.1, 0.15])).unwrap());
        assert!(!judge(&report([0.2, 0.2])).unwrap(), "0.4 of 0.6");
        assert!(!judge(&report([0.31, 0.0])).unwrap(), "one is worse than a constant");
        assert!(!judge(&report([f64::NAN, 0.0])).is_ok_and(|good| good));
        assert!(judge(&json!({})).is_err());
    }

    #[test]
    fn the_difference_is_read() {
        assert_eq!(difference("largest relative difference 1.250e-6, in gradient/conv1.weight"), Some(1.25e-6));
        assert_eq!(difference("4 universes"), None);
    }
}
