//! Batch norm with its activation, in two passes over memory forward and two backward.

use burn::nn::BatchNorm;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, Scalar, Shape, Slice, TensorMetadata};

use crate::kernels::{self, Channels, LocalKernels};
use crate::kind::{Float, Kind, wide};

/// What is done behind the statistics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// Added to variances.
    pub epsilon: f64,
    /// Factor of negative results: 1 without an activation, 0 for a ReLU, between them for a leaky one.
    pub slope: f64,
}

/// A backend that normalises volumes `[N, C, D, H, W]` by channel. Everything of one number a channel is `[C]`. On a
/// backend that splits volumes every method is collective, and statistics are those of the whole batch and volume.
pub trait NormBackend: Backend {
    /// `activation((x - mean) / sqrt(var + epsilon) * gamma + beta)` with x's own mean and variance (that of the
    /// population, as in normalising), and these two, which carry no gradient. Half precision is normalised in single, of
    /// which the statistics are then.
    fn batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        spec: NormSpec,
    ) -> (FloatTensor<Self>, [FloatTensor<Self>; 2]);

    /// The gradients of x, gamma and beta, from x and its `statistics`.
    fn batch_norm_grad(
        x: FloatTensor<Self>,
        statistics: [FloatTensor<Self>; 2],
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: NormSpec,
    ) -> [FloatTensor<Self>; 3];

    /// The same with `statistics` given, as in evaluation.
    fn given_norm(
        x: FloatTensor<Self>,
        statistics: [FloatTensor<Self>; 2],
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        spec: NormSpec,
    ) -> FloatTensor<Self>;
}

/// Burn's `norm` followed by an activation: x -> `leaky_relu(norm(x))` with negative results times `slope` (1: none, 0:
/// ReLU). Running statistics are kept in `norm`, and a gradient taken, where Burn's own `forward` does. x is
/// `[N, C, D, H, W]`. Collective where it is split: 2 C numbers are gathered forward, and as many summed backward.
///
/// # Panics
/// If x has another number of channels than `norm`.
pub fn batch_norm<B: NormBackend>(norm: &BatchNorm<B>, x: Tensor<B, 5>, slope: f64) -> Tensor<B, 5> {
    let channels = norm.gamma.shape()[0];
    assert!(x.dims()[1] == channels, "a batch norm of {channels} channels got a volume of {}", x.dims()[1]);
    let device = x.device();
    let spec = NormSpec { epsilon: norm.epsilon, slope };
    let primitive = |t: Tensor<B, 1>| t.into_primitive().tensor();
    let (gamma, beta) = (primitive(norm.gamma.val()), primitive(norm.beta.val()));
    let x = x.into_primitive().tensor();
    let wrap = |t: FloatTensor<B>| Tensor::<B, 5>::from_primitive(TensorPrimitive::Float(t));
    if !B::ad_enabled(&device) {
        let statistics = [norm.running_mean.value(), norm.running_var.value()].map(|t| primitive(t.to_device(&device)));
        return wrap(B::given_norm(x, statistics, gamma, beta, spec));
    }
    let (y, [mean, var]) = B::batch_norm(x, gamma, beta, spec);
    for (running, own) in [(&norm.running_mean, mean), (&norm.running_var, var)] {
        let own = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(own));
        let old = running.value_sync().to_device(&device);
        let dtype = old.dtype();
        let new = old.cast(own.dtype()).mul_scalar(1.0 - norm.momentum).add(own.mul_scalar(norm.momentum));
        running.update(new.cast(dtype).detach());
    }
    wrap(y)
}

/// `1 / sqrt(var + epsilon)`.
fn inverse<B: Backend>(var: FloatTensor<B>, epsilon: f64) -> FloatTensor<B> {
    B::float_recip(B::float_sqrt(B::float_add_scalar(var, Scalar::Float(epsilon))))
}

fn channels<B: Backend>([mean, var]: [FloatTensor<B>; 2], gamma: FloatTensor<B>, beta: FloatTensor<B>, spec: NormSpec) -> Channels<B> {
    Channels { mean, scale: B::float_mul(inverse::<B>(var, spec.epsilon), gamma), shift: beta, slope: spec.slope }
}

/// [`NormBackend::batch_norm`] of this rank's block of a volume of `n` elements a channel; `combine` makes the mean and the
/// sum of squared deviations of the volume out of those of the blocks.
pub(crate) fn of_block<B: LocalKernels>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    beta: FloatTensor<B>,
    spec: NormSpec,
    n: usize,
    combine: impl FnOnce([FloatTensor<B>; 2]) -> [FloatTensor<B>; 2],
) -> (FloatTensor<B>, [FloatTensor<B>; 2]) {
    let dtype = x.dtype();
    let [x, gamma, beta] = [x, gamma, beta].map(<Float as Kind<B>>::widened);
    let (mean, m2) = kernels::channel_moments::<B>(x.clone());
    let [mean, m2] = combine([mean, m2]);
    let statistics = [mean, B::float_div_scalar(m2, Scalar::Float(n as f64))];
    let y = kernels::channel_norm::<B>(x, &channels::<B>(statistics.clone(), gamma, beta, spec));
    (<Float as Kind<B>>::cast(y, dtype), statistics)
}

/// [`NormBackend::batch_norm_grad`] of this rank's block, as [`of_block`]; `reduce` sums over the ranks that hold the
/// others.
#[allow(clippy::too_many_arguments)]
pub(crate) fn grad_of_block<B: LocalKernels>(
    x: FloatTensor<B>,
    statistics: [FloatTensor<B>; 2],
    gamma: FloatTensor<B>,
    beta: FloatTensor<B>,
    grad: FloatTensor<B>,
    spec: NormSpec,
    n: usize,
    reduce: impl Fn(FloatTensor<B>) -> FloatTensor<B>,
) -> [FloatTensor<B>; 3] {
    let dtypes = [x.dtype(), gamma.dtype(), beta.dtype()];
    let [x, gamma, beta, grad] = [x, gamma, beta, grad].map(<Float as Kind<B>>::widened);
    let statistics = statistics.map(<Float as Kind<B>>::widened);
    let inverse = inverse::<B>(statistics[1].clone(), spec.epsilon);
    let channels = channels::<B>(statistics, gamma, beta, spec);
    let (sum, dot) = kernels::channel_grad_sums::<B>(x.clone(), grad.clone(), &channels);
    let count = sum.shape()[0];
    let both = reduce(B::float_cat(vec![sum, dot], 0));
    let part = |from: usize| B::float_slice(both.clone(), &[Slice::new(from as isize, Some((from + count) as isize), 1)]);
    let (sum, dot) = (part(0), part(count));
    let gamma_grad = B::float_mul(dot, inverse.clone());
    let over = |t| B::float_div_scalar(t, Scalar::Float(n as f64));
    let b = over(B::float_mul(gamma_grad.clone(), inverse));
    let x_grad = kernels::channel_grad::<B>(x, grad, &channels, over(sum.clone()), b);
    let [x_dtype, gamma_dtype, beta_dtype] = dtypes;
    let cast = <Float as Kind<B>>::cast;
    [cast(x_grad, x_dtype), cast(gamma_grad, gamma_dtype), cast(sum, beta_dtype)]
}

/// [`NormBackend::given_norm`] of a block.
pub(crate) fn given_of_block<B: LocalKernels>(
    x: FloatTensor<B>,
    statistics: [FloatTensor<B>; 2],
    gamma: FloatTensor<B>,
    beta: FloatTensor<B>,
    spec: NormSpec,
) -> FloatTensor<B> {
    let statistics = statistics.map(<Float as Kind<B>>::widened);
    let [gamma, beta] = [gamma, beta].map(<Float as Kind<B>>::widened);
    wide::<B>(x, |x| kernels::channel_norm::<B>(x, &channels::<B>(statistics, gamma, beta, spec)))
}

/// Elements of one channel of the whole batch.
pub(crate) fn each(shape: &Shape) -> usize {
    shape.num_elements() / shape[1]
}

/// Tensors are whole.
impl<B: LocalKernels> NormBackend for B {
    fn batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        spec: NormSpec,
    ) -> (FloatTensor<Self>, [FloatTensor<Self>; 2]) {
        let n = each(&x.shape());
        of_block::<B>(x, gamma, beta, spec, n, |own| own)
    }
    fn batch_norm_grad(
        x: FloatTensor<Self>,
        statistics: [FloatTensor<Self>; 2],
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: NormSpec,
    ) -> [FloatTensor<Self>; 3] {
        let n = each(&x.shape());
        grad_of_block::<B>(x, statistics, gamma, beta, grad, spec, n, |own| own)
    }
    fn given_norm(
        x: FloatTensor<Self>,
        statistics: [FloatTensor<Self>; 2],
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        spec: NormSpec,
    ) -> FloatTensor<Self> {
        given_of_block::<B>(x, statistics, gamma, beta, spec)
    }
}

#[derive(Debug)]
struct Norm;

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct NormState<B: Backend> {
    x: NodeId,
    statistics: [FloatTensor<B>; 2],
    gamma: FloatTensor<B>,
    beta: FloatTensor<B>,
    spec: NormSpec,
}

/// Parents are x, gamma and beta.
impl<B: NormBackend> Backward<B, 3> for Norm {
    type State = NormState<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let NormState { x, statistics, gamma, beta, spec } = ops.state;
        let x = checkpointer.retrieve_node_output::<FloatTensor<B>>(x);
        let gradients = B::batch_norm_grad(x, statistics, gamma, beta, grad, spec);
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

/// Gradients of gradients are not provided.
impl<B: NormBackend, C: CheckpointStrategy> NormBackend for Autodiff<B, C> {
    fn batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        spec: NormSpec,
    ) -> (FloatTensor<Self>, [FloatTensor<Self>; 2]) {
        let nodes = [x.node.clone(), gamma.node.clone(), beta.node.clone()];
        let (y, statistics) = match Norm.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let kept = prep.checkpoint(&x);
                let (gamma, beta) = (gamma.primitive, beta.primitive);
                let (y, statistics) = B::batch_norm(x.primitive, gamma.clone(), beta.clone(), spec);
                (prep.finish(NormState { x: kept, statistics: statistics.clone(), gamma, beta, spec }, y), statistics)
            }
            OpsKind::UnTracked(prep) => {
                let (y, statistics) = B::batch_norm(x.primitive, gamma.primitive, beta.primitive, spec);
                (prep.finish(y), statistics)
            }
        };
        (y, statistics.map(<Self as AutodiffBackend>::from_inner))
    }

    fn batch_norm_grad(
        _: FloatTensor<Self>,
        _: [FloatTensor<Self>; 2],
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: NormSpec,
    ) -> [FloatTensor<Self>; 3] {
        panic!("the gradient of a batch norm cannot be differentiated again")
    }

    fn given_norm(
        _: FloatTensor<Self>,
        _: [FloatTensor<Self>; 2],
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: NormSpec,
    ) -> FloatTensor<Self> {
        panic!("a batch norm with given statistics is for evaluation: call it on the module's valid() form")
    }
}
