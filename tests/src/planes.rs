//! Burn's own operations on lines and planes, as cases that run on any backend.

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::{
    adaptive_avg_pool1d, adaptive_avg_pool2d, avg_pool1d, avg_pool2d, conv_transpose1d, conv_transpose2d, conv_transpose3d, conv1d, conv2d,
    deform_conv2d, interpolate, max_pool1d, max_pool1d_with_indices, max_pool2d, max_pool2d_with_indices, unfold4d,
};
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions, InterpolateMode, InterpolateOptions, UnfoldOptions};
use burn::tensor::{DType, Tensor, TensorData};
use burn_spatial::{Layout, Spatial, place};

use crate::suite::{Device, Program};

/// Numbers in -1..1 that depend on `seed` and their position.
pub fn numbers(n: usize, seed: u64) -> Vec<f64> {
    let mix = |i: usize| (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 11;
    (0..n).map(|i| mix(i) as f64 / (1u64 << 52) as f64 - 1.0).collect()
}

/// [`numbers`] as a tensor of float64.
pub fn tensor<B: burn::tensor::backend::Backend, const D: usize>(shape: [usize; D], seed: u64, device: &B::Device) -> Tensor<B, D> {
    let data = TensorData::new(numbers(shape.iter().product(), seed), shape);
    Tensor::from_data(data, (device, DType::F64))
}

/// The largest difference of two lists of equal length, as a part of the largest entry of the second; what is not a number
/// on one side only is infinitely far off.
pub fn distance(got: &[f64], want: &[f64]) -> f64 {
    let scale = want.iter().filter(|v| v.is_finite()).fold(1e-300f64, |m, v| m.max(v.abs()));
    let apart = |(g, w): (&f64, &f64)| if g == w || (g.is_nan() && w.is_nan()) { 0.0 } else { (g - w).abs() };
    let worst = got.iter().zip(want).map(apart).fold(0.0f64, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) });
    if got.len() == want.len() { worst / scale } else { f64::INFINITY }
}

/// An operation along `N` axes; weights are `[out, in / groups]` (transposed: `[in, out / groups]`) and the kernel.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Op<const N: usize> {
    Conv {
        channels: [usize; 2],
        kernel: [usize; N],
        bias: bool,
        options: ConvOptions<N>,
    },
    Transposed {
        channels: [usize; 2],
        kernel: [usize; N],
        bias: bool,
        options: ConvTransposeOptions<N>,
    },
    Average {
        kernel: [usize; N],
        stride: [usize; N],
        padding: [usize; N],
        include: bool,
        ceil: bool,
    },
    Maximum {
        kernel: [usize; N],
        stride: [usize; N],
        padding: [usize; N],
        dilation: [usize; N],
        ceil: bool,
    },
    Adaptive {
        size: [usize; N],
    },
    /// Planes only.
    Interpolate {
        size: [usize; N],
        options: InterpolateOptions,
    },
}

impl<const N: usize> Op<N> {
    /// Whether Burn's CPU backend has the right gradients. An average that is rounded up and counts its padding divides by
    /// less at its end, which its backward pass forgets; the weight's gradient of a line's convolution in groups is wrong
    /// where the stride leaves out inputs at the end.
    pub fn trusted(&self) -> bool {
        match self {
            Op::Average { include, ceil, .. } => !(*include && *ceil),
            Op::Conv { options, .. } => N > 1 || options.groups == 1 || options.stride[0] == 1,
            _ => true,
        }
    }
}

/// Output, positions of maxima, and the gradients of x, weight and bias, in float64.
macro_rules! runner {
    ($name:ident, $n:literal, $d:literal, $axes:expr, $conv:ident, $transposed:ident, $average:ident, $maximum:ident, $plain:ident,
        $adaptive:ident, $interpolate:expr) => {
        /// Runs an operation and its backward pass; `place` is applied to x. Output, positions of maxima, and the gradients
        /// of x, weight and bias. Collective.
        ///
        /// # Panics
        /// If a gradient is missing.
        pub fn $name<B: AutodiffBackend>(
            op: &Op<$n>,
            shape: [usize; $d],
            seed: u64,
            device: &B::Device,
            place: impl Fn(Tensor<B, $d>) -> Tensor<B, $d>,
        ) -> Vec<Vec<f64>> {
            let axes = $axes;
            let x = place(tensor(shape, seed, device)).require_grad();
            let parameters = |channels: &[usize; 2], kernel: &[usize; $n], bias: Option<usize>| {
                let shape: Vec<usize> = channels.iter().chain(kernel).copied().collect();
                let weight: Tensor<B, $d> = tensor(shape.try_into().expect("the rank"), seed + 1, device);
                let bias: Option<Tensor<B, 1>> = bias.map(|n| tensor([n], seed + 2, device).require_grad());
                (weight.require_grad(), bias)
            };
            let (mut weight, mut bias, mut indices) = (None, None, None);
            let y = match op {
                Op::Conv { channels, kernel, bias: with, options } => {
                    let (w, b) = parameters(channels, kernel, with.then_some(channels[0]));
                    (weight, bias) = (Some(w.clone()), b.clone());
                    $conv(x.clone(), w, b, options.clone())
                }
                Op::Transposed { channels, kernel, bias: with, options } => {
                    let (w, b) = parameters(channels, kernel, with.then_some(channels[1] * options.groups));
                    (weight, bias) = (Some(w.clone()), b.clone());
                    $transposed(x.clone(), w, b, options.clone())
                }
                Op::Average { kernel, stride, padding, include, ceil } => {
                    $average(x.clone(), axes(kernel), axes(stride), axes(padding), *include, *ceil)
                }
                Op::Maximum { kernel, stride, padding, dilation, ceil } => {
                    let (y, at) = $maximum(x.clone(), axes(kernel), axes(stride), axes(padding), axes(dilation), *ceil);
                    let alone = $plain(x.clone(), axes(kernel), axes(stride), axes(padding), axes(dilation), *ceil);
                    assert_eq!(alone.into_data(), y.clone().into_data(), "with and without positions");
                    indices = Some(at);
                    y
                }
                Op::Adaptive { size } => $adaptive(x.clone(), axes(size)),
                Op::Interpolate { size, options } => $interpolate(x.clone(), *size, options.clone()),
            };
            let data = |t: TensorData| t.convert::<f64>().to_vec::<f64>().expect("float64 data");
            let grads = (y.clone() * tensor(y.dims(), seed + 3, device)).sum().backward();
            let mut all = vec![data(y.into_data())];
            all.extend(indices.map(|at| data(at.into_data())));
            all.push(data(x.grad(&grads).expect("a gradient of x").into_data()));
            all.extend(weight.map(|w| data(w.grad(&grads).expect("a gradient of the weight").into_data())));
            all.extend(bias.map(|b| data(b.grad(&grads).expect("a gradient of the bias").into_data())));
            all
        }
    };
}

runner!(
    run_line,
    1,
    3,
    |a: &[usize; 1]| a[0],
    conv1d,
    conv_transpose1d,
    avg_pool1d,
    max_pool1d_with_indices,
    max_pool1d,
    adaptive_avg_pool1d,
    |_: Tensor<B, 3>, _: [usize; 1], _: InterpolateOptions| -> Tensor<B, 3> { panic!("Burn interpolates planes only") }
);
runner!(
    run_plane,
    2,
    4,
    |a: &[usize; 2]| *a,
    conv2d,
    conv_transpose2d,
    avg_pool2d,
    max_pool2d_with_indices,
    max_pool2d,
    adaptive_avg_pool2d,
    |x: Tensor<B, 4>, size: [usize; 2], options: InterpolateOptions| interpolate(x, size, options)
);

type Plain = Autodiff<Flex>;
type Split = Autodiff<Spatial<Flex>>;

fn near(name: &str, got: &[Vec<f64>], want: &[Vec<f64>]) {
    within(name, got, want, 1e-11);
}

fn within(name: &str, got: &[Vec<f64>], want: &[Vec<f64>], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = distance(got, want);
        assert!(off <= tolerance, "{name}: result {i} is off by {off} of its largest entry");
    }
}

/// Lines: convolutions, pools and adaptive means.
pub fn lines(device: &Device) {
    let shape = [4, 4, 11];
    let ops = [
        Op::Conv { channels: [6, 2], kernel: [3], bias: true, options: ConvOptions::new([2], [1], [2], 2) },
        Op::Transposed { channels: [4, 3], kernel: [3], bias: true, options: ConvTransposeOptions::new([2], [1], [1], [1], 2) },
        Op::Average { kernel: [3], stride: [2], padding: [1], include: false, ceil: true },
        Op::Maximum { kernel: [3], stride: [2], padding: [1], dilation: [2], ceil: false },
        Op::Adaptive { size: [5] },
        Op::Adaptive { size: [1] },
    ];
    for op in ops {
        let want = run_line::<Plain>(&op, shape, 1, &Default::default(), |x| x);
        let got = run_line::<Split>(&op, shape, 1, device, place::split);
        near(&format!("{op:?}"), &got, &want);
    }
    assert_eq!(device.stats().gathered(), 0, "gathered: {}", device.stats());
}

/// Planes: convolutions, pools, adaptive means and interpolations.
pub fn planes(device: &Device) {
    let shape = [4, 4, 9, 7];
    let interpolate = |mode, align| Op::Interpolate { size: [13, 6], options: InterpolateOptions::new(mode).with_align_corners(align) };
    let ops = [
        Op::Conv { channels: [6, 2], kernel: [3, 2], bias: true, options: ConvOptions::new([1, 2], [1, 0], [2, 1], 2) },
        Op::Conv { channels: [2, 4], kernel: [5, 1], bias: false, options: ConvOptions::new([2, 1], [2, 0], [1, 1], 1) },
        Op::Transposed {
            channels: [4, 3],
            kernel: [2, 2],
            bias: true,
            options: ConvTransposeOptions::new([2, 2], [0, 0], [0, 0], [1, 1], 1),
        },
        Op::Transposed {
            channels: [4, 1],
            kernel: [3, 4],
            bias: false,
            options: ConvTransposeOptions::new([2, 1], [1, 2], [1, 0], [1, 1], 2),
        },
        Op::Average { kernel: [3, 2], stride: [2, 2], padding: [1, 0], include: true, ceil: false },
        Op::Maximum { kernel: [3, 2], stride: [2, 2], padding: [1, 0], dilation: [1, 2], ceil: false },
        Op::Maximum { kernel: [2, 2], stride: [2, 2], padding: [0, 0], dilation: [1, 1], ceil: true },
        Op::Adaptive { size: [1, 1] },
        Op::Adaptive { size: [4, 1] },
        Op::Adaptive { size: [5, 4] },
        interpolate(InterpolateMode::Nearest, true),
        interpolate(InterpolateMode::Bilinear, true),
        interpolate(InterpolateMode::Bilinear, false),
        interpolate(InterpolateMode::Bicubic, false),
    ];
    for op in ops {
        let want = run_plane::<Plain>(&op, shape, 1, &Default::default(), |x| x);
        let got = run_plane::<Split>(&op, shape, 1, device, place::split);
        near(&format!("{op:?}"), &got, &want);
    }
    // The CPU backend has no gradient of this one.
    let lanczos = InterpolateOptions::new(InterpolateMode::Lanczos3).with_align_corners(false);
    let want = interpolate_only::<Flex>(tensor(shape, 1, &Default::default()), &lanczos);
    near("Lanczos3", &[interpolate_only::<Spatial<Flex>>(place::split(tensor(shape, 1, device)), &lanczos)], &[want]);
    assert_eq!(device.stats().gathered(), 0, "gathered: {}", device.stats());
}

fn interpolate_only<B: burn::tensor::backend::Backend>(x: Tensor<B, 4>, options: &InterpolateOptions) -> Vec<f64> {
    interpolate(x, [13, 6], options.clone()).into_data().to_vec().expect("float64 data")
}

/// Output and gradients of x, offsets, weight, mask and bias.
fn deform<B: AutodiffBackend>(device: &B::Device, place: impl Fn(Tensor<B, 4>) -> Tensor<B, 4>) -> Vec<Vec<f64>> {
    let [x, offset, mask] =
        [([4, 2, 5, 6], 1), ([4, 18, 5, 6], 2), ([4, 9, 5, 6], 3)].map(|(s, n)| place(tensor(s, n, device)).require_grad());
    let weight = tensor::<B, 4>([3, 2, 3, 3], 4, device).require_grad();
    let bias = tensor::<B, 1>([3], 5, device).require_grad();
    let options = DeformConvOptions::new([1, 1], [1, 1], [1, 1], 1, 1);
    let y = deform_conv2d(x.clone(), offset.clone(), weight.clone(), Some(mask.clone()), Some(bias.clone()), options);
    let grads = (y.clone() * tensor(y.dims(), 6, device)).sum().backward();
    let data = |t: TensorData| t.to_vec::<f64>().expect("float64 data");
    let mut all: Vec<Vec<f64>> = [&x, &offset, &mask, &weight].map(|t| data(t.grad(&grads).expect("a gradient").into_data())).to_vec();
    all.push(data(bias.grad(&grads).expect("a gradient").into_data()));
    all.push(data(y.into_data()));
    all
}

/// A deformable convolution and an unfolding of planes that the batch splits alone.
pub fn whole_planes(device: &Device) {
    let batch = |x: Tensor<Split, 4>| {
        let layout = Layout::volume(&x.dims(), device.mesh().grid());
        let layout = Layout::full(&x.dims()).with_dim(0, layout.dim(0).to_vec());
        place::to_layout(x, &layout)
    };
    // The CPU backend computes these gradients in float32, whatever the type of the tensors.
    within("deform_conv2d", &deform::<Split>(device, batch), &deform::<Plain>(&Default::default(), |x| x), 1e-6);
    let unfolded = unfold4d(batch(tensor([4, 2, 5, 6], 1, device)), [3, 2], UnfoldOptions::new([2, 1], [1, 0], [1, 2])).into_data();
    let want = unfold4d(tensor::<Plain, 4>([4, 2, 5, 6], 1, &Default::default()), [3, 2], UnfoldOptions::new([2, 1], [1, 0], [1, 2]));
    assert_eq!(unfolded, want.into_data(), "unfold4d");
    assert_eq!(device.stats().gathered(), 0, "gathered: {}", device.stats());
}

/// Gradients of x and weight of a transposed convolution of a volume whose sum is the loss: the gradient that comes in is
/// the same everywhere.
fn summed<B: AutodiffBackend>(device: &B::Device, place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>) -> (Tensor<B::InnerBackend, 5>, Vec<f64>) {
    let x = place(tensor([2, 2, 5, 4, 6], 1, device)).require_grad();
    let weight = tensor::<B, 5>([2, 3, 3, 3, 2], 2, device).require_grad();
    let options = ConvTransposeOptions::new([2; 3], [1, 0, 1], [1, 0, 0], [1; 3], 1);
    let grads = conv_transpose3d(x.clone(), weight.clone(), None, options).sum().backward();
    let dw = weight.grad(&grads).expect("a gradient").into_data().to_vec().expect("float64 data");
    (x.grad(&grads).expect("a gradient"), dw)
}

/// Gradients that are the same everywhere: they lie as volumes do, and are right.
pub fn uniform_gradients(device: &Device) {
    let (dx, dw) = summed::<Split>(device, place::split);
    let (want, want_dw) = summed::<Plain>(&Default::default(), |x| x);
    assert_eq!(place::layout(&dx), Layout::volume(&dx.dims(), device.mesh().grid()));
    let data = |t: TensorData| t.to_vec::<f64>().expect("float64 data");
    near("the gradient of x", &[data(dx.into_data())], &[data(want.into_data())]);
    near("the gradient of the weight", &[dw], &[want_dw]);
}

/// What of this module runs on every grid.
pub const PROGRAMS: &[Program] = &[
    Program { name: "lines", run: lines },
    Program { name: "planes", run: planes },
    Program { name: "whole_planes", run: whole_planes },
    Program { name: "uniform_gradients", run: uniform_gradients },
];
