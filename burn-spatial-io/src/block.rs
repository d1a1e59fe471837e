//! Which part of a volume a rank holds.

use burn_spatial::layout::balanced_offsets;
use burn_spatial::mesh::{Mesh, MeshAxis};

use crate::volume::Hyperslab;

/// A rank's place in the grid of depth, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSpec {
    /// Ranks along depth, height and width, each at least 1.
    pub ranks: [usize; 3],
    /// This rank's coordinates.
    pub coords: [usize; 3],
}

impl BlockSpec {
    /// One rank that holds everything.
    pub const WHOLE: BlockSpec = BlockSpec { ranks: [1; 3], coords: [0; 3] };

    /// The place of this rank in `mesh`.
    pub fn of(mesh: &Mesh) -> BlockSpec {
        BlockSpec { ranks: MeshAxis::SPATIAL.map(|axis| mesh.size(axis)), coords: MeshAxis::SPATIAL.map(|axis| mesh.coord(axis)) }
    }

    /// Which of depth, height and width are split in a volume of `extent`: those with more than one rank and at
    /// least as many voxels as ranks. Along any other axis every rank holds all of it.
    pub fn splits(&self, extent: [usize; 3]) -> [bool; 3] {
        std::array::from_fn(|axis| self.ranks[axis] > 1 && extent[axis] >= self.ranks[axis])
    }

    /// The block of this rank in a volume of `extent` voxels along depth, height and width. Along a split axis the
    /// blocks are near-equal: the first `extent % ranks` have one voxel more.
    pub fn slab(&self, extent: [usize; 3]) -> Hyperslab {
        let splits = self.splits(extent);
        let mut slab = Hyperslab { start: [0; 3], extent };
        for axis in 0..3 {
            if splits[axis] {
                let offsets = balanced_offsets(extent[axis], self.ranks[axis]);
                let coord = self.coords[axis];
                slab.start[axis] = offsets[coord];
                slab.extent[axis] = offsets[coord + 1] - offsets[coord];
            }
        }
        slab
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_cover_every_plane() {
        assert_eq!(balanced_offsets(10, 4), [0, 3, 6, 8, 10]);
        assert_eq!(balanced_offsets(8, 2), [0, 4, 8]);
        assert_eq!(balanced_offsets(2, 4), [0, 1, 2, 2, 2]);
    }

    #[test]
    fn offsets_above_2_pow_32() {
        // 64 channels of 2048^3 hold 2^39 elements; every boundary is a whole number of slowest-axis planes.
        let elements = 64 * 2048usize.pow(3);
        let offsets = balanced_offsets(elements, 3);
        assert_eq!(offsets, [0, 183_251_937_963, 366_503_875_926, 549_755_813_888]);
        let spec = |coord| BlockSpec { ranks: [3, 1, 1], coords: [coord, 0, 0] };
        let slabs: Vec<_> = (0..3).map(|coord| spec(coord).slab([2048; 3])).collect();
        assert_eq!(slabs.iter().map(|s| s.start[0]).collect::<Vec<_>>(), [0, 683, 1366]);
        assert_eq!(slabs.iter().map(|s| 64 * s.voxels()).sum::<usize>(), elements);
        assert_eq!(64 * slabs[0].voxels(), 64 * 683 * 2048 * 2048);
    }

    #[test]
    fn thin_axes_are_not_split() {
        let spec = BlockSpec { ranks: [4, 2, 1], coords: [3, 1, 0] };
        assert_eq!(spec.splits([2, 5, 3]), [false, true, false]);
        assert_eq!(spec.slab([2, 5, 3]), Hyperslab { start: [0, 3, 0], extent: [2, 2, 3] });
    }
}
