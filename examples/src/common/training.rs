//! Training, whatever the network.

use std::fmt::Debug;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::Backend as _;
use burn::tensor::{ElementConversion, Tensor};
use burn_spatial_io::{Epoch, check_ids};
use burn_spatial_models::Adam;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::checkpoint::{self, AdamOptimizer, Schedule, State};
use super::data::{Scaling, make_folder};
use super::ranks::{Rank, on_all, on_first};
use super::report::Timing;
use super::{Backend, Device, Error};

/// The option that may be another when a training goes on.
const RATE: &str = "--lr";

/// The learning rate falls to this share of the first one.
const LAST_RATE: f64 = 0.01;

/// A network, its data and its loss.
pub trait Task {
    /// The program's name, which its checkpoints bear.
    const PROGRAM: &'static str;
    /// The network.
    type Model: AutodiffModule<Backend>;
    /// What a checkpoint says of the network and its data; equal where a training may go on.
    type Setup: Clone + Debug + PartialEq + Serialize + DeserializeOwned;
    /// A global batch.
    type Batch;

    /// The network of `setup` with new weights.
    ///
    /// # Errors
    /// When there is no such network.
    fn model(setup: &Self::Setup, device: &Device) -> Result<Self::Model, Error>;

    /// The batches of the epoch that `state` is at, as this rank holds them.
    fn batches(&self, state: &State<Self::Setup>) -> Epoch<Backend, Self::Batch>;

    /// The samples that this rank holds blocks of.
    fn ids(batch: &Self::Batch) -> &[usize];

    /// `batch` in float64.
    fn float64(batch: Self::Batch) -> Self::Batch;

    /// Whether nothing in `batch` counts, so that its loss is 0. Collective.
    fn counts_nothing(&self, batch: &Self::Batch) -> bool {
        let _ = batch;
        false
    }

    /// The loss of a batch. Collective.
    fn loss(&self, model: &Self::Model, batch: Self::Batch) -> Tensor<Backend, 1>;
}

/// How long and how fast to train, and where to.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Folder of the checkpoint.
    pub out: PathBuf,
    /// Passes over the samples.
    pub epochs: usize,
    /// Samples in a batch.
    pub batch: usize,
    /// Samples in an epoch.
    pub samples: usize,
    /// Learning rate of the first step.
    pub lr: f64,
    /// Seed of the weights and everything else.
    pub seed: u64,
    /// Fingerprint of the training files.
    pub files: u32,
    /// Whether to go on from a checkpoint.
    pub resume: bool,
    /// Whether to replace the training in the folder.
    pub overwrite: bool,
    /// Whether a bar shows how far it is.
    pub progress: bool,
    /// Stop after this epoch.
    pub stop_after: Option<usize>,
    /// Another option that has to be the same for a training to go on, and its value.
    pub option: (&'static str, String),
}

impl Plan {
    /// Makes the folder, and refuses what cannot be trained by. Collective.
    ///
    /// # Errors
    /// [`Error::Usage`] and [`Error::Io`].
    pub fn check(&self, rank: &Rank) -> Result<(), Error> {
        let bad = |what: &str| on_all(rank.world(), Err(Error::Usage(what.into())));
        if self.epochs == 0 {
            return bad("--epochs must be at least 1");
        }
        if !(self.lr > 0.0 && self.lr.is_finite()) {
            return bad("--lr must be positive");
        }
        if self.stop_after == Some(0) {
            return bad("--stop-after must be at least 1");
        }
        make_folder(rank, &self.out)?;
        let file = self.file();
        if !self.resume && !self.overwrite && on_first(rank.world(), || Ok(checkpoint::exists(&file)))? {
            let out = self.out.display();
            return bad(&format!("{out}: holds a training: --resume goes on with it, --overwrite replaces it, or give another --out"));
        }
        Ok(())
    }

    /// The checkpoint.
    fn file(&self) -> PathBuf {
        self.out.join(checkpoint::FILE_NAME)
    }

    /// What has to be the same for a training to go on, but for the rate.
    fn schedule(&self) -> Schedule {
        let (option, value) = &self.option;
        let entries = [
            ("--epochs", self.epochs.to_string()),
            ("--batch", self.batch.to_string()),
            (RATE, self.lr.to_string()),
            ("--seed", self.seed.to_string()),
            ("number of training files", self.samples.to_string()),
            (option, value.clone()),
        ];
        entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Samples of the smallest batch of an epoch, which is the last one.
    pub fn smallest_batch(&self) -> usize {
        smallest_batch(self.samples, self.batch)
    }

    /// Steps of an epoch.
    pub fn steps_per_epoch(&self) -> usize {
        self.samples.div_ceil(self.batch)
    }

    /// The epoch to stop after.
    fn last(&self) -> usize {
        self.stop_after.unwrap_or(self.epochs).min(self.epochs)
    }
}

/// Samples of the smallest of the batches of `batch` that `samples` make.
pub fn smallest_batch(samples: usize, batch: usize) -> usize {
    match samples % batch {
        0 => batch,
        rest => rest,
    }
}

/// The rate of step `step` of `steps`: from `first` linearly down to a hundredth of it.
fn learning_rate(first: f64, step: usize, steps: usize) -> f64 {
    let done = step as f64 / steps.saturating_sub(1).max(1) as f64;
    first * (1.0 - (1.0 - LAST_RATE) * done)
}

/// A training under way.
pub struct Training<'a, T: Task> {
    rank: &'a Rank,
    task: &'a T,
    plan: &'a Plan,
    /// The network.
    pub model: T::Model,
    optimizer: AdamOptimizer<T::Model>,
    /// How far it is.
    pub state: State<T::Setup>,
}

impl<'a, T: Task> Training<'a, T> {
    /// A training at its start or, with [`Plan::resume`], at its last checkpoint. Collective.
    ///
    /// # Errors
    /// When there is no such network, or when the checkpoint cannot be read or is of another training.
    pub fn start(rank: &'a Rank, task: &'a T, plan: &'a Plan, setup: T::Setup, scaling: Scaling) -> Result<Self, Error> {
        Backend::seed(&rank.device, plan.seed);
        let model = on_all(rank.world(), T::model(&setup, &rank.device))?;
        let state = State::new::<T>(setup, scaling, plan.schedule(), plan.files);
        let mut training = Training { rank, task, plan, model, optimizer: Adam::default().init(), state };
        let file = plan.file();
        if plan.overwrite {
            on_first(rank.world(), || checkpoint::remove(&file))?;
        }
        if plan.resume && on_first(rank.world(), || Ok(checkpoint::exists(&file)))? {
            training.resume()?;
        }
        Ok(training)
    }

    fn resume(&mut self) -> Result<(), Error> {
        let file = self.plan.file();
        let (mut state, model, optimizer) = checkpoint::load::<T>(self.rank, &file)?;
        let rate = self.plan.lr.to_string();
        let before = state.schedule.insert(RATE.into(), rate.clone());
        let differences = state.differences(&self.state);
        if !differences.is_empty() {
            let message = format!("{}: made otherwise: {}; give the same, or another --out", file.display(), differences.join("; "));
            return on_all(self.rank.world(), Err(Error::Checkpoint(message)));
        }
        if let Some(before) = before.filter(|before| *before != rate)
            && self.rank.is_first()
        {
            println!("{RATE} was {before}, is {rate} from here on");
        }
        self.rank.device.set_random_state(state.random);
        (self.state, self.model, self.optimizer) = (state, model, optimizer);
        Ok(())
    }

    /// Trains until the end, or until [`Plan::stop_after`], with a checkpoint after every epoch; `None` where it was
    /// stopped before the end. Collective.
    ///
    /// # Errors
    /// Whatever stops the training.
    pub fn run(&mut self) -> Result<Option<Timing>, Error> {
        let (rank, last) = (self.rank, self.plan.last());
        if self.state.epoch > 0 && rank.is_first() {
            println!("resuming after epoch {}", self.state.epoch);
        }
        let (first_step, started) = (self.state.step, Instant::now());
        let bar = self.bar();
        let mut in_steps = Duration::ZERO;
        while self.state.epoch < last {
            in_steps += self.epoch(&bar)?;
            checkpoint::save::<T>(rank, &self.plan.file(), &self.state, &self.model, &self.optimizer)?;
        }
        bar.finish_and_clear();
        if last < self.plan.epochs {
            if rank.is_first() {
                println!("stopped after epoch {last} of {}: go on with --resume", self.plan.epochs);
            }
            return Ok(None);
        }
        Ok(Some(Timing { steps: self.state.step - first_step, in_steps, whole: started.elapsed() }))
    }

    fn bar(&self) -> ProgressBar {
        let left = self.plan.last().saturating_sub(self.state.epoch) * self.plan.steps_per_epoch();
        if !self.plan.progress || !self.rank.is_first() {
            return ProgressBar::hidden();
        }
        // Not stderr: mpirun gives its ranks a terminal for stdout alone.
        let bar = ProgressBar::with_draw_target(Some(left as u64), ProgressDrawTarget::stdout());
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} steps, {elapsed} + {eta}, {msg}");
        bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    }

    /// One pass over the samples; returns the time its steps took. Collective.
    fn epoch(&mut self, bar: &ProgressBar) -> Result<Duration, Error> {
        let (rank, plan) = (self.rank, self.plan);
        let steps = plan.epochs * plan.steps_per_epoch();
        let started = Instant::now();
        let before = self.state.losses.len();
        let mut nothing = 0;
        for batch in self.task.batches(&self.state) {
            let batch = batch?;
            check_ids(T::ids(&batch), &rank.mesh)?;
            nothing += usize::from(self.task.counts_nothing(&batch));
            let loss = self.task.loss(&self.model, batch);
            let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
            let rate = learning_rate(plan.lr, self.state.step, steps);
            self.model = self.optimizer.step(rate, self.model.clone(), gradients);
            let loss: f32 = loss.into_scalar().elem();
            if !loss.is_finite() {
                let what = format!("the loss is {loss}");
                return on_all(rank.world(), Err(Error::Diverged { step: self.state.step, what, saved: self.state.epoch }));
            }
            self.state.losses.push(loss);
            self.state.step += 1;
            bar.set_message(format!("loss {loss:.4}"));
            bar.inc(1);
        }
        self.state.epoch += 1;
        self.state.random = rank.device.random_state();
        let own = &self.state.losses[before..];
        if rank.is_first() {
            let mean = own.iter().sum::<f32>() / own.len().max(1) as f32;
            let seconds = started.elapsed().as_secs_f64();
            let ignored = match nothing {
                0 => String::new(),
                count => format!(", of {} batches {count} had ignored voxels only and count as 0", own.len()),
            };
            bar.suspend(|| println!("epoch {:>3} of {}: loss {mean:.5}, {seconds:.1} s{ignored}", self.state.epoch, plan.epochs));
        }
        Ok(started.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_falls_to_a_hundredth() {
        assert_eq!(learning_rate(0.5, 0, 11), 0.5);
        assert!((learning_rate(0.5, 10, 11) - 0.005).abs() < 1e-15);
        assert!((learning_rate(1.0, 5, 11) - 0.505).abs() < 1e-15);
        assert_eq!(learning_rate(0.5, 0, 1), 0.5);
    }
}
