//! A test mode: every tensor made from data is split over the mesh in some way, so that programs and test suites
//! written for plain backends meet split tensors everywhere.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::layout::{Axis, Layout};
use crate::mesh::{Grid, MeshAxis};
use crate::mix::mix;

/// The environment variable that turns the mode on; its number is the seed.
pub const SPLIT_INPUTS_VARIABLE: &str = "BURN_SPATIAL_SPLIT_INPUTS";

/// The state of the mode on one rank: all ranks make the same tensors in the same order.
#[derive(Debug)]
pub(crate) struct SplitInputs {
    state: AtomicU64,
}

impl SplitInputs {
    pub(crate) fn new(seed: u64) -> SplitInputs {
        SplitInputs { state: AtomicU64::new(seed) }
    }

    pub(crate) fn from_env() -> Option<SplitInputs> {
        let seed = std::env::var(SPLIT_INPUTS_VARIABLE).ok()?;
        let seed = seed.parse().unwrap_or_else(|_| panic!("{SPLIT_INPUTS_VARIABLE}={seed}: the seed is a number"));
        Some(SplitInputs::new(seed))
    }

    /// The layout of the next tensor.
    pub(crate) fn next(&self, shape: &[usize], grid: Grid) -> Layout {
        let seed = self.state.fetch_add(1, Ordering::Relaxed);
        scattered(shape, grid, &mut Draws(seed))
    }
}

/// Small numbers from a counter.
struct Draws(u64);

impl Draws {
    /// Below `n`.
    fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 % n as u64) as usize
    }
}

/// Each mesh axis splits one dimension that has at least as many elements as the axis has ranks and is not split yet,
/// in shards of any lengths; an axis that finds none splits nothing.
fn scattered(shape: &[usize], grid: Grid, draws: &mut Draws) -> Layout {
    let mut layout = Layout::full(shape);
    let mut axes: Vec<MeshAxis> = MeshAxis::ALL.into_iter().filter(|axis| grid.size(*axis) > 1).collect();
    let empty = shape.contains(&0);
    let mut free: Vec<usize> = (0..shape.len()).filter(|dim| shape[*dim] > 1 && !empty).collect();
    while !axes.is_empty() {
        let mesh = axes.swap_remove(draws.below(axes.len()));
        let ranks = grid.size(mesh);
        let fit: Vec<usize> = (0..free.len()).filter(|i| shape[free[*i]] >= ranks).collect();
        if fit.is_empty() {
            continue;
        }
        let dim = free.swap_remove(fit[draws.below(fit.len())]);
        // One element a shard, and of the rest each goes anywhere.
        let mut lengths = vec![1; ranks];
        (ranks..shape[dim].min(ranks + 64)).for_each(|_| lengths[draws.below(ranks)] += 1);
        lengths[ranks - 1] += shape[dim].saturating_sub(ranks + 64);
        let mut offsets = vec![0];
        lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + length));
        layout = layout.with_dim(dim, vec![Axis::split(mesh, offsets)]);
    }
    layout
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_axis_that_fits_splits_something() {
        let grid = Grid([1, 2, 2, 2]);
        let mut seen = std::collections::HashSet::new();
        for seed in 0..200 {
            let inputs = SplitInputs::new(seed);
            let layout = inputs.next(&[2, 1, 3, 70, 1], grid);
            assert_eq!(layout.split_over().iter().count(), 3, "{layout}");
            assert_eq!(layout.shape().as_slice(), [2, 1, 3, 70, 1]);
            seen.insert(layout);
            assert_eq!(inputs.next(&[2], grid).split_over().iter().count(), 1);
            assert!(inputs.next(&[1, 1], grid).is_full() && inputs.next(&[0, 4], grid).is_full());
        }
        assert!(seen.len() > 20, "{} ways", seen.len());
    }
}
