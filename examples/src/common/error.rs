//! What can go wrong, in the words the user reads.

use std::path::{Path, PathBuf};

use burn_spatial::comm::CommError;
use burn_spatial::launch::LaunchError;
use burn_spatial::mesh::MeshError;
use burn_spatial_io::synth::SynthError;
use burn_spatial_io::{DataError, IdsError, WriteError};
use burn_spatial_models::weights::WeightsError;
use burn_spatial_models::{cosmoflow, unet};

/// Why the program ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The grid does not fit the ranks.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// Ranks cannot talk.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Ranks hold blocks of different samples.
    #[error(transparent)]
    Ids(#[from] IdsError),
    /// There is no such CosmoFlow.
    #[error(transparent)]
    CosmoFlow(#[from] cosmoflow::ConfigError),
    /// There is no such U-Net.
    #[error(transparent)]
    UNet(#[from] unet::ConfigError),
    /// Weights do not fit.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A volume cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// Synthetic volumes cannot be made.
    #[error(transparent)]
    Synth(#[from] SynthError),
    /// The ranks could not be started, or one failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The file system.
    #[error("{}: {cause}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The system's words.
        cause: std::io::Error,
    },
    /// Results could not be written.
    #[error("{}: no file can be written there: {cause}", folder.display())]
    Unwritable {
        /// The folder.
        folder: PathBuf,
        /// The system's words.
        cause: std::io::Error,
    },
    /// A picture could not be drawn.
    #[error("{}: the plot could not be written: {cause}", path.display())]
    Plot {
        /// The file.
        path: PathBuf,
        /// What plotters says.
        cause: String,
    },
    /// The training left the numbers that there are.
    #[error("step {step}: {what}: lower --lr, and {}", go_on(*.saved))]
    Diverged {
        /// The step.
        step: usize,
        /// What happened.
        what: String,
        /// The epoch of the last checkpoint, 0 without one.
        saved: usize,
    },
    /// No usable checkpoint.
    #[error("{0}")]
    Checkpoint(String),
    /// Arguments that do not fit together or the data.
    #[error("{0}")]
    Usage(String),
    /// Rank 0 failed where it works for all.
    #[error("{0}")]
    First(String),
}

/// How to go on after a training that was good until epoch `saved`.
fn go_on(saved: usize) -> String {
    match saved {
        0 => "start again".into(),
        saved => format!("go on after epoch {saved} with --resume"),
    }
}

impl Error {
    /// For `map_err` on what touches `path`.
    pub fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        move |cause| Error::Io { path: path.to_owned(), cause }
    }
}
