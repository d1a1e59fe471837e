//! Window operations under automatic differentiation. A backward pass keeps only what it reads: a convolution its
//! input if the weight is trained, its weight if the input has a gradient and its result if there is an activation, a maximum
//! its indices, a mean nothing.

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::TensorMetadata;
use burn_backend::tensor::{FloatTensor, IntTensor};

use super::{ConvSpec, PoolSpec, UpsampleSpec, WindowBackend};

#[derive(Debug)]
struct Conv;

/// What a convolution's backward pass reads.
#[derive(Clone, Debug)]
struct ConvState<B: WindowBackend> {
    placement: B::Placement,
    /// Kept if the weight is tracked.
    x: Option<NodeId>,
    /// Kept if x is tracked.
    weight: Option<NodeId>,
    weight_shape: [usize; 5],
    /// The result, kept if there is an activation, and the slope of it.
    activation: Option<(FloatTensor<B>, f64)>,
    spec: ConvSpec,
}

/// Parents are x, the weight and, if there are three, the bias.
impl<B: WindowBackend, const N: usize> Backward<B, N> for Conv {
    type State = ConvState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let state = ops.state;
        let grad = match state.activation {
            Some((y, slope)) => B::activation_grad(y, grad, slope),
            None => grad,
        };
        let mut parents = ops.parents.into_iter();
        let [x, weight, bias] = [(); 3].map(|()| parents.next().flatten());
        // Gradients of parameters first: they are summed over ranks while the rest goes on.
        if let Some(node) = bias {
            grads.register::<B>(node.id, B::conv3d_padded_bias_grad(grad.clone()));
        }
        let kept_x = state.x.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let kept_weight = state.weight.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        if let (Some(node), Some(x)) = (weight, kept_x) {
            let grad = B::conv3d_padded_weight_grad(x, grad.clone(), state.weight_shape, &state.spec);
            grads.register::<B>(node.id, grad);
        }
        if let (Some(node), Some(weight)) = (x, kept_weight) {
            let grad = B::conv3d_padded_x_grad(&state.placement, weight, grad, &state.spec);
            grads.register::<B>(node.id, grad);
        }
    }
}

#[derive(Debug)]
struct Whole;

impl<B: WindowBackend> Backward<B, 1> for Whole {
    type State = ();

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        // The same numbers, however they lie.
        unary::<B, _>(ops.parents, ops.node, grads, |grad| grad);
    }
}

#[derive(Debug)]
struct MaxPool;

impl<B: WindowBackend> Backward<B, 1> for MaxPool {
    type State = (B::Placement, IntTensor<B>, PoolSpec);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (placement, indices, spec) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| B::max_pool3d_grad(&placement, grad, indices, &spec));
    }
}

#[derive(Debug)]
struct AvgPool;

impl<B: WindowBackend> Backward<B, 1> for AvgPool {
    type State = (B::Placement, PoolSpec);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (placement, spec) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| B::avg_pool3d_grad(&placement, grad, &spec));
    }
}

#[derive(Debug)]
struct Upsample;

impl<B: WindowBackend> Backward<B, 1> for Upsample {
    type State = (B::Placement, UpsampleSpec);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (placement, spec) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| B::upsample3d_grad(&placement, grad, &spec));
    }
}

/// Prepares a convolution's node, saves what its backward pass reads and runs it. A macro because the number of
/// parents is a constant.
macro_rules! conv {
    ($x:ident, $weight:ident, $nodes:expr, $bias:expr, $slope:ident, $spec:ident) => {{
        match Conv.prepare::<C>($nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let placement = B::placement(&$x.primitive);
                let x = $weight.is_tracked().then(|| prep.checkpoint(&$x));
                let weight = $x.is_tracked().then(|| prep.checkpoint(&$weight));
                let weight_shape = $weight.primitive.shape().dims();
                let y = B::conv3d_padded($x.primitive, $weight.primitive, $bias, $slope, $spec);
                let activation = ($slope != 1.0).then(|| (y.clone(), $slope));
                prep.finish(ConvState { placement, x, weight, weight_shape, activation, spec: *$spec }, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::conv3d_padded($x.primitive, $weight.primitive, $bias, $slope, $spec)),
        }
    }};
}

/// Gradients of gradients are not provided, as for Burn's own convolutions and pools.
impl<B: WindowBackend, C: CheckpointStrategy> WindowBackend for Autodiff<B, C> {
    type Placement = B::Placement;

    fn placement(x: &FloatTensor<Self>) -> B::Placement {
        B::placement(&x.primitive)
    }

    fn conv3d_padded(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        slope: f64,
        spec: &ConvSpec,
    ) -> FloatTensor<Self> {
        match bias {
            Some(bias) => {
                conv!(x, weight, [x.node.clone(), weight.node.clone(), bias.node.clone()], Some(bias.primitive), slope, spec)
            }
            None => conv!(x, weight, [x.node.clone(), weight.node.clone()], None, slope, spec),
        }
    }

    fn activation_grad(_: FloatTensor<Self>, _: FloatTensor<Self>, _: f64) -> FloatTensor<Self> {
        panic!("the gradient of a convolution's activation cannot be differentiated again")
    }

    fn conv3d_padded_x_grad(_: &B::Placement, _: FloatTensor<Self>, _: FloatTensor<Self>, _: &ConvSpec) -> FloatTensor<Self> {
        panic!("the gradient of a convolution's input cannot be differentiated again")
    }

    fn conv3d_padded_weight_grad(_: FloatTensor<Self>, _: FloatTensor<Self>, _: [usize; 5], _: &ConvSpec) -> FloatTensor<Self> {
        panic!("the gradient of a convolution's weight cannot be differentiated again")
    }

    fn conv3d_padded_bias_grad(_: FloatTensor<Self>) -> FloatTensor<Self> {
        panic!("the gradient of a convolution's bias cannot be differentiated again")
    }

    fn whole_volume(x: FloatTensor<Self>) -> FloatTensor<Self> {
        match Whole.prepare::<C>([x.node.clone()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((), B::whole_volume(x.primitive)),
            OpsKind::UnTracked(prep) => prep.finish(B::whole_volume(x.primitive)),
        }
    }

    fn max_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> (FloatTensor<Self>, IntTensor<Self>) {
        match MaxPool.prepare::<C>([x.node.clone()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let placement = B::placement(&x.primitive);
                let (out, indices) = B::max_pool3d(x.primitive, spec);
                (prep.finish((placement, indices.clone(), *spec), out), indices)
            }
            OpsKind::UnTracked(prep) => {
                let (out, indices) = B::max_pool3d(x.primitive, spec);
                (prep.finish(out), indices)
            }
        }
    }

    fn max_pool3d_grad(_: &B::Placement, _: FloatTensor<Self>, _: IntTensor<Self>, _: &PoolSpec) -> FloatTensor<Self> {
        panic!("the gradient of a maximum pool cannot be differentiated again")
    }

    fn avg_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        match AvgPool.prepare::<C>([x.node.clone()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((B::placement(&x.primitive), *spec), B::avg_pool3d(x.primitive, spec)),
            OpsKind::UnTracked(prep) => prep.finish(B::avg_pool3d(x.primitive, spec)),
        }
    }

    fn avg_pool3d_grad(_: &B::Placement, _: FloatTensor<Self>, _: &PoolSpec) -> FloatTensor<Self> {
        panic!("the gradient of an average pool cannot be differentiated again")
    }

    fn upsample3d(x: FloatTensor<Self>, spec: &UpsampleSpec) -> FloatTensor<Self> {
        match Upsample.prepare::<C>([x.node.clone()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((B::placement(&x.primitive), *spec), B::upsample3d(x.primitive, spec)),
            OpsKind::UnTracked(prep) => prep.finish(B::upsample3d(x.primitive, spec)),
        }
    }

    fn upsample3d_grad(_: &B::Placement, _: FloatTensor<Self>, _: &UpsampleSpec) -> FloatTensor<Self> {
        panic!("the gradient of an interpolation cannot be differentiated again")
    }
}
