//! Activations: element-wise, with the inner backend's own kernels. Softmax and its like keep Burn's bodies, which are
//! made of reductions and element-wise operations.

use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar};

use super::*;
use crate::Spatial;
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

fn same_shape<B: Backend>(
    lhs: SpatialTensor<B, Float>,
    rhs: SpatialTensor<B, Float>,
    f: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> SpatialTensor<B, Float> {
    masked::<B, Float, Float>(lhs, rhs, f)
}

impl<B: Backend> ActivationOps<Self> for Spatial<B> {
    unary!(leaky_relu(negative_slope), relu(), gelu(), sigmoid(), hard_sigmoid(alpha, beta), log_sigmoid());

    binary!(relu_backward, gelu_backward, sigmoid_backward, log_sigmoid_backward);
}
