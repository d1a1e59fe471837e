//! How good a network is on universes it has not seen.

use std::collections::BTreeMap;
use std::fmt;

use burn::module::AutodiffModule;
use burn_spatial_io::{LoaderOptions, check_ids};
use burn_spatial_models::CosmoFlow;
use serde::Serialize;

use super::cli::EvalArgs;
use super::data::{Targets, Universes};
use super::plot;
use super::train::Regression;
use crate::common::data::{Scaling, make_folder};
use crate::common::ranks::{Rank, on_all, on_first};
use crate::common::{Backend, Error, Inner, checkpoint, report};

/// Predictions beside the truth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// What is predicted, and the constant it is measured against.
    pub names: Vec<String>,
    /// The training means.
    pub means: Vec<f64>,
    /// A row a universe.
    pub predicted: Vec<Vec<f32>>,
    /// A row a universe.
    pub truth: Vec<Vec<f32>>,
}

/// An [`Evaluation`] in metrics.json.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Results<'a> {
    parameters: &'a [String],
    test_universes: usize,
    test_mse: BTreeMap<&'a str, f64>,
    constant_mse: BTreeMap<&'a str, f64>,
}

impl Evaluation {
    fn mean_square(&self, difference: impl Fn(usize, usize) -> f64) -> Vec<f64> {
        let rows = self.truth.len();
        let column = |c: usize| (0..rows).map(|r| difference(r, c).powi(2)).sum::<f64>() / rows.max(1) as f64;
        (0..self.names.len()).map(column).collect()
    }

    /// Mean square error of each parameter.
    pub fn mse(&self) -> Vec<f64> {
        self.mean_square(|r, c| f64::from(self.predicted[r][c]) - f64::from(self.truth[r][c]))
    }

    /// What metrics.json says of it.
    pub fn results(&self) -> Results<'_> {
        let named = |values: Vec<f64>| self.names.iter().map(String::as_str).zip(values).collect();
        Results {
            parameters: &self.names,
            test_universes: self.truth.len(),
            test_mse: named(self.mse()),
            constant_mse: named(self.constant_mse()),
        }
    }

    /// That of a predictor that always gives the training mean.
    pub fn constant_mse(&self) -> Vec<f64> {
        self.mean_square(|r, c| self.means[c] - f64::from(self.truth[r][c]))
    }
}

impl fmt::Display for Evaluation {
    /// A table: a line a parameter, and their mean.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (own, constant) = (self.mse(), self.constant_mse());
        writeln!(f, "{} test universes      mean square error   of a constant   ratio", self.truth.len())?;
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let rows = self.names.iter().map(String::as_str).zip(own.iter().copied().zip(constant.iter().copied()));
        for (name, (own, constant)) in rows.chain([("mean", (mean(&own), mean(&constant)))]) {
            writeln!(f, "{name:<22} {own:>18.4} {constant:>15.4} {:>7.3}", own / constant)?;
        }
        Ok(())
    }
}

/// Runs `model` over `universes`. Collective; every rank returns the same.
///
/// # Errors
/// [`Error::Data`] when a universe cannot be read.
pub fn evaluate(
    rank: &Rank,
    model: &CosmoFlow<Backend>,
    universes: &Universes,
    (targets, scaling): (&Targets, &Scaling),
    batch: usize,
) -> Result<Evaluation, Error> {
    let model = model.valid();
    let options = LoaderOptions { batch, seed: None, workers: 1, prefetch: 2 };
    let loader = universes.loader::<Inner>(rank, targets, scaling, options, None);
    let mut evaluation =
        Evaluation { names: targets.names.clone(), means: targets.means.clone(), predicted: Vec::new(), truth: Vec::new() };
    let width = targets.names.len();
    let rows = |data: burn::tensor::TensorData| -> Vec<Vec<f32>> {
        data.iter::<f32>().collect::<Vec<_>>().chunks(width).map(<[f32]>::to_vec).collect()
    };
    for batch in loader.epoch(0) {
        let batch = batch?;
        check_ids(&batch.ids, &rank.mesh)?;
        evaluation.predicted.extend(rows(model.forward(batch.volumes).into_data()));
        evaluation.truth.extend(rows(batch.targets.into_data()));
    }
    Ok(evaluation)
}

/// `cosmoflow eval` on one rank. Collective.
///
/// # Errors
/// When data or checkpoint cannot be read or do not fit each other.
pub fn run(rank: Rank, args: &EvalArgs) -> Result<(), Error> {
    let universes = Universes::of_folder(&rank, &args.data)?;
    let (state, model, _) = checkpoint::load::<Regression>(&rank, &args.checkpoint)?;
    let (config, targets) = (&state.setup.config, &state.setup.targets);
    let fits = (config.width, config.inputs) == (universes.width, universes.channels)
        && targets.columns.iter().zip(&targets.names).all(|(c, name)| universes.names.get(*c) == Some(name));
    if !fits {
        let message = format!(
            "the network reads {} x {}^3 and predicts {}, but {} holds {universes}",
            config.inputs,
            config.width,
            targets.names.join(", "),
            args.data.display()
        );
        return on_all(rank.world(), Err(Error::Usage(message)));
    }
    args.out.iter().try_for_each(|out| make_folder(&rank, out))?;
    let started = std::time::Instant::now();
    let test = evaluate(&rank, &model, &universes, (targets, &state.scaling), args.batch.get())?;
    if let Some(out) = &args.out {
        let steps = universes.files.len().div_ceil(args.batch.get());
        let timing = report::Timing { steps, in_steps: started.elapsed(), whole: started.elapsed() };
        report::write(&rank, out, &test.results(), &state.losses, timing)?;
        on_first(rank.world(), || plot::predicted(&out.join("predicted.png"), &test))?;
    }
    if rank.is_first() {
        print!("{test}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_measured_against_the_training_mean() {
        let evaluation = Evaluation {
            names: vec!["a".into(), "b".into()],
            means: vec![0.0, 1.0],
            predicted: vec![vec![0.5, 2.0], vec![1.0, 0.0]],
            truth: vec![vec![0.5, 1.0], vec![0.0, 2.0]],
        };
        assert_eq!(evaluation.mse(), [0.5, 2.5]);
        assert_eq!(evaluation.constant_mse(), [0.125, 0.5]);
        let table = evaluation.to_string();
        assert_eq!(table.lines().count(), 4);
        assert!(table.lines().last().unwrap().ends_with("4.800"), "{table}");
    }
}
