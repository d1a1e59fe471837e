//! Operations of neural network modules. 3D convolutions and what is linear stay split; the rest gathers, is counted
//! and returns whole tensors.

use burn_backend::ops::*;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};
use burn_std::Shape;

use super::conv::spec;
use super::window::bias_grad;
use super::*;
use crate::Spatial;
use crate::kind::{Bool, Float};
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

/// Convolutions with an optional bias.
macro_rules! convolution {
    ($($name:ident($options:ty)),* $(,)?) => {$(
        fn $name(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: $options) -> FloatTensor<Self> {
            let device = x.device().clone();
            let op = stringify!($name);
            SpatialTensor::full(B::$name(x.gathered(op), weight.gathered(op), bias.map(|b| b.gathered(op)), options), device)
        }
    )*};
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
fn of_parameter<B: Backend>(gradient: FloatTensor<Spatial<B>>) -> FloatTensor<Spatial<B>> {
    let full = Layout::full(&gradient.shape());
    if gradient.layout().clone().with_pending(AxisSet::EMPTY) == full { gradient.gradient() } else { gradient.to_layout(&full) }
}

/// `tensor` with leading dimensions of extent 1 up to `rank`.
fn leading<B: Backend>(tensor: FloatTensor<Spatial<B>>, rank: usize) -> FloatTensor<Spatial<B>> {
    let mut shape = vec![1; rank.saturating_sub(tensor.rank())];
    shape.extend(tensor.shape().iter());
    reshape(tensor, Shape::from(shape))
}

impl<B: Backend> ModuleOps<Self> for Spatial<B> {
    fn conv3d(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvOptions<3>,
    ) -> FloatTensor<Self> {
        Self::conv3d_padded(x, weight, bias, &spec(&options))
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
        let mut gradient = Self::float_matmul(swap_dims(x, rank - 2, rank - 1), output_grad);
        for dim in 0..rank - 2 {
            gradient = Self::float_sum_dim(gradient, dim);
        }
        of_parameter::<B>(reshape(gradient, shape))
    }

    fn linear_bias_backward(output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let rank = output_grad.rank();
        let features = output_grad.shape()[rank - 1];
        let gradient = (0..rank - 1).fold(output_grad, |g, dim| Self::float_sum_dim(g, dim));
        of_parameter::<B>(reshape(gradient, Shape::from(vec![features])))
    }

    convolution!(
        conv1d(ConvOptions<1>),
        conv2d(ConvOptions<2>),
        conv_transpose1d(ConvTransposeOptions<1>),
        conv_transpose2d(ConvTransposeOptions<2>),
        conv_transpose3d(ConvTransposeOptions<3>),
    );

    gathering!(
        conv1d_x_backward(x: FloatTensor, weight: FloatTensor, output_grad: FloatTensor; options: ConvOptions<1>),
        conv1d_weight_backward(x: FloatTensor, weight: FloatTensor, output_grad: FloatTensor; options: ConvOptions<1>),
        conv2d_x_backward(x: FloatTensor, weight: FloatTensor, output_grad: FloatTensor; options: ConvOptions<2>),
        conv2d_weight_backward(x: FloatTensor, weight: FloatTensor, output_grad: FloatTensor; options: ConvOptions<2>),
        conv_transpose1d_x_backward(weight: FloatTensor, output_grad: FloatTensor; options: ConvTransposeOptions<1>),
        conv_transpose1d_weight_backward(x: FloatTensor, weight: FloatTensor, output_grad: FloatTensor; options: ConvTransposeOptions<1>),
        conv_transpose2d_x_backward(weight: FloatTensor, output_grad: FloatTensor; options: ConvTransposeOptions<2>),
        conv_transpose2d_weight_backward(x: FloatTensor, weight: FloatTensor, output_grad: FloatTensor; options: ConvTransposeOptions<2>),
        conv_transpose3d_x_backward(weight: FloatTensor, output_grad: FloatTensor; options: ConvTransposeOptions<3>),
        conv_transpose3d_weight_backward(x: FloatTensor, weight: FloatTensor, output_grad: FloatTensor; options: ConvTransposeOptions<3>),
        unfold4d(x: FloatTensor; kernel_size: [usize; 2], options: UnfoldOptions),
        avg_pool1d(x: FloatTensor; kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool),
        avg_pool1d_backward(x: FloatTensor, grad: FloatTensor; kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool),
        avg_pool2d(x: FloatTensor; kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool),
        avg_pool2d_backward(x: FloatTensor, grad: FloatTensor; kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool),
        adaptive_avg_pool1d(x: FloatTensor; output_size: usize),
        adaptive_avg_pool1d_backward(x: FloatTensor, grad: FloatTensor;),
        adaptive_avg_pool2d(x: FloatTensor; output_size: [usize; 2]),
        adaptive_avg_pool2d_backward(x: FloatTensor, grad: FloatTensor;),
        max_pool1d(x: FloatTensor; kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool),
        max_pool2d(x: FloatTensor; kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool),
        interpolate(x: FloatTensor; output_size: [usize; 2], options: InterpolateOptions),
        interpolate_backward(x: FloatTensor, grad: FloatTensor; output_size: [usize; 2], options: InterpolateOptions),
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

    fn max_pool1d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
    ) -> MaxPool1dWithIndices<Self> {
        let device = x.device().clone();
        let x = x.gathered("max_pool1d_with_indices");
        let pooled = B::max_pool1d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode);
        MaxPool1dWithIndices::new(SpatialTensor::full(pooled.output, device.clone()), SpatialTensor::full(pooled.indices, device))
    }

    fn max_pool1d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool1dBackward<Self> {
        let op = "max_pool1d_with_indices_backward";
        let device = x.device().clone();
        let (x, grad, indices) = (x.gathered(op), output_grad.gathered(op), indices.gathered(op));
        let grads = B::max_pool1d_with_indices_backward(x, kernel_size, stride, padding, dilation, ceil_mode, grad, indices);
        MaxPool1dBackward::new(SpatialTensor::full(grads.x_grad, device))
    }

    fn max_pool2d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
    ) -> MaxPool2dWithIndices<Self> {
        let device = x.device().clone();
        let x = x.gathered("max_pool2d_with_indices");
        let pooled = B::max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode);
        MaxPool2dWithIndices::new(SpatialTensor::full(pooled.output, device.clone()), SpatialTensor::full(pooled.indices, device))
    }

    fn max_pool2d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool2dBackward<Self> {
        let op = "max_pool2d_with_indices_backward";
        let device = x.device().clone();
        let (x, grad, indices) = (x.gathered(op), output_grad.gathered(op), indices.gathered(op));
        let grads = B::max_pool2d_with_indices_backward(x, kernel_size, stride, padding, dilation, ceil_mode, grad, indices);
        MaxPool2dBackward::new(SpatialTensor::full(grads.x_grad, device))
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
