//! Who sends which box to whom: one plan serves halos, their reverse, and every change of split.

use crate::layout::{Axis, AxisNeed};
use crate::mesh::{AxisSet, Mesh};

/// A box: start and length along each axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// First index along each axis.
    pub start: Vec<usize>,
    /// Length along each axis.
    pub length: Vec<usize>,
}

impl Region {
    /// Elements in the box.
    pub fn elements(&self) -> usize {
        self.length.iter().product()
    }

    /// What lies in both boxes, counted from the start of `other` and from that of this one.
    pub fn common(&self, other: &Region) -> Option<(Region, Region)> {
        let mut there = Region { start: Vec::new(), length: Vec::new() };
        let mut here = there.clone();
        for i in 0..self.start.len() {
            let start = self.start[i].max(other.start[i]);
            let end = (self.start[i] + self.length[i]).min(other.start[i] + other.length[i]);
            if start >= end {
                return None;
            }
            there.start.push(start - other.start[i]);
            here.start.push(start - self.start[i]);
            there.length.push(end - start);
            here.length.push(end - start);
        }
        Some((there, here))
    }
}

/// The boxes one peer gets, or gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The peer's rank in the plan's group.
    pub peer: usize,
    /// Boxes in the sender's block or in the receiver's, in the order in which they are packed.
    pub regions: Vec<Region>,
}

impl Message {
    /// Elements in all boxes.
    pub fn elements(&self) -> usize {
        self.regions.iter().map(Region::elements).sum()
    }
}

/// What this rank sends, receives and copies to turn its own block into the block it needs.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The mesh axes along which peers lie.
    pub group: AxisSet,
    /// Shape of this rank's own block.
    pub own: Vec<usize>,
    /// Shape of the block it needs.
    pub block: Vec<usize>,
    /// Boxes of the own block that peers need.
    pub sends: Vec<Message>,
    /// Boxes of the needed block that peers have.
    pub receives: Vec<Message>,
    /// Boxes this rank has itself: in the own block and in the needed one.
    pub keeps: Vec<(Region, Region)>,
}

impl Plan {
    /// From how the axes of a tensor are stored (none uniform) to what every rank needs of them.
    pub fn new(mesh: &Mesh, axes: &[Axis], needs: &[AxisNeed]) -> Plan {
        let sources: AxisSet = axes.iter().filter_map(|a| a.as_split().map(|s| s.0)).collect();
        let group = mesh.effective(needs.iter().filter_map(|n| n.mesh).fold(sources, AxisSet::with));
        let me = mesh.coords();
        let mut plan = Plan {
            group,
            own: axes.iter().map(|a| a.local(me)).collect(),
            block: needs.iter().map(|n| n.extent(me)).collect(),
            sends: Vec::new(),
            receives: Vec::new(),
            keeps: Vec::new(),
        };
        for coords in peers(mesh, group, me) {
            // Where several ranks hold the same part, its source is the one with the receiver's coordinates.
            let replica = group.iter().all(|a| sources.contains(a) || coords[a.index()] == me[a.index()]);
            if !replica {
                continue;
            }
            let outgoing = overlaps(axes, needs, me, coords);
            if coords == me {
                plan.keeps = outgoing;
                continue;
            }
            let peer = mesh.group_rank(group, coords);
            let incoming = overlaps(axes, needs, coords, me);
            if !outgoing.is_empty() {
                plan.sends.push(Message { peer, regions: outgoing.into_iter().map(|(own, _)| own).collect() });
            }
            if !incoming.is_empty() {
                plan.receives.push(Message { peer, regions: incoming.into_iter().map(|(_, block)| block).collect() });
            }
        }
        plan
    }

    /// All of the needed block.
    pub fn needed(&self) -> Region {
        Region { start: vec![0; self.block.len()], length: self.block.clone() }
    }

    /// Whether the own block is the needed one.
    pub fn is_identity(&self) -> bool {
        self.sends.is_empty()
            && self.receives.is_empty()
            && self.own == self.block
            && matches!(&self.keeps[..], [(own, block)] if own == block && own.length == self.own)
    }
}

/// Coordinates of all ranks that differ from `me` along `group` only, in group order.
fn peers(mesh: &Mesh, group: AxisSet, me: [usize; 4]) -> Vec<[usize; 4]> {
    group.iter().fold(vec![me], |all, axis| {
        let each = |coords: [usize; 4]| {
            (0..mesh.size(axis)).map(move |c| {
                let mut coords = coords;
                coords[axis.index()] = c;
                coords
            })
        };
        all.into_iter().flat_map(each).collect()
    })
}

/// The boxes that `from` has and `to` needs: in `from`'s own block, and in the block of `to`.
fn overlaps(axes: &[Axis], needs: &[AxisNeed], from: [usize; 4], to: [usize; 4]) -> Vec<(Region, Region)> {
    let mut boxes = vec![(Region { start: vec![], length: vec![] }, Region { start: vec![], length: vec![] })];
    for (axis, need) in axes.iter().zip(needs) {
        let (start, end) = axis.owned(from);
        let parts: Vec<(usize, usize, usize)> = need
            .pieces(to)
            .iter()
            .filter_map(|piece| {
                let (low, high) = (piece.start.max(start), piece.end.min(end));
                (low < high).then(|| (low - start, piece.at + low - piece.start, high - low))
            })
            .collect();
        boxes = boxes
            .into_iter()
            .flat_map(|(own, block)| {
                parts.iter().map(move |(in_own, in_block, length)| {
                    let extend = |region: &Region, at: usize| Region {
                        start: region.start.iter().copied().chain([at]).collect(),
                        length: region.length.iter().copied().chain([*length]).collect(),
                    };
                    (extend(&own, *in_own), extend(&block, *in_block))
                })
            })
            .collect();
    }
    boxes
}
