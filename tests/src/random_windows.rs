//! Windows of random shapes, strides, dilations, paddings, shard boundaries and grids against one plain rank, output and
//! gradients: strategies, and what compares a case.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::conv_transpose3d;
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions, InterpolateMode, InterpolateOptions};
use burn::tensor::{DType, Tensor, TensorData};
use burn_spatial::layout::{Axis, Layout};
use burn_spatial::mesh::MeshAxis;
use burn_spatial::nn::{
    ConvSpec, PaddingMode, PoolSpec, UpsampleMode, UpsampleSpec, WindowBackend, avg_pool3d, max_pool3d, padded_conv3d, upsample3d,
};
use burn_spatial::{Grid, Spatial, place};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use crate::grid::on_grid;
use crate::planes::{self, distance, numbers, run_line, run_plane, tensor};
use crate::programs::check::{Failure, Ranks};
use crate::suite::Device;

/// What a case makes on one rank: output and gradients.
pub type Results = Vec<Vec<f64>>;

/// What runs a case on all ranks of a grid.
pub type Launcher<'a> = &'a dyn Fn(Grid, Arc<dyn Fn(&Device) -> Results + Send + Sync>) -> Result<Vec<Results>, String>;

/// Threads of each case's own.
///
/// # Errors
/// None: a rank that fails panics.
pub fn own_threads(grid: Grid, case: Arc<dyn Fn(&Device) -> Results + Send + Sync>) -> Result<Vec<Results>, String> {
    Ok(on_grid(grid, |device| case(device)))
}

type Plain = Autodiff<Flex>;
type Split = Autodiff<Spatial<Flex>>;

/// A window operation.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Op {
    Conv { weight: [usize; 5], bias: bool, spec: ConvSpec },
    Average(PoolSpec),
    Maximum(PoolSpec),
    Transposed { weight: [usize; 5], bias: bool, options: ConvTransposeOptions<3> },
    Upsample(UpsampleSpec),
}

/// An operation on a volume that is split anyhow.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The grid.
    pub grid: Grid,
    /// Of x.
    pub shape: [usize; 5],
    /// Shard boundaries of batch, depth, height and width.
    pub offsets: [Vec<usize>; 4],
    /// The operation.
    pub op: Op,
    /// Of values.
    pub seed: u64,
}

/// Output and gradients, in f64. Collective.
///
/// # Panics
/// If a gradient is missing.
pub fn run<B: AutodiffBackend + WindowBackend>(
    s: &Setting,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
) -> Vec<Vec<f64>> {
    let x = place(tensor::<B, 5>(s.shape, s.seed, device)).require_grad();
    let mut weights = Vec::new();
    let mut shift = None;
    let y = match &s.op {
        Op::Conv { weight, bias, spec } => {
            let w = tensor::<B, 5>(*weight, s.seed + 1, device).require_grad();
            weights.push(w.clone());
            shift = bias.then(|| {
                let data = TensorData::new(numbers(weight[0], s.seed + 2), [weight[0]]);
                Tensor::<B, 1>::from_data(data, (device, DType::F64)).require_grad()
            });
            padded_conv3d(x.clone(), w, shift.clone(), spec)
        }
        Op::Transposed { weight, bias, options } => {
            let w = tensor::<B, 5>(*weight, s.seed + 1, device).require_grad();
            weights.push(w.clone());
            shift = bias.then(|| {
                let channels = weight[1] * options.groups;
                let data = TensorData::new(numbers(channels, s.seed + 2), [channels]);
                Tensor::<B, 1>::from_data(data, (device, DType::F64)).require_grad()
            });
            conv_transpose3d(x.clone(), w, shift.clone(), options.clone())
        }
        Op::Upsample(spec) => upsample3d(x.clone(), spec),
        Op::Average(spec) => avg_pool3d(x.clone(), spec),
        Op::Maximum(spec) => max_pool3d(x.clone(), spec).0,
    };
    // A gradient that tells every position from every other.
    let gy = tensor::<B, 5>(y.dims(), s.seed + 3, device);
    let gradients = (y.clone() * gy).sum().backward();
    let read = |t: Tensor<B::InnerBackend, 5>| t.into_data().to_vec::<f64>().unwrap();
    let mut all = vec![y.into_data().to_vec::<f64>().unwrap(), read(x.grad(&gradients).unwrap())];
    all.extend(weights.iter().map(|w| read(w.grad(&gradients).unwrap())));
    all.extend(shift.iter().map(|b| b.grad(&gradients).unwrap().into_data().to_vec::<f64>().unwrap()));
    all
}

/// Increasing boundaries of `extent` in `ranks` shards of at least one voxel.
fn boundaries(extent: usize, ranks: usize) -> impl Strategy<Value = Vec<usize>> {
    proptest::sample::subsequence((1..extent).collect::<Vec<_>>(), ranks - 1).prop_map(move |mut inner| {
        inner.insert(0, 0);
        inner.push(extent);
        inner
    })
}

fn grids() -> impl Strategy<Value = Grid> {
    proptest::sample::select(vec![
        [1, 2, 1, 1],
        [1, 1, 2, 1],
        [1, 1, 1, 2],
        [1, 2, 2, 1],
        [2, 1, 2, 1],
        [1, 3, 1, 1],
        [1, 1, 1, 4],
        [1, 2, 2, 2],
        [2, 1, 1, 1],
    ])
    .prop_map(Grid)
}

/// Kernel, stride, dilation, padding, and what that holds.
type WindowOptions = ([usize; 3], [usize; 3], [usize; 3], [(usize, usize); 3], PaddingMode);

fn windows() -> impl Strategy<Value = WindowOptions> {
    let modes = vec![PaddingMode::Zeros, PaddingMode::Zeros, PaddingMode::Periodic, PaddingMode::Reflect, PaddingMode::Replicate];
    (
        [1..=5usize, 1..=5, 1..=5],
        [1..=3usize, 1..=3, 1..=3],
        [1..=2usize, 1..=2, 1..=2],
        [(0..=3usize, 0..=3usize), (0..=3, 0..=3), (0..=3, 0..=3)],
        proptest::sample::select(modes),
    )
}

fn op(shape: [usize; 5]) -> impl Strategy<Value = Op> {
    (0..5, windows(), 1..=2usize, 1..=2usize, any::<bool>(), any::<bool>()).prop_filter_map(
        "the window does not fit",
        move |(kind, w, groups, out, flag, ceil)| {
            let (kernel, stride, dilation, padding, mode) = w;
            match kind {
                0 | 1 => {
                    let groups = if shape[1].is_multiple_of(groups) { groups } else { 1 };
                    let weight = [out * groups, shape[1] / groups, kernel[0], kernel[1], kernel[2]];
                    let spec = ConvSpec { stride, padding, mode, dilation, groups };
                    spec.window(shape, weight).ok().map(|_| Op::Conv { weight, bias: flag, spec })
                }
                4 => {
                    let mode = if ceil { UpsampleMode::Trilinear } else { UpsampleMode::Nearest };
                    // Up to three times as large, or smaller.
                    let size = std::array::from_fn(|i| (shape[2 + i] * stride[i]).saturating_sub(padding[i].0).max(1));
                    let scale = (out == 2).then(|| std::array::from_fn(|i| stride[i] as f64 * 0.9));
                    Some(Op::Upsample(UpsampleSpec { size, scale, mode, align_corners: flag }))
                }
                _ => {
                    let padding = std::array::from_fn(|i| padding[i].0.min(kernel[i] / 2));
                    let spec =
                        PoolSpec { kernel, stride, padding, dilation, count_include_pad: flag, divisor: (out == 2).then_some(5), ceil };
                    spec.window(shape).ok().map(|_| if kind == 2 { Op::Average(spec) } else { Op::Maximum(spec) })
                }
            }
        },
    )
}

/// Burn's transposed convolution.
pub fn transposed(shape: [usize; 5]) -> impl Strategy<Value = Op> {
    (windows(), [0..=2usize, 0..=2, 0..=2], 1..=2usize, 1..=2usize, any::<bool>()).prop_filter_map(
        "nothing is left",
        move |(w, extra, groups, out, bias)| {
            let (kernel, stride, dilation, padding, _) = w;
            let groups = if shape[1].is_multiple_of(groups) { groups } else { 1 };
            let weight = [shape[1], out, kernel[0], kernel[1], kernel[2]];
            let padding = padding.map(|p| p.0);
            let padding_out: [usize; 3] = std::array::from_fn(|i| extra[i].min(stride[i].max(dilation[i]) - 1));
            let left = |i: usize| (shape[2 + i] - 1) * stride[i] + (kernel[i] - 1) * dilation[i] + 1 + padding_out[i] > 2 * padding[i];
            let options = ConvTransposeOptions::new(stride, padding, padding_out, dilation, groups);
            (0..3).all(left).then_some(Op::Transposed { weight, bias, options })
        },
    )
}

/// Convolutions, pools and interpolations.
pub fn settings() -> impl Strategy<Value = Setting> {
    settings_of(op)
}

/// Settings of what `op` draws for a shape.
pub fn settings_of<S: Strategy<Value = Op>>(op: impl Fn([usize; 5]) -> S + Copy) -> impl Strategy<Value = Setting> {
    (grids(), [1..=3usize, 1..=3, 1..=7, 1..=7, 1..=7], any::<u32>())
        .prop_flat_map(move |(grid, shape, seed)| {
            let [n, d, h, w] = grid.0;
            // At least one voxel a rank, at times exactly one.
            let shape = [shape[0].max(n), shape[1], shape[2].max(d), shape[3].max(h), shape[4].max(w)];
            let offsets = [boundaries(shape[0], n), boundaries(shape[2], d), boundaries(shape[3], h), boundaries(shape[4], w)];
            (Just(grid), Just(shape), offsets, op(shape), Just(seed as u64))
        })
        .prop_map(|(grid, shape, offsets, op, seed)| Setting { grid, shape, offsets, op, seed })
}

/// How x lies.
pub fn layout(s: &Setting) -> Layout {
    [0, 2, 3, 4].into_iter().zip(&s.offsets).zip(MeshAxis::ALL).fold(Layout::full(&s.shape), |layout, ((dim, offsets), mesh)| {
        if offsets.len() > 2 { layout.with_dim(dim, vec![Axis::split(mesh, offsets.clone())]) } else { layout }
    })
}

/// Runs a setting on its grid and on one plain rank.
///
/// # Errors
/// If they differ, or a rank fails.
pub fn compare(s: &Setting, launcher: Launcher) -> Result<(), TestCaseError> {
    let expected = run::<Plain>(s, &Default::default(), |x| x);
    let (layout, again) = (layout(s), s.clone());
    let case = move |device: &Device| ungathered(device, || run::<Split>(&again, device, |x| place::to_layout(x, &layout)));
    let all = launcher(s.grid, Arc::new(case)).map_err(TestCaseError::fail)?;
    all.iter().try_for_each(|result| equal(result, &expected))
}

/// Asserts that nothing is gathered meanwhile.
fn ungathered(device: &Device, run: impl FnOnce() -> Results) -> Results {
    let before = device.stats().gathered();
    let results = run();
    assert_eq!(device.stats().gathered(), before, "{}", device.stats());
    results
}

/// Asserts that two lists of results are the same up to rounding.
fn equal(got: &[Vec<f64>], want: &[Vec<f64>]) -> Result<(), TestCaseError> {
    for (got, want) in got.iter().zip(want) {
        let off = distance(got, want);
        prop_assert!(off <= 1e-11, "off by {off} of the largest entry");
    }
    Ok(())
}

/// The first `N` of three numbers.
fn first<const N: usize>(numbers: [usize; 3]) -> [usize; N] {
    std::array::from_fn(|i| numbers[i])
}

/// An operation along the last `N` axes of x with `channels` and `extents`.
fn planar<const N: usize>(channels: usize, extents: [usize; N]) -> impl Strategy<Value = planes::Op<N>> {
    let kinds = if N == 2 { 6 } else { 5 };
    (0..kinds, windows(), 1..=2usize, 1..=2usize, any::<bool>(), any::<bool>()).prop_filter_map(
        "the window does not fit",
        move |(kind, w, groups, out, flag, ceil)| {
            let (kernel, stride, dilation, wide, _) = w;
            let (kernel, stride, dilation) = (first::<N>(kernel), first::<N>(stride), first::<N>(dilation));
            let padding: [usize; N] = first(wide.map(|p| p.0));
            let half: [usize; N] = std::array::from_fn(|i| padding[i].min(kernel[i] / 2));
            let groups = if channels.is_multiple_of(groups) { groups } else { 1 };
            let fits =
                |padding: [usize; N], dilation: [usize; N]| (0..N).all(|i| extents[i] + 2 * padding[i] > (kernel[i] - 1) * dilation[i]);
            let op = match kind {
                0 => {
                    let options = ConvOptions::new(stride, padding, dilation, groups);
                    planes::Op::Conv { channels: [out * groups, channels / groups], kernel, bias: flag, options }
                }
                1 => {
                    let left = |i: usize| (extents[i] - 1) * stride[i] + (kernel[i] - 1) * dilation[i] + 1 > 2 * padding[i];
                    let longer: [usize; N] = std::array::from_fn(|i| if ceil { stride[i] - 1 } else { 0 });
                    let options = ConvTransposeOptions::new(stride, padding, longer, dilation, groups);
                    return (0..N).all(left).then_some(planes::Op::Transposed { channels: [channels, out], kernel, bias: flag, options });
                }
                2 => planes::Op::Average { kernel, stride, padding: half, include: flag, ceil },
                3 => planes::Op::Maximum { kernel, stride, padding: half, dilation, ceil },
                4 => planes::Op::Adaptive { size: kernel },
                _ => {
                    let mode = [InterpolateMode::Nearest, InterpolateMode::Bilinear, InterpolateMode::Bicubic][wide[0].0 % 3].clone();
                    let size = std::array::from_fn(|i| (extents[i] * stride[i]).saturating_sub(padding[i]).max(1));
                    planes::Op::Interpolate { size, options: InterpolateOptions::new(mode).with_align_corners(flag) }
                }
            };
            let fits = match op {
                planes::Op::Conv { .. } => fits(padding, dilation),
                planes::Op::Average { .. } => fits(half, [1; N]),
                planes::Op::Maximum { .. } => fits(half, dilation),
                _ => true,
            };
            fits.then_some(op)
        },
    )
}

/// A line or a plane: grid, batch, channels and extents, shard boundaries of batch and extents, the operation, a seed.
pub type Planar<const N: usize> = (Grid, [usize; 2], [usize; N], Vec<Vec<usize>>, planes::Op<N>, u64);

/// Lines or planes.
pub fn planars<const N: usize>() -> impl Strategy<Value = Planar<N>> {
    let lines = [[1, 1, 1, 2], [2, 1, 1, 1], [2, 1, 1, 2], [1, 1, 1, 4], [1, 2, 1, 3]];
    let planes = [[1, 1, 2, 1], [1, 1, 2, 2], [2, 1, 1, 1], [2, 1, 2, 1], [1, 1, 3, 1], [1, 2, 2, 2], [1, 1, 1, 3]];
    let all = if N == 1 { lines.to_vec() } else { planes.to_vec() };
    (proptest::sample::select(all), [1..=3usize, 1..=4], [1..=8usize, 1..=8, 1..=8], any::<u32>()).prop_flat_map(
        move |(grid, outer, extents, seed)| {
            let outer = [outer[0].max(grid[0]), outer[1]];
            let extents: [usize; N] = std::array::from_fn(|i| extents[i].max(grid[4 - N + i]));
            let mut offsets = vec![boundaries(outer[0], grid[0]).boxed()];
            offsets.extend((0..N).map(|i| boundaries(extents[i], grid[4 - N + i]).boxed()));
            (Just(Grid(grid)), Just(outer), Just(extents), offsets, planar(outer[1], extents), Just(u64::from(seed)))
        },
    )
}

/// A layout with the given boundaries of the batch and of the last dimensions.
fn planar_layout(shape: &[usize], offsets: &[Vec<usize>]) -> Layout {
    let spatial = offsets.len() - 1;
    offsets.iter().enumerate().filter(|(_, o)| o.len() > 2).fold(Layout::full(shape), |layout, (i, o)| {
        let (dim, mesh) = if i == 0 { (0, MeshAxis::Data) } else { (1 + i, MeshAxis::ALL[3 - spatial + i]) };
        layout.with_dim(dim, vec![Axis::split(mesh, o.clone())])
    })
}

/// What one rank computes: the CPU backend, but for the output where its gradients are wrong.
fn one_rank<const N: usize>(op: &planes::Op<N>, plain: Vec<Vec<f64>>, run: impl Fn(&Device) -> Vec<Vec<f64>> + Sync) -> Vec<Vec<f64>> {
    if op.trusted() {
        return plain;
    }
    let own = on_grid(Grid::ONE, run).remove(0);
    assert!(distance(&own[0], &plain[0]) < 1e-11);
    own
}

/// Runs a plane on its grid and on one plain rank.
///
/// # Errors
/// If they differ, or a rank fails.
pub fn compare_plane((grid, [n, c], [h, w], offsets, op, seed): &Planar<2>, launcher: Launcher) -> Result<(), TestCaseError> {
    let (shape, seed) = ([*n, *c, *h, *w], *seed);
    let plain = run_plane::<Plain>(op, shape, seed, &Default::default(), |x| x);
    let expected = one_rank(op, plain, |device| run_plane::<Split>(op, shape, seed, device, |x| x));
    // A maximum of nothing has no position.
    prop_assume!(expected[0].iter().all(|v| v.is_finite()));
    let (layout, op) = (planar_layout(&shape, offsets), op.clone());
    let case = move |device: &Device| ungathered(device, || run_plane::<Split>(&op, shape, seed, device, |x| place::to_layout(x, &layout)));
    let all = launcher(*grid, Arc::new(case)).map_err(TestCaseError::fail)?;
    all.iter().try_for_each(|result| equal(result, &expected))
}

/// Runs a line on its grid and on one plain rank.
///
/// # Errors
/// If they differ, or a rank fails.
pub fn compare_line((grid, [n, c], [w], offsets, op, seed): &Planar<1>, launcher: Launcher) -> Result<(), TestCaseError> {
    let (shape, seed) = ([*n, *c, *w], *seed);
    let plain = run_line::<Plain>(op, shape, seed, &Default::default(), |x| x);
    let expected = one_rank(op, plain, |device| run_line::<Split>(op, shape, seed, device, |x| x));
    prop_assume!(expected[0].iter().all(|v| v.is_finite()));
    let (layout, op) = (planar_layout(&shape, offsets), op.clone());
    let case = move |device: &Device| ungathered(device, || run_line::<Split>(&op, shape, seed, device, |x| place::to_layout(x, &layout)));
    let all = launcher(*grid, Arc::new(case)).map_err(TestCaseError::fail)?;
    all.iter().try_for_each(|result| equal(result, &expected))
}

/// Runs `count` windows, volumes, planes and lines in turn, and says after each that it has passed.
///
/// # Errors
/// The smallest window that fails, and how. One that does not come to an end within `limit` ends the process with code 1,
/// for its threads cannot be ended, after `hangs` was told of it.
pub fn run_many(seed: u64, count: u64, limit: Duration, passed: &dyn Fn(), hangs: &dyn Fn(String)) -> Result<(), String> {
    let ranks = Mutex::new(Ranks::default());
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = ProptestConfig { cases: 1, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    for i in 0..count {
        let launcher = |what: String| {
            let ranks = &ranks;
            move |grid: Grid, case: Arc<dyn Fn(&Device) -> Results + Send + Sync>| {
                let result = ranks.lock().expect("not poisoned").run(grid, limit, move |device| case(device));
                result.map_err(|failure| {
                    if failure == Failure::Hang {
                        hangs(format!("{what}: {failure}"));
                        std::process::exit(1);
                    }
                    failure.to_string()
                })
            }
        };
        let text = |s: &dyn std::fmt::Debug| format!("window {i} of seed {seed}: {s:?}");
        // Convolutions, pools and interpolations of volumes are most.
        let result = match i % 5 {
            0 | 1 => runner.run(&settings(), |s| compare(&s, &launcher(text(&s)))).map_err(|e| e.to_string()),
            2 => runner.run(&settings_of(transposed), |s| compare(&s, &launcher(text(&s)))).map_err(|e| e.to_string()),
            3 => runner.run(&planars::<2>(), |s| compare_plane(&s, &launcher(text(&s)))).map_err(|e| e.to_string()),
            _ => runner.run(&planars::<1>(), |s| compare_line(&s, &launcher(text(&s)))).map_err(|e| e.to_string()),
        };
        result.map_err(|error| format!("window {i} of seed {seed}: {error}"))?;
        passed();
    }
    Ok(())
}
