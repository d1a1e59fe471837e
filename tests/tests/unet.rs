//! The 3D U-Net on grids of ranks against PyTorch: ten Adam steps from the same weights on the same batches.

use std::collections::BTreeMap;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::activation::relu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};
use burn_spatial::nn::WindowBackend;
use burn_spatial::optim::AdamBackend;
use burn_spatial::{Grid, Spatial, place};
use burn_spatial_models::loss::DiceCrossEntropy;
use burn_spatial_models::weights::{self, Named};
use burn_spatial_models::{Adam, ConvBlock, UNet3d, UNet3dConfig};
use burn_spatial_tests::e2e::{self, Fixture, Outcome};
use burn_spatial_tests::fixtures::{directory, values};
use burn_spatial_tests::fixtures_loss::split_targets;
use burn_spatial_tests::grid::{agreed_on_grid, on_grid};

type Plain = Autodiff<Flex>;
type Split = Autodiff<Spatial<Flex>>;

const CASE: &str = "unet_small_16";
const SHAPE: [usize; 5] = [2, 1, 16, 16, 16];
/// One, two, four and eight ranks.
const GRIDS: [Grid; 5] = [Grid::ONE, Grid([1, 2, 1, 1]), Grid([2, 1, 1, 2]), Grid([1, 2, 2, 1]), Grid([1, 2, 2, 2])];

fn config() -> UNet3dConfig {
    UNet3dConfig::new().with_depth(3).with_width(4)
}

fn model<B: Backend>(fixture: &Fixture, dtype: DType, device: &B::Device) -> UNet3d<B> {
    let model = config().init::<B>(device).unwrap();
    let named = weights::collect(&model);
    let named = named.iter().map(|(name, data)| (name.clone(), fixture.weight(name, &data.shape, dtype)));
    weights::load(model, &named.collect()).unwrap()
}

fn batch<B: Backend>(fixture: &Fixture, step: usize, dtype: DType, device: &B::Device) -> (Tensor<B, 5>, Tensor<B, 4, Int>) {
    let x = fixture.tensor(&format!("x{step}"), &SHAPE, dtype, |u| 2.0 * u - 1.0);
    let y = fixture.tensor(&format!("y{step}"), &[2, 16, 16, 16], DType::I64, |u| (u * 3.0).floor());
    (Tensor::from_data(x, (device, dtype)), Tensor::from_data(y, (device, DType::I64)))
}

fn outcome<B: WindowBackend + AutodiffBackend>(
    dtype: DType,
    forward: impl Fn(&UNet3d<B>, Tensor<B, 5>) -> Tensor<B, 5>,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
    place_targets: impl Fn(Tensor<B, 4, Int>) -> Tensor<B, 4, Int>,
    mut start: impl FnMut(&UNet3d<B>),
) -> Outcome
where
    B::InnerBackend: WindowBackend + AdamBackend,
{
    let fixture = Fixture::read(CASE);
    let steps = fixture.number("steps") as usize;
    let mut model = model::<B>(&fixture, dtype, device);
    let mut optimizer = Adam::default().init::<B, UNet3d<B>>();
    let (mut losses, mut gradient_norms) = (Vec::new(), BTreeMap::new());
    for step in 0..steps {
        start(&model);
        let (x, y) = batch::<B>(&fixture, step, dtype, device);
        let loss = DiceCrossEntropy::new().forward(forward(&model, place(x)), place_targets(y));
        losses.push(values(loss.clone())[0]);
        let gradients = loss.backward();
        if step == 0 {
            let named = weights::gradients(&model, &gradients);
            gradient_norms.extend(named.iter().map(|(name, data)| (name.clone(), e2e::norm(data))));
        }
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(fixture.number("lr"), model, gradients);
    }
    let sums = weights::collect(&model.valid()).into_iter().map(|(name, data)| {
        let number: u32 = name.split('.').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        let level = if name.starts_with("dec.") { 1 - number } else { number.min(2) };
        let voxels = SHAPE[0] * (16usize >> level).pow(3);
        let sums = e2e::sums(&name, &data, steps, voxels);
        (name, sums)
    });
    Outcome { losses, gradient_norms, sums: sums.collect() }
}

/// The network of `model` from Burn's own modules and our pool.
fn unfused<B: WindowBackend>(model: &UNet3d<B>, volumes: Tensor<B, 5>) -> Tensor<B, 5> {
    let block = |block: &ConvBlock<B>, x| {
        let x = relu(block.norm1.forward(block.conv1.forward(x)));
        relu(block.norm2.forward(block.conv2.forward(x)))
    };
    let (bottom, down) = model.down.split_last().expect("levels");
    let (mut x, mut skips) = (volumes, Vec::new());
    for level in down {
        skips.push(block(level, x));
        x = model.pool.forward(skips[skips.len() - 1].clone());
    }
    x = block(bottom, x);
    for ((up, level), skip) in model.up.iter().zip(&model.dec).zip(skips.into_iter().rev()) {
        x = block(level, Tensor::cat(vec![skip, up.forward(x)], 1));
    }
    model.head.forward(x)
}

/// The loss of each step from given weights.
fn losses_from<B: WindowBackend + AutodiffBackend>(
    starts: &[Named],
    dtype: DType,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
    place_targets: impl Fn(Tensor<B, 4, Int>) -> Tensor<B, 4, Int>,
) -> Vec<f64> {
    let fixture = Fixture::read(CASE);
    let loss = |(step, start): (usize, &Named)| {
        let start = start.iter().map(|(name, data)| (name.clone(), data.clone().convert_dtype(dtype))).collect();
        let model = weights::load(model::<B>(&fixture, dtype, device), &start).unwrap();
        let (x, y) = batch::<B>(&fixture, step, dtype, device);
        values(DiceCrossEntropy::new().forward(model.forward(place(x)), place_targets(y)))[0]
    };
    starts.iter().enumerate().map(loss).collect()
}

/// In float64 all is as PyTorch's. In float32 the losses are of steps that start from float64 weights: rounding moves
/// voxels across kinks and maxima, whose gradients jump, and Adam's first steps go by the gradient's sign.
fn check(dtype: DType) {
    let fixture = Fixture::read(CASE);
    let double = dtype == DType::F64;
    let tolerance = if double { [1e-8; 2] } else { [1e-4, e2e::STEPPED] };
    let mut starts = Vec::new();
    if !double {
        outcome::<Plain>(DType::F64, UNet3d::forward, &Default::default(), |x| x, |y| y, |model| starts.push(weights::collect(model)));
    }
    let compare = |mut outcome: Outcome, from_starts: Vec<f64>, grid: &str| {
        if !double {
            outcome.follows(&fixture, grid);
            outcome.losses = from_starts;
        }
        outcome.check(&fixture, tolerance, grid);
    };
    let one = Default::default();
    let plain = outcome::<Plain>(dtype, UNet3d::forward, &one, |x| x, |y| y, |_| ());
    compare(plain, losses_from::<Plain>(&starts, dtype, &one, |x| x, |y| y), "Flex");
    for grid in GRIDS {
        let (outcome, losses) = agreed_on_grid(grid, |device| {
            let outcome = outcome::<Split>(dtype, UNet3d::forward, device, place::split, split_targets, |_| ());
            (outcome, losses_from::<Split>(&starts, dtype, device, place::split, split_targets))
        });
        compare(outcome, losses, &grid.to_string());
    }
}

#[test]
fn ten_steps_in_float64() {
    check(DType::F64);
}

#[test]
fn ten_steps_in_float32() {
    check(DType::F32);
}

#[test]
fn the_same_from_plain_modules() {
    let fixture = Fixture::read(CASE);
    outcome::<Plain>(DType::F64, unfused, &Default::default(), |x| x, |y| y, |_| ()).check(&fixture, [1e-8; 2], "Flex");
    for grid in GRIDS {
        let outcome = agreed_on_grid(grid, |device| outcome::<Split>(DType::F64, unfused, device, place::split, split_targets, |_| ()));
        outcome.check(&fixture, [1e-8; 2], &grid.to_string());
    }
}

#[test]
fn stored_weights_load_and_are_those_of_the_formula() {
    let fixture = Fixture::read(CASE);
    let stored = weights::read_safetensors(&directory().join(format!("e2e_{CASE}.safetensors")), "w/").unwrap();
    let parameters: usize = stored.values().map(TensorData::num_elements).sum();
    assert_eq!(parameters, fixture.number("params") as usize);
    let loaded = weights::load(config().init::<Flex>(&Default::default()).unwrap(), &stored).unwrap();
    let named = weights::collect(&loaded);
    for (name, data) in &stored {
        assert_eq!(named[name].as_bytes(), data.as_bytes(), "{name}");
        assert_eq!(fixture.weight(name, &data.shape, DType::F32).as_bytes(), data.as_bytes(), "{name}");
    }
}

/// Extents that nothing divides: 5 x 6 x 9 become 8 x 8 x 12 inside, in uneven shards.
#[test]
fn any_extent_on_any_grid() {
    fn run<B: WindowBackend + AutodiffBackend>(device: &B::Device, place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>) -> Vec<Vec<f64>> {
        let fixture = Fixture::read(CASE);
        let model = model::<B>(&fixture, DType::F64, device);
        let x = fixture.tensor("x0", &[2, 1, 5, 6, 9], DType::F64, |u| 2.0 * u - 1.0);
        let x = place(Tensor::from_data(x, (device, DType::F64))).require_grad();
        let logits = model.forward(x.clone());
        let gradients = logits.clone().square().mean().backward();
        let named = weights::gradients(&model, &gradients);
        let mut all: Vec<Vec<f64>> = named.values().map(e2e::floats).collect();
        all.extend([values(logits), values(x.grad(&gradients).unwrap())]);
        all
    }
    let whole = run::<Plain>(&Default::default(), |x| x);
    for grid in [Grid([1, 2, 2, 1]), Grid([1, 4, 1, 2]), Grid([2, 1, 3, 1])] {
        let split = agreed_on_grid(grid, |device| run::<Split>(device, place::split));
        assert_eq!(split.len(), whole.len());
        for (a, b) in split.iter().zip(&whole) {
            let scale = b.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            assert_eq!(a.len(), b.len());
            assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-9 * scale), "on {grid}");
        }
    }
}

#[test]
fn a_step_gathers_nothing_for_want_of_a_rule() {
    let fixture = Fixture::read(CASE);
    for grid in [Grid([2, 2, 1, 1]), Grid([1, 2, 2, 2]), Grid([1, 3, 1, 2])] {
        on_grid(grid, |device| {
            device.set_strict(true);
            let model = model::<Split>(&fixture, DType::F32, device);
            let (x, y) = batch::<Split>(&fixture, 0, DType::F32, device);
            let logits = model.forward(place::split(x));
            assert!(!place::layout(&logits).is_full());
            let loss = DiceCrossEntropy::new().forward(logits, split_targets(y));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            assert_eq!(gradients.len(), 5 * 6 + 2 * 2 + 2);
            assert_eq!(device.stats().gathered(), 0, "{}", device.stats());
        });
    }
}

#[test]
fn training_goes_down() {
    let losses = agreed_on_grid(Grid([1, 2, 1, 1]), |device| {
        Split::seed(device, 3);
        let mut model = config().with_depth(2).init::<Split>(device).unwrap();
        let mut optimizer = Adam::default().init::<Split, UNet3d<Split>>();
        let x = place::split(Tensor::<Split, 5>::random([1, 1, 8, 8, 8], Distribution::Default, device));
        let y = x.clone().greater_elem(0.5).int().squeeze_dim::<4>(1);
        let mut losses = Vec::new();
        for _ in 0..8 {
            let loss = DiceCrossEntropy::new().forward(model.forward(x.clone()), y.clone());
            losses.push(values(loss.clone())[0]);
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.01, model, gradients);
        }
        losses
    });
    assert!(losses[7] < 0.8 * losses[0], "{losses:?}");
}
