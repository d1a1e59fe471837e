//! 3D U-Net: the class of every voxel.
//!
//! The network of Çiçek et al. (arXiv 1606.06650), with convolutions that keep the extent ("same" padding), so that a
//! prediction has the extent of its input, and the batch norms of that paper.

use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::conv::{Conv3d, Conv3dConfig, ConvTranspose3d, ConvTranspose3dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, PaddingConfig3d};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_spatial::nn::{MaxPool3d, MaxPool3dConfig, WindowBackend, batch_norm};

/// A ReLU's slope below 0.
const RELU: f64 = 0.0;

/// The largest number of levels: 2^15 voxels become one along each edge.
const MAX_DEPTH: usize = 16;

/// Why a network cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A number of levels outside 1 to 16.
    #[error("a U-Net has 1 to {MAX_DEPTH} levels, not {depth}")]
    Depth {
        /// What was asked for.
        depth: usize,
    },
    /// A batch norm that would have one value a channel.
    #[error(
        "level {level} of {depth} has 1 voxel of 1 sample where the volume has {} and the batch 1 sample, and batch norm cannot train on a single value a channel: take fewer levels, larger volumes or more samples (in the last batch of an epoch, too)",
        .extent.map(|n| n.to_string()).join(" x ")
    )]
    SingleValue {
        /// The level, from 1.
        level: usize,
        /// How many there are.
        depth: usize,
        /// Voxels of the volume along depth, height and width.
        extent: [usize; 3],
    },
    /// No channels or no classes.
    #[error("a U-Net needs at least one input channel, class and channel inside, not {inputs}, {classes} and {width}")]
    Empty {
        /// Input channels.
        inputs: usize,
        /// Classes.
        classes: usize,
        /// Channels of the first convolution.
        width: usize,
    },
}

/// Makes a [`UNet3d`].
#[derive(Config, Debug, PartialEq)]
pub struct UNet3dConfig {
    /// Channels of the input.
    #[config(default = 1)]
    pub inputs: usize,
    /// Classes of voxels.
    #[config(default = 3)]
    pub classes: usize,
    /// Levels of resolution; each halves the extent of the one above.
    #[config(default = 4)]
    pub depth: usize,
    /// Channels of the first convolution. Level i, from 0, has `width * 2^i` and `width * 2^(i + 1)`.
    #[config(default = 32)]
    pub width: usize,
}

impl UNet3dConfig {
    /// Whether there is such a network.
    ///
    /// # Errors
    /// [`ConfigError`] says what is wrong.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !(1..=MAX_DEPTH).contains(&self.depth) {
            return Err(ConfigError::Depth { depth: self.depth });
        }
        if self.inputs == 0 || self.classes == 0 || self.width == 0 {
            return Err(ConfigError::Empty { inputs: self.inputs, classes: self.classes, width: self.width });
        }
        Ok(())
    }

    /// Whether there is such a network, and it can train on batches of `batch` samples of `extent` voxels: every batch norm
    /// needs two values a channel.
    ///
    /// # Errors
    /// [`ConfigError`] says what is wrong.
    pub fn check_training(&self, batch: usize, extent: [usize; 3]) -> Result<(), ConfigError> {
        self.check()?;
        // Voxels of the first level for each of the deepest, which has the fewest.
        let step = 1 << (self.depth - 1);
        if batch <= 1 && extent.iter().all(|n| *n <= step) {
            return Err(ConfigError::SingleValue { level: self.depth, depth: self.depth, extent });
        }
        Ok(())
    }

    /// Channels of the two convolutions of level `level`.
    fn channels(&self, level: usize) -> [usize; 2] {
        [self.width << level, self.width << (level + 1)]
    }

    /// The network, its weights drawn from the device's random stream: uniform within sqrt(6 / fan in) before a ReLU
    /// (He et al., arXiv 1502.01852), within sqrt(3 / fan in) elsewhere, biases of transposed convolutions 0.
    ///
    /// # Errors
    /// [`ConfigError`] when there is no such network.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Result<UNet3d<B>, ConfigError> {
        self.check()?;
        let last = self.depth - 1;
        let down = (0..self.depth).map(|level| {
            let [first, second] = self.channels(level);
            let inputs = if level == 0 { self.inputs } else { first };
            ConvBlock::new([inputs, first, second], device)
        });
        let down = down.collect();
        let up = (0..last).rev().map(|level| {
            let channels = self.channels(level + 1)[1];
            // Each voxel of the output comes from one of the input: the fan in is the number of channels.
            let bound = (3.0 / channels as f64).sqrt();
            let config = ConvTranspose3dConfig::new([channels; 2], [2; 3]).with_stride([2; 3]);
            let up = config.with_initializer(Initializer::Uniform { min: -bound, max: bound }).init::<B>(device);
            let bias = Initializer::Zeros.init([channels], device);
            ConvTranspose3d { bias: Some(bias), ..up }
        });
        let up = up.collect();
        let dec = (0..last).rev().map(|level| {
            let [below, own] = [self.channels(level + 1)[1], self.channels(level)[1]];
            ConvBlock::new([below + own, own, own], device)
        });
        let dec = dec.collect();
        Ok(UNet3d {
            down,
            up,
            dec,
            head: Conv3dConfig::new([self.channels(0)[1], self.classes], [1; 3]).init(device),
            pool: MaxPool3dConfig::new([2; 3]).init(),
        })
    }
}

/// The network. Its parameters are named as in PyTorch: `down.0.seq.0.weight` (convolution), `down.0.seq.1.bias` (batch
/// norm), `up.0.weight`, `dec.0.seq.3.weight`, `final.bias`; `up` and `dec` count from the deepest level. See
/// [`weights`](crate::weights). Made by [`UNet3dConfig::init`].
#[derive(Module, Debug)]
pub struct UNet3d<B: Backend> {
    /// The convolutions of each level on the way down.
    pub down: Vec<ConvBlock<B>>,
    /// The transposed convolutions, deepest first; each keeps its channels.
    pub up: Vec<ConvTranspose3d<B>>,
    /// The convolutions on the way up, deepest first.
    pub dec: Vec<ConvBlock<B>>,
    /// From channels to classes.
    pub head: Conv3d<B>,
    /// Between levels.
    pub pool: MaxPool3d,
}

/// Two 3^3 convolutions without bias, each followed by a batch norm and a ReLU.
#[derive(Module, Debug)]
pub struct ConvBlock<B: Backend> {
    /// The first convolution.
    pub conv1: Conv3d<B>,
    /// Its batch norm.
    pub norm1: BatchNorm<B>,
    /// The second convolution.
    pub conv2: Conv3d<B>,
    /// Its batch norm.
    pub norm2: BatchNorm<B>,
}

impl<B: Backend> ConvBlock<B> {
    /// `inputs` channels become `middle`, and these `outputs`.
    fn new([inputs, middle, outputs]: [usize; 3], device: &B::Device) -> Self {
        let conv = |channels| {
            Conv3dConfig::new(channels, [3; 3])
                .with_padding(PaddingConfig3d::Explicit(1, 1, 1))
                .with_bias(false)
                .with_initializer(Initializer::KaimingUniform { gain: 2f64.sqrt(), fan_out_only: false })
                .init(device)
        };
        ConvBlock {
            conv1: conv([inputs, middle]),
            norm1: BatchNormConfig::new(middle).init(device),
            conv2: conv([middle, outputs]),
            norm2: BatchNormConfig::new(outputs).init(device),
        }
    }
}

impl<B: WindowBackend> ConvBlock<B> {
    /// `[N, inputs, D, H, W]` -> `[N, outputs, D, H, W]`. Collective where the volume is split.
    ///
    /// # Panics
    /// If the number of channels is another.
    pub fn forward(&self, x: Tensor<B, 5>) -> Tensor<B, 5> {
        let x = batch_norm(&self.norm1, self.conv1.forward(x), RELU);
        batch_norm(&self.norm2, self.conv2.forward(x), RELU)
    }
}

impl<B: WindowBackend> UNet3d<B> {
    /// Logits: `[N, inputs, D, H, W]` -> `[N, classes, D, H, W]`, for any extent. One that 2^(levels - 1) does not
    /// divide is padded with zeros at its end, and the result cut back. Collective where the volume is split.
    ///
    /// # Panics
    /// If the number of channels is another.
    pub fn forward(&self, volumes: Tensor<B, 5>) -> Tensor<B, 5> {
        let [n, _, d, h, w] = volumes.dims();
        let mut x = self.padded(volumes);
        let mut skips = Vec::new();
        for (level, block) in self.down.iter().enumerate() {
            x = block.forward(x);
            if level < self.up.len() {
                skips.push(x.clone());
                x = self.pool.forward(x);
            }
        }
        for (up, block) in self.up.iter().zip(&self.dec) {
            let up = up.forward(x);
            x = block.forward(match skips.pop() {
                Some(skip) => Tensor::cat(vec![skip, up], 1),
                None => up,
            });
        }
        let logits = self.head.forward(x);
        let classes = logits.dims()[1];
        logits.slice([0..n, 0..classes, 0..d, 0..h, 0..w])
    }

    /// `x` with zeros at its end, up to a multiple of the coarsest voxel.
    fn padded(&self, x: Tensor<B, 5>) -> Tensor<B, 5> {
        let [n, c, d, h, w] = x.dims();
        let [to_d, to_h, to_w] = [d, h, w].map(|extent| extent.next_multiple_of(1 << self.up.len()));
        if [to_d, to_h, to_w] == [d, h, w] {
            return x;
        }
        let zeros = Tensor::zeros([n, c, to_d, to_h, to_w], (&x.device(), x.dtype()));
        zeros.slice_assign([0..n, 0..c, 0..d, 0..h, 0..w], x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights;
    use burn::backend::Flex;

    fn model(config: &UNet3dConfig) -> UNet3d<Flex> {
        config.init(&Default::default()).unwrap()
    }

    #[test]
    fn parameters_are_counted_and_named_as_in_pytorch() {
        let named = weights::collect(&model(&UNet3dConfig::new()));
        let trained = named.iter().filter(|(name, _)| !name.contains("running_"));
        assert_eq!(trained.map(|(_, data)| data.num_elements()).sum::<usize>(), 19_071_459);
        assert_eq!(named["down.0.seq.0.weight"].shape.to_vec(), [32, 1, 3, 3, 3]);
        assert_eq!(named["down.3.seq.3.weight"].shape.to_vec(), [512, 256, 3, 3, 3]);
        assert_eq!(named["up.0.weight"].shape.to_vec(), [512, 512, 2, 2, 2]);
        assert_eq!(named["dec.0.seq.0.weight"].shape.to_vec(), [256, 768, 3, 3, 3]);
        assert_eq!(named["final.weight"].shape.to_vec(), [3, 64, 1, 1, 1]);
        for name in ["down.2.seq.1.bias", "down.1.seq.4.running_var", "up.2.bias", "dec.2.seq.4.weight", "final.bias"] {
            assert!(named.contains_key(name), "{name}");
        }
    }

    #[test]
    fn any_extent_gives_its_own_back() {
        let config = UNet3dConfig::new().with_inputs(2).with_classes(5).with_depth(3).with_width(1);
        let logits = model(&config).forward(Tensor::ones([1, 2, 7, 4, 9], &Default::default()));
        assert_eq!(logits.dims(), [1, 5, 7, 4, 9]);
        let flat = model(&config.with_depth(1)).forward(Tensor::ones([2, 2, 3, 1, 2], &Default::default()));
        assert_eq!(flat.dims(), [2, 5, 3, 1, 2]);
    }

    #[test]
    fn a_batch_norm_of_single_values_is_refused() {
        let config = UNet3dConfig::new().with_depth(5);
        let message = config.check_training(1, [16; 3]).unwrap_err().to_string();
        assert!(message.starts_with("level 5 of 5 has 1 voxel of 1 sample where the volume has 16 x 16 x 16 "), "{message}");
        for (batch, extent) in [(2, [16; 3]), (1, [16, 16, 17])] {
            assert_eq!(config.check_training(batch, extent), Ok(()));
        }
        let flat = config.with_depth(1);
        assert_eq!(flat.check_training(1, [1; 3]), Err(ConfigError::SingleValue { level: 1, depth: 1, extent: [1; 3] }));
        assert_eq!(flat.check_training(1, [1, 1, 2]), Ok(()));
        assert_eq!(flat.with_depth(0).check_training(1, [16; 3]), Err(ConfigError::Depth { depth: 0 }));
    }

    #[test]
    fn what_cannot_be_made_is_refused() {
        let refused = |config: UNet3dConfig| config.init::<Flex>(&Default::default()).unwrap_err();
        let base = UNet3dConfig::new();
        assert_eq!(refused(base.clone().with_depth(0)).to_string(), "a U-Net has 1 to 16 levels, not 0");
        assert_eq!(refused(base.clone().with_depth(40)), ConfigError::Depth { depth: 40 });
        assert_eq!(refused(base.with_classes(0)), ConfigError::Empty { inputs: 1, classes: 0, width: 32 });
    }
}
