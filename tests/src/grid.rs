//! Runs a program on every rank of a grid, one thread a rank.

use std::fmt::Debug;

use burn_flex::FlexDevice;
use burn_spatial::{Grid, Mesh, SpatialDevice, launch};

/// The grids that programs are tested on: one rank, each axis alone, two axes, all three, data beside space, and more
/// ranks than the last layers have voxels.
pub const GRIDS: [Grid; 13] = [
    Grid::ONE,
    Grid([1, 2, 1, 1]),
    Grid([1, 1, 2, 1]),
    Grid([1, 1, 1, 2]),
    Grid([1, 2, 2, 1]),
    Grid([1, 2, 2, 2]),
    Grid([2, 1, 1, 1]),
    Grid([2, 2, 1, 2]),
    Grid([1, 3, 1, 1]),
    Grid([2, 2, 1, 1]),
    Grid([1, 1, 4, 1]),
    Grid([1, 1, 2, 2]),
    Grid([1, 4, 1, 2]),
];

/// Runs `program` on all ranks of `grid`, and returns what each made, in rank order.
///
/// # Panics
/// If a rank fails, with its cause.
pub fn on_grid<T: Send>(grid: Grid, program: impl Fn(&SpatialDevice<FlexDevice>) -> T + Sync) -> Vec<T> {
    let results = launch::threads(grid.ranks(), |comm| {
        let mesh = Mesh::new(comm, grid)?;
        let device = SpatialDevice::new(FlexDevice, mesh)?;
        Ok::<_, burn_spatial::mesh::MeshError>(program(&device))
    });
    results.unwrap_or_else(|error| panic!("on grid {grid}: {error}"))
}

/// Runs `program` on all ranks of `grid` and asserts that they agree to the bit; returns what they made.
///
/// # Panics
/// If a rank fails or disagrees.
pub fn agreed_on_grid<T: Send + PartialEq + Debug>(grid: Grid, program: impl Fn(&SpatialDevice<FlexDevice>) -> T + Sync) -> T {
    let mut results = on_grid(grid, program);
    let first = results.remove(0);
    for (i, other) in results.iter().enumerate() {
        assert!(first == *other, "on grid {grid} rank {} differs from rank 0", i + 1);
    }
    first
}
