//! From one layout to another: the only place that moves data between layouts.

use burn_backend::TensorMetadata;
use burn_std::Shape;

use crate::comm::CommError;
use crate::device::RankContext;
use crate::kernels::LocalKernels;
use crate::kind::Kind;
use crate::layout::{Axis, AxisNeed, Layout, Storage, refine};
use crate::trace::timed;
use crate::transfer::exchange;

/// The local block under layout `to`, from the one under `from`. Neither has pending sums. Collective over the mesh
/// axes along which a split changes; uniform axes are stored where `to` stores them.
pub(crate) fn redistribute<B: LocalKernels, K: Kind<B>>(
    context: &RankContext,
    local: K::Primitive,
    from: &Layout,
    to: &Layout,
    device: &B::Device,
) -> Result<K::Primitive, CommError> {
    debug_assert_eq!(from.shape(), to.shape());
    if from == to {
        return Ok(local);
    }
    let mut axes = Vec::new();
    for dim in 0..from.rank() {
        match refine(from.dim(dim), to.dim(dim)) {
            Some((a, b)) => axes.extend(a.into_iter().zip(b)),
            None => {
                // No common cut: by way of the whole dimension.
                let full = from.full_dim(dim);
                let local = redistribute::<B, K>(context, local, from, &full, device)?;
                return redistribute::<B, K>(context, local, &full, to, device);
            }
        }
    }
    assert!(
        axes.iter().all(|(a, b)| a.storage == Storage::Uniform || b.storage != Storage::Uniform),
        "what varies along an axis cannot be stored once: {from} to {to}"
    );
    let coords = context.mesh.coords();
    let target = to.local_shape(coords);
    // Uniform axes are stored last, so that they are never sent.
    let moved = |(a, b): &(Axis, Axis)| if a.storage == Storage::Uniform { None } else { Some((a.clone(), AxisNeed::of(b))) };
    let (sources, needs): (Vec<Axis>, Vec<AxisNeed>) = axes.iter().filter_map(moved).unzip();
    let plan = context.plan(&sources, &needs);
    if !plan.receives.is_empty() || !plan.sends.is_empty() {
        context.stats.redistribution();
    }
    timed!(LAYOUT, "redistribute");
    let own = K::reshape(local, Shape::from(plan.own.clone()));
    let block = exchange::<B, K>(context.talking_as(&plan), &plan, own, device)?;
    let mut moved_extents = block.shape().to_vec().into_iter();
    let stored: Vec<usize> =
        axes.iter().map(|(a, _)| if a.storage == Storage::Uniform { 1 } else { moved_extents.next().expect("one a moved axis") }).collect();
    let expanded: Vec<usize> = axes.iter().zip(&stored).map(|((_, b), n)| if *n == 1 { b.local(coords) } else { *n }).collect();
    let mut block = block;
    if stored != expanded {
        block = K::expand(K::reshape(block, Shape::from(stored)), Shape::from(expanded));
    }
    Ok(if block.shape() == target { block } else { K::reshape(block, target) })
}
