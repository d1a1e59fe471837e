//! Backends that run programs: how inputs are laid out, and where random numbers come from.

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Distribution, FloatDType, Shape, Tensor, TensorData, TensorPrimitive};
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_flex::FlexDevice;
use burn_spatial::comm::threads;
use burn_spatial::layout::Layout;
use burn_spatial::nn::WindowBackend;
use burn_spatial::{Grid, Mesh, Spatial, SpatialBackend, SpatialDevice};

/// A backend that runs programs.
pub trait Lab: WindowBackend {
    /// Whether tensors have layouts.
    const SPLIT: bool;

    /// A float tensor that lies as `layout` says; made from this rank's block where `blocks`, else cut out of the whole.
    fn float(data: TensorData, layout: &Layout, blocks: bool, device: &Self::Device) -> FloatTensor<Self>;

    /// The same of integers.
    fn int(data: TensorData, layout: &Layout, blocks: bool, device: &Self::Device) -> IntTensor<Self>;

    /// Starts the random stream.
    fn start(seed: u64, device: &Self::Device);

    /// The next random tensor; every backend draws the same.
    fn random(shape: Shape, distribution: Distribution, device: &Self::Device) -> FloatTensor<Self>;
}

/// The device of one rank that belongs to the calling thread: plain backends take its random numbers.
fn one_rank() -> SpatialDevice<FlexDevice> {
    thread_local! {
        static ONE: SpatialDevice<FlexDevice> = {
            let world = threads::world(1).remove(0);
            SpatialDevice::new(FlexDevice, Mesh::new(world, Grid::ONE).expect("one rank")).expect("a device")
        };
    }
    ONE.with(Clone::clone)
}

macro_rules! plain {
    ($backend:ty) => {
        impl Lab for $backend {
            const SPLIT: bool = false;

            fn float(data: TensorData, _: &Layout, _: bool, device: &Self::Device) -> FloatTensor<Self> {
                Self::float_from_data(data, device)
            }

            fn int(data: TensorData, _: &Layout, _: bool, device: &Self::Device) -> IntTensor<Self> {
                Self::int_from_data(data, device)
            }

            fn start(seed: u64, _: &Self::Device) {
                Spatial::<Flex>::seed(&one_rank(), seed);
            }

            fn random(shape: Shape, distribution: Distribution, device: &Self::Device) -> FloatTensor<Self> {
                let drawn = Spatial::<Flex>::float_random(shape, distribution, &one_rank(), FloatDType::F64);
                let drawn = Tensor::<Spatial<Flex>, 1>::from_primitive(TensorPrimitive::Float(drawn));
                Self::float_from_data(drawn.into_data(), device)
            }
        }
    };
}

use burn::tensor::ops::{FloatTensorOps, IntTensorOps};
plain!(Flex);
plain!(Autodiff<Flex>);

impl<C: CheckpointStrategy> Lab for Autodiff<Spatial<Flex>, C> {
    const SPLIT: bool = true;

    fn float(data: TensorData, layout: &Layout, blocks: bool, device: &Self::Device) -> FloatTensor<Self> {
        if blocks {
            return Self::place_local(block::<f64>(&data, layout, device), layout.clone(), device);
        }
        Self::relayout(Self::float_from_data(data, device), layout)
    }

    fn int(data: TensorData, layout: &Layout, blocks: bool, device: &Self::Device) -> IntTensor<Self> {
        if blocks {
            return Self::place_local_int(block::<i64>(&data, layout, device), layout.clone(), device);
        }
        Self::relayout_int(Self::int_from_data(data, device), layout)
    }

    fn start(seed: u64, device: &Self::Device) {
        Self::seed(device, seed);
    }

    fn random(shape: Shape, distribution: Distribution, device: &Self::Device) -> FloatTensor<Self> {
        Self::float_random(shape, distribution, device, FloatDType::F64)
    }
}

/// What this rank stores of `data`.
fn block<E: burn::tensor::Element>(data: &TensorData, layout: &Layout, device: &SpatialDevice<FlexDevice>) -> TensorData {
    let coords = device.mesh().coords();
    // Flat positions in the whole, axis by axis, the slowest first.
    let mut positions = vec![0];
    for axis in layout.axes() {
        let (start, end) = axis.owned(coords);
        positions = positions.iter().flat_map(|p| (start..end).map(move |i| p * axis.extent() + i)).collect();
    }
    let values = data.as_slice::<E>().expect("the type of the data");
    TensorData::new(positions.iter().map(|p| values[*p]).collect::<Vec<E>>(), layout.local_shape(coords))
}
