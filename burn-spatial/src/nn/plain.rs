//! [`WindowBackend`](super::WindowBackend) for backends whose tensors are whole: bodies for any of them.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, Shape, Slice, TensorMetadata};

use super::{ConvSpec, PaddingMode, PoolSpec, UpsampleSpec};
use crate::kernels::{self, LocalKernels, Window};
use crate::kind::wide;
use crate::window::pieces;

impl<B: LocalKernels> super::WindowBackend for B {
    type Placement = [usize; 5];

    fn placement(x: &FloatTensor<Self>) -> [usize; 5] {
        x.shape().dims()
    }
    fn whole_volume(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
    fn conv3d_padded(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        slope: f64,
        spec: &ConvSpec,
    ) -> FloatTensor<Self> {
        conv3d::<B>(x, weight, bias, slope, spec)
    }
    fn activation_grad(y: FloatTensor<Self>, grad: FloatTensor<Self>, slope: f64) -> FloatTensor<Self> {
        kernels::activation_grad::<B>(y, grad, slope)
    }
    fn conv3d_padded_x_grad(x: &[usize; 5], weight: FloatTensor<Self>, grad: FloatTensor<Self>, spec: &ConvSpec) -> FloatTensor<Self> {
        conv3d_x_grad::<B>(*x, weight, grad, spec)
    }
    fn conv3d_padded_weight_grad(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        weight_shape: [usize; 5],
        spec: &ConvSpec,
    ) -> FloatTensor<Self> {
        conv3d_weight_grad::<B>(x, grad, weight_shape, spec)
    }
    fn conv3d_padded_bias_grad(grad: FloatTensor<Self>) -> FloatTensor<Self> {
        conv3d_bias_grad::<B>(grad)
    }
    fn max_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> (FloatTensor<Self>, IntTensor<Self>) {
        max_pool3d::<B>(x, spec)
    }
    fn max_pool3d_grad(x: &[usize; 5], grad: FloatTensor<Self>, indices: IntTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        max_pool3d_grad::<B>(*x, grad, indices, spec)
    }
    fn avg_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        avg_pool3d::<B>(x, spec)
    }
    fn avg_pool3d_grad(x: &[usize; 5], grad: FloatTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        avg_pool3d_grad::<B>(*x, grad, spec)
    }
    fn upsample3d(x: FloatTensor<Self>, spec: &UpsampleSpec) -> FloatTensor<Self> {
        let taps = spec.taps(x.shape().dims());
        kernels::resample::<B>(x, &taps)
    }
    fn upsample3d_grad(x: &[usize; 5], grad: FloatTensor<Self>, spec: &UpsampleSpec) -> FloatTensor<Self> {
        kernels::resample_grad::<B>(grad, &spec.taps(*x))
    }
}

fn conv_window(x: [usize; 5], weight: [usize; 5], spec: &ConvSpec) -> Window {
    spec.window(x, weight).unwrap_or_else(|e| panic!("{e}"))
}

fn pool_window(x: [usize; 5], spec: &PoolSpec) -> Window {
    spec.window(x).unwrap_or_else(|e| panic!("{e}"))
}

/// `window` over the extended volume, whose first voxel is the first one the first window reads.
fn extended(window: Window, spec: &ConvSpec) -> Window {
    let mut window = window;
    for (axis, (lo, hi)) in window.iter_mut().zip(spec.padding) {
        axis.input += lo + hi;
        axis.offset = 0;
    }
    window
}

/// `from..to` along `dim`, the whole of the others.
fn along(dim: usize, from: usize, to: usize) -> [Slice; 5] {
    let mut slices = [Slice::full(); 5];
    slices[dim] = Slice::new(from as isize, Some(to as isize), 1);
    slices
}

/// x with voxels of its own around it, as many before and behind along each axis as `padding` says: the volume again,
/// mirrored, or its last voxel, by `mode`.
pub fn extend<B: Backend>(x: FloatTensor<B>, padding: [(usize, usize); 3], mode: PaddingMode) -> FloatTensor<B> {
    let mut x = x;
    for (i, (lo, hi)) in padding.into_iter().enumerate().filter(|(_, p)| *p != (0, 0)) {
        let (dim, n) = (2 + i, x.shape()[2 + i]);
        let parts = pieces(-(lo as isize), (n + hi) as isize, n, mode);
        x = B::float_cat(parts.iter().map(|p| B::float_slice(x.clone(), &along(dim, p.start, p.end))).collect(), dim);
    }
    x
}

/// The adjoint of [`extend`]: adds what lies around the volume back to where it came from.
pub fn fold<B: Backend>(grad: FloatTensor<B>, padding: [(usize, usize); 3], mode: PaddingMode) -> FloatTensor<B> {
    let mut grad = grad;
    for (i, (lo, hi)) in padding.into_iter().enumerate().filter(|(_, p)| *p != (0, 0)) {
        let (dim, n) = (2 + i, grad.shape()[2 + i] - lo - hi);
        let mut inner = B::float_slice(grad.clone(), &along(dim, lo, lo + n));
        for piece in pieces(-(lo as isize), (n + hi) as isize, n, mode).into_iter().filter(|p| p.at != lo) {
            let place = along(dim, piece.start, piece.end);
            let outside = B::float_slice(grad.clone(), &along(dim, piece.at, piece.at + piece.end - piece.start));
            let sum = B::float_add(B::float_slice(inner.clone(), &place), outside);
            inner = B::float_slice_assign(inner, &place, sum);
        }
        grad = inner;
    }
    grad
}

/// See [`WindowBackend::conv3d_padded`](super::WindowBackend::conv3d_padded).
pub fn conv3d<B: LocalKernels>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    slope: f64,
    spec: &ConvSpec,
) -> FloatTensor<B> {
    let window = conv_window(x.shape().dims(), weight.shape().dims(), spec);
    match spec.mode {
        PaddingMode::Zeros => kernels::activated_conv3d::<B>(x, weight, bias, slope, &window, spec.groups),
        mode => {
            let x = extend::<B>(x, spec.padding, mode);
            kernels::activated_conv3d::<B>(x, weight, bias, slope, &extended(window, spec), spec.groups)
        }
    }
}

/// See [`WindowBackend::conv3d_padded_x_grad`](super::WindowBackend::conv3d_padded_x_grad).
pub fn conv3d_x_grad<B: LocalKernels>(x: [usize; 5], weight: FloatTensor<B>, grad: FloatTensor<B>, spec: &ConvSpec) -> FloatTensor<B> {
    let window = conv_window(x, weight.shape().dims(), spec);
    match spec.mode {
        PaddingMode::Zeros => kernels::conv3d_data_grad::<B>(grad, weight, &window, spec.groups),
        mode => {
            let grad = kernels::conv3d_data_grad::<B>(grad, weight, &extended(window, spec), spec.groups);
            fold::<B>(grad, spec.padding, mode)
        }
    }
}

/// See [`WindowBackend::conv3d_padded_weight_grad`](super::WindowBackend::conv3d_padded_weight_grad).
pub fn conv3d_weight_grad<B: LocalKernels>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    weight_shape: [usize; 5],
    spec: &ConvSpec,
) -> FloatTensor<B> {
    let window = conv_window(x.shape().dims(), weight_shape, spec);
    match spec.mode {
        PaddingMode::Zeros => kernels::conv3d_weight_grad::<B>(x, grad, weight_shape, &window, spec.groups),
        mode => {
            let x = extend::<B>(x, spec.padding, mode);
            kernels::conv3d_weight_grad::<B>(x, grad, weight_shape, &extended(window, spec), spec.groups)
        }
    }
}

/// See [`WindowBackend::conv3d_padded_bias_grad`](super::WindowBackend::conv3d_padded_bias_grad).
pub fn conv3d_bias_grad<B: LocalKernels>(grad: FloatTensor<B>) -> FloatTensor<B> {
    let [n, c, d, h, w] = grad.shape().dims();
    wide::<B>(grad, |grad| {
        let grad = B::float_sum_dim(B::float_reshape(grad, Shape::from([n, c, d * h * w])), 2);
        B::float_reshape(B::float_sum_dim(grad, 0), Shape::from([c]))
    })
}

/// See [`WindowBackend::max_pool3d`](super::WindowBackend::max_pool3d).
pub fn max_pool3d<B: LocalKernels>(x: FloatTensor<B>, spec: &PoolSpec) -> (FloatTensor<B>, IntTensor<B>) {
    let window = pool_window(x.shape().dims(), spec);
    kernels::max_pool3d::<B>(x, &window, [0; 3], window.map(|a| a.input))
}

/// See [`WindowBackend::max_pool3d_grad`](super::WindowBackend::max_pool3d_grad).
pub fn max_pool3d_grad<B: LocalKernels>(x: [usize; 5], grad: FloatTensor<B>, indices: IntTensor<B>, spec: &PoolSpec) -> FloatTensor<B> {
    let window = pool_window(x, spec);
    kernels::max_pool3d_grad::<B>(grad, indices, &window, [0; 3], window.map(|a| a.input))
}

/// See [`WindowBackend::avg_pool3d`](super::WindowBackend::avg_pool3d).
pub fn avg_pool3d<B: LocalKernels>(x: FloatTensor<B>, spec: &PoolSpec) -> FloatTensor<B> {
    let window = pool_window(x.shape().dims(), spec);
    let count = spec.count(window.map(|a| a.input));
    kernels::avg_pool3d::<B>(x, &window, count)
}

/// See [`WindowBackend::avg_pool3d_grad`](super::WindowBackend::avg_pool3d_grad).
pub fn avg_pool3d_grad<B: LocalKernels>(x: [usize; 5], grad: FloatTensor<B>, spec: &PoolSpec) -> FloatTensor<B> {
    let window = pool_window(x, spec);
    let count = spec.count(window.map(|a| a.input));
    kernels::avg_pool3d_grad::<B>(grad, &window, count)
}
