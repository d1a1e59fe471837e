//! Operations along a split dimension that need little of other ranks: the dimension stays split.

use burn_backend::TensorMetadata;
use burn_std::Slice;

use super::index::slice_of;
use super::{split_over, whole_dim};
use crate::device::RankContext;
use crate::kernels::LocalKernels;
use crate::kind::Kind;
use crate::layout::{Axis, AxisNeed, Layout, Piece, balanced_offsets, unify};
use crate::mesh::MeshAxis;
use crate::tensor::{SpatialTensor, communicated};
use crate::transfer::{exchange, redistribute};
use crate::window::scaled;

/// This rank's block `local` with split dimensions, each one axis of `layout`, replaced by what `needs` says. Collective.
pub(crate) fn fetch<B: LocalKernels, K: Kind<B>>(
    context: &RankContext,
    local: K::Primitive,
    layout: &Layout,
    needs: &[Option<AxisNeed>],
    device: &B::Device,
) -> K::Primitive {
    // Dimension by dimension as one axis each: a dimension that does not move is taken as it is stored.
    let stored = local.shape();
    let axes = |dim: usize| if needs[dim].is_some() { layout.dim(dim)[0].clone() } else { Axis::full(stored[dim]) };
    let needed = |dim: usize| needs[dim].clone().unwrap_or_else(|| AxisNeed::whole(stored[dim]));
    let axes: Vec<Axis> = (0..layout.rank()).map(axes).collect();
    let needed: Vec<AxisNeed> = (0..layout.rank()).map(needed).collect();
    let plan = context.plan(&axes, &needed);
    if !plan.sends.is_empty() || !plan.receives.is_empty() {
        context.stats.redistribution();
    }
    communicated(exchange::<B, K>(context.talking_as(&plan), &plan, local, device))
}

/// [`fetch`] along one dimension.
fn fetch_dim<B: LocalKernels, K: Kind<B>>(
    context: &RankContext,
    local: K::Primitive,
    layout: &Layout,
    dim: usize,
    need: AxisNeed,
    device: &B::Device,
) -> K::Primitive {
    let mut needs = vec![None; layout.rank()];
    needs[dim] = Some(need);
    fetch::<B, K>(context, local, layout, &needs, device)
}

/// The mesh axis and the shards of a dimension that is one split axis.
fn one_split(layout: &Layout, dim: usize) -> Option<(MeshAxis, Vec<usize>)> {
    match layout.dim(dim) {
        [axis] => axis.as_split().map(|(mesh, offsets)| (mesh, offsets.to_vec())),
        _ => None,
    }
}

fn cut<B: LocalKernels, K: Kind<B>>(local: K::Primitive, dim: usize, start: usize, length: usize) -> K::Primitive {
    let shape = local.shape();
    let slices: Vec<Slice> =
        shape.iter().enumerate().map(|(d, n)| if d == dim { slice_of(start, length) } else { slice_of(0, *n) }).collect();
    K::slice(local, &slices)
}

/// Reversed along dimensions. A shard of a split one comes, whole, from where its mirror image lies.
pub(crate) fn flip<B: LocalKernels, K: Kind<B>>(
    mut tensor: SpatialTensor<B, K>,
    dims: &[usize],
    op: &'static str,
    f: impl FnOnce(K::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    for dim in dims {
        if !tensor.layout().is_uniform_dim(*dim) && one_split(tensor.layout(), *dim).is_none() {
            tensor = whole_dim(tensor, *dim, op);
        }
    }
    let layout = tensor.layout().clone();
    let mut needs = vec![None; layout.rank()];
    for dim in dims {
        if let Some((mesh, offsets)) = one_split(&layout, *dim) {
            let extent = offsets[offsets.len() - 1];
            let mirrored = |o: &[usize]| vec![Piece { start: extent - o[1], end: extent - o[0], at: 0 }];
            needs[*dim] = Some(AxisNeed { mesh: Some(mesh), by_coord: offsets.windows(2).map(mirrored).collect() });
        }
    }
    if needs.iter().all(Option::is_none) {
        return super::map_linear(tensor, layout, f);
    }
    let device = tensor.device().clone();
    let (local, layout) = tensor.settle();
    let local = fetch::<B, K>(&device.context(), local, &layout, &needs, device.inner_device());
    SpatialTensor::new(f(local), layout, device)
}

/// A scan `f` along `dim`, in which each result is made of all elements up to it: a shard of a split dimension goes on
/// from the last results of those before it, one plane of each.
pub(crate) fn scan<B: LocalKernels, K: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    dim: usize,
    op: &'static str,
    f: impl Fn(K::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let Some((mesh, offsets)) = one_split(tensor.layout(), dim) else {
        return super::along::<B, K, K>(tensor, dim, op, f);
    };
    let device = tensor.device().clone();
    let context = device.context();
    let dtype = tensor.dtype();
    let (local, layout) = tensor.settle();
    let local = K::widened(local);
    let length = local.shape()[dim];
    let last = cut::<B, K>(f(local.clone()), dim, length - 1, 1);
    // The ranks' last results, one after another.
    let ranks = offsets.len() - 1;
    let each = layout.with_dim(dim, vec![Axis::split(mesh, (0..=ranks).collect::<Vec<_>>())]);
    let all = communicated(redistribute::<B, K>(&context, last, &each, &each.full_dim(dim), device.inner_device()));
    let before = context.mesh.coord(mesh);
    let result = if before == 0 {
        f(local)
    } else {
        let carried = cut::<B, K>(f(all), dim, before - 1, 1);
        cut::<B, K>(f(K::cat(vec![carried, local], dim)), dim, 1, length)
    };
    SpatialTensor::new(K::cast(result, dtype), layout, device)
}

/// Windows along `dim`, in a new last dimension. Those of a split dimension stay split: each shard takes the halo that
/// its windows reach into.
pub(crate) fn unfold<B: LocalKernels, K: Kind<B>>(
    tensor: SpatialTensor<B, K>,
    dim: usize,
    size: usize,
    step: usize,
    op: &'static str,
    f: impl FnOnce(K::Primitive) -> K::Primitive,
) -> SpatialTensor<B, K> {
    let extent = tensor.layout().extent(dim);
    let fits = size > 0 && step > 0 && size <= extent;
    let windows =
        one_split(tensor.layout(), dim).filter(|_| fits).and_then(|_| scaled(&tensor.layout().dim(dim)[0], (extent - size) / step + 1));
    let tensor = if windows.is_some() { tensor } else { whole_dim(tensor, dim, op) };
    let device = tensor.device().clone();
    let context = device.context();
    let (mut local, layout) = tensor.settle();
    if let Some((mesh, offsets)) = windows.as_ref().and_then(Axis::as_split) {
        // From the start of the first window to the end of the last: `f` counts from where its block starts.
        let read = |o: &[usize]| vec![Piece { start: o[0] * step, end: (o[1] - 1) * step + size, at: 0 }];
        let need = AxisNeed { mesh: Some(mesh), by_coord: offsets.windows(2).map(read).collect() };
        local = fetch_dim::<B, K>(&context, local, &layout, dim, need, device.inner_device());
    }
    let out = f(local);
    let mut dims = layout.dims().to_vec();
    dims[dim] = vec![windows.unwrap_or_else(|| Axis::full(out.shape()[dim]))];
    dims.push(vec![Axis::full(size)]);
    SpatialTensor::new(out, Layout::new(dims), device)
}

/// Joins tensors along `dim`. Where the first that is split along it is one axis, so is the result, in near-equal
/// shards: elements move to the ranks that hold their part of it. The other dimensions stay split.
pub(crate) fn cat<B: LocalKernels, K: Kind<B>>(tensors: Vec<SpatialTensor<B, K>>, dim: usize, op: &'static str) -> SpatialTensor<B, K> {
    let device = tensors[0].device().clone();
    let context = device.context();
    let first = tensors[0].clone();
    let mut tensors: Vec<_> = tensors.into_iter().filter(|t| t.layout().extent(dim) > 0).collect();
    if tensors.is_empty() {
        return first;
    }
    let others = |tensors: &[SpatialTensor<B, K>]| {
        let layouts: Vec<Layout> = tensors.iter().map(|t| t.layout().with_dim(dim, vec![]).summed()).collect();
        let (_, out) = unify(&layouts.iter().collect::<Vec<_>>());
        out.materialized()
    };
    let out = others(&tensors);
    let mesh =
        tensors.iter().find_map(|t| one_split(t.layout(), dim)).map(|split| split.0).filter(|mesh| !out.split_over().contains(*mesh));
    // What is split along `dim` in another way is made whole.
    let suits = |t: &SpatialTensor<B, K>| {
        let over = split_over(t.layout().dim(dim));
        over.is_empty() || (mesh.is_some() && one_split(t.layout(), dim).map(|split| split.0) == mesh)
    };
    tensors = tensors.into_iter().map(|t| if suits(&t) { t } else { whole_dim(t, dim, op) }).collect();
    let out = others(&tensors);
    let extents: Vec<usize> = tensors.iter().map(|t| t.layout().extent(dim)).collect();
    let total: usize = extents.iter().sum();
    let axis = match mesh {
        Some(mesh) => Axis::split(mesh, balanced_offsets(total, context.mesh.size(mesh))),
        None => Axis::full(total),
    };
    let shares: Vec<(usize, usize)> = match axis.as_split() {
        Some((_, offsets)) => offsets.windows(2).map(|o| (o[0], o[1])).collect(),
        None => vec![(0, total)],
    };
    let me = mesh.map_or(0, |mesh| context.mesh.coord(mesh));
    let mut start = 0;
    let mut locals = Vec::new();
    for (tensor, extent) in tensors.into_iter().zip(extents) {
        // What a share has of this tensor, in the tensor's own positions.
        let part = |(low, high): (usize, usize)| {
            let clip = |at: usize| at.saturating_sub(start).min(extent);
            (clip(low), clip(high))
        };
        let (from, to) = part(shares[me]);
        let whole = one_split(tensor.layout(), dim).is_none();
        let own = if whole { vec![Axis::full(extent)] } else { tensor.layout().dim(dim).to_vec() };
        let layout = out.with_dim(dim, own);
        let local = tensor.into_layout(&layout).settle().0;
        if let Some((mesh, offsets)) = one_split(&layout, dim) {
            // A rank that needs nothing keeps an element of its own, which is dropped below: no tensor is empty.
            let piece = |(share, own): (&(usize, usize), &[usize])| {
                let (start, end) = part(*share);
                vec![if start < end { Piece { start, end, at: 0 } } else { Piece { start: own[0], end: own[0] + 1, at: 0 } }]
            };
            let need = AxisNeed { mesh: Some(mesh), by_coord: shares.iter().zip(offsets.windows(2)).map(piece).collect() };
            let local = fetch_dim::<B, K>(&context, local, &layout, dim, need, device.inner_device());
            if from < to {
                locals.push(local);
            }
        } else if from < to {
            locals.push(if (from, to) == (0, extent) { local } else { cut::<B, K>(local, dim, from, to - from) });
        }
        start += extent;
    }
    let joined = if locals.len() == 1 { locals.remove(0) } else { K::cat(locals, dim) };
    SpatialTensor::new(joined, out.with_dim(dim, vec![axis]), device)
}
