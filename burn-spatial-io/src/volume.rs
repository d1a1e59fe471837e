//! Blocks out of HDF5 volumes.
//!
//! # Layouts
//! A volume is one dataset of `int16` or `float32`, of four dimensions or, with [`ChannelAxis::Optional`], of three:
//! - channels last, `(depth, height, width, channels)`: the public CosmoFlow files, where the axes are X, Y, Z;
//! - channels first, `(channels, depth, height, width)`: files made for LBANN.
//!
//! Spatial axes keep their stored order and are called depth, height and width. [`ChannelAxis::Auto`] tells the two
//! apart so: three equal extents in front mean channels last; else three equal extents at the end mean channels
//! first; else (not a cube) the shorter of the first and last axis is the channels, the last if they are equal.
//!
//! # How it is read
//! Every rank opens the file by itself with the serial library and reads its hyperslab in the stored type, into a
//! reused buffer. Transposition and conversion are one pass over that block: HDF5's own conversion is several times
//! slower, and saturates silently where types narrow.

use std::fmt::{self, Display};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use hdf5_metno as hdf5;
use hdf5_metno::types::{FixedAscii, FloatSize, IntSize, TypeDescriptor};

use crate::error::{At, DataError};
use crate::slab::{self, Number};

/// Bytes that one HDF5 call may read; MPI-IO and some file systems fail from 2 GiB.
const MAX_CALL_BYTES: usize = (1 << 31) - 1;
/// Chunk cache of an open file, in bytes: holds several 64^3 chunks of four int16 channels (HDF5's own is 1 MiB).
const CHUNK_CACHE_BYTES: usize = 32 << 20;
/// Voxels converted at a time: the tile of all channels stays in the first-level cache.
const TILE: usize = 2048;

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
}

/// Channels and extent of a stored volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeShape {
    /// Number of channels.
    pub channels: usize,
    /// Voxels along depth, height and width.
    pub extent: [usize; 3],
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

/// What is done to every voxel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Transform {
    /// Counts become `ln(1 + x)`, computed in f64; a negative count is an error.
    #[default]
    Log1p,
    /// Values stay as they are.
    Identity,
}

/// An element type that volumes are stored in.
pub trait Element: Number {
    /// The type's name in messages.
    const NAME: &'static str;
}

impl Element for i16 {
    const NAME: &'static str = "int16";
}

impl Element for f32 {
    const NAME: &'static str = "float32";
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    Int16,
    Float32,
}

/// Buffers for a block in its stored type, reused from read to read.
#[derive(Debug, Default)]
pub struct Scratch {
    ints: Vec<i16>,
    floats: Vec<f32>,
}

/// An open volume file. Closed, with all its HDF5 objects, when dropped.
#[derive(Debug)]
pub struct VolumeFile {
    path: PathBuf,
    rank: usize,
    name: String,
    file: hdf5::File,
    dataset: hdf5::Dataset,
    extents: [usize; 4],
    channels_first: bool,
    stored: Stored,
    call_bytes: usize,
}

impl VolumeFile {
    /// Opens the volume `dataset` of the file at `path` and checks its dimensions and type. Not collective; `rank`
    /// is for messages.
    ///
    /// # Errors
    /// [`DataError`] when the file is missing, unreadable or not HDF5, or when the dataset is missing, of another
    /// number of dimensions, empty, or neither int16 nor float32.
    pub fn open(path: &Path, dataset: &str, channels: ChannelAxis, rank: usize) -> Result<VolumeFile, DataError> {
        let file = open_file(path, rank)?;
        let at = || At::dataset(path, dataset, rank);
        let data = open_dataset(&file, dataset)
            .map_err(|cause| DataError::Read { at: at(), cause })?
            .ok_or_else(|| DataError::NoDataset { at: at(), found: member_names(&file) })?;
        let shape = data.shape();
        let mut all = shape.clone();
        if channels == ChannelAxis::Optional && shape.len() == 3 {
            all.insert(0, 1);
        }
        let expected = if channels == ChannelAxis::Optional { "3 or 4" } else { "4" };
        let extents: [usize; 4] = all.try_into().map_err(|shape| DataError::Dimensions { at: at(), expected, shape })?;
        if extents.contains(&0) {
            return Err(DataError::Shape { at: at(), expected: "a volume that is not empty".into(), shape });
        }
        let stored = match stored_type(&data) {
            Ok(TypeDescriptor::Integer(IntSize::U2)) => Stored::Int16,
            Ok(TypeDescriptor::Float(FloatSize::U4)) => Stored::Float32,
            Ok(other) => return Err(wrong_type(at(), "int16 or float32", other.to_string())),
            Err(found) => return Err(wrong_type(at(), "int16 or float32", found)),
        };
        Ok(VolumeFile {
            path: path.to_owned(),
            rank,
            name: dataset.to_owned(),
            file,
            dataset: data,
            extents,
            channels_first: channels_first(extents, channels),
            stored,
            call_bytes: MAX_CALL_BYTES,
        })
    }

    /// Caps the bytes of one HDF5 call; larger reads are cut along the slowest axis. Default: just below 2 GiB.
    pub fn with_call_bytes(mut self, bytes: usize) -> VolumeFile {
        self.call_bytes = bytes;
        self
    }

    /// Channels and extent of the whole volume.
    pub fn shape(&self) -> VolumeShape {
        let [a, b, c, d] = self.extents;
        if self.channels_first { VolumeShape { channels: a, extent: [b, c, d] } } else { VolumeShape { channels: d, extent: [a, b, c] } }
    }

    /// Reads the block `slab` as f32 into `out`, as `[channels, depth, height, width]` in row-major order. `out` and
    /// `scratch` are resized, and keep their memory from read to read.
    ///
    /// # Errors
    /// [`DataError`] when the block is not inside the volume, when HDF5 cannot read it, or when it holds negative
    /// counts (with [`Transform::Log1p`]), NaN or infinities.
    pub fn read(&self, slab: IndexBox, transform: Transform, scratch: &mut Scratch, out: &mut Vec<f32>) -> Result<(), DataError> {
        match self.stored {
            Stored::Int16 => {
                self.read_stored(slab, &mut scratch.ints)?;
                let mut signs = 0;
                match transform {
                    Transform::Log1p => self.arrange(slab, &scratch.ints, out, |count: i16| {
                        signs |= count;
                        LOG1P[(count & i16::MAX) as usize]
                    }),
                    Transform::Identity => self.arrange(slab, &scratch.ints, out, f32::from),
                }
                if signs < 0 {
                    return self.first_bad(slab, &scratch.ints, |count| count < 0);
                }
            }
            Stored::Float32 => {
                self.read_stored(slab, &mut scratch.floats)?;
                let mut good = true;
                match transform {
                    Transform::Log1p => self.arrange(slab, &scratch.floats, out, |count: f32| {
                        good &= (0.0..f32::INFINITY).contains(&count);
                        f64::from(count).ln_1p() as f32
                    }),
                    Transform::Identity => self.arrange(slab, &scratch.floats, out, |value: f32| {
                        good &= value.is_finite();
                        value
                    }),
                }
                if !good {
                    let counts = transform == Transform::Log1p;
                    return self.first_bad(slab, &scratch.floats, |v| !v.is_finite() || (counts && v < 0.0));
                }
            }
        }
        Ok(())
    }

    /// Reads the block `slab` as it is stored, bit by bit, as `[channels, depth, height, width]`.
    ///
    /// # Errors
    /// [`DataError`] as for [`VolumeFile::read`], and when the volume is stored in another type than `T`.
    pub fn read_raw<T: Element>(&self, slab: IndexBox) -> Result<Vec<T>, DataError> {
        let found = match self.stored {
            Stored::Int16 => i16::NAME,
            Stored::Float32 => f32::NAME,
        };
        if found != T::NAME {
            return Err(wrong_type(self.at(), T::NAME, found.into()));
        }
        let (mut stored, mut out) = (Vec::new(), Vec::new());
        self.read_stored(slab, &mut stored)?;
        self.arrange(slab, &stored, &mut out, |value: T| value);
        Ok(out)
    }

    /// The labels `name`, f32 or f64, any number of them. They are read as they are, never recomputed.
    ///
    /// # Errors
    /// [`DataError`] when there are none under this name, or when they are not one-dimensional, not floating-point
    /// or not finite.
    pub fn labels(&self, name: &str) -> Result<Vec<f32>, DataError> {
        let at = || At::dataset(&self.path, name, self.rank);
        let labels = self.floats(name)?.ok_or_else(|| DataError::NoLabels { at: at(), found: member_names(&self.file) })?;
        if labels.is_empty() {
            return Err(DataError::Shape { at: at(), expected: "at least one label".into(), shape: vec![0] });
        }
        match labels.iter().position(|label| !label.is_finite()) {
            Some(position) => Err(DataError::BadLabel { at: at(), position, value: labels[position].to_string() }),
            None => Ok(labels),
        }
    }

    /// The class of each voxel of the block `slab`, out of the dataset `name` of the volume's depth, height and width.
    /// It may hold integers or floats of any size; stored integers stay integers.
    ///
    /// # Errors
    /// [`DataError`] when there is no such dataset, when it has another extent, when the block is not inside it, or
    /// when a voxel is neither of a class from 0 to `classes` - 1 nor `ignored`.
    pub fn classes(&self, name: &str, slab: IndexBox, classes: usize, ignored: Option<i64>) -> Result<Vec<i32>, DataError> {
        let at = || At::dataset(&self.path, name, self.rank);
        let (data, read) = self.open_classes(name)?;
        self.inside(slab)?;
        let outcome = read(&Classes { data: &data, slab, call_bytes: self.call_bytes, classes, ignored });
        let outcome = outcome.map_err(|cause| DataError::Read { at: at(), cause })?;
        outcome.map_err(|(position, value)| DataError::Class { at: at(), classes, ignored, position, value })
    }

    /// Whether [`VolumeFile::classes`] can read the dataset `name`, but for the classes themselves: its shape and its type.
    ///
    /// # Errors
    /// [`DataError`] as for [`VolumeFile::classes`].
    pub fn check_classes(&self, name: &str) -> Result<(), DataError> {
        self.open_classes(name).map(drop)
    }

    /// The dataset `name` of classes, and what reads its element type.
    fn open_classes(&self, name: &str) -> Result<(hdf5::Dataset, ReadClasses), DataError> {
        let at = || At::dataset(&self.path, name, self.rank);
        let data = open_dataset(&self.file, name)
            .map_err(|cause| DataError::Read { at: at(), cause })?
            .ok_or_else(|| DataError::NoLabels { at: at(), found: member_names(&self.file) })?;
        let volume = self.shape().extent;
        let shape = data.shape();
        if shape.len() != 3 {
            return Err(DataError::Dimensions { at: at(), expected: "3", shape });
        }
        if shape != volume {
            let expected = format!("the extent {volume:?} of the dataset '{}'", self.name);
            return Err(DataError::Shape { at: at(), expected, shape });
        }
        let read: ReadClasses = match stored_type(&data) {
            Ok(TypeDescriptor::Unsigned(IntSize::U1)) => |block| block.read(|v: u8| i64::from(v)),
            Ok(TypeDescriptor::Unsigned(IntSize::U2)) => |block| block.read(|v: u16| i64::from(v)),
            Ok(TypeDescriptor::Unsigned(IntSize::U4)) => |block| block.read(|v: u32| i64::from(v)),
            // What does not fit is no class.
            Ok(TypeDescriptor::Unsigned(IntSize::U8)) => |block| block.read(|v: u64| i64::try_from(v).unwrap_or(i64::MAX)),
            Ok(TypeDescriptor::Integer(IntSize::U1)) => |block| block.read(|v: i8| i64::from(v)),
            Ok(TypeDescriptor::Integer(IntSize::U2)) => |block| block.read(|v: i16| i64::from(v)),
            Ok(TypeDescriptor::Integer(IntSize::U4)) => |block| block.read(|v: i32| i64::from(v)),
            Ok(TypeDescriptor::Integer(IntSize::U8)) => |block| block.read(|v: i64| v),
            Ok(TypeDescriptor::Float(FloatSize::U4)) => |block| block.read(|v: f32| whole(f64::from(v))),
            Ok(TypeDescriptor::Float(FloatSize::U8)) => |block| block.read(whole),
            Ok(other) => return Err(wrong_type(at(), "integers, float32 or float64", other.to_string())),
            Err(found) => return Err(wrong_type(at(), "integers, float32 or float64", found)),
        };
        Ok((data, read))
    }

    /// The one-dimensional f32 or f64 dataset `name`, such as `physPar` or `redshifts`; `None` if there is none.
    ///
    /// # Errors
    /// [`DataError`] when it is not one-dimensional or not floating-point.
    pub fn floats(&self, name: &str) -> Result<Option<Vec<f32>>, DataError> {
        let at = || At::dataset(&self.path, name, self.rank);
        let read = |cause: String| DataError::Read { at: at(), cause };
        let Some(data) = open_dataset(&self.file, name).map_err(read)? else { return Ok(None) };
        let shape = data.shape();
        if shape.len() != 1 {
            return Err(DataError::Dimensions { at: at(), expected: "1", shape });
        }
        match stored_type(&data) {
            Ok(TypeDescriptor::Float(FloatSize::U4)) => data.read_raw::<f32>().map(Some).map_err(|e| read(e.to_string())),
            Ok(TypeDescriptor::Float(FloatSize::U8)) => {
                data.read_raw::<f64>().map(|values| Some(values.into_iter().map(|v| v as f32).collect())).map_err(|e| read(e.to_string()))
            }
            Ok(other) => Err(wrong_type(at(), "float32 or float64", other.to_string())),
            Err(found) => Err(wrong_type(at(), "float32 or float64", found)),
        }
    }

    /// The names in the one-dimensional dataset `name` of fixed-length strings, such as `namePar`; `None` if there
    /// is none.
    ///
    /// # Errors
    /// [`DataError`] when it does not hold fixed-length strings of at most 64 bytes.
    pub fn names(&self, name: &str) -> Result<Option<Vec<String>>, DataError> {
        let at = || At::dataset(&self.path, name, self.rank);
        let read = |cause: String| DataError::Read { at: at(), cause };
        let Some(data) = open_dataset(&self.file, name).map_err(read)? else { return Ok(None) };
        match stored_type(&data) {
            Ok(TypeDescriptor::FixedAscii(1..=64)) => data
                .read_raw::<FixedAscii<64>>()
                .map(|names| Some(names.iter().map(|name| name.as_str().to_owned()).collect()))
                .map_err(|e| read(e.to_string())),
            Ok(other) => Err(wrong_type(at(), "fixed-length strings of at most 64 bytes", other.to_string())),
            Err(found) => Err(wrong_type(at(), "fixed-length strings of at most 64 bytes", found)),
        }
    }

    /// Where the volume is, for messages.
    pub fn at(&self) -> Box<At> {
        At::dataset(&self.path, &self.name, self.rank)
    }

    /// Start and count of `slab` in the stored order of axes.
    fn selection(&self, slab: IndexBox) -> [[usize; 4]; 2] {
        let channels = self.shape().channels;
        let stored = |[d, h, w]: [usize; 3], c| if self.channels_first { [c, d, h, w] } else { [d, h, w, c] };
        [stored(slab.start, 0), stored(slab.extent, channels)]
    }

    fn inside(&self, slab: IndexBox) -> Result<(), DataError> {
        let volume = self.shape().extent;
        let inside = |axis: usize| slab.start[axis].checked_add(slab.extent[axis]).is_some_and(|end| end <= volume[axis]);
        if (0..3).all(inside) && !slab.extent.contains(&0) {
            return Ok(());
        }
        Err(DataError::Block { at: self.at(), start: slab.start, extent: slab.extent, volume })
    }

    /// Reads `slab` in stored order and type, which the caller has checked to be `T`.
    fn read_stored<T: Element>(&self, slab: IndexBox, out: &mut Vec<T>) -> Result<(), DataError> {
        self.inside(slab)?;
        let [start, count] = self.selection(slab);
        // Growing fills with zeros; a buffer of the right size is left as it is.
        out.resize(count.iter().product(), T::default());
        read_box(&self.dataset, start, count, self.call_bytes, out).map_err(|e| DataError::Read { at: self.at(), cause: e.to_string() })
    }

    /// Converts a block from stored order to channels first.
    fn arrange<T: Copy, U: Copy + Default>(&self, slab: IndexBox, stored: &[T], out: &mut Vec<U>, mut convert: impl FnMut(T) -> U) {
        let (channels, voxels) = (self.shape().channels, slab.voxels());
        out.resize(stored.len(), U::default());
        if self.channels_first || channels == 1 {
            out.iter_mut().zip(stored).for_each(|(to, from)| *to = convert(*from));
            return;
        }
        for (tile, stored) in stored.chunks(TILE * channels).enumerate() {
            let first = tile * TILE;
            for channel in 0..channels {
                let to = &mut out[channel * voxels + first..][..stored.len() / channels];
                to.iter_mut().zip(stored[channel..].iter().step_by(channels)).for_each(|(to, from)| *to = convert(*from));
            }
        }
    }

    /// The error for the first stored value that is `bad`.
    fn first_bad<T: Copy + Into<f64>>(&self, slab: IndexBox, stored: &[T], bad: impl Fn(T) -> bool) -> Result<(), DataError> {
        let Some(index) = stored.iter().position(|value| bad(*value)) else { return Ok(()) };
        let [start, count] = self.selection(slab);
        let mut rest = index;
        let mut place = [0; 4];
        for axis in (0..4).rev() {
            place[axis] = start[axis] + rest % count[axis];
            rest /= count[axis];
        }
        if !self.channels_first {
            place.rotate_right(1);
        }
        let value: f64 = stored[index].into();
        Err(if value < 0.0 && value.is_finite() {
            DataError::Negative { at: self.at(), position: place, value }
        } else {
            DataError::NonFinite { at: self.at(), position: place, value: value.to_string() }
        })
    }
}

/// A float that is a whole number; what is none is no class.
fn whole(value: f64) -> i64 {
    if value.fract() == 0.0 && value.abs() < 1e15 { value as i64 } else { i64::MAX }
}

/// Reads the classes of a block.
struct Classes<'a> {
    data: &'a hdf5::Dataset,
    slab: IndexBox,
    call_bytes: usize,
    classes: usize,
    ignored: Option<i64>,
}

/// The classes; or the place in the volume and the value of the first that is none; or HDF5's words.
type ClassesRead = Result<Result<Vec<i32>, ([usize; 3], String)>, String>;

/// [`Classes::read`] for one element type.
type ReadClasses = fn(&Classes<'_>) -> ClassesRead;

impl Classes<'_> {
    fn read<T: Number + Display>(&self, integer: impl Fn(T) -> i64) -> ClassesRead {
        let IndexBox { start: [d, h, w], extent: [nd, nh, nw] } = self.slab;
        let mut stored = vec![T::default(); self.slab.voxels()];
        read_box(self.data, [0, d, h, w], [1, nd, nh, nw], self.call_bytes, &mut stored).map_err(|e| e.to_string())?;
        let good = |class: i64| (0..self.classes as i64).contains(&class) || self.ignored == Some(class);
        let class = |value: &T| Some(integer(*value)).filter(|class| good(*class)).and_then(|class| i32::try_from(class).ok());
        let classes: Vec<i32> = stored.iter().map_while(class).collect();
        Ok(match stored.get(classes.len()) {
            None => Ok(classes),
            Some(bad) => {
                let at = classes.len();
                Err(([d + at / (nh * nw), h + at / nw % nh, w + at % nw], bad.to_string()))
            }
        })
    }
}

/// ln(1 + n) for every count an int16 can hold.
static LOG1P: LazyLock<Vec<f32>> = LazyLock::new(|| (0..=i16::MAX).map(|n| f64::from(n).ln_1p() as f32).collect());

/// Reads a box of a dataset of four dimensions, or of three where the first counts as 1, in calls of at most `cap` bytes.
fn read_box<T: Number>(data: &hdf5::Dataset, start: [usize; 4], count: [usize; 4], cap: usize, out: &mut [T]) -> hdf5::Result<()> {
    let first = 4 - data.ndim();
    let mut calls = Vec::new();
    cut(start, count, size_of::<T>(), cap, &mut calls);
    let mut rest = out;
    for (start, count) in calls {
        let (piece, later) = rest.split_at_mut(count.iter().product());
        slab::read(data, &start[first..], &count[first..], piece)?;
        rest = later;
    }
    Ok(())
}

/// Cuts a box into boxes of at most `cap` bytes, whole planes of the slowest axis where one fits, in memory order.
fn cut(start: [usize; 4], count: [usize; 4], element: usize, cap: usize, out: &mut Vec<([usize; 4], [usize; 4])>) {
    let bytes = count.iter().product::<usize>() * element;
    let Some(axis) = (0..4).find(|axis| count[*axis] > 1).filter(|_| bytes > cap) else {
        return out.push((start, count));
    };
    let step = (cap / (bytes / count[axis])).max(1);
    for first in (0..count[axis]).step_by(step) {
        let (mut start, mut count) = (start, count);
        start[axis] += first;
        count[axis] = step.min(count[axis] - first);
        cut(start, count, element, cap, out);
    }
}

fn channels_first([a, b, c, d]: [usize; 4], axis: ChannelAxis) -> bool {
    match axis {
        ChannelAxis::First | ChannelAxis::Optional => true,
        ChannelAxis::Last => false,
        ChannelAxis::Auto if a == b && b == c => false,
        ChannelAxis::Auto if b == c && c == d => true,
        ChannelAxis::Auto => a < d,
    }
}

fn open_file(path: &Path, rank: usize) -> Result<hdf5::File, DataError> {
    let at = || At::file(path, rank);
    let unreadable = |cause: String| DataError::Unreadable { at: at(), cause };
    // HDF5 does not tell these apart.
    match fs::File::open(path).and_then(|file| file.metadata()) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Err(DataError::Missing { at: at() }),
        Err(e) => return Err(unreadable(e.to_string())),
        Ok(meta) if !meta.is_file() => return Err(unreadable("it is not a file".into())),
        Ok(_) => {}
    }
    hdf5::File::with_options().with_fapl(|access| access.chunk_cache(1009, CHUNK_CACHE_BYTES, 0.75)).open(path).map_err(|e| {
        match e.to_string() {
            text if text.contains("lock file") => unreadable(format!(
                "another program writes it, or the file system has no locks (then set HDF5_USE_FILE_LOCKING=FALSE): {text}"
            )),
            cause => DataError::NotHdf5 { at: at(), cause },
        }
    })
}

/// The dataset `name`; `None` if the file has nothing under this name.
fn open_dataset(file: &hdf5::File, name: &str) -> Result<Option<hdf5::Dataset>, String> {
    if !file.link_exists(name) {
        return Ok(None);
    }
    file.dataset(name).map(Some).map_err(|e| e.to_string())
}

/// The element type; in words where it is none that Rust has.
fn stored_type(data: &hdf5::Dataset) -> Result<TypeDescriptor, String> {
    let element = data.dtype().map_err(|e| e.to_string())?;
    element.to_descriptor().map_err(|e| match e.to_string() {
        cause if cause.contains("float") => format!("float{}", 8 * element.size()),
        cause if cause.contains("integer") => format!("integers of {} bits", 8 * element.size()),
        _ => format!("a type of {} bytes that is no number", element.size()),
    })
}

fn wrong_type(at: Box<At>, expected: &'static str, found: String) -> DataError {
    DataError::Type { at, expected, found }
}

fn member_names(file: &hdf5::File) -> Vec<String> {
    file.member_names().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_channel_axis_is_found() {
        let first = |extents| channels_first(extents, ChannelAxis::Auto);
        assert!(!first([2, 2, 2, 4]));
        assert!(!first([128, 128, 128, 4]));
        assert!(!first([4, 4, 4, 4]));
        assert!(first([4, 128, 128, 128]));
        assert!(first([4, 2, 2, 2]));
        assert!(first([4, 16, 32, 64]));
        assert!(!first([16, 32, 64, 4]));
        assert!(channels_first([2, 3, 5, 4], ChannelAxis::First));
        assert!(!channels_first([2, 3, 5, 4], ChannelAxis::Last));
    }

    #[test]
    fn large_reads_are_cut() {
        let calls = |count, element, cap| {
            let mut out = Vec::new();
            cut([0; 4], count, element, cap, &mut out);
            out
        };
        // Four channels of 512^3 f32 are 2 GiB exactly: one byte too many.
        let pieces = calls([4, 512, 512, 512], 4, MAX_CALL_BYTES);
        assert_eq!(pieces, [([0; 4], [3, 512, 512, 512]), ([3, 0, 0, 0], [1, 512, 512, 512])]);
        let pieces = calls([512, 512, 512, 4], 4, MAX_CALL_BYTES);
        assert_eq!(pieces, [([0; 4], [511, 512, 512, 4]), ([511, 0, 0, 0], [1, 512, 512, 4])]);
        assert_eq!(calls([512, 512, 512, 4], 2, MAX_CALL_BYTES).len(), 1);
        // Where a plane is too large, it is cut along the next axis.
        let pieces = calls([2, 3, 2, 4], 2, 32);
        assert_eq!(pieces[..3], [([0; 4], [1, 2, 2, 4]), ([0, 2, 0, 0], [1, 1, 2, 4]), ([1, 0, 0, 0], [1, 2, 2, 4])]);
        assert!(calls([3, 5, 7, 4], 2, 64).iter().all(|(_, count)| count.iter().product::<usize>() * 2 <= 64));
    }
}
