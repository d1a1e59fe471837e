//! Small volume files.
#![allow(dead_code, reason = "every test binary uses its own part")]

use std::path::{Path, PathBuf};

use burn_spatial::mesh::Grid;
use burn_spatial_io::{ChannelAxis, CosmoFlowDataset, CosmoFlowOptions, GridRank, IndexBox, VolumeReader, open_file};
use hdf5_metno as hdf5;

/// A file with the volume `full` of `shape` and, unless empty, the labels `unitPar`.
pub fn write<T: hdf5::H5Type, L: hdf5::H5Type>(path: &Path, shape: [usize; 4], values: &[T], labels: &[L]) {
    let file = hdf5::File::create(path).unwrap();
    let [a, b, c, d] = shape;
    file.new_dataset::<T>().shape((a, b, c, d)).create("full").unwrap().write_raw(values).unwrap();
    if !labels.is_empty() {
        file.new_dataset_builder().with_data(labels).create("unitPar").unwrap();
    }
}

/// Channels last, every value its place in the file.
pub fn counter(path: &Path, shape: [usize; 4]) {
    let values: Vec<i16> = (0..shape.iter().product::<usize>() as i16).collect();
    write(path, shape, &values, &[0.25f32, -0.5]);
}

/// `count` cubes of side `n` with two channels; every voxel of sample i is i.
pub fn set(folder: &Path, count: usize, n: usize) -> Vec<PathBuf> {
    (0..count)
        .map(|i| {
            let path = folder.join(format!("box{i:03}.hdf5"));
            write(&path, [n, n, n, 2], &vec![i as i16; n * n * n * 2], &[i as f32]);
            path
        })
        .collect()
}

pub fn open(path: &Path) -> Box<dyn VolumeReader> {
    open_file(path, 3).and_then(|file| file.volume("full", ChannelAxis::Auto)).unwrap()
}

pub fn whole(file: &dyn VolumeReader) -> IndexBox {
    file.shape().whole()
}

/// Rank 3 of ranks that read whole volumes.
pub const WHOLE: GridRank = GridRank { grid: Grid::ONE, rank: 3 };

/// The rank at `coords` of depth, height and width.
pub fn rank([d, h, w]: [usize; 3], [i, j, k]: [usize; 3]) -> GridRank {
    let grid = Grid([1, d, h, w]);
    GridRank { grid, rank: grid.rank([0, i, j, k]) }
}

pub fn dataset(files: Vec<PathBuf>) -> CosmoFlowDataset {
    CosmoFlowDataset::new(files, WHOLE, CosmoFlowOptions::default()).unwrap()
}

/// A file with `volume`, every voxel its place, and `segmentation` of `shape`.
pub fn labelled<T: hdf5::H5Type>(path: &Path, shape: [usize; 3], classes: &[T]) {
    let [d, h, w] = shape;
    let file = hdf5::File::create(path).unwrap();
    let values: Vec<i16> = (0..(d * h * w) as i16).collect();
    file.new_dataset::<i16>().shape((d, h, w)).create("volume").unwrap().write_raw(&values).unwrap();
    file.new_dataset::<T>().shape((d, h, w)).create("segmentation").unwrap().write_raw(classes).unwrap();
}
