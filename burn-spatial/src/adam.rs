//! Adam in one pass over memory.

use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamState, AdaptiveMomentumState, LearningRate, SimpleOptimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_backend::tensor::FloatTensor;

use crate::Spatial;
use crate::kernels::{AdamStep, LocalKernels};
use crate::kind::accumulator;
use crate::tensor::SpatialTensor;
use crate::trace::timed;

/// Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1) with the state, and so the records, of `burn::optim::Adam`.
///
/// Burn 0.21 computes `1 - beta^t` in float32, which puts the first steps off by 1e-5 of their length; here all
/// coefficients are float64, and float64 parameters follow PyTorch to rounding. Parameters of half precision are stepped in
/// float32, of which their moments are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Share of a parameter taken off before each step, times the learning rate: AdamW (Loshchilov and Hutter, arXiv
    /// 1711.05101).
    pub weight_decay: f64,
    /// Share of a parameter added to its gradient, which the moments then see: the weight decay of `burn::optim::Adam`.
    pub l2_penalty: f64,
}

impl Default for Adam {
    /// The paper's 0.9, 0.999 and 1e-8, without weight decay.
    fn default() -> Self {
        Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.0, l2_penalty: 0.0 }
    }
}

impl Adam {
    /// The optimizer of a module.
    pub fn init<B, M>(self) -> OptimizerAdaptor<Adam, M, B>
    where
        B: AutodiffBackend,
        B::InnerBackend: AdamBackend,
        M: AutodiffModule<B>,
    {
        OptimizerAdaptor::from(self)
    }
}

impl Adam {
    /// The numbers of step `time`, from 1.
    fn factors(&self, lr: LearningRate, time: usize) -> AdamStep {
        let time = i32::try_from(time).unwrap_or(i32::MAX);
        let Adam { beta_1, beta_2, epsilon, weight_decay, l2_penalty: penalty } = *self;
        let (rate, root) = (lr / (1.0 - beta_1.powi(time)), (1.0 - beta_2.powi(time)).sqrt());
        AdamStep { beta_1, beta_2, epsilon, rate, root, keep: 1.0 - lr * weight_decay, penalty }
    }
}

impl<B: AdamBackend> SimpleOptimizer<B> for Adam {
    type State<const D: usize> = AdamState<B, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<AdamState<B, D>>,
    ) -> (Tensor<B, D>, Option<AdamState<B, D>>) {
        let (time, old) = match state.map(|state| state.momentum) {
            Some(old) => (old.time + 1, Some((old.moment_1, old.moment_2))),
            None => (1, None),
        };
        let dtype = tensor.dtype();
        let wide = accumulator(dtype);
        let (tensor, grad) = (cast(tensor, wide), cast(grad, wide));
        let old = old.map(|(a, b)| (cast(a, wide), cast(b, wide)));
        let primitive = |t: Tensor<B, D>| t.into_primitive().tensor();
        let old = old.map(|(a, b)| [primitive(a), primitive(b)]);
        let stepped = B::adam(primitive(tensor), primitive(grad), old, &self.factors(lr, time));
        let [tensor, moment_1, moment_2] = stepped.map(|t| Tensor::from_primitive(TensorPrimitive::Float(t)));
        let tensor = cast(tensor, dtype);
        (tensor, Some(AdamState::new(AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2: None })))
    }

    fn to_device<const D: usize>(mut state: AdamState<B, D>, device: &B::Device) -> AdamState<B, D> {
        state.momentum = state.momentum.to_device(device);
        state
    }
}

/// `tensor` as `dtype`, no copy where it is.
fn cast<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(dtype) }
}

/// A backend on which [`Adam`] steps parameters: every [`LocalKernels`], and `Spatial` of one.
pub trait AdamBackend: Backend {
    /// Parameters, and their moments, after a step. All are of one type and shape; without `moments` these are zeros.
    /// Collective where one is split or on its way.
    fn adam(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        moments: Option<[FloatTensor<Self>; 2]>,
        step: &AdamStep,
    ) -> [FloatTensor<Self>; 3];
}

impl<B: LocalKernels> AdamBackend for B {
    fn adam(x: FloatTensor<B>, grad: FloatTensor<B>, moments: Option<[FloatTensor<B>; 2]>, step: &AdamStep) -> [FloatTensor<B>; 3] {
        timed!(OPTIMIZER, "adam");
        B::block_adam(x, grad, moments, step)
    }
}

impl<B: LocalKernels> AdamBackend for Spatial<B> {
    fn adam(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        moments: Option<[FloatTensor<Self>; 2]>,
        step: &AdamStep,
    ) -> [FloatTensor<Self>; 3] {
        // A parameter made of a constant is stored once until it is first stepped.
        let layout = x.layout().summed().materialized();
        let device = x.device().clone();
        let block = |t: FloatTensor<Self>| t.into_layout(&layout).settle().0;
        let (grad, moments) = (block(grad), moments.map(|moments| moments.map(block)));
        let stepped = <B as AdamBackend>::adam(block(x), grad, moments, step);
        stepped.map(|t| SpatialTensor::new(t, layout.clone(), device.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::generic;
    use burn::optim::AdamConfig;
    use burn::optim::decay::WeightDecayConfig;
    use burn_flex::Flex;

    /// The L2 penalty is Burn's weight decay: steps differ by what Burn's corrections in float32 are off, 1e-5 of their length.
    #[test]
    fn the_penalty_is_burns_weight_decay() {
        let config = AdamConfig::new().with_epsilon(1e-8).with_weight_decay(Some(WeightDecayConfig::new(0.1)));
        let (burns, own) = (config.build(), Adam { l2_penalty: f64::from(0.1f32), ..Default::default() });
        let numbers = |seed: usize| -> Tensor<Flex, 1> {
            let values: Vec<f64> = (0..300).map(|i| ((i * 7 + seed * 13) % 101) as f64 / 50.0 - 0.99).collect();
            Tensor::from_data(burn::tensor::TensorData::new(values, [300]), (&Default::default(), DType::F64))
        };
        let (lr, mut a, mut b, mut plain) = (0.01, (numbers(0), None), (numbers(0), None), (numbers(0), None));
        for time in 1..6 {
            a = burns.step(lr, a.0, numbers(time), a.1);
            b = own.step(lr, b.0, numbers(time), b.1);
            plain = Adam::default().step(lr, plain.0, numbers(time), plain.1);
            let off = |a: &Tensor<Flex, 1>, b: &Tensor<Flex, 1>| (a.clone() - b.clone()).abs().max().into_scalar();
            let [off, without] = [off(&a.0, &b.0), off(&plain.0, &b.0)].map(f64::from);
            assert!(off <= 2e-5 * lr * time as f64, "step {time} is off by {off}");
            assert!(without > 1e-3, "the penalty counts");
        }
    }

    /// The fused pass has the bits of the operations it replaces, from the first step on, and shared buffers are not
    /// written.
    #[test]
    fn one_pass_has_the_bits_of_the_operations() {
        let device = Default::default();
        let kinds =
            [(DType::F32, 0.0, 0.0), (DType::F64, 0.0, 0.0), (DType::F32, 0.1, 0.0), (DType::F32, 0.0, 0.1), (DType::F64, 0.1, 0.1)];
        for (dtype, weight_decay, l2_penalty) in kinds {
            let numbers = |seed: usize| -> Tensor<Flex, 2> {
                let values: Vec<f64> = (0..3000).map(|i| ((i * 7 + seed * 13) % 101) as f64 / 50.0 - 1.0).collect();
                Tensor::from_data(burn::tensor::TensorData::new(values, [50, 60]), (&device, dtype))
            };
            let adam = Adam { weight_decay, l2_penalty, ..Default::default() };
            let (mut fused, mut plain) = ((numbers(0), None), (numbers(0), None));
            let untouched = fused.0.clone();
            for time in 1..5 {
                let step = adam.factors(0.01, time);
                let grad = numbers(time).swap_dims(0, 1).reshape([60, 50]).swap_dims(0, 1);
                let primitive = |t: Tensor<Flex, 2>| t.into_primitive().tensor();
                let wrap = |t| Tensor::<Flex, 2>::from_primitive(TensorPrimitive::Float(t));
                let moments = |old: Option<(_, _)>| old.map(|(a, b)| [primitive(a), primitive(b)]);
                let stepped = Flex::block_adam(primitive(fused.0), primitive(grad.clone()), moments(fused.1), &step);
                let [x, m1, m2] = stepped.map(wrap);
                fused = (x, Some((m1, m2)));
                let stepped = generic::adam::<Flex>(primitive(plain.0), primitive(grad), moments(plain.1), &step);
                let [x, m1, m2] = stepped.map(wrap);
                plain = (x, Some((m1, m2)));
                let (a, b) = (fused.1.clone().unwrap(), plain.1.clone().unwrap());
                fused.0.clone().into_data().assert_eq(&plain.0.clone().into_data(), true);
                a.0.into_data().assert_eq(&b.0.into_data(), true);
                a.1.into_data().assert_eq(&b.1.into_data(), true);
            }
            untouched.into_data().assert_eq(&numbers(0).into_data(), true);
        }
    }
}
