//! Adam with coefficients in float64.

use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamState, AdaptiveMomentumState, LearningRate, SimpleOptimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};

/// Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1) with the state, and so the records, of `burn::optim::Adam`.
///
/// Burn 0.21 computes `1 - beta^t` in float32, which puts the first steps off by 1e-5 of their length; here all
/// coefficients are float64, and float64 parameters follow PyTorch to rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
}

impl Default for Adam {
    /// The paper's 0.9, 0.999 and 1e-8.
    fn default() -> Self {
        Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8 }
    }
}

impl Adam {
    /// The optimizer of a module.
    pub fn init<B: AutodiffBackend, M: AutodiffModule<B>>(self) -> OptimizerAdaptor<Adam, M, B> {
        OptimizerAdaptor::from(self)
    }
}

impl<B: Backend> SimpleOptimizer<B> for Adam {
    type State<const D: usize> = AdamState<B, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<AdamState<B, D>>,
    ) -> (Tensor<B, D>, Option<AdamState<B, D>>) {
        let new_1 = grad.clone().mul_scalar(1.0 - self.beta_1);
        let new_2 = grad.square().mul_scalar(1.0 - self.beta_2);
        let state = match state.map(|state| state.momentum) {
            Some(old) => AdaptiveMomentumState {
                time: old.time + 1,
                moment_1: old.moment_1.mul_scalar(self.beta_1).add(new_1),
                moment_2: old.moment_2.mul_scalar(self.beta_2).add(new_2),
                max_moment_2: None,
            },
            None => AdaptiveMomentumState { time: 1, moment_1: new_1, moment_2: new_2, max_moment_2: None },
        };
        let time = i32::try_from(state.time).unwrap_or(i32::MAX);
        let (correction_1, correction_2) = (1.0 - self.beta_1.powi(time), 1.0 - self.beta_2.powi(time));
        let root = state.moment_2.clone().sqrt().div_scalar(correction_2.sqrt()).add_scalar(self.epsilon);
        let step = state.moment_1.clone().mul_scalar(lr / correction_1).div(root);
        (tensor - step, Some(AdamState::new(state)))
    }

    fn to_device<const D: usize>(mut state: AdamState<B, D>, device: &B::Device) -> AdamState<B, D> {
        state.momentum = state.momentum.to_device(device);
        state
    }
}
