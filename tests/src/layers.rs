//! Batch norm, activations, a loss, Adam and whole blocks of split volumes against PyTorch's values and Burn's modules.

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::conv::{Conv3d, Conv3dConfig, ConvTranspose3d, ConvTranspose3dConfig};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, LeakyReluConfig, PaddingConfig3d};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData, activation};
use burn_spatial::nn::{self, ConvSpec, PoolSpec, avg_pool3d, max_pool3d, padded_conv3d, same_padding};
use burn_spatial::{Spatial, optim, place};
use burn_spatial_models::weights;

use crate::fixtures::{self, Case, Outcome, values};
use crate::modules::{Fill, numbers};
use crate::suite::{Device, Program};

type B = Autodiff<Spatial<Flex>>;
type Volume = Tensor<B, 5>;

/// Runs all cases of `op` in both types, without a gather.
fn check(device: &Device, op: &str, count: usize, run: impl Fn(&Case, DType) -> Outcome) {
    let before = device.stats().gathered();
    let cases = fixtures::cases(op);
    assert_eq!(cases.len(), count, "cases of {op}");
    for case in &cases {
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F64, 1e-10)] {
            case.check(&run(case, dtype), tolerance);
        }
    }
    assert_eq!(device.stats().gathered(), before, "{op} gathered: {}", device.stats());
}

/// `array` of `case`, split as far as it goes, its gradient asked for.
fn split(case: &Case, array: &str, dtype: DType, device: &Device) -> Volume {
    place::split(case.tensor::<B, 5>(array, dtype, device)).require_grad()
}

fn parameter<const D: usize>(case: &Case, array: &str, dtype: DType, device: &Device) -> Param<Tensor<B, D>> {
    Param::from_tensor(case.tensor(array, dtype, device))
}

/// Burn's batch norm with the weights and statistics that the case names so.
fn norm(case: &Case, weight: &str, bias: &str, eps: f64, dtype: DType, device: &Device) -> BatchNorm<B> {
    let mut norm = BatchNormConfig::new(case.arrays[weight].values.len()).with_epsilon(eps).init(device);
    norm.gamma = parameter(case, weight, dtype, device);
    norm.beta = parameter(case, bias, dtype, device);
    // Running statistics in the type of the rest.
    let named = weights::collect(&norm).into_iter().map(|(name, data)| (name, data.convert_dtype(dtype))).collect();
    weights::load(norm, &named).expect("its own tensors fit")
}

/// BatchNorm in training, its statistics too, and its formula in evaluation (Burn's module trains wherever autodiff
/// is).
pub fn batch_norm(device: &Device) {
    batch_norm_as(device, |norm, x| norm.forward(x));
}

/// The same in few passes.
pub fn fused_batch_norm(device: &Device) {
    batch_norm_as(device, |norm, x| nn::batch_norm(norm, x, 1.0));
}

fn batch_norm_as(device: &Device, forward: fn(&BatchNorm<B>, Volume) -> Volume) {
    check(device, "batch_norm", 3, |case, dtype| {
        let mut outcome = Outcome::default();
        let x = split(case, "x", dtype, device);
        let mut norm = norm(case, "w", "b", case.number("eps"), dtype, device);
        assert_eq!(norm.momentum, case.number("momentum"));
        let start = ["running_mean", "running_var"].map(|name| {
            let array = &case.arrays[&format!("{name}_in")];
            (name.to_owned(), TensorData::new(array.values.clone(), array.shape.clone()).convert_dtype(dtype))
        });
        let mut named = weights::collect(&norm);
        named.extend(start);
        norm = weights::load(norm, &named).expect("statistics fit");
        let y = if case.flag("training") {
            forward(&norm, x.clone())
        } else {
            let whole = |t: Tensor<Spatial<Flex>, 1>| Tensor::<B, 1>::from_inner(t).reshape([1, -1, 1, 1, 1]);
            let valid = norm.valid();
            let scale = norm.gamma.val().reshape([1, -1, 1, 1, 1]) / (whole(valid.running_var.value()) + norm.epsilon).sqrt();
            let y = (x.clone() - whole(valid.running_mean.value())) * scale + norm.beta.val().reshape([1, -1, 1, 1, 1]);
            let module = valid.forward(x.clone().inner());
            let worst = values((y.clone().inner() - module).abs().max());
            let close = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
            assert!(worst[0] < close, "the module in evaluation is off by {worst:?}");
            let fused = nn::batch_norm(&valid, x.clone().inner(), 1.0);
            let worst = values((y.clone().inner() - fused).abs().max());
            assert!(worst[0] < close, "the fused module in evaluation is off by {worst:?}");
            y
        };
        let stats = weights::collect(&norm.valid());
        for (name, out) in [("running_mean", "running_mean_out"), ("running_var", "running_var_out")] {
            let mut got: Vec<f64> = stats[name].clone().convert::<f64>().to_vec().expect("float64 data");
            if case.flag("training") && name == "running_var" {
                // PyTorch keeps the unbiased variance: the batch's share is n / (n - 1) of the biased one.
                let n = x.dims().iter().product::<usize>() as f64 / norm.gamma.dims()[0] as f64;
                let old = case.arrays["running_var_in"].values.iter().map(|v| v * (1.0 - norm.momentum));
                got.iter_mut().zip(old).for_each(|(v, old)| *v = old + (*v - old) * n / (n - 1.0));
            }
            outcome.values.insert(out, got);
        }
        outcome.values.insert("y", values(y.clone()));
        let grads = (y * place::split(case.tensor::<B, 5>("gy", dtype, device))).sum().backward();
        outcome.values.insert("gx", values(x.grad(&grads).expect("a gradient of x")));
        outcome.values.insert("gw", values(norm.gamma.grad(&grads).expect("a gradient of the scale")));
        outcome.values.insert("gb", values(norm.beta.grad(&grads).expect("a gradient of the shift")));
        outcome
    });
}

/// Batch norm and activation in few passes against Burn's two modules on one plain rank: results, gradients, running
/// statistics; with any input layout.
pub fn batch_norm_with_activation(device: &Device) {
    type Plain = Autodiff<Flex>;
    const SHAPE: [usize; 5] = [2, 3, 6, 5, 7];
    let data = |seed| TensorData::new(numbers(SHAPE.iter().product(), seed), SHAPE).convert_dtype(DType::F64);
    fn run<A: AutodiffBackend>(
        [x, grad]: [Tensor<A, 5>; 2],
        forward: impl Fn(&BatchNorm<A>, Tensor<A, 5>) -> Tensor<A, 5>,
    ) -> Vec<(&'static str, Vec<f64>)> {
        let device = x.device();
        let norm = BatchNormConfig::new(3).init::<A>(&device).map(&mut Fill(3));
        let named = weights::collect(&norm).into_iter().map(|(name, data)| (name, data.convert_dtype(DType::F64))).collect();
        let norm = weights::load(norm, &named).expect("its own tensors fit");
        let x = x.require_grad();
        let y = forward(&norm, x.clone());
        let grads = (y.clone() * grad).sum().backward();
        let of = |data: TensorData| data.convert::<f64>().to_vec().expect("float64 data");
        let stats = weights::collect(&norm.valid());
        vec![
            ("y", values(y)),
            ("gx", of(x.grad(&grads).expect("a gradient of x").into_data())),
            ("ggamma", of(norm.gamma.grad(&grads).expect("a gradient of the scale").into_data())),
            ("gbeta", of(norm.beta.grad(&grads).expect("a gradient of the shift").into_data())),
            ("mean", of(stats["running_mean"].clone())),
            ("variance", of(stats["running_var"].clone())),
        ]
    }
    for slope in [1.0, 0.0, 0.1] {
        let one = Default::default();
        let plain = [1, 2].map(|seed| Tensor::<Plain, 5>::from_data(data(seed), (&one, DType::F64)));
        let expected = run(plain, |norm, x| match slope {
            1.0 => norm.forward(x),
            0.0 => activation::relu(norm.forward(x)),
            slope => activation::leaky_relu(norm.forward(x), slope),
        });
        for seed in [None, Some(1), Some(2), Some(3)] {
            device.set_split_inputs(seed);
            let tensors = [1, 2].map(|seed| Tensor::<B, 5>::from_data(data(seed), (device, DType::F64)));
            device.set_split_inputs(None);
            let tensors = if seed.is_none() { tensors.map(place::split) } else { tensors };
            let got = run(tensors, |norm, x| nn::batch_norm(norm, x, slope));
            for ((what, got), (_, want)) in got.iter().zip(&expected) {
                let scale = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
                let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(got.len() == want.len() && worst <= 1e-11 * scale, "{what} with slope {slope}: off by {worst} of {scale}");
            }
        }
    }
}

/// Its cost in communication: forward 2 C numbers and their count of every rank, backward an all-reduce of 2 C.
pub fn batch_norm_communicates_little(device: &Device) {
    let x = place::split(Tensor::<B, 5>::from_data(TensorData::new(numbers(2 * 3 * 8 * 8 * 8, 1), [2, 3, 8, 8, 8]), device));
    let x = x.require_grad();
    let norm = BatchNormConfig::new(3).init(device);
    let before = device.stats();
    let y = nn::batch_norm(&norm, x.clone(), 0.0);
    let forward = device.stats();
    y.sum().backward();
    let backward = device.stats();
    let several = u64::from(place::layout(&x).split_over().iter().count() > 0);
    let moments = forward.comm.since(&before.comm);
    assert_eq!((moments.all_reduce.calls, moments.all_gather.calls), (0, several));
    assert_eq!(moments.all_gather.sent, several * (1 + 2 * 3) * 8);
    let sums = backward.comm.since(&forward.comm).all_reduce;
    // The sum of y is one more.
    assert_eq!((sums.calls, sums.sent), (2 * several, several * (6 * 4 + 4)));
    assert_eq!((backward.gathered(), backward.redistributions, backward.halos), (0, before.redistributions, before.halos));
}

/// A convolution with its activation in one pass against Burn's two modules on one plain rank: results and gradients, with
/// any input layout, and without a gather where the volume is split as usual.
pub fn convolution_with_activation(device: &Device) {
    type Plain = Autodiff<Flex>;
    fn run<A: AutodiffBackend>(
        config: &Conv3dConfig,
        tensor: impl Fn([usize; 5], u64) -> Tensor<A, 5>,
        forward: impl Fn(&Conv3d<A>, Tensor<A, 5>) -> Tensor<A, 5>,
    ) -> Vec<(&'static str, Vec<f64>)> {
        let x = tensor([2, 4, 6, 5, 7], 1).require_grad();
        let conv = config.init::<A>(&x.device()).map(&mut Fill(3));
        let named = weights::collect(&conv).into_iter().map(|(name, data)| (name, data.convert_dtype(DType::F64))).collect();
        let conv = weights::load(conv, &named).expect("its own tensors fit");
        let y = forward(&conv, x.clone());
        let grads = (y.clone() * tensor(y.dims(), 2)).sum().backward();
        let of = |data: TensorData| data.convert::<f64>().to_vec().expect("float64 data");
        let bias = conv.bias.as_ref().map(|bias| ("gbias", of(bias.grad(&grads).expect("a gradient of the bias").into_data())));
        let all = [
            ("y", values(y)),
            ("gx", of(x.grad(&grads).expect("a gradient of x").into_data())),
            ("gweight", of(conv.weight.grad(&grads).expect("a gradient of the weight").into_data())),
        ];
        all.into_iter().chain(bias).collect()
    }
    let close = |got: &[(&str, Vec<f64>)], want: &[(&str, Vec<f64>)], slope: f64| {
        assert_eq!(got.len(), want.len());
        for ((what, got), (_, want)) in got.iter().zip(want) {
            let scale = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(got.len() == want.len() && worst <= 1e-11 * scale, "{what} with slope {slope}: off by {worst} of {scale}");
        }
    };
    let data = |shape: [usize; 5], seed| TensorData::new(numbers(shape.iter().product(), seed), shape).convert_dtype(DType::F64);
    let split = |shape, seed| place::split(Tensor::<B, 5>::from_data(data(shape, seed), (device, DType::F64)));
    let configs = [
        Conv3dConfig::new([4, 6], [3; 3]).with_padding(PaddingConfig3d::Same),
        Conv3dConfig::new([4, 6], [3, 2, 1])
            .with_stride([1, 2, 3])
            .with_dilation([2, 1, 1])
            .with_groups(2)
            .with_padding(PaddingConfig3d::Explicit(2, 1, 0))
            .with_bias(false),
        Conv3dConfig::new([4, 2], [2, 3, 3]).with_stride([2; 3]),
    ];
    for (config, slopes) in configs.iter().zip([&[1.0, 0.0, 0.1][..], &[0.1, -0.5], &[0.0, 2.0]]) {
        for &slope in slopes {
            let plain = |shape, seed| Tensor::<Plain, 5>::from_data(data(shape, seed), (&Default::default(), DType::F64));
            let expected = run(config, plain, |conv, x| match slope {
                1.0 => conv.forward(x),
                0.0 => activation::relu(conv.forward(x)),
                slope => activation::leaky_relu(conv.forward(x), slope),
            });
            close(&run(config, plain, |conv, x| nn::activated_conv3d(conv, x, slope)), &expected, slope);
            let before = device.stats().gathered();
            close(&run(config, split, |conv, x| nn::activated_conv3d(conv, x, slope)), &expected, slope);
            assert_eq!(device.stats().gathered(), before, "gathered: {}", device.stats());
            for seed in 1..4 {
                let anyhow = |shape, data_seed| {
                    device.set_split_inputs(Some(seed));
                    let tensor = Tensor::<B, 5>::from_data(data(shape, data_seed), (device, DType::F64));
                    device.set_split_inputs(None);
                    tensor
                };
                close(&run(config, anyhow, |conv, x| nn::activated_conv3d(conv, x, slope)), &expected, slope);
            }
        }
    }
    // Padding that Burn's module refuses: one voxel behind the depth only.
    let same = Conv3dConfig::new([4, 3], [3; 3]).with_stride([2, 1, 1]).with_padding(PaddingConfig3d::Same);
    let expected = run(&same, split, |conv, x| {
        let [_, _, extents @ ..] = x.dims();
        let padding = [0, 1, 2].map(|i| same_padding(extents[i], 3, conv.stride[i], 1));
        assert_eq!(padding, [(0, 1), (1, 1), (1, 1)]);
        let spec = ConvSpec { stride: conv.stride, padding, ..Default::default() };
        activation::leaky_relu(padded_conv3d(x, conv.weight.val(), conv.bias.as_ref().map(|bias| bias.val()), &spec), 0.1)
    });
    close(&run(&same, split, |conv, x| nn::activated_conv3d(conv, x, 0.1)), &expected, 0.1);
}

/// A volume that is made whole before a dense layer has the values and gradients it has otherwise; the layer's gradient is
/// then summed over the batch alone.
pub fn whole_volume(device: &Device) {
    let numbers = |shape: &[usize], seed| TensorData::new(numbers(shape.iter().product(), seed), shape.to_vec());
    let x = Tensor::<B, 5>::from_data(numbers(&[8, 2, 4, 4, 4], 1), device);
    let weight = Tensor::<B, 2>::from_data(numbers(&[2 * 4 * 4 * 4, 5], 2), device);
    let run = |x: Tensor<B, 5>, whole: bool| {
        let (x, weight) = (x.require_grad(), weight.clone().require_grad());
        let volume = if whole { nn::whole_volume(x.clone() * 2.0) } else { x.clone() * 2.0 };
        let lies = place::layout(&volume);
        let y = volume.flatten::<2>(1, 4).matmul(weight.clone());
        let grads = (y.clone() * y.clone()).sum().backward();
        ([values(y), values(x.grad(&grads).unwrap()), values(weight.grad(&grads).unwrap())], lies)
    };
    let (want, _) = run(place::to_full(x.clone()), false);
    let (got, lies) = run(place::split(x.clone()), true);
    assert_eq!(lies.dim(0), place::layout(&place::split(x.clone())).dim(0), "the batch stays as it is");
    assert!((1..5).all(|dim| lies.dim(dim).iter().all(|axis| axis.as_split().is_none())), "{lies}");
    for (got, want) in got.iter().zip(&want) {
        let scale = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 1e-5 * scale), "{got:?} for {want:?}");
    }
}

/// Leaky ReLU, the mean over a volume, and the mean squared error.
pub fn misc(device: &Device) {
    check(device, "misc", 3, |case, dtype| {
        let mut outcome = Outcome::default();
        let gradient = match case.name.as_str() {
            "a_leaky_relu" => {
                let x = split(case, "x", dtype, device);
                let y = LeakyReluConfig::new().with_negative_slope(case.number("slope")).init().forward(x.clone());
                outcome.values.insert("y", values(y.clone()));
                let grads = (y * place::split(case.tensor::<B, 5>("gy", dtype, device))).sum().backward();
                values(x.grad(&grads).expect("a gradient of x"))
            }
            "a_global_mean" => {
                let x = split(case, "x", dtype, device);
                let y: Tensor<B, 2> = x.clone().flatten::<3>(2, 4).mean_dim(2).squeeze_dim(2);
                outcome.values.insert("y", values(y.clone()));
                let grads = (y * case.tensor("gy", dtype, device)).sum().backward();
                values(x.grad(&grads).expect("a gradient of x"))
            }
            "a_mse" => {
                let x = place::split(case.tensor::<B, 2>("x", dtype, device)).require_grad();
                let y = MseLoss::new().forward(x.clone(), case.tensor("t", dtype, device), Reduction::Mean);
                outcome.values.insert("y", values(y.clone()));
                let grads = y.backward();
                values(x.grad(&grads).expect("a gradient of x"))
            }
            other => panic!("a case {other} that nothing here runs"),
        };
        outcome.values.insert("gx", gradient);
        outcome
    });
}

#[derive(Module, Debug)]
struct One<B: Backend> {
    p: Param<Tensor<B, 1>>,
}

/// Adam, plain, with an L2 penalty and with decoupled weight decay.
pub fn adam(device: &Device) {
    check(device, "adam", 4, |case, dtype| {
        let beta = |name| case.number(name);
        let decay = case.number("weight_decay");
        let (weight_decay, l2_penalty) = if case.flag("decoupled") { (decay, 0.0) } else { (0.0, decay) };
        let (beta_1, beta_2, epsilon) = (beta("beta1"), beta("beta2"), case.number("eps"));
        let adam = optim::Adam { beta_1, beta_2, epsilon, weight_decay, l2_penalty };
        let mut one = One::<B> { p: parameter(case, "p0", dtype, device) };
        let mut optimizer = adam.init();
        let gradients: Tensor<B, 2> = case.tensor("grads", dtype, device);
        let mut steps = Vec::new();
        for step in 0..gradients.dims()[0] {
            let gradient = gradients.clone().slice_dim(0, step..step + 1).squeeze_dim::<1>(0);
            let grads = (one.p.val() * gradient).sum().backward();
            let grads = GradientsParams::from_grads(grads, &one);
            one = optimizer.step(case.number("lr"), one, grads);
            steps.extend(values(one.p.val()));
        }
        Outcome { values: [("params", steps)].into() }
    });
}

/// A step down and up a U-Net: convolution, batch norm, leaky ReLU, pool, transposed convolution, skip connection.
pub fn block(device: &Device) {
    check(device, "block", 2, |case, dtype| {
        let x = split(case, "x", dtype, device);
        let [w1, w2] = ["w1", "w2"].map(|name| case.tensor::<B, 5>(name, dtype, device).require_grad());
        let norm = norm(case, "bn_w", "bn_b", case.number("bn_eps"), dtype, device);
        let mut up: ConvTranspose3d<B> = ConvTranspose3dConfig::new([3, 3], [2; 3]).with_stride([2; 3]).with_bias(false).init(device);
        up.weight = parameter(case, "wt", dtype, device);
        let half = case.number("kernel") as usize / 2;
        let stride = [case.number("stride") as usize; 3];
        let conv = |x, w, stride| padded_conv3d(x, w, None, &ConvSpec { stride, padding: [(half, half); 3], ..Default::default() });
        let relu = LeakyReluConfig::new().with_negative_slope(case.number("slope")).init();
        let pool = PoolSpec { stride: [2; 3], padding: [1; 3], ..PoolSpec::new([3; 3]) };

        let top = relu.forward(norm.forward(conv(x.clone(), w1.clone(), stride)));
        let low = if case.params["pool"] == "max" { max_pool3d(top.clone(), &pool).0 } else { avg_pool3d(top.clone(), &pool) };
        let back = up.forward(low);
        let [.., d, h, w] = back.dims();
        let [n, c, ..] = top.dims();
        let y = conv(Tensor::cat(vec![top.slice([0..n, 0..c, 0..d, 0..h, 0..w]), back], 1), w2.clone(), [1; 3]);

        let mut outcome = Outcome { values: [("y", values(y.clone()))].into() };
        let grads = (y * place::split(case.tensor::<B, 5>("gy", dtype, device))).sum().backward();
        outcome.values.insert("gx", values(x.grad(&grads).expect("a gradient of x")));
        outcome.values.insert("gw1", values(w1.grad(&grads).expect("a gradient of w1")));
        outcome.values.insert("gw2", values(w2.grad(&grads).expect("a gradient of w2")));
        outcome.values.insert("gwt", values(up.weight.grad(&grads).expect("a gradient of wt")));
        outcome.values.insert("gbn_w", values(norm.gamma.grad(&grads).expect("a gradient of the scale")));
        outcome.values.insert("gbn_b", values(norm.beta.grad(&grads).expect("a gradient of the shift")));
        outcome
    });
}

/// What of this module runs on every grid.
pub const PROGRAMS: &[Program] = &[
    Program { name: "batch_norm", run: batch_norm },
    Program { name: "fused_batch_norm", run: fused_batch_norm },
    Program { name: "batch_norm_with_activation", run: batch_norm_with_activation },
    Program { name: "batch_norm_communicates_little", run: batch_norm_communicates_little },
    Program { name: "convolution_with_activation", run: convolution_with_activation },
    Program { name: "whole_volume", run: whole_volume },
    Program { name: "misc", run: misc },
    Program { name: "adam", run: adam },
    Program { name: "block", run: block },
];
