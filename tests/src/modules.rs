//! Burn's own modules, losses and optimizers on split volumes against one plain rank: losses, gradients, statistics.

use std::sync::LazyLock;

use burn::backend::{Autodiff, Flex};
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::{LrScheduler, linear::LinearLrSchedulerConfig};
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::conv::{Conv3d, Conv3dConfig};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, LeakyRelu, LeakyReluConfig, Linear, LinearConfig, PaddingConfig3d};
use burn::optim::{AdamConfig, GradientsAccumulator, GradientsParams, Optimizer};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData, Tolerance};
use burn_spatial::comm::Kind;
use burn_spatial::nn::{AvgPool3d, AvgPool3dConfig, WindowBackend};
use burn_spatial::{Grid, Spatial, optim, place};

use crate::grid::agreed_on_grid;
use crate::suite::{Device, Program, agree};

type Plain = Autodiff<Flex>;
type Split = Autodiff<Spatial<Flex>>;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    conv: Conv3d<B>,
    norm: BatchNorm<B>,
    strided: Conv3d<B>,
    relu: LeakyRelu,
    pool: AvgPool3d,
    hidden: Linear<B>,
    dropout: Dropout,
    output: Linear<B>,
}

impl<B: WindowBackend> Net<B> {
    fn new(dropout: f64, device: &B::Device) -> Self {
        let padding = PaddingConfig3d::Explicit(1, 1, 1);
        Net {
            conv: Conv3dConfig::new([2, 4], [3; 3]).with_padding(padding).with_bias(false).init(device),
            norm: BatchNormConfig::new(4).init(device),
            strided: Conv3dConfig::new([4, 6], [3; 3]).with_stride([2; 3]).with_padding(PaddingConfig3d::Explicit(1, 1, 1)).init(device),
            relu: LeakyReluConfig::new().with_negative_slope(0.1).init(),
            pool: AvgPool3dConfig::new([3; 3]).with_strides([2; 3]).with_padding([1; 3]).init(),
            hidden: LinearConfig::new(6 * 2 * 2 * 2, 8).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            output: LinearConfig::new(8, 3).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 5>) -> Tensor<B, 2> {
        let x = self.relu.forward(self.norm.forward(self.conv.forward(x)));
        let x = self.pool.forward(self.relu.forward(self.strided.forward(x)));
        let x = self.dropout.forward(x.flatten::<2>(1, 4));
        self.output.forward(self.dropout.forward(self.relu.forward(self.hidden.forward(x))))
    }
}

const BATCH: usize = 5;

pub(crate) fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mix = |i: usize| (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40;
    (0..n).map(|i| mix(i) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn batch<B: Backend>(step: u64, device: &B::Device) -> (Tensor<B, 5>, Tensor<B, 2>) {
    let x = TensorData::new(numbers(BATCH * 2 * 512, step), [BATCH, 2, 8, 8, 8]);
    let y = TensorData::new(numbers(BATCH * 3, step + 100), [BATCH, 3]);
    (Tensor::from_data(x, device), Tensor::from_data(y, device))
}

/// All parameters and statistics, one after another.
struct Collect(Vec<f32>);

impl<B: Backend> ModuleVisitor<B> for Collect {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.extend(param.val().into_data().to_vec::<f32>().unwrap());
    }
}

/// The gradients of all parameters, one after another.
pub(crate) struct CollectGradients<'a>(pub(crate) &'a GradientsParams, pub(crate) Vec<f32>);

impl<B: AutodiffBackend> ModuleVisitor<B> for CollectGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.0.get::<B::InnerBackend, D>(param.id) {
            self.1.extend(gradient.into_data().to_vec::<f32>().unwrap());
        }
    }
}

#[derive(Debug, Default, PartialEq, Clone)]
struct Outcome {
    losses: Vec<f32>,
    first_gradients: Vec<f32>,
    state: Vec<f32>,
    evaluation: Vec<f32>,
    record: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Settings {
    dropout: f64,
    clip: bool,
    accumulate: bool,
}

fn train<B: AutodiffBackend + WindowBackend>(
    record: Vec<u8>,
    settings: Settings,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
) -> Outcome
where
    B::InnerBackend: WindowBackend,
{
    let recorder = BinBytesRecorder::<FullPrecisionSettings, Vec<u8>>::default();
    let mut net = Net::<B>::new(settings.dropout, device).load_record(recorder.load(record, device).unwrap());
    let mut adam = AdamConfig::new().with_epsilon(1e-8);
    if settings.clip {
        adam = adam.with_grad_clipping(Some(GradientClippingConfig::Norm(0.5)));
    }
    let mut optimizer = adam.init::<B, Net<B>>();
    let mut schedule = LinearLrSchedulerConfig::new(0.01, 0.001, 6).init().unwrap();
    let mut accumulator = GradientsAccumulator::new();
    let (mut losses, mut first_gradients) = (Vec::new(), Vec::new());
    for step in 0..6 {
        let (x, y) = batch::<B>(step, device);
        let loss = MseLoss::new().forward(net.forward(place(x)), y, Reduction::Mean);
        losses.push(loss.clone().into_data().to_vec::<f32>().unwrap()[0]);
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        if step == 0 {
            let mut collect = CollectGradients(&gradients, Vec::new());
            net.visit(&mut collect);
            first_gradients = collect.1;
        }
        let rate = schedule.step();
        if settings.accumulate {
            accumulator.accumulate(&net, gradients);
            if step % 2 == 1 {
                net = optimizer.step(rate, net, accumulator.grads());
            }
        } else {
            net = optimizer.step(rate, net, gradients);
        }
    }
    let mut state = Collect(Vec::new());
    net.visit(&mut state);
    state.0.extend(net.norm.running_mean.value().into_data().to_vec::<f32>().unwrap());
    state.0.extend(net.norm.running_var.value().into_data().to_vec::<f32>().unwrap());
    let (x, _) = batch::<B>(9, device);
    let evaluation = net.valid().forward(place(x).inner()).into_data().to_vec::<f32>().unwrap();
    let record = recorder.record(net.into_record(), ()).unwrap();
    Outcome { losses, first_gradients, state: state.0, evaluation, record }
}

/// Gives every parameter values that depend on its place alone: the same in every process.
pub(crate) struct Fill(pub(crate) u64);

impl<B: Backend> ModuleMapper<B> for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.0 += 1;
        let old = param.val();
        let shape = old.dims();
        let fan_in = shape[1..].iter().product::<usize>() as f32;
        let offset = if D == 1 { 0.5 } else { 0.0 };
        let values = numbers(shape.iter().product(), self.0).into_iter().map(|x| offset + x / fan_in.sqrt() * 0.5);
        let tensor = Tensor::from_data(TensorData::new(values.collect(), shape), &old.device());
        Param::initialized(param.id, tensor.set_require_grad(old.is_require_grad()))
    }
}

/// The weights that every program starts from.
fn start() -> Vec<u8> {
    let recorder = BinBytesRecorder::<FullPrecisionSettings, Vec<u8>>::default();
    let net = Net::<Flex>::new(0.0, &Default::default()).map(&mut Fill(0));
    recorder.record(net.into_record(), ()).unwrap()
}

pub(crate) fn near(a: &[f32], b: &[f32], tolerance: f32, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let scale = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    let worst = a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
    assert!(worst <= tolerance * scale, "{what}: off by {worst} of {scale}");
}

/// The same bits on every rank. Records also hold identities, which every process draws for its running statistics.
fn agree_on(device: &Device, outcome: &Outcome) {
    let Outcome { losses, first_gradients, state, evaluation, record: _ } = outcome;
    for (what, values) in [("losses", losses), ("gradients", first_gradients), ("state", state), ("evaluation", evaluation)] {
        agree(device, what, &values.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>());
    }
}

/// The plain program, and the losses of one that goes on from its record.
type Reference = LazyLock<(Outcome, Vec<f32>)>;

fn reference(settings: Settings) -> (Outcome, Vec<f32>) {
    let plain = train::<Plain>(start(), settings, &Default::default(), |x| x);
    let going_on = train::<Plain>(plain.record.clone(), settings, &Default::default(), |x| x);
    (plain, going_on.losses)
}

fn compare(device: &Device, settings: Settings, reference: &Reference) {
    let (plain, going_on) = &**reference;
    device.set_strict(true);
    let split = train::<Split>(start(), settings, device, place::split);
    assert_eq!(device.stats().gathered(), 0);
    agree_on(device, &split);
    near(&split.losses, &plain.losses, 1e-4, "losses");
    near(&split.first_gradients, &plain.first_gradients, 1e-5, "gradients");
    near(&split.state, &plain.state, 1e-3, "weights and statistics");
    near(&split.evaluation, &plain.evaluation, 2e-3, "evaluation");
    // What the split program saved goes on in the plain one.
    if device.mesh().rank() == 0 {
        let again = train::<Plain>(split.record, settings, &Default::default(), |x| x);
        near(&again.losses, going_on, 1e-2, "losses from a record");
    }
}

const PLAIN_STEPS: Settings = Settings { dropout: 0.0, clip: false, accumulate: false };

/// Six steps of Adam.
pub fn training(device: &Device) {
    static REFERENCE: Reference = LazyLock::new(|| reference(PLAIN_STEPS));
    compare(device, PLAIN_STEPS, &REFERENCE);
}

/// With gradients clipped by their norm.
pub fn clipped_training(device: &Device) {
    const SETTINGS: Settings = Settings { clip: true, ..PLAIN_STEPS };
    static REFERENCE: Reference = LazyLock::new(|| reference(SETTINGS));
    compare(device, SETTINGS, &REFERENCE);
}

/// With gradients accumulated over two steps.
pub fn accumulated_training(device: &Device) {
    const SETTINGS: Settings = Settings { accumulate: true, ..PLAIN_STEPS };
    static REFERENCE: Reference = LazyLock::new(|| reference(SETTINGS));
    compare(device, SETTINGS, &REFERENCE);
}

/// Dropout drops the same elements of the whole on every grid.
pub fn dropout_is_the_same_on_every_grid(device: &Device) {
    const SETTINGS: Settings = Settings { dropout: 0.4, ..PLAIN_STEPS };
    fn run(device: &Device) -> Outcome {
        Split::seed(device, 11);
        train::<Split>(start(), SETTINGS, device, place::split)
    }
    static ONE: LazyLock<Outcome> = LazyLock::new(|| {
        let one = agreed_on_grid(Grid::ONE, run);
        let without = train::<Plain>(start(), PLAIN_STEPS, &Default::default(), |x| x);
        assert_ne!(one.losses, without.losses, "dropout does something");
        one
    });
    let split = run(device);
    agree_on(device, &split);
    near(&split.losses, &ONE.losses, 1e-4, "losses");
    near(&split.state, &ONE.state, 1e-3, "weights");
}

/// Linear, loss and optimizer of what is not split run the inner backend's own operations, bit for bit.
pub fn what_is_not_split_has_the_bits_of_the_plain_backend(device: &Device) {
    fn program<B: AutodiffBackend>(device: &B::Device) -> TensorData {
        let weight = Tensor::<B, 2>::from_data(TensorData::new(numbers(24, 5), [8, 3]), device).require_grad();
        let x = Tensor::<B, 2>::from_data(TensorData::new(numbers(BATCH * 8, 1), [BATCH, 8]), device);
        let gradients = x.matmul(weight.clone()).square().mean().backward();
        weight.grad(&gradients).unwrap().into_data()
    }
    program::<Plain>(&Default::default()).assert_eq(&program::<Split>(device), true);
}

/// Burn's batch norm sums C means and C variances, and sends nothing else.
pub fn batch_norm_costs_two_all_reduces_of_c_numbers(device: &Device) {
    let ranks = device.mesh().grid().ranks();
    let norm = BatchNormConfig::new(4).init::<Split>(device);
    let x = place::split(Tensor::<Split, 5>::from_data(TensorData::new(numbers(2 * 4 * 6 * 6 * 6, 1), [2, 4, 6, 6, 6]), device));
    let before = device.stats();
    let y = norm.forward(x);
    let after = device.stats();
    let sums = after.comm.since(&before.comm);
    let expected = if ranks == 1 { 0 } else { 2 };
    assert_eq!(sums.get(Kind::AllReduce).calls, expected);
    assert_eq!(sums.get(Kind::AllReduce).sent, expected * 4 * 4);
    assert_eq!(sums.total().calls, expected, "nothing else is sent");
    assert_eq!(after.gathered() + after.redistributions, before.gathered() + before.redistributions);
    agree(device, "output", &y.into_data().bytes);
}

/// The mesh axes a case of four numbers can be split along: each alone, with its position in the shape.
fn alone(device: &Device) -> Option<usize> {
    let grid = device.mesh().grid();
    let split: Vec<usize> = (0..4).filter(|axis| grid.0[*axis] > 1).collect();
    match split[..] {
        [] => Some(2),
        [0] => Some(0),
        [axis] => Some(axis + 1),
        _ => None,
    }
}

/// A shape with `n` at `position` and one elsewhere.
fn line(position: usize, n: usize) -> [usize; 5] {
    let mut shape = [1; 5];
    shape[position] = n;
    shape
}

/// y = w * sum(x), loss = y^2 / 2: the gradient of a replicated factor counts once.
pub fn gradient_of_a_replicated_factor(device: &Device) {
    let shapes = match alone(device) {
        Some(position) => vec![line(position, 4)],
        None => (0..5).filter(|i| *i != 1).map(|position| line(position, 4)).collect(),
    };
    for shape in shapes {
        let x = place::split(Tensor::<Split, 5>::from_data(TensorData::new(vec![1f32, 2.0, 3.0, 4.0], shape), device));
        let w = Tensor::<Split, 1>::from_data(TensorData::new(vec![1f32], [1]), device).require_grad();
        let y = w.clone() * x.sum();
        let gradients = (y.square() / 2.0).sum().backward();
        w.grad(&gradients).unwrap().into_data().assert_eq(&TensorData::new(vec![100f32], [1]), true);
    }
}

/// Statistics of the whole batch and volume: x = [0, 0 | 1, 1].
pub fn batch_norm_of_two_shards(device: &Device) {
    let position = alone(device).unwrap_or(2);
    let shape = line(position, 4);
    let run = |epsilon: f64, gradient: Vec<f32>| {
        let norm = BatchNormConfig::new(1).with_epsilon(epsilon).init::<Split>(device);
        let x = place::split(Tensor::<Split, 5>::from_data(TensorData::new(vec![0f32, 0.0, 1.0, 1.0], shape), device)).require_grad();
        let y = norm.forward(x.clone());
        let dy = place::split(Tensor::<Split, 5>::from_data(TensorData::new(gradient, shape), device));
        let gradients = (y.clone() * dy).sum().backward();
        (y.into_data(), x.grad(&gradients).unwrap().into_data())
    };
    let y = run(1e-5, vec![0.0; 4]).0;
    let dx = run(0.0, vec![1.0, 0.0, 0.0, 0.0]).1;
    y.assert_approx_eq::<f32>(&TensorData::new(vec![-0.99998f32, -0.99998, 0.99998, 0.99998], shape), Tolerance::absolute(1e-6));
    dx.assert_approx_eq::<f32>(&TensorData::new(vec![1f32, -1.0, 0.0, 0.0], shape), Tolerance::absolute(1e-6));
}

/// A parameter of a volume's own shape.
#[derive(Module, Debug)]
struct Field<B: Backend> {
    field: Param<Tensor<B, 5>>,
}

/// The gradient of a parameter that meets a volume element by element lies as the volume does, until made whole.
pub fn gradients_are_made_whole_and_normed(device: &Device) {
    let shape = [1, 2, 4, 5, 6];
    let n: usize = shape.iter().product();
    let data = |seed| TensorData::new(numbers(n, seed), shape);
    let model = Field { field: Param::from_tensor(Tensor::<Split, 5>::from_data(data(1), device).require_grad()) };
    let x = place::split(Tensor::<Split, 5>::from_data(data(2), device));
    let split = !place::layout(&x).is_full();
    let gradients = GradientsParams::from_grads((model.field.val() * x).sum().backward(), &model);
    let whole = |g: &GradientsParams| place::layout(&g.get::<Spatial<Flex>, 5>(model.field.id).unwrap()).is_full();
    assert_eq!(whole(&gradients), !split);
    let gradients = optim::whole_gradients::<Split, _>(&model, gradients);
    assert!(whole(&gradients));
    let norm = optim::gradient_norm::<Split, _>(&model, &gradients, device).into_data().to_vec::<f32>().unwrap()[0];
    let expected = numbers(n, 2).iter().map(|v| (*v as f64).powi(2)).sum::<f64>().sqrt();
    assert!((norm as f64 - expected).abs() < 1e-5 * expected, "{norm}, not {expected}");
}

/// What of this module runs on every grid.
pub const PROGRAMS: &[Program] = &[
    Program { name: "training", run: training },
    Program { name: "clipped_training", run: clipped_training },
    Program { name: "accumulated_training", run: accumulated_training },
    Program { name: "dropout_is_the_same_on_every_grid", run: dropout_is_the_same_on_every_grid },
    Program { name: "what_is_not_split_has_the_bits_of_the_plain_backend", run: what_is_not_split_has_the_bits_of_the_plain_backend },
    Program { name: "batch_norm_costs_two_all_reduces_of_c_numbers", run: batch_norm_costs_two_all_reduces_of_c_numbers },
    Program { name: "gradient_of_a_replicated_factor", run: gradient_of_a_replicated_factor },
    Program { name: "batch_norm_of_two_shards", run: batch_norm_of_two_shards },
    Program { name: "gradients_are_made_whole_and_normed", run: gradients_are_made_whole_and_normed },
];
