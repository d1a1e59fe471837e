//! Training.

use std::time::{Duration, Instant};

use burn::nn::loss::{MseLoss, Reduction};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::ElementConversion;
use burn::tensor::backend::Backend as _;
use burn_spatial_io::{LoaderOptions, check_ids};
use burn_spatial_models::{Adam, CosmoFlow};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::checkpoint::{self, AdamOptimizer, Network, State};
use super::cli::{ModelArgs, TrainArgs};
use super::data::{Scaling, Targets, Universes, make_folder};
use super::ranks::{Rank, on_all};
use super::{Backend, Error, evaluate, plot, report};

/// The learning rate falls to this share of the first one.
const LAST_RATE: f64 = 0.01;

/// What a training made.
pub struct Outcome {
    /// The loss of every step since the start, resumed ones included.
    pub losses: Vec<f32>,
    /// How good it is on universes it has not seen; `None` where the training was stopped before its end.
    pub test: Option<evaluate::Evaluation>,
}

/// The network that `args` asks for.
pub fn network(args: &ModelArgs, universes: &Universes, targets: &Targets) -> Network {
    Network {
        width: universes.width,
        inputs: universes.channels,
        outputs: targets.names.len(),
        batch_norm: args.batch_norm,
        dropout: args.dropout,
        scale: args.scale,
    }
}

/// The rate of step `step` of `steps`: from `first` linearly down to a hundredth of it.
fn learning_rate(first: f64, step: usize, steps: usize) -> f64 {
    let done = step as f64 / steps.saturating_sub(1).max(1) as f64;
    first * (1.0 - (1.0 - LAST_RATE) * done)
}

/// `cosmoflow train` on one rank. Collective.
///
/// # Errors
/// Whatever stops the training.
pub fn run(rank: Rank, args: &TrainArgs) -> Result<(), Error> {
    train(&rank, args).map(drop)
}

/// Trains, tests and writes. Collective.
///
/// # Errors
/// Whatever stops the training.
pub fn train(rank: &Rank, args: &TrainArgs) -> Result<Outcome, Error> {
    let bad = |what: &str| on_all(rank.world(), Err(Error::Usage(what.into())));
    if args.epochs == 0 {
        return bad("--epochs must be at least 1");
    }
    if !(args.lr > 0.0 && args.lr.is_finite()) {
        return bad("--lr must be positive");
    }
    let (universes, held_out) = Universes::split(rank, &args.data, &args.test, args.model.seed)?;
    make_folder(rank, &args.out)?;
    let targets = on_all(rank.world(), universes.targets())?;
    let file = args.out.join(checkpoint::FILE_NAME);

    let mut training = Training::start(rank, args, &universes, targets)?;
    if args.resume && super::ranks::on_first(rank.world(), || Ok(checkpoint::exists(&file)))? {
        training.resume(&file)?;
    }
    if rank.is_first() {
        training.introduce(&held_out);
    }
    let last = args.stop_after.unwrap_or(args.epochs).min(args.epochs);
    let (first_step, started) = (training.state.step, Instant::now());
    let bar = training.bar(last);
    let mut in_steps = Duration::ZERO;
    while training.state.epoch < last {
        in_steps += training.epoch(&bar)?;
        checkpoint::save(rank, &file, &training.state, &training.model, &training.optimizer)?;
    }
    bar.finish_and_clear();
    let steps = training.state.step - first_step;
    let timing = report::Timing { steps, in_steps, whole: started.elapsed() };
    let State { losses, targets, scaling, .. } = training.state.clone();
    if last < args.epochs {
        if rank.is_first() {
            println!("stopped after epoch {last} of {}: go on with --resume", args.epochs);
        }
        return Ok(Outcome { losses, test: None });
    }
    let test = evaluate::evaluate(rank, &training.model, &held_out, (&targets, &scaling), args.model.batch.get())?;
    report::write(rank, &args.out, &test, &losses, timing)?;
    super::ranks::on_first(rank.world(), || {
        plot::losses(&args.out.join("loss.png"), &losses, training.steps_per_epoch)?;
        plot::predicted(&args.out.join("predicted.png"), &test)
    })?;
    if rank.is_first() {
        print!("{test}");
    }
    Ok(Outcome { losses, test: Some(test) })
}

/// A training under way.
struct Training<'a> {
    rank: &'a Rank,
    args: &'a TrainArgs,
    universes: &'a Universes,
    model: CosmoFlow<Backend>,
    optimizer: AdamOptimizer,
    state: State,
    steps_per_epoch: usize,
}

impl<'a> Training<'a> {
    fn start(rank: &'a Rank, args: &'a TrainArgs, universes: &'a Universes, targets: Targets) -> Result<Self, Error> {
        Backend::seed(&rank.device, args.model.seed);
        let config = network(&args.model, universes, &targets);
        let model = on_all(rank.world(), config.config().init::<Backend>(&rank.device).map_err(Error::from))?;
        let schedule = format!(
            "--epochs {} --batch {} --lr {} --seed {} --augment {:?}, {} universes",
            args.epochs,
            args.model.batch,
            args.lr,
            args.model.seed,
            args.augment,
            universes.files.len()
        );
        let steps_per_epoch = universes.files.len().div_ceil(args.model.batch.get());
        let state = State::new(config, targets, Scaling::measure(rank, universes)?, schedule);
        Ok(Training { rank, args, universes, model, optimizer: Adam::default().init(), state, steps_per_epoch })
    }

    fn resume(&mut self, file: &std::path::Path) -> Result<(), Error> {
        let (state, model, optimizer) = checkpoint::load(self.rank, file)?;
        let same = |s: &State| (s.config.clone(), s.targets.clone(), s.schedule.clone());
        if same(&state) != same(&self.state) {
            let message = format!(
                "{}: made with {:?}, {}; resume with the same, not with {:?}, {}",
                file.display(),
                state.config,
                state.schedule,
                self.state.config,
                self.state.schedule
            );
            return on_all(self.rank.world(), Err(Error::Checkpoint(message)));
        }
        self.rank.device.set_random_state(state.random);
        (self.state, self.model, self.optimizer) = (state, model, optimizer);
        Ok(())
    }

    fn introduce(&self, held_out: &Universes) {
        let Universes { files, channels, width, names, .. } = self.universes;
        let constant: Vec<_> = names.iter().filter(|n| !self.state.targets.names.contains(n)).cloned().collect();
        println!(
            "{} universes of {channels} x {width}^3 to train on, {} to test on, grid {}",
            files.len(),
            held_out.files.len(),
            self.rank.mesh.grid()
        );
        print!("learning {}", self.state.targets.names.join(", "));
        println!("{}", if constant.is_empty() { String::new() } else { format!(" ({} do not vary)", constant.join(", ")) });
        if self.state.epoch > 0 {
            println!("resuming after epoch {}", self.state.epoch);
        }
    }

    fn bar(&self, last: usize) -> ProgressBar {
        let left = last.saturating_sub(self.state.epoch) * self.steps_per_epoch;
        if self.args.no_progress || !self.rank.is_first() {
            return ProgressBar::hidden();
        }
        // Not stderr: mpirun gives its ranks a terminal for stdout alone.
        let bar = ProgressBar::with_draw_target(Some(left as u64), ProgressDrawTarget::stdout());
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} steps, {elapsed} + {eta}, {msg}");
        bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    }

    /// One pass over the training universes; returns the time its steps took. Collective.
    fn epoch(&mut self, bar: &ProgressBar) -> Result<Duration, Error> {
        let (rank, args) = (self.rank, self.args);
        let epoch = self.state.epoch as u64;
        let seed = args.model.seed;
        let options = LoaderOptions { batch: args.model.batch.get(), seed: Some(seed), workers: args.workers, prefetch: 2 };
        let view = Some((args.augment, seed, epoch));
        let loader = self.universes.loader::<Backend>(rank, &self.state.targets, &self.state.scaling, options, view);
        let steps = args.epochs * self.steps_per_epoch;
        let started = Instant::now();
        let before = self.state.losses.len();
        for batch in loader.epoch(epoch) {
            let batch = batch?;
            check_ids(&batch.ids, &rank.mesh)?;
            let loss = MseLoss::new().forward(self.model.forward(batch.volumes), batch.targets, Reduction::Mean);
            let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
            let rate = learning_rate(args.lr, self.state.step, steps);
            self.model = self.optimizer.step(rate, self.model.clone(), gradients);
            let loss: f32 = loss.into_scalar().elem();
            if !loss.is_finite() {
                let message = format!("the loss of step {} is {loss}: lower --lr", self.state.step);
                return on_all(rank.world(), Err(Error::Usage(message)));
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
            bar.suspend(|| println!("epoch {:>3} of {}: loss {mean:.5}, {seconds:.1} s", epoch + 1, args.epochs));
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
