//! The rule of pointwise operations: one layout for all operands.

use super::{Axis, Layout, Storage, refine};
use crate::mesh::AxisSet;

/// The layout each operand of a broadcasting pointwise operation must have, and the layout of its result.
///
/// Split wins over full (each rank takes its own block), full over uniform; of two different splits of one axis the
/// first operand's stays. A mesh axis splits at most one axis of the result. Extent 1 broadcasts, as does a dimension
/// that is uniform as a whole. Pending sums must have been resolved.
pub fn unify(operands: &[&Layout]) -> (Vec<Layout>, Layout) {
    let rank = operands.iter().map(|l| l.rank()).max().unwrap_or(0);
    debug_assert!(operands.iter().all(|l| l.rank() == rank), "operands have one rank");
    // Which dimension each mesh axis splits: the first operand that splits over it decides.
    let mut claims = [None; 4];
    for layout in operands {
        for dim in 0..rank {
            for (mesh, _) in layout.dim(dim).iter().filter_map(Axis::as_split) {
                claims[mesh.index()].get_or_insert(dim);
            }
        }
    }
    let mut used = AxisSet::EMPTY;
    let mut out = Vec::with_capacity(rank);
    for dim in 0..rank {
        let extent = operands.iter().map(|l| l.extent(dim)).find(|e| *e != 1).unwrap_or(1);
        let candidates = operands.iter().map(|l| l.dim(dim)).filter(|axes| super::extent(axes) == extent);
        let mut merged = merge(candidates, extent);
        for axis in &mut merged {
            if let Some((mesh, _)) = axis.as_split() {
                if used.contains(mesh) || claims[mesh.index()] != Some(dim) {
                    axis.storage = Storage::Full;
                } else {
                    used = used.with(mesh);
                }
            }
        }
        out.push(merged);
    }
    let wanted = operands
        .iter()
        .map(|layout| {
            let dims = (0..rank).map(|dim| if layout.is_uniform_dim(dim) { layout.dim(dim).to_vec() } else { out[dim].clone() });
            Layout::new(dims.collect())
        })
        .collect();
    (wanted, Layout::new(out))
}

/// Merges the factorisations of one dimension.
fn merge<'a>(candidates: impl Iterator<Item = &'a [Axis]>, extent: usize) -> Vec<Axis> {
    let uniform = |axes: &[Axis]| axes.iter().all(|a| a.storage == Storage::Uniform);
    candidates
        .map(|axes| axes.to_vec())
        .reduce(|a, b| match refine(&a, &b) {
            Some((a, b)) => a.into_iter().zip(b).map(|(a, b)| stronger(a, b)).collect(),
            // No common cut: a uniform dimension gives way, else the dimension is full.
            None if uniform(&b) => a,
            None if uniform(&a) => b,
            None => vec![Axis::full(extent)],
        })
        .unwrap_or_default()
}

fn stronger(a: Axis, b: Axis) -> Axis {
    match (&a.storage, &b.storage) {
        (Storage::Split { .. }, _) => a,
        (_, Storage::Split { .. }) => b,
        (Storage::Full, _) => a,
        _ => b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Grid, MeshAxis};

    #[test]
    fn split_wins_and_uniform_adapts() {
        let x = Layout::volume(&[2, 3, 8, 8, 8], Grid([1, 2, 1, 1]));
        let scale = Layout::full(&[1, 3, 1, 1, 1]);
        let ones = Layout::uniform(&[2, 3, 8, 8, 8]);
        let (wanted, out) = unify(&[&ones, &x, &scale]);
        assert_eq!(out, x);
        assert_eq!(wanted, [ones, x.clone(), scale]);
        let (wanted, out) = unify(&[&Layout::full(&[2, 3, 8, 8, 8]), &x]);
        assert_eq!(out, x);
        assert_eq!(wanted, [x.clone(), x]);
    }

    #[test]
    fn a_mesh_axis_splits_once() {
        let a = Layout::full(&[8, 8]).with_dim(0, vec![Axis::split(MeshAxis::Depth, vec![0, 4, 8])]);
        let b = Layout::full(&[8, 8]).with_dim(1, vec![Axis::split(MeshAxis::Depth, vec![0, 4, 8])]);
        let (wanted, out) = unify(&[&a, &b]);
        assert_eq!(out, a);
        assert_eq!(wanted, [a.clone(), a.clone()]);
        assert_eq!(unify(&[&b, &a]).1, b);
    }

    #[test]
    fn a_partly_uniform_dimension_is_stored() {
        let tiled = Layout::new(vec![vec![Axis::uniform(3), Axis::full(4)]]);
        let (wanted, out) = unify(&[&tiled, &Layout::full(&[12])]);
        assert_eq!(out, Layout::full(&[12]));
        assert_eq!(wanted[0], Layout::full(&[12]));
    }
}
