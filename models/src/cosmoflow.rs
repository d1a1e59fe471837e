//! CosmoFlow: cosmological parameters from the dark-matter density of a simulated universe.
//!
//! The network of Mathuriya et al. (arXiv 1808.04728) as extended to larger volumes by Oyama et al. (arXiv
//! 2007.12856): seven 3^3 convolutions, of which the fourth has stride 2, each with an average pool as long as more
//! than 2^3 voxels remain, and three dense layers.

use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::conv::{Conv3d, Conv3dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, LeakyRelu, LeakyReluConfig, Linear, LinearConfig, PaddingConfig3d};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_spatial::nn::{AvgPool3d, AvgPool3dConfig, WindowBackend, activated_conv3d, batch_norm, whole_volume};

/// Output channels of the convolutions.
const CHANNELS: [usize; 7] = [16, 32, 64, 128, 256, 256, 256];
/// The convolution with stride 2, counted from 0.
const STRIDED: usize = 3;
/// Units of the hidden dense layers.
const UNITS: [usize; 2] = [2048, 256];
/// Voxels along each edge of what the dense layers read.
const LAST_WIDTH: usize = 2;

/// Why a network cannot be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A volume this network has no pools for.
    #[error("CosmoFlow reads cubes of 32, 64, 128, 256 or 512 voxels along each edge, not {width}")]
    Width {
        /// What was asked for.
        width: usize,
    },
    /// Not a divisor of all channel and unit counts.
    #[error("scale {scale} does not divide 16, the smallest number of channels")]
    Scale {
        /// What was asked for.
        scale: usize,
    },
    /// No input or no output.
    #[error("CosmoFlow needs at least one input channel and one output, not {inputs} and {outputs}")]
    Empty {
        /// Input channels.
        inputs: usize,
        /// Outputs.
        outputs: usize,
    },
    /// Not a probability.
    #[error("dropout is a probability below 1, not {dropout}")]
    Dropout {
        /// What was asked for.
        dropout: f64,
    },
}

/// Makes a [`CosmoFlow`].
#[derive(Config, Debug, PartialEq)]
pub struct CosmoFlowConfig {
    /// Voxels along each edge of the input: 32, 64, 128, 256 or 512.
    pub width: usize,
    /// Channels of the input: redshifts.
    #[config(default = 4)]
    pub inputs: usize,
    /// Cosmological parameters to predict.
    #[config(default = 4)]
    pub outputs: usize,
    /// Whether a batch norm follows each convolution.
    #[config(default = true)]
    pub batch_norm: bool,
    /// Share of a dense layer's inputs that training drops.
    #[config(default = 0.2)]
    pub dropout: f64,
    /// Divides all numbers of channels and units: 1 is the paper's network.
    #[config(default = 1)]
    pub scale: usize,
}

/// One step of the network, for tables: see [`CosmoFlowConfig::summary`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// `conv1`, `pool1`, ..., `fc1`, ...
    pub name: String,
    /// What it does.
    pub kind: LayerKind,
    /// Global shape of its output: `[N, C, D, H, W]` or `[N, units]`.
    pub output: Vec<usize>,
    /// Trained numbers: weights, biases, and scales and shifts of its batch norm.
    pub parameters: usize,
    /// Bytes that a float32 training keeps of it for the backward pass, for each element of the output: an estimate
    /// of what Burn's autodiff holds (copies of one buffer counted once).
    pub kept: usize,
}

/// What a [`Layer`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// A convolution, with its batch norm and activation.
    Conv {
        /// Voxels between outputs.
        stride: usize,
    },
    /// An average pool of kernel 3, stride 2 and padding 1.
    Pool,
    /// A dense layer, with its activation.
    Dense,
}

impl CosmoFlowConfig {
    /// Whether there is such a network.
    ///
    /// # Errors
    /// [`ConfigError`] says what is wrong.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !self.width.is_power_of_two() || !(32..=512).contains(&self.width) {
            return Err(ConfigError::Width { width: self.width });
        }
        if self.scale == 0 || !CHANNELS[0].is_multiple_of(self.scale) {
            return Err(ConfigError::Scale { scale: self.scale });
        }
        if self.inputs == 0 || self.outputs == 0 {
            return Err(ConfigError::Empty { inputs: self.inputs, outputs: self.outputs });
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(ConfigError::Dropout { dropout: self.dropout });
        }
        Ok(())
    }

    /// How many pools there are: the first convolutions have one each. The strided convolution halves once.
    fn pools(&self) -> usize {
        (self.width / LAST_WIDTH).ilog2() as usize - 1
    }

    /// Input and output channels of each convolution.
    fn channels(&self) -> [[usize; 2]; 7] {
        let outputs = CHANNELS.map(|c| c / self.scale);
        std::array::from_fn(|i| [if i == 0 { self.inputs } else { outputs[i - 1] }, outputs[i]])
    }

    /// Inputs and outputs of each dense layer.
    fn units(&self) -> [[usize; 2]; 3] {
        let flat = CHANNELS[6] / self.scale * LAST_WIDTH.pow(3);
        let [first, second] = UNITS.map(|u| u / self.scale);
        [[flat, first], [first, second], [second, self.outputs]]
    }

    /// The network, its weights drawn from the device's random stream: uniform within sqrt(6 / fan in) (He et al.,
    /// arXiv 1502.01852), that the signal neither fades nor grows through ten layers; the last layer as Burn does.
    ///
    /// # Errors
    /// [`ConfigError`] when there is no such network.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Result<CosmoFlow<B>, ConfigError> {
        self.check()?;
        let he = Initializer::KaimingUniform { gain: 2f64.sqrt(), fan_out_only: false };
        let conv = |(i, channels)| {
            Conv3dConfig::new(channels, [3; 3])
                .with_stride(if i == STRIDED { [2; 3] } else { [1; 3] })
                // Explicit: "same" would pad one side only where the stride is 2.
                .with_padding(PaddingConfig3d::Explicit(1, 1, 1))
                .with_bias(false)
                .with_initializer(he.clone())
                .init(device)
        };
        let dense = |(i, [inputs, outputs]): (usize, [usize; 2])| {
            let config = LinearConfig::new(inputs, outputs);
            if i < UNITS.len() { config.with_initializer(he.clone()).init(device) } else { config.init(device) }
        };
        let norm = |[_, channels]: [usize; 2]| BatchNormConfig::new(channels).init(device);
        Ok(CosmoFlow {
            conv: self.channels().into_iter().enumerate().map(conv).collect(),
            bn: if self.batch_norm { self.channels().map(norm).into() } else { Vec::new() },
            fc: self.units().into_iter().enumerate().map(dense).collect(),
            pool: AvgPool3dConfig::new([3; 3]).with_strides([2; 3]).with_padding([1; 3]).with_count_include_pad(true).init(),
            activation: LeakyReluConfig::new().init(),
            dropout: DropoutConfig::new(self.dropout).init(),
            pools: self.pools(),
        })
    }

    /// The layers in order, for a global batch of `batch` samples.
    ///
    /// # Errors
    /// [`ConfigError`] when there is no such network.
    pub fn summary(&self, batch: usize) -> Result<Vec<Layer>, ConfigError> {
        self.check()?;
        let mut layers = Vec::new();
        let mut width = self.width;
        for (i, [inputs, outputs]) in self.channels().into_iter().enumerate() {
            let stride = if i == STRIDED { 2 } else { 1 };
            width /= stride;
            let norm = if self.batch_norm { 2 * outputs } else { 0 };
            layers.push(Layer {
                name: format!("conv{}", i + 1),
                kind: LayerKind::Conv { stride },
                output: vec![batch, outputs, width, width, width],
                parameters: 27 * inputs * outputs + norm,
                // The convolution's result, with an activation behind it or as the batch norm reads it, and behind that what
                // the next convolution reads; a pool's input is not kept.
                kept: if self.batch_norm && i >= self.pools() { 8 } else { 4 },
            });
            if i < self.pools() {
                width /= 2;
                layers.push(Layer {
                    name: format!("pool{}", i + 1),
                    kind: LayerKind::Pool,
                    output: vec![batch, outputs, width, width, width],
                    parameters: 0,
                    kept: 4,
                });
            }
        }
        for (i, [inputs, outputs]) in self.units().into_iter().enumerate() {
            layers.push(Layer {
                name: format!("fc{}", i + 1),
                kind: LayerKind::Dense,
                output: vec![batch, outputs],
                parameters: inputs * outputs + outputs,
                // Mask and activation.
                kept: 5,
            });
        }
        Ok(layers)
    }
}

/// The network. Its parameters are named as in PyTorch: `conv.0.weight`, `bn.0.bias`, `fc.2.weight`; see
/// [`weights`](crate::weights). Made by [`CosmoFlowConfig::init`].
#[derive(Module, Debug)]
pub struct CosmoFlow<B: Backend> {
    /// The convolutions, without bias.
    pub conv: Vec<Conv3d<B>>,
    /// A batch norm for each, or none.
    pub bn: Vec<BatchNorm<B>>,
    /// The dense layers.
    pub fc: Vec<Linear<B>>,
    /// Follows the first `pools` convolutions.
    pub pool: AvgPool3d,
    /// Follows every layer but the last.
    pub activation: LeakyRelu,
    /// Precedes every dense layer.
    pub dropout: Dropout,
    /// How many convolutions have a pool.
    pub pools: usize,
}

impl<B: WindowBackend> CosmoFlow<B> {
    /// `[N, inputs, width, width, width]` -> `[N, outputs]`. Collective where the volume is split.
    ///
    /// # Panics
    /// If the shape is another.
    pub fn forward(&self, volumes: Tensor<B, 5>) -> Tensor<B, 2> {
        let mut x = volumes;
        for (i, conv) in self.conv.iter().enumerate() {
            let slope = self.activation.negative_slope;
            x = match self.bn.get(i) {
                Some(norm) => batch_norm(norm, conv.forward(x), slope),
                None => activated_conv3d(conv, x, slope),
            };
            if i < self.pools {
                x = self.pool.forward(x);
            }
        }
        let mut x: Tensor<B, 2> = whole_volume(x).flatten(1, 4);
        for (i, dense) in self.fc.iter().enumerate() {
            x = dense.forward(self.dropout.forward(x));
            if i + 1 < self.fc.len() {
                x = self.activation.forward(x);
            }
        }
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    #[test]
    fn parameter_counts_are_the_papers() {
        for width in [32, 64, 128, 256, 512] {
            for (batch_norm, count) in [(false, 9_437_636), (true, 9_439_652)] {
                let config = CosmoFlowConfig::new(width).with_batch_norm(batch_norm);
                let layers = config.summary(1).unwrap();
                assert_eq!(layers.iter().map(|l| l.parameters).sum::<usize>(), count);
            }
        }
        let config = CosmoFlowConfig::new(32).with_batch_norm(false);
        assert_eq!(config.init::<Flex>(&Default::default()).unwrap().num_params(), 9_437_636);
        let small = config.with_scale(8);
        assert_eq!(small.init::<Flex>(&Default::default()).unwrap().num_params(), 148_020);
        // Burn counts running statistics too.
        let statistics = 2 * CHANNELS.iter().sum::<usize>() / 8;
        let small = small.with_batch_norm(true).init::<Flex>(&Default::default()).unwrap();
        assert_eq!(small.num_params(), 148_272 + statistics);
    }

    #[test]
    fn two_voxels_along_each_edge_remain() {
        for (width, pools) in [(32, 3), (64, 4), (128, 5), (256, 6), (512, 7)] {
            let layers = CosmoFlowConfig::new(width).summary(2).unwrap();
            assert_eq!(layers.iter().filter(|l| l.kind == LayerKind::Pool).count(), pools);
            let last = layers.iter().rfind(|l| l.kind != LayerKind::Dense).unwrap();
            assert_eq!(last.output, [2, 256, 2, 2, 2], "at width {width}");
            // A batch of one sample trains: each batch norm has several values a channel.
            let convs = layers.iter().filter(|l| matches!(l.kind, LayerKind::Conv { .. }));
            assert!(convs.clone().count() == 7 && convs.clone().all(|l| l.output[2..].iter().product::<usize>() >= 8));
        }
    }

    #[test]
    fn the_output_has_a_row_a_sample() {
        let model = CosmoFlowConfig::new(32).with_scale(16).with_inputs(1).with_outputs(3).init::<Flex>(&Default::default()).unwrap();
        assert_eq!(model.forward(Tensor::zeros([2, 1, 32, 32, 32], &Default::default())).dims(), [2, 3]);
    }

    #[test]
    fn what_cannot_be_made_is_refused() {
        let refused = |config: CosmoFlowConfig| config.init::<Flex>(&Default::default()).unwrap_err();
        let base = CosmoFlowConfig::new(32);
        assert_eq!(
            refused(CosmoFlowConfig::new(48)).to_string(),
            "CosmoFlow reads cubes of 32, 64, 128, 256 or 512 voxels along each edge, not 48"
        );
        assert_eq!(refused(CosmoFlowConfig::new(1024)), ConfigError::Width { width: 1024 });
        assert_eq!(refused(base.clone().with_scale(3)), ConfigError::Scale { scale: 3 });
        assert_eq!(refused(base.clone().with_scale(0)), ConfigError::Scale { scale: 0 });
        assert_eq!(refused(base.clone().with_outputs(0)), ConfigError::Empty { inputs: 4, outputs: 0 });
        assert_eq!(refused(base.with_dropout(1.0)), ConfigError::Dropout { dropout: 1.0 });
    }
}
