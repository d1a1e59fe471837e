//! Layouts of every kind as operands: cut axes, pending sums, partly uniform dimensions, shards of any lengths. Values
//! against the same program on plain Flex.

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions};
use burn::tensor::{Distribution, Int, Tensor, TensorData, Tolerance, module};
use burn_spatial::layout::{Axis, Layout};
use burn_spatial::mesh::MeshAxis;
use burn_spatial::nn::{ConvSpec, WindowBackend, padded_conv3d};
use burn_spatial::{Grid, Spatial, SpatialDevice, place};
use burn_spatial_tests::grid::{agreed_on_grid, on_grid};

type S = Spatial<Flex>;
type Device = SpatialDevice<burn_flex::FlexDevice>;

const TWO: Grid = Grid([1, 2, 1, 1]);

fn counted(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

/// A tensor of `shape` that counts its elements, with its first dimension split at `offsets`.
fn split_first<const D: usize>(shape: [usize; D], offsets: &[usize], device: &Device) -> Tensor<S, D> {
    let data = TensorData::new(counted(shape.iter().product()), shape);
    let layout = Layout::full(&shape).with_dim(0, vec![Axis::split(MeshAxis::Depth, offsets)]);
    place::to_layout(Tensor::from_data(data, device), &layout)
}

fn floats<const D: usize>(tensor: Tensor<S, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

/// All ways to cut `n` elements into two shards.
fn two_shards(n: usize) -> impl Iterator<Item = [usize; 3]> {
    (1..n).map(move |at| [0, at, n])
}

#[test]
fn what_a_cut_leaves_joins_the_axis_behind_it() {
    let (values, layout) = agreed_on_grid(TWO, |device| {
        let y = split_first([4, 3], &[0, 2, 4], device).reshape([2, 3, 2]);
        let layout = place::layout(&y).to_string();
        (floats(y), layout)
    });
    assert_eq!(values, counted(12));
    assert_eq!(layout, "[2d(1|1), 3, 2]", "no element moves");
}

#[test]
fn reshapes_of_every_split() {
    let threes = |n: usize| (1..=n).flat_map(move |a| (1..=n).map(move |b| (a, b))).filter(move |(a, b)| n.is_multiple_of(a * b));
    on_grid(TWO, |device| {
        for (a, b) in threes(24).filter(|(a, _)| *a > 1) {
            for offsets in two_shards(a) {
                for (p, q) in threes(24) {
                    let x = split_first([a, b, 24 / (a * b)], &offsets, device);
                    let y = x.reshape([p, q, 24 / (p * q)]);
                    assert_eq!(floats(y), counted(24), "[{a}, {b}, ..] split at {offsets:?} to [{p}, {q}, ..]");
                }
            }
        }
    });
}

#[test]
fn windows_with_steps_of_every_split() {
    for ranks in [2, 3] {
        on_grid(Grid([1, ranks, 1, 1]), |device| {
            for n in ranks..=12 {
                let cuts: Vec<Vec<usize>> = match ranks {
                    2 => two_shards(n).map(|o| o.to_vec()).collect(),
                    _ => (1..n - 1).flat_map(|i| (i + 1..n).map(move |j| vec![0, i, j, n])).collect(),
                };
                for offsets in &cuts {
                    for size in 1..=5.min(n) {
                        for step in 1..=5 {
                            let y: Tensor<S, 2> = split_first([n], offsets, device).unfold(0, size, step);
                            let expected: Vec<f32> =
                                (0..=(n - size) / step).flat_map(|o| (0..size).map(move |i| (o * step + i) as f32)).collect();
                            assert_eq!(floats(y), expected, "{n} split at {offsets:?}, size {size}, step {step}");
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn a_layout_with_pending_sums_is_no_order_to_add() {
    for grid in [TWO, Grid([2, 1, 1, 1])] {
        agreed_on_grid(grid, |device| {
            let x = place::split(Tensor::<S, 5>::from_data(TensorData::new(counted(16), [2, 1, 8, 1, 1]), device));
            let pending = place::layout(&x.clone().sum_dim(0).sum_dim(2));
            assert!(!pending.pending().is_empty());
            let ones = Tensor::<S, 5>::ones([1; 5], device);
            assert_eq!(floats(place::to_layout(ones.clone(), &pending)), [1.0]);
            let block = TensorData::new(vec![3f32], [1; 5]);
            assert_eq!(floats(place::from_local::<S, 5>(block, pending, device)), [3.0]);
        });
    }
}

#[test]
fn a_pending_sum_is_an_index() {
    agreed_on_grid(TWO, |device| {
        // Two ranks with one row each: rows add up to 0, 1, 2, 3.
        let layout = Layout::full(&[2, 4]).with_dim(0, vec![Axis::split(MeshAxis::Depth, vec![0, 1, 2])]);
        let rows = Tensor::<S, 2, Int>::from_data(TensorData::new(vec![0i64, 0, 1, 1, 0, 1, 1, 2], [2, 4]), device);
        let indices = || place::to_layout_int(rows.clone(), &layout).sum_dim(0).reshape([4]);
        let x = Tensor::<S, 1>::from_data([10f32, 11., 12., 13.], device);
        assert_eq!(floats(x.clone().select(0, indices())), [10., 11., 12., 13.]);
        assert_eq!(floats(x.clone().gather(0, indices())), [10., 11., 12., 13.]);
        let doubled = x.clone().select_assign(0, indices(), x.clone(), burn::tensor::IndexingUpdateOp::Add);
        assert_eq!(floats(doubled), [20., 22., 24., 26.]);
    });
}

/// Gradients of weight and bias where the output's gradient does not vary along channels.
fn uniform_gradients<B: AutodiffBackend + WindowBackend>(
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
) -> Vec<TensorData> {
    let tensor = |shape: [usize; 5], scale: f32| {
        let n: usize = shape.iter().product();
        let values: Vec<f32> = (0..n).map(|i| ((i * 7 + 3) % 11) as f32 * scale - 0.4).collect();
        Tensor::<B, 5>::from_data(TensorData::new(values, shape), device)
    };
    let mut all = Vec::new();
    macro_rules! case {
        ($d:literal, $kernel:expr, $y:expr) => {{
            let w = tensor([3, 3, 3, 3, 3], 0.1).slice($kernel).reshape([3; $d]).require_grad();
            let b = Tensor::<B, 1>::from_data([0.5f32, -1.0, 2.0], device).require_grad();
            let y: Tensor<B, $d> = $y(w.clone(), b.clone());
            let grads = y.sum_dim(1).powi_scalar(2).sum().backward();
            all.push(w.grad(&grads).unwrap().into_data());
            all.push(b.grad(&grads).unwrap().into_data());
        }};
    }
    let x = place(tensor([2, 3, 6, 5, 4], 0.2));
    let plane = || x.clone().reshape([2, 3, 6, 20]);
    let line = || x.clone().reshape([2, 3, 120]);
    let (w3, w4, w5) = ([0..3, 0..3, 0..3, 0..1, 0..1], [0..3, 0..3, 0..3, 0..3, 0..1], [0..3, 0..3, 0..3, 0..3, 0..3]);
    case!(3, w3.clone(), |w, b| module::conv1d(line(), w, Some(b), ConvOptions::new([1], [1], [1], 1)));
    case!(4, w4.clone(), |w, b| module::conv2d(plane(), w, Some(b), ConvOptions::new([1; 2], [1; 2], [1; 2], 1)));
    case!(5, w5.clone(), |w, b| module::conv3d(x.clone(), w, Some(b), ConvOptions::new([1; 3], [1; 3], [1; 3], 1)));
    case!(3, w3, |w, b| module::conv_transpose1d(line(), w, Some(b), ConvTransposeOptions::new([2], [1], [0], [1], 1)));
    case!(4, w4, |w, b| module::conv_transpose2d(plane(), w, Some(b), ConvTransposeOptions::new([2; 2], [1; 2], [0; 2], [1; 2], 1)));
    case!(5, w5.clone(), |w, b| {
        module::conv_transpose3d(x.clone(), w, Some(b), ConvTransposeOptions::new([2; 3], [1; 3], [0; 3], [1; 3], 1))
    });
    let spec = ConvSpec { padding: [(0, 1), (1, 0), (1, 1)], ..Default::default() };
    case!(5, w5, |w, b| padded_conv3d(x.clone(), w, Some(b), &spec));
    all
}

#[test]
fn gradients_that_do_not_vary_along_channels() {
    let expected = uniform_gradients::<Autodiff<Flex>>(&Default::default(), |x| x);
    for grid in [Grid::ONE, TWO, Grid([2, 1, 1, 1]), Grid([1, 1, 1, 2]), Grid([2, 2, 1, 2])] {
        let got = agreed_on_grid(grid, |device| uniform_gradients::<Autodiff<S>>(device, place::split));
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(&expected) {
            got.assert_approx_eq::<f32>(expected, Tolerance::rel_abs(1e-4, 1e-4));
        }
    }
}

#[test]
fn a_random_tensor_meets_a_partly_uniform_one() {
    for grid in [Grid::ONE, TWO] {
        let [tiled, rows, masked] = agreed_on_grid(grid, |device| {
            let x = Tensor::<S, 1>::from_data([1f32, 2., 3., 4.], device).repeat_dim(0, 3);
            let kept = x.clone() * x.random_like(Distribution::Bernoulli(1.0));
            let offsets: &[usize] = if grid == TWO { &[0, 1, 4] } else { &[0, 4] };
            let split = split_first([4, 1], offsets, device).repeat_dim(0, 2).repeat_dim(1, 2);
            let rows = split.random_like(Distribution::Bernoulli(1.0)) * split.clone();
            let none = x.random_like(Distribution::Bernoulli(0.0)).greater_elem(0.5);
            [floats(kept), floats(rows), floats(x.mask_fill(none, 9.0))]
        });
        assert_eq!(tiled, [1., 2., 3., 4.].repeat(3));
        assert_eq!(rows, [0., 0., 1., 1., 2., 2., 3., 3.].repeat(2));
        assert_eq!(masked, tiled);
    }
}

#[test]
fn plain_and_split_draw_bernoulli_one_alike() {
    fn program<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
        let ones = x.random_like(Distribution::Bernoulli(1.0));
        x.sum_dim(0).expand([3, 4]) * ones
    }
    let data = TensorData::new(counted(12), [3, 4]);
    let expected = program::<Flex>(Tensor::from_data(data, &Default::default())).into_data();
    on_grid(TWO, |device| {
        program::<S>(split_first([3, 4], &[0, 1, 3], device)).into_data().assert_eq(&expected, true);
    });
}
