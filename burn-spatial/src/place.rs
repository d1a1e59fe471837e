//! Placing tensors on the mesh and reading how they lie: for `Spatial<B>` and `Autodiff<Spatial<B>>` alike.

use burn::tensor::{Int, Tensor, TensorPrimitive};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, TensorData};

use crate::kernels::LocalKernels;
use crate::kind::{self, Float, Kind};
use crate::layout::Layout;
use crate::mesh::Grid;
use crate::tensor::SpatialTensor;
use crate::{Spatial, SpatialDevice};

/// Backends with layouts.
pub trait SpatialBackend: Backend {
    /// The process grid of a device's rank.
    fn grid(device: &Self::Device) -> Grid;

    /// A tensor from this rank's block under `layout`. Local.
    fn place_local(block: TensorData, layout: Layout, device: &Self::Device) -> FloatTensor<Self>;

    /// How a tensor lies.
    fn layout_of(tensor: &FloatTensor<Self>) -> Layout;

    /// The tensor under another layout. Collective where data has to move between ranks. Not tracked by autodiff: for
    /// inputs and results, not between layers.
    fn relayout(tensor: FloatTensor<Self>, layout: &Layout) -> FloatTensor<Self>;

    /// This rank's block as data. Collective where a sum is pending.
    fn block(tensor: FloatTensor<Self>) -> TensorData;

    /// [`SpatialBackend::place_local`] for integers.
    fn place_local_int(block: TensorData, layout: Layout, device: &Self::Device) -> IntTensor<Self>;

    /// [`SpatialBackend::relayout`] for integers.
    fn relayout_int(tensor: IntTensor<Self>, layout: &Layout) -> IntTensor<Self>;

    /// [`SpatialBackend::block`] for integers.
    fn block_int(tensor: IntTensor<Self>) -> TensorData;
}

/// Panics where a user's layout is one for another grid.
fn suits(layout: &Layout, grid: Grid) {
    layout.check(grid).unwrap_or_else(|error| panic!("{error}"));
}

/// A tensor under a user's layout.
fn relaid<B: LocalKernels, K: Kind<B>>(tensor: SpatialTensor<B, K>, layout: &Layout) -> SpatialTensor<B, K> {
    suits(layout, tensor.device().context().mesh.grid());
    assert_eq!(tensor.layout().shape(), layout.shape(), "{layout} is a layout of another shape");
    tensor.into_layout(layout)
}

fn placed<B: LocalKernels, K: Kind<B>>(block: TensorData, layout: Layout, device: &SpatialDevice<B::Device>) -> SpatialTensor<B, K> {
    suits(&layout, device.context().mesh.grid());
    let expected = layout.local_shape(device.context().mesh.coords());
    assert_eq!(block.shape, expected, "the block of this rank under {layout} has another shape");
    SpatialTensor::new(K::from_data(block, device.inner_device()), layout.summed(), device.clone())
}

impl<B: LocalKernels> SpatialBackend for Spatial<B> {
    fn grid(device: &Self::Device) -> Grid {
        device.context().mesh.grid()
    }

    fn place_local(block: TensorData, layout: Layout, device: &Self::Device) -> FloatTensor<Self> {
        placed::<B, Float>(block, layout, device)
    }

    fn layout_of(tensor: &FloatTensor<Self>) -> Layout {
        tensor.layout().clone()
    }

    fn relayout(tensor: FloatTensor<Self>, layout: &Layout) -> FloatTensor<Self> {
        relaid(tensor, layout)
    }

    fn block(tensor: FloatTensor<Self>) -> TensorData {
        <Float as Kind<B>>::into_data(tensor.settle().0)
    }

    fn place_local_int(block: TensorData, layout: Layout, device: &Self::Device) -> IntTensor<Self> {
        placed::<B, kind::Int>(block, layout, device)
    }

    fn relayout_int(tensor: IntTensor<Self>, layout: &Layout) -> IntTensor<Self> {
        relaid(tensor, layout)
    }

    fn block_int(tensor: IntTensor<Self>) -> TensorData {
        <kind::Int as Kind<B>>::into_data(tensor.settle().0)
    }
}

impl<B: SpatialBackend, C: CheckpointStrategy> SpatialBackend for Autodiff<B, C> {
    fn grid(device: &Self::Device) -> Grid {
        B::grid(device)
    }

    fn place_local(block: TensorData, layout: Layout, device: &Self::Device) -> FloatTensor<Self> {
        use burn_backend::AutodiffBackend;
        Self::from_inner(B::place_local(block, layout, device))
    }

    fn layout_of(tensor: &FloatTensor<Self>) -> Layout {
        B::layout_of(&tensor.primitive)
    }

    fn relayout(tensor: FloatTensor<Self>, layout: &Layout) -> FloatTensor<Self> {
        use burn_backend::AutodiffBackend;
        Self::from_inner(B::relayout(tensor.primitive, layout))
    }

    fn block(tensor: FloatTensor<Self>) -> TensorData {
        B::block(tensor.primitive)
    }

    fn place_local_int(block: TensorData, layout: Layout, device: &Self::Device) -> IntTensor<Self> {
        B::place_local_int(block, layout, device)
    }

    fn relayout_int(tensor: IntTensor<Self>, layout: &Layout) -> IntTensor<Self> {
        B::relayout_int(tensor, layout)
    }

    fn block_int(tensor: IntTensor<Self>) -> TensorData {
        B::block_int(tensor)
    }
}

/// A tensor of global shape from this rank's block under `layout`; no rank needs more than its block. Local.
///
/// # Panics
/// If the block's shape is not what `layout` says of this rank, or `layout` is one for another grid.
pub fn from_local<B: SpatialBackend, const D: usize>(block: TensorData, layout: Layout, device: &B::Device) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(B::place_local(block, layout, device)))
}

/// How a tensor lies on the mesh.
pub fn layout<B: SpatialBackend, const D: usize>(tensor: &Tensor<B, D>) -> Layout {
    B::layout_of(&tensor.clone().into_primitive().tensor())
}

/// The tensor under `layout`, with its sums made: what `layout` says of pending sums does not count. Collective. Gradients do not flow through: place inputs with it.
///
/// # Panics
/// If `layout` is one of another shape or for another grid, or is uniform where the tensor varies.
pub fn to_layout<B: SpatialBackend, const D: usize>(tensor: Tensor<B, D>, layout: &Layout) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(B::relayout(tensor.into_primitive().tensor(), layout)))
}

/// A volume `[N, C, ...spatial]` split over the grid as [`Layout::volume`] says. Collective.
pub fn split<B: SpatialBackend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    let target = Layout::volume(&tensor.dims(), B::grid(&tensor.device()));
    to_layout(tensor, &target)
}

/// The tensor whole on every rank. Collective.
pub fn to_full<B: SpatialBackend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    let target = Layout::full(&tensor.dims());
    to_layout(tensor, &target)
}

/// This rank's block as data. Collective where a sum is pending.
pub fn local<B: SpatialBackend, const D: usize>(tensor: Tensor<B, D>) -> TensorData {
    B::block(tensor.into_primitive().tensor())
}

/// [`from_local`] for integers, such as the classes of voxels. Local.
///
/// # Panics
/// If the block's shape is not what `layout` says of this rank, or `layout` is one for another grid.
pub fn from_local_int<B: SpatialBackend, const D: usize>(block: TensorData, layout: Layout, device: &B::Device) -> Tensor<B, D, Int> {
    Tensor::from_primitive(B::place_local_int(block, layout, device))
}

/// [`to_layout`] for integers. Collective.
pub fn to_layout_int<B: SpatialBackend, const D: usize>(tensor: Tensor<B, D, Int>, layout: &Layout) -> Tensor<B, D, Int> {
    Tensor::from_primitive(B::relayout_int(tensor.into_primitive(), layout))
}

/// [`local`] for integers: this rank's block. Collective where a sum is pending.
pub fn local_int<B: SpatialBackend, const D: usize>(tensor: Tensor<B, D, Int>) -> TensorData {
    B::block_int(tensor.into_primitive())
}
