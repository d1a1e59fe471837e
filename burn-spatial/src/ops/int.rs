//! Int tensors.

use std::ops::Range;

use burn_backend::ops::IntTensorOps;
use burn_backend::tensor::IndexingUpdateOp;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn_backend::{Distribution, ExecutionError, Scalar, TensorData, TensorMetadata, get_device_settings};
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};

use super::*;
use crate::Spatial;
use crate::kernels::LocalKernels;
use crate::kind::{Bool, Float, Int};

macro_rules! unary {
    ($($name:ident),* $(,)?) => {$(
        fn $name(tensor: IntTensor<Self>) -> IntTensor<Self> {
            map::<B, Int, Int>(tensor, B::$name)
        }
    )*};
}

macro_rules! scalar {
    ($($name:ident($($arg:ident),+)),* $(,)?) => {$(
        fn $name(tensor: IntTensor<Self>, $($arg: Scalar),+) -> IntTensor<Self> {
            map::<B, Int, Int>(tensor, |t| B::$name(t, $($arg),+))
        }
    )*};
}

macro_rules! binary {
    ($($name:ident),* $(,)?) => {$(
        fn $name(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> {
            zip::<B, Int, Int, Int>(lhs, rhs, B::$name)
        }
    )*};
}

macro_rules! compare {
    ($($name:ident),* $(,)?) => {$(
        fn $name(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
            zip::<B, Int, Int, Bool>(lhs, rhs, |a, b| B::$name(a, b, out_dtype))
        }
    )*};
}

macro_rules! compare_scalar {
    ($($name:ident),* $(,)?) => {$(
        fn $name(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> {
            map::<B, Int, Bool>(lhs, |a| B::$name(a, rhs, out_dtype))
        }
    )*};
}

/// Results made of all elements up to each.
macro_rules! scans {
    ($($name:ident),*) => {$(
        fn $name(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
            scan::<B, Int>(tensor, dim, stringify!($name), |t| B::$name(t, dim))
        }
    )*};
}

macro_rules! lines {
    ($($name:ident($($arg:ident: $type:ty),*)),* $(,)?) => {$(
        fn $name(tensor: IntTensor<Self>, dim: usize $(, $arg: $type)*) -> IntTensor<Self> {
            along::<B, Int, Int>(tensor, dim, stringify!($name), |t| B::$name(t, dim $(, $arg)*))
        }
    )*};
}

fn times<B: LocalKernels>(t: IntTensor<B>, n: usize) -> IntTensor<B> {
    B::int_mul_scalar(t, (n as i64).into())
}

fn power<B: LocalKernels>(t: IntTensor<B>, n: usize) -> IntTensor<B> {
    B::int_powi_scalar(t, (n as i64).into())
}

fn largest<B: LocalKernels>(tensor: IntTensor<Spatial<B>>, dim: usize, op: &'static str) -> (IntTensor<Spatial<B>>, IntTensor<Spatial<B>>) {
    extreme::<B, Int>(tensor, dim, op, ReduceOp::Max, |t| B::int_max_dim_with_indices(t, dim), candidates::<B>)
}

fn smallest<B: LocalKernels>(
    tensor: IntTensor<Spatial<B>>,
    dim: usize,
    op: &'static str,
) -> (IntTensor<Spatial<B>>, IntTensor<Spatial<B>>) {
    extreme::<B, Int>(tensor, dim, op, ReduceOp::Min, |t| B::int_min_dim_with_indices(t, dim), candidates::<B>)
}

/// Global positions where a shard holds the extreme, the extent where it does not.
fn candidates<B: LocalKernels>(mine: &IntTensor<B>, best: &IntTensor<B>, index: IntTensor<B>, start: usize, extent: usize) -> IntTensor<B> {
    let dtype = get_device_settings::<B>(&B::int_device(mine)).bool_dtype;
    let lost = B::int_not_equal(mine.clone(), best.clone(), dtype);
    B::int_mask_fill(B::int_add_scalar(index, (start as i64).into()), lost, (extent as i64).into())
}

impl<B: LocalKernels> IntTensorOps<Self> for Spatial<B> {
    fn int_empty(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        Self::int_zeros(shape, device, dtype)
    }

    /// Collective where the tensor is split or a sum is pending.
    fn int_into_data(tensor: IntTensor<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::int_into_data(tensor.into_whole())
    }

    fn int_from_data(data: TensorData, device: &Device<Self>) -> IntTensor<Self> {
        SpatialTensor::input(B::int_from_data(data, device.inner_device()), device)
    }

    fn int_device(tensor: &IntTensor<Self>) -> Device<Self> {
        tensor.device().clone()
    }

    fn int_to_device(tensor: IntTensor<Self>, device: &Device<Self>) -> IntTensor<Self> {
        if tensor.device() == device {
            return tensor;
        }
        SpatialTensor::full(B::int_to_device(tensor.into_whole(), device.inner_device()), device.clone())
    }

    fn int_reshape(tensor: IntTensor<Self>, shape: Shape) -> IntTensor<Self> {
        reshape(tensor, shape)
    }

    fn int_slice(tensor: IntTensor<Self>, slices: &[Slice]) -> IntTensor<Self> {
        slice(tensor, slices, "int_slice")
    }

    fn int_slice_assign(tensor: IntTensor<Self>, slices: &[Slice], value: IntTensor<Self>) -> IntTensor<Self> {
        slice_assign(tensor, slices, value, "int_slice_assign")
    }

    fn int_into_float(tensor: IntTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> {
        map::<B, Int, Float>(tensor, |t| B::int_into_float(t, out_dtype))
    }

    fn int_mask_where(tensor: IntTensor<Self>, mask: BoolTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self> {
        choose::<B, Int, Bool>(tensor, mask, value, B::int_mask_where)
    }

    fn int_mask_fill(tensor: IntTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> IntTensor<Self> {
        masked::<B, Int, Bool>(tensor, mask, |t, m| B::int_mask_fill(t, m, value))
    }

    fn int_gather(dim: usize, tensor: IntTensor<Self>, indices: IntTensor<Self>) -> IntTensor<Self> {
        gather::<B, Int>(dim, tensor, indices, "int_gather", |t, i| B::int_gather(dim, t, i))
    }

    fn int_scatter_add(dim: usize, tensor: IntTensor<Self>, indices: IntTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self> {
        scatter::<B, Int>(dim, tensor, indices, value, "int_scatter_add", |t, i, v| B::int_scatter_add(dim, t, i, v))
    }

    fn int_scatter_nd(
        data: IntTensor<Self>,
        indices: IntTensor<Self>,
        values: IntTensor<Self>,
        reduction: IndexingUpdateOp,
    ) -> IntTensor<Self> {
        let (indices, values) = (indices.gathered("int_scatter_nd"), values.gathered("int_scatter_nd"));
        fallback::<B, Int, Int>(data, "int_scatter_nd", |t| B::int_scatter_nd(t, indices, values, reduction))
    }

    fn int_gather_nd(data: IntTensor<Self>, indices: IntTensor<Self>) -> IntTensor<Self> {
        let indices = indices.gathered("int_gather_nd");
        fallback::<B, Int, Int>(data, "int_gather_nd", |t| B::int_gather_nd(t, indices))
    }

    fn int_select(tensor: IntTensor<Self>, dim: usize, indices: IntTensor<Self>) -> IntTensor<Self> {
        select::<B, Int>(tensor, dim, indices, "int_select", |t, i| B::int_select(t, dim, i))
    }

    fn int_select_add(tensor: IntTensor<Self>, dim: usize, indices: IntTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self> {
        select_add::<B, Int>(tensor, dim, indices, value, "int_select_add", ReduceOp::Sum, B::int_select_add, B::int_add)
    }

    fn int_repeat_dim(tensor: IntTensor<Self>, dim: usize, times: usize) -> IntTensor<Self> {
        repeat_dim(tensor, dim, times)
    }

    fn int_cat(tensors: Vec<IntTensor<Self>>, dim: usize) -> IntTensor<Self> {
        cat(tensors, dim, "int_cat")
    }

    compare!(int_equal, int_not_equal, int_greater, int_greater_equal, int_lower, int_lower_equal);

    compare_scalar!(int_equal_elem, int_not_equal_elem, int_greater_elem, int_greater_equal_elem, int_lower_elem, int_lower_equal_elem);

    binary!(
        int_add,
        int_sub,
        int_mul,
        int_div,
        int_remainder,
        int_powi,
        bitwise_and,
        bitwise_or,
        bitwise_xor,
        bitwise_left_shift,
        bitwise_right_shift,
    );

    scalar!(
        int_add_scalar(rhs),
        int_sub_scalar(rhs),
        int_mul_scalar(rhs),
        int_div_scalar(rhs),
        int_remainder_scalar(rhs),
        int_powi_scalar(rhs),
        int_powi_scalar_impl(rhs),
        int_clamp_min(min),
        int_clamp_max(max),
        int_clamp(min, max),
        bitwise_and_scalar(rhs),
        bitwise_or_scalar(rhs),
        bitwise_xor_scalar(rhs),
        bitwise_left_shift_scalar(rhs),
        bitwise_right_shift_scalar(rhs),
    );

    unary!(int_neg, int_abs, int_sign, bitwise_not);

    fn int_matmul(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> {
        matmul::matmul::<B, Int>(lhs, rhs, B::int_matmul)
    }

    fn int_zeros(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        constant::<B, Int>(shape, device, |s, d| B::int_zeros(s, d, dtype))
    }

    fn int_ones(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        constant::<B, Int>(shape, device, |s, d| B::int_ones(s, d, dtype))
    }

    fn int_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        constant::<B, Int>(shape, device, |s, d| B::int_full(s, fill_value, d, dtype))
    }

    fn int_sum(tensor: IntTensor<Self>) -> IntTensor<Self> {
        reduce::<B, Int>(tensor, ReduceOp::Sum, B::int_sum, times::<B>)
    }

    fn int_sum_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        reduce_dim::<B, Int>(tensor, dim, ReduceOp::Sum, |t| B::int_sum_dim(t, dim), times::<B>)
    }

    fn int_prod(tensor: IntTensor<Self>) -> IntTensor<Self> {
        reduce::<B, Int>(tensor, ReduceOp::Prod, B::int_prod, power::<B>)
    }

    fn int_prod_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        reduce_dim::<B, Int>(tensor, dim, ReduceOp::Prod, |t| B::int_prod_dim(t, dim), power::<B>)
    }

    fn int_mean(tensor: IntTensor<Self>) -> IntTensor<Self> {
        if tensor.context().mesh.effective(tensor.layout().split_over()).is_empty() {
            return reduce::<B, Int>(tensor, ReduceOp::Sum, B::int_mean, |t, _| t);
        }
        let elements = tensor.shape().num_elements() as i64;
        map::<B, Int, Int>(Self::int_sum(tensor), |t| B::int_div_scalar(t, elements.into()))
    }

    fn int_mean_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        let over = split_over(tensor.layout().dim(dim));
        if tensor.context().mesh.effective(over).is_empty() {
            return reduce_dim::<B, Int>(tensor, dim, ReduceOp::Sum, |t| B::int_mean_dim(t, dim), |t, _| t);
        }
        let extent = tensor.layout().extent(dim) as i64;
        map::<B, Int, Int>(Self::int_sum_dim(tensor, dim), |t| B::int_div_scalar(t, extent.into()))
    }

    scans!(int_cumsum, int_cumprod, int_cummin, int_cummax);

    lines!(
        int_topk(k: usize), int_argtopk(k: usize), int_sort(descending: bool),
        int_argsort(descending: bool),
    );

    fn int_sort_with_indices(tensor: IntTensor<Self>, dim: usize, descending: bool) -> (IntTensor<Self>, IntTensor<Self>) {
        along_pair::<B, Int, Int, Int>(tensor, dim, "int_sort_with_indices", |t| B::int_sort_with_indices(t, dim, descending))
    }

    fn int_argmax(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        largest::<B>(tensor, dim, "int_argmax").1
    }

    fn int_argmin(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        smallest::<B>(tensor, dim, "int_argmin").1
    }

    fn int_max(tensor: IntTensor<Self>) -> IntTensor<Self> {
        reduce::<B, Int>(tensor, ReduceOp::Max, B::int_max, |t, _| t)
    }

    fn int_max_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        reduce_dim::<B, Int>(tensor, dim, ReduceOp::Max, |t| B::int_max_dim(t, dim), |t, _| t)
    }

    fn int_max_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>) {
        largest::<B>(tensor, dim, "int_max_dim_with_indices")
    }

    fn int_min(tensor: IntTensor<Self>) -> IntTensor<Self> {
        reduce::<B, Int>(tensor, ReduceOp::Min, B::int_min, |t, _| t)
    }

    fn int_min_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        reduce_dim::<B, Int>(tensor, dim, ReduceOp::Min, |t| B::int_min_dim(t, dim), |t, _| t)
    }

    fn int_min_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>) {
        smallest::<B>(tensor, dim, "int_min_dim_with_indices")
    }

    fn int_swap_dims(tensor: IntTensor<Self>, dim1: usize, dim2: usize) -> IntTensor<Self> {
        swap_dims(tensor, dim1, dim2)
    }

    fn int_permute(tensor: IntTensor<Self>, axes: &[usize]) -> IntTensor<Self> {
        permute(tensor, axes)
    }

    fn int_flip(tensor: IntTensor<Self>, axes: &[usize]) -> IntTensor<Self> {
        flip::<B, Int>(tensor, axes, "int_flip", |t| B::int_flip(t, axes))
    }

    fn int_random(shape: Shape, distribution: Distribution, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        let draw = device.context().generator.next(distribution);
        SpatialTensor::random(draw, shape, dtype.into(), device.clone())
    }

    fn int_arange_step(range: Range<i64>, step: usize, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        SpatialTensor::full(B::int_arange_step(range, step, device.inner_device(), dtype), device.clone())
    }

    fn int_any(tensor: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        let any = map::<B, Int, Bool>(tensor, |t| B::int_not_equal_elem(t, 0i64.into(), out_dtype));
        reduce::<B, Bool>(any, ReduceOp::Or, B::bool_any, |t, _| t)
    }

    fn int_any_dim(tensor: IntTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> {
        let any = map::<B, Int, Bool>(tensor, |t| B::int_not_equal_elem(t, 0i64.into(), out_dtype));
        reduce_dim::<B, Bool>(any, dim, ReduceOp::Or, |t| B::bool_any_dim(t, dim), |t, _| t)
    }

    fn int_all(tensor: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        let all = map::<B, Int, Bool>(tensor, |t| B::int_not_equal_elem(t, 0i64.into(), out_dtype));
        reduce::<B, Bool>(all, ReduceOp::And, B::bool_all, |t, _| t)
    }

    fn int_all_dim(tensor: IntTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> {
        let all = map::<B, Int, Bool>(tensor, |t| B::int_not_equal_elem(t, 0i64.into(), out_dtype));
        reduce_dim::<B, Bool>(all, dim, ReduceOp::And, |t| B::bool_all_dim(t, dim), |t, _| t)
    }

    fn int_expand(tensor: IntTensor<Self>, shape: Shape) -> IntTensor<Self> {
        expand(tensor, shape)
    }

    fn int_cast(tensor: IntTensor<Self>, dtype: IntDType) -> IntTensor<Self> {
        map::<B, Int, Int>(tensor, |t| B::int_cast(t, dtype))
    }

    fn int_unfold(tensor: IntTensor<Self>, dim: usize, size: usize, step: usize) -> IntTensor<Self> {
        unfold::<B, Int>(tensor, dim, size, step, "int_unfold", |t| B::int_unfold(t, dim, size, step))
    }
}
