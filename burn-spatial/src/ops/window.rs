//! Convolutions and pools over split volumes: the halo comes to the block, the kernel of the inner backend's room works
//! on it, gradients of halos go back where they came from.

use std::sync::Arc;

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};
use burn_std::Shape;

use super::{split_over, sum_dim};
use crate::Spatial;
use crate::device::{RankContext, SpatialDevice};
use crate::halo::{AxisNeed, AxisWindow, Plan, WindowPlan, exchange, exchange_add};
use crate::kernels::{self, Window};
use crate::kind::{Float, Int};
use crate::layout::{Axis, Layout, Storage};
use crate::mesh::AxisSet;
use crate::nn::{ConvSpec, PaddingMode, PoolSpec, WindowBackend};
use crate::tensor::{SpatialTensor, communicated};

type Tensor<B> = SpatialTensor<B, Float>;

/// A window operation on one volume: layouts, and what this rank does.
struct Windowed {
    /// How the input has to lie.
    input: Layout,
    /// How the output lies, with the input's channels.
    output: Layout,
    /// The halo exchange.
    plan: Arc<Plan>,
    /// The geometry on the assembled block.
    local: Window,
    /// Global position of the block's first voxel.
    origin: [isize; 3],
    /// Extents of the whole input volume.
    volume: [usize; 3],
}

impl Windowed {
    /// The rule: batch and volume stay split, channels are whole, a spatial axis whose output has fewer voxels than
    /// ranks is whole.
    fn new(context: &RankContext, x: &Layout, windows: [AxisWindow; 3]) -> Windowed {
        let mut input = x.clone().with_pending(AxisSet::EMPTY);
        for dim in 0..5 {
            let one = matches!(input.dim(dim), [] | [Axis { storage: Storage::Full | Storage::Split { .. }, .. }]);
            if dim == 1 || !one {
                input = input.full_dim(dim);
            }
        }
        let mut output = input.clone();
        for (i, window) in windows.iter().enumerate() {
            let axis = axis_of(&input, 2 + i);
            let out = window.output_axis(&axis).unwrap_or_else(|| {
                tracing::debug!("axis {} of {input} has fewer outputs than ranks: made whole", 2 + i);
                input = input.full_dim(2 + i);
                Axis::full(window.output(axis.extent))
            });
            output = output.with_dim(2 + i, vec![out]);
        }
        let coords = context.mesh.coords();
        let spatial: [WindowPlan; 3] =
            std::array::from_fn(|i| WindowPlan::new(&windows[i], &axis_of(&input, 2 + i), &axis_of(&output, 2 + i), coords));
        let stored = input.local_shape(coords);
        let mut axes = vec![Axis::full(stored[0]), Axis::full(stored[1])];
        let mut needs = vec![AxisNeed::whole(stored[0]), AxisNeed::whole(stored[1])];
        for (i, plan) in spatial.iter().enumerate() {
            axes.push(axis_of(&input, 2 + i));
            needs.push(plan.need.clone());
        }
        Windowed {
            plan: context.plan(&axes, &needs),
            local: std::array::from_fn(|i| spatial[i].local),
            origin: std::array::from_fn(|i| spatial[i].origin),
            volume: std::array::from_fn(|i| input.extent(2 + i)),
            input,
            output,
        }
    }

    /// This rank's block of `x` with its halo. Collective.
    fn gather<B: Backend>(&self, context: &RankContext, x: Tensor<B>) -> FloatTensor<B> {
        let device = x.device().clone();
        let own = x.to_layout(&self.input).settle().0;
        self.count(context);
        communicated(exchange::<B, Float>(&context.mesh, &self.plan, own, device.inner_device()))
    }

    /// The gradient of a block with halo, added where it came from. Collective.
    fn scatter<B: Backend>(&self, context: &RankContext, block: FloatTensor<B>, device: SpatialDevice<B::Device>) -> Tensor<B> {
        self.count(context);
        let own = communicated(exchange_add::<B, Float>(&context.mesh, &self.plan, block, device.inner_device()));
        SpatialTensor::new(own, self.input.clone(), device)
    }

    fn count(&self, context: &RankContext) {
        if !self.plan.sends.is_empty() || !self.plan.receives.is_empty() {
            context.talking();
            context.stats.halo();
        }
    }

    /// The output's layout with `channels`.
    fn output(&self, channels: usize) -> Layout {
        self.output.with_dim(1, vec![Axis::full(channels)])
    }
}

/// The one axis of a dimension; extent 1 is whole.
fn axis_of(layout: &Layout, dim: usize) -> Axis {
    layout.dim(dim).first().cloned().unwrap_or(Axis::full(1))
}

fn dims(shape: &Shape) -> [usize; 5] {
    shape.dims()
}

fn conv_windows(spec: &ConvSpec, x: &Shape, weight: [usize; 5]) -> [AxisWindow; 3] {
    spec.window(dims(x), weight).unwrap_or_else(|error| panic!("{error}"));
    std::array::from_fn(|i| AxisWindow {
        kernel: weight[2 + i],
        stride: spec.stride[i],
        dilation: spec.dilation[i],
        low: spec.padding[i].0,
        high: spec.padding[i].1,
        periodic: spec.mode == PaddingMode::Periodic && spec.padding[i] != (0, 0),
    })
}

fn pool_windows(spec: &PoolSpec, x: &Shape) -> [AxisWindow; 3] {
    spec.window(dims(x)).unwrap_or_else(|error| panic!("{error}"));
    std::array::from_fn(|i| AxisWindow {
        kernel: spec.kernel[i],
        stride: spec.stride[i],
        dilation: 1,
        low: spec.padding[i],
        high: spec.padding[i],
        periodic: false,
    })
}

/// A parameter: whole on every rank.
fn parameter<B: Backend>(tensor: Tensor<B>) -> FloatTensor<B> {
    tensor.to_full().settle().0
}

/// What a backward pass on a split backend needs of an input: how it lay, and where.
#[derive(Clone, Debug)]
pub struct Placement<D> {
    pub(crate) layout: Layout,
    pub(crate) device: SpatialDevice<D>,
}

impl<B: Backend> WindowBackend for Spatial<B> {
    type Placement = Placement<B::Device>;

    fn placement(x: &FloatTensor<Self>) -> Self::Placement {
        Placement { layout: x.layout().clone(), device: x.device().clone() }
    }

    fn conv3d_padded(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        spec: &ConvSpec,
    ) -> FloatTensor<Self> {
        let device = x.device().clone();
        let context = device.context();
        let weight_dims = dims(&weight.shape());
        let windowed = Windowed::new(&context, x.layout(), conv_windows(spec, &x.shape(), weight_dims));
        let block = windowed.gather(&context, x);
        let y = kernels::conv3d::<B>(block, parameter(weight), bias.map(parameter), &windowed.local, spec.groups);
        SpatialTensor::new(y, windowed.output(weight_dims[0]), device)
    }

    fn conv3d_padded_x_grad(x: &Self::Placement, weight: FloatTensor<Self>, grad: FloatTensor<Self>, spec: &ConvSpec) -> FloatTensor<Self> {
        let device = x.device.clone();
        let context = device.context();
        let weight_dims = dims(&weight.shape());
        let windowed = Windowed::new(&context, &x.layout, conv_windows(spec, &x.layout.shape(), weight_dims));
        let grad = grad.to_layout(&windowed.output(weight_dims[0])).settle().0;
        let block = kernels::conv3d_data_grad::<B>(grad, parameter(weight), &windowed.local, spec.groups);
        windowed.scatter(&context, block, device)
    }

    fn conv3d_padded_weight_grad(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        weight_shape: [usize; 5],
        spec: &ConvSpec,
    ) -> FloatTensor<Self> {
        let device = x.device().clone();
        let context = device.context();
        let windowed = Windowed::new(&context, x.layout(), conv_windows(spec, &x.shape(), weight_shape));
        let output = windowed.output(weight_shape[0]);
        let block = windowed.gather(&context, x);
        let grad = grad.to_layout(&output).settle().0;
        let share = kernels::conv3d_weight_grad::<B>(block, grad, weight_shape, &windowed.local, spec.groups);
        let layout = Layout::full(&weight_shape).with_pending(output.split_over());
        SpatialTensor::new(share, layout, device).gradient()
    }

    fn conv3d_padded_bias_grad(grad: FloatTensor<Self>) -> FloatTensor<Self> {
        bias_grad(grad)
    }

    fn max_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> (FloatTensor<Self>, IntTensor<Self>) {
        let device = x.device().clone();
        let context = device.context();
        let windowed = Windowed::new(&context, x.layout(), pool_windows(spec, &x.shape()));
        let output = windowed.output.clone();
        let block = windowed.gather(&context, x);
        let (y, indices) = kernels::max_pool3d::<B>(block, &windowed.local, windowed.origin, windowed.volume);
        let indices: SpatialTensor<B, Int> = SpatialTensor::new(indices, output.clone(), device.clone());
        (SpatialTensor::new(y, output, device), indices)
    }

    fn max_pool3d_grad(x: &Self::Placement, grad: FloatTensor<Self>, indices: IntTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        let device = x.device.clone();
        let context = device.context();
        let windowed = Windowed::new(&context, &x.layout, pool_windows(spec, &x.layout.shape()));
        let grad = grad.to_layout(&windowed.output).settle().0;
        let indices = indices.to_layout(&windowed.output).settle().0;
        let block = kernels::max_pool3d_grad::<B>(grad, indices, &windowed.local, windowed.origin, windowed.volume);
        windowed.scatter(&context, block, device)
    }

    fn avg_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        let device = x.device().clone();
        let context = device.context();
        let windowed = Windowed::new(&context, x.layout(), pool_windows(spec, &x.shape()));
        let block = windowed.gather(&context, x);
        SpatialTensor::new(kernels::avg_pool3d::<B>(block, &windowed.local, spec.count()), windowed.output, device)
    }

    fn avg_pool3d_grad(x: &Self::Placement, grad: FloatTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        let device = x.device.clone();
        let context = device.context();
        let windowed = Windowed::new(&context, &x.layout, pool_windows(spec, &x.layout.shape()));
        let grad = grad.to_layout(&windowed.output).settle().0;
        let block = kernels::avg_pool3d_grad::<B>(grad, &windowed.local, spec.count());
        windowed.scatter(&context, block, device)
    }
}

/// The sum over everything but channels, as a gradient of a whole parameter.
pub(crate) fn bias_grad<B: Backend>(grad: Tensor<B>) -> Tensor<B> {
    let channels = grad.shape()[1];
    // A channel split over ranks has no place in a parameter.
    let grad = if split_over(grad.layout().dim(1)).is_empty() {
        grad
    } else {
        let layout = grad.layout().full_dim(1);
        grad.to_layout(&layout)
    };
    let scale = |t, n: usize| B::float_mul_scalar(t, (n as f64).into());
    let mut sum = grad;
    for dim in (0..sum.rank()).rev().filter(|d| *d != 1) {
        sum = sum_dim::<B, Float>(sum, dim, |t| B::float_sum_dim(t, dim), scale);
    }
    let sum = super::reshape(sum, Shape::from(vec![channels]));
    let layout = sum.layout().materialized_dim(0);
    if layout == *sum.layout() { sum.gradient() } else { sum.to_layout(&layout) }
}
