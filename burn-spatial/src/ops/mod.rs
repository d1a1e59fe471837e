//! Burn's op traits for `Spatial<B>`: take the blocks, apply the rule, redistribute, call the inner backend, wrap.
//!
//! This file has what the traits share: pointwise maps, views, reductions, and operations along one dimension.

use burn_backend::{DType, TensorMetadata};
use burn_std::{Shape, Slice};

use crate::comm::ReduceOp;
use crate::device::RankContext;
use crate::kernels::LocalKernels;
use crate::kind::{Float, Kind, accumulator};
use crate::layout::{Axis, Layout, Storage, unify};
use crate::mesh::AxisSet;
use crate::tensor::{SpatialTensor, communicated};
use crate::transfer::collective::all_reduce;

mod activation;
mod along;
mod bool;
mod conv;
mod float;
mod index;
mod int;
mod matmul;
mod module;
mod norm;
mod pool;
mod quantized;
mod sample;
mod transaction;
mod window;

pub(crate) use along::{cat, flip, scan, unfold};
pub(crate) use index::*;
pub use quantized::SpatialQuantized;

/// Element-wise, one operand.
pub(crate) fn map<B: LocalKernels, K: Kind<B>, R: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    f: impl FnOnce(K::Primitive) -> R::Primitive,
) -> SpatialTensor<B, R> {
    let device = tensor.device().clone();
    let (local, layout) = tensor.settle();
    SpatialTensor::new(f(local), layout, device)
}

/// A float tensor as the type in which it is summed.
pub(crate) fn widened<B: LocalKernels>(tensor: SpatialTensor<B, Float>) -> SpatialTensor<B, Float> {
    let dtype = accumulator(tensor.dtype());
    cast(tensor, dtype)
}

/// A float tensor as another type; a pending sum stays pending where it is made in the same one.
pub(crate) fn cast<B: LocalKernels>(tensor: SpatialTensor<B, Float>, dtype: DType) -> SpatialTensor<B, Float> {
    if tensor.dtype() == dtype {
        return tensor;
    }
    match tensor.partial().filter(|partial| partial.dtype() == accumulator(dtype)) {
        Some(partial) => SpatialTensor::share(partial, tensor.layout().clone(), dtype, tensor.device().clone()),
        None => map::<B, Float, Float>(tensor, |t| <Float as Kind<B>>::cast(t, dtype)),
    }
}

/// Like [`map`], for operations that commute with sums over ranks: a pending sum stays pending.
pub(crate) fn map_linear<B: LocalKernels, K: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    layout: Layout,
    f: impl FnOnce(K::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    match tensor.partial() {
        Some(partial) => {
            let layout = layout.with_pending(tensor.layout().pending());
            SpatialTensor::share(f(partial), layout, tensor.dtype(), device)
        }
        None => SpatialTensor::new(f(tensor.settle().0), layout.summed(), device),
    }
}

/// One layout for all operands of a broadcasting operation, given theirs and which are random; a random tensor adapts
/// to anything, but what it makes cannot be uniform.
fn common(operands: &[(&Layout, bool)]) -> (Vec<Layout>, Layout) {
    let settled: Vec<Layout> =
        operands.iter().map(|(layout, random)| if *random { Layout::uniform(&layout.shape()) } else { layout.summed() }).collect();
    let (mut wanted, mut out) = unify(&settled.iter().collect::<Vec<_>>());
    let drawn = |i: usize, dim: usize| operands[i].1 && operands[i].0.extent(dim) != 1;
    for dim in 0..out.rank() {
        if !(0..operands.len()).any(|i| drawn(i, dim)) {
            continue;
        }
        out = out.materialized_dim(dim);
        for (i, layout) in wanted.iter_mut().enumerate() {
            // One value along all of the dimension broadcasts; what is uniform in part has to be stored.
            if drawn(i, dim) || !layout.is_uniform_dim(dim) {
                *layout = layout.with_dim(dim, out.dim(dim).to_vec());
            }
        }
    }
    (wanted, out)
}

/// Element-wise with broadcasting, two operands.
pub(crate) fn zip<B: LocalKernels, K: Kind<B>, L: Kind<B>, R: Kind<B>>(
    lhs: SpatialTensor<B, K>,
    rhs: SpatialTensor<B, L>,
    f: impl FnOnce(K::Primitive, L::Primitive) -> R::Primitive,
) -> SpatialTensor<B, R> {
    let device = lhs.device().clone();
    let (wanted, out) = common(&[(lhs.layout(), lhs.is_random()), (rhs.layout(), rhs.is_random())]);
    let lhs = lhs.into_layout(&wanted[0]).settle().0;
    let rhs = rhs.into_layout(&wanted[1]).settle().0;
    SpatialTensor::new(f(lhs, rhs), out, device)
}

/// `a + b` and the like: equal pending sums stay pending.
pub(crate) fn zip_linear<B: LocalKernels, K: Kind<B>>(
    lhs: SpatialTensor<B, K>,
    rhs: SpatialTensor<B, K>,
    f: impl FnOnce(K::Primitive, K::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    if let (Some(a), Some(b)) = (lhs.partial(), rhs.partial())
        && lhs.layout() == rhs.layout()
    {
        return SpatialTensor::share(f(a, b), lhs.layout().clone(), lhs.dtype(), lhs.device().clone());
    }
    zip(lhs, rhs, f)
}

/// `tensor` where `mask` is false, `value` where it is true: all three broadcast.
pub(crate) fn choose<B: LocalKernels, K: Kind<B>, M: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    mask: SpatialTensor<B, M>,
    value: SpatialTensor<B, K>,
    f: impl FnOnce(K::Primitive, M::Primitive, K::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    let operands = [(tensor.layout(), tensor.is_random()), (mask.layout(), mask.is_random()), (value.layout(), value.is_random())];
    let (wanted, out) = common(&operands);
    let shape = out.local_shape(device.context().mesh.coords());
    let tensor = expanded::<B, K>(tensor.into_layout(&wanted[0]).settle().0, &shape);
    let mask = expanded::<B, M>(mask.into_layout(&wanted[1]).settle().0, &shape);
    let value = expanded::<B, K>(value.into_layout(&wanted[2]).settle().0, &shape);
    SpatialTensor::new(f(tensor, mask, value), out, device)
}

/// Like [`choose`] with two operands.
pub(crate) fn masked<B: LocalKernels, K: Kind<B>, M: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    mask: SpatialTensor<B, M>,
    f: impl FnOnce(K::Primitive, M::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    let (wanted, out) = common(&[(tensor.layout(), tensor.is_random()), (mask.layout(), mask.is_random())]);
    let shape = out.local_shape(device.context().mesh.coords());
    let tensor = expanded::<B, K>(tensor.into_layout(&wanted[0]).settle().0, &shape);
    let mask = expanded::<B, M>(mask.into_layout(&wanted[1]).settle().0, &shape);
    SpatialTensor::new(f(tensor, mask), out, device)
}

fn expanded<B: LocalKernels, K: Kind<B>>(local: K::Primitive, shape: &Shape) -> K::Primitive {
    if local.shape() == *shape { local } else { K::expand(local, shape.clone()) }
}

/// The same elements in another shape. Moves data only where an axis would be cut inside a shard.
pub(crate) fn reshape<B: LocalKernels, K: Kind<B>>(mut tensor: SpatialTensor<B, K>, shape: Shape) -> SpatialTensor<B, K> {
    if tensor.shape() == shape {
        return tensor;
    }
    // Each turn makes one axis full.
    for _ in 0..=tensor.layout().axes().count() {
        match tensor.layout().reshape(&shape) {
            Ok(layout) => {
                let local = layout.local_shape(tensor.context().mesh.coords());
                return map_linear(tensor, layout, |t| K::reshape(K::dense(t), local));
            }
            Err(blocked) => {
                let (dim, position) = locate(tensor.layout(), blocked.axis);
                let mut axes = tensor.layout().dim(dim).to_vec();
                axes[position] = Axis::full(axes[position].extent);
                let layout = tensor.layout().with_dim(dim, axes);
                tensor = tensor.into_layout(&layout);
            }
        }
    }
    panic!("a tensor that lies as {} cannot be reshaped to {shape:?}: please report this as a fault of burn-spatial", tensor.layout());
}

/// Dimension and position within it of the axis at `index` of [`Layout::axes`].
fn locate(layout: &Layout, index: usize) -> (usize, usize) {
    let mut rest = index;
    for (dim, axes) in layout.dims().iter().enumerate() {
        if rest < axes.len() {
            return (dim, rest);
        }
        rest -= axes.len();
    }
    unreachable!("a blocked axis is one of the layout's")
}

/// Dimensions in another order.
pub(crate) fn permute<B: LocalKernels, K: Kind<B>>(tensor: SpatialTensor<B, K>, order: &[usize]) -> SpatialTensor<B, K> {
    let layout = tensor.layout().permute(order);
    map_linear(tensor, layout, |t| K::permute(t, order))
}

/// Two dimensions exchanged.
pub(crate) fn swap_dims<B: LocalKernels, K: Kind<B>>(tensor: SpatialTensor<B, K>, a: usize, b: usize) -> SpatialTensor<B, K> {
    let mut order: Vec<usize> = (0..tensor.rank()).collect();
    order.swap(a, b);
    permute(tensor, &order)
}

/// Extents of 1 (and new leading dimensions) become uniform axes: nothing is stored.
pub(crate) fn expand<B: LocalKernels, K: Kind<B>>(tensor: SpatialTensor<B, K>, shape: Shape) -> SpatialTensor<B, K> {
    let old = tensor.layout();
    let new = shape.num_dims() - old.rank();
    let dims = (0..shape.num_dims()).map(|dim| match dim.checked_sub(new) {
        Some(before) if old.extent(before) == shape[dim] => old.dim(before).to_vec(),
        _ => vec![Axis::uniform(shape[dim])],
    });
    let layout = Layout::new(dims.collect());
    let device = tensor.device().clone();
    let local = layout.local_shape(device.context().mesh.coords());
    let (value, _) = tensor.settle();
    let value = if local.num_elements() == 0 { K::expand(value, local) } else { K::reshape(value, local) };
    SpatialTensor::new(value, layout, device)
}

/// `times` copies one after another: an outer uniform axis, nothing is stored.
pub(crate) fn repeat_dim<B: LocalKernels, K: Kind<B>>(tensor: SpatialTensor<B, K>, dim: usize, times: usize) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    if times == 0 || tensor.layout().extent(dim) == 0 {
        let local = tensor.into_whole();
        let mut shape = local.shape();
        shape[dim] *= times;
        let dtype = local.dtype();
        return SpatialTensor::full(K::zeros(shape, device.inner_device(), dtype), device);
    }
    let (local, layout) = tensor.settle();
    let mut axes = vec![Axis::uniform(times)];
    axes.extend_from_slice(layout.dim(dim));
    let layout = layout.with_dim(dim, axes);
    // Fused uniform axes are stored once.
    let shape = layout.local_shape(device.context().mesh.coords());
    SpatialTensor::new(K::reshape(local, shape), layout, device)
}

/// The tensor with dimension `dim` whole and stored on every rank; a gather of a split dimension is counted for `op`.
pub(crate) fn whole_dim<B: LocalKernels, K: Kind<B>>(tensor: SpatialTensor<B, K>, dim: usize, op: &'static str) -> SpatialTensor<B, K> {
    let split = tensor.layout().dim(dim).iter().any(|a| a.as_split().is_some());
    if split {
        let context = tensor.context();
        assert!(
            !context.strict(),
            "{op} along dimension {dim} has no rule for a tensor that lies as {} and would gather it (strict mode). Make it full first with to_full(), or unset {}",
            tensor.layout(),
            crate::device::STRICT_VARIABLE
        );
        if context.stats.gather(op) && context.mesh.rank() == 0 {
            tracing::warn!("{op} along dimension {dim} gathers a tensor that lies as {} (said once)", tensor.layout());
        }
    }
    let layout = tensor.layout().full_dim(dim).summed();
    tensor.into_layout(&layout)
}

/// An operation along one dimension that works on whole lines: local while that dimension is not split.
pub(crate) fn along<B: LocalKernels, K: Kind<B>, R: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    dim: usize,
    op: &'static str,
    f: impl FnOnce(K::Primitive) -> R::Primitive,
) -> SpatialTensor<B, R> {
    let device = tensor.device().clone();
    let (local, layout) = whole_dim(tensor, dim, op).settle();
    let out = f(local);
    let layout = layout.with_dim(dim, vec![Axis::full(out.shape()[dim])]);
    SpatialTensor::new(out, layout, device)
}

/// [`along`] with two results.
pub(crate) fn along_pair<B: LocalKernels, K: Kind<B>, R: Kind<B>, S: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    dim: usize,
    op: &'static str,
    f: impl FnOnce(K::Primitive) -> (R::Primitive, S::Primitive),
) -> (SpatialTensor<B, R>, SpatialTensor<B, S>) {
    let device = tensor.device().clone();
    let (local, layout) = whole_dim(tensor, dim, op).settle();
    let (first, second) = f(local);
    let layout = layout.with_dim(dim, vec![Axis::full(first.shape()[dim])]);
    (SpatialTensor::new(first, layout.clone(), device.clone()), SpatialTensor::new(second, layout, device))
}

/// An operation without a rule: gathers its operand (counted) and returns a full tensor.
pub(crate) fn fallback<B: LocalKernels, K: Kind<B>, R: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    op: &'static str,
    f: impl FnOnce(K::Primitive) -> R::Primitive,
) -> SpatialTensor<B, R> {
    let device = tensor.device().clone();
    SpatialTensor::full(f(tensor.gathered(op)), device)
}

/// The mesh axes that split `axes`.
pub(crate) fn split_over(axes: &[Axis]) -> AxisSet {
    axes.iter().filter_map(|a| a.as_split().map(|s| s.0)).collect()
}

/// Sum along `dim`, left pending over the ranks that share it.
pub(crate) fn sum_dim<B: LocalKernels, K: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    dim: usize,
    sum: impl FnOnce(K::Primitive) -> K::Primitive,
    scale: impl FnOnce(K::Primitive, usize) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let layout = tensor.layout();
    let times = Layout::multiplicity(layout.dim(dim));
    let over = split_over(layout.dim(dim));
    let pending = layout.pending();
    let out = layout.with_dim(dim, vec![]).with_pending(pending.union(over));
    let (device, dtype) = (tensor.device().clone(), tensor.dtype());
    let (local, out) = match tensor.partial() {
        Some(partial) => (partial, out),
        // Already summed over what was pending.
        None => (tensor.settle().0, out.with_pending(over)),
    };
    let others = !device.context().mesh.effective(out.pending()).is_empty();
    let local = sum(if others || times != 1 { K::widened(local) } else { local });
    SpatialTensor::share(if times == 1 { local } else { scale(local, times) }, out, dtype, device)
}

/// A reduction along `dim` that is made at once: `f` on the block, then `op` over the ranks that share the dimension.
/// `repeat` accounts for uniform axes of the given total extent.
pub(crate) fn reduce_dim<B: LocalKernels, K: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    dim: usize,
    op: ReduceOp,
    f: impl FnOnce(K::Primitive) -> K::Primitive,
    repeat: impl FnOnce(K::Primitive, usize) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    let context = device.context();
    let (local, layout) = tensor.settle();
    let times = Layout::multiplicity(layout.dim(dim));
    let over = split_over(layout.dim(dim));
    let local = reduced::<B, K>(&context, local, over, times, op, device.inner_device(), f, repeat);
    SpatialTensor::new(local, layout.with_dim(dim, vec![]), device)
}

/// `f` of a block, then `op` over the ranks along `over`. Collective over them.
#[allow(clippy::too_many_arguments)]
fn reduced<B: LocalKernels, K: Kind<B>>(
    context: &RankContext,
    local: K::Primitive,
    over: AxisSet,
    times: usize,
    op: ReduceOp,
    device: &B::Device,
    f: impl FnOnce(K::Primitive) -> K::Primitive,
    repeat: impl FnOnce(K::Primitive, usize) -> K::Primitive,
) -> K::Primitive {
    let dtype = local.dtype();
    // What one rank makes in one go is rounded once; so is what several make together.
    let accumulates = matches!(op, ReduceOp::Sum | ReduceOp::Prod);
    let together = times != 1 || !context.mesh.effective(over).is_empty();
    let mut local = f(if accumulates && together { K::widened(local) } else { local });
    if times != 1 {
        local = repeat(local, times);
    }
    K::cast(communicated(all_reduce::<B, K>(context, local, over, op, device, || context.compute_shares())), dtype)
}

/// A reduction of all elements to one.
pub(crate) fn reduce<B: LocalKernels, K: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    op: ReduceOp,
    f: impl FnOnce(K::Primitive) -> K::Primitive,
    repeat: impl FnOnce(K::Primitive, usize) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let device = tensor.device().clone();
    let context = device.context();
    let (local, layout) = tensor.settle();
    let times: usize = layout.dims().iter().map(|axes| Layout::multiplicity(axes)).product();
    let local = reduced::<B, K>(&context, local, layout.split_over(), times, op, device.inner_device(), f, repeat);
    SpatialTensor::full(local, device)
}

/// A tensor of one value, stored once.
pub(crate) fn constant<B: LocalKernels, K: Kind<B>>(
    shape: Shape,
    device: &crate::device::SpatialDevice<B::Device>,
    make: impl FnOnce(Shape, &B::Device) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let layout = Layout::uniform(&shape);
    let local = layout.local_shape(device.context().mesh.coords());
    SpatialTensor::new(make(local, device.inner_device()), layout, device.clone())
}

/// Start, length and step of `slices` along each dimension; missing ones are whole.
pub(crate) fn ranges(slices: &[Slice], shape: &Shape) -> Vec<(usize, usize, isize)> {
    (0..shape.num_dims())
        .map(|dim| match slices.get(dim) {
            Some(slice) => {
                let range = slice.to_range(shape[dim]);
                (range.start, slice.output_size(shape[dim]), slice.step)
            }
            None => (0, shape[dim], 1),
        })
        .collect()
}

/// Whether nothing of `axis` is split.
pub(crate) fn unsplit(axes: &[Axis]) -> bool {
    axes.iter().all(|a| !matches!(a.storage, Storage::Split { .. }))
}
