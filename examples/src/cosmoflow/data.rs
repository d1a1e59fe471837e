//! Universes as batches on the grid.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn_spatial::comm::Alive;
use burn_spatial::place::SpatialBackend;
use burn_spatial_io::{
    ChannelAxis, CosmoFlowBatch, DataError, GridRank, Loader, LoaderOptions, PlaceOnMesh, Sample, SampleSource, Transform, VolumeBatcher,
    list_files, open_file, split_files,
};
use serde::{Deserialize, Serialize};

use super::augment::{Symmetry, View};
use crate::common::cli::TestArgs;
use crate::common::data::{Scaling, differs};
use crate::common::ranks::{Rank, long_on_first};
use crate::common::{Error, exact};

/// The volume in a file.
const VOLUME: &str = "full";
/// The parameters, in [-1, 1].
const LABELS: &str = "unitPar";
/// The names of the parameters.
const NAMES: &str = "namePar";

/// Files of universes of one shape.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Universes {
    /// The files, sample by sample.
    pub files: Vec<PathBuf>,
    /// Redshifts.
    pub channels: usize,
    /// Voxels along each edge.
    pub width: usize,
    /// All parameters, by name.
    pub names: Vec<String>,
    /// The parameters of each file, in [-1, 1].
    pub labels: Vec<Vec<f32>>,
}

/// The parameters that are learned: those that vary in the training set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Targets {
    /// Their names.
    pub names: Vec<String>,
    /// Their positions among the labels of a file.
    pub columns: Vec<usize>,
    /// Their means in the training set: what a constant predicts.
    #[serde(with = "exact")]
    pub means: Vec<f64>,
}

impl fmt::Display for Universes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}^3 with {}", self.channels, self.width, self.names.join(", "))
    }
}

impl Universes {
    /// Opens each of `files`, with a sign of life after each. For rank 0, which tells the others.
    ///
    /// # Errors
    /// [`Error::Data`] when a file cannot be read; [`Error::Usage`] when shapes differ or are no cubes, or a parameter is no
    /// number.
    pub fn open(files: Vec<PathBuf>, alive: &mut Alive<'_>) -> Result<Universes, Error> {
        let mut shape = None;
        let (mut names, mut labels) = (Vec::new(), Vec::new());
        for path in &files {
            let file = open_file(path, 0)?;
            let own = file.volume(VOLUME, ChannelAxis::Auto)?.shape();
            let [d, h, w] = own.extent;
            if d != h || h != w {
                return Err(Error::Usage(format!("{}: CosmoFlow reads cubes, not {d} x {h} x {w} voxels", path.display())));
            }
            let first = *shape.get_or_insert(own);
            if first != own {
                return Err(differs(path, own, &files[0], first));
            }
            let row = file.labels(LABELS)?;
            if labels.is_empty() {
                let number = |i: usize| format!("parameter_{i}");
                names = file.names(NAMES)?.filter(|n| n.len() == row.len()).unwrap_or_else(|| (0..row.len()).map(number).collect());
            }
            if row.len() != names.len() {
                let message = format!("{}: {} parameters where the first file has {}", path.display(), row.len(), names.len());
                return Err(Error::Usage(message));
            }
            if let Some(column) = row.iter().position(|value| !value.is_finite()) {
                return Err(Error::Usage(format!("{}: parameter {} is {}", path.display(), names[column], row[column])));
            }
            labels.push(row);
            alive.beat()?;
        }
        let shape = shape.ok_or_else(|| Error::Usage("there are no universes to read".into()))?;
        Ok(Universes { files, channels: shape.channels, width: shape.extent[0], names, labels })
    }

    /// The universes of `folder`. Collective: rank 0 looks.
    ///
    /// # Errors
    /// As for [`Universes::open`].
    pub fn of_folder(rank: &Rank, folder: &Path) -> Result<Universes, Error> {
        long_on_first(rank.world(), |alive| Universes::open(list_files(folder, 0)?, alive))
    }

    /// Training and test universes. Collective: rank 0 looks.
    ///
    /// # Errors
    /// As for [`Universes::open`], and [`Error::Usage`] when one of the sets would be empty or they do not match.
    pub fn split(rank: &Rank, data: &Path, test: &TestArgs, seed: u64) -> Result<(Universes, Universes), Error> {
        long_on_first(rank.world(), |alive| {
            let files = list_files(data, 0)?;
            let (train, held_out) = match &test.test_data {
                Some(folder) => (files, list_files(folder, 0)?),
                None => split_files(files, test.test_fraction, seed),
            };
            if train.is_empty() || held_out.is_empty() {
                return Err(Error::Usage(format!(
                    "{} universes to train on and {} to test on: change --test-fraction or give --test-data",
                    train.len(),
                    held_out.len()
                )));
            }
            let (train, held_out) = (Universes::open(train, alive)?, Universes::open(held_out, alive)?);
            let shape = |u: &Universes| (u.channels, u.width, u.names.clone());
            if shape(&train) != shape(&held_out) {
                return Err(Error::Usage(format!("training universes are {train}, test universes {held_out}")));
            }
            Ok((train, held_out))
        })
    }

    /// The parameters that vary here; the others are not learned.
    ///
    /// # Errors
    /// [`Error::Usage`] when none does.
    pub fn targets(&self) -> Result<Targets, Error> {
        let column = |i: usize| self.labels.iter().map(move |row| row[i]);
        let columns: Vec<usize> = (0..self.names.len()).filter(|i| column(*i).any(|value| value != self.labels[0][*i])).collect();
        if columns.is_empty() {
            return Err(Error::Usage("no parameter varies in the training universes: there is nothing to learn".into()));
        }
        Ok(Targets {
            names: columns.iter().map(|i| self.names[*i].clone()).collect(),
            means: columns.iter().map(|i| column(*i).map(f64::from).sum::<f64>() / self.labels.len() as f64).collect(),
            columns,
        })
    }

    /// How ln(1 + count) is scaled: growth shows in small changes of the early redshifts, which hardly vary otherwise.
    /// Collective.
    ///
    /// # Errors
    /// [`Error::Data`] when a universe cannot be read.
    pub fn scaling(&self, rank: &Rank) -> Result<Scaling, Error> {
        let open = |path: &Path| open_file(path, rank.mesh.rank())?.volume(VOLUME, ChannelAxis::Auto);
        Scaling::measure(rank, &self.files, Transform::Log1p, open)
    }

    /// The batches of this rank.
    pub fn loader<B: SpatialBackend<Device = burn_spatial::SpatialDevice<burn::backend::flex::FlexDevice>>>(
        &self,
        rank: &Rank,
        targets: &Targets,
        scaling: &Scaling,
        options: LoaderOptions,
        view: Option<(Symmetry, u64, u64)>,
    ) -> Loader<B, CosmoFlowBatch<B>> {
        let source = Blocks {
            universes: Arc::new(self.clone()),
            columns: targets.columns.clone(),
            scaling: scaling.clone(),
            rank: GridRank::of(&rank.mesh),
            view,
        };
        let batcher = VolumeBatcher::new(&rank.mesh, PlaceOnMesh);
        Loader::new(source, batcher, options, GridRank::of(&rank.mesh), rank.device.clone())
    }
}

/// Reads this rank's block of a view of each universe.
struct Blocks {
    universes: Arc<Universes>,
    columns: Vec<usize>,
    scaling: Scaling,
    rank: GridRank,
    /// The symmetry, the seed and the epoch.
    view: Option<(Symmetry, u64, u64)>,
}

impl SampleSource for Blocks {
    fn try_get(&self, index: usize) -> Result<Sample, DataError> {
        let Universes { files, channels, width, labels, .. } = &*self.universes;
        let path = files.get(index).ok_or(DataError::Index { rank: self.rank.rank, index, len: files.len() })?;
        let file = open_file(path, self.rank.rank)?.volume(VOLUME, ChannelAxis::Auto)?;
        let bounds = self.rank.block([*width; 3]);
        let view = self.view.map_or(View::STORED, |(symmetry, seed, epoch)| View::draw(symmetry, seed, epoch, index, *width));
        let mut block = vec![0.0; channels * bounds.voxels()];
        let (mut scratch, mut read) = (Vec::new(), Vec::new());
        for part in view.parts(bounds, *width) {
            file.read(part.bounds, Transform::Log1p, &mut scratch, &mut read)?;
            view.put(&part, &read, &mut block, bounds.extent);
        }
        self.scaling.apply(&mut block);
        let [d, h, w] = bounds.extent;
        Ok(Sample {
            id: index,
            block,
            shape: [*channels, d, h, w],
            volume: [*channels, *width, *width, *width],
            labels: self.columns.iter().map(|c| labels[index][*c]).collect(),
            ..Sample::default()
        })
    }

    fn len(&self) -> usize {
        self.universes.files.len()
    }
}
