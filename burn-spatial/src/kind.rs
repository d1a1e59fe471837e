//! The three kinds of tensor primitives, so that what moves data is written once.

use std::fmt::Debug;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorData, TensorMetadata};
use burn_std::{Shape, Slice};

use crate::kernels::LocalKernels;
use crate::trace::timed;

/// Float, int or bool tensors of the inner backend: what moving and viewing needs of them.
pub trait Kind<B: LocalKernels>: Clone + Copy + Debug + Send + Sync + 'static {
    /// The inner backend's tensor.
    type Primitive: TensorMetadata + 'static;

    /// From data on the host.
    fn from_data(data: TensorData, device: &B::Device) -> Self::Primitive;
    /// To data on the host; waits for the device.
    fn into_data(tensor: Self::Primitive) -> TensorData;
    /// Of any values.
    fn empty(shape: Shape, device: &B::Device, dtype: DType) -> Self::Primitive;
    /// Zeros (false).
    fn zeros(shape: Shape, device: &B::Device, dtype: DType) -> Self::Primitive;
    /// Same elements, other shape.
    fn reshape(tensor: Self::Primitive, shape: Shape) -> Self::Primitive;
    /// Dimensions in another order.
    fn permute(tensor: Self::Primitive, order: &[usize]) -> Self::Primitive;
    /// Repeats extents of 1.
    fn expand(tensor: Self::Primitive, shape: Shape) -> Self::Primitive;
    /// A box.
    fn slice(tensor: Self::Primitive, slices: &[Slice]) -> Self::Primitive;
    /// With a box replaced.
    fn slice_assign(tensor: Self::Primitive, slices: &[Slice], value: Self::Primitive) -> Self::Primitive;
    /// Joined along a dimension.
    fn cat(tensors: Vec<Self::Primitive>, dim: usize) -> Self::Primitive;

    /// A permuted tensor as a dense one, where that is faster than in the operation behind it; else as it is.
    fn dense(tensor: Self::Primitive) -> Self::Primitive {
        tensor
    }

    /// As another type; only floats have others. No copy where it is the same.
    fn cast(tensor: Self::Primitive, dtype: DType) -> Self::Primitive {
        assert!(tensor.dtype() == dtype, "a tensor of {:?} is not cast to {dtype:?}", tensor.dtype());
        tensor
    }

    /// As the type in which it is summed.
    fn widened(tensor: Self::Primitive) -> Self::Primitive {
        let dtype = accumulator(tensor.dtype());
        Self::cast(tensor, dtype)
    }
}

/// The type in which values are summed: of half precision in single, where a sum neither stagnates nor exceeds the range on
/// its way to a mean.
pub(crate) fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// `f` of a float tensor as the type in which it is summed; what comes out is as the tensor was.
pub(crate) fn wide<B: LocalKernels>(tensor: FloatTensor<B>, f: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>) -> FloatTensor<B> {
    let dtype = tensor.dtype();
    <Float as Kind<B>>::cast(f(<Float as Kind<B>>::widened(tensor)), dtype)
}

/// Kinds whose elements add up.
pub trait Numeric<B: LocalKernels>: Kind<B> {
    /// Element-wise sum.
    fn add(lhs: Self::Primitive, rhs: Self::Primitive) -> Self::Primitive;

    /// With a value added to a box.
    fn slice_add(tensor: Self::Primitive, slices: &[Slice], value: Self::Primitive) -> Self::Primitive;
}

/// Float tensors.
#[derive(Clone, Copy, Debug)]
pub struct Float;
/// Int tensors.
#[derive(Clone, Copy, Debug)]
pub struct Int;
/// Bool tensors.
#[derive(Clone, Copy, Debug)]
pub struct Bool;

macro_rules! kind {
    ($kind:ident, $primitive:ident, $from_data:ident, $into_data:ident, $empty:ident, $zeros:ident, $reshape:ident, $permute:ident, $expand:ident, $slice:ident, $slice_assign:ident, $cat:ident $(, $cast:ident, $dense:ident)?) => {
        impl<B: LocalKernels> Kind<B> for $kind {
            type Primitive = B::$primitive;

            fn from_data(data: TensorData, device: &B::Device) -> Self::Primitive {
                B::$from_data(data, device)
            }
            fn into_data(tensor: Self::Primitive) -> TensorData {
                burn_std::reader::read_sync(B::$into_data(tensor)).unwrap_or_else(|e| panic!("the device failed: {e}"))
            }
            fn empty(shape: Shape, device: &B::Device, dtype: DType) -> Self::Primitive {
                B::$empty(shape, device, dtype.into())
            }
            fn zeros(shape: Shape, device: &B::Device, dtype: DType) -> Self::Primitive {
                B::$zeros(shape, device, dtype.into())
            }
            fn reshape(tensor: Self::Primitive, shape: Shape) -> Self::Primitive {
                B::$reshape(tensor, shape)
            }
            fn permute(tensor: Self::Primitive, order: &[usize]) -> Self::Primitive {
                B::$permute(tensor, order)
            }
            fn expand(tensor: Self::Primitive, shape: Shape) -> Self::Primitive {
                B::$expand(tensor, shape)
            }
            fn slice(tensor: Self::Primitive, slices: &[Slice]) -> Self::Primitive {
                B::$slice(tensor, slices)
            }
            fn slice_assign(tensor: Self::Primitive, slices: &[Slice], value: Self::Primitive) -> Self::Primitive {
                B::$slice_assign(tensor, slices, value)
            }
            fn cat(tensors: Vec<Self::Primitive>, dim: usize) -> Self::Primitive {
                B::$cat(tensors, dim)
            }
            $(fn cast(tensor: Self::Primitive, dtype: DType) -> Self::Primitive {
                if tensor.dtype() == dtype { tensor } else { B::$cast(tensor, dtype.into()) }
            }
            fn dense(tensor: Self::Primitive) -> Self::Primitive {
                timed!(KERNEL, "dense");
                B::$dense(tensor)
            })?
        }
    };
}

kind!(
    Float,
    FloatTensorPrimitive,
    float_from_data,
    float_into_data,
    float_empty,
    float_zeros,
    float_reshape,
    float_permute,
    float_expand,
    float_slice,
    float_assign_box,
    float_cat,
    float_cast,
    float_dense
);
kind!(
    Int,
    IntTensorPrimitive,
    int_from_data,
    int_into_data,
    int_empty,
    int_zeros,
    int_reshape,
    int_permute,
    int_expand,
    int_slice,
    int_assign_box,
    int_cat
);
kind!(
    Bool,
    BoolTensorPrimitive,
    bool_from_data,
    bool_into_data,
    bool_empty,
    bool_zeros,
    bool_reshape,
    bool_permute,
    bool_expand,
    bool_slice,
    bool_slice_assign,
    bool_cat
);

impl<B: LocalKernels> Numeric<B> for Float {
    fn add(lhs: Self::Primitive, rhs: Self::Primitive) -> Self::Primitive {
        B::float_add(lhs, rhs)
    }
    fn slice_add(tensor: Self::Primitive, slices: &[Slice], value: Self::Primitive) -> Self::Primitive {
        B::float_add_box(tensor, slices, value)
    }
}

impl<B: LocalKernels> Numeric<B> for Int {
    fn add(lhs: Self::Primitive, rhs: Self::Primitive) -> Self::Primitive {
        B::int_add(lhs, rhs)
    }
    fn slice_add(tensor: Self::Primitive, slices: &[Slice], value: Self::Primitive) -> Self::Primitive {
        B::int_add_box(tensor, slices, value)
    }
}
