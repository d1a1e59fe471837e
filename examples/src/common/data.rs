//! What the programs do with data.

use std::path::{Path, PathBuf};

use burn::tensor::DType;
use burn_spatial::comm::ReduceOp;
use burn_spatial_io::{DataError, GridRank, Transform, VolumeReader, VolumeShape};
use serde::{Deserialize, Serialize};

use super::Error;
use super::ranks::{Rank, on_first};

/// Volumes that [`Scaling::measure`] looks at, at most.
const MEASURED: usize = 16;

/// What is done to the values of each channel: minus the mean, over the deviation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scaling {
    /// Of each channel.
    pub mean: Vec<f32>,
    /// Of each channel.
    pub deviation: Vec<f32>,
}

impl Scaling {
    /// Measures the first volumes of a set, each rank its block, after `transform`. `open` opens one; all have the same
    /// shape. Collective.
    ///
    /// # Errors
    /// [`Error::Data`] when one cannot be read.
    pub fn measure(
        rank: &Rank,
        files: &[PathBuf],
        transform: Transform,
        open: impl Fn(&Path) -> Result<Box<dyn VolumeReader>, DataError>,
    ) -> Result<Scaling, Error> {
        // Count, then sum and sum of squares of each channel.
        let mut sums = Vec::new();
        let (mut scratch, mut read) = (Vec::new(), Vec::new());
        for path in files.iter().take(MEASURED) {
            let file = open(path)?;
            let shape = file.shape();
            let bounds = GridRank::of(&rank.mesh).block(shape.extent);
            file.read(bounds, transform, &mut scratch, &mut read)?;
            sums.resize(1 + 2 * shape.channels, 0.0f64);
            sums[0] += bounds.voxels() as f64;
            for (channel, voxels) in read.chunks(bounds.voxels()).enumerate() {
                sums[1 + 2 * channel] += voxels.iter().map(|v| f64::from(*v)).sum::<f64>();
                sums[2 + 2 * channel] += voxels.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
            }
            // The time that a rank waits for a slower one is that of one volume.
            rank.world().barrier()?;
        }
        let bytes = sums.iter().flat_map(|v| v.to_ne_bytes()).collect();
        let bytes = rank.world().all_reduce(bytes, DType::F64, ReduceOp::Sum)?;
        let sums: Vec<f64> = bytes.as_chunks().0.iter().map(|v| f64::from_ne_bytes(*v)).collect();
        let mean = |channel: usize| sums[1 + 2 * channel] / sums[0];
        let deviation = |channel: usize| (sums[2 + 2 * channel] / sums[0] - mean(channel).powi(2)).max(0.0).sqrt();
        let channels = 0..sums.len() / 2;
        Ok(Scaling {
            mean: channels.clone().map(|c| mean(c) as f32).collect(),
            // A channel without structure stays as it is.
            deviation: channels.map(|c| if deviation(c) > 1e-6 { deviation(c) as f32 } else { 1.0 }).collect(),
        })
    }

    /// Scales `[channels, voxels]` in place.
    pub fn apply(&self, block: &mut [f32]) {
        let voxels = block.len() / self.mean.len();
        for (voxels, (mean, deviation)) in block.chunks_mut(voxels).zip(self.mean.iter().zip(&self.deviation)) {
            voxels.iter_mut().for_each(|v| *v = (*v - mean) / deviation);
        }
    }
}

/// Makes `folder` and its parents, and sees that files can be written there: before the work, not after it. Collective:
/// rank 0 does it.
///
/// # Errors
/// [`Error::Io`].
pub fn make_folder(rank: &Rank, folder: &Path) -> Result<(), Error> {
    on_first(rank.world(), || {
        std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let probe = folder.join(format!(".write-probe-{}", std::process::id()));
        let written = std::fs::write(&probe, "probe");
        let removed = std::fs::remove_file(&probe);
        written.and(removed).map_err(|cause| Error::Unwritable { folder: folder.to_owned(), cause })
    })
}

/// [`make_folder`] of the folder that the file `path` is to be in. Collective.
///
/// # Errors
/// [`Error::Io`], and [`Error::Usage`] when there is a folder of that name.
pub fn make_folder_of(rank: &Rank, path: &Path) -> Result<(), Error> {
    on_first(rank.world(), || match path.is_dir() {
        true => Err(Error::Usage(format!("{}: is a folder; give the name of a file", path.display()))),
        false => Ok(()),
    })?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    make_folder(rank, folder.unwrap_or(Path::new(".")))
}

/// A file of another shape than the first of its set.
pub fn differs(path: &Path, shape: VolumeShape, first: &Path, expected: VolumeShape) -> Error {
    let (path, first) = (path.display(), first.display());
    Error::Usage(format!("{path}: {shape}, but the first file, {first}, has {expected}: crop or resample it, or move it out of the folder"))
}

/// A fingerprint of a set of files: of their names, wherever the folder is and whatever the order.
pub fn fingerprint(files: &[PathBuf]) -> u32 {
    let mut names: Vec<_> = files.iter().filter_map(|path| path.file_name()).collect();
    names.sort();
    let mut sum = crc32fast::Hasher::new();
    for name in names {
        sum.update(name.as_encoded_bytes());
        // No name has it: two names are not one longer one.
        sum.update(b"/");
    }
    sum.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_alone_make_the_fingerprint() {
        let of = |names: &[&str]| fingerprint(&names.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(of(&["a/x.h5", "a/y.h5"]), of(&["b/y.h5", "b/x.h5"]));
        assert_ne!(of(&["x.h5", "y.h5"]), of(&["x.h5", "z.h5"]));
        assert_ne!(of(&["x", "yz"]), of(&["xy", "z"]));
    }
}
