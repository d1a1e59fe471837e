//! Random shapes, windows, shard boundaries and grids against one plain rank, output and gradients; and the adjoint
//! identity <F x, y> = <x, F* y> of what moves data.

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::conv_transpose3d;
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions, InterpolateMode, InterpolateOptions};
use burn::tensor::{DType, Tensor, TensorData};
use burn_spatial::comm::Kind;
use burn_spatial::layout::{Axis, Layout};
use burn_spatial::mesh::MeshAxis;
use burn_spatial::nn::{
    ConvSpec, PaddingMode, PoolSpec, UpsampleMode, UpsampleSpec, WindowBackend, avg_pool3d, max_pool3d, padded_conv3d, upsample3d,
};
use burn_spatial::{Grid, Spatial, place};
use burn_spatial_tests::grid::on_grid;
use burn_spatial_tests::planes::{self, distance, numbers, run_line, run_plane, tensor};
use burn_spatial_tests::suite::Device;
use proptest::prelude::*;

type Plain = Autodiff<Flex>;
type Split = Autodiff<Spatial<Flex>>;

#[derive(Clone, Debug)]
enum Op {
    Conv { weight: [usize; 5], bias: bool, spec: ConvSpec },
    Average(PoolSpec),
    Maximum(PoolSpec),
    Transposed { weight: [usize; 5], bias: bool, options: ConvTransposeOptions<3> },
    Upsample(UpsampleSpec),
}

#[derive(Clone, Debug)]
struct Setting {
    grid: Grid,
    shape: [usize; 5],
    /// Shard boundaries of batch, depth, height and width.
    offsets: [Vec<usize>; 4],
    op: Op,
    seed: u64,
}

/// Output and gradients, in f64.
fn run<B: AutodiffBackend + WindowBackend>(s: &Setting, device: &B::Device, place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>) -> Vec<Vec<f64>> {
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

fn transposed(shape: [usize; 5]) -> impl Strategy<Value = Op> {
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

fn settings() -> impl Strategy<Value = Setting> {
    settings_of(op)
}

fn settings_of<S: Strategy<Value = Op>>(op: impl Fn([usize; 5]) -> S + Copy) -> impl Strategy<Value = Setting> {
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

fn layout(s: &Setting) -> Layout {
    [0, 2, 3, 4].into_iter().zip(&s.offsets).zip(MeshAxis::ALL).fold(Layout::full(&s.shape), |layout, ((dim, offsets), mesh)| {
        if offsets.len() > 2 { layout.with_dim(dim, vec![Axis::split(mesh, offsets.clone())]) } else { layout }
    })
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Runs a setting on its grid and on one plain rank.
fn compare(s: &Setting) -> Result<(), TestCaseError> {
    let expected = run::<Plain>(s, &Default::default(), |x| x);
    let layout = layout(s);
    let all = on_grid(s.grid, |device| {
        let result = run::<Split>(s, device, |x| place::to_layout(x, &layout));
        assert_eq!(device.stats().gathered(), 0);
        result
    });
    all.iter().try_for_each(|result| equal(result, &expected))
}

/// Asserts that two lists of results are the same up to rounding.
fn equal(got: &[Vec<f64>], want: &[Vec<f64>]) -> Result<(), TestCaseError> {
    for (got, want) in got.iter().zip(want) {
        let off = distance(got, want);
        prop_assert!(off <= 1e-11, "off by {off} of the largest entry");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn windows_of_any_shards_equal_one_rank(s in settings()) {
        compare(&s)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() })]

    /// Burn's transposed convolutions against those of its plain CPU backend.
    #[test]
    fn transposed_convolutions_of_any_shards_equal_one_rank(s in settings_of(transposed)) {
        compare(&s)?;
    }
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
type Planar<const N: usize> = (Grid, [usize; 2], [usize; N], Vec<Vec<usize>>, planes::Op<N>, u64);

fn planars<const N: usize>() -> impl Strategy<Value = Planar<N>> {
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn planes_of_any_shards_equal_one_rank((grid, [n, c], [h, w], offsets, op, seed) in planars::<2>()) {
        let shape = [n, c, h, w];
        let plain = run_plane::<Plain>(&op, shape, seed, &Default::default(), |x| x);
        let expected = one_rank(&op, plain, |device| run_plane::<Split>(&op, shape, seed, device, |x| x));
        // A maximum of nothing has no position.
        prop_assume!(expected[0].iter().all(|v| v.is_finite()));
        let layout = planar_layout(&shape, &offsets);
        let all = on_grid(grid, |device| {
            let result = run_plane::<Split>(&op, shape, seed, device, |x| place::to_layout(x, &layout));
            assert_eq!(device.stats().gathered(), 0, "{}", device.stats());
            result
        });
        for result in all {
            equal(&result, &expected)?;
        }
    }

    #[test]
    fn lines_of_any_shards_equal_one_rank((grid, [n, c], [w], offsets, op, seed) in planars::<1>()) {
        let shape = [n, c, w];
        let plain = run_line::<Plain>(&op, shape, seed, &Default::default(), |x| x);
        let expected = one_rank(&op, plain, |device| run_line::<Split>(&op, shape, seed, device, |x| x));
        prop_assume!(expected[0].iter().all(|v| v.is_finite()));
        let layout = planar_layout(&shape, &offsets);
        let all = on_grid(grid, |device| {
            let result = run_line::<Split>(&op, shape, seed, device, |x| place::to_layout(x, &layout));
            assert_eq!(device.stats().gathered(), 0, "{}", device.stats());
            result
        });
        for result in all {
            equal(&result, &expected)?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// The gradient of a window operation with halos is its adjoint: it is linear in x (what is not a maximum, with fixed
    /// weights), so <F x, y> = <x, F* y>, here with the sums made over the shards.
    #[test]
    fn halo_exchange_has_its_adjoint(s in prop_oneof![settings(), settings_of(transposed)]) {
        prop_assume!(!matches!(s.op, Op::Maximum(_)));
        let mut s = s;
        if let Op::Conv { bias, .. } | Op::Transposed { bias, .. } = &mut s.op {
            *bias = false;
        }
        let layout = layout(&s);
        on_grid(s.grid, |device| {
            let all = run::<Split>(&s, device, |x| place::to_layout(x, &layout));
            let (y, dx) = (&all[0], &all[1]);
            let (x, gy) = (numbers(dx.len(), s.seed), numbers(y.len(), s.seed + 3));
            let (left, right) = (dot(y, &gy), dot(&x, dx));
            let scale = y.iter().zip(&gy).map(|(a, b)| (a * b).abs()).sum::<f64>().max(1e-300);
            assert!((left - right).abs() <= 1e-12 * scale, "{left} and {right}");
        });
    }

    /// Changes of layout are permutations of storage: there and back is the identity, and inner products are kept.
    #[test]
    fn relayout_keeps_inner_products(a in settings(), b in settings()) {
        let grid = a.grid;
        let (from, to) = (layout(&a), {
            // The other setting's boundaries, where its grid is the same; else whole.
            if b.grid == grid && b.shape == a.shape { layout(&b) } else { Layout::full(&a.shape) }
        });
        on_grid(grid, |device| {
            let x = place::to_layout(tensor::<Spatial<Flex>, 5>(a.shape, a.seed, device), &from);
            let y = tensor::<Spatial<Flex>, 5>(a.shape, a.seed + 9, device);
            let moved = place::to_layout(x.clone(), &to);
            let there = (moved.clone() * place::to_layout(y.clone(), &to)).sum().into_data().to_vec::<f64>().unwrap()[0];
            let back = place::to_layout(moved, &from);
            let here = (back.clone() * place::to_layout(y, &from)).sum().into_data().to_vec::<f64>().unwrap()[0];
            assert!((there - here).abs() <= 1e-11 * (1.0 + here.abs()));
            place::local(back).assert_eq(&place::local(x), true);
        });
    }
}

/// A 3^3 convolution on 2x2x2: every rank exchanges one message with each of its seven neighbours, forward; faces,
/// edges and a corner of the halo of one voxel. The gradient of x sends the same back; the weight gradient
/// reads the halo of x that came before, and needs one sum.
#[test]
fn a_convolution_on_2x2x2_costs_seven_messages() {
    let (n, c, out, edge) = (1usize, 3usize, 5usize, 8usize);
    let half = edge / 2;
    let halo = (half + 1).pow(3) - half.pow(3);
    on_grid(Grid([1, 2, 2, 2]), |device| {
        let x = place::split(Tensor::<Split, 5>::ones([n, c, edge, edge, edge], device)).require_grad();
        let w = Tensor::<Split, 5>::ones([out, c, 3, 3, 3], device).require_grad();
        let spec = ConvSpec { padding: [(1, 1); 3], ..Default::default() };
        let count = || device.stats().comm;
        let start = count();
        let y = padded_conv3d(x.clone(), w.clone(), None, &spec);
        let forward = count();
        let sent = forward.since(&start).get(Kind::PointToPoint);
        assert_eq!(sent.sent, (n * c * halo * 4) as u64, "forward bytes");
        assert_eq!(sent.received, sent.sent);
        assert_eq!(sent.calls, 7, "one message to each neighbour");
        assert_eq!(forward.since(&start).total().calls, 7, "nothing else");
        let loss = y.sum();
        let before = count();
        let gradients = loss.backward();
        let dw = w.grad(&gradients).unwrap().into_data();
        let backward = count().since(&before);
        assert_eq!(backward.get(Kind::PointToPoint).sent, sent.sent, "gradients back");
        assert_eq!(backward.get(Kind::PointToPoint).calls, 7);
        assert_eq!(backward.get(Kind::AllReduce).calls, 1, "one sum of weight gradients");
        assert_eq!(backward.get(Kind::AllReduce).sent, (out * c * 27 * 4) as u64);
        assert_eq!(backward.total().calls, 8);
        assert_eq!(dw.shape.to_vec(), [out, c, 3, 3, 3]);
        assert_eq!(device.stats().gathered() + device.stats().redistributions, 0);
    });
}

/// A transposed 2^3 convolution of stride 2 writes each output once, on the rank that has its input: nothing is sent
/// forward or for the gradient of x; the weight's gradient is one sum.
#[test]
fn a_transposed_convolution_of_stride_2_on_2x2x2_sends_nothing() {
    let (c, out) = (3usize, 2usize);
    on_grid(Grid([1, 2, 2, 2]), |device| {
        // Seven voxels: shards of four and three, and of eight and six.
        let x = place::split(Tensor::<Split, 5>::ones([1, c, 7, 8, 6], device)).require_grad();
        let w = Tensor::<Split, 5>::ones([c, out, 2, 2, 2], device).require_grad();
        let options = ConvTransposeOptions::new([2; 3], [0; 3], [0; 3], [1; 3], 1);
        let start = device.stats();
        let y = conv_transpose3d(x.clone(), w.clone(), None, options);
        assert_eq!(y.dims(), [1, out, 14, 16, 12]);
        assert_eq!(device.stats().comm.since(&start.comm).total().calls, 0, "forward");
        let expected = place::layout(&place::split(Tensor::<Split, 5>::zeros(y.dims(), device)));
        assert_eq!(place::layout(&y).dims()[3..], expected.dims()[3..]);
        let loss = (y.clone() * y).sum();
        let before = device.stats();
        let gradients = loss.backward();
        let dx = x.grad(&gradients).unwrap();
        assert_eq!(place::layout(&dx), place::layout(&x));
        assert_eq!(device.stats().comm.since(&before.comm).get(Kind::PointToPoint).calls, 0, "backward");
        let dw = w.grad(&gradients).unwrap().into_data();
        let sent = device.stats().comm.since(&before.comm);
        assert_eq!(sent.get(Kind::AllReduce).sent, (c * out * 8 * 4) as u64);
        assert_eq!(sent.total().calls, 1, "one sum of weight gradients");
        assert_eq!(dw.to_vec::<f32>().unwrap(), vec![(2 * c * 7 * 8 * 6) as f32; c * out * 8]);
        assert_eq!(device.stats().gathered() + device.stats().redistributions, before.gathered() + before.redistributions);
    });
}

/// Nearest voxels at twice the extent lie on the rank that has them; trilinear ones need one plane of each neighbour.
#[test]
fn interpolations_on_2x2x2_cost_at_most_seven_messages() {
    for (mode, messages) in [(UpsampleMode::Nearest, 0), (UpsampleMode::Trilinear, 7)] {
        on_grid(Grid([1, 2, 2, 2]), |device| {
            let x = place::split(Tensor::<Split, 5>::ones([1, 2, 6, 4, 4], device)).require_grad();
            let start = device.stats().comm;
            let y = upsample3d(x.clone(), &UpsampleSpec { size: [12, 8, 8], scale: None, mode, align_corners: false });
            assert_eq!(device.stats().comm.since(&start).total().calls, messages, "forward");
            let loss = y.sum();
            let before = device.stats().comm;
            let gradients = loss.backward();
            let dx = place::local(x.grad(&gradients).unwrap());
            assert_eq!(device.stats().comm.since(&before).total().calls, messages, "backward");
            assert_eq!(dx, TensorData::full(dx.shape.clone(), 8.0f32));
        });
    }
}

/// A mean over whole planes is a sum over ranks, forward; its gradient is the same everywhere and costs nothing.
#[test]
fn a_global_mean_sums_over_ranks() {
    on_grid(Grid([1, 1, 2, 2]), |device| {
        let x = place::split(Tensor::<Split, 4>::ones([1, 2, 6, 4], device)).require_grad();
        let start = device.stats().comm;
        let y = burn::tensor::module::adaptive_avg_pool2d(x.clone(), [1, 1]);
        let forward = device.stats().comm.since(&start);
        assert_eq!(forward.get(Kind::AllReduce).calls, forward.total().calls);
        assert_eq!(y.clone().into_data().to_vec::<f32>().unwrap(), [1.0, 1.0]);
        let before = device.stats().comm;
        let dx = x.grad(&y.sum().backward()).unwrap();
        assert_eq!(device.stats().comm.since(&before).total().calls, 0);
        let dx = place::to_full(dx).into_data();
        assert_eq!(dx, TensorData::full(dx.shape.clone(), 1.0f32 / 24.0));
    });
}

#[test]
#[should_panic = "along the height the padding 2 of a transposed convolution removes all of its output"]
fn a_transposed_convolution_without_output_is_refused() {
    on_grid(Grid::ONE, |device| {
        let x = Tensor::<Split, 5>::ones([1, 1, 4, 1, 4], device);
        let w = Tensor::<Split, 5>::ones([1, 1, 3, 3, 3], device);
        conv_transpose3d(x, w, None, ConvTransposeOptions::new([1; 3], [1, 2, 1], [0; 3], [1; 3], 1));
    });
}
