//! Small labelled volumes, to train and test a segmentation on.
//!
//! A volume is a body (class 1): an ellipsoid somewhere near the middle, its surface bent by a smooth random field; in
//! it lie some smaller bent ellipsoids (class 2), and around it is background (class 0). Each class has a brightness of
//! its own, drawn anew for every volume; a smooth bias field, a change of contrast and noise lie over all, so that
//! brightness alone does not tell the class. The smooth fields are sums of a few random waves, known at every point.

use std::f64::consts::TAU;
use std::fs;
use std::path::{Path, PathBuf};

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::{SynthError, each, write_file};
use crate::random;

/// Waves of a smooth field.
const WAVES: usize = 8;
/// The stored brightness 1.
const SCALE: f64 = 1000.0;

/// What to make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AnatomyConfig {
    /// Voxels along each edge.
    pub size: usize,
    /// How many volumes.
    pub count: usize,
    /// Number of the first volume.
    pub start: usize,
    /// Seed of the whole set.
    pub seed: u64,
    /// Standard deviation of the noise, where classes are 0.2 to 0.4 apart.
    pub noise: f64,
    /// Standard deviation of the logarithm of the bias field.
    pub bias: f64,
}

impl Default for AnatomyConfig {
    /// 16 volumes of 32^3, noise 0.1, bias 0.1.
    fn default() -> Self {
        AnatomyConfig { size: 32, count: 16, start: 0, seed: 1, noise: 0.1, bias: 0.1 }
    }
}

impl AnatomyConfig {
    /// Classes of a volume.
    pub const CLASSES: usize = 3;

    fn check(&self) -> Result<(), SynthError> {
        let bad = |field, expected, got: String| Err(SynthError::Config { field, expected, got });
        if !(4..=4096).contains(&self.size) {
            return bad("size", "from 4 to 4096 voxels", self.size.to_string());
        }
        if self.count == 0 {
            return bad("count", "at least 1", "0".into());
        }
        for (field, value) in [("noise", self.noise), ("bias", self.bias)] {
            if !(0.0..=10.0).contains(&value) {
                return bad(field, "from 0 to 10", value.to_string());
            }
        }
        Ok(())
    }

    /// The path of volume `index` in `folder`.
    pub fn path(&self, folder: &Path, index: usize) -> PathBuf {
        folder.join(format!("anatomy_s{}_{index:05}.hdf5", self.seed))
    }
}

/// One labelled volume in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anatomy {
    /// Voxels along each edge.
    pub size: usize,
    /// Brightness in thousandths, `[size, size, size]`.
    pub volume: Vec<i16>,
    /// The class of each voxel, `[size, size, size]`.
    pub segmentation: Vec<u8>,
}

/// A field of zero mean and unit variance that varies over about half the volume.
struct Smooth([(f64, [f64; 3], f64); WAVES]);

impl Smooth {
    fn draw(rng: &mut ChaCha8Rng) -> Smooth {
        Smooth([(); WAVES].map(|()| {
            let wave = [(); 3].map(|()| TAU * 2.0 * (2.0 * random::unit(rng) - 1.0));
            ((2.0 / WAVES as f64).sqrt(), wave, TAU * random::unit(rng))
        }))
    }

    fn at(&self, point: [f64; 3]) -> f64 {
        self.0.iter().map(|(amplitude, k, phase)| amplitude * (k[0] * point[0] + k[1] * point[1] + k[2] * point[2] + phase).cos()).sum()
    }
}

/// An ellipsoid along the axes with a bent surface.
struct Blob {
    center: [f64; 3],
    radii: [f64; 3],
    bend: Smooth,
}

impl Blob {
    fn draw(rng: &mut ChaCha8Rng, middle: [f64; 3], spread: f64, [least, most]: [f64; 2]) -> Blob {
        let center = middle.map(|m| m + spread * (2.0 * random::unit(rng) - 1.0));
        let radii = [(); 3].map(|()| least + (most - least) * random::unit(rng));
        Blob { center, radii, bend: Smooth::draw(rng) }
    }

    fn holds(&self, point: [f64; 3]) -> bool {
        let square = |axis: usize| ((point[axis] - self.center[axis]) / self.radii[axis]).powi(2);
        (0..3).map(square).sum::<f64>().sqrt() < 1.0 + 0.12 * self.bend.at(point)
    }
}

/// Makes volume `index` of the set `config`: depends on both alone.
///
/// # Errors
/// [`SynthError::Config`] for a setting out of range.
pub fn anatomy(config: &AnatomyConfig, index: usize) -> Result<Anatomy, SynthError> {
    config.check()?;
    let rng = &mut random::stream(config.seed, b"anatomy\0", index as u64);
    let body = Blob::draw(rng, [0.5; 3], 0.06, [0.28, 0.4]);
    let count = 2 + random::below(rng, 3);
    let inner: Vec<Blob> = (0..count).map(|_| Blob::draw(rng, body.center, 0.16, [0.07, 0.15])).collect();
    let between = |rng: &mut ChaCha8Rng, low: f64, high: f64| low + (high - low) * random::unit(rng);
    let brightness = [between(rng, 0.1, 0.3), between(rng, 0.5, 0.65), between(rng, 0.9, 1.1)];
    let contrast = between(rng, 0.8, 1.25);
    let bias = Smooth::draw(rng);
    let mut noise = random::stream(config.seed, b"grain\0\0\0", index as u64);

    let n = config.size;
    let mut made = Anatomy { size: n, volume: Vec::with_capacity(n.pow(3)), segmentation: Vec::with_capacity(n.pow(3)) };
    let mut spare = None;
    for i in 0..n.pow(3) {
        let point = [i / (n * n), i / n % n, i % n].map(|at| (at as f64 + 0.5) / n as f64);
        let class = match body.holds(point) {
            true if inner.iter().any(|blob| blob.holds(point)) => 2,
            true => 1,
            false => 0u8,
        };
        let grain = spare.take().unwrap_or_else(|| {
            let [one, other] = random::normal_pair(&mut noise);
            spare = Some(other);
            one
        });
        let value = brightness[usize::from(class)] * contrast * (config.bias * bias.at(point)).exp() + config.noise * grain;
        made.volume.push((SCALE * value).round().clamp(f64::from(i16::MIN), f64::from(i16::MAX)) as i16);
        made.segmentation.push(class);
    }
    Ok(made)
}

impl Anatomy {
    /// Writes `volume` (1, D, H, W) and `segmentation` (D, H, W) to `path`, beside it first: a file of that name is
    /// whole.
    ///
    /// # Errors
    /// [`SynthError`] when the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), SynthError> {
        let n = self.size;
        write_file(path, |file| {
            let volume = file.new_dataset::<i16>().shape((1, n, n, n)).create("volume")?;
            volume.write_raw(&self.volume)?;
            let segmentation = file.new_dataset::<u8>().shape((n, n, n)).create("segmentation")?;
            segmentation.write_raw(&self.segmentation)?;
            Ok(vec![volume, segmentation])
        })
    }
}

/// Makes the set `config` in the folder `out_dir`, one file a volume, in parallel on rayon's threads. After each,
/// `progress` is called with the number done so far. Returns the paths in order; existing files are replaced.
///
/// # Errors
/// [`SynthError`]; files made before the error stay.
pub fn generate_anatomies(
    config: &AnatomyConfig,
    out_dir: impl AsRef<Path>,
    progress: impl Fn(usize) + Sync,
) -> Result<Vec<PathBuf>, SynthError> {
    config.check()?;
    let folder = out_dir.as_ref();
    fs::create_dir_all(folder).map_err(|cause| SynthError::Io { path: folder.to_owned(), cause })?;
    each(config.start, config.count, progress, |index| {
        let path = config.path(folder, index);
        anatomy(config, index)?.write(&path)?;
        Ok(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_depends_on_seed_and_number_alone() {
        let config = AnatomyConfig { size: 16, ..AnatomyConfig::default() };
        let one = anatomy(&config, 3).unwrap();
        assert_eq!(one, anatomy(&config, 3).unwrap());
        assert_ne!(one, anatomy(&config, 4).unwrap());
        assert_ne!(one, anatomy(&AnatomyConfig { seed: 2, ..config }, 3).unwrap());
    }

    #[test]
    fn every_class_is_there_and_brightness_alone_does_not_tell_it() {
        let config = AnatomyConfig { size: 24, ..AnatomyConfig::default() };
        for index in 0..12 {
            let made = anatomy(&config, index).unwrap();
            let share = |class: u8| made.segmentation.iter().filter(|c| **c == class).count() as f64 / 24f64.powi(3);
            assert!(share(0) > 0.5 && share(1) > 0.05 && share(2) > 0.003, "{index}: {} {} {}", share(0), share(1), share(2));
            let of = |class: u8| made.volume.iter().zip(&made.segmentation).filter(move |(_, c)| **c == class).map(|(v, _)| *v);
            let mean = |class: u8| of(class).map(f64::from).sum::<f64>() / of(class).count() as f64;
            assert!(mean(0) < mean(1) && mean(1) < mean(2), "{index}");
            assert!(of(0).max() > of(1).min() && of(1).max() > of(2).min(), "{index}: classes overlap");
        }
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        let message = |config: AnatomyConfig| anatomy(&config, 0).unwrap_err().to_string();
        let message =
            [message(AnatomyConfig { size: 2, ..Default::default() }), message(AnatomyConfig { noise: -1.0, ..Default::default() })];
        assert_eq!(message[0], "synthetic volumes: size must be from 4 to 4096 voxels, got 2");
        assert_eq!(message[1], "synthetic volumes: noise must be from 0 to 10, got -1");
    }
}
