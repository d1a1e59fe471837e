//! Open files and the volumes in them, whatever the format.
//!
//! # Layouts
//! A volume is one data set of numbers, of four dimensions or, with [`ChannelAxis::Optional`], of three:
//! - channels last, `(depth, height, width, channels)`: the public CosmoFlow files, where the axes are X, Y, Z;
//! - channels first, `(channels, depth, height, width)`: files made for LBANN.
//!
//! Spatial axes keep their stored order and are called depth, height and width. [`ChannelAxis::Auto`] tells the two
//! apart so: three equal extents in front mean channels last; else three equal extents at the end mean channels
//! first; else (not a cube) the shorter of the first and last axis is the channels, the last if they are equal.
//!
//! # How it is read
//! Every rank opens the file by itself and reads its index box as it is stored, into a reused buffer
//! ([`VolumeReader::read_box`]). Conversion and transposition are one pass over that buffer, the same for all formats
//! (`transform.rs`). A new format implements [`DataFile`] and [`VolumeReader`], and [`open_file`] tells its files.

use std::fmt::{self, Display};
use std::path::Path;

use burn::tensor::DType;

use crate::error::{At, DataError};

mod hdf5;
mod hdf5_box;

pub(crate) use hdf5_box::{create, write};

/// A box of voxels within a volume: depth, height, width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexBox {
    /// First voxel.
    pub start: [usize; 3],
    /// Number of voxels.
    pub extent: [usize; 3],
}

impl IndexBox {
    /// How many voxels the box has.
    pub fn voxels(&self) -> usize {
        self.extent.iter().product()
    }

    /// Where voxel number `voxel` of the box, in row-major order, is in the volume.
    pub(crate) fn position(&self, voxel: usize) -> [usize; 3] {
        let ([d, h, w], [_, nh, nw]) = (self.start, self.extent);
        [d + voxel / (nh * nw), h + voxel / nw % nh, w + voxel % nw]
    }
}

/// Channels and extent of a stored volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeShape {
    /// Number of channels.
    pub channels: usize,
    /// Voxels along depth, height and width.
    pub extent: [usize; 3],
}

impl VolumeShape {
    /// Channels, depth, height, width.
    pub fn dims(&self) -> [usize; 4] {
        let [d, h, w] = self.extent;
        [self.channels, d, h, w]
    }

    /// The box of all voxels.
    pub fn whole(&self) -> IndexBox {
        IndexBox { start: [0; 3], extent: self.extent }
    }
}

impl Display for VolumeShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VolumeShape { channels, extent: [d, h, w] } = self;
        write!(f, "{channels} channel{} of {d} x {h} x {w} voxels", if *channels == 1 { "" } else { "s" })
    }
}

/// Which stored axis holds the channels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum ChannelAxis {
    /// Guessed from the extents: three equal ones in front: last; three equal ones at the end: first; else the
    /// shorter of the two ends, last if equal.
    #[default]
    Auto,
    /// `(channels, depth, height, width)`.
    First,
    /// `(depth, height, width, channels)`.
    Last,
    /// `(channels, depth, height, width)`, or `(depth, height, width)` for one channel: volumes with segmentations.
    Optional,
}

impl ChannelAxis {
    /// Whether the channels of a volume with the stored extents are the last axis.
    fn is_last(self, [a, b, c, d]: [usize; 4]) -> bool {
        match self {
            ChannelAxis::First | ChannelAxis::Optional => false,
            ChannelAxis::Last => true,
            ChannelAxis::Auto if a == b && b == c => true,
            ChannelAxis::Auto if b == c && c == d => false,
            ChannelAxis::Auto => d <= a,
        }
    }
}

/// An open volume. Any thread may read it, several at once. Closed when dropped.
///
/// `dyn VolumeReader` has methods that read numbers instead of stored bytes: `read`, `read_raw` and `read_classes`.
pub trait VolumeReader: Send + Sync {
    /// Channels and extents of the whole volume.
    fn shape(&self) -> VolumeShape;

    /// The element type: one of the integers, float32 or float64.
    fn dtype(&self) -> DType;

    /// Whether [`VolumeReader::read_box`] gives `[depth, height, width, channels]`; else
    /// `[channels, depth, height, width]`.
    fn channels_last(&self) -> bool;

    /// Where the volume is, for messages.
    fn at(&self) -> Box<At>;

    /// Reads all channels of the voxels `bounds` as they are stored into `out`: row-major, of the type
    /// [`VolumeReader::dtype`] in the byte order of this machine. Not collective. `out` has to have
    /// `channels * voxels * dtype().size()` bytes.
    ///
    /// # Errors
    /// [`DataError::Read`] when the elements cannot be read.
    ///
    /// # Panics
    /// When `out` has another length.
    fn read_box(&self, bounds: IndexBox, out: &mut [u8]) -> Result<(), DataError>;
}

/// An open file with volumes and lists under names. Closed when it and what was opened in it are dropped.
pub trait DataFile: Send + Sync {
    /// Opens the volume `name` and checks its dimensions and type. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when there is no such data set, when it is of another number of dimensions or empty, or when its
    /// element type is not one that volumes of this format have.
    fn volume(&self, name: &str, channels: ChannelAxis) -> Result<Box<dyn VolumeReader>, DataError>;

    /// Opens the data set `name` of the class of each voxel, `(depth, height, width)`, of integers or floats of any
    /// size. It has one channel. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when there is no such data set, or when it is of another number of dimensions or holds no numbers.
    fn segmentation(&self, name: &str) -> Result<Box<dyn VolumeReader>, DataError>;

    /// The one-dimensional float32 or float64 data set `name`, such as `physPar` or `redshifts`, as float32; `None` if
    /// there is none. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when it is not one-dimensional or not floating-point.
    fn floats(&self, name: &str) -> Result<Option<Vec<f32>>, DataError>;

    /// The names in the one-dimensional data set `name`, such as `namePar`; `None` if there is none. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when it does not hold strings.
    fn names(&self, name: &str) -> Result<Option<Vec<String>>, DataError>;

    /// The names of all that the file has, for messages.
    fn members(&self) -> Vec<String>;

    /// Where the data set `name` is, for messages.
    fn at(&self, name: &str) -> Box<At>;

    /// The labels `name`, any number of them. They are read as they are, never recomputed. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when there are none under this name, or when they are not one-dimensional, not floating-point
    /// or not finite.
    fn labels(&self, name: &str) -> Result<Vec<f32>, DataError> {
        let labels = self.floats(name)?.ok_or_else(|| DataError::NoLabels { at: self.at(name), found: self.members() })?;
        if labels.is_empty() {
            return Err(DataError::Shape { at: self.at(name), expected: "at least one label".into(), shape: vec![0] });
        }
        match labels.iter().position(|label| !label.is_finite()) {
            Some(position) => Err(DataError::BadLabel { at: self.at(name), position, value: labels[position].to_string() }),
            None => Ok(labels),
        }
    }
}

/// Opens the HDF5 file at `path`. `rank` is for messages. Not collective: each rank opens the file by itself.
///
/// # Errors
/// [`DataError`] when the file is missing, unreadable or not HDF5.
pub fn open_file(path: &Path, rank: usize) -> Result<Box<dyn DataFile>, DataError> {
    Ok(Box::new(hdf5::Hdf5File::open(path, rank)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_channel_axis_is_found() {
        let first = |extents| !ChannelAxis::Auto.is_last(extents);
        assert!(!first([2, 2, 2, 4]));
        assert!(!first([128, 128, 128, 4]));
        assert!(!first([4, 4, 4, 4]));
        assert!(first([4, 128, 128, 128]));
        assert!(first([4, 2, 2, 2]));
        assert!(first([4, 16, 32, 64]));
        assert!(!first([16, 32, 64, 4]));
        assert!(!ChannelAxis::First.is_last([2, 3, 5, 4]));
        assert!(ChannelAxis::Last.is_last([2, 3, 5, 4]));
    }
}
