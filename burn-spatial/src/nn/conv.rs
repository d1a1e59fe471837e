//! A 3D convolution with asymmetric, periodic, mirrored and replicated padding, and Burn's with an activation.

use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::PaddingConfig3d;
use burn::nn::conv::Conv3d;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive, activation};

use super::{ConvSpec, PaddingMode, WindowBackend, same_padding};

/// Convolves x `[N, Cin, D, H, W]` with weight `[Cout, Cin / groups, kernel..]` and adds bias `[Cout]`:
/// `[N, Cout, out..]` with out = floor((in + lo + hi - (kernel - 1) dilation - 1) / stride) + 1.
///
/// # Panics
/// If the spec does not fit the shapes; see [`SpecError`](super::SpecError).
pub fn padded_conv3d<B: WindowBackend>(x: Tensor<B, 5>, weight: Tensor<B, 5>, bias: Option<Tensor<B, 1>>, spec: &ConvSpec) -> Tensor<B, 5> {
    spec.window(x.dims(), weight.dims()).unwrap_or_else(|e| panic!("padded_conv3d: {e}"));
    activated(x, weight, bias, 1.0, spec)
}

/// Burn's `conv` followed by an activation in the same pass over memory: x -> `leaky_relu(conv(x))` with negative results
/// times `slope` (1: none, 0: ReLU). x is `[N, Cin, D, H, W]`. For the backward pass the result is kept, but not the sums
/// before the activation; with a negative slope, where a result does not say their sign, the activation is one of its own.
/// `Same` padding that is not the same on both sides, which Burn's `forward` refuses, is that of [`same_padding`].
/// Collective where x is split.
///
/// # Panics
/// If x has other channels than `conv` or is too small for it; see [`SpecError`](super::SpecError).
pub fn activated_conv3d<B: WindowBackend>(conv: &Conv3d<B>, x: Tensor<B, 5>, slope: f64) -> Tensor<B, 5> {
    if slope < 0.0 || slope.is_nan() {
        return activation::leaky_relu(activated_conv3d(conv, x, 1.0), slope);
    }
    let [_, _, extents @ ..] = x.dims();
    let padding = match conv.padding {
        PaddingConfig3d::Valid => [(0, 0); 3],
        PaddingConfig3d::Explicit(d, h, w) => [d, h, w].map(|p| (p, p)),
        // As Burn's, which leaves out the dilation.
        PaddingConfig3d::Same => std::array::from_fn(|i| same_padding(extents[i], conv.kernel_size[i], conv.stride[i], 1)),
    };
    let spec = ConvSpec { stride: conv.stride, padding, dilation: conv.dilation, groups: conv.groups, ..ConvSpec::default() };
    spec.window(x.dims(), conv.weight.shape().dims()).unwrap_or_else(|e| panic!("activated_conv3d: {e}"));
    activated(x, conv.weight.val(), conv.bias.as_ref().map(|b| b.val()), slope, &spec)
}

/// [`WindowBackend::conv3d_padded`] of tensors that fit.
fn activated<B: WindowBackend>(
    x: Tensor<B, 5>,
    weight: Tensor<B, 5>,
    bias: Option<Tensor<B, 1>>,
    slope: f64,
    spec: &ConvSpec,
) -> Tensor<B, 5> {
    let bias = bias.map(|b| b.into_primitive().tensor());
    let out = B::conv3d_padded(x.into_primitive().tensor(), weight.into_primitive().tensor(), bias, slope, spec);
    Tensor::from_primitive(TensorPrimitive::Float(out))
}

/// Padding of a volume, before and after it along depth, height and width.
#[derive(Config, Copy, Debug, PartialEq, Eq)]
pub struct Padding3d {
    /// Voxels before and after.
    pub sides: [(usize, usize); 3],
    /// What they hold.
    pub mode: PaddingMode,
}

/// Makes a [`PaddedConv3d`].
#[derive(Config, Debug)]
pub struct PaddedConv3dConfig {
    /// Input and output channels.
    pub channels: [usize; 2],
    /// Taps along depth, height and width.
    pub kernel_size: [usize; 3],
    /// Voxels between outputs.
    #[config(default = "[1, 1, 1]")]
    pub stride: [usize; 3],
    /// Voxels between taps.
    #[config(default = "[1, 1, 1]")]
    pub dilation: [usize; 3],
    /// Independent groups of channels.
    #[config(default = "1")]
    pub groups: usize,
    /// Voxels added before and after; [`same_padding`](super::same_padding) computes those that keep the extent.
    #[config(default = "[(0, 0), (0, 0), (0, 0)]")]
    pub padding: [(usize, usize); 3],
    /// What the added voxels hold.
    #[config(default = "PaddingMode::Zeros")]
    pub padding_mode: PaddingMode,
    /// Whether to add a bias.
    #[config(default = true)]
    pub bias: bool,
    /// How the parameters start: Burn's default for convolutions, uniform within 1 / sqrt(fan in).
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3.0f64.sqrt(),fan_out_only:false}")]
    pub initializer: Initializer,
}

/// 3D convolution with a padding of its own on each side: [`padded_conv3d`] as a module. Its record is that of
/// `burn::nn::conv::Conv3d`. Should be made with [`PaddedConv3dConfig`].
#[derive(Module, Debug)]
pub struct PaddedConv3d<B: Backend> {
    /// `[Cout, Cin / groups, kernel..]`.
    pub weight: Param<Tensor<B, 5>>,
    /// `[Cout]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
    /// Voxels between outputs.
    pub stride: [usize; 3],
    /// Taps along depth, height and width.
    pub kernel_size: [usize; 3],
    /// Voxels between taps.
    pub dilation: [usize; 3],
    /// Independent groups of channels.
    pub groups: usize,
    /// The padding.
    pub padding: Padding3d,
}

impl PaddedConv3dConfig {
    /// The module, its parameters drawn from the initializer.
    ///
    /// # Panics
    /// On a zero kernel, stride, dilation or group count and on channels that the groups do not divide.
    pub fn init<B: Backend>(&self, device: &B::Device) -> PaddedConv3d<B> {
        let padding = Padding3d { sides: self.padding, mode: self.padding_mode };
        let spec = spec(self.stride, padding, self.dilation, self.groups);
        spec.check(self.channels, self.kernel_size).unwrap_or_else(|e| panic!("PaddedConv3d: {e}"));
        let [input, output] = self.channels.map(|c| c / self.groups);
        let [d, h, w] = self.kernel_size;
        let taps = d * h * w;
        let (fan_in, fan_out) = (Some(input * taps), Some(output * taps));
        let outputs = self.channels[1];
        PaddedConv3d {
            weight: self.initializer.init_with([outputs, input, d, h, w], fan_in, fan_out, device),
            bias: self.bias.then(|| self.initializer.init_with([outputs], fan_in, fan_out, device)),
            stride: self.stride,
            kernel_size: self.kernel_size,
            dilation: self.dilation,
            groups: self.groups,
            padding,
        }
    }
}

fn spec(stride: [usize; 3], padding: Padding3d, dilation: [usize; 3], groups: usize) -> ConvSpec {
    ConvSpec { stride, padding: padding.sides, mode: padding.mode, dilation, groups }
}

impl<B: Backend> PaddedConv3d<B> {
    /// `[N, Cin, D, H, W]` -> `[N, Cout, out..]`, see [`padded_conv3d`].
    ///
    /// # Panics
    /// If the kernel is larger than the padded input, the channels differ, periodic padding exceeds the extent, or
    /// mirrored padding reaches it.
    pub fn forward(&self, x: Tensor<B, 5>) -> Tensor<B, 5>
    where
        B: WindowBackend,
    {
        let spec = spec(self.stride, self.padding, self.dilation, self.groups);
        padded_conv3d(x, self.weight.val(), self.bias.as_ref().map(|b| b.val()), &spec)
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::nn::conv::Conv3dConfig;

    use super::*;

    #[test]
    #[should_panic = "activated_conv3d: the input has 3 channels, but the weight is for 2"]
    fn other_channels_are_refused() {
        let device = Default::default();
        let conv = Conv3dConfig::new([2, 4], [3; 3]).init::<Flex>(&device);
        activated_conv3d(&conv, Tensor::zeros([1, 3, 4, 4, 4], &device), 0.1);
    }
}
