//! Options that programs share.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use burn_spatial::Grid;
use clap::Args;

/// What a grid is, for `--help`.
pub const GRID_HELP: &str = "\
Ranks along data, depth, height and width, as in 2x2x2x1

N x D x H x W: N groups share the batch, and each splits its volumes into D x H x W blocks.
With --grid 2x2x2x1 eight ranks hold

      half the batch      the other half
        height ->           height ->
    d  +---+---+        d  +---+---+
    e  | 0 | 1 |        e  | 4 | 5 |
    p  +---+---+        p  +---+---+
    t  | 2 | 3 |        t  | 6 | 7 |
    h  +---+---+        h  +---+---+

Results do not depend on the grid, up to rounding.";

/// How to start the ranks of a grid, for `--help`.
const START_HELP: &str = "Start as many ranks as the grid has:\nmpirun -n 8 PROGRAM ..., or --local-ranks 8.";

/// Where the program runs.
#[derive(Args, Clone, Debug)]
pub struct RankArgs {
    /// Ranks along data, depth, height and width, as in 2x2x2x1 (--help shows a picture)
    #[arg(long, default_value = "1x1x1x1", long_help = format!("{GRID_HELP} {START_HELP}"))]
    pub grid: Grid,
    /// Run this many ranks as threads of this process, without mpirun
    #[arg(long, value_name = "P")]
    pub local_ranks: Option<NonZeroUsize>,
}

/// How long a training goes on.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Passes over the training samples
    #[arg(long, default_value_t = 40)]
    pub epochs: usize,
    /// Threads that read ahead, of each rank
    #[arg(long, default_value_t = 1)]
    pub workers: usize,
    /// Continue from the checkpoint in --out, if there is one
    #[arg(long)]
    pub resume: bool,
    /// Replace the training that is in --out
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
    /// No progress bar: for jobs whose output mpirun writes to a file, which to the ranks looks like a terminal
    #[arg(long)]
    pub no_progress: bool,
    /// Stop after this epoch, as if time ran out; --resume goes on
    #[arg(long, value_name = "EPOCH")]
    pub stop_after: Option<usize>,
    /// Folder for a timeline of each rank, trace-RANK.json, in the Chrome trace format (open it in ui.perfetto.dev)
    #[arg(long, value_name = "DIR")]
    pub trace: Option<PathBuf>,
}

/// What `compare-ranks` computes, and with what it compares.
#[derive(Args, Clone, Debug)]
pub struct StepArgs {
    /// File for the loss, the gradients and the running statistics (safetensors)
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Such a file of another grid: prints the largest relative difference
    #[arg(long, value_name = "FILE")]
    pub against: Option<PathBuf>,
    /// Compute in float64: in float32 a voxel within rounding of an activation's kink or of another maximum can fall
    /// to either side, and its gradient jumps
    #[arg(long)]
    pub float64: bool,
}

/// Which files are held out.
#[derive(Args, Clone, Debug)]
pub struct TestArgs {
    /// Folder of files to test on
    #[arg(long, value_name = "DIR")]
    pub test_data: Option<PathBuf>,
    /// Without --test-data: share of --data that is held out
    #[arg(long, default_value_t = 0.2, value_name = "SHARE", allow_negative_numbers = true)]
    pub test_fraction: f64,
}
