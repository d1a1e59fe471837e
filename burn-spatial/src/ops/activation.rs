//! Activations: element-wise, with the inner backend's own kernels. Softmax and its like are made of reductions and
//! element-wise operations, as in Burn's bodies, in the type in which sums are made.

use burn_backend::Scalar;
use burn_backend::ops::{ActivationOps, FloatTensorOps};
use burn_backend::tensor::FloatTensor;

use super::*;
use crate::Spatial;
use crate::kernels::LocalKernels;
use crate::kind::Float;

macro_rules! unary {
    ($($name:ident($($arg:ident),*)),* $(,)?) => {$(
        fn $name(tensor: FloatTensor<Self> $(, $arg: Scalar)*) -> FloatTensor<Self> {
            map::<B, Float, Float>(tensor, |t| B::$name(t $(, $arg)*))
        }
    )*};
}

macro_rules! binary {
    ($($name:ident),* $(,)?) => {$(
        fn $name(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
            // These kernels take operands of one shape.
            same_shape::<B>(lhs, rhs, B::$name)
        }
    )*};
}

fn same_shape<B: LocalKernels>(
    lhs: SpatialTensor<B, Float>,
    rhs: SpatialTensor<B, Float>,
    f: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> SpatialTensor<B, Float> {
    masked::<B, Float, Float>(lhs, rhs, f)
}

/// How far elements are below the largest along `dim`: zero or negative, in the type in which sums are made.
fn below_largest<B: LocalKernels>(tensor: SpatialTensor<B, Float>, dim: usize) -> SpatialTensor<B, Float> {
    let tensor = widened(tensor);
    let largest = Spatial::<B>::float_max_dim(tensor.clone(), dim);
    Spatial::<B>::float_sub(tensor, largest)
}

impl<B: LocalKernels> ActivationOps<Self> for Spatial<B> {
    unary!(leaky_relu(negative_slope), relu(), gelu(), sigmoid(), hard_sigmoid(alpha, beta), log_sigmoid());

    fn softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        let exp = Self::float_exp(below_largest::<B>(tensor, dim));
        let sum = Self::float_sum_dim(exp.clone(), dim);
        cast(Self::float_div(exp, sum), dtype)
    }

    fn log_softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        let below = below_largest::<B>(tensor, dim);
        let sum = Self::float_sum_dim(Self::float_exp(below.clone()), dim);
        cast(Self::float_sub(below, Self::float_log(sum)), dtype)
    }

    binary!(relu_backward, gelu_backward, sigmoid_backward, log_sigmoid_backward);
}
