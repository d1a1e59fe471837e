//! Training.

use burn::nn::loss::{MseLoss, Reduction};
use burn::tensor::{DType, Tensor};
use burn_spatial_io::{CosmoFlowBatch, Epoch, LoaderOptions};
use burn_spatial_models::{CosmoFlow, CosmoFlowConfig};
use serde::{Deserialize, Serialize};

use super::augment::Symmetry;
use super::cli::{CompareArgs, ModelArgs, TrainArgs};
use super::data::{Targets, Universes};
use super::{evaluate, plot};
use crate::common::checkpoint::State;
use crate::common::data::fingerprint;
use crate::common::ranks::{Rank, on_all, on_first};
use crate::common::training::{Plan, Task, Training};
use crate::common::{self, Backend, Device, Error, compare, exact, report};

/// What a training made.
pub struct Outcome {
    /// The loss of every step since the start, resumed ones included.
    pub losses: Vec<f32>,
    /// How good it is on universes it has not seen; `None` where the training was stopped before its end.
    pub test: Option<evaluate::Evaluation>,
}

/// [`CosmoFlowConfig`] as a checkpoint keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// Voxels along each edge.
    pub width: usize,
    /// Channels.
    pub inputs: usize,
    /// Parameters predicted.
    pub outputs: usize,
    /// Whether there is batch norm.
    pub batch_norm: bool,
    /// Dropout.
    #[serde(with = "exact")]
    pub dropout: f64,
    /// Divisor of channels and units.
    pub scale: usize,
}

/// The network, and what it predicts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// The network.
    pub config: Network,
    /// What it predicts.
    pub targets: Targets,
}

impl Setup {
    /// The network that `args` asks for, to learn what varies in `universes`.
    ///
    /// # Errors
    /// [`Error::Usage`] when nothing varies.
    pub fn new(args: &ModelArgs, universes: &Universes) -> Result<Setup, Error> {
        let targets = universes.targets()?;
        let config = Network {
            width: universes.width,
            inputs: universes.channels,
            outputs: targets.names.len(),
            batch_norm: args.norm.batch_norm,
            dropout: args.dropout,
            scale: args.scale,
        };
        Ok(Setup { config, targets })
    }
}

/// Learning parameters from universes.
pub struct Regression<'a> {
    /// This rank.
    pub rank: &'a Rank,
    /// The universes.
    pub universes: &'a Universes,
    /// How they are read.
    pub options: LoaderOptions,
    /// What is done to them, and the seed of it.
    pub views: Option<(Symmetry, u64)>,
}

impl Task for Regression<'_> {
    const PROGRAM: &'static str = "cosmoflow";
    type Model = CosmoFlow<Backend>;
    type Setup = Setup;
    type Batch = CosmoFlowBatch<Backend>;

    fn model(setup: &Setup, device: &Device) -> Result<CosmoFlow<Backend>, Error> {
        let network = &setup.config;
        let config = CosmoFlowConfig::new(network.width)
            .with_inputs(network.inputs)
            .with_outputs(network.outputs)
            .with_batch_norm(network.batch_norm)
            .with_dropout(network.dropout)
            .with_scale(network.scale);
        Ok(config.init(device)?)
    }

    fn batches(&self, state: &State<Setup>) -> Epoch<Backend, CosmoFlowBatch<Backend>> {
        let epoch = state.epoch as u64;
        let view = self.views.map(|(symmetry, seed)| (symmetry, seed, epoch));
        let loader = self.universes.loader::<Backend>(self.rank, &state.setup.targets, &state.scaling, self.options.clone(), view);
        loader.epoch(epoch)
    }

    fn ids(batch: &CosmoFlowBatch<Backend>) -> &[usize] {
        &batch.ids
    }

    fn float64(batch: CosmoFlowBatch<Backend>) -> CosmoFlowBatch<Backend> {
        CosmoFlowBatch { volumes: batch.volumes.cast(DType::F64), targets: batch.targets.cast(DType::F64), ..batch }
    }

    fn loss(&self, model: &CosmoFlow<Backend>, batch: CosmoFlowBatch<Backend>) -> Tensor<Backend, 1> {
        MseLoss::new().forward(model.forward(batch.volumes), batch.targets, Reduction::Mean)
    }
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
    let (batch, seed) = (args.model.batch.get(), args.model.seed);
    let (universes, held_out) = Universes::split(rank, &args.data, &args.test, seed)?;
    let plan = Plan {
        out: args.out.clone(),
        epochs: args.run.epochs,
        batch,
        samples: universes.files.len(),
        lr: args.lr,
        seed,
        files: fingerprint(&universes.files),
        resume: args.run.resume,
        overwrite: args.run.overwrite,
        progress: !args.run.no_progress,
        stop_after: args.run.stop_after,
        option: ("--augment", args.augment.name().into()),
    };
    plan.check(rank)?;
    let setup = on_all(rank.world(), Setup::new(&args.model, &universes))?;
    let options = LoaderOptions { batch, seed: Some(seed), workers: args.run.workers, prefetch: 2 };
    let task = Regression { rank, universes: &universes, options, views: Some((args.augment, seed)) };
    let mut training = Training::start(rank, &task, &plan, setup, universes.scaling(rank)?)?;
    if rank.is_first() {
        introduce(rank, &universes, &held_out, &training.state.setup.targets);
    }
    let Some(timing) = training.run()? else {
        return Ok(Outcome { losses: training.state.losses, test: None });
    };
    let State { losses, setup, scaling, .. } = training.state;
    let test = evaluate::evaluate(rank, &training.model, &held_out, (&setup.targets, &scaling), batch)?;
    report::write(rank, &args.out, &test.results(), &losses, timing)?;
    on_first(rank.world(), || {
        common::plot::losses(&args.out.join("loss.png"), &losses, plan.steps_per_epoch(), "mean square error")?;
        plot::predicted(&args.out.join("predicted.png"), &test)
    })?;
    if rank.is_first() {
        print!("{test}");
    }
    Ok(Outcome { losses, test: Some(test) })
}

fn introduce(rank: &Rank, universes: &Universes, held_out: &Universes, targets: &Targets) {
    let Universes { files, channels, width, names, .. } = universes;
    let constant: Vec<_> = names.iter().filter(|n| !targets.names.contains(n)).cloned().collect();
    println!(
        "{} universes of {channels} x {width}^3 to train on, {} to test on, grid {}",
        files.len(),
        held_out.files.len(),
        rank.mesh.grid()
    );
    print!("learning {}", targets.names.join(", "));
    println!("{}", if constant.is_empty() { String::new() } else { format!(" ({} do not vary)", constant.join(", ")) });
}

/// `cosmoflow compare-ranks` on one rank. Collective.
///
/// # Errors
/// As for [`compare::step`].
pub fn compare_ranks(rank: Rank, args: &CompareArgs) -> Result<(), Error> {
    let universes = Universes::of_folder(&rank, &args.data)?;
    let setup = on_all(rank.world(), Setup::new(&args.model, &universes))?;
    let scaling = universes.scaling(&rank)?;
    let options = LoaderOptions { batch: args.model.batch.get(), seed: None, workers: 1, prefetch: 1 };
    let task = Regression { rank: &rank, universes: &universes, options, views: None };
    compare::step(&rank, &task, (setup, scaling), args.model.seed, &args.step)
}
