//! Convolutions, pools, interpolations, norms and attention of programs.

use burn::tensor::ops::{AttentionModuleOptions, ConvOptions, ConvTransposeOptions, FloatTensor, InterpolateMode, InterpolateOptions};
use burn::tensor::{Tensor, TensorMetadata, module};
use burn_spatial::nn::{ConvSpec, NormSpec, PaddingMode, PoolSpec, UpsampleMode, UpsampleSpec};

use super::interpret::wrap;
use super::lab::Lab;
use super::{Op, Window};

fn first<const N: usize>(numbers: &[usize]) -> [usize; N] {
    std::array::from_fn(|i| numbers[i])
}

fn padding<const N: usize>(window: &Window) -> [usize; N] {
    std::array::from_fn(|i| window.padding[i].0)
}

/// The specification of a padded 3D convolution.
pub(super) fn conv_spec(w: &Window) -> ConvSpec {
    let modes = [PaddingMode::Zeros, PaddingMode::Periodic, PaddingMode::Reflect, PaddingMode::Replicate];
    ConvSpec {
        stride: first(&w.stride),
        padding: std::array::from_fn(|i| w.padding[i]),
        mode: modes[w.mode as usize],
        dilation: first(&w.dilation),
        groups: w.groups,
    }
}

/// The specification of a 3D pool.
pub(super) fn pool_spec(w: &Window) -> PoolSpec {
    PoolSpec {
        kernel: first(&w.kernel),
        stride: first(&w.stride),
        padding: padding(w),
        dilation: first(&w.dilation),
        count_include_pad: w.include,
        ceil: w.ceil,
        divisor: None,
    }
}

fn upsample_spec(size: [usize; 3], trilinear: bool, align_corners: bool) -> UpsampleSpec {
    let mode = if trilinear { UpsampleMode::Trilinear } else { UpsampleMode::Nearest };
    UpsampleSpec { size, scale: None, mode, align_corners }
}

fn plain<B: Lab, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

/// An operation. Collective.
///
/// # Panics
/// If the operands do not fit it.
pub(super) fn apply<B: Lab>(op: &Op, args: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    let rank = args[0].shape().num_dims();
    let mut args = args.into_iter();
    let x = args.next().expect("an operand");
    match op {
        Op::Attention => {
            let (key, value) = (wrap(args.next().expect("a key")), wrap(args.next().expect("a value")));
            plain::<B, 4>(module::attention(wrap(x), key, value, None, None, AttentionModuleOptions::default()))
        }
        Op::Conv(w) => {
            let (weight, bias) = (args.next().expect("a weight"), args.next().map(wrap));
            match rank {
                3 => plain::<B, 3>(module::conv1d(wrap(x), wrap(weight), bias, conv_options::<1>(w))),
                4 => plain::<B, 4>(module::conv2d(wrap(x), wrap(weight), bias, conv_options::<2>(w))),
                _ => plain::<B, 5>(module::conv3d(wrap(x), wrap(weight), bias, conv_options::<3>(w))),
            }
        }
        Op::Transposed(w) => {
            let (weight, bias) = (args.next().expect("a weight"), args.next().map(wrap));
            match rank {
                3 => plain::<B, 3>(module::conv_transpose1d(wrap(x), wrap(weight), bias, transposed_options(w))),
                4 => plain::<B, 4>(module::conv_transpose2d(wrap(x), wrap(weight), bias, transposed_options(w))),
                _ => plain::<B, 5>(module::conv_transpose3d(wrap(x), wrap(weight), bias, transposed_options(w))),
            }
        }
        Op::PaddedConv(w) => {
            let weight = args.next().expect("a weight");
            let spec = conv_spec(w);
            spec.window(x.shape().dims(), weight.shape().dims()).expect("the window fits");
            B::conv3d_padded(x, weight, args.next(), w.slope, &spec)
        }
        Op::MaxPool(w) => match rank {
            3 => plain::<B, 3>(module::max_pool1d(wrap(x), w.kernel[0], w.stride[0], w.padding[0].0, w.dilation[0], w.ceil)),
            4 => {
                let (kernel, stride, dilation) = (first(&w.kernel), first(&w.stride), first(&w.dilation));
                plain::<B, 4>(module::max_pool2d(wrap(x), kernel, stride, padding(w), dilation, w.ceil))
            }
            _ => {
                let spec = pool_spec(w);
                spec.window(x.shape().dims()).expect("the window fits");
                plain::<B, 5>(burn_spatial::nn::max_pool3d(wrap(x), &spec).0)
            }
        },
        Op::AvgPool(w) => match rank {
            3 => plain::<B, 3>(module::avg_pool1d(wrap(x), w.kernel[0], w.stride[0], w.padding[0].0, w.include, w.ceil)),
            4 => plain::<B, 4>(module::avg_pool2d(wrap(x), first(&w.kernel), first(&w.stride), padding(w), w.include, w.ceil)),
            _ => {
                let spec = PoolSpec { dilation: [1; 3], ..pool_spec(w) };
                spec.window(x.shape().dims()).expect("the window fits");
                plain::<B, 5>(burn_spatial::nn::avg_pool3d(wrap(x), &spec))
            }
        },
        Op::Adaptive(size) if rank == 3 => plain::<B, 3>(module::adaptive_avg_pool1d(wrap(x), size[0])),
        Op::Adaptive(size) => plain::<B, 4>(module::adaptive_avg_pool2d(wrap(x), first(size))),
        Op::Interpolate(size, mode, align) => {
            let mode = [InterpolateMode::Nearest, InterpolateMode::Bilinear, InterpolateMode::Bicubic][*mode as usize].clone();
            plain::<B, 4>(module::interpolate(wrap(x), *size, InterpolateOptions::new(mode).with_align_corners(*align)))
        }
        Op::Upsample(size, trilinear, align) => {
            let spec = upsample_spec(*size, *trilinear, *align);
            spec.check(x.shape().dims()).expect("the interpolation fits");
            plain::<B, 5>(burn_spatial::nn::upsample3d(wrap(x), &spec))
        }
        Op::BatchNorm(slope) => {
            let (gamma, beta) = (args.next().expect("gamma"), args.next().expect("beta"));
            B::batch_norm(x, gamma, beta, NormSpec { epsilon: 1e-2, slope: *slope }).0
        }
        Op::LayerNorm => {
            let (gamma, beta) = (args.next().expect("gamma"), args.next());
            B::layer_norm(x, gamma, beta, 1e-2)
        }
        Op::WholeVolume => B::whole_volume(x),
        _ => unreachable!("told apart before"),
    }
}

fn conv_options<const N: usize>(w: &Window) -> ConvOptions<N> {
    ConvOptions::new(first(&w.stride), padding(w), first(&w.dilation), w.groups)
}

fn transposed_options<const N: usize>(w: &Window) -> ConvTransposeOptions<N> {
    ConvTransposeOptions::new(first(&w.stride), padding(w), first(&w.longer), first(&w.dilation), w.groups)
}
