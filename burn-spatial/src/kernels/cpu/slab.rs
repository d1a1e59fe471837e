//! Volumes in boxes: inputs that several boxes make up, and outputs that are written box by box.

use std::ops::Range;

use super::product;
use super::simd::Real;

/// A box of x: `[samples, channels, box..]`. Several make up a block.
pub(crate) struct Slab<'a, T> {
    /// The planes, rows and columns of the block.
    pub(crate) at: [Range<usize>; 3],
    pub(crate) values: &'a [T],
}

impl<'a, T> Slab<'a, T> {
    /// A block of `extents` in one box.
    pub(crate) fn whole(extents: [usize; 3], values: &'a [T]) -> Slab<'a, T> {
        Slab { at: extents.map(|extent| 0..extent), values }
    }

    /// Its part of a row of channel `channel`, counted over all samples, if it has any.
    #[inline(always)]
    fn row(&self, channel: usize, d: usize, h: usize) -> Option<&'a [T]> {
        let [planes, rows, columns] = &self.at;
        if !planes.contains(&d) || !rows.contains(&h) {
            return None;
        }
        let plane = channel * planes.len() + d - planes.start;
        let from = (plane * rows.len() + h - rows.start) * columns.len();
        Some(&self.values[from..from + columns.len()])
    }
}

/// A row of `width` elements of x, of channel `channel` counted over all samples: as it lies, or joined in `line` where
/// several boxes have parts of it.
#[inline(always)]
pub(super) fn row<'a, T: Real>(x: &[Slab<'a, T>], channel: usize, d: usize, h: usize, width: usize, line: &'a mut Vec<T>) -> &'a [T] {
    let mut found = 0;
    for slab in x {
        let Some(part) = slab.row(channel, d, h) else { continue };
        if part.len() == width {
            return part;
        }
        line.resize(width, T::default());
        line[slab.at[2].clone()].copy_from_slice(part);
        found += part.len();
    }
    assert_eq!(found, width, "boxes make up x");
    line
}

/// Where a box of outputs lies in volumes that are written part by part.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// Extents of the volumes.
    pub(crate) extents: [usize; 3],
    /// Of the box's first voxel.
    pub(crate) at: [usize; 3],
}

impl Place {
    /// Of all of a volume.
    pub(crate) fn whole(extents: [usize; 3]) -> Place {
        Place { extents, at: [0; 3] }
    }

    /// Whether a box of `outputs` lies in the volumes, of which `values` there are.
    pub(super) fn fits(&self, outputs: [usize; 3], values: usize) -> bool {
        let inside = (0..3).all(|i| self.at[i].checked_add(outputs[i]).is_some_and(|end| end <= self.extents[i]));
        inside && values.is_multiple_of(product(self.extents).max(1))
    }

    /// Values of a plane of the volumes.
    pub(super) fn plane(&self) -> usize {
        self.extents[1] * self.extents[2]
    }

    /// The channel, and the plane of a box of `planes`, that plane `i` of all volumes is.
    pub(super) fn of(&self, i: usize, planes: usize) -> Option<(usize, usize)> {
        let d = (i % self.extents[0]).checked_sub(self.at[0]).filter(|d| *d < planes)?;
        Some((i / self.extents[0], d))
    }

    /// Where voxel `(h, w)` of one of the box's planes lies in a plane of the volumes.
    #[inline(always)]
    pub(super) fn in_plane(&self, h: usize, w: usize) -> usize {
        (self.at[1] + h) * self.extents[2] + self.at[2] + w
    }

    /// Where voxel `(d, h, w)` of the box lies in the volume of channel `channel`, counted over all samples.
    #[inline(always)]
    pub(super) fn voxel(&self, channel: usize, [d, h, w]: [usize; 3]) -> usize {
        (channel * self.extents[0] + self.at[0] + d) * self.plane() + self.in_plane(h, w)
    }
}
