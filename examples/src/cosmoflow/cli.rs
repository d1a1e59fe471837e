//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use burn_spatial::Grid;
use clap::{Args, Parser, Subcommand, ValueEnum};

use super::augment::Symmetry;
use crate::common::cli::{GRID_HELP, RankArgs, RunArgs, StepArgs, TestArgs};

/// Cosmological parameters from simulated universes that are split over ranks.
#[derive(Debug, Parser)]
#[command(name = "cosmoflow", version, about, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a network, and test it on universes it has not seen
    Train(TrainArgs),
    /// Test a trained network
    Eval(EvalArgs),
    /// Make synthetic universes to train on
    Synth(SynthArgs),
    /// Show how a network lies on a grid and what memory it takes, without running it
    Layout(LayoutArgs),
    /// Write what one training step computes, to compare grids with each other
    CompareRanks(CompareArgs),
}

/// Whether the network has batch norm.
#[derive(Args, Clone, Debug)]
pub struct NormArgs {
    /// Put a batch norm behind each convolution
    #[arg(long, overrides_with = "no_batch_norm")]
    pub batch_norm: bool,
    /// No batch norm (default)
    #[arg(long)]
    pub no_batch_norm: bool,
}

/// The network and how it is fed.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// Samples in a batch, of all ranks together
    #[arg(long, default_value = "4")]
    pub batch: NonZeroUsize,
    /// Its batch norm.
    #[command(flatten)]
    pub norm: NormArgs,
    /// Share of the dense layers' inputs that training drops
    #[arg(long, default_value_t = 0.2, allow_negative_numbers = true)]
    pub dropout: f64,
    /// Divides the numbers of channels and units
    #[arg(long, default_value_t = 1)]
    pub scale: usize,
    /// Seed of weights, order, dropout and augmentation
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// `cosmoflow train`.
#[derive(Args, Clone, Debug)]
pub struct TrainArgs {
    /// Folder of HDF5 universes with `full` (the volume) and `unitPar` (the parameters)
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// Folder for the checkpoint, loss.png, predicted.png and metrics.json
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Where it runs.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// What it is tested on.
    #[command(flatten)]
    pub test: TestArgs,
    /// The network.
    #[command(flatten)]
    pub model: ModelArgs,
    /// How long.
    #[command(flatten)]
    pub run: RunArgs,
    /// Learning rate of the first step; it falls linearly to a hundredth
    #[arg(long, default_value_t = 5e-4, allow_negative_numbers = true)]
    pub lr: f64,
    /// What is done to universes that leaves their parameters the same
    #[arg(long, value_enum, default_value_t = Symmetry::Mirror)]
    pub augment: Symmetry,
}

/// `cosmoflow eval`.
#[derive(Args, Clone, Debug)]
pub struct EvalArgs {
    /// Folder of HDF5 universes
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// A checkpoint of `cosmoflow train`
    #[arg(long, value_name = "FILE")]
    pub checkpoint: PathBuf,
    /// Where it runs.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Samples in a batch, of all ranks together
    #[arg(long, default_value = "4")]
    pub batch: NonZeroUsize,
    /// Folder for predicted.png and metrics.json
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// `cosmoflow synth`.
#[derive(Args, Clone, Debug)]
pub struct SynthArgs {
    /// Folder for the files
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// How many universes
    #[arg(long, default_value_t = 16)]
    pub count: usize,
    /// Number of the first one: the same seed and another start give other universes
    #[arg(long, default_value_t = 0)]
    pub start: usize,
    /// Cells along each edge
    #[arg(long, default_value_t = 32)]
    pub grid_size: usize,
    /// Size of a cell in Mpc/h
    #[arg(long, default_value_t = 4.0, allow_negative_numbers = true)]
    pub cell: f64,
    /// Seed of the set
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// How far parameters vary around their middle, relative
    #[arg(long, default_value_t = 0.3, allow_negative_numbers = true)]
    pub spread: f64,
    /// Parameters that vary, of Omega_m, sigma_8, N_spec and H_0
    #[arg(long, value_delimiter = ',', default_value = "Omega_m,sigma_8,N_spec,H_0", value_name = "NAMES")]
    pub vary: Vec<String>,
    /// Keep the box size at that of H_0 = 70
    #[arg(long)]
    pub fixed_box: bool,
}

/// `cosmoflow layout`.
#[derive(Args, Clone, Debug)]
pub struct LayoutArgs {
    /// Ranks along data, depth, height and width, as in 2x2x2x1 (--help shows a picture)
    #[arg(long, default_value = "1x1x1x1", long_help = GRID_HELP)]
    pub grid: Grid,
    /// Voxels along each edge of the universe: 32, 64, 128, 256 or 512
    #[arg(long, default_value_t = 512)]
    pub width: usize,
    /// Samples in a batch, of all ranks together
    #[arg(long, default_value = "1")]
    pub batch: NonZeroUsize,
    /// The network's batch norm.
    #[command(flatten)]
    pub norm: NormArgs,
}

/// `cosmoflow compare-ranks`.
#[derive(Args, Clone, Debug)]
pub struct CompareArgs {
    /// Folder of HDF5 universes
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// What is computed.
    #[command(flatten)]
    pub step: StepArgs,
    /// Where it runs.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// The network.
    #[command(flatten)]
    pub model: ModelArgs,
}

impl ValueEnum for Symmetry {
    fn value_variants<'a>() -> &'a [Self] {
        &[Symmetry::None, Symmetry::Mirror, Symmetry::Periodic]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        let help = match self {
            Symmetry::None => "read as stored",
            Symmetry::Mirror => "axes exchanged and mirrored: 48 views of a cube",
            Symmetry::Periodic => "mirror, and shifted around: for whole periodic boxes only",
        };
        Some(clap::builder::PossibleValue::new(self.name()).help(help))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_shows_the_grid_and_errors_name_it() {
        let mut command = Cli::command();
        let help = command.find_subcommand_mut("train").unwrap().render_long_help().to_string();
        assert!(help.contains("| 2 | 3 |") && help.contains("or --local-ranks 8"), "{help}");
        let help = command.find_subcommand_mut("layout").unwrap().render_long_help().to_string();
        assert!(help.contains("| 2 | 3 |") && !help.contains("--local-ranks"), "{help}");
        let parse = |grid: &str| Cli::try_parse_from(["cosmoflow", "train", "--data", "d", "--out", "o", "--grid", grid]);
        assert!(parse("2x2").unwrap_err().to_string().contains("is not a grid"));
        let Command::Train(args) = parse("1x2x2x1").unwrap().command else { panic!("another command") };
        assert_eq!(args.ranks.grid, Grid([1, 2, 2, 1]));
    }
}
