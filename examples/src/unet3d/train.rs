//! Training.

use burn::tensor::{DType, Tensor};
use burn_spatial_io::{Epoch, Loader, LoaderOptions, SegmentationBatch, SegmentationOptions};
use burn_spatial_models::loss::{DiceCrossEntropy, all_ignored};
use burn_spatial_models::metric::ClassCounts;
use burn_spatial_models::{UNet3d, UNet3dConfig};
use serde::{Deserialize, Serialize};

use super::cli::{CompareArgs, ModelArgs, TrainArgs};
use super::data::{self, Volumes};
use super::evaluate;
use crate::common::checkpoint::State;
use crate::common::data::fingerprint;
use crate::common::ranks::{Rank, on_all, on_first};
use crate::common::training::{Plan, Task, Training};
use crate::common::{self, Backend, Device, Error, compare, report};

/// What a training made.
pub struct Outcome {
    /// The loss of every step since the start, resumed ones included.
    pub losses: Vec<f32>,
    /// What it makes of volumes it has not seen; `None` where the training was stopped before its end.
    pub test: Option<ClassCounts>,
}

/// [`UNet3dConfig`] as a checkpoint keeps it, and the class that does not count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Channels.
    pub inputs: usize,
    /// Classes.
    pub classes: usize,
    /// Levels of resolution.
    pub depth: usize,
    /// Channels of the first convolution.
    pub width: usize,
    /// Voxels of this class do not count.
    pub ignored: Option<i64>,
}

impl Setup {
    fn config(&self) -> UNet3dConfig {
        UNet3dConfig::new().with_inputs(self.inputs).with_classes(self.classes).with_depth(self.depth).with_width(self.width)
    }

    fn new(args: &ModelArgs, volumes: &Volumes) -> Setup {
        let SegmentationOptions { classes, ignored, .. } = volumes.options;
        Setup { inputs: volumes.channels, classes, depth: args.depth, width: args.width, ignored }
    }
}

/// Learning the class of every voxel.
pub struct Segmentation {
    loader: Loader<Backend, SegmentationBatch<Backend>>,
    loss: DiceCrossEntropy,
}

impl Task for Segmentation {
    const PROGRAM: &'static str = "unet3d";
    type Model = UNet3d<Backend>;
    type Setup = Setup;
    type Batch = SegmentationBatch<Backend>;

    fn model(setup: &Setup, device: &Device) -> Result<UNet3d<Backend>, Error> {
        Ok(setup.config().init(device)?)
    }

    fn counts_nothing(&self, batch: &SegmentationBatch<Backend>) -> bool {
        self.loss.ignore_index.is_some_and(|index| all_ignored(batch.targets.clone(), index))
    }

    fn batches(&self, state: &State<Setup>) -> Epoch<Backend, SegmentationBatch<Backend>> {
        self.loader.epoch(state.epoch as u64)
    }

    fn ids(batch: &SegmentationBatch<Backend>) -> &[usize] {
        &batch.ids
    }

    fn float64(batch: SegmentationBatch<Backend>) -> SegmentationBatch<Backend> {
        SegmentationBatch { images: batch.images.cast(DType::F64), ..batch }
    }

    fn loss(&self, model: &UNet3d<Backend>, batch: SegmentationBatch<Backend>) -> Tensor<Backend, 1> {
        self.loss.forward(model.forward(batch.images), batch.targets)
    }
}

/// The loss that `args` asks for.
fn loss(args: &ModelArgs) -> Result<DiceCrossEntropy, Error> {
    let weights = &args.class_weights;
    let classes = usize::from(args.classes);
    if !weights.is_empty() && weights.len() != classes {
        return Err(Error::Usage(format!("--class-weights: {} weights for {classes} classes", weights.len())));
    }
    let good = |w: &f64| w.is_finite() && *w >= 0.0;
    if !weights.iter().all(good) || (!weights.is_empty() && weights.iter().all(|w| *w == 0.0)) {
        return Err(Error::Usage("--class-weights must be 0 or more, and not all 0".into()));
    }
    let weights = Some(weights.clone()).filter(|weights| !weights.is_empty());
    Ok(DiceCrossEntropy::new().with_class_weights(weights).with_ignore_index(args.ignore_index))
}

/// The weights of classes as one gives them.
fn weights(args: &ModelArgs) -> String {
    let given: Vec<_> = args.class_weights.iter().map(f64::to_string).collect();
    if given.is_empty() { "all 1".into() } else { given.join(",") }
}

/// `unet3d train` on one rank. Collective.
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
    let loss = on_all(rank.world(), loss(&args.model))?;
    let options = data::options(&args.files, args.model.classes.into(), args.model.ignore_index);
    let (volumes, held_out) = Volumes::split(rank, &args.data, &args.test, seed, &options)?;
    let plan = Plan {
        out: args.out.clone(),
        epochs: args.run.epochs,
        batch,
        samples: volumes.files.len(),
        lr: args.lr,
        seed,
        files: fingerprint(&volumes.files),
        resume: args.run.resume,
        overwrite: args.run.overwrite,
        progress: !args.run.no_progress,
        stop_after: args.run.stop_after,
        option: ("--class-weights", weights(&args.model)),
    };
    plan.check(rank)?;
    let setup = Setup::new(&args.model, &volumes);
    on_all(rank.world(), setup.config().check_training(plan.smallest_batch(), volumes.extent).map_err(Error::from))?;
    let scaling = volumes.scaling(rank)?;
    let options = LoaderOptions { batch, seed: Some(seed), workers: args.run.workers, prefetch: 2 };
    let task = Segmentation { loader: volumes.loader(rank, &scaling, options)?, loss };
    let mut training = Training::start(rank, &task, &plan, setup, scaling)?;
    if rank.is_first() {
        let [d, h, w] = volumes.extent;
        println!(
            "{} volumes of {} x {d} x {h} x {w} to train on, {} to test on, {} classes, grid {}",
            volumes.files.len(),
            volumes.channels,
            held_out.files.len(),
            args.model.classes,
            rank.mesh.grid()
        );
    }
    let Some(timing) = training.run()? else {
        return Ok(Outcome { losses: training.state.losses, test: None });
    };
    let State { losses, scaling, .. } = training.state;
    let test = evaluate::evaluate(rank, &training.model, &held_out, &scaling, batch)?;
    report::write(rank, &args.out, &evaluate::Results::new(&test, held_out.files.len()), &losses, timing)?;
    let what = "cross-entropy + Dice loss";
    on_first(rank.world(), || common::plot::losses(&args.out.join("loss.png"), &losses, plan.steps_per_epoch(), what))?;
    if rank.is_first() {
        print!("{}", evaluate::Table(&test));
    }
    Ok(Outcome { losses, test: Some(test) })
}

/// `unet3d compare-ranks` on one rank. Collective.
///
/// # Errors
/// As for [`compare::step`].
pub fn compare_ranks(rank: Rank, args: &CompareArgs) -> Result<(), Error> {
    let loss = on_all(rank.world(), loss(&args.model))?;
    let options = data::options(&args.files, args.model.classes.into(), args.model.ignore_index);
    let volumes = Volumes::of_folder(&rank, &args.data, &options)?;
    let setup = Setup::new(&args.model, &volumes);
    let first = args.model.batch.get().min(volumes.files.len());
    on_all(rank.world(), setup.config().check_training(first, volumes.extent).map_err(Error::from))?;
    let scaling = volumes.scaling(&rank)?;
    let options = LoaderOptions { batch: args.model.batch.get(), seed: None, workers: 1, prefetch: 1 };
    let task = Segmentation { loader: volumes.loader(&rank, &scaling, options)?, loss };
    compare::step(&rank, &task, (setup, scaling), args.model.seed, &args.step)
}
