//! A format for tests: volumes in memory.

use std::path::Path;

use burn::tensor::DType;

use crate::error::{At, DataError};
use crate::format::{ChannelAxis, DataFile, IndexBox, VolumeReader, VolumeShape};
use crate::transform::Number;

/// A volume in memory.
#[derive(Clone)]
pub(crate) struct Memory {
    shape: VolumeShape,
    channels_last: bool,
    dtype: DType,
    bytes: Vec<u8>,
}

impl Memory {
    /// `values` of the stored extents, which hold the channels last or first.
    pub(crate) fn new<T: Number>(stored: [usize; 4], channels_last: bool, values: &[T]) -> Memory {
        assert_eq!(values.len(), stored.iter().product::<usize>());
        let [a, b, c, d] = stored;
        let shape =
            if channels_last { VolumeShape { channels: d, extent: [a, b, c] } } else { VolumeShape { channels: a, extent: [b, c, d] } };
        Memory { shape, channels_last, dtype: T::DTYPE, bytes: values.iter().flat_map(|value| value.to_bytes()).collect() }
    }
}

impl VolumeReader for Memory {
    fn shape(&self) -> VolumeShape {
        self.shape
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn channels_last(&self) -> bool {
        self.channels_last
    }

    fn at(&self) -> Box<At> {
        At::dataset(Path::new("memory"), "volume", 0)
    }

    fn read_box(&self, bounds: IndexBox, out: &mut [u8]) -> Result<(), DataError> {
        let ([channels, _, h, w], size) = (self.shape.dims(), self.dtype.size());
        let (all, voxels) = (self.shape.whole().voxels(), bounds.voxels());
        for (i, element) in out.chunks_mut(size).enumerate() {
            let [channel, voxel] = if self.channels_last { [i % channels, i / channels] } else { [i / voxels, i % voxels] };
            let [z, y, x] = bounds.position(voxel);
            let voxel = (z * h + y) * w + x;
            let from = if self.channels_last { voxel * channels + channel } else { channel * all + voxel };
            element.copy_from_slice(&self.bytes[from * size..][..size]);
        }
        Ok(())
    }
}

/// A file in memory: one volume, its classes, and labels.
#[derive(Clone)]
pub(crate) struct MemoryFile {
    pub(crate) volume: Memory,
    pub(crate) classes: Memory,
    pub(crate) labels: Vec<f32>,
}

impl DataFile for MemoryFile {
    fn volume(&self, _: &str, _: ChannelAxis) -> Result<Box<dyn VolumeReader>, DataError> {
        Ok(Box::new(self.volume.clone()))
    }

    fn segmentation(&self, _: &str) -> Result<Box<dyn VolumeReader>, DataError> {
        Ok(Box::new(self.classes.clone()))
    }

    fn floats(&self, _: &str) -> Result<Option<Vec<f32>>, DataError> {
        Ok(Some(self.labels.clone()))
    }

    fn names(&self, _: &str) -> Result<Option<Vec<String>>, DataError> {
        Ok(None)
    }

    fn members(&self) -> Vec<String> {
        Vec::new()
    }

    fn at(&self, name: &str) -> Box<At> {
        At::dataset(Path::new("memory"), name, 0)
    }
}
