//! Random shapes, windows, shard boundaries and grids against one plain rank, output and gradients; and the adjoint
//! identity <F x, y> = <x, F* y> of what moves data.

use burn::backend::{Autodiff, Flex};
use burn::tensor::module::conv_transpose3d;
use burn::tensor::ops::ConvTransposeOptions;
use burn::tensor::{Tensor, TensorData};
use burn_spatial::comm::Kind;
use burn_spatial::layout::Layout;
use burn_spatial::nn::{ConvSpec, UpsampleMode, UpsampleSpec, padded_conv3d, upsample3d};
use burn_spatial::{Grid, Spatial, place};
use burn_spatial_tests::grid::on_grid;
use burn_spatial_tests::planes::{numbers, tensor};
use burn_spatial_tests::random_windows::{
    Op, compare, compare_line, compare_plane, layout, own_threads, planars, run, settings, settings_of, transposed,
};
use proptest::prelude::*;

type Split = Autodiff<Spatial<Flex>>;

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn windows_of_any_shards_equal_one_rank(s in settings()) {
        compare(&s, &own_threads)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() })]

    /// Burn's transposed convolutions against those of its plain CPU backend.
    #[test]
    fn transposed_convolutions_of_any_shards_equal_one_rank(s in settings_of(transposed)) {
        compare(&s, &own_threads)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn planes_of_any_shards_equal_one_rank(case in planars::<2>()) {
        compare_plane(&case, &own_threads)?;
    }

    #[test]
    fn lines_of_any_shards_equal_one_rank(case in planars::<1>()) {
        compare_line(&case, &own_threads)?;
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
