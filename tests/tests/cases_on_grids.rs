//! Small cases with right values, worked out by hand, on lines split over two and more ranks along each axis.

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::module::conv_transpose3d;
use burn::tensor::ops::ConvTransposeOptions;
use burn::tensor::{Distribution, Tensor, TensorData};
use burn_spatial::layout::{Axis, Layout, balanced_offsets};
use burn_spatial::mesh::MeshAxis;
use burn_spatial::nn::{ConvSpec, PaddingMode, PoolSpec, UpsampleMode, UpsampleSpec, avg_pool3d, max_pool3d, padded_conv3d, upsample3d};
use burn_spatial::{Grid, Spatial, SpatialDevice, place};
use burn_spatial_tests::grid::agreed_on_grid;
use burn_spatial_tests::grid::on_grid;

type B = Autodiff<Spatial<Flex>>;
type Device = SpatialDevice<burn_flex::FlexDevice>;

const TO_8: [f32; 8] = [1., 2., 3., 4., 5., 6., 7., 8.];

/// A line along depth, height or width, and the grids that split it.
#[derive(Clone, Copy)]
struct Line {
    axis: usize,
}

impl Line {
    fn shape(self, n: usize) -> [usize; 5] {
        let mut shape = [1; 5];
        shape[2 + self.axis] = n;
        shape
    }

    fn tensor(self, values: &[f32], device: &Device) -> Tensor<B, 5> {
        place::split(self.whole(values, device))
    }

    fn whole(self, values: &[f32], device: &Device) -> Tensor<B, 5> {
        Tensor::from_data(TensorData::new(values.to_vec(), self.shape(values.len())), device)
    }

    /// `value` along this axis, `other` along the two others.
    fn along<T: Copy>(self, value: T, other: T) -> [T; 3] {
        let mut all = [other; 3];
        all[self.axis] = value;
        all
    }
}

fn numbers<const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

fn lines() -> impl Iterator<Item = (Line, Grid)> {
    (0..3).flat_map(|axis| {
        [1, 2, 4].map(|ranks| {
            let mut grid = [1; 4];
            grid[1 + axis] = ranks;
            (Line { axis }, Grid(grid))
        })
    })
}

fn spec(line: Line, stride: usize, padding: (usize, usize), mode: PaddingMode) -> ConvSpec {
    ConvSpec { stride: line.along(stride, 1), padding: line.along(padding, (0, 0)), mode, ..Default::default() }
}

fn convolutions(x: &[f32], w: &[f32], stride: usize, padding: (usize, usize), mode: PaddingMode, expected: &[f32]) {
    for (line, grid) in lines() {
        let y = agreed_on_grid(grid, |device| {
            let y = padded_conv3d(line.tensor(x, device), line.whole(w, device), None, &spec(line, stride, padding, mode));
            if grid.ranks() <= expected.len() && grid.ranks() > 1 {
                assert!(!place::layout(&y).is_full(), "the result stays split");
            }
            numbers(y)
        });
        assert_eq!(y, expected, "on {grid}");
    }
}

#[test]
fn padding_that_is_asymmetric_strided_or_for_even_kernels() {
    let zeros = PaddingMode::Zeros;
    convolutions(&[1., 2., 3., 4.], &[1., 1.], 1, (0, 1), zeros, &[3., 5., 7., 4.]);
    convolutions(&TO_8, &[1.; 3], 2, (0, 1), zeros, &[6., 12., 18., 15.]);
    convolutions(&TO_8, &[1.; 3], 2, (1, 1), zeros, &[3., 9., 15., 21.]);
    convolutions(&TO_8, &[1., 1.], 1, (0, 1), zeros, &[3., 5., 7., 9., 11., 13., 15., 8.]);
    convolutions(&TO_8, &[1., 1.], 1, (0, 0), zeros, &[3., 5., 7., 9., 11., 13., 15.]);
    convolutions(&TO_8, &[1.; 4], 1, (1, 2), zeros, &[6., 10., 14., 18., 22., 26., 21., 15.]);
    let ten: Vec<f32> = (1..=10).map(|i| i as f32).collect();
    convolutions(&ten, &[1.; 3], 2, (1, 1), zeros, &[3., 9., 15., 21., 27.]);
}

#[test]
fn transposed_convolutions() {
    // x, w, stride, padding, padding_out, result, gradient of its sum.
    type Case<'a> = (&'a [f32], &'a [f32], usize, usize, usize, &'a [f32], &'a [f32]);
    let cases: [Case; 3] = [
        (&[1., 2., 3., 4.], &[1., 1., 1.], 1, 0, 1, &[1., 3., 6., 9., 7., 4., 0.], &[3.; 4]),
        (&[1., 2., 3., 4.], &[1., 10.], 2, 0, 0, &[1., 10., 2., 20., 3., 30., 4., 40.], &[11.; 4]),
        (&[1., 2., 3., 4.], &[1., 2., 3.], 2, 1, 1, &[2., 5., 4., 9., 6., 13., 8., 12.], &[5., 6., 6., 6.]),
    ];
    for (x, w, stride, padding, padding_out, y, dx) in cases {
        for (line, grid) in lines() {
            let (got, gradient) = agreed_on_grid(grid, |device| {
                let x = line.tensor(x, device).require_grad();
                let along = |value, other| line.along(value, other);
                let options = ConvTransposeOptions::new(along(stride, 1), along(padding, 0), along(padding_out, 0), [1; 3], 1);
                let y = conv_transpose3d(x.clone(), line.whole(w, device), None, options);
                let grads = y.clone().sum().backward();
                (numbers(y), x.grad(&grads).unwrap().into_data().to_vec::<f32>().unwrap())
            });
            assert_eq!((&got[..], &gradient[..]), (y, dx), "on {grid}");
        }
    }
}

#[test]
fn shards_of_asymmetric_and_even_kernels() {
    let blocks = |w: &'static [f32], padding: (usize, usize), x: &'static [f32]| {
        on_grid(Grid([1, 2, 1, 1]), |device| {
            let line = Line { axis: 0 };
            let y = padded_conv3d(line.tensor(x, device), line.whole(w, device), None, &spec(line, 1, padding, PaddingMode::Zeros));
            place::local(y).to_vec::<f32>().unwrap()
        })
    };
    assert_eq!(blocks(&[1., 1.], (0, 1), &[1., 2., 3., 4.]), [vec![3., 5.], vec![7., 4.]]);
    assert_eq!(blocks(&[1., 1.], (0, 0), &TO_8), [vec![3., 5., 7., 9.], vec![11., 13., 15.]]);
}

#[test]
fn extents_8_6_3_with_stride_2_give_4_3_2() {
    for grid in [Grid::ONE, Grid([1, 2, 1, 1]), Grid([1, 1, 2, 1]), Grid([1, 1, 1, 2]), Grid([1, 2, 2, 2])] {
        let dims = agreed_on_grid(grid, |device| {
            let x = place::split(Tensor::<B, 5>::ones([1, 1, 8, 6, 3], device));
            let w = Tensor::<B, 5>::ones([1, 1, 3, 3, 3], device);
            let spec = ConvSpec { stride: [2; 3], padding: [(1, 1); 3], ..Default::default() };
            padded_conv3d(x, w, None, &spec).into_data().shape.to_vec()
        });
        assert_eq!(dims, [1, 1, 4, 3, 2]);
    }
}

#[test]
fn both_neighbours_are_one_rank_on_a_periodic_axis() {
    let x = [1., 2., 3., 4.];
    let periodic = PaddingMode::Periodic;
    convolutions(&x, &[1., 0., 0.], 1, (1, 1), periodic, &[4., 1., 2., 3.]);
    convolutions(&x, &[0., 0., 1.], 1, (1, 1), periodic, &[2., 3., 4., 1.]);
    convolutions(&x, &[1., 1., 1.], 1, (1, 1), periodic, &[7., 6., 9., 8.]);
}

/// A mesh axis of one rank gives the bits of the plain backend.
#[test]
fn a_group_of_one_has_the_serial_bits() {
    let values: Vec<f32> = (0..2 * 3 * 125).map(|i| (i as f32 * 0.37).sin()).collect();
    let weights: Vec<f32> = (0..4 * 3 * 27).map(|i| (i as f32 * 0.11).cos()).collect();
    for mode in [PaddingMode::Zeros, PaddingMode::Periodic] {
        let spec = ConvSpec { padding: [(1, 1); 3], mode, ..Default::default() };
        let x = || TensorData::new(values.clone(), [2, 3, 5, 5, 5]);
        let w = || TensorData::new(weights.clone(), [4, 3, 3, 3, 3]);
        let plain = Default::default();
        let serial = padded_conv3d(Tensor::<Autodiff<Flex>, 5>::from_data(x(), &plain), Tensor::from_data(w(), &plain), None, &spec);
        let one = agreed_on_grid(Grid::ONE, |device| {
            padded_conv3d(place::split(Tensor::<B, 5>::from_data(x(), device)), Tensor::from_data(w(), device), None, &spec).into_data()
        });
        one.assert_eq(&serial.into_data(), true);
    }
}

#[test]
fn pool_windows_across_a_boundary() {
    for (line, grid) in lines() {
        let (counted, inside, maximum) = agreed_on_grid(grid, |device| {
            let pool = |include| PoolSpec {
                stride: line.along(2, 1),
                padding: line.along(1, 0),
                count_include_pad: include,
                ..PoolSpec::new(line.along(3, 1))
            };
            let x = line.tensor(&TO_8, device);
            (
                numbers(avg_pool3d(x.clone(), &pool(true))),
                numbers(avg_pool3d(x.clone(), &pool(false))),
                numbers(max_pool3d(x.neg(), &pool(true)).0),
            )
        });
        assert_eq!(counted, [1., 3., 5., 7.], "on {grid}");
        assert_eq!(inside, [1.5, 3., 5., 7.], "on {grid}");
        assert_eq!(maximum, [-1., -2., -4., -6.], "on {grid}");
    }
}

#[test]
fn partial_weight_gradients_are_summed_once() {
    for (line, grid) in lines() {
        let (dw, dx) = agreed_on_grid(grid, |device| {
            let x = line.tensor(&TO_8, device).require_grad();
            let w = line.whole(&[1., 2., 3.], device).require_grad();
            let gradients = padded_conv3d(x.clone(), w.clone(), None, &spec(line, 1, (1, 1), PaddingMode::Zeros)).sum().backward();
            let dw = w.grad(&gradients).unwrap();
            (dw.into_data().to_vec::<f32>().unwrap(), x.grad(&gradients).unwrap().into_data().to_vec::<f32>().unwrap())
        });
        assert_eq!(dw, [28., 36., 35.], "on {grid}");
        assert_eq!(dx, [3., 6., 6., 6., 6., 6., 6., 5.], "on {grid}");
    }
}

#[test]
fn reshape_permute_and_flatten_keep_global_values() {
    // Every element is its own flat position.
    let shape = [2usize, 3, 4, 5, 6];
    let n: usize = shape.iter().product();
    for grid in [Grid::ONE, Grid([2, 1, 1, 1]), Grid([1, 4, 1, 1]), Grid([1, 2, 2, 2]), Grid([2, 1, 1, 3])] {
        let done = agreed_on_grid(grid, |device| {
            let data = TensorData::new((0..n).map(|i| i as f32).collect::<Vec<_>>(), shape);
            let x = place::split(Tensor::<B, 5>::from_data(data, device));
            let flat = numbers(x.clone().flatten::<2>(1, 4));
            let permuted = numbers(x.clone().permute([4, 0, 3, 1, 2]));
            let reshaped = numbers(x.reshape([6, 2, 2, 10, 3]));
            (flat, permuted, reshaped)
        });
        assert!(done.0.iter().enumerate().all(|(i, v)| *v == i as f32), "flatten on {grid}");
        assert!(done.2.iter().enumerate().all(|(i, v)| *v == i as f32), "reshape on {grid}");
        let mut at = 0;
        for w in 0..6 {
            for b in 0..2 {
                for h in 0..5 {
                    for c in 0..3 {
                        for d in 0..4 {
                            assert_eq!(done.1[at], ((((b * 3 + c) * 4 + d) * 5 + h) * 6 + w) as f32, "permute on {grid}");
                            at += 1;
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn planes_of_a_remainder_are_all_there() {
    // Plane d holds d: slabs of 3 + 3 + 2 + 2, and a column sums to 45.
    let slabs = on_grid(Grid([1, 4, 1, 1]), |device| {
        let x: Vec<f32> = (0..10 * 4).map(|i| (i / 4) as f32).collect();
        let layout = Layout::full(&[1, 1, 10, 2, 2]).with_dim(2, vec![Axis::split(MeshAxis::Depth, balanced_offsets(10, 4))]);
        let x = place::to_layout(Tensor::<B, 5>::from_data(TensorData::new(x, [1, 1, 10, 2, 2]), device), &layout);
        let block = place::local(x.clone()).to_vec::<f32>().unwrap();
        let column = x.slice([0..1, 0..1, 0..10, 0..1, 0..1]).sum().into_data().to_vec::<f32>().unwrap();
        (block.len() / 4, column[0])
    });
    assert_eq!(slabs.iter().map(|s| s.0).collect::<Vec<_>>(), [3, 3, 2, 2]);
    assert!(slabs.iter().all(|s| s.1 == 45.0));
}

/// Down and up a U-Net with an odd extent, 9 = 5 + 4 planes -> 4 -> 8: the skip connection, cut to 8 = 5 + 3, meets
/// 4 + 4 planes, and one plane of it moves.
#[test]
fn a_skip_connection_of_odd_size_moves_the_plane_that_differs() {
    let shape = [1, 2, 9, 3, 4];
    let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| (i * 37 % 101) as f32).collect();
    let run = |device: &Device| {
        let x = place::split(Tensor::<B, 5>::from_data(TensorData::new(values.clone(), shape), device));
        let (low, _) = max_pool3d(x.clone(), &PoolSpec { stride: [2, 1, 1], ..PoolSpec::new([2, 1, 1]) });
        let w = Tensor::<B, 5>::ones([2, 2, 2, 1, 1], device);
        let up = conv_transpose3d(low, w, None, ConvTransposeOptions::new([2, 1, 1], [0; 3], [0; 3], [1; 3], 1));
        let skip = x.slice([0..1, 0..2, 0..8, 0..3, 0..4]);
        let layouts = [place::layout(&up).to_string(), place::layout(&skip).to_string()];
        let before = device.stats().comm;
        let joined = Tensor::cat(vec![up, skip], 1);
        let sent = device.stats().comm.since(&before).point_to_point.sent;
        (layouts, sent, numbers(joined))
    };
    let plane = 2 * 3 * 4 * 4;
    let ranks = on_grid(Grid([1, 2, 1, 1]), run);
    assert_eq!(ranks[0].0, ["[1, 2, 8d(4|4), 3, 4]", "[1, 2, 8d(5|3), 3, 4]"]);
    assert_eq!(ranks.iter().map(|r| r.1).collect::<Vec<_>>(), [plane, 0], "bytes sent by each rank");
    assert_eq!(ranks[1].2, on_grid(Grid::ONE, run)[0].2);
}

/// Whether halos arrive before or while a convolution is computed, every bit is the same; and the weight's gradient needs
/// no halo of its own, which came for the output.
#[test]
fn overlap_changes_no_bit_and_a_halo_comes_once() {
    let specs = [
        ConvSpec { padding: [(1, 1); 3], ..Default::default() },
        ConvSpec { padding: [(2, 1), (0, 2), (1, 1)], stride: [2, 1, 2], ..Default::default() },
        ConvSpec { padding: [(2, 2); 3], dilation: [2; 3], groups: 2, ..Default::default() },
        ConvSpec { padding: [(1, 1); 3], mode: PaddingMode::Periodic, ..Default::default() },
    ];
    for grid in [Grid([1, 2, 1, 1]), Grid([1, 2, 2, 2]), Grid([2, 1, 3, 1]), Grid([1, 3, 1, 2])] {
        for spec in &specs {
            on_grid(grid, |device| {
                let run = |overlap: bool| {
                    device.set_overlap(overlap);
                    B::seed(device, 5);
                    let random = |shape: [usize; 5]| Tensor::<B, 5>::random(shape, Distribution::Default, device);
                    let x = place::split(random([2, 4, 11, 9, 10])).require_grad();
                    let weight = random([6, 4 / spec.groups, 3, 3, 3]).require_grad();
                    let before = device.stats();
                    let y = padded_conv3d(x.clone(), weight.clone(), None, spec);
                    let forward = device.stats();
                    let gradients = y.clone().square().sum().backward();
                    let tensors = [y.inner(), x.grad(&gradients).unwrap(), weight.grad(&gradients).unwrap()];
                    let after = device.stats();
                    assert!(forward.halos > before.halos, "{spec:?} on {grid} has no halo");
                    assert_eq!(after.halos - forward.halos, 1, "the gradient of x goes back, and that is all: {spec:?} on {grid}");
                    tensors.map(|t| place::local(t).as_bytes().to_vec())
                };
                assert!(run(true) == run(false), "{spec:?} on {grid}");
            });
        }
    }
    for grid in [Grid([1, 2, 1, 1]), Grid([1, 2, 2, 2])] {
        on_grid(grid, |device| {
            let run = |overlap: bool| {
                device.set_overlap(overlap);
                B::seed(device, 5);
                let x = place::split(Tensor::<B, 5>::random([2, 3, 11, 9, 10], Distribution::Default, device));
                let spec = PoolSpec { stride: [2; 3], padding: [1; 3], ..PoolSpec::new([3; 3]) };
                let (largest, at) = max_pool3d(x.clone(), &spec);
                let up = UpsampleSpec { size: [22, 18, 20], scale: None, mode: UpsampleMode::Trilinear, align_corners: true };
                let floats = [largest, avg_pool3d(x.clone(), &spec), upsample3d(x, &up)];
                (floats.map(|y| place::local(y.inner()).as_bytes().to_vec()), place::local_int(at).as_bytes().to_vec())
            };
            assert!(run(true) == run(false), "pools and interpolations on {grid}");
        });
    }
}

/// Blocks that have to be assembled, and are cut because they are large, give what one rank gives: to the bit, for all sums
/// are of whole numbers and quarters.
#[test]
fn large_blocks_are_cut() {
    let whole = |shape: [usize; 5], device: &Device| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| (i * 37 % 101 % 5) as f32 - 2.0).collect();
        Tensor::<B, 5>::from_data(TensorData::new(values, shape), device)
    };
    let run = |device: &Device| {
        let mut done = Vec::new();
        // Rows of 33 voxels a rank fill no whole vectors; what wraps around lies in several boxes.
        for mode in [PaddingMode::Zeros, PaddingMode::Periodic] {
            let x = place::split(whole([1, 16, 64, 64, 66], device)).require_grad();
            let weight = whole([2, 16, 3, 3, 3], device).require_grad();
            let y = padded_conv3d(x.clone(), weight.clone(), None, &ConvSpec { padding: [(1, 1); 3], mode, ..Default::default() });
            let gradients = (y.clone() * place::split(whole([1, 2, 64, 64, 66], device))).sum().backward();
            let [x, weight] = [x.grad(&gradients).unwrap(), weight.grad(&gradients).unwrap()].map(Tensor::from_inner);
            done.extend([("y", numbers(y)), ("gradient of x", numbers(x)), ("gradient of the weight", numbers(weight))]);
        }
        // Of two planes a rank, an output plane needs one of the other's.
        let x = place::split(whole([1, 32, 4, 200, 200], device)).require_grad();
        let spec = UpsampleSpec { size: [8, 200, 200], scale: None, mode: UpsampleMode::Trilinear, align_corners: false };
        let up = upsample3d(x.clone(), &spec);
        let gradients = (up.clone() * place::split(whole([1, 32, 8, 200, 200], device))).sum().backward();
        let grad = numbers(Tensor::from_inner(x.grad(&gradients).unwrap()));
        done.extend([("upsampled", numbers(up)), ("its gradient", grad)]);
        done
    };
    let one = on_grid(Grid::ONE, run).remove(0);
    for grid in [Grid([1, 1, 1, 2]), Grid([1, 2, 1, 1])] {
        for ((what, one), (_, two)) in one.iter().zip(&on_grid(grid, run).remove(0)) {
            assert!(one == two, "{what} on {grid} differs");
        }
    }
}

/// A batch of no samples has no voxels, and what is made of it none either.
#[test]
fn no_samples_give_no_samples() {
    for grid in [Grid::ONE, Grid([1, 2, 1, 1])] {
        let shapes = on_grid(grid, |device| {
            let x = place::split(Tensor::<B, 5>::zeros([0, 4, 8, 8, 8], device));
            let pool = PoolSpec { stride: [2; 3], padding: [1; 3], ..PoolSpec::new([3; 3]) };
            let y = padded_conv3d(x.clone(), Tensor::ones([2, 4, 3, 3, 3], device), None, &ConvSpec::default());
            [max_pool3d(x.clone(), &pool).0.dims(), avg_pool3d(x, &pool).dims(), y.dims()]
        });
        assert_eq!(shapes[0], [[0, 4, 4, 4, 4], [0, 4, 4, 4, 4], [0, 2, 6, 6, 6]], "on {grid}");
    }
}
