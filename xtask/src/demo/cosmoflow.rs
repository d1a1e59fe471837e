//! Learns cosmological parameters from small universes.

use serde_json::Value;

use super::Demo;
use crate::Failure;

/// The grid of the demo: halves of the batch, halves of the depth.
const GRID: &str = "2x2x1x1";
const TRAINED_ON: usize = 128;
const HELD_OUT: usize = 32;
/// The network with half the paper's channels and units, small enough for two cores and five minutes. Without batch norm
/// it takes far longer to tell Omega_m from sigma_8; with it, so few universes need no dropout.
const TRAINING: &[&str] = &["--batch-norm", "--scale", "2", "--batch", "8", "--lr", "1e-3", "--epochs", "30", "--dropout", "0"];
/// The mean error has to be at most this part of a constant's.
const GOAL: f64 = 0.5;
const UNIVERSES: &[&str] = &["--grid-size", "32", "--cell", "4", "--spread", "0.3", "--vary", "Omega_m,sigma_8", "--fixed-box"];

/// Runs the demo; whether it met its goal.
pub fn run(demo: &Demo) -> Result<bool, Failure> {
    let (train, test) = (demo.path("universes/train"), demo.path("universes/test"));
    // The held-out universes are the next of the same set.
    demo.synth(&train, 0, TRAINED_ON, UNIVERSES)?;
    demo.synth(&test, TRAINED_ON, HELD_OUT, UNIVERSES)?;
    let report = demo.train(GRID, [&train, &test], TRAINING)?;
    let good = judge(&report)?;
    let same = demo.compare(GRID, &train, &["--batch-norm", "--seed", "2"], report)?;
    demo.results(&[
        ("loss.png", "the loss of every step"),
        ("predicted.png", "predicted against true parameters of the held-out universes"),
        ("metrics.json", "errors, times, memory, communication"),
        ("checkpoint.bin", "the trained network: cosmoflow eval --checkpoint, cosmoflow train --resume"),
        ("universes", "what it was trained on and tested with"),
    ]);
    Ok(good && same)
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
}
