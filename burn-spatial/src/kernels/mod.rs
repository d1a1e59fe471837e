//! Local compute that the inner backend lacks or does slowly: window operations on one rank's block.
//!
//! [`LocalKernels`] is what a backend does itself. `Flex` has SIMD kernels for f32 and f64, with the best instructions that
//! all ranks' machines have; `BURN_SPATIAL_ISA` = `avx512`, `avx2` or `portable` forces lesser ones. Everything else runs on
//! the bodies in [`generic`], made of Burn ops. The functions here check shapes and call the backend.

use crate::comm::{Comm, CommError};
use crate::kind::{accumulator, wide};
use crate::trace::timed;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use burn_std::Shape;

mod cpu;
mod flex;
pub mod generic;
mod local;

pub use crate::window::{Count, Position, Taps, Window, WindowAxis};
pub use cpu::Arithmetic;
pub(crate) use cpu::norm::Moments;
pub use local::{AdamStep, Channels, Filter, LocalKernels, Slab};

/// The instructions the CPU kernels use: `avx512`, `avx2` or `portable`.
pub fn instructions() -> &'static str {
    cpu::Isa::get().name()
}

/// Has all ranks use the same instructions, those that every one has: parameters are the same on all ranks only if what they
/// compute alike is. The number of threads changes no result, but the slowest rank sets the pace. Collective.
pub(crate) fn agree(comm: &Comm) -> Result<(), CommError> {
    let threads = u16::try_from(rayon::current_num_threads()).unwrap_or(u16::MAX);
    let own = [&[cpu::Isa::get().place()][..], &threads.to_ne_bytes()].concat();
    let all = comm.all_gather(&own)?;
    cpu::Isa::agree(all.iter().filter_map(|bytes| bytes.first().copied()));
    let mut counts: Vec<u16> = all.iter().filter_map(|bytes| Some(u16::from_ne_bytes(*bytes.last_chunk()?))).collect();
    counts.sort_unstable();
    if let [fewest, .., most] = counts[..]
        && fewest != most
        && comm.rank() == 0
    {
        tracing::warn!("ranks have {fewest} to {most} threads each (RAYON_NUM_THREADS), and wait for the slowest");
    }
    Ok(())
}

/// Whether sums of `dtype` are made in another type.
fn sums_widely(dtype: DType) -> bool {
    accumulator(dtype) != dtype
}

fn inputs(window: &Window) -> [usize; 3] {
    window.map(|a| a.input)
}

fn outputs(window: &Window) -> [usize; 3] {
    window.map(|a| a.output)
}

/// `[n, c]` of a tensor and the extents given.
fn with_extents(n: usize, c: usize, [d, h, w]: [usize; 3]) -> [usize; 5] {
    [n, c, d, h, w]
}

/// A whole block as its only box.
pub(crate) fn whole_slab<B: Backend>(x: FloatTensor<B>) -> Slab<B> {
    let shape = x.shape();
    (std::array::from_fn(|i| 0..shape[2 + i]), x)
}

/// Element-wise arithmetic of a large tensor with one that varies along a part of its dimensions only.
pub fn arithmetic<B: LocalKernels>(large: FloatTensor<B>, small: FloatTensor<B>, arithmetic: Arithmetic) -> FloatTensor<B> {
    timed!(KERNEL, "arithmetic");
    B::block_arithmetic(large, small, arithmetic)
}

/// Panics where a tensor is not of the shape that a window and the other operands ask for: the kernels do not ask again.
fn expect(what: &str, got: &[usize], needed: &[usize]) {
    assert!(got == needed, "{what} is of shape {got:?}, but has to be of {needed:?}");
}

/// Batch and channels of a block in boxes, which have to be of the same and to lie in the input of `window`.
fn expect_boxes<B: Backend>(x: &[Slab<B>], window: &Window) -> [usize; 2] {
    let (_, first) = x.first().expect("a block is one box at least");
    let [n, c, ..]: [usize; 5] = first.shape().dims();
    for (at, part) in x {
        expect("a box of the input", &part.shape(), &with_extents(n, c, std::array::from_fn(|i| at[i].len())));
        assert!((0..3).all(|i| at[i].end <= window[i].input), "a box {at:?} of an input of {:?}", inputs(window));
    }
    let voxels = x.iter().map(|(at, _)| at.iter().map(|range| range.len()).product::<usize>()).sum::<usize>();
    assert!(voxels == inputs(window).iter().product::<usize>(), "boxes of {voxels} voxels of an input of {:?}", inputs(window));
    [n, c]
}

/// Panics unless the outputs of `window` have room in `out` at voxel `at`.
fn expect_room(out: &Shape, at: [usize; 3], n: usize, c: usize, window: &Window) {
    let extents: [usize; 3] = std::array::from_fn(|i| out[2 + i]);
    expect("the output", out, &with_extents(n, c, extents));
    assert!((0..3).all(|i| at[i] + window[i].output <= extents[i]), "outputs {:?} at {at:?} of {extents:?}", outputs(window));
}

/// Panics unless a weight of `shape` leads from `cin` to `cout` channels with the taps of `window`.
fn expect_weight(shape: &[usize], [cin, cout]: [usize; 2], window: &Window, groups: usize) {
    let fits = groups > 0 && cin.is_multiple_of(groups) && cout.is_multiple_of(groups);
    assert!(fits, "{cin} and {cout} channels in {groups} groups");
    expect("the weight", shape, &with_extents(cout, cin / groups, window.map(|axis| axis.kernel)));
}

/// Convolution of a block. x `[N, Cin, in..]`, weight `[Cout, Cin / groups, kernel..]`, bias `[Cout]` ->
/// `[N, Cout, out..]`.
///
/// # Panics
/// Here and in the other kernels: if a tensor is not of the shape that the window and the other operands ask for.
pub fn conv3d<B: LocalKernels>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    activated_conv3d::<B>(x, weight, bias, 1.0, window, groups)
}

/// [`conv3d`] followed by a leaky ReLU: negative results are multiplied by `slope`, 1 for none, 0 for a ReLU.
pub fn activated_conv3d<B: LocalKernels>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    slope: f64,
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    let shape = with_extents(x.shape()[0], weight.shape()[0], outputs(window));
    let out = B::float_unwritten(shape.into(), &B::float_device(&x), x.dtype());
    conv3d_part::<B>(out, [0; 3], &[whole_slab::<B>(x)], &Filter { weight, bias, slope, groups }, window)
}

/// [`activated_conv3d`] of a part of the output: writes it into `out` `[N, Cout, ..]` at voxel `at`. The values are those of
/// the whole to the bit. x is in boxes, in several only where [`LocalKernels::conv3d_reads_slabs`].
pub(crate) fn conv3d_part<B: LocalKernels>(
    out: FloatTensor<B>,
    at: [usize; 3],
    x: &[Slab<B>],
    filter: &Filter<B>,
    window: &Window,
) -> FloatTensor<B> {
    timed!(KERNEL, "conv3d");
    let Filter { weight, bias, groups, .. } = filter;
    let ([n, cin], cout) = (expect_boxes::<B>(x, window), weight.shape()[0]);
    expect_weight(&weight.shape(), [cin, cout], window, *groups);
    bias.iter().for_each(|bias| expect("the bias", &bias.shape(), &[cout]));
    expect_room(&out.shape(), at, n, cout, window);
    B::block_conv3d(out, at, x, filter, window)
}

/// The gradient before a leaky ReLU from `grad`, that of its result `y` of the same shape: times `slope`, which must not be
/// negative, where y is. For a ReLU, with slope 0, this is wherever y is not positive.
pub fn activation_grad<B: LocalKernels>(y: FloatTensor<B>, grad: FloatTensor<B>, slope: f64) -> FloatTensor<B> {
    timed!(KERNEL, "activation_grad");
    expect("the gradient", &grad.shape(), &y.shape());
    B::block_activation_grad(y, grad, slope)
}

/// The gradient of [`conv3d`]'s x: grad `[N, Cout, out..]` -> `[N, Cin, in..]`.
pub fn conv3d_data_grad<B: LocalKernels>(grad: FloatTensor<B>, weight: FloatTensor<B>, window: &Window, groups: usize) -> FloatTensor<B> {
    timed!(KERNEL, "conv3d_data_grad");
    let [n, cin, cout] = [grad.shape()[0], weight.shape()[1] * groups, weight.shape()[0]];
    expect_weight(&weight.shape(), [cin, cout], window, groups);
    expect("the gradient", &grad.shape(), &with_extents(n, cout, outputs(window)));
    B::block_conv3d_data_grad(grad, weight, window, groups)
}

/// The gradient of [`conv3d`]'s weight, of shape `weight_shape`, from x `[N, Cin, in..]` and grad `[N, Cout, out..]`.
pub fn conv3d_weight_grad<B: LocalKernels>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    weight_shape: [usize; 5],
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    conv3d_weight_grad_of::<B>(&[whole_slab::<B>(x)], &grad, weight_shape, window, groups)
}

/// [`conv3d_weight_grad`] of x in boxes: in several only where [`LocalKernels::conv3d_weight_grad_reads_slabs`].
pub(crate) fn conv3d_weight_grad_of<B: LocalKernels>(
    x: &[Slab<B>],
    grad: &FloatTensor<B>,
    weight_shape: [usize; 5],
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    timed!(KERNEL, "conv3d_weight_grad");
    let ([n, cin], cout) = (expect_boxes::<B>(x, window), weight_shape[0]);
    expect_weight(&weight_shape, [cin, cout], window, groups);
    expect("the gradient", &grad.shape(), &with_extents(n, cout, outputs(window)));
    B::block_conv3d_weight_grad(x, grad, weight_shape, window, groups)
}

/// The largest value of each window of x `[N, C, in..]`, and its flat position in the whole volume of D x H x W
/// voxels as I64; the block's voxel (0, 0, 0) lies at `origin` of the volume. Padding is minus infinity, the first
/// maximum in scan order wins, NaN propagates. A window without input gives minus infinity and position -1.
pub fn max_pool3d<B: LocalKernels>(
    x: FloatTensor<B>,
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
) -> (FloatTensor<B>, IntTensor<B>) {
    let shape = Shape::from(with_extents(x.shape()[0], x.shape()[1], outputs(window)));
    let out = B::float_unwritten(shape.clone(), &B::float_device(&x), x.dtype());
    let at = B::int_unwritten(shape, &B::float_device(&x), DType::I64);
    max_pool3d_part::<B>((out, at), [0; 3], &[whole_slab::<B>(x)], window, origin, volume)
}

/// [`max_pool3d`] of a part of the outputs: written at voxel `at`. x is in boxes, in several only where
/// [`LocalKernels::reads_slabs`].
pub(crate) fn max_pool3d_part<B: LocalKernels>(
    out: (FloatTensor<B>, IntTensor<B>),
    at: [usize; 3],
    x: &[Slab<B>],
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
) -> (FloatTensor<B>, IntTensor<B>) {
    timed!(KERNEL, "max_pool3d");
    let [n, c] = expect_boxes::<B>(x, window);
    expect_room(&out.0.shape(), at, n, c, window);
    expect("the positions", &out.1.shape(), &out.0.shape());
    B::block_max_pool3d(out, at, x, window, origin, volume)
}

/// The gradient of [`max_pool3d`]: adds grad `[N, C, out..]` to the voxels that `indices` name, giving
/// `[N, C, in..]`. Positions outside the block are left out.
pub fn max_pool3d_grad<B: LocalKernels>(
    grad: FloatTensor<B>,
    indices: IntTensor<B>,
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
) -> FloatTensor<B> {
    timed!(KERNEL, "max_pool3d_grad");
    expect("the gradient", &grad.shape(), &with_extents(grad.shape()[0], grad.shape()[1], outputs(window)));
    expect("the positions", &indices.shape(), &grad.shape());
    B::block_max_pool3d_grad(grad, indices, window, origin, volume)
}

/// The mean of each window of x `[N, C, in..]`; what lies outside adds nothing. A window without input gives 0.
pub fn avg_pool3d<B: LocalKernels>(x: FloatTensor<B>, window: &Window, count: Count) -> FloatTensor<B> {
    let shape = with_extents(x.shape()[0], x.shape()[1], outputs(window));
    let out = B::float_unwritten(shape.into(), &B::float_device(&x), x.dtype());
    avg_pool3d_part::<B>(out, [0; 3], &[whole_slab::<B>(x)], window, count)
}

/// [`avg_pool3d`] of a part of the outputs: written at voxel `at`. x is in boxes, as [`max_pool3d_part`]'s.
pub(crate) fn avg_pool3d_part<B: LocalKernels>(
    out: FloatTensor<B>,
    at: [usize; 3],
    x: &[Slab<B>],
    window: &Window,
    count: Count,
) -> FloatTensor<B> {
    timed!(KERNEL, "avg_pool3d");
    let [n, c] = expect_boxes::<B>(x, window);
    expect_room(&out.shape(), at, n, c, window);
    if sums_widely(x[0].1.dtype()) {
        let means = wide::<B>(local::only::<B>(x), |x| avg_pool3d::<B>(x, window, count));
        return local::put_float::<B>(out, at, means);
    }
    B::block_avg_pool3d(out, at, x, window, count)
}

/// The gradient of [`avg_pool3d`]: grad `[N, C, out..]` -> `[N, C, in..]`.
pub fn avg_pool3d_grad<B: LocalKernels>(grad: FloatTensor<B>, window: &Window, count: Count) -> FloatTensor<B> {
    timed!(KERNEL, "avg_pool3d_grad");
    expect("the gradient", &grad.shape(), &with_extents(grad.shape()[0], grad.shape()[1], outputs(window)));
    wide::<B>(grad, |grad| B::block_avg_pool3d_grad(grad, window, count))
}

/// x `[N, C, in..]` -> `[N, C, out..]`: along each axis the sums that `taps` describes.
pub fn resample<B: LocalKernels>(x: FloatTensor<B>, taps: &[Taps; 3]) -> FloatTensor<B> {
    let shape = with_extents(x.shape()[0], x.shape()[1], std::array::from_fn(|i| taps[i].outputs()));
    let out = B::float_unwritten(shape.into(), &B::float_device(&x), x.dtype());
    resample_part::<B>(out, [0; 3], x, taps)
}

/// [`resample`] of a part of the outputs: written at voxel `at`.
pub(crate) fn resample_part<B: LocalKernels>(out: FloatTensor<B>, at: [usize; 3], x: FloatTensor<B>, taps: &[Taps; 3]) -> FloatTensor<B> {
    timed!(KERNEL, "resample");
    if sums_widely(x.dtype()) {
        return local::put_float::<B>(out, at, wide::<B>(x, |x| resample::<B>(x, taps)));
    }
    let axes: Vec<usize> = (0..3).filter(|i| !taps[*i].is_identity()).collect();
    let Some((last, others)) = axes.split_last() else { return local::put_float::<B>(out, at, x) };
    let x = others.iter().fold(x, |x, axis| {
        let mut shape: [usize; 5] = x.shape().dims();
        shape[2 + axis] = taps[*axis].outputs();
        let out = B::float_unwritten(shape.into(), &B::float_device(&x), x.dtype());
        B::block_resample(out, [0; 3], x, *axis, &taps[*axis])
    });
    B::block_resample(out, at, x, *last, &taps[*last])
}

/// The gradient of [`resample`]: grad `[N, C, out..]` -> `[N, C, in..]`.
pub fn resample_grad<B: LocalKernels>(grad: FloatTensor<B>, taps: &[Taps; 3]) -> FloatTensor<B> {
    timed!(KERNEL, "resample_grad");
    let axes = (0..3).rev().filter(|i| !taps[*i].is_identity());
    wide::<B>(grad, |grad| axes.fold(grad, |grad, i| B::block_resample_grad(grad, i, &taps[i])))
}

/// Mean, and sum of squared deviations from it, of each channel of x `[N, C, ..]`: `[C]` each.
pub fn channel_moments<B: LocalKernels>(x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    timed!(KERNEL, "channel_moments");
    B::block_channel_moments(x)
}

/// x `[N, C, D, H, W]` with its channels shifted, scaled and activated.
pub fn channel_norm<B: LocalKernels>(x: FloatTensor<B>, channels: &Channels<B>) -> FloatTensor<B> {
    timed!(KERNEL, "channel_norm");
    B::block_channel_norm(x, channels)
}

/// Of each channel, the sum of the gradient before the activation, and of its product with x - mean: `[C]` each.
pub fn channel_grad_sums<B: LocalKernels>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    channels: &Channels<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    timed!(KERNEL, "channel_grad_sums");
    B::block_channel_grad_sums(x, grad, channels)
}

/// The gradient of x, `scale * (g - a - (x - mean) * b)`: g is the gradient before the activation, a and b are `[C]`.
pub fn channel_grad<B: LocalKernels>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    channels: &Channels<B>,
    a: FloatTensor<B>,
    b: FloatTensor<B>,
) -> FloatTensor<B> {
    timed!(KERNEL, "channel_grad");
    B::block_channel_grad(x, grad, channels, a, b)
}
