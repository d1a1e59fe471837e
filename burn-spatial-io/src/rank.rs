//! Which part of the data a rank holds.

use std::ops::Range;

use burn_spatial::Layout;
use burn_spatial::mesh::{Grid, Mesh, MeshAxis};

use crate::format::IndexBox;

/// A rank of a process grid: which block of a volume and which samples of a batch it reads. The rule is
/// [`Layout::volume`], the layout that [`burn_spatial::place::split`] gives an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridRank {
    /// The ranks along data, depth, height and width.
    pub grid: Grid,
    /// The number of this rank, which errors name. On [`Grid::ONE`] any rank reads whole volumes and batches.
    pub rank: usize,
}

impl GridRank {
    /// The only rank.
    pub const ONE: GridRank = GridRank { grid: Grid::ONE, rank: 0 };

    /// This rank of `mesh`. Local.
    pub fn of(mesh: &Mesh) -> GridRank {
        GridRank { grid: mesh.grid(), rank: mesh.rank() }
    }

    /// The block of this rank in a volume of `extent` voxels along depth, height and width. Along an axis with fewer
    /// voxels than ranks every rank holds all of it; along any other the first `extent % ranks` have one voxel more.
    pub fn block(&self, extent: [usize; 3]) -> IndexBox {
        let [d, h, w] = extent;
        let ranges = [2, 3, 4].map(|dim| self.owned(&[1, 1, d, h, w], dim));
        IndexBox { start: ranges.clone().map(|range| range.start), extent: ranges.map(|range| range.len()) }
    }

    /// The part of a global batch of `size` samples that this rank holds blocks of. The ranks of one spatial group hold
    /// the same; a batch with fewer samples than groups is held whole by each.
    pub fn samples(&self, size: usize) -> Range<usize> {
        self.owned(&[size], 0)
    }

    /// Whether no rank with a lower number holds the same block of a volume of `extent` voxels.
    pub(crate) fn is_first_with(&self, [d, h, w]: [usize; 3]) -> bool {
        let split = Layout::volume(&[1, 1, d, h, w], self.grid).split_over();
        let coords = self.grid.coords(self.rank);
        MeshAxis::ALL.into_iter().all(|axis| split.contains(axis) || coords[axis.index()] == 0)
    }

    fn owned(&self, shape: &[usize], dim: usize) -> Range<usize> {
        let owned = Layout::volume(shape, self.grid).owned(dim, self.grid.coords(self.rank));
        owned.expect("each dimension of a volume is one axis")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_above_2_pow_32() {
        // 64 channels of 2048^3 hold 2^39 elements; every boundary is a whole number of slowest-axis planes.
        let elements = 64 * 2048usize.pow(3);
        let samples = (0..3).map(|rank| GridRank { grid: Grid([3, 1, 1, 1]), rank }.samples(elements));
        assert_eq!(samples.map(|part| part.end).collect::<Vec<_>>(), [183_251_937_963, 366_503_875_926, 549_755_813_888]);
        let blocks: Vec<_> = (0..3).map(|rank| GridRank { grid: Grid([1, 3, 1, 1]), rank }.block([2048; 3])).collect();
        assert_eq!(blocks.iter().map(|b| b.start[0]).collect::<Vec<_>>(), [0, 683, 1366]);
        assert_eq!(blocks.iter().map(|b| 64 * b.voxels()).sum::<usize>(), elements);
        assert_eq!(64 * blocks[0].voxels(), 64 * 683 * 2048 * 2048);
        let long = GridRank { grid: Grid([1, 2, 1, 1]), rank: 1 }.block([1 << 40, 1, 1]);
        assert_eq!((long.start, long.extent), ([1 << 39, 0, 0], [1 << 39, 1, 1]));
    }

    #[test]
    fn thin_axes_are_not_split() {
        let grid = Grid([1, 4, 2, 1]);
        let rank = |coords| GridRank { grid, rank: grid.rank(coords) };
        assert_eq!(rank([0, 3, 1, 0]).block([2, 5, 3]), IndexBox { start: [0, 3, 0], extent: [2, 2, 3] });
        assert!(!rank([0, 3, 1, 0]).is_first_with([2, 5, 3]) && rank([0, 0, 1, 0]).is_first_with([2, 5, 3]));
        let groups = |size| (0..4).map(|rank| GridRank { grid: Grid([4, 1, 1, 1]), rank }.samples(size)).collect::<Vec<_>>();
        assert_eq!(groups(3), vec![0..3; 4]);
        assert_eq!(groups(6), [0..2, 2..4, 4..5, 5..6]);
        assert_eq!(groups(0), vec![0..0; 4]);
    }
}
