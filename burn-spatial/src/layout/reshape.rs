//! Reshapes and common factorisations of layouts.

use super::{Axis, Layout, Storage, extent, normalize};

/// A reshape (or a comparison) that would cut an axis where it cannot be cut: this axis, counted over
/// [`Layout::axes`], has to be made full first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// Position in [`Layout::axes`].
    pub axis: usize,
}

/// Cuts `axis` into an outer factor of extent `outer` and the rest, where its storage allows.
pub(crate) fn cut(axis: &Axis, outer: usize) -> Option<(Axis, Axis)> {
    let inner = axis.extent / outer;
    match &axis.storage {
        Storage::Full => Some((Axis::full(outer), Axis::full(inner))),
        Storage::Uniform => Some((Axis::uniform(outer), Axis::uniform(inner))),
        // Shards of whole inner runs split the outer factor.
        Storage::Split { mesh, offsets } => offsets
            .iter()
            .all(|o| o % inner == 0)
            .then(|| (Axis::split(*mesh, offsets.iter().map(|o| o / inner).collect::<Vec<_>>()), Axis::full(inner))),
    }
}

impl Layout {
    /// The layout of the tensor reshaped to `shape`: axes are merged, or cut at axis boundaries, and no element moves. What
    /// blocks it is never a full axis, so that making blocked axes full comes to an end.
    pub fn reshape(&self, shape: &[usize]) -> Result<Layout, Blocked> {
        if shape.contains(&0) {
            return Ok(Layout::full(shape));
        }
        // (axis, its position in self.axes()), from the last to the first.
        let mut rest: Vec<(Axis, usize)> = Vec::new();
        for (i, axis) in self.axes().enumerate().collect::<Vec<_>>().into_iter().rev() {
            put_before(&mut rest, axis.clone(), i);
        }
        let mut dims = Vec::with_capacity(shape.len());
        for n in shape {
            let mut missing = *n;
            let mut axes = Vec::new();
            while missing > 1 {
                let (axis, position) = rest.pop().expect("a reshape keeps the number of elements");
                if missing % axis.extent == 0 {
                    missing /= axis.extent;
                    axes.push(axis);
                } else if axis.extent % missing == 0 {
                    let (outer, inner) = cut(&axis, missing).ok_or(Blocked { axis: position })?;
                    axes.push(outer);
                    // What a split axis leaves is full, and may lie before another full one.
                    put_before(&mut rest, inner, position);
                    missing = 1;
                } else if axis.storage != Storage::Full {
                    return Err(Blocked { axis: position });
                } else {
                    // A full axis that fits only together with its neighbour, which is of another kind.
                    let (_, next) = rest.last().expect("a reshape keeps the number of elements");
                    return Err(Blocked { axis: *next });
                }
            }
            dims.push(normalize(axes));
        }
        Ok(Layout { dims, pending: self.pending })
    }
}

/// Puts `axis` before those of `rest`, which are in reverse order; neighbours of one kind are one axis.
fn put_before(rest: &mut Vec<(Axis, usize)>, axis: Axis, position: usize) {
    match rest.last_mut() {
        Some((next, at)) if next.storage == axis.storage && axis.as_split().is_none() => {
            next.extent *= axis.extent;
            *at = position;
        }
        _ => rest.push((axis, position)),
    }
}

/// Cuts two factorisations of one dimension at each other's boundaries, so that both have the same extents.
/// `None` where an axis would be cut that cannot be.
pub(crate) fn refine(a: &[Axis], b: &[Axis]) -> Option<(Vec<Axis>, Vec<Axis>)> {
    debug_assert_eq!(extent(a), extent(b));
    if a.iter().map(|x| x.extent).eq(b.iter().map(|x| x.extent)) {
        return Some((a.to_vec(), b.to_vec()));
    }
    let (mut a, mut b): (Vec<Axis>, Vec<Axis>) = (a.iter().rev().cloned().collect(), b.iter().rev().cloned().collect());
    let (mut left, mut right) = (Vec::new(), Vec::new());
    while let (Some(x), Some(y)) = (a.pop(), b.pop()) {
        let smaller = x.extent.min(y.extent);
        if smaller == 0 || x.extent % smaller != 0 || y.extent % smaller != 0 {
            return None;
        }
        let take = |axis: Axis, rest: &mut Vec<Axis>, out: &mut Vec<Axis>| {
            if axis.extent == smaller {
                out.push(axis);
            } else {
                let (outer, inner) = cut(&axis, smaller)?;
                out.push(outer);
                rest.push(inner);
            }
            Some(())
        };
        take(x, &mut a, &mut left)?;
        take(y, &mut b, &mut right)?;
    }
    Some((left, right))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Grid, MeshAxis};

    fn volume() -> Layout {
        Layout::volume(&[2, 16, 8, 6, 4], Grid([2, 2, 3, 1]))
    }

    #[test]
    fn batch_norm_flattens_without_moving() {
        let swapped = volume().permute(&[1, 0, 2, 3, 4]);
        let flat = swapped.reshape(&[16, 2 * 8 * 6 * 4]).unwrap();
        assert_eq!(flat.to_string(), "[16, 2n(1|1)*8d(4|4)*6h(2|2|2)*4]");
        assert_eq!(flat.reshape(&[16, 2, 8, 6, 4]).unwrap(), swapped);
    }

    #[test]
    fn group_norm_cuts_channels() {
        let groups = volume().reshape(&[2, 4, 4 * 8 * 6 * 4]).unwrap();
        assert_eq!(groups.to_string(), "[2n(1|1), 4, 4*8d(4|4)*6h(2|2|2)*4]");
    }

    #[test]
    fn a_cut_through_a_shard_is_blocked() {
        // 8 depth planes in shards of 4 can be cut into 2 x 4, not into 4 x 2 when a shard has 3.
        let line = Layout::new(vec![vec![Axis::split(MeshAxis::Depth, vec![0, 4, 8])]]);
        assert_eq!(line.reshape(&[2, 4]).unwrap().to_string(), "[2d(1|1), 4]");
        let uneven = Layout::new(vec![vec![Axis::split(MeshAxis::Depth, vec![0, 3, 8])]]);
        assert_eq!(uneven.reshape(&[2, 4]), Err(Blocked { axis: 0 }));
        let neighbour = Layout::new(vec![vec![Axis::full(4)], vec![Axis::split(MeshAxis::Depth, vec![0, 2, 3])]]);
        assert_eq!(neighbour.reshape(&[6, 2]), Err(Blocked { axis: 1 }));
    }

    #[test]
    fn refinement_cuts_at_both_boundaries() {
        let a = [Axis::full(8), Axis::split(MeshAxis::Width, vec![0, 1, 3])];
        let b = [Axis::uniform(4), Axis::full(6)];
        let (left, right) = refine(&a, &b).unwrap();
        let extents = |x: &[Axis]| x.iter().map(|a| a.extent).collect::<Vec<_>>();
        assert_eq!(extents(&left), [4, 2, 3]);
        assert_eq!(extents(&right), [4, 2, 3]);
        assert!(refine(&[Axis::split(MeshAxis::Width, vec![0, 1, 3, 6])], &[Axis::full(2), Axis::full(3)]).is_none());
    }
}
