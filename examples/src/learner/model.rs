//! A small classifier of volumes, as one writes it for any backend.

use burn::module::Module;
use burn::nn::conv::{Conv3d, Conv3dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig3d};
use burn::tensor::activation::relu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn_train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};

use super::data::WaveBatch;

/// Two convolutions, and a mean over the volume.
#[derive(Module, Debug)]
pub struct Classifier<B: Backend> {
    first: Conv3d<B>,
    first_norm: BatchNorm<B>,
    second: Conv3d<B>,
    second_norm: BatchNorm<B>,
    head: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    /// With random weights.
    pub fn new(device: &B::Device) -> Self {
        let conv = |channels, stride| {
            Conv3dConfig::new(channels, [3; 3]).with_stride([stride; 3]).with_padding(PaddingConfig3d::Explicit(1, 1, 1))
        };
        Classifier {
            first: conv([1, 8], 1).init(device),
            first_norm: BatchNormConfig::new(8).init(device),
            second: conv([8, 8], 2).init(device),
            second_norm: BatchNormConfig::new(8).init(device),
            head: LinearConfig::new(8, 3).init(device),
        }
    }

    /// From volumes `[N, 1, D, H, W]` to logits `[N, 3]`.
    pub fn forward(&self, volumes: Tensor<B, 5>) -> Tensor<B, 2> {
        let x = relu(self.first_norm.forward(self.first.forward(volumes)));
        let x = relu(self.second_norm.forward(self.second.forward(x)));
        self.head.forward(x.mean_dim(2).mean_dim(3).mean_dim(4).flatten(1, 4))
    }

    fn classify(&self, volumes: Tensor<B, 5>, classes: Tensor<B, 1, Int>) -> ClassificationOutput<B> {
        let output = self.forward(volumes);
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), classes.clone());
        ClassificationOutput::new(loss, output, classes)
    }
}

impl<B: AutodiffBackend> TrainStep for Classifier<B> {
    type Input = WaveBatch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: WaveBatch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(batch.volumes, batch.classes);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Classifier<B> {
    type Input = WaveBatch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: WaveBatch<B>) -> ClassificationOutput<B> {
        self.classify(batch.volumes, batch.classes)
    }
}
