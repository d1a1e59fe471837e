//! Operations on split volumes against the same program on one plain rank: values, layouts, and what is gathered.

use std::sync::LazyLock;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, DType, Distribution, Int, Tensor, TensorData, Tolerance, activation};
use burn_spatial::layout::{Axis, Layout, balanced_offsets};
use burn_spatial::mesh::MeshAxis;
use burn_spatial::nn::{ConvSpec, WindowBackend, padded_conv3d};
use burn_spatial::{Grid, Spatial, place};

use crate::fixtures::values;
use crate::grid::agreed_on_grid;
use crate::suite::{Device, Program, agree};

type S = Spatial<Flex>;

const SHAPE: [usize; 5] = [4, 3, 6, 5, 7];

/// Values that are exact in f32 and never twice the same.
fn volume(seed: u64) -> TensorData {
    let n: usize = SHAPE.iter().product();
    let value = |i: usize| {
        let hash = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ seed.wrapping_mul(0xD134_2543_DE82_EF95)) >> 40;
        (hash as f32 - (1 << 23) as f32) / (1 << 22) as f32
    };
    TensorData::new((0..n).map(value).collect::<Vec<f32>>(), SHAPE)
}

/// Asserts that `split` over two split volumes makes what `plain` makes of the whole ones, on every rank, and that it
/// gathers nothing, unless it may.
fn check<const D: usize>(
    device: &Device,
    plain: fn(Tensor<Flex, 5>, Tensor<Flex, 5>) -> Tensor<Flex, D>,
    split: fn(Tensor<S, 5>, Tensor<S, 5>) -> Tensor<S, D>,
    may_gather: bool,
) {
    let one = Default::default();
    let expected = plain(Tensor::from_data(volume(1), &one), Tensor::from_data(volume(2), &one)).into_data();
    let x = place::split(Tensor::<S, 5>::from_data(volume(1), device));
    let y = place::split(Tensor::<S, 5>::from_data(volume(2), device));
    let result = split(x, y);
    assert!(may_gather || device.stats().gathered() == 0, "gathered: {}", device.stats());
    let data = result.into_data();
    assert_eq!(data.shape, expected.shape);
    data.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-5));
    agree(device, "result", &data.bytes);
    // The same with both split anyhow, along any dimension and unevenly; what then has no rule gathers.
    for seed in 0..4 {
        device.set_split_inputs(Some(seed));
        let result = split(Tensor::from_data(volume(1), device), Tensor::from_data(volume(2), device));
        device.set_split_inputs(None);
        result.into_data().assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-5));
    }
}

/// Programs over two volumes, run on any backend; what they return is compared. `gathers 1` where there is no rule yet.
macro_rules! programs {
    ($($name:ident: $rank:literal, gathers $gathers:literal, |$x:ident, $y:ident| $body:expr;)*) => {
        $(
            #[doc = concat!("The program `", stringify!($name), "`.")]
            pub fn $name(device: &Device) {
                fn program<B: Backend>($x: Tensor<B, 5>, $y: Tensor<B, 5>) -> Tensor<B, $rank> {
                    let _ = &$y;
                    $body
                }
                check::<$rank>(device, program::<Flex>, program::<S>, $gathers > 0);
            }
        )*

        /// What of this module runs on every grid.
        pub const PROGRAMS: &[Program] = &[
            $(Program { name: stringify!($name), run: $name },)*
            Program { name: "random_tensors_are_the_same_on_every_grid", run: random_tensors_are_the_same_on_every_grid },
            Program { name: "random_integers_are_the_same_on_every_grid", run: random_integers_are_the_same_on_every_grid },
            Program { name: "other_float_types", run: other_float_types },
            Program { name: "uneven_shards_and_relayout", run: uneven_shards_and_relayout },
            Program { name: "reading_what_is_split_gives_every_rank_the_whole", run: reading_what_is_split_gives_every_rank_the_whole },
        ];
    };
}

/// Multiplies by something that tells every position from every other, so that a block in the wrong place is seen.
fn marked<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let n = x.dims().iter().product::<usize>() as i64;
    let ramp = Tensor::<B, 1, Int>::arange(0..n, &x.device()).float().reshape(x.dims());
    x * (ramp / n as f32 + 1.0)
}

programs! {
    pointwise: 5, gathers 0, |x, y| marked((x.clone() * y.clone() - x / (y.abs() + 1.0)).exp().log1p());
    comparison_and_mask: 5, gathers 0, |x, y| marked(x.clone().mask_where(x.clone().greater(y.clone()), y).mask_fill(x.lower_elem(0.0), 3.0));
    broadcast: 5, gathers 0, |x, y| marked(x.clone() * y.mean_dim(2).mean_dim(3) + x.sum_dim(0));
    permuted: 5, gathers 0, |x, y| marked(x.permute([2, 0, 4, 1, 3]).swap_dims(0, 3) + y.permute([1, 0, 4, 2, 3]));
    flattened: 2, gathers 0, |x, _y| marked(x.swap_dims(0, 1).reshape([3, 4 * 6 * 5 * 7]));
    reshaped_across: 3, gathers 0, |x, _y| marked(x.reshape([4 * 3 * 3, 2 * 5, 7]));
    reshaped_anyhow: 2, gathers 0, |x, _y| marked(x.reshape([4 * 3 * 5, 6 * 7]));
    expanded: 5, gathers 0, |x, y| marked(x.slice([0..1, 0..3, 0..1, 0..5, 0..7]).expand(SHAPE) + y);
    repeated: 5, gathers 0, |x, y| marked(Tensor::cat(vec![x.clone().repeat_dim(1, 2), y], 1).repeat_dim(1, 2));
    tiled_along_a_split: 5, gathers 0, |x, y| marked(x.slice([0..4, 0..3, 0..3, 0..5, 0..7]).repeat_dim(2, 2) + y);
    cut: 5, gathers 0, |x, _y| marked(x.slice([1..4, 0..2, 1..6, 0..4, 2..7]));
    cut_thin: 5, gathers 0, |x, _y| marked(x.slice([3..4, 1..2, 4..6, 4..5, 5..7]));
    assigned: 5, gathers 0, |x, y| marked(x.slice_assign([1..3, 0..2, 2..5, 1..5, 0..6], y.slice([0..2, 1..3, 0..3, 0..4, 1..7])));
    assigned_to_a_constant: 5, gathers 0, |x, _y| {
        let zeros = Tensor::zeros([4, 3, 9, 8, 7], &x.device());
        marked(zeros.slice_assign([0..4, 0..3, 2..8, 1..6, 0..7], x))
    };
    padded: 5, gathers 0, |x, _y| marked(x.pad([(1, 2), (0, 3)], burn::tensor::ops::PadMode::Constant(2.0)));
    sums: 5, gathers 0, |x, y| marked(x.clone().sum_dim(2).sum_dim(3).sum_dim(4) + y.sum_dim(0).sum_dim(2).neg().sum_dim(3).sum_dim(4) - x.mean_dim(4).sum_dim(2).mean_dim(3));
    total: 1, gathers 0, |x, y| (x.clone().abs().sum() + y.clone().abs().mean()) * x.clone().max() - y.clone().min() + x.slice([0..1, 0..1, 0..3, 0..2, 0..2]).prod();
    extremes: 5, gathers 0, |x, y| marked(x.clone().max_dim(2) + y.clone().min_dim(3) + x.max_dim(0) + y.max_dim(1));
    positions: 5, gathers 0, |x, y| marked(x.clone().argmax(2).float() + y.clone().argmin(4).float() * 8.0 + x.argmax(0).float() * 64.0 + y.argmax(1).float());
    products: 5, gathers 0, |x, y| marked(x.prod_dim(2) + y.prod_dim(4));
    some_and_all: 5, gathers 0, |x, y| marked(
        x.clone().greater_elem(1.0).any_dim(2).float() + y.clone().greater_elem(-1.9).all_dim(3).float() + x.equal(y).any().float().reshape([1, 1, 1, 1, 1])
    );
    variance: 5, gathers 0, |x, _y| marked(x.clone().var(2) + x.var_mean(4).0);
    softmax_over_channels: 5, gathers 0, |x, y| marked(activation::softmax(x, 1) * activation::log_softmax(y, 1));
    softmax_over_a_split: 5, gathers 0, |x, y| marked(activation::softmax(x, 2) * activation::softmax(y, 4));
    activations: 5, gathers 0, |x, y| marked(activation::leaky_relu(x.clone(), 0.1) + activation::relu(y.clone()) * activation::sigmoid(x) + activation::gelu(y));
    matrix_products: 5, gathers 0, |x, y| marked(x.matmul(y.swap_dims(3, 4)));
    gathered_along_channels: 5, gathers 0, |x, y| marked(x.gather(1, y.abs().int().clamp(0, 2)));
    scattered_along_channels: 5, gathers 0, |x, y| {
        let indices = y.clone().abs().int().clamp(0, 2);
        marked(x.scatter(1, indices, y, burn::tensor::IndexingUpdateOp::Add))
    };
    selected: 5, gathers 0, |x, _y| {
        let indices = Tensor::<_, 1, Int>::from_ints([2, 0, 1, 1], &x.device());
        marked(x.select(1, indices))
    };
    sorted_channels: 5, gathers 0, |x, y| marked(x.sort(1) + y.cumsum(1));
    sorted_along_a_split: 5, gathers 1, |x, y| marked(x.sort(2) + y.sort(3));
    scanned: 5, gathers 0, |x, y| marked(x.clone().cumsum(3) + y.clone().cummax(2) - x.cummin(4) * y.div_scalar(2.0).cumprod(2));
    scanned_integers: 5, gathers 0, |x, y| marked((x.mul_scalar(9.0).int().cumsum(2) + y.mul_scalar(9.0).int().cummax(4)).float());
    flipped: 5, gathers 0, |x, y| marked(x.flip([1, 2]) + y.flip([4]));
    flipped_everywhere: 5, gathers 0, |x, y| marked(x.flip([0, 2, 3, 4]).mask_fill(y.greater_elem(0.5).flip([4, 3]), 2.0));
    rolled: 5, gathers 0, |x, y| marked(x.roll(&[2, -1, 3], &[2, 3, 0]) + y.roll_dim(3, 4));
    joined_along_a_split: 5, gathers 0, |x, y| {
        let thin = y.clone().slice([0..4, 0..3, 0..1, 0..5, 0..7]);
        marked(Tensor::cat(vec![thin, x, y.clone(), Tensor::ones([4, 3, 2, 5, 7], &y.device())], 2))
    };
    joined_everywhere: 5, gathers 0, |x, y| {
        let one = Tensor::cat(vec![x.clone(), y.clone()], 0);
        let two = Tensor::cat(vec![one.clone(), one.clone()], 3);
        marked(Tensor::cat(vec![two.clone(), two], 4))
    };
    stacked: 6, gathers 0, |x, y| marked(Tensor::stack::<6>(vec![x, y], 2));
    parted: 5, gathers 0, |x, y| {
        let halves = x.chunk(2, 4);
        let parts = y.split_with_sizes(vec![1, 4], 3);
        marked(halves[0].clone().slice([0..4, 0..3, 0..6, 0..4, 0..3]) * 2.0 + halves[1].clone().slice([0..4, 0..3, 0..6, 0..4, 0..3]) * parts[1].clone().slice([0..4, 0..3, 0..6, 0..4, 2..5]))
    };
    windows: 6, gathers 0, |x, _y| marked(x.unfold::<6, _>(4, 3, 2));
    windows_of_depth: 6, gathers 0, |x, _y| marked(x.unfold::<6, _>(2, 2, 1));
    strided: 5, gathers 0, |x, _y| marked(x.slice([s(0, 4, 1), s(0, 3, 2), s(1, 6, 2), s(0, 5, 1), s(0, 7, 3)]));
    selected_booleans: 5, gathers 1, |x, y| {
        let indices = Tensor::<_, 1, Int>::from_ints([2, 0, 1, 1, 4], &x.device());
        marked(x.greater_elem(0.0).select_assign(3, indices, y.greater_elem(0.5), burn::tensor::IndexingUpdateOp::Add).float())
    };
    constants: 5, gathers 0, |x, y| {
        let device = x.device();
        let ones = Tensor::ones(SHAPE, &device);
        marked(ones.clone().sum_dim(2) * x.clone() + ones.clone().mean() .reshape([1, 1, 1, 1, 1]) * y + ones.clone().cumsum(4).prod_dim(1) + ones.mul_scalar(2.0).prod_dim(3) * x)
    };
    means_of_squares: 1, gathers 0, |x, y| (x - y).square().mean();
}

fn s(start: isize, end: isize, step: isize) -> burn::tensor::Slice {
    burn::tensor::Slice::new(start, Some(end), step)
}

/// Draws, and multiplies a split volume by what was drawn.
fn draw(device: &Device) -> TensorData {
    S::seed(device, 42);
    let x = place::split(Tensor::<S, 5>::ones(SHAPE, device) * Tensor::<S, 5>::from_data(volume(3), device));
    let mask = x.random_like(Distribution::Bernoulli(0.7));
    let noise = x.random_like(Distribution::Normal(0.0, 1.0));
    let layout = place::layout(&(x.clone() * mask.clone()));
    assert_eq!(layout, place::layout(&x), "a random tensor takes the layout it meets");
    // The same tensor met twice has the same values.
    let twice = (x.clone() * mask.clone() - x.clone() * mask).abs().max().into_scalar();
    assert_eq!(twice, 0.0);
    (x * noise).into_data()
}

/// Random numbers belong to the elements of the whole volume, whoever draws them.
pub fn random_tensors_are_the_same_on_every_grid(device: &Device) {
    static ONE: LazyLock<TensorData> = LazyLock::new(|| agreed_on_grid(Grid::ONE, draw));
    draw(device).assert_eq(&ONE, true);
}

/// Integers of each distribution that meet a split volume.
fn draw_integers(device: &Device) -> Vec<TensorData> {
    S::seed(device, 43);
    let x = place::split(Tensor::<S, 5>::from_data(volume(3), device)).int();
    let all = [Distribution::Default, Distribution::Uniform(-5.0, 7.0), Distribution::Bernoulli(0.3), Distribution::Normal(2.0, 9.0)];
    all.into_iter()
        .map(|distribution| (x.clone().mul_scalar(0) + Tensor::<S, 5, Int>::random(SHAPE, distribution, device)).into_data())
        .collect()
}

/// Random integers, too; the default distribution has Burn's range, 0 to 254.
pub fn random_integers_are_the_same_on_every_grid(device: &Device) {
    static ONE: LazyLock<Vec<TensorData>> = LazyLock::new(|| agreed_on_grid(Grid::ONE, draw_integers));
    let drawn = draw_integers(device);
    drawn.iter().zip(ONE.iter()).for_each(|(drawn, one)| drawn.assert_eq(one, true));
    let default = drawn[0].clone().convert::<i64>().to_vec::<i64>().expect("integers");
    assert!(default.iter().all(|v| (0..255).contains(v)));
    assert!(default.iter().max() > Some(&200) && default.iter().min() < Some(&50));
}

/// Sums, products, an activation and a convolution with its gradients, each relative to the sum of what it adds up.
fn in_type<B: AutodiffBackend + WindowBackend>(x: Tensor<B, 5>, w: Tensor<B, 5>) -> Vec<(&'static str, Vec<f64>, f64)> {
    let (x, w) = (x.require_grad(), w.require_grad());
    let spec = ConvSpec { padding: [(1, 1); 3], ..Default::default() };
    let y = padded_conv3d(x.clone(), w.clone(), None, &spec);
    let grads = y.clone().sum().backward();
    let elements = SHAPE.iter().product::<usize>() as f64;
    let volume = elements / 4.0;
    vec![
        ("the sum", values(x.clone().sum()), 2.0 * elements),
        ("means", values(x.clone().mean_dim(2).mean_dim(4)), 2.0),
        ("sums of squares", values((x.clone() * x.clone()).sum_dim(3).sum_dim(2).sum_dim(4)), 4.0 * volume / 3.0),
        ("softmax", values(activation::softmax(x.clone(), 4)), 1.0),
        ("matrix products", values(x.clone().matmul(x.clone().swap_dims(3, 4))), 4.0 * 7.0),
        ("the convolution", values(y), 81.0 * 2.0),
        (
            "the gradient of x",
            values(Tensor::<B::InnerBackend, 5>::from_data(x.grad(&grads).unwrap().into_data(), &x.inner().device())),
            54.0,
        ),
        (
            "the gradient of w",
            values(Tensor::<B::InnerBackend, 5>::from_data(w.grad(&grads).unwrap().into_data(), &w.inner().device())),
            2.0 * volume,
        ),
    ]
}

/// float64, float16 and bfloat16: right to their own rounding, on every grid.
pub fn other_float_types(device: &Device) {
    let weights = TensorData::new((0..2 * 3 * 27).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect::<Vec<_>>(), [2, 3, 3, 3, 3]);
    for (dtype, epsilon) in [(DType::F64, 1e-14), (DType::F16, 1.0 / 1024.0), (DType::BF16, 1.0 / 128.0)] {
        // What the type can hold, computed with in float64.
        let exact = |data: TensorData| data.convert_dtype(dtype).convert_dtype(DType::F64);
        let plain = |data| Tensor::<Autodiff<Flex>, 5>::from_data(exact(data), (&Default::default(), DType::F64));
        let expected = in_type(plain(volume(1)), plain(weights.clone()));
        let typed = |data: TensorData| Tensor::<Autodiff<S>, 5>::from_data(data.convert_dtype(dtype), (device, dtype));
        let got = in_type(place::split(typed(volume(1))), typed(weights.clone()));
        for ((what, got, _), (_, want, scale)) in got.iter().zip(&expected) {
            assert_eq!(got.len(), want.len());
            let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, |a: f64, b| if b.is_nan() { b } else { a.max(b) });
            assert!(worst <= epsilon * scale, "{what} in {dtype:?}: off by {worst} of {scale}");
        }
        assert_eq!(device.stats().gathered(), 0);
    }
}

/// Shards of any extents, along any dimension and axis of the grid, and from one to another.
pub fn uneven_shards_and_relayout(device: &Device) {
    let grid = device.mesh().grid();
    for axis in MeshAxis::ALL.into_iter().filter(|axis| (2..=3).contains(&grid.size(*axis))) {
        let ranks = grid.size(axis);
        let x = Tensor::<S, 5>::from_data(volume(1), device);
        let uneven = Layout::full(&SHAPE).with_dim(4, vec![Axis::split(axis, if ranks == 2 { vec![0, 1, 7] } else { vec![0, 1, 2, 7] })]);
        let a = place::to_layout(x, &uneven);
        let by_depth = Layout::full(&SHAPE).with_dim(2, vec![Axis::split(axis, balanced_offsets(6, ranks))]);
        let b = place::to_layout(a.clone(), &by_depth);
        assert_eq!(place::layout(&(a.clone() + b.clone())), uneven, "the first operand's split stays");
        assert_eq!(device.stats().gathered(), 0);
        let x = Tensor::<Flex, 5>::from_data(volume(1), &Default::default());
        (a.clone() + b.clone()).into_data().assert_eq(&(x.clone() + x.clone()).into_data(), true);
        (b * a).into_data().assert_eq(&(x.clone() * x).into_data(), true);
    }
}

/// `into_data` of floats, integers and booleans.
pub fn reading_what_is_split_gives_every_rank_the_whole(device: &Device) {
    let x = place::split(Tensor::<S, 5>::from_data(volume(1), device));
    let mask: Tensor<S, 5, Bool> = x.clone().greater_elem(0.0);
    let plain = Tensor::<Flex, 5>::from_data(volume(1), &Default::default());
    x.clone().into_data().assert_eq(&volume(1), true);
    x.mul_scalar(100.0).int().into_data().assert_eq(&plain.clone().mul_scalar(100.0).int().into_data(), true);
    mask.into_data().assert_eq(&plain.greater_elem(0.0).into_data(), true);
}
