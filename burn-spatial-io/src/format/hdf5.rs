//! HDF5 files, read with the serial library: elements come in the stored type, for HDF5's own conversion is several
//! times slower, and saturates silently where types narrow.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use burn::tensor::DType;
use hdf5_metno as hdf5;
use hdf5_metno::types::{FixedAscii, TypeDescriptor};

use super::{ChannelAxis, DataFile, IndexBox, VolumeReader, VolumeShape, hdf5_box};
use crate::error::{At, DataError};
use crate::transform::NUMBERS;

/// Bytes that one HDF5 call may read; MPI-IO and some file systems fail from 2 GiB.
const MAX_CALL_BYTES: usize = (1 << 31) - 1;
/// Chunk cache of an open file, in bytes: holds several 64^3 chunks of four int16 channels (HDF5's own is 1 MiB).
const CHUNK_CACHE_BYTES: usize = 32 << 20;

/// An open HDF5 file.
pub(super) struct Hdf5File {
    path: PathBuf,
    rank: usize,
    file: hdf5::File,
}

impl Hdf5File {
    pub(super) fn open(path: &Path, rank: usize) -> Result<Hdf5File, DataError> {
        let at = || At::file(path, rank);
        let unreadable = |cause: String| DataError::Unreadable { at: at(), cause };
        // HDF5 does not tell these apart.
        match fs::File::open(path).and_then(|file| file.metadata()) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Err(DataError::Missing { at: at() }),
            Err(e) => return Err(unreadable(e.to_string())),
            Ok(meta) if !meta.is_file() => return Err(unreadable("it is not a file".into())),
            Ok(_) => {}
        }
        let opened = hdf5::File::with_options().with_fapl(|access| access.chunk_cache(1009, CHUNK_CACHE_BYTES, 0.75)).open(path);
        let file = opened.map_err(|e| match e.to_string() {
            text if text.contains("lock file") => unreadable(format!(
                "another program writes it, or the file system has no locks (then set HDF5_USE_FILE_LOCKING=FALSE): {text}"
            )),
            cause => DataError::NotHdf5 { at: at(), cause },
        })?;
        Ok(Hdf5File { path: path.to_owned(), rank, file })
    }

    /// The dataset `name`; `None` if the file has nothing under this name.
    fn dataset(&self, name: &str) -> Result<Option<hdf5::Dataset>, DataError> {
        if !self.file.link_exists(name) {
            return Ok(None);
        }
        self.file.dataset(name).map(Some).map_err(|e| DataError::Read { at: self.at(name), cause: e.to_string() })
    }

    /// A volume of numbers that are one of `taken`, which messages call `expected`; `stored` is the shape, with a
    /// channel axis.
    fn reader(
        &self,
        name: &str,
        dataset: hdf5::Dataset,
        stored: ([usize; 4], bool),
        expected: &'static str,
        taken: impl Fn(DType) -> bool,
    ) -> Result<Hdf5Volume, DataError> {
        let found = element_type(&dataset).map_err(|found| self.wrong_type(name, expected, found))?;
        let dtype = hdf5_box::dtype(&found).filter(|dtype| taken(*dtype));
        let dtype = dtype.ok_or_else(|| self.wrong_type(name, expected, found.to_string()))?;
        let (extents, channels_last) = stored;
        Ok(Hdf5Volume { at: self.at(name), _file: self.file.clone(), dataset, extents, channels_last, dtype, call_bytes: MAX_CALL_BYTES })
    }

    fn wrong_type(&self, name: &str, expected: &'static str, found: String) -> DataError {
        DataError::Type { at: self.at(name), expected, found }
    }

    fn open_volume(&self, name: &str, channels: ChannelAxis) -> Result<Hdf5Volume, DataError> {
        let dataset = self.dataset(name)?.ok_or_else(|| DataError::NoDataset { at: self.at(name), found: self.members() })?;
        let shape = dataset.shape();
        let optional = channels == ChannelAxis::Optional;
        let extents = match shape[..] {
            [a, b, c, d] => [a, b, c, d],
            [d, h, w] if optional => [1, d, h, w],
            _ => return Err(DataError::Dimensions { at: self.at(name), expected: if optional { "3 or 4" } else { "4" }, shape }),
        };
        if extents.contains(&0) {
            return Err(DataError::Shape { at: self.at(name), expected: "a volume that is not empty".into(), shape });
        }
        let taken = |dtype| matches!(dtype, DType::I16 | DType::F32);
        self.reader(name, dataset, (extents, channels.is_last(extents)), "int16 or float32", taken)
    }
}

impl DataFile for Hdf5File {
    fn volume(&self, name: &str, channels: ChannelAxis) -> Result<Box<dyn VolumeReader>, DataError> {
        Ok(Box::new(self.open_volume(name, channels)?))
    }

    fn segmentation(&self, name: &str) -> Result<Box<dyn VolumeReader>, DataError> {
        let dataset = self.dataset(name)?.ok_or_else(|| DataError::NoLabels { at: self.at(name), found: self.members() })?;
        let shape = dataset.shape();
        let [d, h, w] = shape[..] else { return Err(DataError::Dimensions { at: self.at(name), expected: "3", shape }) };
        Ok(Box::new(self.reader(name, dataset, ([1, d, h, w], false), NUMBERS, |_| true)?))
    }

    fn floats(&self, name: &str) -> Result<Option<Vec<f32>>, DataError> {
        let read = |e: hdf5::Error| DataError::Read { at: self.at(name), cause: e.to_string() };
        let Some(data) = self.dataset(name)? else { return Ok(None) };
        let shape = data.shape();
        if shape.len() != 1 {
            return Err(DataError::Dimensions { at: self.at(name), expected: "1", shape });
        }
        let wrong = |found| Err(self.wrong_type(name, "float32 or float64", found));
        match element_type(&data) {
            Ok(found) => match hdf5_box::dtype(&found) {
                Some(DType::F32) => data.read_raw::<f32>().map(Some).map_err(read),
                Some(DType::F64) => data.read_raw::<f64>().map(|values| Some(values.into_iter().map(|v| v as f32).collect())).map_err(read),
                _ => wrong(found.to_string()),
            },
            Err(found) => wrong(found),
        }
    }

    /// Of fixed-length strings of at most 64 bytes.
    fn names(&self, name: &str) -> Result<Option<Vec<String>>, DataError> {
        let Some(data) = self.dataset(name)? else { return Ok(None) };
        let wrong = |found| Err(self.wrong_type(name, "fixed-length strings of at most 64 bytes", found));
        match element_type(&data) {
            Ok(TypeDescriptor::FixedAscii(1..=64)) => data
                .read_raw::<FixedAscii<64>>()
                .map(|names| Some(names.iter().map(|name| name.as_str().to_owned()).collect()))
                .map_err(|e| DataError::Read { at: self.at(name), cause: e.to_string() }),
            Ok(other) => wrong(other.to_string()),
            Err(found) => wrong(found),
        }
    }

    fn members(&self) -> Vec<String> {
        self.file.member_names().unwrap_or_default()
    }

    fn at(&self, name: &str) -> Box<At> {
        At::dataset(&self.path, name, self.rank)
    }
}

/// An open dataset of an open file.
struct Hdf5Volume {
    at: Box<At>,
    /// Keeps the file open.
    _file: hdf5::File,
    dataset: hdf5::Dataset,
    /// As stored, with a channel axis.
    extents: [usize; 4],
    channels_last: bool,
    dtype: DType,
    /// Bytes that one HDF5 call may read; larger reads are cut along the slowest axis.
    call_bytes: usize,
}

impl VolumeReader for Hdf5Volume {
    fn shape(&self) -> VolumeShape {
        let [a, b, c, d] = self.extents;
        if self.channels_last { VolumeShape { channels: d, extent: [a, b, c] } } else { VolumeShape { channels: a, extent: [b, c, d] } }
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn channels_last(&self) -> bool {
        self.channels_last
    }

    fn at(&self) -> Box<At> {
        self.at.clone()
    }

    fn read_box(&self, bounds: IndexBox, out: &mut [u8]) -> Result<(), DataError> {
        let stored = |[d, h, w]: [usize; 3], c| if self.channels_last { [d, h, w, c] } else { [c, d, h, w] };
        let mut calls = Vec::new();
        let size = self.dtype.size();
        cut(stored(bounds.start, 0), stored(bounds.extent, self.shape().channels), size, self.call_bytes, &mut calls);
        // A dataset of three dimensions has no channel axis.
        let first = 4 - self.dataset.ndim();
        let mut rest = out;
        for (start, count) in calls {
            let (piece, later) = rest.split_at_mut(count.iter().product::<usize>() * size);
            hdf5_box::read(&self.dataset, self.dtype, &start[first..], &count[first..], piece)
                .map_err(|e| DataError::Read { at: self.at(), cause: e.to_string() })?;
            rest = later;
        }
        Ok(())
    }
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

/// The element type; in words where it is none that Rust has.
fn element_type(data: &hdf5::Dataset) -> Result<TypeDescriptor, String> {
    let element = data.dtype().map_err(|e| e.to_string())?;
    element.to_descriptor().map_err(|e| match e.to_string() {
        cause if cause.contains("float") => format!("float{}", 8 * element.size()),
        cause if cause.contains("integer") => format!("integers of {} bits", 8 * element.size()),
        _ => format!("a type of {} bytes that is no number", element.size()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn small_calls_read_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("counter.hdf5");
        let values: Vec<i16> = (0..6 * 5 * 7 * 4).collect();
        let file = hdf5::File::create(&path).unwrap();
        file.new_dataset::<i16>().shape((6, 5, 7, 4)).create("full").unwrap().write_raw(&values).unwrap();
        drop(file);
        let bounds = IndexBox { start: [1, 0, 2], extent: [4, 5, 3] };
        let mut volume = Hdf5File::open(&path, 0).unwrap().open_volume("full", ChannelAxis::Auto).unwrap();
        let mut read = |cap| {
            volume.call_bytes = cap;
            let reader: &dyn VolumeReader = &volume;
            reader.read_raw::<i16>(bounds).unwrap()
        };
        let expected = read(MAX_CALL_BYTES);
        for cap in [64, 1, 1000] {
            assert_eq!(read(cap), expected);
        }
    }
}
