//! Matrix products.

use burn_backend::TensorMetadata;

use crate::kernels::LocalKernels;
use crate::kind::Kind;
use crate::layout::{Axis, Layout, Storage, refine, unify};
use crate::mesh::AxisSet;
use crate::tensor::SpatialTensor;

/// What the operands of `[.., m, k] x [.., k, n]` must be, and the result with its pending sums.
///
/// Rows of the left and columns of the right matrix keep their layout, batch dimensions unify. Where both sides split
/// the contracted dimension alike, every rank multiplies its share and the sum stays pending; where only one does, it
/// is made whole.
pub(crate) fn rule(lhs: &Layout, rhs: &Layout) -> (Layout, Layout, Layout) {
    let rank = lhs.rank();
    let (row, column) = (rank - 2, rank - 1);
    let inner = match refine(lhs.dim(column), rhs.dim(row)) {
        Some((a, b)) if a.iter().zip(&b).all(|(a, b)| a.as_split() == b.as_split()) => {
            let merge = |(a, b): (Axis, Axis)| if a.storage == Storage::Uniform { b } else { a };
            let axes: Vec<Axis> = a.into_iter().zip(b).map(merge).collect();
            // Of two constants one is stored, for the local product counts elements.
            axes.into_iter().map(|a| if a.storage == Storage::Uniform { Axis::full(a.extent) } else { a }).collect()
        }
        _ => vec![Axis::full(lhs.extent(column))],
    };
    let inner = Layout::new(vec![inner]).dim(0).to_vec();
    let contracted: AxisSet = inner.iter().filter_map(|a| a.as_split().map(|s| s.0)).collect();
    // Batch dimensions, then rows, then columns: a mesh axis splits one of them at most, and not the contracted one.
    let mut used = contracted;
    let mut claim = |axes: &[Axis]| -> Vec<Axis> {
        axes.iter()
            .map(|a| match a.as_split() {
                Some((mesh, _)) if used.contains(mesh) => Axis::full(a.extent),
                Some((mesh, _)) => {
                    used = used.with(mesh);
                    a.clone()
                }
                None => Axis::full(a.extent),
            })
            .collect()
    };
    let batch = |l: &Layout| Layout::new(l.dims()[..rank - 2].to_vec());
    let (_, merged) = unify(&[&batch(lhs), &batch(rhs)]);
    let mut out: Vec<Vec<Axis>> = merged.dims().iter().map(|axes| claim(axes)).collect();
    let rows = claim(lhs.dim(row));
    let columns = claim(rhs.dim(column));
    let operand = |l: &Layout, first: Vec<Axis>, second: Vec<Axis>| {
        let batch = (0..rank - 2).map(|d| if l.extent(d) == 1 { vec![] } else { out[d].clone() });
        Layout::new(batch.chain([first, second]).collect())
    };
    let (left, right) = (operand(lhs, rows.clone(), inner.clone()), operand(rhs, inner, columns.clone()));
    out.extend([rows, columns]);
    (left, right, Layout::new(out).with_pending(contracted))
}

/// A matrix product, with `f` for the local one.
pub(crate) fn matmul<B: LocalKernels, K: Kind<B>>(
    lhs: SpatialTensor<B, K>,
    rhs: SpatialTensor<B, K>,
    f: impl FnOnce(K::Primitive, K::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = lhs.device().clone();
    let (left, right, out) = rule(lhs.layout(), rhs.layout());
    let lhs = lhs.into_layout(&left).settle().0;
    let rhs = rhs.into_layout(&right).settle().0;
    let product = f(lhs, rhs);
    let dtype = product.dtype();
    SpatialTensor::share(product, out, dtype, device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::MeshAxis;

    fn split(mesh: MeshAxis, extent: usize) -> Axis {
        Axis::split(mesh, vec![0, extent / 2, extent])
    }

    #[test]
    fn a_split_batch_stays_and_its_weight_gradient_is_pending() {
        let x = Layout::new(vec![vec![split(MeshAxis::Data, 8)], vec![Axis::full(5)]]);
        let w = Layout::full(&[5, 3]);
        let (left, right, out) = rule(&x, &w);
        assert_eq!((left, right), (x.clone(), w));
        assert_eq!(out.to_string(), "[8n(4|4), 3]");
        let gradient = rule(&x.permute(&[1, 0]), &out).2;
        assert_eq!(gradient.to_string(), "[5, 3]+n");
    }

    #[test]
    fn one_sided_splits_of_the_contracted_dimension_are_made_whole() {
        let x = Layout::new(vec![vec![Axis::full(4)], vec![Axis::full(16), split(MeshAxis::Depth, 2)]]);
        let (left, _, out) = rule(&x, &Layout::full(&[32, 7]));
        assert_eq!(left, Layout::full(&[4, 32]));
        assert_eq!(out, Layout::full(&[4, 7]));
    }

    #[test]
    fn constants_are_stored() {
        let (left, right, out) = rule(&Layout::uniform(&[4, 3]), &Layout::uniform(&[3, 5]));
        assert_eq!((left, right, out), (Layout::full(&[4, 3]), Layout::full(&[3, 5]), Layout::full(&[4, 5])));
    }
}
