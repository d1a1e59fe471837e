//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand};

use crate::common::cli::{RankArgs, RunArgs, StepArgs, TestArgs};

/// The class of every voxel of volumes that are split over ranks.
#[derive(Debug, Parser)]
#[command(name = "unet3d", version, about, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a network, and test it on volumes it has not seen
    Train(TrainArgs),
    /// Test a trained network
    Eval(EvalArgs),
    /// Write the class of every voxel of one volume
    Predict(PredictArgs),
    /// Make synthetic labelled volumes to train on
    Synth(SynthArgs),
    /// Write what one training step computes, to compare grids with each other
    CompareRanks(CompareArgs),
}

/// How volumes are stored.
#[derive(Args, Clone, Debug)]
pub struct FileArgs {
    /// Name of the volume in a file: (D, H, W) or (channels, D, H, W), int16 or float32
    #[arg(long, default_value = "volume", value_name = "NAME")]
    pub volume: String,
    /// Name of the classes in a file: (D, H, W), integers or floats
    #[arg(long, default_value = "segmentation", value_name = "NAME")]
    pub segmentation: String,
}

/// The network and how it is fed.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// Samples in a batch, of all ranks together
    #[arg(long, default_value = "2")]
    pub batch: NonZeroUsize,
    /// Classes of voxels, 2 to 256
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(2..=256))]
    pub classes: u16,
    /// Levels of resolution, each half of the one above; 1 to 10
    #[arg(long, default_value_t = 4, value_parser = RangedU64ValueParser::<usize>::new().range(1..=10))]
    pub depth: usize,
    /// Channels of the first convolution, 1 to 4096
    #[arg(long, default_value_t = 32, value_parser = RangedU64ValueParser::<usize>::new().range(1..=4096))]
    pub width: usize,
    /// Voxels of this class do not count, in training and in tests
    #[arg(long, value_name = "CLASS", allow_negative_numbers = true)]
    pub ignore_index: Option<i64>,
    /// Weight of each class in the cross-entropy, as in 0.2,1,1; all 1 if not given
    #[arg(long, value_delimiter = ',', value_name = "WEIGHTS")]
    pub class_weights: Vec<f64>,
    /// Seed of weights and order
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// `unet3d train`.
#[derive(Args, Clone, Debug)]
pub struct TrainArgs {
    /// Folder of HDF5 files with a volume and the class of each voxel
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// Folder for the checkpoint, loss.png and metrics.json
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Where it runs.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// What it is tested on.
    #[command(flatten)]
    pub test: TestArgs,
    /// How volumes are stored.
    #[command(flatten)]
    pub files: FileArgs,
    /// The network.
    #[command(flatten)]
    pub model: ModelArgs,
    /// How long.
    #[command(flatten)]
    pub run: RunArgs,
    /// Learning rate of the first step; it falls linearly to a hundredth
    #[arg(long, default_value_t = 1e-3, allow_negative_numbers = true)]
    pub lr: f64,
}

/// `unet3d eval`.
#[derive(Args, Clone, Debug)]
pub struct EvalArgs {
    /// Folder of HDF5 files with a volume and the class of each voxel
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// A checkpoint of `unet3d train`
    #[arg(long, value_name = "FILE")]
    pub checkpoint: PathBuf,
    /// Where it runs.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// How volumes are stored.
    #[command(flatten)]
    pub files: FileArgs,
    /// Samples in a batch, of all ranks together
    #[arg(long, default_value = "2")]
    pub batch: NonZeroUsize,
    /// Folder for metrics.json
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// `unet3d predict`.
#[derive(Args, Clone, Debug)]
pub struct PredictArgs {
    /// An HDF5 file with a volume, of any extent
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
    /// A checkpoint of `unet3d train`
    #[arg(long, value_name = "FILE")]
    pub checkpoint: PathBuf,
    /// Folder for prediction.hdf5 (`segmentation`, uint8) and prediction.png
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Where it runs.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Name of the volume in the file: (D, H, W) or (channels, D, H, W), int16 or float32
    #[arg(long, default_value = "volume", value_name = "NAME")]
    pub volume: String,
}

/// `unet3d synth`.
#[derive(Args, Clone, Debug)]
pub struct SynthArgs {
    /// Folder for the files
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// How many volumes
    #[arg(long, default_value_t = 16)]
    pub count: usize,
    /// Number of the first one: the same seed and another start give other volumes
    #[arg(long, default_value_t = 0)]
    pub start: usize,
    /// Voxels along each edge
    #[arg(long, default_value_t = 32)]
    pub size: usize,
    /// Seed of the set
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Standard deviation of the noise, where classes are 0.2 to 0.4 apart
    #[arg(long, default_value_t = 0.1, allow_negative_numbers = true)]
    pub noise: f64,
    /// Standard deviation of the logarithm of the bias field
    #[arg(long, default_value_t = 0.1, allow_negative_numbers = true)]
    pub bias: f64,
}

/// `unet3d compare-ranks`.
#[derive(Args, Clone, Debug)]
pub struct CompareArgs {
    /// Folder of HDF5 files with a volume and the class of each voxel
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// What is computed.
    #[command(flatten)]
    pub step: StepArgs,
    /// Where it runs.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// How volumes are stored.
    #[command(flatten)]
    pub files: FileArgs,
    /// The network.
    #[command(flatten)]
    pub model: ModelArgs,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        let words = ["unet3d", "train", "--data", "d", "--out", "o", "--class-weights", "0.5,1,2", "--ignore-index", "-1"];
        let Command::Train(args) = Cli::try_parse_from(words).unwrap().command else { panic!("another command") };
        assert_eq!((args.model.class_weights, args.model.ignore_index), (vec![0.5, 1.0, 2.0], Some(-1)));
        let parse = |option, value| Cli::try_parse_from(["unet3d", "train", "--data", "d", "--out", "o", option, value]);
        for (option, value) in [("--classes", "1"), ("--depth", "11"), ("--depth", "0"), ("--width", "4097")] {
            assert!(parse(option, value).is_err(), "{option} {value}");
        }
        for option in ["--lr", "--test-fraction"] {
            assert!(parse(option, "-1").is_ok(), "the program's own message follows");
        }
    }
}
