//! Burn's own modules and losses, unchanged, on split tensors against one plain rank: results, every gradient, and how
//! often a tensor is gathered for want of a rule.

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::attention::{
    CrossAttention, CrossAttentionConfig, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::conv::*;
use burn::nn::interpolate::{Interpolate1d, Interpolate1dConfig, Interpolate2d, Interpolate2dConfig, InterpolateMode};
use burn::nn::loss::*;
use burn::nn::pool::*;
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder, TransformerEncoderConfig,
    TransformerEncoderInput,
};
use burn::nn::*;
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData, activation};
use burn_spatial::{Spatial, place};

use crate::modules::{CollectGradients, Fill, near, numbers};
use crate::suite::{Device, Program, agree};

type Plain = Autodiff<Flex>;
type Split = Autodiff<Spatial<Flex>>;

#[derive(Debug)]
struct Outcome {
    output: Vec<f32>,
    x_gradient: Vec<f32>,
    gradients: Vec<f32>,
}

/// What `forward` of a module with set weights makes of set numbers, and the gradients of a weighted sum of it.
fn outcome<B: AutodiffBackend, M: AutodiffModule<B>, const I: usize, const O: usize>(
    module: M,
    x: Tensor<B, I>,
    forward: impl Fn(&M, Tensor<B, I>) -> Tensor<B, O>,
) -> Outcome {
    let module = module.map(&mut Fill(0));
    let x = x.require_grad();
    let y = forward(&module, x.clone());
    let n = y.dims().iter().product();
    let weights = Tensor::from_data(TensorData::new(numbers(n, 77), y.dims()), &y.device());
    let output = y.clone().into_data().to_vec().unwrap();
    let mut grads = (y * weights).sum().backward();
    let x_gradient = x.grad_remove(&mut grads).map_or_else(Vec::new, |g| g.into_data().to_vec().unwrap());
    let grads = GradientsParams::from_grads(grads, &module);
    let mut gradients = CollectGradients(&grads, Vec::new());
    module.visit(&mut gradients);
    Outcome { output, x_gradient, gradients: gradients.1 }
}

fn compare(split: &Outcome, plain: &Outcome, how: &str) {
    near(&split.output, &plain.output, 1e-5, &format!("the output, {how}"));
    near(&split.x_gradient, &plain.x_gradient, 2e-5, &format!("the gradient of x, {how}"));
    near(&split.gradients, &plain.gradients, 2e-5, &format!("the gradients of weights, {how}"));
}

/// `name: [shape of x] -> rank of the result, type, how it is made, how it is used, operations that may gather`.
macro_rules! modules {
    ($($name:ident: [$($extent:literal),*] $in:literal -> $out:literal, $type:ty, |$device:ident| $make:expr, |$module:ident, $x:ident| $forward:expr, gathers [$($gather:literal),*];)*) => {
        $(
            #[doc = concat!("`", stringify!($type), "`.")]
            pub fn $name(device: &Device) {
                fn make<B: Backend>($device: &B::Device) -> $type {
                    let _ = $device;
                    $make
                }
                fn forward<B: Backend>($module: &$type, $x: Tensor<B, $in>) -> Tensor<B, $out> {
                    $forward
                }
                const SHAPE: [usize; $in] = [$($extent),*];
                let data = || TensorData::new(numbers(SHAPE.iter().product(), 5), SHAPE);
                let one = Default::default();
                let plain = outcome(make::<Plain>(&one), Tensor::from_data(data(), &one), forward::<Plain>);
                let x = place::split(Tensor::<Split, $in>::from_data(data(), device));
                let split = outcome(make::<Split>(device), x, forward::<Split>);
                compare(&split, &plain, "split as a volume");
                let bytes = |v: &[f32]| v.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>();
                agree(device, "the gradients of weights", &bytes(&split.gradients));
                let allowed: &[&str] = &[$($gather),*];
                let gathers = device.stats().gathers;
                assert!(gathers.keys().all(|op| allowed.contains(&op.as_ref())), "gathered: {gathers:?}");
                // The input split anyhow; what then has no rule gathers.
                for seed in 0..3 {
                    device.set_split_inputs(Some(seed));
                    let x = Tensor::<Split, $in>::from_data(data(), device);
                    device.set_split_inputs(None);
                    compare(&outcome(make::<Split>(device), x, forward::<Split>), &plain, &format!("split anyhow ({seed})"));
                }
            }
        )*

        /// What of this module runs on every grid.
        pub const PROGRAMS: &[Program] = &[$(Program { name: stringify!($name), run: $name }),*];
    };
}

/// Volumes as samples of classes: `[N * D * H * W, C]`, as Burn's cross-entropy takes them.
fn rows<B: Backend>(x: Tensor<B, 5>) -> Tensor<B, 2> {
    let [n, c, d, h, w] = x.dims();
    x.permute([0, 2, 3, 4, 1]).reshape([n * d * h * w, c])
}

/// A class for every voxel, of numbers that are none of x.
fn classes<B: Backend>(x: &Tensor<B, 5>) -> Tensor<B, 1, Int> {
    let [n, _, d, h, w] = x.dims();
    x.clone().detach().mul_scalar(7.0).int().abs().remainder_scalar(3).slice([0..n, 0..1, 0..d, 0..h, 0..w]).reshape([n * d * h * w])
}

modules! {
    conv1d: [4, 6, 9] 3 -> 3, Conv1d<B>, |device| Conv1dConfig::new(6, 4, 3).with_stride(2).with_padding(PaddingConfig1d::Explicit(1, 1)).with_groups(2).init(device), |m, x| m.forward(x), gathers [];
    conv2d: [4, 3, 8, 7] 4 -> 4, Conv2d<B>, |device| Conv2dConfig::new([3, 4], [3, 2]).with_padding(PaddingConfig2d::Explicit(1, 0, 1, 0)).with_dilation([1, 2]).init(device), |m, x| m.forward(x), gathers [];
    conv3d: [2, 3, 6, 5, 7] 5 -> 5, Conv3d<B>, |device| Conv3dConfig::new([3, 4], [3, 3, 3]).with_stride([2, 1, 2]).with_padding(PaddingConfig3d::Explicit(1, 1, 1)).init(device), |m, x| m.forward(x), gathers [];
    conv_transpose1d: [4, 6, 7] 3 -> 3, ConvTranspose1d<B>, |device| ConvTranspose1dConfig::new([6, 4], 3).with_stride(2).with_padding(1).with_padding_out(1).init(device), |m, x| m.forward(x), gathers [];
    conv_transpose2d: [4, 3, 5, 6] 4 -> 4, ConvTranspose2d<B>, |device| ConvTranspose2dConfig::new([3, 4], [3, 2]).with_stride([2, 2]).init(device), |m, x| m.forward(x), gathers [];
    conv_transpose3d: [2, 3, 4, 5, 3] 5 -> 5, ConvTranspose3d<B>, |device| ConvTranspose3dConfig::new([3, 4], [2, 3, 2]).with_stride([2, 2, 2]).init(device), |m, x| m.forward(x), gathers [];
    deform_conv2d: [4, 3, 6, 5] 4 -> 4, DeformConv2d<B>, |device| DeformConv2dConfig::new([3, 4], [3, 3]).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).init(device), |m, x| {
        let offset = x.clone().slice([0..4, 0..1, 0..6, 0..5]).repeat_dim(1, 18).mul_scalar(0.3);
        m.forward(x, offset, None)
    }, gathers ["deform_conv2d", "deform_conv2d_backward"];
    max_pool1d: [4, 3, 9] 3 -> 3, MaxPool1d, |device| MaxPool1dConfig::new(3).with_stride(2).with_padding(PaddingConfig1d::Explicit(1, 1)).init(), |m, x| m.forward(x), gathers [];
    max_pool2d: [4, 3, 8, 7] 4 -> 4, MaxPool2d, |device| MaxPool2dConfig::new([3, 2]).with_strides([2, 2]).init(), |m, x| m.forward(x), gathers [];
    avg_pool1d: [4, 3, 9] 3 -> 3, AvgPool1d, |device| AvgPool1dConfig::new(3).with_stride(1).init(), |m, x| m.forward(x), gathers [];
    avg_pool2d: [4, 3, 8, 7] 4 -> 4, AvgPool2d, |device| AvgPool2dConfig::new([3, 2]).with_strides([1, 2]).init(), |m, x| m.forward(x), gathers [];
    adaptive_avg_pool1d: [4, 3, 9] 3 -> 3, AdaptiveAvgPool1d, |device| AdaptiveAvgPool1dConfig::new(4).init(), |m, x| m.forward(x), gathers [];
    adaptive_avg_pool2d: [4, 3, 8, 7] 4 -> 4, AdaptiveAvgPool2d, |device| AdaptiveAvgPool2dConfig::new([3, 4]).init(), |m, x| m.forward(x), gathers [];
    interpolate1d: [4, 3, 6] 3 -> 3, Interpolate1d, |device| Interpolate1dConfig::new().with_output_size(Some(11)).with_mode(InterpolateMode::Nearest).init(), |m, x| m.forward(x), gathers [];
    interpolate2d_nearest: [4, 3, 5, 6] 4 -> 4, Interpolate2d, |device| Interpolate2dConfig::new().with_output_size(Some([8, 9])).with_mode(InterpolateMode::Nearest).init(), |m, x| m.forward(x), gathers [];
    unfold4d: [4, 3, 6, 5] 4 -> 3, Unfold4d, |device| Unfold4dConfig::new([3, 2]).with_padding([1, 0]).init(), |m, x| m.forward(x), gathers [];
    batch_norm1d: [4, 3, 9] 3 -> 3, BatchNorm<B>, |device| BatchNormConfig::new(3).init(device), |m, x| m.forward(x), gathers [];
    batch_norm2d: [4, 3, 6, 5] 4 -> 4, BatchNorm<B>, |device| BatchNormConfig::new(3).init(device), |m, x| m.forward(x), gathers [];
    batch_norm3d: [4, 3, 6, 5, 4] 5 -> 5, BatchNorm<B>, |device| BatchNormConfig::new(3).init(device), |m, x| m.forward(x), gathers [];
    group_norm: [4, 6, 5, 4, 3] 5 -> 5, GroupNorm<B>, |device| GroupNormConfig::new(2, 6).init(device), |m, x| m.forward(x), gathers [];
    instance_norm: [4, 3, 5, 4, 6] 5 -> 5, InstanceNorm<B>, |device| InstanceNormConfig::new(3).init(device), |m, x| m.forward(x), gathers [];
    layer_norm: [4, 3, 5, 4, 6] 5 -> 5, LayerNorm<B>, |device| LayerNormConfig::new(6).init(device), |m, x| m.forward(x), gathers [];
    rms_norm: [4, 3, 5, 4, 6] 5 -> 5, RmsNorm<B>, |device| RmsNormConfig::new(6).init(device), |m, x| m.forward(x), gathers [];
    local_response_norm: [4, 5, 4, 6] 4 -> 4, LocalResponseNorm, |device| LocalResponseNormConfig::new(3).init(), |m, x| m.forward(x), gathers [];
    prelu: [4, 3, 5, 4, 6] 5 -> 5, PRelu<B>, |device| PReluConfig::new().with_num_parameters(3).init(device), |m, x| m.forward(x), gathers [];
    gelu: [4, 3, 5, 4, 6] 5 -> 5, Gelu, |device| Gelu::new(), |m, x| m.forward(x), gathers [];
    glu: [4, 6, 5, 4, 6] 5 -> 5, GLU, |device| GLU::new(1), |m, x| m.forward(x), gathers [];
    swiglu: [4, 5, 6] 3 -> 3, SwiGlu<B>, |device| SwiGluConfig::new(6, 4).init(device), |m, x| m.forward(x), gathers [];
    hard_sigmoid: [4, 3, 5, 4, 6] 5 -> 5, HardSigmoid, |device| HardSigmoidConfig::new().init(), |m, x| m.forward(x), gathers [];
    softplus: [4, 3, 5, 4, 6] 5 -> 5, Softplus, |device| SoftplusConfig::new().init(), |m, x| m.forward(x), gathers [];
    tanh: [4, 3, 5, 4, 6] 5 -> 5, Tanh, |device| Tanh::new(), |m, x| m.forward(x), gathers [];
    linear: [4, 5, 6] 3 -> 3, Linear<B>, |device| LinearConfig::new(6, 4).init(device), |m, x| m.forward(x), gathers [];
    linear_of_volumes: [2, 4, 5, 3, 6] 5 -> 5, Linear<B>, |device| LinearConfig::new(6, 4).init(device), |m, x| m.forward(x), gathers [];
    embedding: [4, 6] 2 -> 3, Embedding<B>, |device| EmbeddingConfig::new(7, 4).init(device), |m, x| m.forward(x.detach().mul_scalar(6.0).abs().int()), gathers [];
    positional_encoding: [4, 5, 6] 3 -> 3, PositionalEncoding<B>, |device| PositionalEncodingConfig::new(6).with_max_sequence_size(8).init(device), |m, x| m.forward(x), gathers [];
    rotary_encoding: [4, 5, 6] 3 -> 3, RotaryEncoding<B>, |device| RotaryEncodingConfig::new(8, 6).init(device), |m, x| m.forward(x), gathers [];
    multi_head_attention: [4, 5, 6] 3 -> 3, MultiHeadAttention<B>, |device| MultiHeadAttentionConfig::new(6, 2).with_dropout(0.0).init(device), |m, x| {
        let mask = generate_autoregressive_mask(4, 5, &x.device());
        m.forward(MhaInput::self_attn(x).mask_attn(mask)).context
    }, gathers [];
    cross_attention: [4, 5, 6] 3 -> 3, CrossAttention<B>, |device| CrossAttentionConfig::new(6, 6, 2, 1, 3).with_dropout(0.0).init(device), |m, x| m.forward(x.clone(), x, None), gathers [];
    transformer_encoder: [4, 5, 6] 3 -> 3, TransformerEncoder<B>, |device| TransformerEncoderConfig::new(6, 8, 2, 2).with_dropout(0.0).init(device), |m, x| m.forward(TransformerEncoderInput::new(x)), gathers [];
    transformer_decoder: [4, 5, 6] 3 -> 3, TransformerDecoder<B>, |device| TransformerDecoderConfig::new(6, 8, 2, 1).with_dropout(0.0).init(device), |m, x| m.forward(TransformerDecoderInput::new(x.clone(), x)), gathers [];
    rnn: [4, 5, 6] 3 -> 3, Rnn<B>, |device| RnnConfig::new(6, 4, true).init(device), |m, x| m.forward(x, None).0, gathers [];
    gru: [4, 5, 6] 3 -> 3, Gru<B>, |device| GruConfig::new(6, 4, true).init(device), |m, x| m.forward(x, None), gathers [];
    lstm: [4, 5, 6] 3 -> 3, Lstm<B>, |device| LstmConfig::new(6, 4, true).init(device), |m, x| m.forward(x, None).0, gathers [];
    bi_lstm: [4, 5, 6] 3 -> 3, BiLstm<B>, |device| BiLstmConfig::new(6, 4, true).init(device), |m, x| m.forward(x, None).0, gathers [];
    cross_entropy: [2, 3, 4, 5, 6] 5 -> 1, CrossEntropyLoss<B>, |device| CrossEntropyLossConfig::new().init(device), |m, x| m.forward(rows(x.clone()), classes(&x)), gathers [];
    cross_entropy_weighted: [2, 3, 4, 5, 6] 5 -> 1, CrossEntropyLoss<B>, |device| CrossEntropyLossConfig::new().with_weights(Some(vec![0.2, 0.5, 1.3])).init(device), |m, x| m.forward(rows(x.clone()), classes(&x)), gathers [];
    cross_entropy_smoothed: [2, 3, 4, 5, 6] 5 -> 1, CrossEntropyLoss<B>, |device| CrossEntropyLossConfig::new().with_smoothing(Some(0.1)).with_pad_tokens(Some(vec![2])).init(device), |m, x| m.forward(rows(x.clone()), classes(&x)), gathers [];
    binary_cross_entropy: [2, 3, 4, 5, 6] 5 -> 1, BinaryCrossEntropyLoss<B>, |device| BinaryCrossEntropyLossConfig::new().with_logits(true).init(device), |m, x| m.forward(x.clone(), x.detach().greater_elem(0.3).int()), gathers [];
    mse: [2, 3, 4, 5, 6] 5 -> 1, MseLoss, |device| MseLoss::new(), |m, x| m.forward(x.clone(), x.detach().mul_scalar(0.7).add_scalar(0.1), Reduction::Mean), gathers [];
    huber: [2, 3, 4, 5, 6] 5 -> 1, HuberLoss, |device| HuberLossConfig::new(0.2).init(), |m, x| m.forward(x.clone(), x.detach().mul_scalar(0.3).add_scalar(0.1), Reduction::Mean), gathers [];
    smooth_l1: [2, 3, 4, 5, 6] 5 -> 1, SmoothL1Loss, |device| SmoothL1LossConfig::new().init(), |m, x| m.forward_with_reduction(x.clone(), x.detach().mul_scalar(0.3).add_scalar(0.1), Reduction::Sum), gathers [];
    kl_divergence: [2, 3, 4, 5, 6] 5 -> 1, KLDivLoss, |device| KLDivLossConfig::new().init(), |m, x| {
        let target = activation::softmax(x.clone().detach().flip([1]), 1);
        m.forward(activation::log_softmax(x, 1), target, Reduction::BatchMean)
    }, gathers [];
    poisson: [2, 3, 4, 5, 6] 5 -> 1, PoissonNllLoss, |device| PoissonNllLossConfig::new().init(), |m, x| m.forward(x.clone(), x.detach().abs(), Reduction::Mean), gathers [];
}
