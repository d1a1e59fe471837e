//! Random programs: any sequence of operations on tensors that are split anyhow has the values and gradients of plain Flex.
//!
//! A program is drawn from a seed ([`generate`]), run by plain Burn on one rank and by `Spatial` on a grid of thread ranks
//! ([`interpret`]), and compared ([`check`]). One that fails is made smaller ([`shrink`]) and printed.

use std::fmt;

use burn_spatial::Grid;
use burn_spatial::layout::{Axis, Layout, Storage};
use burn_spatial::mesh::MeshAxis;
use serde::{Deserialize, Serialize};

pub mod check;
pub mod generate;
pub mod interpret;
pub mod lab;
pub mod replay;
pub mod shrink;
pub mod verify;
mod windows;

/// What a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Float64.
    Float,
    /// Int64.
    Int,
    /// Truth values.
    Bool,
}

/// A tensor made from data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// What it holds.
    pub kind: Kind,
    /// Its global shape.
    pub shape: Vec<usize>,
    /// Seed of its values.
    pub values: u64,
    /// Seed of its [`layout`]; 0 is whole on every rank.
    pub layout: u64,
    /// Whether ranks make it of their blocks, instead of cutting it out of the whole.
    pub blocks: bool,
    /// Whether its gradient is compared; of floats only.
    pub tracked: bool,
}

/// A value of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Node {
    /// Made from data.
    Input(Input),
    /// Made of earlier values, by their numbers.
    Step(Op, Vec<usize>),
}

/// How a float value comes into the loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Sink {
    /// Its sum: the gradient is the same everywhere.
    Sum,
    /// Its mean.
    Mean,
    /// The sum of its squares.
    Squares,
    /// The sum of the squares of its sums along a dimension: the gradient is the same along it.
    SquaredSums(usize),
    /// The sum of its products with given numbers, which lie as the seed says.
    Weighted(u64),
}

/// A program: values one after the other, and a loss of some of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// What it was drawn from; also the seed of its random tensors.
    pub seed: u64,
    /// Data x depth x height x width.
    pub grid: [usize; 4],
    /// Whether the backward pass computes values anew.
    pub checkpointing: bool,
    /// Its values.
    pub nodes: Vec<Node>,
    /// The terms of the loss.
    pub sinks: Vec<(usize, Sink)>,
}

/// Element-wise functions of one float tensor. Those with poles are taken of a number away from them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Unary {
    Neg,
    Abs,
    Exp,
    Sin,
    Cos,
    Tanh,
    Square,
    Recip,
    Sqrt,
    Log,
    Log1p,
    Erf,
    Sigmoid,
    LogSigmoid,
    Relu,
    LeakyRelu,
    Gelu,
    Silu,
    Softplus,
    Sign,
    Detach,
}

/// Element-wise functions of one tensor and a number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Scalar {
    Add,
    Mul,
    Powi,
    ClampMin,
    ClampMax,
    /// Of an integer, by a number above 0.
    Remainder,
}

/// Element-wise functions of two tensors of one kind, with broadcasting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    /// By a number that is not small.
    Div,
    MaxPair,
    MinPair,
    Atan2,
    Powf,
}

/// Truth values of two.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Logic {
    And,
    Or,
    Xor,
}

/// Comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Compare {
    Greater,
    GreaterEqual,
    Lower,
    LowerEqual,
    Equal,
    NotEqual,
}

/// Reductions of one dimension or of all.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Reduce {
    Sum,
    Mean,
    Prod,
    Max,
    Min,
    MaxAbs,
    Var,
    VarBias,
    Any,
    All,
}

/// Results made of all elements up to each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Scan {
    Sum,
    Prod,
    Max,
    Min,
}

/// Normalised exponentials.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Soft {
    Max,
    LogMax,
    Min,
    Quiet,
}

/// Random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Random {
    /// Ones.
    Ones,
    /// Zeros and ones.
    Coins,
    Uniform,
    Normal,
}

/// A window along the last one, two or three dimensions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// Taps.
    pub kernel: Vec<usize>,
    /// Elements between outputs.
    pub stride: Vec<usize>,
    /// Elements between taps.
    pub dilation: Vec<usize>,
    /// Elements before and behind; the same number where the operation has one for both.
    pub padding: Vec<(usize, usize)>,
    /// Elements more at the end of a transposed convolution.
    pub longer: Vec<usize>,
    /// Groups of channels.
    pub groups: usize,
    /// What is read outside, of padded 3D convolutions: zeros, periodic, mirrored, replicated.
    pub mode: u8,
    /// Factor of negative results, of padded 3D convolutions.
    pub slope: f64,
    /// Whether the output extent is rounded up, of pools.
    pub ceil: bool,
    /// Whether padding counts, of averages.
    pub include: bool,
}

/// A slice of each dimension: start, end, step (negative: backwards from the end).
pub type Slices = Vec<(isize, isize, isize)>;

/// An operation; its operands are named by the step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Op {
    Full(f64, Vec<usize>),
    FullInt(i64, Vec<usize>),
    Arange(i64),
    /// Like the operand.
    Random(Random),
    /// The operand times random numbers like it.
    TimesRandom(Random),
    Unary(Unary),
    Scalar(Scalar, f64),
    Binary(Binary),
    Logic(Logic),
    Not,
    Compare(Compare),
    CompareScalar(Compare, f64),
    /// x, mask, values.
    MaskWhere,
    /// x, mask.
    MaskFill(f64),
    /// floor(3 x).
    ToInt,
    ToFloat,
    Reduce(Reduce, usize),
    ReduceAll(Reduce),
    SumDims(Vec<usize>),
    ArgMax(usize),
    ArgMin(usize),
    /// Maxima, with a part of their positions added.
    MaxWithIndices(usize),
    Reshape(Vec<usize>),
    Permute(Vec<usize>),
    Slice(Slices),
    /// x, values.
    SliceAssign(Slices),
    SliceFill(Slices, f64),
    Cat(usize),
    Repeat(usize, usize),
    Expand(Vec<usize>),
    Flip(Vec<usize>),
    Roll(isize, usize),
    /// Dimension, size, step.
    Unfold(usize, usize, usize),
    /// Zeros, mirrored, replicated.
    Pad(Vec<(usize, usize)>, u8),
    Tril(i64),
    Triu(i64),
    /// x, indices; these are taken modulo what there is.
    Select(usize),
    /// x, indices, values.
    SelectAssign(usize),
    /// x, indices.
    Gather(usize),
    /// x, indices, values.
    Scatter(usize),
    /// Weights, indices.
    Embedding,
    Matmul,
    /// x, weight, maybe bias.
    Linear,
    /// Query, key, value.
    Attention,
    Scan(Scan, usize),
    /// Dimension, whether descending.
    Sort(usize, bool),
    ArgSort(usize, bool),
    TopK(usize, usize),
    Soft(Soft, usize),
    /// x, weight, maybe bias.
    Conv(Window),
    /// x, weight, maybe bias.
    Transposed(Window),
    /// x, weight, maybe bias: this crate's, 3D.
    PaddedConv(Window),
    MaxPool(Window),
    AvgPool(Window),
    /// A line or a plane.
    Adaptive(Vec<usize>),
    /// A plane; nearest, bilinear, bicubic; whether corners are aligned.
    Interpolate([usize; 2], u8, bool),
    /// A volume; whether trilinear; whether corners are aligned.
    Upsample([usize; 3], bool, bool),
    /// x, gamma, beta; the factor of negative results.
    BatchNorm(f64),
    /// x, gamma, beta.
    LayerNorm,
    WholeVolume,
}

/// Numbers drawn one after the other (splitmix64).
#[derive(Clone, Debug)]
pub struct Draws(pub u64);

impl Draws {
    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.any() % n.max(1) as u64) as usize
    }

    /// From `low` to `high`, both included.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high + 1 - low)
    }

    /// Once in `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of `all`.
    pub fn pick<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }
}

/// A layout that `seed` decides: each mesh axis may split a dimension, or a factor of one, in shards of any lengths. What an
/// axis does depends on the others only where two want the same. 0 is whole.
pub fn layout(shape: &[usize], grid: [usize; 4], seed: u64) -> Layout {
    let full = Layout::full(shape);
    if seed == 0 || shape.contains(&0) {
        return full;
    }
    let mut dims: Vec<Vec<Axis>> = full.dims().to_vec();
    for mesh in MeshAxis::ALL {
        let ranks = grid[mesh.index()];
        let mut draws = Draws(seed.wrapping_mul(5).wrapping_add(mesh.index() as u64));
        let (whole, turn, cut) = (draws.once_in(5), draws.any() as usize, draws.once_in(4));
        if ranks == 1 || whole {
            continue;
        }
        // Whole axes with an element for each rank; no shard is empty.
        let fit = |axis: &Axis| *axis.storage() == Storage::Full && axis.extent() >= ranks;
        let all: Vec<(usize, usize)> = dims
            .iter()
            .enumerate()
            .flat_map(|(d, axes)| axes.iter().enumerate().filter(|(_, axis)| fit(axis)).map(move |(i, _)| (d, i)))
            .collect();
        if all.is_empty() {
            continue;
        }
        let (dim, at) = all[turn % all.len()];
        let extent = dims[dim][at].extent();
        let factors: Vec<usize> = (ranks.max(2)..extent).filter(|f| extent.is_multiple_of(*f)).collect();
        let extent = if cut && !factors.is_empty() { draws.pick(&factors) } else { extent };
        let rest = dims[dim][at].extent() / extent;
        let split = Axis::split(mesh, boundaries(extent, ranks, &mut draws));
        let axes = if draws.once_in(2) { vec![split, Axis::full(rest)] } else { vec![Axis::full(rest), split] };
        // Factors of extent 1 are dropped.
        let axes: Vec<Axis> = axes.into_iter().filter(|axis| axis.extent() > 1).collect();
        dims[dim].splice(at..=at, axes);
    }
    Layout::try_new(dims).expect("each axis of the mesh splits one dimension")
}

/// Boundaries of `ranks` shards of at least one element each, some of them long.
fn boundaries(extent: usize, ranks: usize, draws: &mut Draws) -> Vec<usize> {
    let mut lengths = vec![1; ranks];
    let favourite = draws.below(2 * ranks);
    for _ in ranks..extent {
        let rank = if favourite < ranks && draws.once_in(2) { favourite } else { draws.below(ranks) };
        lengths[rank] += 1;
    }
    let mut offsets = vec![0];
    lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + length));
    offsets
}

impl Program {
    /// The grid.
    pub fn grid(&self) -> Grid {
        Grid(self.grid)
    }

    /// How many operations it has.
    pub fn steps(&self) -> usize {
        self.nodes.iter().filter(|node| matches!(node, Node::Step(..))).count()
    }
}

/// A listing: one value a line.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shapes = replay::shapes(self);
        let checkpointing = if self.checkpointing { ", with checkpointing" } else { "" };
        writeln!(f, "seed {} on {}{checkpointing}", self.seed, self.grid())?;
        for (i, node) in self.nodes.iter().enumerate() {
            match node {
                Node::Input(input) => {
                    let layout = layout(&input.shape, self.grid, input.layout);
                    let kind = match (input.kind, input.tracked) {
                        (Kind::Float, true) => "parameter",
                        (Kind::Float, false) => "float",
                        (Kind::Int, _) => "int",
                        (Kind::Bool, _) => "bool",
                    };
                    writeln!(f, "  v{i} = {kind} {:?} as {layout}, values {}", input.shape, input.values)?;
                }
                Node::Step(op, args) => {
                    let args: Vec<String> = args.iter().map(|a| format!("v{a}")).collect();
                    let shape = shapes.get(i).map(|shape| format!(" -> {shape:?}")).unwrap_or_default();
                    writeln!(f, "  v{i} = {op:?} of {}{shape}", args.join(", "))?;
                }
            }
        }
        let terms: Vec<String> = self.sinks.iter().map(|(i, sink)| format!("{sink:?} of v{i}")).collect();
        writeln!(f, "  loss = {}", terms.join(" + "))
    }
}
