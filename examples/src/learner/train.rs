//! The training: what every rank does alike, and what rank 0 does alone.

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::optim::AdamConfig;
use burn::record::CompactRecorder;
use burn::tensor::backend::Backend as _;
use burn_spatial::{Mesh, SpatialBackend};
use burn_train::checkpoint::{CheckpointingAction, CheckpointingStrategy};
use burn_train::logger::{FileMetricLogger, InMemoryMetricLogger};
use burn_train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn_train::metric::{AccuracyMetric, LossMetric};
use burn_train::{EarlyStoppingStrategy, Interrupter, Learner, MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining};

use super::Args;
use super::data::{WaveBatch, WaveBatcher, Waves};
use super::model::Classifier;
use super::progress::{Epoch, History, Progress};
use crate::common::ranks::{Rank, on_all};
use crate::common::training::smallest_batch;
use crate::common::{Backend, Error, Inner};

/// An early stop that rank 0 decides for all.
///
/// Burn's strategies ask for metrics that another thread may still be writing: each rank for itself could decide
/// otherwise, and the one that goes on would wait for the others for ever.
#[derive(Clone, Debug)]
pub struct Agreed<S> {
    /// What rank 0 asks.
    pub strategy: S,
    /// The ranks.
    pub mesh: Arc<Mesh>,
}

impl<S: EarlyStoppingStrategy> EarlyStoppingStrategy for Agreed<S> {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        let own = self.strategy.should_stop(epoch, store);
        let decided = self.mesh.world().broadcast(0, vec![u8::from(own)]);
        decided.unwrap_or_else(|error| panic!("{error}")) == [1]
    }
}

/// Saves nothing, where another rank does.
#[derive(Clone, Copy, Debug)]
pub struct Never;

impl CheckpointingStrategy for Never {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        Vec::new()
    }
}

/// Batches in an order that `shuffle` decides, the same on every rank. Without workers, whose batches come as they are
/// ready.
fn batches<B: SpatialBackend>(data: Waves, args: &Args, shuffle: Option<u64>) -> Arc<dyn DataLoader<B, WaveBatch<B>>> {
    let builder = DataLoaderBuilder::new(WaveBatcher).batch_size(args.batch.get());
    shuffle.into_iter().fold(builder, DataLoaderBuilder::shuffle).build(data)
}

/// Trains on all ranks, and returns the metrics of each epoch: the same on every rank. Collective.
///
/// # Errors
/// [`Error::First`] when rank 0 cannot write a checkpoint, [`Error::Usage`] for volumes and batches too small to train on.
pub fn run(rank: &Rank, args: &Args) -> Result<Vec<Epoch>, Error> {
    // The second convolution halves the volume, and batch norm needs two values a channel.
    let smallest = smallest_batch(args.count.get(), args.batch.get());
    if smallest == 1 && args.size.get() <= 2 {
        let message =
            "a batch of 1 volume of at most 2 voxels along each axis leaves one value a channel, on which batch norm cannot train";
        return on_all(rank.world(), Err(Error::Usage(message.into())));
    }
    let device = &rank.device;
    Backend::seed(device, args.seed);
    let waves = |count, seed| Waves { count, size: args.size.get(), seed };
    let train = batches::<Backend>(waves(args.count.get(), args.seed), args, Some(args.seed));
    let valid = batches::<Inner>(waves(args.count.get().div_ceil(2), args.seed + 1), args, None);

    let no_progress = StoppingCondition::NoImprovementSince { n_epochs: 5 };
    let loss = LossMetric::<Backend>::new();
    let strategy = MetricEarlyStoppingStrategy::new(&loss, Aggregate::Mean, Direction::Lowest, Split::Valid, no_progress);
    let (history, interrupter) = (History::default(), Interrupter::new());
    let training = SupervisedTraining::new(&args.out, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .num_epochs(args.epochs.get())
        .early_stopping(Agreed { strategy, mesh: rank.mesh.clone() })
        .with_interrupter(interrupter.clone())
        .with_application_logger(None)
        .with_metric_logger(InMemoryMetricLogger::new())
        .renderer(Progress::new(rank.is_first(), history.clone()));
    // All can read checkpoints. Files are written by rank 0 alone: the others have the same metrics and weights.
    let training = training.with_file_checkpointer(CompactRecorder::new());
    let training = match rank.is_first() {
        true => training.with_metric_logger(FileMetricLogger::new(&args.out)),
        false => training.with_checkpointing_strategy(Never),
    };
    let training = args.resume.into_iter().fold(training, SupervisedTraining::checkpoint);
    training.launch(Learner::new(Classifier::<Backend>::new(device), AdamConfig::new().init(), args.rate));
    // Rank 0 stops when it cannot write. The others wait for it then, and its error ends them.
    match interrupter.get_message() {
        Some(reason) => Err(Error::First(reason)),
        None => Ok(history.epochs()),
    }
}
