//! Adam in one pass over memory.

use std::any::TypeId;

use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamState, AdaptiveMomentumState, LearningRate, SimpleOptimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorMetadata, TensorPrimitive};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use crate::kernels::recast;
use crate::kind::{Float, accumulator};
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
        let (time, old) = match state.map(|state| state.momentum) {
            Some(old) => (old.time + 1, Some((old.moment_1, old.moment_2))),
            None => (1, None),
        };
        let factors = Factors::new(self, lr, time);
        let dtype = tensor.dtype();
        let wide = accumulator(dtype);
        let (tensor, grad) = (cast(tensor, wide), cast(grad, wide));
        let old = old.map(|(a, b)| (cast(a, wide), cast(b, wide)));
        let (tensor, moment_1, moment_2) = match one_pass(tensor, grad, old, &factors) {
            Ok(stepped) => stepped,
            Err((tensor, grad, old)) => factors.step(tensor, grad, old),
        };
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

/// The numbers of one step.
struct Factors {
    beta_1: f64,
    beta_2: f64,
    epsilon: f64,
    /// Rate over the correction of the first moment.
    rate: f64,
    /// Root of the correction of the second moment.
    root: f64,
    /// What weight decay leaves of a parameter.
    keep: f64,
    /// Share of a parameter in its gradient.
    penalty: f64,
}

type Moments<T> = Option<(T, T)>;

impl Factors {
    fn new(adam: &Adam, lr: LearningRate, time: usize) -> Factors {
        let time = i32::try_from(time).unwrap_or(i32::MAX);
        let Adam { beta_1, beta_2, epsilon, weight_decay, l2_penalty: penalty } = *adam;
        let (rate, root) = (lr / (1.0 - beta_1.powi(time)), (1.0 - beta_2.powi(time)).sqrt());
        Factors { beta_1, beta_2, epsilon, rate, root, keep: 1.0 - lr * weight_decay, penalty }
    }

    /// The step from Burn's operations: a dozen passes over memory.
    fn step<B: Backend, const D: usize>(
        &self,
        tensor: Tensor<B, D>,
        grad: Tensor<B, D>,
        old: Moments<Tensor<B, D>>,
    ) -> (Tensor<B, D>, Tensor<B, D>, Tensor<B, D>) {
        timed!(OPTIMIZER, "adam");
        let grad = if self.penalty == 0.0 { grad } else { tensor.clone().mul_scalar(self.penalty).add(grad) };
        let mut moment_1 = grad.clone().mul_scalar(1.0 - self.beta_1);
        let mut moment_2 = grad.square().mul_scalar(1.0 - self.beta_2);
        if let Some((old_1, old_2)) = old {
            moment_1 = old_1.mul_scalar(self.beta_1).add(moment_1);
            moment_2 = old_2.mul_scalar(self.beta_2).add(moment_2);
        }
        let root = moment_2.clone().sqrt().div_scalar(self.root).add_scalar(self.epsilon);
        let step = moment_1.clone().mul_scalar(self.rate).div(root);
        (tensor.mul_scalar(self.keep) - step, moment_1, moment_2)
    }
}

/// One pass of rounding exactly like [`Factors::step`], over blocks of all threads.
macro_rules! fused {
    ($name:ident, $type:ty) => {
        fn $name(factors: &Factors, x: &mut [$type], grad: &[$type], moment_1: &mut [$type], moment_2: &mut [$type]) {
            /// Elements of a block: all four streams of it fit the second cache.
            const BLOCK: usize = 1 << 14;
            let (b1, c1) = (factors.beta_1 as $type, (1.0 - factors.beta_1) as $type);
            let (b2, c2) = (factors.beta_2 as $type, (1.0 - factors.beta_2) as $type);
            let (epsilon, rate, root) = (factors.epsilon as $type, factors.rate as $type, factors.root as $type);
            let (keep, penalty) = (factors.keep as $type, factors.penalty as $type);
            let blocks = x.par_chunks_mut(BLOCK).zip(grad.par_chunks(BLOCK));
            blocks.zip(moment_1.par_chunks_mut(BLOCK)).zip(moment_2.par_chunks_mut(BLOCK)).for_each(|(((x, grad), m1), m2)| {
                for (((x, g), m1), m2) in x.iter_mut().zip(grad).zip(m1).zip(m2) {
                    let g = if penalty == 0.0 { *g } else { *x * penalty + *g };
                    *m1 = *m1 * b1 + g * c1;
                    *m2 = *m2 * b2 + (g * g) * c2;
                    *x = *x * keep - (*m1 * rate) / (m2.sqrt() / root + epsilon);
                }
            });
        }
    };
}

fused!(fused_f32, f32);
fused!(fused_f64, f64);

type Stepped<B, const D: usize> = (Tensor<B, D>, Tensor<B, D>, Tensor<B, D>);
type Unstepped<B, const D: usize> = (Tensor<B, D>, Tensor<B, D>, Moments<Tensor<B, D>>);

/// The step in one pass, in place where buffers are not shared, on the CPU backend, plain or split. Gives the tensors
/// back elsewhere.
fn one_pass<B: Backend, const D: usize>(
    tensor: Tensor<B, D>,
    grad: Tensor<B, D>,
    old: Moments<Tensor<B, D>>,
    factors: &Factors,
) -> Result<Stepped<B, D>, Unstepped<B, D>> {
    let suits = tensor.dtype() == grad.dtype() && matches!(tensor.dtype(), DType::F32 | DType::F64);
    let plain = holds::<B, FlexTensor>();
    if !suits || !(plain || holds::<B, SpatialTensor<Flex, Float>>()) {
        return Err((tensor, grad, old));
    }
    let primitive = |t: Tensor<B, D>| t.into_primitive().tensor();
    let wrap = |t: B::FloatTensorPrimitive| Tensor::from_primitive(TensorPrimitive::Float(t));
    let (x, g) = (primitive(tensor), primitive(grad));
    let old = old.map(|(a, b)| (primitive(a), primitive(b)));
    let (x, m1, m2) = if plain {
        let old = old.map(|(a, b)| (recast(a), recast(b)));
        let (x, m1, m2) = flat(recast(x), recast(g), old, factors);
        (recast(x), recast(m1), recast(m2))
    } else {
        let x: SpatialTensor<Flex, Float> = recast(x);
        // A parameter made of a constant is stored once until it is first stepped.
        let layout = x.layout().summed().materialized();
        let device = x.device().clone();
        let block = |t: B::FloatTensorPrimitive| recast::<_, SpatialTensor<Flex, Float>>(t).into_layout(&layout).settle().0;
        let (g, old) = (block(g), old.map(|(a, b)| (block(a), block(b))));
        let (x, m1, m2) = flat(x.into_layout(&layout).settle().0, g, old, factors);
        let whole = |t| recast(SpatialTensor::<Flex, Float>::new(t, layout.clone(), device.clone()));
        (whole(x), whole(m1), whole(m2))
    };
    Ok((wrap(x), wrap(m1), wrap(m2)))
}

/// Whether a backend's float tensors are `T`.
fn holds<B: Backend, T: 'static>() -> bool {
    TypeId::of::<T>() == TypeId::of::<B::FloatTensorPrimitive>()
}

fn flat(x: FlexTensor, grad: FlexTensor, old: Moments<FlexTensor>, factors: &Factors) -> (FlexTensor, FlexTensor, FlexTensor) {
    timed!(OPTIMIZER, "adam");
    // Dense buffers that start at 0, as their slices are walked side by side.
    let dense = |t: FlexTensor| if t.is_contiguous() && t.layout().start_offset() == 0 { t } else { t.to_contiguous() };
    let n = x.shape().num_elements();
    let (mut x, grad) = (dense(x), dense(grad));
    let zeros = || <Flex as burn_backend::ops::FloatTensorOps<Flex>>::float_zeros(x.shape(), &Default::default(), x.dtype().into());
    let (mut m1, mut m2) = old.map_or_else(|| (zeros(), zeros()), |(a, b)| (dense(a), dense(b)));
    match x.dtype() {
        DType::F64 => {
            let (x, m1, m2) = (x.storage_mut::<f64>(), m1.storage_mut::<f64>(), m2.storage_mut::<f64>());
            fused_f64(factors, &mut x[..n], &grad.storage::<f64>()[..n], &mut m1[..n], &mut m2[..n]);
        }
        _ => {
            let (x, m1, m2) = (x.storage_mut::<f32>(), m1.storage_mut::<f32>(), m2.storage_mut::<f32>());
            fused_f32(factors, &mut x[..n], &grad.storage::<f32>()[..n], &mut m1[..n], &mut m2[..n]);
        }
    }
    (x, m1, m2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::optim::AdamConfig;
    use burn::optim::decay::WeightDecayConfig;

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
                let factors = Factors::new(&adam, 0.01, time);
                let grad = numbers(time).swap_dims(0, 1).reshape([60, 50]).swap_dims(0, 1);
                let Ok((x, m1, m2)) = one_pass(fused.0, grad.clone(), fused.1, &factors) else { panic!("Flex has one pass") };
                fused = (x, Some((m1, m2)));
                let (x, m1, m2) = factors.step(plain.0, grad, plain.1);
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
