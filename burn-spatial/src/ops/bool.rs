//! Bool tensors.

use burn_backend::ops::BoolTensorOps;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn_backend::{ExecutionError, Scalar, TensorData};
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};

use super::*;
use crate::Spatial;
use crate::kernels::LocalKernels;
use crate::kind::{Bool, Float, Int};

macro_rules! binary {
    ($($name:ident),* $(,)?) => {$(
        fn $name(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self> {
            zip::<B, Bool, Bool, Bool>(lhs, rhs, B::$name)
        }
    )*};
}

macro_rules! scalar {
    ($($name:ident),* $(,)?) => {$(
        fn $name(lhs: BoolTensor<Self>, rhs: Scalar) -> BoolTensor<Self> {
            map::<B, Bool, Bool>(lhs, |t| B::$name(t, rhs))
        }
    )*};
}

impl<B: LocalKernels> BoolTensorOps<Self> for Spatial<B> {
    fn bool_empty(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self> {
        Self::bool_zeros(shape, device, dtype)
    }

    fn bool_zeros(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self> {
        constant::<B, Bool>(shape, device, |s, d| B::bool_zeros(s, d, dtype))
    }

    fn bool_ones(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self> {
        constant::<B, Bool>(shape, device, |s, d| B::bool_ones(s, d, dtype))
    }

    /// Collective where the tensor is split.
    fn bool_into_data(tensor: BoolTensor<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::bool_into_data(tensor.into_whole())
    }

    fn bool_from_data(data: TensorData, device: &Device<Self>) -> BoolTensor<Self> {
        SpatialTensor::input(B::bool_from_data(data, device.inner_device()), device)
    }

    fn bool_into_int(tensor: BoolTensor<Self>, out_dtype: IntDType) -> IntTensor<Self> {
        map::<B, Bool, Int>(tensor, |t| B::bool_into_int(t, out_dtype))
    }

    fn bool_into_float(tensor: BoolTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> {
        map::<B, Bool, Float>(tensor, |t| B::bool_into_float(t, out_dtype))
    }

    fn bool_device(tensor: &BoolTensor<Self>) -> Device<Self> {
        tensor.device().clone()
    }

    fn bool_to_device(tensor: BoolTensor<Self>, device: &Device<Self>) -> BoolTensor<Self> {
        if tensor.device() == device {
            return tensor;
        }
        SpatialTensor::full(B::bool_to_device(tensor.into_whole(), device.inner_device()), device.clone())
    }

    fn bool_reshape(tensor: BoolTensor<Self>, shape: Shape) -> BoolTensor<Self> {
        reshape(tensor, shape)
    }

    fn bool_slice(tensor: BoolTensor<Self>, slices: &[Slice]) -> BoolTensor<Self> {
        slice(tensor, slices, "bool_slice")
    }

    fn bool_slice_assign(tensor: BoolTensor<Self>, slices: &[Slice], value: BoolTensor<Self>) -> BoolTensor<Self> {
        slice_assign(tensor, slices, value, "bool_slice_assign")
    }

    fn bool_mask_where(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self> {
        choose::<B, Bool, Bool>(tensor, mask, value, B::bool_mask_where)
    }

    fn bool_mask_fill(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> BoolTensor<Self> {
        masked::<B, Bool, Bool>(tensor, mask, |t, m| B::bool_mask_fill(t, m, value))
    }

    fn bool_gather(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>) -> BoolTensor<Self> {
        gather::<B, Bool>(dim, tensor, indices, "bool_gather", |t, i| B::bool_gather(dim, t, i))
    }

    fn bool_scatter_or(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self> {
        scatter::<B, Bool>(dim, tensor, indices, value, "bool_scatter_or", |t, i, v| B::bool_scatter_or(dim, t, i, v))
    }

    fn bool_select(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>) -> BoolTensor<Self> {
        select::<B, Bool>(tensor, dim, indices, "bool_select", |t, i| B::bool_select(t, dim, i))
    }

    fn bool_select_or(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self> {
        let or = |tensor: B::BoolTensorPrimitive, dim, indices, value| {
            let (dtype, device) = (tensor.dtype(), B::bool_device(&tensor));
            let result = B::bool_select_or(tensor, dim, indices, value);
            if result.dtype() == dtype {
                return result;
            }
            // Flex calls the result U8, and would not combine it with other booleans.
            let mut data = <Bool as Kind<B>>::into_data(result);
            data.dtype = dtype;
            B::bool_from_data(data, &device)
        };
        select_add::<B, Bool>(tensor, dim, indices, value, "bool_select_or", ReduceOp::Or, or, B::bool_or)
    }

    fn bool_repeat_dim(tensor: BoolTensor<Self>, dim: usize, times: usize) -> BoolTensor<Self> {
        repeat_dim(tensor, dim, times)
    }

    fn bool_cat(tensors: Vec<BoolTensor<Self>>, dim: usize) -> BoolTensor<Self> {
        cat(tensors, dim, "bool_cat")
    }

    binary!(bool_equal, bool_not_equal, bool_and, bool_or, bool_xor);

    scalar!(bool_equal_elem, bool_not_equal_elem);

    fn bool_not(tensor: BoolTensor<Self>) -> BoolTensor<Self> {
        map::<B, Bool, Bool>(tensor, B::bool_not)
    }

    fn bool_swap_dims(tensor: BoolTensor<Self>, dim1: usize, dim2: usize) -> BoolTensor<Self> {
        swap_dims(tensor, dim1, dim2)
    }

    fn bool_permute(tensor: BoolTensor<Self>, axes: &[usize]) -> BoolTensor<Self> {
        permute(tensor, axes)
    }

    fn bool_flip(tensor: BoolTensor<Self>, axes: &[usize]) -> BoolTensor<Self> {
        flip::<B, Bool>(tensor, axes, "bool_flip", |t| B::bool_flip(t, axes))
    }

    fn bool_any(tensor: BoolTensor<Self>) -> BoolTensor<Self> {
        reduce::<B, Bool>(tensor, ReduceOp::Or, B::bool_any, |t, _| t)
    }

    fn bool_any_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self> {
        reduce_dim::<B, Bool>(tensor, dim, ReduceOp::Or, |t| B::bool_any_dim(t, dim), |t, _| t)
    }

    fn bool_all(tensor: BoolTensor<Self>) -> BoolTensor<Self> {
        reduce::<B, Bool>(tensor, ReduceOp::And, B::bool_all, |t, _| t)
    }

    fn bool_all_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self> {
        reduce_dim::<B, Bool>(tensor, dim, ReduceOp::And, |t| B::bool_all_dim(t, dim), |t, _| t)
    }

    fn bool_argwhere(tensor: BoolTensor<Self>, out_dtype: IntDType) -> impl Future<Output = IntTensor<Self>> + 'static + Send {
        let device = tensor.device().clone();
        let whole = tensor.gathered("bool_argwhere");
        async move { SpatialTensor::full(B::bool_argwhere(whole, out_dtype).await, device) }
    }

    fn bool_expand(tensor: BoolTensor<Self>, shape: Shape) -> BoolTensor<Self> {
        expand(tensor, shape)
    }

    fn bool_unfold(tensor: BoolTensor<Self>, dim: usize, size: usize, step: usize) -> BoolTensor<Self> {
        unfold::<B, Bool>(tensor, dim, size, step, "bool_unfold", |t| B::bool_unfold(t, dim, size, step))
    }
}
