//! Slices and indexing.

use burn_backend::TensorMetadata;
use burn_std::Slice;

use super::along::fetch;
use super::{ranges, split_over, unsplit, whole_dim};
use crate::comm::ReduceOp;
use crate::kernels::LocalKernels;
use crate::kind::{Int, Kind};
use crate::layout::{Axis, AxisNeed, Layout, Piece, Storage, balanced_offsets, unify};
use crate::tensor::{SpatialTensor, communicated};
use crate::transfer::collective::all_reduce;

pub(super) fn slice_of(start: usize, length: usize) -> Slice {
    Slice::new(start as isize, Some((start + length) as isize), 1)
}

/// A box, with steps. A split dimension stays split: shards keep what they have of it, or share it out anew where one
/// would be left with nothing. Backward steps along a split dimension make it whole.
pub(crate) fn slice<B: LocalKernels, K: Kind<B>>(
    mut tensor: SpatialTensor<B, K>,
    slices: &[Slice],
    op: &'static str,
) -> SpatialTensor<B, K> {
    let shape = tensor.shape();
    let wanted = ranges(slices, &shape);
    if wanted.iter().zip(shape.iter()).all(|((start, length, step), n)| *start == 0 && length == n && *step == 1) {
        return tensor;
    }
    for (dim, (start, length, step)) in wanted.iter().enumerate() {
        let whole = *start == 0 && *length == shape[dim] && *step == 1;
        let one_split = matches!(tensor.layout().dim(dim), [axis] if axis.as_split().is_some()) && *step > 0 && *length > 0;
        let uniform = tensor.layout().is_uniform_dim(dim) && *length > 0;
        if !whole && !one_split && !uniform {
            tensor = whole_dim(tensor, dim, op);
        }
    }
    let device = tensor.device().clone();
    let context = device.context();
    let coords = context.mesh.coords();
    let (mut local, mut layout) = tensor.settle();
    // Where shards run empty, parts move.
    let mut needs: Vec<Option<AxisNeed>> = vec![None; layout.rank()];
    let mut cuts: Vec<Slice> = Vec::with_capacity(layout.rank());
    let mut out = layout.clone();
    for (dim, (start, length, step)) in wanted.iter().enumerate() {
        let stored = layout.dim(dim).iter().map(|a| a.local(coords)).product::<usize>();
        let whole = *start == 0 && *length == shape[dim] && *step == 1;
        let axes = layout.dim(dim);
        if whole {
            cuts.push(slice_of(0, stored));
        } else if layout.is_uniform_dim(dim) && *length > 0 {
            cuts.push(slice_of(0, stored));
            out = out.with_dim(dim, vec![Axis::uniform(*length)]);
        } else if let Some((mesh, offsets)) = axes.first().and_then(|a| a.as_split()) {
            let step = *step as usize;
            // The first result whose element lies at or behind each boundary, and the elements of an interval of results.
            let kept: Vec<usize> = offsets.iter().map(|o| o.saturating_sub(*start).div_ceil(step).min(*length)).collect();
            let reach = |from: usize, to: usize| (start + from * step, start + (to - 1) * step + 1);
            let every = |(from, to): (usize, usize)| Slice::new(from as isize, Some(to as isize), step as isize);
            if kept.windows(2).all(|o| o[0] < o[1]) {
                let (low, _) = axes[0].owned(coords);
                let kept = Axis::split(mesh, kept);
                let (from, to) = kept.owned(coords);
                let (from, to) = reach(from, to);
                cuts.push(every((from - low, to - low)));
                out = out.with_dim(dim, vec![kept]);
                continue;
            }
            let ranks = offsets.len() - 1;
            let piece = |from: usize, to: usize| {
                let (start, end) = reach(from, to);
                vec![Piece { start, end, at: 0 }]
            };
            let (need, axis) = if *length >= ranks {
                let shared = balanced_offsets(*length, ranks);
                let by_coord = shared.windows(2).map(|o| piece(o[0], o[1])).collect();
                (AxisNeed { mesh: Some(mesh), by_coord }, Axis::split(mesh, shared))
            } else {
                (AxisNeed { mesh: None, by_coord: vec![piece(0, *length)] }, Axis::full(*length))
            };
            let (from, to) = axis.owned(coords);
            let (from, to) = reach(from, to);
            cuts.push(every((0, to - from)));
            out = out.with_dim(dim, vec![axis]);
            needs[dim] = Some(need);
        } else {
            let slice = slices[dim];
            cuts.push(slice);
            out = out.with_dim(dim, vec![Axis::full(*length)]);
        }
    }
    if needs.iter().any(Option::is_some) {
        local = fetch::<B, K>(&context, local, &layout, &needs, device.inner_device());
    }
    let target = out.local_shape(coords);
    let current = local.shape();
    let trivial = cuts.iter().zip(current.iter()).all(|(s, n)| s.step == 1 && s.to_range(*n) == (0..*n));
    if !trivial {
        local = K::slice(local, &cuts);
    }
    debug_assert_eq!(local.shape(), target);
    layout = out;
    SpatialTensor::new(local, layout, device)
}

/// `base` with a box replaced by `value`. Writing a split value into a constant, or into a whole tensor, takes the
/// layout of the value.
pub(crate) fn slice_assign<B: LocalKernels, K: Kind<B>>(
    mut base: SpatialTensor<B, K>,
    slices: &[Slice],
    mut value: SpatialTensor<B, K>,
    op: &'static str,
) -> SpatialTensor<B, K> {
    let shape = base.shape();
    let wanted = ranges(slices, &shape);
    if value.shape().num_elements() == 0 {
        return base;
    }
    let whole = |dim: usize| wanted[dim] == (0, shape[dim], 1);
    for (dim, range) in wanted.iter().enumerate() {
        let simple = |axes: &[Axis]| matches!(axes, [] | [_]);
        if !whole(dim) {
            if range.2 != 1 || !simple(base.layout().dim(dim)) {
                base = whole_dim(base, dim, op);
            }
            if range.2 != 1 || !simple(value.layout().dim(dim)) {
                value = whole_dim(value, dim, op);
            }
        }
    }
    // Whole dimensions unify; of the others the base's split decides, or else the value's.
    let mask = |layout: &Layout| (0..layout.rank()).filter(|d| !whole(*d)).fold(layout.clone(), |l, d| l.with_dim(d, vec![])).summed();
    let (_, mut out) = unify(&[&mask(base.layout()), &mask(value.layout())]);
    out = out.materialized();
    let mut target_value = out.clone();
    let mut used = out.split_over();
    for dim in (0..shape.num_dims()).filter(|d| !whole(*d)) {
        let (start, length, _) = wanted[dim];
        let free = |axes: &[Axis]| match axes {
            [axis] => axis.as_split().filter(|(mesh, _)| !used.contains(*mesh)).map(|(m, o)| (m, o.to_vec())),
            _ => None,
        };
        let (from_base, from_value) = (free(base.layout().dim(dim)), free(value.layout().dim(dim)));
        let (base_axis, value_axis) = if let Some((mesh, offsets)) = from_base {
            let kept: Vec<usize> = offsets.iter().map(|o| o.saturating_sub(start).min(length)).collect();
            if kept.windows(2).all(|o| o[0] < o[1]) {
                (Axis::split(mesh, offsets), Axis::split(mesh, kept))
            } else {
                // A shard has no part in the box: it needs none of the value, so the value is whole everywhere.
                (Axis::split(mesh, offsets), Axis::full(length))
            }
        } else if let Some((mesh, offsets)) = from_value {
            let ranks = offsets.len() - 1;
            let mut shifted: Vec<usize> = offsets.iter().map(|o| o + start).collect();
            shifted[0] = 0;
            shifted[ranks] = shape[dim];
            (Axis::split(mesh, shifted), Axis::split(mesh, offsets))
        } else {
            (Axis::full(shape[dim]), Axis::full(length))
        };
        used = used.union(split_over(std::slice::from_ref(&base_axis)));
        out = out.with_dim(dim, vec![base_axis]);
        target_value = target_value.with_dim(dim, vec![value_axis]);
    }
    let device = base.device().clone();
    let coords = device.context().mesh.coords();
    let base = base.into_layout(&out).settle().0;
    let mut value = value.into_layout(&target_value).settle().0;
    let (mut at, mut part) = (Vec::new(), Vec::new());
    for dim in 0..shape.num_dims() {
        let (start, length, step) = wanted[dim];
        let stored = base.shape()[dim];
        match out.dim(dim) {
            [axis] if !whole(dim) && axis.as_split().is_some() => {
                let (low, high) = axis.owned(coords);
                let (from, to) = (low.max(start), high.min(start + length));
                if from >= to {
                    // Nothing of the box is here.
                    return SpatialTensor::new(base, out, device);
                }
                at.push(slice_of(from - low, to - from));
                let split = target_value.dim(dim).first().is_some_and(|a| a.as_split().is_some());
                part.push(if split { slice_of(0, to - from) } else { slice_of(from - start, to - from) });
            }
            _ if whole(dim) => {
                at.push(slice_of(0, stored));
                part.push(slice_of(0, value.shape()[dim]));
            }
            _ => {
                debug_assert!(step != 0);
                at.push(slices[dim]);
                part.push(slice_of(0, value.shape()[dim]));
            }
        }
    }
    let current = value.shape();
    if !part.iter().zip(current.iter()).all(|(s, n)| s.to_range(*n) == (0..*n)) {
        value = K::slice(value, &part);
    }
    SpatialTensor::new(K::slice_assign(base, &at, value), out, device)
}

/// Layouts for operations that pair the elements of two tensors in every dimension but `dim`: of both, with `dim` as
/// given.
fn paired(a: &Layout, b: &Layout, dim: usize) -> Layout {
    let (_, out) = unify(&[&a.with_dim(dim, vec![]).summed(), &b.with_dim(dim, vec![]).summed()]);
    out.materialized()
}

/// Whether two tensors have equal extents but along `dim`.
fn aligned(a: &Layout, b: &Layout, dim: usize) -> bool {
    (0..a.rank()).all(|d| d == dim || a.extent(d) == b.extent(d))
}

/// `out[.., j, ..] = tensor[.., indices[.., j, ..], ..]`: local while `dim` of the tensor is not split.
pub(crate) fn gather<B: LocalKernels, K: Kind<B>>(
    dim: usize,
    tensor: SpatialTensor<B, K>,
    indices: SpatialTensor<B, Int>,
    op: &'static str,
    f: impl FnOnce(K::Primitive, <Int as Kind<B>>::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    if !aligned(tensor.layout(), indices.layout(), dim) {
        let (tensor, indices) = (tensor.gathered(op), indices.gathered(op));
        return SpatialTensor::full(f(tensor, indices), device);
    }
    let tensor = whole_dim(tensor, dim, op);
    let base = paired(tensor.layout(), indices.layout(), dim);
    let lines = Axis::full(indices.layout().extent(dim));
    let out = base.with_dim(dim, vec![lines]);
    let tensor = {
        let full = base.with_dim(dim, vec![Axis::full(tensor.layout().extent(dim))]);
        tensor.into_layout(&full).settle().0
    };
    let indices = indices.into_layout(&out).settle().0;
    SpatialTensor::new(f(tensor, indices), out, device)
}

/// `tensor[.., indices[.., j, ..], ..] += value[.., j, ..]`: local while `dim` is not split.
pub(crate) fn scatter<B: LocalKernels, K: Kind<B>>(
    dim: usize,
    tensor: SpatialTensor<B, K>,
    indices: SpatialTensor<B, Int>,
    value: SpatialTensor<B, K>,
    op: &'static str,
    f: impl FnOnce(K::Primitive, <Int as Kind<B>>::Primitive, K::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    if !aligned(tensor.layout(), indices.layout(), dim) {
        let (tensor, indices, value) = (tensor.gathered(op), indices.gathered(op), value.gathered(op));
        return SpatialTensor::full(f(tensor, indices, value), device);
    }
    let (tensor, indices, value) = (whole_dim(tensor, dim, op), whole_dim(indices, dim, op), whole_dim(value, dim, op));
    let base = paired(indices.layout(), value.layout(), dim);
    let base = paired(&base, tensor.layout(), dim);
    let lines = base.with_dim(dim, vec![Axis::full(indices.layout().extent(dim))]);
    let out = base.with_dim(dim, vec![Axis::full(tensor.layout().extent(dim))]);
    let tensor = tensor.into_layout(&out).settle().0;
    let indices = indices.into_layout(&lines).settle().0;
    let value = value.into_layout(&lines).settle().0;
    SpatialTensor::new(f(tensor, indices, value), out, device)
}

/// Lines `indices` of dimension `dim`: local while that dimension is not split; the result is split as the indices are.
pub(crate) fn select<B: LocalKernels, K: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    dim: usize,
    indices: SpatialTensor<B, Int>,
    op: &'static str,
    f: impl FnOnce(K::Primitive, <Int as Kind<B>>::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    let tensor = whole_dim(tensor, dim, op);
    let indices = selectable(indices, tensor.layout());
    let (local, layout) = tensor.settle();
    let (indices, lines) = indices.settle();
    let out = layout.with_dim(dim, lines.dim(0).to_vec());
    SpatialTensor::new(f(local, indices), out, device)
}

/// Indices stored, and split over mesh axes that split nothing of the other tensor.
fn selectable<B: LocalKernels>(indices: SpatialTensor<B, Int>, other: &Layout) -> SpatialTensor<B, Int> {
    let clash = split_over(indices.layout().dim(0)).iter().any(|mesh| other.split_over().contains(mesh));
    let layout = if clash { indices.layout().full_dim(0) } else { indices.layout().materialized_dim(0) };
    indices.into_layout(&layout)
}

/// Adds lines of `value` to lines `indices` of `tensor` (or combines them with `op_kind`). Indices split over ranks make
/// partial results on `zeros`, which are combined over these ranks.
#[allow(clippy::too_many_arguments)]
pub(crate) fn select_add<B: LocalKernels, K: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    dim: usize,
    indices: SpatialTensor<B, Int>,
    value: SpatialTensor<B, K>,
    op: &'static str,
    combine: ReduceOp,
    f: impl FnOnce(K::Primitive, usize, <Int as Kind<B>>::Primitive, K::Primitive) -> K::Primitive,
    add: impl FnOnce(K::Primitive, K::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    let context = device.context();
    let tensor = whole_dim(tensor, dim, op);
    let indices = selectable(indices, tensor.layout());
    let others = paired(tensor.layout(), value.layout(), dim);
    let mut lines: Vec<Axis> = indices.layout().dim(0).to_vec();
    if lines.iter().any(|a| a.as_split().is_some_and(|(mesh, _)| others.split_over().contains(mesh))) {
        lines = vec![Axis::full(indices.layout().extent(0))];
    }
    let out = others.with_dim(dim, vec![Axis::full(tensor.layout().extent(dim))]);
    let over = split_over(&lines);
    let indices = {
        let layout = Layout::new(vec![lines.clone()]);
        indices.into_layout(&layout).settle().0
    };
    let value = value.into_layout(&others.with_dim(dim, lines)).settle().0;
    let base = tensor.into_layout(&out).settle().0;
    let result = if context.mesh.effective(over).is_empty() {
        f(base, dim, indices, value)
    } else {
        let dtype = base.dtype();
        let (base, value) = (K::widened(base), K::widened(value));
        let zeros = K::zeros(base.shape(), device.inner_device(), base.dtype());
        let part = f(zeros, dim, indices, value);
        let sum = communicated(all_reduce::<B, K>(&context, part, over, combine, device.inner_device(), || context.compute_shares()));
        K::cast(add(base, sum), dtype)
    };
    SpatialTensor::new(result, out, device)
}

/// Global position of the first largest (or smallest) element along `dim`, and that element.
///
/// Each shard finds its own; the extreme is combined over the ranks, and of the shards that hold it the first wins.
#[allow(clippy::type_complexity)]
pub(crate) fn extreme<B: LocalKernels, K: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    dim: usize,
    op: &'static str,
    combine: ReduceOp,
    f: impl FnOnce(K::Primitive) -> (K::Primitive, <Int as Kind<B>>::Primitive),
    candidates: impl FnOnce(&K::Primitive, &K::Primitive, <Int as Kind<B>>::Primitive, usize, usize) -> <Int as Kind<B>>::Primitive,
) -> (SpatialTensor<B, K>, SpatialTensor<B, Int>) {
    let axes = tensor.layout().dim(dim).to_vec();
    let tensor = match &axes[..] {
        [axis] if axis.as_split().is_some() => tensor,
        axes if unsplit(axes) && axes.iter().all(|a| a.storage == Storage::Full) => tensor,
        _ => whole_dim(tensor, dim, op),
    };
    let device = tensor.device().clone();
    let context = device.context();
    let (local, layout) = tensor.settle();
    let out = layout.with_dim(dim, vec![]);
    let over = split_over(layout.dim(dim));
    let (value, index) = f(local);
    if context.mesh.effective(over).is_empty() {
        return (SpatialTensor::new(value, out.clone(), device.clone()), SpatialTensor::new(index, out, device));
    }
    let (start, _) = layout.dim(dim)[0].owned(context.mesh.coords());
    let inner = device.inner_device();
    let best = communicated(all_reduce::<B, K>(&context, value.clone(), over, combine, inner, || context.compute_shares()));
    let mine = candidates(&value, &best, index, start, layout.extent(dim));
    let first = communicated(all_reduce::<B, Int>(&context, mine, over, ReduceOp::Min, inner, || context.compute_shares()));
    (SpatialTensor::new(best, out.clone(), device.clone()), SpatialTensor::new(first, out, device))
}
