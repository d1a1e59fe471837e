//! `docs/operations.md` says what operations exchange: as measured here. With `BURN_SPATIAL_WRITE_TABLE=1` the file is
//! written anew instead of compared.

use std::fmt::Write;
use std::path::Path;

use burn::backend::Flex;
use burn::nn::PaddingConfig3d;
use burn::nn::conv::{Conv3dConfig, ConvTranspose3dConfig};
use burn::nn::{BatchNormConfig, GroupNormConfig, LayerNormConfig, LinearConfig};
use burn::tensor::ops::{InterpolateMode, InterpolateOptions};
use burn::tensor::{IndexingUpdateOp, Int, Tensor, activation, module};
use burn_spatial::nn::{AvgPool3dConfig, MaxPool3dConfig, Upsample3dConfig, UpsampleMode};
use burn_spatial::{Grid, Spatial, place};
use burn_spatial_tests::grid::on_grid;
use burn_spatial_tests::suite::Device;

type S = Spatial<Flex>;
type X = Tensor<S, 5>;

const GRID: Grid = Grid([1, 2, 2, 2]);
const SHAPE: [usize; 5] = [2, 4, 8, 8, 8];

/// The layout of a result; its pending sums are made.
fn seen<const D: usize>(y: Tensor<S, D>) -> String {
    let layout = place::layout(&y).to_string();
    place::local(y);
    layout
}

/// A call, and what runs it on two tensors split as volumes.
type Row = (&'static str, fn(X, X, &Device) -> String);

const POINTWISE: &[Row] = &[
    ("x + y, x * y, exp, relu, gelu, ...", |x, y, _| seen(activation::gelu(x.clone() + y) * x)),
    ("x.greater(y), mask_where, mask_fill", |x, y, _| {
        seen(x.clone().mask_where(x.clone().greater(y.clone()), y).mask_fill(x.lower_elem(0), 1))
    }),
    ("x * per_channel.reshape([1, C, 1, 1, 1])", |x, _, d| seen(x * Tensor::<S, 1>::ones([4], d).reshape([1, 4, 1, 1, 1]))),
    ("x.cast, x.int(), x.float()", |x, _, _| seen(x.int().float())),
    ("zeros, ones, full, expand, repeat_dim of extent 1", |_, _, d| seen(X::ones(SHAPE, d))),
    ("x * random_like(x)", |x, _, _| seen(x.clone() * x.random_like(burn::tensor::Distribution::Default))),
];

const VIEWS: &[Row] = &[
    ("x.permute, x.swap_dims", |x, _, _| seen(x.permute([0, 2, 3, 4, 1]))),
    ("x.swap_dims(0, 1).reshape([C, N * D * H * W])", |x, _, _| seen(x.swap_dims(0, 1).reshape([4, 1024]))),
    ("x.flatten(1, 4): channels with volume", |x, _, _| seen(x.flatten::<2>(1, 4))),
    ("x.slice of a box", |x, _, _| seen(x.slice([0..2, 0..4, 1..7, 2..7, 0..8]))),
    ("x.slice that empties a shard", |x, _, _| seen(x.slice([0..2, 0..4, 4..8, 0..8, 0..8]))),
    ("x.slice with steps", |x, _, _| {
        seen(x.slice([burn::tensor::s![..], burn::tensor::s![..], burn::tensor::s![0..8;2], burn::tensor::s![..], burn::tensor::s![..]]))
    }),
    ("x.slice_assign(box, y)", |x, y, _| seen(x.slice_assign([0..2, 0..4, 1..7, 0..8, 0..8], y.slice([0..2, 0..4, 1..7, 0..8, 0..8])))),
    ("x.pad", |x, _, _| seen(x.pad([(1, 1), (2, 2)], burn::tensor::ops::PadMode::Constant(0.0)))),
    ("cat([x, y], channels)", |x, y, _| seen(Tensor::cat(vec![x, y], 1))),
    ("cat([x, y], depth)", |x, y, _| seen(Tensor::cat(vec![x, y], 2))),
    ("stack([x, y], 0)", |x, y, _| seen(Tensor::stack::<6>(vec![x, y], 0))),
    ("x.chunk(2, depth)[0]", |x, _, _| seen(x.chunk(2, 2).remove(0))),
    ("x.repeat_dim(depth, 2)", |x, _, _| seen(x.repeat_dim(2, 2))),
    ("x.flip([depth])", |x, _, _| seen(x.flip([2]))),
    ("x.roll_dim(1, depth)", |x, _, _| seen(x.roll_dim(1, 2))),
    ("x.unfold(depth, 3, 1)", |x, _, _| seen(x.unfold::<6, _>(2, 3, 1))),
];

const REDUCTIONS: &[Row] = &[
    ("x.sum(), x.mean(), x.max()", |x, _, _| seen(x.sum())),
    ("x.sum_dim(depth), mean_dim, max_dim, var, any_dim", |x, _, _| seen(x.mean_dim(2))),
    ("x.argmax(depth)", |x, _, _| seen(x.argmax(2).float())),
    ("x.argmax(channels)", |x, _, _| seen(x.argmax(1).float())),
    ("softmax(x, channels)", |x, _, _| seen(activation::softmax(x, 1))),
    ("softmax(x, depth)", |x, _, _| seen(activation::softmax(x, 2))),
    ("x.cumsum(depth), cumprod, cummax, cummin", |x, _, _| seen(x.cumsum(2))),
    ("x.sort(channels), topk, argsort", |x, _, _| seen(x.sort(1))),
    ("x.sort(depth), topk, argsort", |x, _, _| seen(x.sort(2))),
];

const INDEXING: &[Row] = &[
    ("x.select(channels, indices)", |x, _, d| seen(x.select(1, Tensor::<S, 1, Int>::from_ints([2, 0], d)))),
    ("x.select(depth, indices)", |x, _, d| seen(x.select(2, Tensor::<S, 1, Int>::from_ints([2, 0], d)))),
    ("x.gather(channels, indices)", |x, y, _| seen(x.gather(1, y.abs().int().clamp(0, 3)))),
    ("x.gather(depth, indices)", |x, y, _| seen(x.gather(2, y.abs().int().clamp(0, 7)))),
    ("x.scatter(channels, indices, y)", |x, y, _| seen(x.scatter(1, y.clone().abs().int().clamp(0, 3), y, IndexingUpdateOp::Add))),
    ("x.scatter(depth, indices, y)", |x, y, _| seen(x.scatter(2, y.clone().abs().int().clamp(0, 7), y, IndexingUpdateOp::Add))),
    ("x.greater_elem(0.5).nonzero(), argwhere", |x, _, _| seen(x.greater_elem(0.5).argwhere().float())),
    ("x.matmul(y.swap_dims(3, 4))", |x, y, _| seen(x.matmul(y.swap_dims(3, 4)))),
];

const MODULES: &[Row] = &[
    ("Conv3d 3^3, padding 1", |x, _, d| {
        seen(Conv3dConfig::new([4, 4], [3; 3]).with_padding(PaddingConfig3d::Explicit(1, 1, 1)).init(d).forward(x))
    }),
    ("Conv3d 3^3, padding 1, stride 2", |x, _, d| {
        seen(Conv3dConfig::new([4, 4], [3; 3]).with_stride([2; 3]).with_padding(PaddingConfig3d::Explicit(1, 1, 1)).init(d).forward(x))
    }),
    ("Conv3d 1^3", |x, _, d| seen(Conv3dConfig::new([4, 4], [1; 3]).init(d).forward(x))),
    ("ConvTranspose3d 2^3, stride 2", |x, _, d| seen(ConvTranspose3dConfig::new([4, 4], [2; 3]).with_stride([2; 3]).init(d).forward(x))),
    ("MaxPool3d 2^3, stride 2", |x, _, _| seen(MaxPool3dConfig::new([2; 3]).with_strides([2; 3]).init().forward(x))),
    ("AvgPool3d 3^3, stride 2, padding 1", |x, _, _| {
        seen(AvgPool3dConfig::new([3; 3]).with_strides([2; 3]).with_padding([1; 3]).init().forward(x))
    }),
    ("Upsample3d nearest, twice", |x, _, _| seen(Upsample3dConfig::new().with_scale_factor(Some([2.0; 3])).init().forward(x))),
    ("Upsample3d trilinear, twice", |x, _, _| {
        seen(Upsample3dConfig::new().with_scale_factor(Some([2.0; 3])).with_mode(UpsampleMode::Trilinear).init().forward(x))
    }),
    ("BatchNorm (in evaluation)", |x, _, d| seen(BatchNormConfig::new(4).init(d).forward(x))),
    ("GroupNorm, InstanceNorm", |x, _, d| seen(GroupNormConfig::new(2, 4).init(d).forward(x))),
    ("LayerNorm, RmsNorm over a split width", |x, _, d| seen(LayerNormConfig::new(8).init(d).forward(x))),
    ("Linear over a split width", |x, _, d| seen(LinearConfig::new(8, 4).init(d).forward(x))),
    ("interpolate 2D, bilinear, of [N, C, H, W]", |x, _, _| {
        let plane: Tensor<S, 4> = x.slice([0..2, 0..4, 0..1, 0..8, 0..8]).squeeze_dim(2);
        seen(module::interpolate(plane, [16, 16], InterpolateOptions::new(InterpolateMode::Bilinear)))
    }),
];

const TABLES: &[(&str, &[Row])] = &[
    ("Pointwise and creation", POINTWISE),
    ("Views, slices, joins", VIEWS),
    ("Reductions, scans, sorts", REDUCTIONS),
    ("Indexing and products", INDEXING),
    ("Modules, forward", MODULES),
];

struct Measured {
    layout: String,
    messages: u64,
    bytes: u64,
    reductions: u64,
    gathers: u64,
}

fn measure(run: fn(X, X, &Device) -> String) -> Measured {
    let ranks = on_grid(GRID, |device| {
        let volume = |start: i64| {
            let numbers = Tensor::<S, 1, Int>::arange(start..start + 4096, device).float();
            place::split((numbers * 0.37).sin().reshape(SHAPE))
        };
        let (x, y) = (volume(0), volume(7));
        let before = device.stats();
        let layout = run(x, y, device);
        let after = device.stats();
        let comm = after.comm.since(&before.comm);
        Measured {
            layout,
            messages: comm.point_to_point.calls,
            bytes: comm.point_to_point.sent + comm.all_gather.sent + comm.all_reduce.sent,
            reductions: comm.all_reduce.calls,
            gathers: after.gathered() - before.gathered(),
        }
    });
    let first = &ranks[0];
    Measured {
        layout: first.layout.clone(),
        messages: ranks.iter().map(|r| r.messages).max().unwrap_or(0),
        bytes: ranks.iter().map(|r| r.bytes).max().unwrap_or(0),
        reductions: first.reductions,
        gathers: first.gathers,
    }
}

fn table() -> String {
    let mut text = String::from(
        "# What operations exchange\n\n\
         Measured by `tests/tests/operations_table.rs`, which fails when this page is out of date.\n\n\
         `x` and `y` are volumes `[2, 4, 8, 8, 8]` of float32 on the grid 1x2x2x2: they lie as\n\
         `[2, 4, 8d(4|4), 8h(4|4), 8w(4|4)]`, of which each of the 8 ranks stores 2 KiB. A number is an extent; `d`, `h`, `w` name the\n\
         mesh axis that splits it, with the lengths of its shards; `u` marks an extent whose value is stored once; `*` joins what a\n\
         reshape merged; `+dhw` says over which axes a sum is still to be made.\n\n\
         Messages, all-reduces and bytes sent are those of the rank with the most. Where the last column is not 0 there is no rule: the\n\
         tensor is gathered on every rank, counted (`SpatialDevice::stats`), logged once, and refused in strict mode.\n",
    );
    for (name, rows) in TABLES {
        write!(text, "\n## {name}\n\n| call | result lies as | messages | all-reduces | bytes | gathers |\n|---|---|---|---|---|---|\n")
            .unwrap();
        for (call, run) in *rows {
            let Measured { layout, messages, bytes, reductions, gathers } = measure(*run);
            // A bar would end the cell.
            let layout = layout.replace('|', "\\|");
            writeln!(text, "| `{call}` | `{layout}` | {messages} | {reductions} | {bytes} | {gathers} |").unwrap();
        }
    }
    text
}

#[test]
fn the_page_says_what_is_measured() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations.md");
    let measured = table();
    if std::env::var_os("BURN_SPATIAL_WRITE_TABLE").is_some() {
        std::fs::write(&path, &measured).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    for (line, (a, b)) in written.lines().zip(measured.lines()).enumerate() {
        assert_eq!(a, b, "docs/operations.md:{}: run this test with BURN_SPATIAL_WRITE_TABLE=1", line + 1);
    }
    assert_eq!(written, measured, "docs/operations.md: run this test with BURN_SPATIAL_WRITE_TABLE=1");
}
