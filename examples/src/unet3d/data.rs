//! Labelled volumes as batches on the grid.

use std::path::{Path, PathBuf};

use burn_spatial::comm::Alive;
use burn_spatial::place::SpatialBackend;
use burn_spatial_io::{
    DataError, GridRank, Loader, LoaderOptions, PlaceOnMesh, Sample, SampleOptions, SampleSource, SegmentationBatch, SegmentationDataset,
    SegmentationOptions, Transform, VolumeBatcher, list_files, split_files,
};
use serde::{Deserialize, Serialize};

use super::cli::FileArgs;
use crate::common::cli::TestArgs;
use crate::common::data::{Scaling, differs};
use crate::common::ranks::{Rank, long_on_first, on_all};
use crate::common::{Device, Error};

/// Files of labelled volumes of one shape.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Volumes {
    /// The files, sample by sample.
    pub files: Vec<PathBuf>,
    /// How they are read.
    pub options: SegmentationOptions,
    /// Channels.
    pub channels: usize,
    /// Voxels along depth, height and width.
    pub extent: [usize; 3],
}

/// How volumes with `classes` classes are read.
pub fn options(files: &FileArgs, classes: usize, ignored: Option<i64>) -> SegmentationOptions {
    SegmentationOptions { volume: files.volume.clone(), segmentation: files.segmentation.clone(), classes, ignored }
}

impl Volumes {
    /// Opens each of `files`, with a sign of life after each. For rank 0, which tells the others.
    ///
    /// # Errors
    /// [`Error::Data`] when a file cannot be read; [`Error::Usage`] when shapes differ or there is no file.
    pub fn open(files: Vec<PathBuf>, options: &SegmentationOptions, alive: &mut Alive<'_>) -> Result<Volumes, Error> {
        let mut shape = None;
        for path in &files {
            let own = options.check(path, 0)?;
            let first = *shape.get_or_insert(own);
            if first != own {
                return Err(differs(path, own, &files[0], first));
            }
            alive.beat()?;
        }
        let shape = shape.ok_or_else(|| Error::Usage("there are no volumes to read".into()))?;
        Ok(Volumes { files, options: options.clone(), channels: shape.channels, extent: shape.extent })
    }

    /// The volumes of `folder`. Collective: rank 0 looks.
    ///
    /// # Errors
    /// As for [`Volumes::open`].
    pub fn of_folder(rank: &Rank, folder: &Path, options: &SegmentationOptions) -> Result<Volumes, Error> {
        long_on_first(rank.world(), |alive| Volumes::open(list_files(folder, 0)?, options, alive))
    }

    /// Training and test volumes; the extents of the two sets may differ. Collective: rank 0 looks.
    ///
    /// # Errors
    /// As for [`Volumes::open`], and [`Error::Usage`] when one of the sets would be empty or they do not match.
    pub fn split(rank: &Rank, data: &Path, test: &TestArgs, seed: u64, options: &SegmentationOptions) -> Result<(Volumes, Volumes), Error> {
        long_on_first(rank.world(), |alive| {
            let files = list_files(data, 0)?;
            let (train, held_out) = match &test.test_data {
                Some(folder) => (files, list_files(folder, 0)?),
                None => split_files(files, test.test_fraction, seed),
            };
            if train.is_empty() || held_out.is_empty() {
                return Err(Error::Usage(format!(
                    "{} volumes to train on and {} to test on: change --test-fraction or give --test-data",
                    train.len(),
                    held_out.len()
                )));
            }
            let (train, held_out) = (Volumes::open(train, options, alive)?, Volumes::open(held_out, options, alive)?);
            if train.channels != held_out.channels {
                let message = format!("training volumes have {} channels, test volumes {}", train.channels, held_out.channels);
                return Err(Error::Usage(message));
            }
            Ok((train, held_out))
        })
    }

    /// How brightness is scaled. Collective.
    ///
    /// # Errors
    /// [`Error::Data`] when a volume cannot be read.
    pub fn scaling(&self, rank: &Rank) -> Result<Scaling, Error> {
        Scaling::measure(rank, &self.files, Transform::Identity, |path| self.options.volume(&*self.options.open(path, rank.mesh.rank())?))
    }

    /// The batches of this rank. Collective.
    ///
    /// # Errors
    /// [`Error::Data`] when the first volume cannot be read.
    pub fn loader<B: SpatialBackend<Device = Device>>(
        &self,
        rank: &Rank,
        scaling: &Scaling,
        options: LoaderOptions,
    ) -> Result<Loader<B, SegmentationBatch<B>>, Error> {
        let blocks = SegmentationDataset::new(self.files.clone(), GridRank::of(&rank.mesh), self.options.clone());
        let source = Scaled { blocks: on_all(rank.world(), blocks.map_err(Error::from))?, scaling: scaling.clone() };
        let batcher = VolumeBatcher::new(&rank.mesh, PlaceOnMesh);
        Ok(Loader::new(source, batcher, options, GridRank::of(&rank.mesh), rank.device.clone()))
    }
}

/// Blocks with scaled brightness.
struct Scaled {
    blocks: SegmentationDataset,
    scaling: Scaling,
}

impl SampleSource for Scaled {
    fn try_get(&self, index: usize) -> Result<Sample, DataError> {
        let mut sample = self.blocks.try_get(index)?;
        self.scaling.apply(&mut sample.block);
        Ok(sample)
    }

    fn len(&self) -> usize {
        self.blocks.len()
    }
}
