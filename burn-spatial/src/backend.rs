//! The backend: types, and what is not an operation on tensors.

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError};

use crate::device::SpatialDevice;
use crate::kernels::LocalKernels;
use crate::kind::{Bool, Float, Int};
use crate::ops::SpatialQuantized;
use crate::tensor::SpatialTensor;

/// A backend whose tensors keep their global shape while every rank stores its block; `B` computes on the blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spatial<B>(PhantomData<B>);

impl<B: LocalKernels> BackendTypes for Spatial<B> {
    type Device = SpatialDevice<B::Device>;
    type FloatTensorPrimitive = SpatialTensor<B, Float>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = SpatialTensor<B, Int>;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = SpatialTensor<B, Bool>;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = SpatialQuantized<B>;
}

impl<B: LocalKernels> Backend for Spatial<B> {
    fn name(device: &Self::Device) -> String {
        format!("spatial<{}>", B::name(device.inner_device()))
    }

    /// Seeds this rank's stream; ranks that are to draw the same numbers pass the same seed.
    fn seed(device: &Self::Device, seed: u64) {
        device.context().generator.seed(seed);
        B::seed(device.inner_device(), seed);
    }

    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        B::sync(device.inner_device())
    }

    fn memory_cleanup(device: &Self::Device) {
        B::memory_cleanup(device.inner_device());
    }

    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        B::supports_dtype(device.inner_device(), dtype)
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device.inner_device(), dtype)
    }

    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}
