//! Quantized tensors are whole on every rank: parameters for inference are all that Burn quantizes.

use burn_backend::ops::QTensorOps;
use burn_backend::quantization::QuantizationParametersPrimitive;
use burn_backend::tensor::{Device, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{DType, ExecutionError, QTensorPrimitive, TensorData, TensorMetadata};
use burn_std::quantization::QuantScheme;
use burn_std::{FloatDType, Shape, Slice};

use super::*;
use crate::Spatial;
use crate::device::SpatialDevice;
use crate::kernels::LocalKernels;

/// A quantized tensor of the inner backend, the same on every rank.
#[derive(Clone, Debug)]
pub struct SpatialQuantized<B: LocalKernels> {
    inner: QuantizedTensor<B>,
    device: SpatialDevice<B::Device>,
}

impl<B: LocalKernels> TensorMetadata for SpatialQuantized<B> {
    fn dtype(&self) -> DType {
        self.inner.dtype()
    }

    fn shape(&self) -> Shape {
        self.inner.shape()
    }
}

impl<B: LocalKernels> QTensorPrimitive for SpatialQuantized<B> {
    fn scheme(&self) -> &QuantScheme {
        self.inner.scheme()
    }
}

impl<B: LocalKernels> SpatialQuantized<B> {
    fn map(self, f: impl FnOnce(QuantizedTensor<B>) -> QuantizedTensor<B>) -> Self {
        SpatialQuantized { inner: f(self.inner), device: self.device }
    }
}

impl<B: LocalKernels> QTensorOps<Self> for Spatial<B> {
    fn q_from_data(data: TensorData, device: &Device<Self>) -> QuantizedTensor<Self> {
        SpatialQuantized { inner: B::q_from_data(data, device.inner_device()), device: device.clone() }
    }

    fn quantize(tensor: FloatTensor<Self>, scheme: &QuantScheme, qparams: QuantizationParametersPrimitive<Self>) -> QuantizedTensor<Self> {
        let device = tensor.device().clone();
        let qparams = QuantizationParametersPrimitive { scales: qparams.scales.gathered("quantize") };
        SpatialQuantized { inner: B::quantize(tensor.gathered("quantize"), scheme, qparams), device }
    }

    fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        SpatialTensor::full(B::dequantize(tensor.inner, dtype), tensor.device)
    }

    fn q_device(tensor: &QuantizedTensor<Self>) -> Device<Self> {
        tensor.device.clone()
    }

    fn q_to_device(tensor: QuantizedTensor<Self>, device: &Device<Self>) -> QuantizedTensor<Self> {
        SpatialQuantized { inner: B::q_to_device(tensor.inner, device.inner_device()), device: device.clone() }
    }

    fn q_reshape(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self> {
        tensor.map(|t| B::q_reshape(t, shape))
    }

    fn q_into_data(tensor: QuantizedTensor<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::q_into_data(tensor.inner)
    }

    fn q_expand(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self> {
        tensor.map(|t| B::q_expand(t, shape))
    }

    fn q_swap_dims(tensor: QuantizedTensor<Self>, dim1: usize, dim2: usize) -> QuantizedTensor<Self> {
        tensor.map(|t| B::q_swap_dims(t, dim1, dim2))
    }

    fn q_permute(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self> {
        tensor.map(|t| B::q_permute(t, axes))
    }

    fn q_flip(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self> {
        tensor.map(|t| B::q_flip(t, axes))
    }

    fn q_select(tensor: QuantizedTensor<Self>, dim: usize, indices: IntTensor<Self>) -> QuantizedTensor<Self> {
        let indices = indices.gathered("q_select");
        tensor.map(|t| B::q_select(t, dim, indices))
    }

    fn q_slice(tensor: QuantizedTensor<Self>, slices: &[Slice]) -> QuantizedTensor<Self> {
        tensor.map(|t| B::q_slice(t, slices))
    }
}
