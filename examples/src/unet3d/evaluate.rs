//! How good a network is on volumes it has not seen.

use std::fmt;
use std::time::Instant;

use burn::module::AutodiffModule;
use burn_spatial_io::{LoaderOptions, check_ids};
use burn_spatial_models::UNet3d;
use burn_spatial_models::metric::ClassCounts;
use serde::Serialize;

use super::cli::EvalArgs;
use super::data::{self, Volumes};
use super::train::Segmentation;
use crate::common::data::{Scaling, make_folder};
use crate::common::ranks::{Rank, on_all};
use crate::common::report::Timing;
use crate::common::{Backend, Error, Inner, checkpoint, report};

/// Counts of classes in metrics.json: an entry a class, null for one that is neither predicted nor true anywhere.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Results {
    test_volumes: usize,
    dice: Vec<Option<f64>>,
    iou: Vec<Option<f64>>,
}

impl Results {
    /// What `counts` of `volumes` volumes say.
    pub fn new(counts: &ClassCounts, volumes: usize) -> Results {
        Results { test_volumes: volumes, dice: counts.dice(), iou: counts.iou() }
    }
}

/// A table: a line a class, and the mean of those that occur.
pub struct Table<'a>(pub &'a ClassCounts);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "class    voxels     Dice   intersection over union")?;
        let (dice, iou) = (self.0.dice(), self.0.iou());
        let number = |value: Option<f64>| value.map_or_else(|| "-".into(), |v| format!("{v:.4}"));
        for (class, voxels) in self.0.truth.iter().enumerate() {
            writeln!(f, "{class:>5} {voxels:>9} {:>8} {:>8}", number(dice[class]), number(iou[class]))?;
        }
        let mean = |values: &[Option<f64>]| {
            let known: Vec<f64> = values.iter().flatten().copied().collect();
            (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
        };
        writeln!(f, " mean {:>18} {:>8}", number(mean(&dice)), number(mean(&iou)))
    }
}

/// Runs `model` over `volumes`. Collective; every rank returns the same.
///
/// # Errors
/// [`Error::Data`] when a volume cannot be read.
pub fn evaluate(rank: &Rank, model: &UNet3d<Backend>, volumes: &Volumes, scaling: &Scaling, batch: usize) -> Result<ClassCounts, Error> {
    let model = model.valid();
    let options = LoaderOptions { batch, seed: None, workers: 1, prefetch: 2 };
    let mut counts = ClassCounts::new(volumes.options.classes);
    for batch in volumes.loader::<Inner>(rank, scaling, options)?.epoch(0) {
        let batch = batch?;
        check_ids(&batch.ids, &rank.mesh)?;
        counts.add(model.forward(batch.images), batch.targets, volumes.options.ignored);
    }
    Ok(counts)
}

/// `unet3d eval` on one rank. Collective.
///
/// # Errors
/// When data or checkpoint cannot be read or do not fit each other.
pub fn run(rank: Rank, args: &EvalArgs) -> Result<(), Error> {
    let (state, model, _) = checkpoint::load::<Segmentation>(&rank, &args.checkpoint)?;
    let options = data::options(&args.files, state.setup.classes, state.setup.ignored);
    let volumes = Volumes::of_folder(&rank, &args.data, &options)?;
    fits(&rank, state.setup.inputs, volumes.channels, &args.data)?;
    args.out.iter().try_for_each(|out| make_folder(&rank, out))?;
    let started = Instant::now();
    let test = evaluate(&rank, &model, &volumes, &state.scaling, args.batch.get())?;
    if let Some(out) = &args.out {
        let steps = volumes.files.len().div_ceil(args.batch.get());
        let timing = Timing { steps, in_steps: started.elapsed(), whole: started.elapsed() };
        report::write(&rank, out, &Results::new(&test, volumes.files.len()), &state.losses, timing)?;
    }
    if rank.is_first() {
        print!("{}", Table(&test));
    }
    Ok(())
}

/// Whether a network of `inputs` channels reads volumes of `channels`, of `path`. Collective.
///
/// # Errors
/// [`Error::Usage`] when it does not.
pub fn fits(rank: &Rank, inputs: usize, channels: usize, path: &std::path::Path) -> Result<(), Error> {
    if inputs == channels {
        return Ok(());
    }
    let message = format!("the network reads {inputs} channels, but {} has {channels}", path.display());
    on_all(rank.world(), Err(Error::Usage(message)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_a_class_and_their_mean() {
        let counts = ClassCounts { both: vec![90, 5, 0], predicted: vec![95, 10, 0], truth: vec![95, 10, 0] };
        let table = Table(&counts).to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[2].ends_with("0.5000   0.3333") && lines[3].trim().starts_with('2') && lines[3].contains('-'), "{table}");
        assert!(lines[4].contains("0.7237"), "{table}");
        let json = serde_json::to_value(Results::new(&counts, 4)).unwrap();
        assert_eq!((json["dice"][1].as_f64(), json["dice"][2].as_f64(), json["test_volumes"].as_u64()), (Some(0.5), None, Some(4)));
    }
}
