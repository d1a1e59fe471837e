//! Learns the class of every voxel of small volumes.

use serde_json::Value;

use super::{Demo, RANKS, finished, read_json};
use crate::Failure;

/// The grid of the demo: quarters of every volume.
const GRID: &str = "1x2x2x1";
const TRAINED_ON: usize = 24;
const HELD_OUT: usize = 6;
/// A quarter of the paper's channels and three of its four levels, small enough for two cores and three minutes.
const NETWORK: &[&str] = &["--depth", "3", "--width", "8"];
const TRAINING: &[&str] = &["--batch", "2", "--lr", "3e-3", "--epochs", "8"];
/// What the Dice coefficient of each class has to reach on volumes the network has not seen.
const GOAL: f64 = 0.7;
/// A voxel whose two best classes are equal but for rounding may change sides with the number of ranks.
const TESTS_AGREE: f64 = 1e-3;

/// Runs the demo; whether it met its goal.
pub fn run(demo: &Demo) -> Result<bool, Failure> {
    let (train, test) = (demo.path("volumes/train"), demo.path("volumes/test"));
    // The held-out volumes are the next of the same set.
    demo.synth(&train, 0, TRAINED_ON, &["--size", "32"])?;
    demo.synth(&test, TRAINED_ON, HELD_OUT, &["--size", "32"])?;
    let report = demo.train(GRID, [&train, &test], &[NETWORK, TRAINING].concat())?;

    println!("\nthe trained network on the held-out volumes on 1 rank");
    let checkpoint = demo.path("checkpoint.bin");
    let again = demo.path("eval");
    let mut eval = demo.on(1, "eval");
    finished(eval.arg("--data").arg(&test).arg("--checkpoint").arg(&checkpoint).arg("--out").arg(&again), "the test")?;
    let good = judge(&report, &read_json(&again.join("metrics.json"))?)?;

    println!("\nthe classes of the first of them, predicted on {RANKS} ranks");
    let first = std::fs::read_dir(&test)?.map(|entry| entry.map(|e| e.path())).collect::<Result<Vec<_>, _>>()?.into_iter().min();
    let first = first.ok_or("there are no held-out volumes")?;
    let mut predict = demo.on(RANKS, "predict");
    predict.arg("--input").arg(&first).arg("--checkpoint").arg(&checkpoint).arg("--out").arg(&demo.out).args(["--grid", GRID]);
    finished(&mut predict, "the prediction")?;

    let same = demo.compare(GRID, &train, NETWORK, report)?;
    demo.results(&[
        ("loss.png", "the loss of every step"),
        ("prediction.png", "middle slices of a held-out volume, with the predicted classes over it"),
        ("prediction.hdf5", "the predicted class of every voxel of it"),
        ("metrics.json", "Dice coefficients, times, memory, communication"),
        ("checkpoint.bin", "the trained network: unet3d eval --checkpoint, unet3d predict --checkpoint, unet3d train --resume"),
        ("volumes", "what it was trained on and tested with"),
    ]);
    Ok(good && same)
}

/// Prints the Dice coefficient of each class; whether each reaches the goal, and is the same on one rank (`again`).
fn judge(report: &Value, again: &Value) -> Result<bool, Failure> {
    let dice = |report: &Value| -> Result<Vec<f64>, Failure> {
        let all = report["dice"].as_array().ok_or("metrics.json has no dice")?;
        Ok(all.iter().map(|value| value.as_f64().unwrap_or(f64::NAN)).collect())
    };
    let (own, again) = (dice(report)?, dice(again)?);
    let mut good = !own.is_empty() && own.len() == again.len();
    println!("\nDice coefficients of {HELD_OUT} held-out volumes:");
    for (class, value) in own.iter().enumerate() {
        let reached = *value >= GOAL;
        println!("  class {class}: {value:.4}; the goal is {GOAL}: {}", if reached { "met" } else { "MISSED" });
        good &= reached;
    }
    let apart = own.iter().zip(&again).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("  on 1 rank they differ by at most {apart:.0e}");
    Ok(good && apart <= TESTS_AGREE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_class_has_to_reach_the_goal_on_any_number_of_ranks() {
        let report = |dice: [f64; 3]| json!({"dice": dice});
        let good = report([0.99, 0.9, 0.8]);
        assert!(judge(&good, &good).unwrap());
        assert!(judge(&good, &report([0.99, 0.9, 0.8005])).unwrap());
        assert!(!judge(&good, &report([0.99, 0.9, 0.81])).unwrap(), "another result on one rank");
        assert!(!judge(&report([0.99, 0.9, 0.6]), &report([0.99, 0.9, 0.6])).unwrap(), "one class is missed");
        let missing = json!({"dice": [0.9, null]});
        assert!(!judge(&missing, &missing).unwrap());
        assert!(judge(&json!({}), &good).is_err());
    }
}
