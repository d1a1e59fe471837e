//! Small volumes to train and test on: universes with the public CosmoFlow layout, and labelled volumes ([`Anatomy`]).
//!
//! A universe is a periodic box of particles that start on a grid and are displaced by second-order Lagrangian
//! perturbation theory from a Gaussian field with the linear spectrum of Eisenstein and Hu. Particles are counted in
//! the cell they lie in, at redshifts 0, 0.5, 1.5 and 3. The same configuration gives the same files, whatever the
//! number of threads: every universe, and every plane of its noise, has its own place in the generator's streams.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use hdf5_metno as hdf5;
use hdf5_metno::types::FixedAscii;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

mod anatomy;
mod cosmology;
mod field;

pub use anatomy::{Anatomy, AnatomyConfig, anatomy, generate_anatomies};
pub use cosmology::{Cosmology, OMEGA_B};

use crate::random;
use crate::write::{fill, whole_file};
use field::Cube;

/// Redshift of each channel.
pub const REDSHIFTS: [f64; 4] = [0.0, 0.5, 1.5, 3.0];

/// A parameter that a network learns to read off a universe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Parameter {
    /// Matter density, of the critical one.
    OmegaM,
    /// Fluctuations of the linear density in spheres of 8 Mpc/h.
    #[serde(rename = "sigma_8")]
    Sigma8,
    /// Spectral index.
    NSpec,
    /// Hubble constant, km/s/Mpc.
    #[serde(rename = "h_0")]
    H0,
}

impl Parameter {
    /// All, in the order of the labels.
    pub const ALL: [Parameter; 4] = [Parameter::OmegaM, Parameter::Sigma8, Parameter::NSpec, Parameter::H0];

    /// The name in the public files.
    pub const fn name(self) -> &'static str {
        ["Omega_m", "sigma_8", "N_spec", "H_0"][self as usize]
    }

    /// The middle of the prior.
    pub const fn center(self) -> f64 {
        [0.3, 0.8, 0.96, 70.0][self as usize]
    }
}

/// What to make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SynthConfig {
    /// Cells a side.
    pub grid: usize,
    /// Cell size in Mpc/h, for a Hubble constant of 70 (for every one with `fixed_box`).
    pub cell: f64,
    /// How many universes.
    pub count: usize,
    /// Number of the first universe.
    pub start: usize,
    /// Seed of the whole set.
    pub seed: u64,
    /// Half-width of the priors, relative: parameters lie within center * (1 +- spread). At most 0.8.
    pub spread: f64,
    /// Which parameters vary; the others stay at the center, with label 0.
    pub vary: Vec<Parameter>,
    /// Box fixed in Mpc/h; else it is fixed in Mpc, as in the public files, and scales with the Hubble constant.
    pub fixed_box: bool,
    /// Particles per cell side. With cells much wider than 1 Mpc/h one particle hardly leaves its cell at redshift 3.
    pub ppc: usize,
}

impl Default for SynthConfig {
    /// 16 boxes of 32^3 cells of 4 Mpc/h, all parameters within 30 %, one particle a cell.
    fn default() -> Self {
        SynthConfig {
            grid: 32,
            cell: 4.0,
            count: 16,
            start: 0,
            seed: 1,
            spread: 0.3,
            vary: Parameter::ALL.into(),
            fixed_box: false,
            ppc: 1,
        }
    }
}

/// Why volumes could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// A setting out of range.
    #[error("synthetic volumes: {field} must be {expected}, got {got}")]
    Config {
        /// The field of [`SynthConfig`] or [`AnatomyConfig`].
        field: &'static str,
        /// Its range.
        expected: &'static str,
        /// Its value.
        got: String,
    },
    /// More particles in a cell than an int16 holds.
    #[error("universe {index}: {count} particles in one cell do not fit an int16; use smaller cells or a smaller ppc")]
    Count {
        /// Number of the universe.
        index: usize,
        /// Particles in the cell.
        count: u32,
    },
    /// The file system.
    #[error("{}: {cause}", .path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// HDF5.
    #[error("{}: writing failed: {cause}", .path.display())]
    Hdf5 {
        /// The file.
        path: PathBuf,
        /// HDF5's error.
        cause: hdf5::Error,
    },
}

impl SynthConfig {
    fn check(&self) -> Result<(), SynthError> {
        let bad = |field, expected, got: String| Err(SynthError::Config { field, expected, got });
        if !(2..=4096).contains(&self.grid) {
            return bad("grid", "from 2 to 4096 cells", self.grid.to_string());
        }
        if self.count == 0 {
            return bad("count", "at least 1", "0".into());
        }
        if self.ppc == 0 || self.grid.saturating_mul(self.ppc) > 4096 {
            return bad("ppc", "at least 1, and at most 4096 particles a box side", self.ppc.to_string());
        }
        if !(self.cell.is_finite() && self.cell > 0.0) {
            return bad("cell", "a positive size in Mpc/h", self.cell.to_string());
        }
        if !(0.0..=0.8).contains(&self.spread) {
            return bad("spread", "from 0 to 0.8", self.spread.to_string());
        }
        Ok(())
    }

    /// The path of universe `index` in `folder`.
    pub fn path(&self, folder: &Path, index: usize) -> PathBuf {
        folder.join(format!("univ_s{}_{index:05}.hdf5", self.seed))
    }
}

/// One universe in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Universe {
    /// Its number in the set.
    pub index: usize,
    /// The seed of the set.
    pub seed: u64,
    /// Cells a side.
    pub grid: usize,
    /// Particles per cell, `[grid, grid, grid, 4]`, channels (redshifts) last.
    pub counts: Vec<i16>,
    /// Labels in [-1, 1], in the order of [`Parameter::ALL`].
    pub unit: [f32; 4],
    /// The parameters themselves.
    pub physical: [f32; 4],
    /// Box size in Mpc/h.
    pub length: f64,
}

impl Universe {
    /// Writes the universe to `path` with the public layout, beside it first: a file of that name is whole.
    pub fn write(&self, path: &Path) -> Result<(), SynthError> {
        write_file(path, |file| self.write_hdf5(file))
    }

    fn write_hdf5(&self, file: &hdf5::File) -> hdf5::Result<Vec<hdf5::Dataset>> {
        file.new_attr::<FixedAscii<8>>().create("dataset_tag")?.write_scalar(&ascii::<8>("4parE"))?;
        file.new_attr::<i64>().create("seed9")?.write_scalar(&(self.seed as i64))?;
        let tag: FixedAscii<48> = ascii(&format!("synth_s{}-{}", self.seed, self.index));
        file.new_attr::<FixedAscii<48>>().create("universe_tag")?.write_scalar(&tag)?;
        let n = self.grid;
        let full = file.new_dataset::<i16>().shape((n, n, n, 4)).create("full")?;
        full.write_raw(&self.counts)?;
        let names = Parameter::ALL.map(|parameter| ascii::<8>(parameter.name()));
        Ok(vec![
            full,
            file.new_dataset_builder().with_data(&self.unit).create("unitPar")?,
            file.new_dataset_builder().with_data(&self.physical).create("physPar")?,
            file.new_dataset_builder().with_data(&names).create("namePar")?,
            file.new_dataset_builder().with_data(&REDSHIFTS.map(|z| z as f32)).create("redshifts")?,
        ])
    }
}

/// A fixed-length string of `N` bytes, cut if longer.
fn ascii<const N: usize>(text: &str) -> FixedAscii<N> {
    FixedAscii::from_ascii(&text.as_bytes()[..text.len().min(N)]).unwrap_or_default()
}

/// Makes universe `index` of the set `config`.
///
/// # Errors
/// [`SynthError::Config`] for a setting out of range, [`SynthError::Count`] when a cell overflows.
pub fn universe(config: &SynthConfig, index: usize) -> Result<Universe, SynthError> {
    config.check()?;
    let mut rng = random::stream(config.seed, b"params\0\0", index as u64);
    // Every parameter is drawn, so that one's values do not depend on which others vary.
    let unit = Parameter::ALL.map(|parameter| {
        let drawn = 2.0 * random::unit(&mut rng) - 1.0;
        if config.vary.contains(&parameter) { drawn } else { 0.0 }
    });
    let physical: [f64; 4] = std::array::from_fn(|i| Parameter::ALL[i].center() * (1.0 + config.spread * unit[i]));
    let [omega_m, sigma_8, n_spec, h_0] = physical;
    let cosmology = Cosmology::new(omega_m, sigma_8, n_spec, h_0);
    let scale = if config.fixed_box { 1.0 } else { h_0 / Parameter::H0.center() };
    let length = config.grid as f64 * config.cell * scale;
    let counts = simulate(config, &cosmology, length, index)?;
    let labels = |values: [f64; 4]| values.map(|value| value as f32);
    Ok(Universe { index, seed: config.seed, grid: config.grid, counts, unit: labels(unit), physical: labels(physical), length })
}

/// Particle counts, `[grid, grid, grid, 4]`.
fn simulate(config: &SynthConfig, cosmology: &Cosmology, length: f64, index: usize) -> Result<Vec<i16>, SynthError> {
    let (grid, side) = (config.grid, config.grid * config.ppc);
    let cube = Cube::new(side, length);
    let moved = cube.displacements(&cube.linear_density(cosmology, config.seed, index as u64));
    let cells = grid as f64 / length;
    let channels: Vec<Vec<u32>> = REDSHIFTS
        .par_iter()
        .map(|z| {
            let a = 1.0 / (1.0 + z);
            let (d1, d2) = (cosmology.growth(a), cosmology.growth_second(a));
            let mut counts = vec![0u32; grid.pow(3)];
            for particle in 0..side.pow(3) {
                let place = [particle / (side * side), particle / side % side, particle % side];
                let mut cell = 0;
                for (axis, index) in place.into_iter().enumerate() {
                    // Particles start at the centers of their cells.
                    let start = (index as f64 + 0.5) / config.ppc as f64;
                    let shift = d1 * moved.first[axis][particle] + d2 * moved.second[axis][particle];
                    let coordinate = (start + shift * cells).floor() as i64;
                    cell = cell * grid + coordinate.rem_euclid(grid as i64) as usize;
                }
                counts[cell] += 1;
            }
            counts
        })
        .collect();
    let mut full = vec![0i16; grid.pow(3) * REDSHIFTS.len()];
    for (i, value) in full.iter_mut().enumerate() {
        let count = channels[i % REDSHIFTS.len()][i / REDSHIFTS.len()];
        *value = i16::try_from(count).map_err(|_| SynthError::Count { index, count })?;
    }
    Ok(full)
}

/// Makes the set `config` in the folder `out_dir`, one file a universe, in parallel on rayon's threads. After each,
/// `progress` is called with the number done so far. Returns the paths in order; existing files are replaced.
///
/// # Errors
/// [`SynthError`]; files made before the error stay.
pub fn generate(config: &SynthConfig, out_dir: impl AsRef<Path>, progress: impl Fn(usize) + Sync) -> Result<Vec<PathBuf>, SynthError> {
    config.check()?;
    let folder = out_dir.as_ref();
    fs::create_dir_all(folder).map_err(|cause| SynthError::Io { path: folder.to_owned(), cause })?;
    each(config.start, config.count, progress, |index| {
        let path = config.path(folder, index);
        universe(config, index)?.write(&path)?;
        Ok(path)
    })
}

/// Makes `count` files from number `start` on, in parallel.
fn each(
    start: usize,
    count: usize,
    progress: impl Fn(usize) + Sync,
    make: impl Fn(usize) -> Result<PathBuf, SynthError> + Sync,
) -> Result<Vec<PathBuf>, SynthError> {
    let done = AtomicUsize::new(0);
    let make = |index: usize| {
        let path = make(index)?;
        progress(done.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(path)
    };
    let all: Vec<usize> = (start..).take(count).collect();
    let mut paths = Vec::with_capacity(all.len());
    // At most one volume a thread at a time: work stealing would start more, and hold the memory of all.
    for group in all.chunks(rayon::current_num_threads()) {
        paths.extend(group.par_iter().map(|index| make(*index)).collect::<Result<Vec<_>, _>>()?);
    }
    Ok(paths)
}

/// Writes the HDF5 file `path` with the datasets that `write` makes, beside it first.
fn write_file(path: &Path, write: impl FnOnce(&hdf5::File) -> hdf5::Result<Vec<hdf5::Dataset>>) -> Result<(), SynthError> {
    let make = |partial: &Path| hdf5::File::create(partial).and_then(|file| fill(file, write));
    let hdf5 = |cause| SynthError::Hdf5 { path: path.to_owned(), cause };
    whole_file(path, |partial| make(partial).map_err(hdf5), |cause| SynthError::Io { path: path.to_owned(), cause })
}

#[cfg(test)]
mod tests;
