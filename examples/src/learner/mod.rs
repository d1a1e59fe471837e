//! Burn's own training loop, burn-train's `Learner`, on volumes split over ranks.
//!
//! Every rank runs the same `Learner` with the same metrics on the same batches in the same order; rank 0 alone prints and
//! writes files. The model ([`model`]) knows nothing of ranks, the data ([`data`]) are split where batches are made.

pub mod data;
pub mod model;
pub mod progress;
pub mod train;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use crate::common::cli::RankArgs;
use crate::common::{self, ranks};

/// Burn's Learner on volumes that are split over ranks: a small network tells along which axis waves run.
#[derive(Clone, Debug, Parser)]
#[command(name = "learner", version, about, max_term_width = 110)]
pub struct Args {
    /// The ranks
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Folder for metrics and checkpoints
    #[arg(long, default_value = "learner-out", value_name = "DIR")]
    pub out: PathBuf,
    /// Times through the data
    #[arg(long, default_value = "3")]
    pub epochs: NonZeroUsize,
    /// Go on after this epoch, from its checkpoint in --out
    #[arg(long, value_name = "EPOCH")]
    pub resume: Option<usize>,
    /// Samples in a batch, of all ranks together
    #[arg(long, default_value = "4")]
    pub batch: NonZeroUsize,
    /// Volumes to train on; half as many are held out
    #[arg(long, default_value = "96")]
    pub count: NonZeroUsize,
    /// Voxels along each axis of a volume
    #[arg(long, default_value = "12")]
    pub size: NonZeroUsize,
    /// Learning rate
    #[arg(long, default_value_t = 0.01)]
    pub rate: f64,
    /// Seed of weights, data and their order
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Parses the command line and runs it. An error is one line on stderr and exit code 1.
pub fn main() -> ExitCode {
    let args = Args::parse();
    common::main(None, || ranks::start(&args.ranks, |rank| train::run(&rank, &args)).map(drop))
}
