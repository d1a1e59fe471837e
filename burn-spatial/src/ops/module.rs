//! Operations of neural network modules. Convolutions, pools, interpolations and what is linear stay split: lines and
//! planes that only the batch splits run on the inner backend's own operations, others on those of volumes. The rest
//! gathers, is counted and returns whole tensors.

use burn_backend::TensorMetadata;
use burn_backend::ops::*;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_std::Shape;

use super::conv::{flat, lifted_shape, spec, transposed, transposed_x_grad, volume};
use super::pool::{adaptive_mean, adaptive_mean_grad, interpolate, interpolate_grad, pool};
use super::sample::{Samples, per_sample, per_sample_grad};
use super::window::{Share, bias_grad, conv_weight_share};
use super::*;
use crate::Spatial;
use crate::kernels::LocalKernels;
use crate::kind::{Bool, Float, Kind, wide};
use crate::nn::WindowBackend;

/// A whole result from the gathered operands `t` and what else `B`'s function takes, in its order.
macro_rules! gathering {
    ($($name:ident($($pre:ident: $kind:ident),+ ; $($arg:ident: $type:ty),*)),* $(,)?) => {$(
        fn $name($($pre: $kind<Self>,)+ $($arg: $type),*) -> FloatTensor<Self> {
            let device = gathering!(@first $($pre),+).device().clone();
            SpatialTensor::full(B::$name($($pre.gathered(stringify!($name)),)+ $($arg),*), device)
        }
    )*};
    (@first $first:ident $(, $rest:ident)*) => { $first };
}

/// Convolutions of lines and planes, and transposed ones.
macro_rules! convolutions {
    ($($n:literal: $conv:ident $conv_x:ident $conv_weight:ident $back:ident $back_x:ident $back_weight:ident);* $(;)?) => {$(
        fn $conv(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<$n>) -> FloatTensor<Self> {
            match Samples::of(&x) {
                Some(samples) => {
                    let x = samples.take(x);
                    samples.wrap(B::$conv(x, weight.into_whole(), bias.map(SpatialTensor::into_whole), options))
                }
                None => flat(Self::conv3d_padded(volume(x), volume(weight), bias, 1.0, &spec(&options)), $n + 2),
            }
        }

        fn $conv_x(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<$n>) -> FloatTensor<Self> {
            match Samples::of(&x) {
                Some(samples) => {
                    let (x, grad) = (samples.take(x), samples.take(output_grad));
                    samples.wrap(B::$conv_x(x, weight.into_whole(), grad, options))
                }
                None => {
                    let place = Self::placement(&volume(x));
                    flat(Self::conv3d_padded_x_grad(&place, volume(weight), volume(output_grad), &spec(&options)), $n + 2)
                }
            }
        }

        fn $conv_weight(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<$n>) -> FloatTensor<Self> {
            let (device, shape) = (x.device().clone(), weight.shape());
            // Burn 0.21 computes this one wrong on lines with groups where the stride leaves out inputs at the end.
            let share = match Samples::of(&x).filter(|_| $n > 1 || options.groups == 1) {
                Some(samples) => {
                    let (x, grad) = (samples.take(x), samples.take(output_grad));
                    Share::computed(B::$conv_weight(x, weight.into_whole(), grad, options), samples.over())
                }
                None => conv_weight_share(volume(x), volume(output_grad), lifted_shape(&shape), &spec(&options)),
            };
            share.gradient(shape, device)
        }

        fn $back(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvTransposeOptions<$n>) -> FloatTensor<Self> {
            match Samples::of(&x) {
                Some(samples) => {
                    let x = samples.take(x);
                    samples.wrap(B::$back(x, weight.into_whole(), bias.map(SpatialTensor::into_whole), options))
                }
                None => {
                    let (x, weight) = (volume(x), volume(weight));
                    let op = transposed(&options, x.shape().dims(), weight.shape().dims());
                    biased::<B>(flat(op.forward(x, weight), $n + 2), bias)
                }
            }
        }

        fn $back_x(weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<$n>) -> FloatTensor<Self> {
            match Samples::of(&output_grad) {
                Some(samples) => {
                    let grad = samples.take(output_grad);
                    samples.wrap(B::$back_x(weight.into_whole(), grad, options))
                }
                None => flat(transposed_x_grad(volume(weight), volume(output_grad), &options), $n + 2),
            }
        }

        fn $back_weight(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<$n>) -> FloatTensor<Self> {
            let (device, shape) = (x.device().clone(), weight.shape());
            let share = match Samples::of(&x) {
                Some(samples) => {
                    let (x, grad) = (samples.take(x), samples.take(output_grad));
                    Share::computed(B::$back_weight(x, weight.into_whole(), grad, options), samples.over())
                }
                None => {
                    let (x, weight) = (volume(x), lifted_shape(&shape));
                    transposed(&options, x.shape().dims(), weight).weight_share(x, volume(output_grad), weight)
                }
            };
            share.gradient(shape, device)
        }
    )*};
}

/// Pools of lines and planes. Rounded up, they always run as pools of volumes: the inner backends do not agree on what
/// an average then divides by.
macro_rules! pools {
    ($($n:literal $size:ty: $avg:ident $avg_grad:ident $max:ident $max_indices:ident $indices:ident $max_grad:ident $grads:ident
        $adaptive:ident $adaptive_grad:ident);* $(;)?) => {$(
        fn $avg(x: FloatTensor<Self>, kernel_size: $size, stride: $size, padding: $size, count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self> {
            match Samples::of(&x).filter(|_| !ceil_mode) {
                Some(samples) => {
                    let x = samples.take(x);
                    samples.wrap(wide::<B>(x, |x| B::$avg(x, kernel_size, stride, padding, count_include_pad, ceil_mode)))
                }
                None => {
                    let pool = pool::<$n>(&x.shape(), kernel_size.axes(), stride.axes(), padding.axes(), [1; $n], count_include_pad, ceil_mode);
                    flat(pool.mean(volume(x)), $n + 2)
                }
            }
        }

        fn $avg_grad(
            x: FloatTensor<Self>,
            grad: FloatTensor<Self>,
            kernel_size: $size,
            stride: $size,
            padding: $size,
            count_include_pad: bool,
            ceil_mode: bool,
        ) -> FloatTensor<Self> {
            match Samples::of(&x).filter(|_| !ceil_mode) {
                Some(samples) => {
                    let (x, grad) = (samples.take(x), samples.take(grad));
                    let back = |x, grad| B::$avg_grad(x, grad, kernel_size, stride, padding, count_include_pad, ceil_mode);
                    samples.wrap(wide_pair::<B>(x, grad, back))
                }
                None => {
                    let pool = pool::<$n>(&x.shape(), kernel_size.axes(), stride.axes(), padding.axes(), [1; $n], count_include_pad, ceil_mode);
                    flat(pool.mean_grad(&Self::placement(&volume(x)), volume(grad)), $n + 2)
                }
            }
        }

        fn $max(x: FloatTensor<Self>, kernel_size: $size, stride: $size, padding: $size, dilation: $size, ceil_mode: bool) -> FloatTensor<Self> {
            match Samples::of(&x).filter(|_| !ceil_mode) {
                Some(samples) => {
                    let x = samples.take(x);
                    samples.wrap(B::$max(x, kernel_size, stride, padding, dilation, ceil_mode))
                }
                None => Self::$max_indices(x, kernel_size, stride, padding, dilation, ceil_mode).output,
            }
        }

        fn $max_indices(
            x: FloatTensor<Self>,
            kernel_size: $size,
            stride: $size,
            padding: $size,
            dilation: $size,
            ceil_mode: bool,
        ) -> $indices<Self> {
            match Samples::of(&x).filter(|_| !ceil_mode) {
                Some(samples) => {
                    let pooled = B::$max_indices(samples.take(x), kernel_size, stride, padding, dilation, ceil_mode);
                    $indices::new(samples.wrap(pooled.output), samples.wrap(pooled.indices))
                }
                None => {
                    let pool = pool::<$n>(&x.shape(), kernel_size.axes(), stride.axes(), padding.axes(), dilation.axes(), false, ceil_mode);
                    let (output, indices) = pool.max(volume(x));
                    $indices::new(flat(output, $n + 2), flat(indices, $n + 2))
                }
            }
        }

        fn $max_grad(
            x: FloatTensor<Self>,
            kernel_size: $size,
            stride: $size,
            padding: $size,
            dilation: $size,
            ceil_mode: bool,
            output_grad: FloatTensor<Self>,
            indices: IntTensor<Self>,
        ) -> $grads<Self> {
            match Samples::of(&x).filter(|_| !ceil_mode) {
                Some(samples) => {
                    let (x, grad, indices) = (samples.take(x), samples.take(output_grad), samples.take(indices));
                    let grads = B::$max_grad(x, kernel_size, stride, padding, dilation, ceil_mode, grad, indices);
                    $grads::new(samples.wrap(grads.x_grad))
                }
                None => {
                    let pool = pool::<$n>(&x.shape(), kernel_size.axes(), stride.axes(), padding.axes(), dilation.axes(), false, ceil_mode);
                    let grad = pool.max_grad(&Self::placement(&volume(x)), volume(output_grad), volume(indices));
                    $grads::new(flat(grad, $n + 2))
                }
            }
        }

        fn $adaptive(x: FloatTensor<Self>, output_size: $size) -> FloatTensor<Self> {
            per_sample(x, |x| wide::<B>(x, |x| B::$adaptive(x, output_size)), |x| adaptive_mean(x, output_size.axes()))
        }

        fn $adaptive_grad(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
            per_sample_grad(x, grad, |x, grad| wide_pair::<B>(x, grad, B::$adaptive_grad), adaptive_mean_grad)
        }
    )*};
}

/// `f` of x and a gradient as the types in which they are summed; the gradient of x that comes out is as the other was.
fn wide_pair<B: LocalKernels>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    f: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    wide::<B>(grad, |grad| f(<Float as Kind<B>>::widened(x), grad))
}

/// Burn writes one number for a line and an array for a plane.
trait Axes<const N: usize> {
    fn axes(self) -> [usize; N];
}

impl Axes<1> for usize {
    fn axes(self) -> [usize; 1] {
        [self]
    }
}

impl<const N: usize> Axes<N> for [usize; N] {
    fn axes(self) -> [usize; N] {
        self
    }
}

/// y `[N, C, ...]` with bias `[C]`.
fn biased<B: LocalKernels>(y: FloatTensor<Spatial<B>>, bias: Option<FloatTensor<Spatial<B>>>) -> FloatTensor<Spatial<B>> {
    match bias {
        Some(bias) => {
            let mut shape = vec![1; y.rank()];
            shape[1] = bias.shape()[0];
            Spatial::<B>::float_add(y, reshape(bias, Shape::from(shape)))
        }
        None => y,
    }
}

/// Bias gradients of convolutions: a sum over all but channels.
macro_rules! bias_gradient {
    ($($name:ident),* $(,)?) => {$(
        fn $name(_x: FloatTensor<Self>, _bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
            bias_grad(output_grad)
        }
    )*};
}

/// A gradient of a parameter: whole, with its sum handed to the gradient engine.
fn of_parameter<B: LocalKernels>(gradient: FloatTensor<Spatial<B>>) -> FloatTensor<Spatial<B>> {
    let full = Layout::full(&gradient.shape());
    if gradient.layout().summed() == full { gradient.gradient() } else { gradient.into_layout(&full) }
}

/// `tensor` with leading dimensions of extent 1 up to `rank`.
fn leading<B: LocalKernels>(tensor: FloatTensor<Spatial<B>>, rank: usize) -> FloatTensor<Spatial<B>> {
    let mut shape = vec![1; rank.saturating_sub(tensor.rank())];
    shape.extend(tensor.shape().iter());
    reshape(tensor, Shape::from(shape))
}

impl<B: LocalKernels> ModuleOps<Self> for Spatial<B> {
    fn conv3d(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvOptions<3>,
    ) -> FloatTensor<Self> {
        Self::conv3d_padded(x, weight, bias, 1.0, &spec(&options))
    }

    fn conv3d_x_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        options: ConvOptions<3>,
    ) -> FloatTensor<Self> {
        Self::conv3d_padded_x_grad(&Self::placement(&x), weight, output_grad, &spec(&options))
    }

    fn conv3d_weight_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        options: ConvOptions<3>,
    ) -> FloatTensor<Self> {
        let shape = weight.shape().dims();
        Self::conv3d_padded_weight_grad(x, output_grad, shape, &spec(&options))
    }

    bias_gradient!(
        conv1d_bias_backward,
        conv2d_bias_backward,
        conv3d_bias_backward,
        conv_transpose1d_bias_backward,
        conv_transpose2d_bias_backward,
        conv_transpose3d_bias_backward,
    );

    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        let rank = x.rank();
        // Features that every rank has whole: the inner backend's own, bit for bit.
        if unsplit(x.layout().dim(rank - 1)) {
            let device = x.device().clone();
            let layout = x.layout().summed().materialized();
            let outputs = weight.shape()[1];
            let y = B::linear(x.into_layout(&layout).settle().0, weight.into_whole(), bias.map(SpatialTensor::into_whole));
            return SpatialTensor::new(y, layout.with_dim(rank - 1, vec![Axis::full(outputs)]), device);
        }
        let y = Self::float_matmul(x, leading::<B>(weight, rank));
        match bias {
            Some(bias) => Self::float_add(y, leading::<B>(bias, rank)),
            None => y,
        }
    }

    fn linear_x_backward(weight: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let rank = output_grad.rank();
        Self::float_matmul(output_grad, leading::<B>(swap_dims(weight, 0, 1), rank))
    }

    fn linear_weight_backward(x: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let rank = x.rank();
        let shape = Shape::from(vec![x.shape()[rank - 1], output_grad.shape()[rank - 1]]);
        let dtype = output_grad.dtype();
        let mut gradient = widened(Self::float_matmul(swap_dims(x, rank - 2, rank - 1), output_grad));
        for dim in 0..rank - 2 {
            gradient = Self::float_sum_dim(gradient, dim);
        }
        of_parameter::<B>(cast(reshape(gradient, shape), dtype))
    }

    fn layer_norm(tensor: FloatTensor<Self>, gamma: FloatTensor<Self>, beta: Option<FloatTensor<Self>>, epsilon: f64) -> FloatTensor<Self> {
        let (dtype, dim) = (tensor.dtype(), tensor.rank() - 1);
        let x = widened(tensor);
        let off = Self::float_sub(x.clone(), Self::float_mean_dim(x, dim));
        let var = Self::float_mean_dim(Self::float_mul(off.clone(), off.clone()), dim);
        let y = Self::float_div(off, Self::float_sqrt(Self::float_add_scalar(var, epsilon.into())));
        let y = Self::float_mul(y, leading::<B>(widened(gamma), dim + 1));
        let y = match beta {
            Some(beta) => Self::float_add(y, leading::<B>(widened(beta), dim + 1)),
            None => y,
        };
        cast(y, dtype)
    }

    fn linear_bias_backward(output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let rank = output_grad.rank();
        let features = output_grad.shape()[rank - 1];
        let dtype = output_grad.dtype();
        let gradient = (0..rank - 1).fold(widened(output_grad), Self::float_sum_dim);
        of_parameter::<B>(cast(reshape(gradient, Shape::from(vec![features])), dtype))
    }

    convolutions!(
        1: conv1d conv1d_x_backward conv1d_weight_backward
            conv_transpose1d conv_transpose1d_x_backward conv_transpose1d_weight_backward;
        2: conv2d conv2d_x_backward conv2d_weight_backward
            conv_transpose2d conv_transpose2d_x_backward conv_transpose2d_weight_backward;
    );

    fn conv_transpose3d(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvTransposeOptions<3>,
    ) -> FloatTensor<Self> {
        let op = transposed(&options, x.shape().dims(), weight.shape().dims());
        biased::<B>(op.forward(x, weight), bias)
    }

    fn conv_transpose3d_x_backward(
        weight: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        options: ConvTransposeOptions<3>,
    ) -> FloatTensor<Self> {
        transposed_x_grad(weight, output_grad, &options)
    }

    fn conv_transpose3d_weight_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        options: ConvTransposeOptions<3>,
    ) -> FloatTensor<Self> {
        let (device, shape) = (x.device().clone(), weight.shape());
        let op = transposed(&options, x.shape().dims(), shape.dims());
        op.weight_share(x, output_grad, shape.dims()).gradient(shape, device)
    }

    pools!(
        1 usize: avg_pool1d avg_pool1d_backward max_pool1d max_pool1d_with_indices MaxPool1dWithIndices
            max_pool1d_with_indices_backward MaxPool1dBackward adaptive_avg_pool1d adaptive_avg_pool1d_backward;
        2 [usize; 2]: avg_pool2d avg_pool2d_backward max_pool2d max_pool2d_with_indices MaxPool2dWithIndices
            max_pool2d_with_indices_backward MaxPool2dBackward adaptive_avg_pool2d adaptive_avg_pool2d_backward;
    );

    fn interpolate(x: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions) -> FloatTensor<Self> {
        per_sample(x, |x| B::interpolate(x, output_size, options.clone()), |x| interpolate(x, output_size, &options))
    }

    fn interpolate_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        output_size: [usize; 2],
        options: InterpolateOptions,
    ) -> FloatTensor<Self> {
        per_sample_grad(
            x,
            grad,
            |x, grad| B::interpolate_backward(x, grad, output_size, options.clone()),
            |x, grad| interpolate_grad(x, grad, output_size, &options),
        )
    }

    fn unfold4d(x: FloatTensor<Self>, kernel_size: [usize; 2], options: UnfoldOptions) -> FloatTensor<Self> {
        let op = "unfold4d";
        per_sample(
            x,
            |x| B::unfold4d(x, kernel_size, options.clone()),
            |x| fallback::<B, Float, Float>(x, op, |x| B::unfold4d(x, kernel_size, options.clone())),
        )
    }

    gathering!(
        ctc_loss(log_probs: FloatTensor, targets: IntTensor, input_lengths: IntTensor, target_lengths: IntTensor; blank: usize),
        ctc_loss_backward(log_probs: FloatTensor, targets: IntTensor, input_lengths: IntTensor, target_lengths: IntTensor, grad_loss: FloatTensor; blank: usize),
    );

    fn has_ctc_loss_backward() -> bool {
        B::has_ctc_loss_backward()
    }

    fn deform_conv2d(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        options: DeformConvOptions<2>,
    ) -> FloatTensor<Self> {
        if let Some(samples) = Samples::of(&x) {
            let (x, offset, mask) = (samples.take(x), samples.take(offset), mask.map(|mask| samples.take(mask)));
            return samples.wrap(B::deform_conv2d(x, offset, weight.into_whole(), mask, bias.map(SpatialTensor::into_whole), options));
        }
        let op = "deform_conv2d";
        let (offset, weight) = (offset.gathered(op), weight.gathered(op));
        let (mask, bias) = (mask.map(|t| t.gathered(op)), bias.map(|t| t.gathered(op)));
        fallback::<B, Float, Float>(x, op, |x| B::deform_conv2d(x, offset, weight, mask, bias, options))
    }

    fn deform_conv2d_backward(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        output_grad: FloatTensor<Self>,
        options: DeformConvOptions<2>,
    ) -> DeformConv2dBackward<Self> {
        let op = "deform_conv2d_backward";
        let device = x.device().clone();
        if let Some(samples) = Samples::of(&x) {
            let (x, offset, mask) = (samples.take(x), samples.take(offset), mask.map(|mask| samples.take(mask)));
            let (weight, bias, grad) = (weight.into_whole(), bias.map(SpatialTensor::into_whole), samples.take(output_grad));
            let grads = B::deform_conv2d_backward(x, offset, weight, mask, bias, grad, options);
            let summed = |share: FloatTensor<B>| {
                let shape = share.shape();
                Share::<B>::computed(share, samples.over()).gradient(shape, device.clone())
            };
            return DeformConv2dBackward::new(
                samples.wrap(grads.x_grad),
                samples.wrap(grads.offset_grad),
                summed(grads.weight_grad),
                grads.mask_grad.map(|grad| samples.wrap(grad)),
                grads.bias_grad.map(summed),
            );
        }
        let grads = B::deform_conv2d_backward(
            x.gathered(op),
            offset.gathered(op),
            weight.gathered(op),
            mask.map(|t| t.gathered(op)),
            bias.map(|t| t.gathered(op)),
            output_grad.gathered(op),
            options,
        );
        let full = |t| SpatialTensor::full(t, device.clone());
        DeformConv2dBackward::new(
            full(grads.x_grad),
            full(grads.offset_grad),
            full(grads.weight_grad),
            grads.mask_grad.map(full),
            grads.bias_grad.map(full),
        )
    }

    fn attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Option<BoolTensor<Self>>,
        attn_bias: Option<FloatTensor<Self>>,
        options: AttentionModuleOptions,
    ) -> FloatTensor<Self> {
        let op = "attention";
        let (key, value) = (key.gathered(op), value.gathered(op));
        let (mask, bias) = (mask.map(|t: SpatialTensor<B, Bool>| t.gathered(op)), attn_bias.map(|t| t.gathered(op)));
        fallback::<B, Float, Float>(query, op, |q| B::attention(q, key, value, mask, bias, options))
    }

    fn rfft(signal: FloatTensor<Self>, dim: usize, n: Option<usize>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        along_pair::<B, Float, Float, Float>(signal, dim, "rfft", |t| B::rfft(t, dim, n))
    }

    fn irfft(spectrum_re: FloatTensor<Self>, spectrum_im: FloatTensor<Self>, dim: usize, n: Option<usize>) -> FloatTensor<Self> {
        let op = "irfft";
        let device = spectrum_re.device().clone();
        SpatialTensor::full(B::irfft(spectrum_re.gathered(op), spectrum_im.gathered(op), dim, n), device)
    }
}
