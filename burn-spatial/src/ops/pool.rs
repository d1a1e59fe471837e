//! Burn's pools and interpolations of lines and planes as operations on volumes.

use burn_backend::TensorMetadata;
use burn_backend::ops::{FloatTensorOps, InterpolateMode, InterpolateOptions};
use burn_std::Shape;

use super::conv::{flat, lifted, lifted_shape, volume};
use super::window::{Placement, Pool, Tensor, resample, resample_grad};
use crate::Spatial;
use crate::kernels::{Count, LocalKernels, Position, Taps, Window, WindowAxis};
use crate::kind::{Float, wide};
use crate::nn::WindowBackend;

/// A pool with Burn's rule for the number of outputs: rounded up, a last window may lie wholly behind the input.
pub(super) fn pool<const N: usize>(
    x: &Shape,
    kernel: [usize; N],
    stride: [usize; N],
    padding: [usize; N],
    dilation: [usize; N],
    count_include_pad: bool,
    ceil: bool,
) -> Pool {
    let (kernel, stride, padding, dilation) = (lifted(kernel, 1), lifted(stride, 1), lifted(padding, 0), lifted(dilation, 1));
    let extents = lifted_shape(x);
    let windows: Window = std::array::from_fn(|i| {
        let (input, span) = (extents[2 + i], (kernel[i] - 1) * dilation[i] + 1);
        let steps = match (input + 2 * padding[i]).checked_sub(span) {
            Some(room) if ceil => room.div_ceil(stride[i]),
            Some(room) => room / stride[i],
            None if ceil => 0,
            None => panic!("a pool's kernel spans {span}, but the padded input has only {}", input + 2 * padding[i]),
        };
        let offset = padding[i] as isize;
        WindowAxis { input, output: steps + 1, kernel: kernel[i], stride: stride[i], dilation: dilation[i], offset }
    });
    Pool { windows, count: if count_include_pad { Count::padded(padding, windows.map(|axis| axis.input)) } else { Count::Inside } }
}

/// An adaptive mean of a volume of shape `x`: the dimensions of which it takes the mean of everything, which is a sum
/// over ranks, and what it reads then.
fn adaptive(x: [usize; 5], output: [usize; 3]) -> (Vec<usize>, [Taps; 3]) {
    let all = (2..5).filter(|dim| output[dim - 2] == 1 && x[*dim] > 1).collect();
    let taps = std::array::from_fn(|i| if output[i] == 1 { Taps::identity(1) } else { Taps::mean(x[2 + i], output[i]) });
    (all, taps)
}

/// Means of near-equal parts of each axis.
pub(super) fn adaptive_mean<B: LocalKernels, const N: usize>(x: Tensor<B>, output: [usize; N]) -> Tensor<B> {
    let x = volume(x);
    let (all, taps) = adaptive(x.shape().dims(), lifted(output, 1));
    let x = all.into_iter().fold(x, Spatial::<B>::float_mean_dim);
    flat(resample(x, &taps), 2 + N)
}

/// The gradient of [`adaptive_mean`]'s x.
pub(super) fn adaptive_mean_grad<B: LocalKernels>(x: Tensor<B>, grad: Tensor<B>) -> Tensor<B> {
    let rank = x.rank();
    let (x, grad) = (volume(x), volume(grad));
    let shape: [usize; 5] = x.shape().dims();
    let [_, _, output @ ..]: [usize; 5] = grad.shape().dims();
    let (all, taps) = adaptive(shape, output);
    let layout = all.iter().fold(x.layout().clone(), |layout, dim| layout.with_dim(*dim, vec![]));
    let place = Placement { layout, device: grad.device().clone() };
    let parts = all.iter().map(|dim| shape[*dim]).product::<usize>();
    let grad = resample_grad(&place, grad, &taps);
    // A factor of half precision might round to nothing.
    let scaled = |t| wide::<B>(t, |t| B::float_mul_scalar(t, (1.0 / parts as f64).into()));
    let grad = if parts == 1 { grad } else { super::map::<B, Float, Float>(grad, scaled) };
    flat(super::expand(grad, Shape::from(shape)), rank)
}

/// What an interpolation of a plane x to `size` reads.
fn taps(x: &Shape, size: [usize; 2], options: &InterpolateOptions) -> [Taps; 3] {
    let (inputs, outputs) = (lifted_shape(x), lifted(size, 1));
    std::array::from_fn(|i| {
        let (input, output) = (inputs[2 + i], outputs[i]);
        let ratio = input as f64 / output as f64;
        let position = Position::new(input, output, ratio, options.align_corners);
        match options.mode {
            _ if i == 0 => Taps::identity(1),
            InterpolateMode::Nearest => Taps::nearest(input, output, ratio),
            InterpolateMode::Bilinear => Taps::linear(input, output, position),
            InterpolateMode::Bicubic => Taps::cubic(input, output, position),
            InterpolateMode::Lanczos3 => Taps::lanczos3(input, output, position),
        }
    })
}

/// A plane interpolated to `size`.
pub(super) fn interpolate<B: LocalKernels>(x: Tensor<B>, size: [usize; 2], options: &InterpolateOptions) -> Tensor<B> {
    let taps = taps(&x.shape(), size, options);
    flat(resample(volume(x), &taps), 4)
}

/// The gradient of [`interpolate`]'s x.
pub(super) fn interpolate_grad<B: LocalKernels>(
    x: Tensor<B>,
    grad: Tensor<B>,
    size: [usize; 2],
    options: &InterpolateOptions,
) -> Tensor<B> {
    let taps = taps(&x.shape(), size, options);
    flat(resample_grad(&Spatial::<B>::placement(&volume(x)), volume(grad), &taps), 4)
}
