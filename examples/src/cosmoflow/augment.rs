//! Views of a box that leave its parameters the same, exact on any grid: a rank reads the voxels that its block of
//! the transformed box consists of.

use burn_spatial_io::IndexBox;

/// What is done to boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Symmetry {
    /// Nothing.
    None,
    /// The symmetries of a cube: axes exchanged and mirrored.
    Mirror,
    /// These, and periodic shifts.
    Periodic,
}

impl Symmetry {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        ["none", "mirror", "periodic"][self as usize]
    }
}

/// One view: voxel `i` along axis `a` of the view is voxel `(mirror[a] ? extent - 1 - i : i) + shift[a]`, modulo the
/// extent, along axis `axes[a]` of the box, which is a cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    axes: [usize; 3],
    mirror: [bool; 3],
    shift: [usize; 3],
}

/// A box of the view that is a box of the stored volume: where it starts in this rank's block, and what to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Offset in the block.
    pub at: [usize; 3],
    /// What to read, along the axes of the file.
    pub bounds: IndexBox,
}

impl View {
    /// The box as stored.
    pub const STORED: View = View { axes: [0, 1, 2], mirror: [false; 3], shift: [0; 3] };

    /// The view of sample `id` in epoch `epoch`: depends on its arguments alone, so that all ranks agree.
    pub fn draw(symmetry: Symmetry, seed: u64, epoch: u64, id: usize, extent: usize) -> View {
        if symmetry == Symmetry::None {
            return View::STORED;
        }
        let mut state = mix(mix(mix(seed) ^ epoch) ^ id as u64);
        let mut below = |n: usize| {
            state = mix(state);
            ((u128::from(state) * n as u128) >> 64) as usize
        };
        let axes = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]][below(6)];
        let mirror = [(); 3].map(|()| below(2) == 1);
        let shift = [(); 3].map(|()| if symmetry == Symmetry::Periodic { below(extent) } else { 0 });
        View { axes, mirror, shift }
    }

    /// What to read for the block `block` of the view of a cube of `extent` voxels along each edge.
    pub fn parts(&self, block: IndexBox, extent: usize) -> Vec<Part> {
        let mut parts = vec![Part { at: [0; 3], bounds: IndexBox { start: [0; 3], extent: [0; 3] } }];
        for axis in 0..3 {
            let pieces = self.pieces(axis, block.start[axis], block.extent[axis], extent);
            parts = parts
                .iter()
                .flat_map(|part| {
                    pieces.iter().map(|(at, start, length)| {
                        let mut part = *part;
                        part.at[axis] = *at;
                        part.bounds.start[self.axes[axis]] = *start;
                        part.bounds.extent[self.axes[axis]] = *length;
                        part
                    })
                })
                .collect();
        }
        parts
    }

    /// Along one axis: offsets in the block, first voxel read and length; two pieces where a shift wraps.
    fn pieces(&self, axis: usize, start: usize, length: usize, extent: usize) -> Vec<(usize, usize, usize)> {
        let first = if self.mirror[axis] { extent - start - length } else { start };
        let first = (first + self.shift[axis]) % extent;
        let before = length.min(extent - first);
        let mut pieces = vec![(0, first, before)];
        if before < length {
            pieces.push((before, 0, length - before));
        }
        if self.mirror[axis] {
            // What is read first comes last.
            pieces.iter_mut().for_each(|(at, _, n)| *at = length - *at - *n);
        }
        pieces
    }

    /// Puts `read`, the voxels of `part` as `[channels, ...]` along the axes of the file, into `block`, which is
    /// `[channels, extent..]`.
    pub fn put(&self, part: &Part, read: &[f32], block: &mut [f32], extent: [usize; 3]) {
        let stored = part.bounds.extent;
        let strides = [stored[1] * stored[2], stored[2], 1];
        let own = self.axes.map(|axis| stored[axis]);
        let channels = read.len() / part.bounds.voxels().max(1);
        for c in 0..channels {
            let read = &read[c * part.bounds.voxels()..];
            for d in 0..own[0] {
                for h in 0..own[1] {
                    let to = ((c * extent[0] + part.at[0] + d) * extent[1] + part.at[1] + h) * extent[2] + part.at[2];
                    let source = |axis: usize, i: usize| {
                        let i = if self.mirror[axis] { own[axis] - 1 - i } else { i };
                        i * strides[self.axes[axis]]
                    };
                    let from = source(0, d) + source(1, h);
                    for (w, voxel) in block[to..to + own[2]].iter_mut().enumerate() {
                        *voxel = read[from + source(2, w)];
                    }
                }
            }
        }
    }
}

/// The finaliser of splitmix64.
fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_spatial::Grid;
    use burn_spatial_io::GridRank;

    const EXTENT: usize = 5;

    /// Channel 0 holds the flat index, channel 1 its negative.
    fn stored(bounds: IndexBox) -> Vec<f32> {
        let mut read = Vec::new();
        for sign in [1.0, -1.0] {
            for d in 0..bounds.extent[0] {
                for h in 0..bounds.extent[1] {
                    for w in 0..bounds.extent[2] {
                        let [d, h, w] = [bounds.start[0] + d, bounds.start[1] + h, bounds.start[2] + w];
                        read.push(sign * ((d * EXTENT + h) * EXTENT + w) as f32);
                    }
                }
            }
        }
        read
    }

    fn block(view: View, bounds: IndexBox) -> Vec<f32> {
        let mut block = vec![f32::NAN; 2 * bounds.voxels()];
        for part in view.parts(bounds, EXTENT) {
            view.put(&part, &stored(part.bounds), &mut block, bounds.extent);
        }
        block
    }

    #[test]
    fn blocks_are_parts_of_one_view() {
        for id in 0..40 {
            let view = View::draw(Symmetry::Periodic, 3, 1, id, EXTENT);
            let whole = block(view, IndexBox { start: [0; 3], extent: [EXTENT; 3] });
            for (i, value) in whole[..125].iter().enumerate() {
                let place = [i / 25, i / 5 % 5, i % 5];
                let mut from = [0; 3];
                for axis in 0..3 {
                    let p = if view.mirror[axis] { EXTENT - 1 - place[axis] } else { place[axis] };
                    from[view.axes[axis]] = (p + view.shift[axis]) % EXTENT;
                }
                assert_eq!(*value, ((from[0] * 5 + from[1]) * 5 + from[2]) as f32, "{view:?}");
            }
            let grid = Grid([1, 2, 2, 2]);
            let rank = |[d, h, w]: [usize; 3]| GridRank { grid, rank: grid.rank([0, d, h, w]) };
            for coords in [[0, 0, 0], [1, 0, 1], [1, 1, 0], [0, 1, 1]] {
                let bounds = rank(coords).block([EXTENT; 3]);
                let part = block(view, bounds);
                let [n0, n1, n2] = bounds.extent;
                for (i, value) in part.iter().enumerate() {
                    let (c, d, h, w) = (i / (n0 * n1 * n2), i / (n1 * n2) % n0, i / n2 % n1, i % n2);
                    let at = ((c * 5 + bounds.start[0] + d) * 5 + bounds.start[1] + h) * 5 + bounds.start[2] + w;
                    assert_eq!(*value, whole[at]);
                }
            }
        }
    }

    #[test]
    fn views_change_with_every_argument() {
        let draw = |seed, epoch, id| View::draw(Symmetry::Periodic, seed, epoch, id, 32);
        assert_eq!(draw(1, 2, 3), draw(1, 2, 3));
        for other in [draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(1, 3, 2)] {
            assert_ne!(other, draw(1, 2, 3));
        }
        let mirrors: std::collections::HashSet<_> =
            (0..2000).map(|id| View::draw(Symmetry::Mirror, 1, 0, id, 32)).map(|v| (v.axes, v.mirror, v.shift)).collect();
        assert_eq!(mirrors.len(), 48, "all symmetries of the cube, and no shift");
        assert_eq!(View::draw(Symmetry::None, 1, 0, 5, 32), View::STORED);
    }
}
