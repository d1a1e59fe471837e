//! Burn's own modules, losses and optimizers on split volumes against one plain rank: losses, gradients, statistics.

use burn::backend::{Autodiff, Flex};
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::{LrScheduler, linear::LinearLrSchedulerConfig};
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv3d, Conv3dConfig};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, LeakyRelu, LeakyReluConfig, Linear, LinearConfig, PaddingConfig3d};
use burn::optim::{AdamConfig, GradientsAccumulator, GradientsParams, Optimizer};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData, Tolerance};
use burn_spatial::comm::Kind;
use burn_spatial::nn::{AvgPool3d, AvgPool3dConfig, WindowBackend};
use burn_spatial::{Grid, Spatial, place};
use burn_spatial_tests::grid::{GRIDS, agreed_on_grid};

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

fn numbers(n: usize, seed: u64) -> Vec<f32> {
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
struct CollectGradients<'a>(&'a GradientsParams, Vec<f32>);

impl<B: AutodiffBackend> ModuleVisitor<B> for CollectGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.0.get::<B::InnerBackend, D>(param.id) {
            self.1.extend(gradient.into_data().to_vec::<f32>().unwrap());
        }
    }
}

#[derive(Debug, PartialEq, Clone)]
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
    record: Option<Vec<u8>>,
    settings: Settings,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
) -> Outcome
where
    B::InnerBackend: WindowBackend,
{
    let recorder = BinBytesRecorder::<FullPrecisionSettings, Vec<u8>>::default();
    let mut net = Net::<B>::new(settings.dropout, device);
    if let Some(record) = record {
        net = net.load_record(recorder.load(record, device).unwrap());
    }
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
    for norm in [&net.norm] {
        state.0.extend(norm.running_mean.value().into_data().to_vec::<f32>().unwrap());
        state.0.extend(norm.running_var.value().into_data().to_vec::<f32>().unwrap());
    }
    let (x, _) = batch::<B>(9, device);
    let evaluation = net.valid().forward(place(x).inner()).into_data().to_vec::<f32>().unwrap();
    let record = recorder.record(net.into_record(), ()).unwrap();
    Outcome { losses, first_gradients, state: state.0, evaluation, record }
}

fn start() -> Vec<u8> {
    let recorder = BinBytesRecorder::<FullPrecisionSettings, Vec<u8>>::default();
    recorder.record(Net::<Flex>::new(0.0, &Default::default()).into_record(), ()).unwrap()
}

fn near(a: &[f32], b: &[f32], tolerance: f32, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let scale = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    let worst = a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
    assert!(worst <= tolerance * scale, "{what}: off by {worst} of {scale}");
}

fn compare(settings: Settings) {
    let start = start();
    let plain = train::<Plain>(Some(start.clone()), settings, &Default::default(), |x| x);
    for grid in GRIDS {
        let split = agreed_on_grid(grid, |device| {
            device.set_strict(true);
            let outcome = train::<Split>(Some(start.clone()), settings, device, place::split);
            assert_eq!(device.stats().gathered(), 0);
            outcome
        });
        near(&split.losses, &plain.losses, 1e-4, &format!("losses on {grid}"));
        near(&split.first_gradients, &plain.first_gradients, 1e-5, &format!("gradients on {grid}"));
        near(&split.state, &plain.state, 1e-3, &format!("weights and statistics on {grid}"));
        near(&split.evaluation, &plain.evaluation, 2e-3, &format!("evaluation on {grid}"));
        // What the split program saved goes on in the plain one.
        let going_on = train::<Plain>(Some(split.record.clone()), settings, &Default::default(), |x| x);
        let again = train::<Plain>(Some(plain.record.clone()), settings, &Default::default(), |x| x);
        near(&going_on.losses, &again.losses, 1e-2, &format!("losses from a record of {grid}"));
    }
}

#[test]
fn training() {
    compare(Settings { dropout: 0.0, clip: false, accumulate: false });
}

#[test]
fn clipped_training() {
    compare(Settings { dropout: 0.0, clip: true, accumulate: false });
}

#[test]
fn accumulated_training() {
    compare(Settings { dropout: 0.0, clip: false, accumulate: true });
}

#[test]
fn dropout_is_the_same_on_every_grid() {
    let settings = Settings { dropout: 0.4, clip: false, accumulate: false };
    let start = start();
    let run = |device: &burn::tensor::Device<Split>| {
        Split::seed(device, 11);
        train::<Split>(Some(start.clone()), settings, device, place::split)
    };
    let one = agreed_on_grid(Grid::ONE, run);
    let without =
        agreed_on_grid(Grid::ONE, |device| train::<Split>(Some(start.clone()), Settings { dropout: 0.0, ..settings }, device, |x| x));
    assert_ne!(one.losses, without.losses, "dropout does something");
    for grid in GRIDS {
        let split = agreed_on_grid(grid, run);
        near(&split.losses, &one.losses, 1e-4, &format!("losses on {grid}"));
        near(&split.state, &one.state, 1e-3, &format!("weights on {grid}"));
    }
}

#[test]
fn one_rank_has_the_bits_of_the_plain_backend_in_the_head() {
    // Linear, loss and optimizer of one rank run the inner backend's own operations.
    let x = numbers(BATCH * 8, 1);
    fn program<B: AutodiffBackend>(x: Vec<f32>, device: &B::Device) -> TensorData {
        let weight = Tensor::<B, 2>::from_data(TensorData::new(numbers(24, 5), [8, 3]), device).require_grad();
        let y = Tensor::<B, 2>::from_data(TensorData::new(x, [BATCH, 8]), device).matmul(weight.clone());
        let gradients = y.square().mean().backward();
        weight.grad(&gradients).unwrap().into_data()
    }
    let plain = program::<Plain>(x.clone(), &Default::default());
    plain.assert_eq(&agreed_on_grid(Grid::ONE, |device| program::<Split>(x.clone(), device)), true);
}

#[test]
fn batch_norm_costs_two_all_reduces_of_c_numbers() {
    for grid in GRIDS {
        agreed_on_grid(grid, |device| {
            let norm = BatchNormConfig::new(4).init::<Split>(device);
            let x = place::split(Tensor::<Split, 5>::from_data(TensorData::new(numbers(2 * 4 * 6 * 6 * 6, 1), [2, 4, 6, 6, 6]), device));
            let before = device.stats();
            let y = norm.forward(x);
            let after = device.stats();
            let sums = after.comm.since(&before.comm);
            let expected = if grid.ranks() == 1 { 0 } else { 2 };
            assert_eq!(sums.get(Kind::AllReduce).calls, expected, "on {grid}");
            assert_eq!(sums.get(Kind::AllReduce).sent, expected * 4 * 4, "on {grid}");
            assert_eq!(sums.total().calls, expected, "nothing else is sent on {grid}");
            assert_eq!(after.gathered() + after.redistributions, 0);
            y.into_data()
        });
    }
}

/// y = w * sum(x), loss = y^2 / 2: the gradient of a replicated factor counts once.
#[test]
fn gradient_of_a_replicated_factor() {
    for grid in [Grid::ONE, Grid([1, 4, 1, 1]), Grid([2, 2, 1, 1]), Grid([4, 1, 1, 1])] {
        let dw = agreed_on_grid(grid, |device| {
            let shape = if grid.0[0] > 1 { [4, 1, 1, 1, 1] } else { [1, 1, 4, 1, 1] };
            let x = place::split(Tensor::<Split, 5>::from_data(TensorData::new(vec![1f32, 2.0, 3.0, 4.0], shape), device));
            let w = Tensor::<Split, 1>::from_data(TensorData::new(vec![1f32], [1]), device).require_grad();
            let y = w.clone() * x.sum();
            let gradients = (y.square() / 2.0).sum().backward();
            w.grad(&gradients).unwrap().into_data()
        });
        dw.assert_eq(&TensorData::new(vec![100f32], [1]), true);
    }
}

/// Statistics of the whole batch and volume: x = [0, 0 | 1, 1].
#[test]
fn batch_norm_of_two_shards() {
    for (grid, shape) in
        [(Grid([1, 2, 1, 1]), [1, 1, 4, 1, 1]), (Grid([1, 1, 1, 2]), [1, 1, 1, 1, 4]), (Grid([2, 1, 1, 1]), [4, 1, 1, 1, 1])]
    {
        let (y, dx) = agreed_on_grid(grid, |device| {
            let run = |epsilon: f64, gradient: Vec<f32>| {
                let norm = BatchNormConfig::new(1).with_epsilon(epsilon).init::<Split>(device);
                let x =
                    place::split(Tensor::<Split, 5>::from_data(TensorData::new(vec![0f32, 0.0, 1.0, 1.0], shape), device)).require_grad();
                let y = norm.forward(x.clone());
                let dy = place::split(Tensor::<Split, 5>::from_data(TensorData::new(gradient, shape), device));
                let gradients = (y.clone() * dy).sum().backward();
                (y.into_data(), x.grad(&gradients).unwrap().into_data())
            };
            (run(1e-5, vec![0.0; 4]).0, run(0.0, vec![1.0, 0.0, 0.0, 0.0]).1)
        });
        y.assert_approx_eq::<f32>(&TensorData::new(vec![-0.99998f32, -0.99998, 0.99998, 0.99998], shape), Tolerance::absolute(1e-6));
        dx.assert_approx_eq::<f32>(&TensorData::new(vec![1f32, -1.0, 0.0, 0.0], shape), Tolerance::absolute(1e-6));
    }
}
