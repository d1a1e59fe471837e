//! Float tensors.

use burn_backend::ops::{FloatTensorOps, GridSampleOptions};
use burn_backend::tensor::IndexingUpdateOp;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn_backend::{Distribution, ExecutionError, Scalar, TensorData, TensorMetadata, get_device_settings};
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};

use super::*;
use crate::kernels::{self, Arithmetic, LocalKernels};
use crate::kind::{Bool, Float, Int};
use crate::{Spatial, SpatialDevice};

/// Element-wise on one float tensor.
macro_rules! unary {
    ($($name:ident),* $(,)?) => {$(
        fn $name(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
            map::<B, Float, Float>(tensor, B::$name)
        }
    )*};
}

/// Element-wise on a tensor and scalars.
macro_rules! scalar {
    ($($name:ident($($arg:ident),+)),* $(,)?) => {$(
        fn $name(tensor: FloatTensor<Self>, $($arg: Scalar),+) -> FloatTensor<Self> {
            map::<B, Float, Float>(tensor, |t| B::$name(t, $($arg),+))
        }
    )*};
}

/// Element-wise on two tensors, with broadcasting.
macro_rules! binary {
    ($($name:ident),* $(,)?) => {$(
        fn $name(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
            zip::<B, Float, Float, Float>(lhs, rhs, B::$name)
        }
    )*};
}

/// Comparisons of two tensors.
macro_rules! compare {
    ($($name:ident),* $(,)?) => {$(
        fn $name(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
            zip::<B, Float, Float, Bool>(lhs, rhs, |a, b| B::$name(a, b, out_dtype))
        }
    )*};
}

/// Comparisons with a scalar.
macro_rules! compare_scalar {
    ($($name:ident),* $(,)?) => {$(
        fn $name(lhs: FloatTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> {
            map::<B, Float, Bool>(lhs, |a| B::$name(a, rhs, out_dtype))
        }
    )*};
}

/// Along whole lines of one dimension.
macro_rules! lines {
    ($($name:ident($($arg:ident: $type:ty),*)),* $(,)?) => {$(
        fn $name(tensor: FloatTensor<Self>, dim: usize $(, $arg: $type)*) -> FloatTensor<Self> {
            along::<B, Float, Float>(tensor, dim, stringify!($name), |t| B::$name(t, dim $(, $arg)*))
        }
    )*};
}

/// Results made of all elements up to each.
macro_rules! scans {
    ($($name:ident),*) => {$(
        fn $name(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
            scan::<B, Float>(tensor, dim, stringify!($name), |t| B::$name(t, dim))
        }
    )*};
}

/// Along whole lines of one dimension, giving positions.
macro_rules! line_positions {
    ($($name:ident($($arg:ident: $type:ty),*)),* $(,)?) => {$(
        fn $name(tensor: FloatTensor<Self>, dim: usize $(, $arg: $type)*) -> IntTensor<Self> {
            along::<B, Float, Int>(tensor, dim, stringify!($name), |t| B::$name(t, dim $(, $arg)*))
        }
    )*};
}

/// Arithmetic of blocks, of which one may be small.
fn broadcasting<B: LocalKernels>(lhs: FloatTensor<B>, rhs: FloatTensor<B>, left: Arithmetic, right: Arithmetic) -> FloatTensor<B> {
    if lhs.shape().num_elements() >= rhs.shape().num_elements() {
        kernels::arithmetic::<B>(lhs, rhs, left)
    } else {
        kernels::arithmetic::<B>(rhs, lhs, right)
    }
}

/// `t`, a sum of the type in which sums are made, as often as a uniform axis is long.
pub(super) fn times<B: LocalKernels>(t: FloatTensor<B>, n: usize) -> FloatTensor<B> {
    B::float_mul_scalar(t, (n as f64).into())
}

/// The mean of `n` elements from their `sum`, which may exceed the range of the tensor's own type.
fn wide_mean<B: LocalKernels>(
    tensor: SpatialTensor<B, Float>,
    sum: impl FnOnce(SpatialTensor<B, Float>) -> SpatialTensor<B, Float>,
    n: f64,
) -> SpatialTensor<B, Float> {
    let dtype = tensor.dtype();
    let sum = sum(widened(tensor));
    map::<B, Float, Float>(sum, |t| <Float as Kind<B>>::cast(B::float_div_scalar(t, n.into()), dtype))
}

fn largest<B: LocalKernels>(
    tensor: FloatTensor<Spatial<B>>,
    dim: usize,
    dtype: IntDType,
    op: &'static str,
) -> (FloatTensor<Spatial<B>>, IntTensor<Spatial<B>>) {
    extreme::<B, Float>(tensor, dim, op, ReduceOp::Max, |t| B::float_max_dim_with_indices(t, dim, dtype), candidates::<B>)
}

fn smallest<B: LocalKernels>(
    tensor: FloatTensor<Spatial<B>>,
    dim: usize,
    dtype: IntDType,
    op: &'static str,
) -> (FloatTensor<Spatial<B>>, IntTensor<Spatial<B>>) {
    extreme::<B, Float>(tensor, dim, op, ReduceOp::Min, |t| B::float_min_dim_with_indices(t, dim, dtype), candidates::<B>)
}

/// Global positions where a shard holds the extreme (or NaN, which wins), the extent where it does not.
fn candidates<B: LocalKernels>(
    mine: &FloatTensor<B>,
    best: &FloatTensor<B>,
    index: IntTensor<B>,
    start: usize,
    extent: usize,
) -> IntTensor<B> {
    let dtype = get_device_settings::<B>(&B::float_device(mine)).bool_dtype;
    let lost = B::bool_not(B::bool_or(B::float_equal(mine.clone(), best.clone(), dtype), B::float_is_nan(mine.clone(), dtype)));
    B::int_mask_fill(B::int_add_scalar(index, (start as i64).into()), lost, (extent as i64).into())
}

/// A whole tensor of this many bytes on every rank of several is likely a volume that should have come in blocks.
const WHOLE_VOLUME: usize = 256 << 20;

fn warn_of_whole_volumes<D: burn_backend::DeviceOps>(bytes: usize, device: &SpatialDevice<D>) {
    if bytes >= WHOLE_VOLUME && device.context().mesh.grid().ranks() > 1 {
        tracing::warn!(
            "from_data puts a whole tensor of {} MiB on every rank; place::from_local makes it of each rank's block",
            bytes >> 20
        );
    }
}

impl<B: LocalKernels> FloatTensorOps<Self> for Spatial<B> {
    fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        warn_of_whole_volumes(data.bytes.len(), device);
        SpatialTensor::input(B::float_from_data(data, device.inner_device()), device)
    }

    fn float_random(shape: Shape, distribution: Distribution, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let draw = device.context().generator.next(distribution);
        SpatialTensor::random(draw, shape, dtype.into(), device.clone())
    }

    fn float_zeros(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        constant::<B, Float>(shape, device, |s, d| B::float_zeros(s, d, dtype))
    }

    fn float_ones(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        constant::<B, Float>(shape, device, |s, d| B::float_ones(s, d, dtype))
    }

    fn float_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        constant::<B, Float>(shape, device, |s, d| B::float_full(s, fill_value, d, dtype))
    }

    /// Collective where the tensor is split or a sum is pending.
    fn float_into_data(tensor: FloatTensor<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::float_into_data(tensor.into_whole())
    }

    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        tensor.device().clone()
    }

    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
        if tensor.device() == device {
            return tensor;
        }
        // Another rank's device in this process: whole tensors only.
        SpatialTensor::full(B::float_to_device(tensor.into_whole(), device.inner_device()), device.clone())
    }

    fn float_into_int(tensor: FloatTensor<Self>, out_dtype: IntDType) -> IntTensor<Self> {
        map::<B, Float, Int>(tensor, |t| B::float_into_int(t, out_dtype))
    }

    fn float_empty(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        Self::float_zeros(shape, device, dtype)
    }

    fn float_repeat_dim(tensor: FloatTensor<Self>, dim: usize, times: usize) -> FloatTensor<Self> {
        repeat_dim(tensor, dim, times)
    }

    fn float_add(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        zip_linear::<B, Float>(lhs, rhs, |a, b| broadcasting::<B>(a, b, Arithmetic::Add, Arithmetic::Add))
    }

    fn float_neg(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let layout = tensor.layout().clone();
        map_linear::<B, Float>(tensor, layout, B::float_neg)
    }

    fn float_sub(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        zip::<B, Float, Float, Float>(lhs, rhs, |a, b| broadcasting::<B>(a, b, Arithmetic::Sub, Arithmetic::SubFrom))
    }

    fn float_mul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        zip::<B, Float, Float, Float>(lhs, rhs, |a, b| broadcasting::<B>(a, b, Arithmetic::Mul, Arithmetic::Mul))
    }

    fn float_div(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        zip::<B, Float, Float, Float>(lhs, rhs, |a, b| broadcasting::<B>(a, b, Arithmetic::Div, Arithmetic::DivInto))
    }

    binary!(float_remainder, float_powf, float_atan2);

    unary!(
        float_recip,
        float_exp,
        float_log,
        float_log1p,
        float_sqrt,
        float_abs,
        float_cos,
        float_sin,
        float_tan,
        float_cosh,
        float_sinh,
        float_tanh,
        float_acos,
        float_acosh,
        float_asin,
        float_asinh,
        float_atan,
        float_atanh,
        float_round,
        float_floor,
        float_ceil,
        float_trunc,
        float_erf,
        float_sign,
    );

    scalar!(
        float_add_scalar(rhs),
        float_sub_scalar(rhs),
        float_mul_scalar(rhs),
        float_div_scalar(rhs),
        float_remainder_scalar(rhs),
        float_clamp_min(min),
        float_clamp_max(max),
        float_clamp(min, max),
        float_powi_scalar(rhs),
        float_powi_scalar_impl(rhs),
        float_powf_scalar(value),
        float_powf_scalar_impl(value),
    );

    compare!(float_equal, float_not_equal, float_greater, float_greater_equal, float_lower, float_lower_equal);

    compare_scalar!(
        float_equal_elem,
        float_not_equal_elem,
        float_greater_elem,
        float_greater_equal_elem,
        float_lower_elem,
        float_lower_equal_elem,
    );

    fn float_powi(lhs: FloatTensor<Self>, rhs: IntTensor<Self>) -> FloatTensor<Self> {
        zip::<B, Float, Int, Float>(lhs, rhs, B::float_powi)
    }

    fn float_is_nan(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        map::<B, Float, Bool>(tensor, |t| B::float_is_nan(t, out_dtype))
    }

    fn float_is_inf(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        map::<B, Float, Bool>(tensor, |t| B::float_is_inf(t, out_dtype))
    }

    fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        map::<B, Float, Float>(tensor, |t| B::float_cast(t, dtype))
    }

    fn float_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        matmul::matmul::<B, Float>(lhs, rhs, B::float_matmul)
    }

    fn float_cross(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        let (lhs, rhs) = (whole_dim(lhs, dim, "float_cross"), whole_dim(rhs, dim, "float_cross"));
        zip::<B, Float, Float, Float>(lhs, rhs, |a, b| B::float_cross(a, b, dim))
    }

    fn float_swap_dims(tensor: FloatTensor<Self>, dim1: usize, dim2: usize) -> FloatTensor<Self> {
        swap_dims(tensor, dim1, dim2)
    }

    fn float_permute(tensor: FloatTensor<Self>, axes: &[usize]) -> FloatTensor<Self> {
        permute(tensor, axes)
    }

    fn float_flip(tensor: FloatTensor<Self>, axes: &[usize]) -> FloatTensor<Self> {
        flip::<B, Float>(tensor, axes, "float_flip", |t| B::float_flip(t, axes))
    }

    fn float_reshape(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        reshape(tensor, shape)
    }

    fn float_expand(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        expand(tensor, shape)
    }

    fn float_gather(dim: usize, tensor: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        gather::<B, Float>(dim, tensor, indices, "float_gather", |t, i| B::float_gather(dim, t, i))
    }

    fn float_scatter_add(dim: usize, tensor: FloatTensor<Self>, indices: IntTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self> {
        scatter::<B, Float>(dim, tensor, indices, value, "float_scatter_add", |t, i, v| B::float_scatter_add(dim, t, i, v))
    }

    fn float_scatter_nd(
        data: FloatTensor<Self>,
        indices: IntTensor<Self>,
        values: FloatTensor<Self>,
        reduction: IndexingUpdateOp,
    ) -> FloatTensor<Self> {
        let (indices, values) = (indices.gathered("float_scatter_nd"), values.gathered("float_scatter_nd"));
        fallback::<B, Float, Float>(data, "float_scatter_nd", |t| B::float_scatter_nd(t, indices, values, reduction))
    }

    fn float_gather_nd(data: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        let indices = indices.gathered("float_gather_nd");
        fallback::<B, Float, Float>(data, "float_gather_nd", |t| B::float_gather_nd(t, indices))
    }

    fn float_select(tensor: FloatTensor<Self>, dim: usize, indices: IntTensor<Self>) -> FloatTensor<Self> {
        select::<B, Float>(tensor, dim, indices, "float_select", |t, i| B::float_select(t, dim, i))
    }

    fn float_select_add(tensor: FloatTensor<Self>, dim: usize, indices: IntTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self> {
        select_add::<B, Float>(tensor, dim, indices, value, "float_select_add", ReduceOp::Sum, B::float_select_add, B::float_add)
    }

    fn float_slice(tensor: FloatTensor<Self>, slices: &[Slice]) -> FloatTensor<Self> {
        slice(tensor, slices, "float_slice")
    }

    fn float_slice_assign(tensor: FloatTensor<Self>, slices: &[Slice], value: FloatTensor<Self>) -> FloatTensor<Self> {
        slice_assign(tensor, slices, value, "float_slice_assign")
    }

    fn float_mask_where(tensor: FloatTensor<Self>, mask: BoolTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self> {
        choose::<B, Float, Bool>(tensor, mask, value, B::float_mask_where)
    }

    fn float_mask_fill(tensor: FloatTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> FloatTensor<Self> {
        masked::<B, Float, Bool>(tensor, mask, |t, m| B::float_mask_fill(t, m, value))
    }

    fn float_sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        reduce::<B, Float>(tensor, ReduceOp::Sum, B::float_sum, times::<B>)
    }

    fn float_sum_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        sum_dim::<B, Float>(tensor, dim, |t| B::float_sum_dim(t, dim), times::<B>)
    }

    fn float_prod(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        reduce::<B, Float>(tensor, ReduceOp::Prod, B::float_prod, |t, n| B::float_powi_scalar(t, (n as i64).into()))
    }

    fn float_prod_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        let repeat = |t, n| B::float_powi_scalar(t, (n as i64).into());
        reduce_dim::<B, Float>(tensor, dim, ReduceOp::Prod, |t| B::float_prod_dim(t, dim), repeat)
    }

    fn float_mean(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        // Nothing split: the inner backend's own bits; a uniform axis does not change a mean.
        if tensor.context().mesh.effective(tensor.layout().split_over()).is_empty() {
            return reduce::<B, Float>(tensor, ReduceOp::Sum, B::float_mean, |t, _| t);
        }
        let elements = tensor.shape().num_elements() as f64;
        wide_mean::<B>(tensor, Self::float_sum, elements)
    }

    fn float_mean_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        let over = split_over(tensor.layout().dim(dim));
        if tensor.context().mesh.effective(over).is_empty() {
            return reduce_dim::<B, Float>(tensor, dim, ReduceOp::Sum, |t| B::float_mean_dim(t, dim), |t, _| t);
        }
        let extent = tensor.layout().extent(dim) as f64;
        let sum = |t| reduce_dim::<B, Float>(t, dim, ReduceOp::Sum, |t| B::float_sum_dim(t, dim), times::<B>);
        wide_mean::<B>(tensor, sum, extent)
    }

    scans!(float_cumsum, float_cumprod, float_cummin, float_cummax);

    lines!(
        float_topk(k: usize), float_sort(descending: bool),
    );

    line_positions!(
        float_argtopk(k: usize, out_dtype: IntDType), float_argsort(descending: bool, out_dtype: IntDType),
    );

    fn float_sort_with_indices(
        tensor: FloatTensor<Self>,
        dim: usize,
        descending: bool,
        indices_dtype: IntDType,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        along_pair::<B, Float, Float, Int>(tensor, dim, "float_sort_with_indices", |t| {
            B::float_sort_with_indices(t, dim, descending, indices_dtype)
        })
    }

    fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
        cat(tensors, dim, "float_cat")
    }

    fn float_argmax(tensor: FloatTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self> {
        largest::<B>(tensor, dim, out_dtype, "float_argmax").1
    }

    fn float_argmin(tensor: FloatTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self> {
        smallest::<B>(tensor, dim, out_dtype, "float_argmin").1
    }

    fn float_max(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        reduce::<B, Float>(tensor, ReduceOp::Max, B::float_max, |t, _| t)
    }

    fn float_max_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        reduce_dim::<B, Float>(tensor, dim, ReduceOp::Max, |t| B::float_max_dim(t, dim), |t, _| t)
    }

    fn float_max_dim_with_indices(tensor: FloatTensor<Self>, dim: usize, indices_dtype: IntDType) -> (FloatTensor<Self>, IntTensor<Self>) {
        largest::<B>(tensor, dim, indices_dtype, "float_max_dim_with_indices")
    }

    fn float_min(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        reduce::<B, Float>(tensor, ReduceOp::Min, B::float_min, |t, _| t)
    }

    fn float_min_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        reduce_dim::<B, Float>(tensor, dim, ReduceOp::Min, |t| B::float_min_dim(t, dim), |t, _| t)
    }

    fn float_min_dim_with_indices(tensor: FloatTensor<Self>, dim: usize, indices_dtype: IntDType) -> (FloatTensor<Self>, IntTensor<Self>) {
        smallest::<B>(tensor, dim, indices_dtype, "float_min_dim_with_indices")
    }

    fn float_any(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        let any = map::<B, Float, Bool>(tensor, |t| B::float_not_equal_elem(t, 0f32.into(), out_dtype));
        reduce::<B, Bool>(any, ReduceOp::Or, B::bool_any, |t, _| t)
    }

    fn float_any_dim(tensor: FloatTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> {
        let any = map::<B, Float, Bool>(tensor, |t| B::float_not_equal_elem(t, 0f32.into(), out_dtype));
        reduce_dim::<B, Bool>(any, dim, ReduceOp::Or, |t| B::bool_any_dim(t, dim), |t, _| t)
    }

    fn float_all(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        let all = map::<B, Float, Bool>(tensor, |t| B::float_not_equal_elem(t, 0f32.into(), out_dtype));
        reduce::<B, Bool>(all, ReduceOp::And, B::bool_all, |t, _| t)
    }

    fn float_all_dim(tensor: FloatTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> {
        let all = map::<B, Float, Bool>(tensor, |t| B::float_not_equal_elem(t, 0f32.into(), out_dtype));
        reduce_dim::<B, Bool>(all, dim, ReduceOp::And, |t| B::bool_all_dim(t, dim), |t, _| t)
    }

    fn float_grid_sample_2d(tensor: FloatTensor<Self>, grid: FloatTensor<Self>, options: GridSampleOptions) -> FloatTensor<Self> {
        let grid = grid.gathered("float_grid_sample_2d");
        fallback::<B, Float, Float>(tensor, "float_grid_sample_2d", |t| B::float_grid_sample_2d(t, grid, options))
    }

    fn float_unfold(tensor: FloatTensor<Self>, dim: usize, size: usize, step: usize) -> FloatTensor<Self> {
        unfold::<B, Float>(tensor, dim, size, step, "float_unfold", |t| B::float_unfold(t, dim, size, step))
    }
}
