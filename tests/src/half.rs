//! Sums and means of split volumes in half precision: as exact as one rank's, and finite where the result is.

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Param};
use burn::nn::conv::{Conv3d, Conv3dConfig};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::{adaptive_avg_pool1d, adaptive_avg_pool2d, avg_pool2d};
use burn::tensor::{DType, Int, Tensor, TensorData, activation};
use burn_spatial::nn::{self, PoolSpec, UpsampleMode, UpsampleSpec, WindowBackend, avg_pool3d, upsample3d};
use burn_spatial::{Spatial, optim, place};
use burn_spatial_models::loss::{DiceCrossEntropy, VoxelCrossEntropy};
use burn_spatial_models::weights;

use crate::fixtures::values;
use crate::fixtures_loss::split_targets;
use crate::modules::numbers;
use crate::suite::{Device, Program, agree};

type Split = Autodiff<Spatial<Flex>>;
type Plain = Autodiff<Flex>;

/// The types, and how far neighbouring numbers are from each other at most, relative to them.
const HALVES: [(DType, f64); 2] = [(DType::F16, 1.0 / 1024.0), (DType::BF16, 1.0 / 128.0)];

fn tensor<B: Backend, const D: usize>(values: &[f32], shape: [usize; D], dtype: DType, device: &B::Device) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape).convert_dtype(dtype), (device, dtype))
}

fn split<const D: usize>(values: &[f32], shape: [usize; D], dtype: DType, device: &Device) -> Tensor<Split, D> {
    place::split(tensor(values, shape, dtype, device))
}

/// `values` as a type can hold them.
fn rounded(values: &[f32], dtype: DType) -> Vec<f32> {
    TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype).convert::<f32>().to_vec().expect("numbers")
}

/// Whether each number is within `tolerance` of the right one, relative to the largest, and the same on all ranks.
fn close(device: &Device, what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    let off = |(got, want): (&f64, &f64)| if got.is_finite() { (got - want).abs() } else { f64::INFINITY };
    let worst = got.iter().zip(want).map(off).fold(0.0, f64::max);
    assert!(
        worst <= tolerance * scale,
        "{what} is off by {worst} of {scale}: {:?} for {:?}",
        &got[..got.len().min(4)],
        &want[..got.len().min(4)]
    );
    agree(device, what, &got.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<_>>());
}

/// Means whose sums exceed the range of f16, and gradients of them.
pub fn means(device: &Device) {
    for (dtype, unit) in HALVES {
        let shape = [1, 1, 64, 64, 64];
        let x = split(&vec![1.0; 64 * 64 * 64], shape, dtype, device);
        assert_eq!(x.dtype(), dtype);
        assert_eq!(values(x.clone().mean()), [1.0], "{dtype:?}");
        for dim in 0..5 {
            let mean = x.clone().mean_dim(dim);
            assert_eq!(mean.dtype(), dtype);
            assert!(values(mean).iter().all(|v| *v == 1.0), "{dtype:?} along {dim}");
        }
        let flat = x.clone().swap_dims(0, 1).reshape([1, 64 * 64 * 64]).mean_dim(1);
        assert_eq!(values(flat), [1.0], "{dtype:?} of a channel");
        // What is stored once stands for many.
        let same = Tensor::<Split, 5>::full(shape, 2.0, (device, dtype));
        assert_eq!(values((same.clone() + x).mean()), [3.0], "{dtype:?}");
        assert_eq!(values(same.mean()), [2.0], "{dtype:?}");
        assert_eq!(values(Tensor::<Split, 5>::zeros(shape, (device, dtype)).sum()), [0.0], "{dtype:?}");
        let small = Tensor::<Split, 5>::full(shape, 1.0 / 1024.0, (device, dtype));
        assert_eq!(values(small.clone().sum()), [256.0], "{dtype:?}");
        assert!(values(small.reshape([64, 64 * 64]).sum_dim(1)).iter().all(|v| *v == 4.0), "{dtype:?}");

        let x = numbers(2 * 3 * 8 * 8 * 16, 1).iter().map(|v| 3000.0 + 500.0 * v).collect::<Vec<_>>();
        let exact: Vec<f64> = rounded(&x, dtype).iter().map(|v| f64::from(*v)).collect();
        let mean = exact.iter().sum::<f64>() / exact.len() as f64;
        let x = split(&x, [2, 3, 8, 8, 16], dtype, device).require_grad();
        let y = x.clone().mean();
        close(device, "mean", &values(y.clone()), &[mean], unit / 2.0);
        let gradients = (y * 3.0).backward();
        close(device, "its gradient", &values(x.grad(&gradients).expect("a gradient")), &vec![3.0 / 6144.0; 6144], unit);
    }
}

/// Sums whose parts exceed the range of f16, or are lost in its rounding, and which do not themselves.
pub fn sums(device: &Device) {
    for (dtype, unit) in HALVES {
        // Each rank's share is far beyond 65504, the sum is the last plane's.
        let sign = |i: usize| if i < 8 { 30000.0 } else { -30000.0 };
        for axis in 0..3 {
            let mut shape = [1, 1, 1, 1, 1];
            shape[2 + axis] = 16;
            let line: Vec<f32> = (0..16).map(sign).collect();
            let x = split(&line, shape, dtype, device).repeat_dim(1, 4).require_grad();
            assert_eq!(values(x.clone().sum()), [0.0], "{dtype:?}");
            assert_eq!(values(x.clone().sum_dim(2 + axis)), [0.0; 4], "{dtype:?}");
            // A pending sum that goes through what keeps it so.
            let moved = x.clone().sum_dim(2 + axis).neg().permute([0, 2, 1, 3, 4]).reshape([4, 1]);
            assert_eq!(moved.dtype(), dtype);
            assert_eq!(values(moved.clone() + moved.clone()), [0.0; 4], "{dtype:?}");
            assert_eq!(values(moved.sum()), [0.0], "{dtype:?}");
            let sums = values(x.cumsum(2 + axis));
            assert_eq!(sums[15], 0.0, "{dtype:?}");
            // The gradient of a bias.
            let conv: Conv3d<Split> = Conv3dConfig::new([1, 1], [1; 3]).init(device);
            let [weight, bias] = [Tensor::ones([1; 5], (device, dtype)), Tensor::zeros([1; 5], (device, dtype))];
            let conv = Conv3d { weight: Param::from_tensor(weight), bias: Some(Param::from_tensor(bias.reshape([1]))), ..conv };
            let gradients = (conv.forward(Tensor::ones(shape, (device, dtype))) * split(&line, shape, dtype, device)).sum().backward();
            let gradient = conv.bias.expect("a bias").grad(&gradients).expect("a gradient");
            assert_eq!(gradient.dtype(), dtype);
            assert_eq!(values(gradient), [0.0], "{dtype:?}");
        }
        let x = numbers(2 * 3 * 9 * 8 * 16, 2);
        let exact = tensor::<Plain, 5>(&rounded(&x, dtype), [2, 3, 9, 8, 16], DType::F64, &Default::default());
        let x = split(&x, [2, 3, 9, 8, 16], dtype, device);
        close(device, "sum", &values(x.clone().sum()), &values(exact.clone().sum()), unit / 2.0);
        for dim in 0..5 {
            close(device, "sum_dim", &values(x.clone().sum_dim(dim)), &values(exact.clone().sum_dim(dim)), unit / 2.0);
        }
        // One after another, of one sign: each is rounded.
        let all = |x: Tensor<Split, 5>| x.abs().sum_dim(4).sum_dim(3).sum_dim(2).sum_dim(0);
        let want = exact.abs().sum_dim(4).sum_dim(3).sum_dim(2).sum_dim(0);
        close(device, "sums in turn", &values(all(x)), &values(want), 2.0 * unit);
    }
}

/// Softmax and its logarithm over more elements than f16 counts.
pub fn softmax(device: &Device) {
    let n = 70_000;
    for (dtype, unit) in HALVES {
        let x = split(&vec![0.5; n], [1, 1, 1, 1, n], dtype, device).inner();
        let [softmax, logarithm] = [activation::softmax(x.clone(), 4), activation::log_softmax(x, 4)];
        assert_eq!([softmax.dtype(), logarithm.dtype()], [dtype; 2]);
        // Numbers as small as these are 2^-24 apart in f16.
        let step = if dtype == DType::F16 { f64::from(n as u32) * 2f64.powi(-25) } else { unit };
        close(device, "softmax", &values(softmax), &vec![1.0 / n as f64; n], step);
        close(device, "log_softmax", &values(logarithm), &vec![-(n as f64).ln(); n], unit);
    }
}

/// What `f` makes of volumes, and gradients with regard to them for an incoming gradient.
fn with_gradient<B: AutodiffBackend>(
    x: Tensor<B, 5>,
    f: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
    grad: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
) -> [Vec<f64>; 2] {
    let x = x.require_grad();
    let y = f(x.clone());
    let gradients = (y.clone() * grad(y.clone())).sum().backward();
    [values(y), values(x.grad(&gradients).expect("a gradient"))]
}

/// Pools and interpolations, in which windows' sums exceed the range of f16.
pub fn pools(device: &Device) {
    fn run<B: WindowBackend + AutodiffBackend>(which: usize, x: Tensor<B, 5>) -> [Vec<f64>; 2] {
        let [n, c, d, h, w] = x.dims();
        let like = |y: Tensor<B, 5>| {
            let shape = y.dims();
            tensor(&numbers(shape.iter().product(), 7), shape, y.dtype(), &y.device())
        };
        match which {
            0 => {
                let spec = PoolSpec { stride: [3; 3], padding: [2, 3, 1], count_include_pad: false, ..PoolSpec::new([8; 3]) };
                with_gradient(x, |x| avg_pool3d(x, &spec), like)
            }
            1 => {
                let spec = UpsampleSpec { size: [7, 25, 16], scale: None, mode: UpsampleMode::Trilinear, align_corners: true };
                with_gradient(x, |x| upsample3d(x, &spec), like)
            }
            2 | 3 => {
                let out = if which == 2 { [1, 1] } else { [3, 1] };
                let plane = move |x: Tensor<B, 5>| adaptive_avg_pool2d(x.reshape([n, c * d, h, w]), out).reshape([n, c, d, out[0], out[1]]);
                with_gradient(x, plane, like)
            }
            4 => {
                let plane = move |x: Tensor<B, 5>| {
                    let y = avg_pool2d(x.reshape([n, c * d, h, w]), [7, 8], [2, 4], [1, 2], true, false);
                    let [.., h, w] = y.dims();
                    y.reshape([n, c, d, h, w])
                };
                with_gradient(x, plane, like)
            }
            _ => {
                let line = move |x: Tensor<B, 5>| adaptive_avg_pool1d(x.reshape([n, c * d * h, w]), 3).reshape([n, c, d, h, 3]);
                with_gradient(x, line, like)
            }
        }
    }
    let shape = [2, 2, 10, 9, 24];
    let x: Vec<f32> = numbers(shape.iter().product(), 3).iter().map(|v| 2000.0 + 300.0 * v).collect();
    for (dtype, unit) in HALVES {
        for which in 0..6 {
            let split = run::<Split>(which, split(&x, shape, dtype, device));
            let plain = run::<Plain>(which, tensor(&rounded(&x, dtype), shape, DType::F32, &Default::default()));
            close(device, &format!("{dtype:?} {which}"), &split[0], &plain[0], unit);
            // Incoming gradients are rounded, and so are those of halos.
            close(device, &format!("gradient, {dtype:?} {which}"), &split[1], &plain[1], 3.0 * unit);
        }
    }
}

/// Batch norm in few passes, and Burn's own, of many values of which squares exceed the range of f16.
pub fn batch_norm(device: &Device) {
    fn run<B: nn::NormBackend + AutodiffBackend>(
        own: bool,
        dtype: DType,
        x: Tensor<B, 5>,
        back: Tensor<B, 5>,
    ) -> Vec<(&'static str, Vec<f64>)> {
        let device = x.device();
        let mut norm: BatchNorm<B> = BatchNormConfig::new(3).init(&device);
        norm.gamma = Param::from_tensor(Tensor::from_data(TensorData::from([1.0, 0.5, -0.25]).convert_dtype(dtype), (&device, dtype)));
        norm.beta = Param::from_tensor(Tensor::from_data(TensorData::from([0.5, 0.0, -1.0]).convert_dtype(dtype), (&device, dtype)));
        let named = weights::collect(&norm).into_iter().map(|(name, data)| (name, data.convert_dtype(dtype))).collect();
        let norm = weights::load(norm, &named).expect("its own tensors fit");
        let x = x.require_grad();
        let y = if own { nn::batch_norm(&norm, x.clone(), 0.25) } else { norm.forward(x.clone()) };
        let gradients = (y.clone() * back).sum().backward();
        let gamma = norm.gamma.grad(&gradients).expect("a gradient");
        let beta = norm.beta.grad(&gradients).expect("a gradient");
        let mut all = vec![("y", values(y)), ("gamma", values(gamma)), ("beta", values(beta))];
        if own {
            all.push(("x", values(x.grad(&gradients).expect("a gradient"))));
            all.push(("mean", values(norm.running_mean.value())));
            all.push(("variance", values(norm.running_var.value())));
        }
        all
    }
    let shape = [2, 3, 16, 18, 20];
    let n = shape.iter().product();
    let x: Vec<f32> = numbers(n, 4).iter().map(|v| 150.0 * v).collect();
    let back: Vec<f32> = numbers(n, 5).iter().map(|v| 4.0 + v).collect();
    for (dtype, unit) in HALVES {
        let wide = |values: &[f32]| tensor::<Plain, 5>(&rounded(values, dtype), shape, DType::F32, &Default::default());
        // Burn's own squares in half precision: of smaller values.
        let scaled: Vec<f32> = x.iter().map(|v| v / 50.0).collect();
        for (own, x, tolerance) in [(true, &x, 2.0 * unit), (false, &scaled, 8.0 * unit)] {
            let got = run::<Split>(own, dtype, split(x, shape, dtype, device), split(&back, shape, dtype, device));
            let want = run::<Plain>(own, DType::F32, wide(x), wide(&back));
            for ((what, got), (_, want)) in got.iter().zip(&want) {
                close(device, &format!("{what}, {dtype:?}, own {own}"), got, want, tolerance);
            }
        }
    }
}

/// Losses of more voxels than f16 counts.
pub fn losses(device: &Device) {
    fn run<B: AutodiffBackend>(logits: Tensor<B, 5>, targets: Tensor<B, 4, Int>) -> [Vec<f64>; 3] {
        let logits = logits.require_grad();
        let cross_entropy = VoxelCrossEntropy::new().with_label_smoothing(0.1).forward(logits.clone(), targets.clone());
        let both = DiceCrossEntropy::new().forward(logits.clone(), targets);
        let gradients = (cross_entropy.clone() * 50_000.0).backward();
        [values(cross_entropy), values(both), values(logits.grad(&gradients).expect("a gradient"))]
    }
    let shape = [1, 3, 40, 41, 42];
    let classes: Vec<i64> = (0..40 * 41 * 42).map(|i| (i * 7 + i / 5) % 3).collect();
    let logits = numbers(shape.iter().product(), 6);
    let targets = || TensorData::new(classes.clone(), [1, 40, 41, 42]);
    for (dtype, unit) in HALVES {
        let here = Default::default();
        let plain = run::<Plain>(tensor(&rounded(&logits, dtype), shape, DType::F32, &here), Tensor::from_data(targets(), &here));
        let split = run::<Split>(split(&logits, shape, dtype, device), split_targets(Tensor::from_data(targets(), device)));
        for (i, tolerance) in [1e-5, 1e-5, unit].into_iter().enumerate() {
            close(device, &format!("{dtype:?} {i}"), &split[i], &plain[i], tolerance);
        }
    }
}

/// The gradient of a convolution's weight.
pub fn weight_gradients(device: &Device) {
    fn run<B: WindowBackend + AutodiffBackend>(x: Tensor<B, 5>, weight: Tensor<B, 5>) -> [Vec<f64>; 2] {
        let weight = weight.require_grad();
        let spec = nn::ConvSpec { padding: [(1, 1); 3], ..Default::default() };
        let y = nn::padded_conv3d(x, weight.clone(), None, &spec);
        let gradients = y.clone().sum().backward();
        [values(y), values(weight.grad(&gradients).expect("a gradient"))]
    }
    let (shape, of_weight) = ([2, 3, 9, 8, 16], [2, 3, 3, 3, 3]);
    let (x, weight) = (numbers(shape.iter().product(), 8), numbers(of_weight.iter().product(), 9));
    for (dtype, unit) in HALVES {
        let wide = |values: &[f32], shape| tensor::<Plain, 5>(&rounded(values, dtype), shape, DType::F32, &Default::default());
        let plain = run(wide(&x, shape), wide(&weight, of_weight));
        let split = run(split(&x, shape, dtype, device), tensor::<Split, 5>(&weight, of_weight, dtype, device));
        close(device, &format!("y, {dtype:?}"), &split[0], &plain[0], unit);
        // Each of up to eight ranks rounds its share.
        close(device, &format!("weight, {dtype:?}"), &split[1], &plain[1], 2.0 * unit);
    }
}

#[derive(Module, Debug)]
struct One<B: Backend> {
    p: Param<Tensor<B, 5>>,
}

/// A step of the optimizer, and the norm of gradients.
pub fn optimizer(device: &Device) {
    for (dtype, unit) in HALVES {
        let shape = [1, 1, 4, 30, 30];
        let mut one = One { p: Param::from_tensor(Tensor::<Split, 5>::ones(shape, (device, dtype))) };
        // Half of the gradients vanish as squares of f16, a quarter exceed its range.
        let back: Vec<f32> = (0..3600).map(|i| [0.0, 1e-4, -2e-4, 3e2][i % 4]).collect();
        let mut adam = optim::Adam::default().init();
        let mut steps: Vec<f64> = vec![0.0; 3600];
        for _ in 0..3 {
            let gradients = (one.p.val() * tensor(&back, shape, dtype, device)).sum().backward();
            let gradients = GradientsParams::from_grads(gradients, &one);
            let norm = values(optim::gradient_norm(&one, &gradients, device));
            let want = rounded(&back, dtype).iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            close(device, "norm", &norm, &[want], 1e-5);
            one = adam.step(0.0625, one, gradients);
            steps.iter_mut().zip(&back).for_each(|(step, g)| *step += if *g == 0.0 { 0.0 } else { -0.0625 * f64::from(g.signum()) });
            let want: Vec<f64> = steps.iter().map(|step| 1.0 + step).collect();
            assert_eq!(one.p.val().dtype(), dtype);
            close(device, &format!("{dtype:?}"), &values(one.p.val()), &want, 3.0 * unit);
        }
    }
}

/// What of this module runs on every grid.
pub const PROGRAMS: &[Program] = &[
    Program { name: "means", run: means },
    Program { name: "sums", run: sums },
    Program { name: "softmax", run: softmax },
    Program { name: "pools", run: pools },
    Program { name: "batch_norm", run: batch_norm },
    Program { name: "losses", run: losses },
    Program { name: "weight_gradients", run: weight_gradients },
    Program { name: "optimizer", run: optimizer },
];
