//! Sums and other reductions of tensors over the ranks along mesh axes.

use burn_backend::{TensorData, TensorMetadata};

use crate::comm::{CommError, ReduceOp};
use crate::copies::copied;
use crate::device::RankContext;
use crate::gradients::Deferred;
use crate::kernels::LocalKernels;
use crate::kind::Kind;
use crate::mesh::AxisSet;
use crate::trace::timed;

/// Combines a local value over the ranks along `axes`. Where ranks are late, `meanwhile` is done before this one waits for
/// them. Collective over the axes.
pub(crate) fn all_reduce<B: LocalKernels, K: Kind<B>>(
    context: &RankContext,
    value: K::Primitive,
    axes: AxisSet,
    op: ReduceOp,
    device: &B::Device,
    meanwhile: impl FnOnce(),
) -> Result<K::Primitive, CommError> {
    if context.mesh.group(axes).is_none() {
        return Ok(value);
    }
    let comm = context.talking().group(axes).expect("there are others");
    let (shape, dtype) = (value.shape(), value.dtype());
    let mut request = {
        timed!(REDUCE, "start");
        let data = K::into_data(value);
        copied(data.as_bytes().len());
        comm.start_all_reduce(data.as_bytes().to_vec(), dtype, op)?
    };
    if !request.test()? {
        meanwhile();
    }
    timed!(REDUCE, "all_reduce");
    let summed = request.wait()?;
    Ok(K::from_data(TensorData::from_bytes_vec(summed, shape, dtype), device))
}

/// The value of a sum over ranks that waited to be read. Collective over its axes when first called.
pub(crate) fn read<B: LocalKernels, K: Kind<B>>(context: &RankContext, deferred: &Deferred<B, K>) -> Result<K::Primitive, CommError> {
    let flush = deferred.flush();
    // Not whether it is there: it may have come early on some ranks, and a flush sends what waits.
    if flush.is_some_and(|flush| flush > context.gradients.flushes()) {
        let mesh = context.talking_alone("reading a gradient that is still being summed");
        context.gradients.flush(mesh, &context.stats)?;
    }
    if flush.is_none() && !context.on_own_thread() {
        return read_beside(context, deferred);
    }
    let (value, done) = deferred.value();
    if done {
        return Ok(value);
    }
    // Not under the lock: a thread that reads beside this one must not wait for other ranks through it.
    let sum = summed(context, deferred, value)?;
    deferred.done(sum.clone());
    Ok(sum)
}

/// The sum of all ranks' shares. Collective.
fn summed<B: LocalKernels, K: Kind<B>>(
    context: &RankContext,
    deferred: &Deferred<B, K>,
    share: K::Primitive,
) -> Result<K::Primitive, CommError> {
    let sum = all_reduce::<B, K>(context, share, deferred.axes, ReduceOp::Sum, &deferred.device, || context.compute_shares())?;
    Ok(K::cast(sum, deferred.dtype))
}

/// [`read`] on a thread beside the rank's own, which may have made the sum on some ranks and not yet on others. The sum is
/// not kept: whether the rank's own thread still has to make it must not depend on this one.
fn read_beside<B: LocalKernels, K: Kind<B>>(context: &RankContext, deferred: &Deferred<B, K>) -> Result<K::Primitive, CommError> {
    let comm = context.talking().group(deferred.axes).expect("a pending sum has others");
    let (value, done) = deferred.value();
    let ready = comm.all_gather(&[u8::from(done)])?;
    let Some(root) = ready.iter().position(|flag| flag == &[1]) else {
        return summed(context, deferred, value);
    };
    let sum = if done { K::into_data(value).as_bytes().to_vec() } else { Vec::new() };
    let sum = comm.broadcast(root, sum)?;
    Ok(K::from_data(TensorData::from_bytes_vec(sum, deferred.shape.clone(), deferred.dtype), &deferred.device))
}
