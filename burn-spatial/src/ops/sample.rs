//! Operations on samples that are whole: the inner backend's own, on each rank's part of the batch.

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;

use super::{split_over, unsplit};
use crate::device::SpatialDevice;
use crate::kernels::LocalKernels;
use crate::kind::{Float, Kind};
use crate::layout::{Axis, Layout};
use crate::mesh::AxisSet;
use crate::tensor::SpatialTensor;

/// How the batch of tensors `[N, C, ...]` lies whose other dimensions are whole.
pub(super) struct Samples<B: LocalKernels> {
    batch: Vec<Axis>,
    device: SpatialDevice<B::Device>,
}

impl<B: LocalKernels> Samples<B> {
    /// `None` if a dimension after the channels is split.
    pub fn of(x: &SpatialTensor<B, Float>) -> Option<Samples<B>> {
        let layout = x.layout();
        let whole = (2..layout.rank()).all(|dim| unsplit(layout.dim(dim)));
        whole.then(|| Samples { batch: layout.materialized_dim(0).dim(0).to_vec(), device: x.device().clone() })
    }

    /// This rank's samples of a tensor with the same batch.
    pub fn take<K: Kind<B>>(&self, tensor: SpatialTensor<B, K>) -> K::Primitive {
        let layout = Layout::full(&tensor.shape()).with_dim(0, self.batch.clone());
        tensor.into_layout(&layout).settle().0
    }

    /// A tensor of this rank's samples.
    pub fn wrap<K: Kind<B>>(&self, local: K::Primitive) -> SpatialTensor<B, K> {
        let layout = Layout::full(&local.shape()).with_dim(0, self.batch.clone());
        SpatialTensor::new(local, layout, self.device.clone())
    }

    /// The mesh axes that split the batch.
    pub fn over(&self) -> AxisSet {
        split_over(&self.batch)
    }
}

/// `f` on whole samples of x, if they are whole; else `or`.
pub(super) fn per_sample<B: LocalKernels>(
    x: SpatialTensor<B, Float>,
    f: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
    or: impl FnOnce(SpatialTensor<B, Float>) -> SpatialTensor<B, Float>,
) -> SpatialTensor<B, Float> {
    match Samples::of(&x) {
        Some(samples) => {
            let local = samples.take(x);
            samples.wrap(f(local))
        }
        None => or(x),
    }
}

/// [`per_sample`] with a gradient beside x.
pub(super) fn per_sample_grad<B: LocalKernels>(
    x: SpatialTensor<B, Float>,
    grad: SpatialTensor<B, Float>,
    f: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
    or: impl FnOnce(SpatialTensor<B, Float>, SpatialTensor<B, Float>) -> SpatialTensor<B, Float>,
) -> SpatialTensor<B, Float> {
    match Samples::of(&x) {
        Some(samples) => {
            let (x, grad) = (samples.take(x), samples.take(grad));
            samples.wrap(f(x, grad))
        }
        None => or(x, grad),
    }
}
