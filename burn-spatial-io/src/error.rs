//! What can be wrong with the data.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where something went wrong: which rank read what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// The file or folder.
    pub file: PathBuf,
    /// The dataset within the file, where one is concerned.
    pub dataset: Option<String>,
    /// The rank that read, in the world communicator.
    pub rank: usize,
}

impl At {
    /// The file as a whole.
    pub fn file(file: &Path, rank: usize) -> Box<At> {
        Box::new(At { file: file.to_owned(), dataset: None, rank })
    }

    /// One dataset of the file.
    pub fn dataset(file: &Path, dataset: &str, rank: usize) -> Box<At> {
        Box::new(At { file: file.to_owned(), dataset: Some(dataset.to_owned()), rank })
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: {}", self.rank, self.file.display())?;
        match &self.dataset {
            Some(dataset) => write!(f, ", dataset '{dataset}'"),
            None => Ok(()),
        }
    }
}

fn or_ignored(ignored: Option<i64>) -> String {
    ignored.map_or_else(String::new, |value| format!(" or {value}, which is ignored"))
}

/// What a file holds, for messages.
fn members(found: &[String]) -> String {
    if found.is_empty() { "is empty".into() } else { format!("has {}", found.join(", ")) }
}

/// What to do about another element type, where the taken ones are numbers.
fn rewrite(expected: &str) -> &'static str {
    if expected.contains("float32") { "; rewrite it as one of these, with NumPy by .astype('float32')" } else { "" }
}

/// What to do about chunks that HDF5 cannot decompress.
fn unfilter(cause: &str) -> &'static str {
    let filtered = ["filter", "pipeline", "inflate", "chunk"].iter().any(|word| cause.contains(word));
    if filtered { "; rewrite it with gzip or without compression, or copy it again" } else { "" }
}

/// Why a sample cannot be read. Every message names the rank, the file and, where there is one, the dataset.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DataError {
    /// No such file.
    #[error("{at}: there is no such file; check the data folder, and that this node mounts it")]
    Missing {
        /// Where.
        at: Box<At>,
    },
    /// No such folder.
    #[error("{at}: there is no such folder; check its name, and that this node mounts it")]
    MissingFolder {
        /// Where.
        at: Box<At>,
    },
    /// The operating system refuses: permissions, a folder for a file, a lock.
    #[error("{at}: cannot be opened: {cause}")]
    Unreadable {
        /// Where.
        at: Box<At>,
        /// The system's words.
        cause: String,
    },
    /// Not an HDF5 file, or one cut short.
    #[error("{at}: not a whole HDF5 file ({cause}); it may be truncated, copy or make it again")]
    NotHdf5 {
        /// Where.
        at: Box<At>,
        /// HDF5's words.
        cause: String,
    },
    /// The folder holds no `.hdf5` or `.h5` file.
    #[error("{at}: expected files that end in .hdf5 or .h5, found none")]
    NoFiles {
        /// The folder.
        at: Box<At>,
    },
    /// The dataset is not in the file.
    #[error("{at}: no such dataset; the file {}", members(.found))]
    NoDataset {
        /// Where.
        at: Box<At>,
        /// The names there are.
        found: Vec<String>,
    },
    /// The file has no labels.
    #[error("{at}: the file has no labels under this name; it {}", members(.found))]
    NoLabels {
        /// Where.
        at: Box<At>,
        /// The names there are.
        found: Vec<String>,
    },
    /// Wrong number of dimensions.
    #[error("{at}: expected {expected} dimensions, found {} {shape:?}", .shape.len())]
    Dimensions {
        /// Where.
        at: Box<At>,
        /// Dimensions expected.
        expected: &'static str,
        /// The stored shape.
        shape: Vec<usize>,
    },
    /// A shape that does not fit the set or the model.
    #[error("{at}: expected {expected}, found the shape {shape:?}")]
    Shape {
        /// Where.
        at: Box<At>,
        /// What would fit.
        expected: String,
        /// The stored shape, channels first for a volume.
        shape: Vec<usize>,
    },
    /// An element type this reader does not take. HDF5 would convert, and saturate without a word.
    #[error("{at}: expected elements of type {expected}, found {found}{}", rewrite(.expected))]
    Type {
        /// Where.
        at: Box<At>,
        /// The types taken.
        expected: &'static str,
        /// The stored type.
        found: String,
    },
    /// A block that is not inside the volume.
    #[error("{at}: block from {start:?} of extent {extent:?} is not inside the volume {volume:?}")]
    Block {
        /// Where.
        at: Box<At>,
        /// The block's first voxel.
        start: [usize; 3],
        /// The block's extent.
        extent: [usize; 3],
        /// The volume's extent.
        volume: [usize; 3],
    },
    /// HDF5 could not read the elements: a damaged chunk, a filter that is not there, a failing disk.
    #[error("{at}: reading failed: {cause}{}", unfilter(.cause))]
    Read {
        /// Where.
        at: Box<At>,
        /// HDF5's words.
        cause: String,
    },
    /// A count below zero.
    #[error("{at}: expected counts from 0, found {value} at channel {}, depth {}, height {}, width {}", .position[0], .position[1], .position[2], .position[3])]
    Negative {
        /// Where.
        at: Box<At>,
        /// Channel, depth, height and width in the whole volume.
        position: [usize; 4],
        /// The value.
        value: f64,
    },
    /// NaN or infinite voxel.
    #[error("{at}: expected finite values, found {value} at channel {}, depth {}, height {}, width {}", .position[0], .position[1], .position[2], .position[3])]
    NonFinite {
        /// Where.
        at: Box<At>,
        /// Channel, depth, height and width in the whole volume.
        position: [usize; 4],
        /// The value, as text: NaN equals nothing.
        value: String,
    },
    /// A voxel of no class.
    #[error("{at}: expected classes from 0 to {}{}, found {value} at depth {}, height {}, width {}", .classes.saturating_sub(1), or_ignored(*.ignored), .position[0], .position[1], .position[2])]
    Class {
        /// Where.
        at: Box<At>,
        /// How many classes there are.
        classes: usize,
        /// What voxels that do not count hold.
        ignored: Option<i64>,
        /// Depth, height and width in the whole volume.
        position: [usize; 3],
        /// The value, as text.
        value: String,
    },
    /// NaN or infinite label.
    #[error("{at}: expected finite labels, found {value} at position {position}")]
    BadLabel {
        /// Where.
        at: Box<At>,
        /// Which label.
        position: usize,
        /// The value, as text: NaN equals nothing.
        value: String,
    },
    /// A set without files.
    #[error("rank {rank}: expected at least one data file, got none")]
    EmptySet {
        /// The rank.
        rank: usize,
    },
    /// A sample number beyond the set.
    #[error("rank {rank}: sample {index} was asked for, the set has {len}")]
    Index {
        /// The rank that asked.
        rank: usize,
        /// The sample asked for.
        index: usize,
        /// Samples there are.
        len: usize,
    },
}
