//! Batch norm of split volumes: each rank's block, and sums of one number a channel.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};

use crate::Spatial;
use crate::comm::ReduceOp;
use crate::gradients::all_reduce;
use crate::kind::Float;
use crate::layout::Layout;
use crate::nn::{NormBackend, NormSpec, norm};
use crate::tensor::{SpatialTensor, communicated};

/// How x has to lie: channels whole, all else split as it is.
fn stored(x: &Layout) -> Layout {
    x.clone().with_pending(Default::default()).full_dim(1).materialized()
}

impl<B: Backend> NormBackend for Spatial<B> {
    fn batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        spec: NormSpec,
    ) -> (FloatTensor<Self>, [FloatTensor<Self>; 2]) {
        let device = x.device().clone();
        let context = device.context();
        let (layout, n) = (stored(x.layout()), norm::each(&x.shape()));
        let over = layout.split_over();
        let reduce = |own| communicated(all_reduce::<B, Float>(&context, own, over, ReduceOp::Sum, device.inner_device()));
        let x = x.into_layout(&layout).settle().0;
        let (y, statistics) = norm::of_block::<B>(x, gamma.into_whole(), beta.into_whole(), spec, n, reduce);
        let whole = statistics.map(|t| SpatialTensor::full(t, device.clone()));
        (SpatialTensor::new(y, layout, device.clone()), whole)
    }

    fn batch_norm_grad(
        x: FloatTensor<Self>,
        statistics: [FloatTensor<Self>; 2],
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: NormSpec,
    ) -> [FloatTensor<Self>; 3] {
        let device = x.device().clone();
        let context = device.context();
        let (layout, n) = (stored(x.layout()), norm::each(&x.shape()));
        let over = layout.split_over();
        let reduce = |own| communicated(all_reduce::<B, Float>(&context, own, over, ReduceOp::Sum, device.inner_device()));
        let x = x.into_layout(&layout).settle().0;
        let grad = grad.into_layout(&layout).settle().0;
        let statistics = statistics.map(SpatialTensor::into_whole);
        let [x, gamma, beta] = norm::grad_of_block::<B>(x, statistics, gamma.into_whole(), beta.into_whole(), grad, spec, n, reduce);
        [SpatialTensor::new(x, layout, device.clone()), SpatialTensor::full(gamma, device.clone()), SpatialTensor::full(beta, device)]
    }

    fn given_norm(
        x: FloatTensor<Self>,
        statistics: [FloatTensor<Self>; 2],
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        spec: NormSpec,
    ) -> FloatTensor<Self> {
        let device = x.device().clone();
        let layout = stored(x.layout());
        let x = x.into_layout(&layout).settle().0;
        let y = norm::given_of_block::<B>(x, statistics.map(SpatialTensor::into_whole), gamma.into_whole(), beta.into_whole(), spec);
        SpatialTensor::new(y, layout, device)
    }
}
