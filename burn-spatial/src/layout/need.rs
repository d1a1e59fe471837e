//! What ranks need of an axis: their shards under another layout, or what their windows read.

use super::Axis;
use crate::mesh::MeshAxis;

/// A part of an axis and where it goes in the assembled block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// First global index.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// Position of `start` in the block.
    pub at: usize,
}

/// What each coordinate of a mesh axis needs of one axis of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AxisNeed {
    /// The mesh axis whose coordinate decides; `None` where all ranks need the same.
    pub mesh: Option<MeshAxis>,
    /// The pieces, by coordinate (one entry when `mesh` is `None`), in block order.
    pub by_coord: Vec<Vec<Piece>>,
}

impl AxisNeed {
    /// All of an axis.
    pub fn whole(extent: usize) -> AxisNeed {
        AxisNeed { mesh: None, by_coord: vec![vec![Piece { start: 0, end: extent, at: 0 }]] }
    }

    /// What the axis's own storage holds.
    pub fn of(axis: &Axis) -> AxisNeed {
        match axis.as_split() {
            None => AxisNeed::whole(axis.extent),
            Some((mesh, offsets)) => {
                AxisNeed { mesh: Some(mesh), by_coord: offsets.windows(2).map(|o| vec![Piece { start: o[0], end: o[1], at: 0 }]).collect() }
            }
        }
    }

    /// The pieces the rank at `coords` needs.
    pub(crate) fn pieces(&self, coords: [usize; 4]) -> &[Piece] {
        &self.by_coord[self.mesh.map_or(0, |m| coords[m.index()])]
    }

    /// Extent of the block of the rank at `coords`.
    pub(crate) fn extent(&self, coords: [usize; 4]) -> usize {
        self.pieces(coords).iter().map(|p| p.end - p.start).sum()
    }
}
