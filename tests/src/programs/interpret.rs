//! Runs programs on any backend.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::PadMode;
use burn::tensor::{
    BasicOps, Bool, DType, Distribution, Float, FloatDType, IndexingUpdateOp, Int, IntDType, Shape, Slice, Tensor, TensorData, TensorKind,
    TensorMetadata, TensorPrimitive, activation, module,
};
use burn_backend::tensor::Ordered;

use super::lab::Lab;
use super::{
    Binary, Compare, Draws, Input, Kind, Logic, Node, Op, Program, Random, Reduce, Scalar, Scan, Sink, Slices, Soft, Unary, layout, windows,
};

/// A value on a backend.
#[allow(missing_docs)]
#[derive(Debug)]
pub enum Value<B: Backend> {
    Float(B::FloatTensorPrimitive),
    Int(B::IntTensorPrimitive),
    Bool(B::BoolTensorPrimitive),
}

impl<B: Backend> Clone for Value<B> {
    fn clone(&self) -> Self {
        match self {
            Value::Float(x) => Value::Float(x.clone()),
            Value::Int(x) => Value::Int(x.clone()),
            Value::Bool(x) => Value::Bool(x.clone()),
        }
    }
}

/// The tensor of any rank that a primitive is.
pub(super) fn wrap<B: Backend, const D: usize>(x: B::FloatTensorPrimitive) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// Evaluates an expression for a rank that is known when it runs.
macro_rules! by_rank {
    ($rank:expr, $d:ident => $body:expr) => {
        match $rank {
            1 => {
                const $d: usize = 1;
                $body
            }
            2 => {
                const $d: usize = 2;
                $body
            }
            3 => {
                const $d: usize = 3;
                $body
            }
            4 => {
                const $d: usize = 4;
                $body
            }
            5 => {
                const $d: usize = 5;
                $body
            }
            rank => panic!("programs have tensors of rank 1 to 5, not {rank}"),
        }
    };
}

impl<B: Backend> Value<B> {
    /// Its global shape.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Value::Float(x) => x.shape().to_vec(),
            Value::Int(x) => x.shape().to_vec(),
            Value::Bool(x) => x.shape().to_vec(),
        }
    }

    /// What it holds.
    pub fn kind(&self) -> Kind {
        match self {
            Value::Float(_) => Kind::Float,
            Value::Int(_) => Kind::Int,
            Value::Bool(_) => Kind::Bool,
        }
    }

    /// Its values, whole, in float64. Collective.
    pub fn numbers(&self) -> Vec<f64> {
        let data = match self.clone() {
            Value::Float(x) => wrap::<B, 1>(x).into_data(),
            Value::Int(x) => Tensor::<B, 1, Int>::from_primitive(x).into_data(),
            Value::Bool(x) => Tensor::<B, 1, Bool>::from_primitive(x).into_data(),
        };
        if self.kind() == Kind::Float {
            assert_eq!(data.dtype, DType::F64, "a float of another type");
        }
        data.convert::<f64>().to_vec().expect("converted")
    }

    fn float(self) -> B::FloatTensorPrimitive {
        match self {
            Value::Float(x) => x,
            other => panic!("a float is wanted, not {:?}", other.kind()),
        }
    }

    fn int(self) -> B::IntTensorPrimitive {
        match self {
            Value::Int(x) => x,
            other => panic!("integers are wanted, not {:?}", other.kind()),
        }
    }

    fn bool(self) -> B::BoolTensorPrimitive {
        match self {
            Value::Bool(x) => x,
            other => panic!("truth values are wanted, not {:?}", other.kind()),
        }
    }
}

/// The values of an input.
pub fn input<B: Lab>(input: &Input, grid: [usize; 4], device: &B::Device) -> Value<B> {
    let layout = layout(&input.shape, grid, input.layout);
    let n: usize = input.shape.iter().product();
    let mut draws = Draws(input.values);
    if input.kind == Kind::Float {
        // Generic numbers in -1.5..1.5.
        let numbers: Vec<f64> = (0..n).map(|_| (draws.any() >> 11) as f64 / (1u64 << 53) as f64 * 3.0 - 1.5).collect();
        return Value::Float(B::float(TensorData::new(numbers, input.shape.clone()), &layout, input.blocks, device));
    }
    let numbers: Vec<i64> = (0..n).map(|_| draws.below(12) as i64 - 3).collect();
    let x = B::int(TensorData::new(numbers, input.shape.clone()), &layout, input.blocks, device);
    match input.kind {
        Kind::Bool => Value::Bool(Tensor::<B, 1, Int>::from_primitive(x).greater_elem(2).into_primitive()),
        _ => Value::Int(x),
    }
}

/// What a program makes.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The gradients of the tracked inputs, by their numbers, where the loss depends on them.
    pub gradients: Vec<(usize, Option<Vec<f64>>)>,
    /// The shapes and values of all nodes.
    pub values: Vec<(Vec<usize>, Vec<f64>)>,
}

/// Runs a program and its backward pass. Collective.
pub fn run<B: Lab + AutodiffBackend>(program: &Program, device: &B::Device) -> Outcome {
    B::start(program.seed, device);
    let mut values: Vec<Value<B>> = Vec::new();
    for node in &program.nodes {
        let value = match node {
            Node::Input(made) => match input::<B>(made, program.grid, device) {
                Value::Float(x) if made.tracked => Value::Float(wrap::<B, 1>(x).require_grad().into_primitive().tensor()),
                value => value,
            },
            Node::Step(op, args) => apply::<B>(op, args.iter().map(|a| values[*a].clone()).collect(), device),
        };
        values.push(value);
    }
    let mut loss: Option<Tensor<B, 1>> = None;
    for (node, sink) in &program.sinks {
        let x = values[*node].clone().float();
        let shape = x.shape().to_vec();
        let term = by_rank!(shape.len(), D => {
            let x = wrap::<B, D>(x);
            match sink {
                Sink::Sum => x.sum(),
                Sink::Mean => x.mean(),
                Sink::Squares => x.powi_scalar(2).sum(),
                Sink::SquaredSums(dim) => x.sum_dim(*dim).powi_scalar(2).sum(),
                Sink::Weighted(seed) => {
                    let weights = Input {
                        kind: Kind::Float,
                        shape,
                        values: *seed,
                        layout: seed % 64,
                        blocks: false,
                        tracked: false,
                    };
                    (x * wrap::<B, D>(input::<B>(&weights, program.grid, device).float())).sum()
                }
            }
        });
        loss = Some(loss.map_or(term.clone(), |loss| loss + term));
    }
    let gradients = loss.expect("a program has a loss").backward();
    let tracked = program.nodes.iter().enumerate().filter(|(_, node)| matches!(node, Node::Input(input) if input.tracked));
    let gradient = |(i, _): (usize, &Node)| {
        let gradient = B::grad(&values[i].clone().float(), &gradients);
        (i, gradient.map(|g| Value::<B::InnerBackend>::Float(g).numbers()))
    };
    let gradients = tracked.map(gradient).collect();
    Outcome { gradients, values: values.iter().map(|v| (v.shape(), v.numbers())).collect() }
}

/// An operation. Collective.
///
/// # Panics
/// If the operands do not fit it.
pub fn apply<B: Lab>(op: &Op, args: Vec<Value<B>>, device: &B::Device) -> Value<B> {
    let shapes: Vec<Vec<usize>> = args.iter().map(Value::shape).collect();
    let rank = shapes.first().map_or(1, Vec::len);
    let mut rest = args.into_iter();
    let mut arg = || rest.next().expect("an operand");
    match op {
        Op::Full(value, shape) => Value::Float(B::float_full(Shape::from(shape.clone()), (*value).into(), device, FloatDType::F64)),
        Op::FullInt(value, shape) => Value::Int(B::int_full(Shape::from(shape.clone()), (*value).into(), device, IntDType::I64)),
        Op::Arange(n) => Value::Int(Tensor::<B, 1, Int>::arange(0..*n, (device, DType::I64)).into_primitive()),
        Op::Random(random) => Value::Float(B::random(Shape::from(shapes[0].clone()), distribution(*random), device)),
        Op::TimesRandom(random) => {
            let (x, drawn) = (arg().float(), B::random(Shape::from(shapes[0].clone()), distribution(*random), device));
            Value::Float(B::float_mul(x, drawn))
        }
        Op::Unary(f) => {
            let x = arg().float();
            Value::Float(by_rank!(rank, D => plain(unary(*f, wrap::<B, D>(x)))))
        }
        Op::Scalar(f, c) => match arg() {
            Value::Float(x) => Value::Float(by_rank!(rank, D => plain(scalar(*f, wrap::<B, D>(x), *c)))),
            Value::Int(x) => Value::Int(by_rank!(rank, D => int_scalar::<B, D>(*f, Tensor::from_primitive(x), *c as i64).into_primitive())),
            Value::Bool(_) => panic!("no arithmetic of truth values"),
        },
        Op::Binary(f) => match (arg(), arg()) {
            (Value::Float(x), Value::Float(y)) => Value::Float(by_rank!(rank, D => plain(binary(*f, wrap::<B, D>(x), wrap(y))))),
            (Value::Int(x), Value::Int(y)) => Value::Int(
                by_rank!(rank, D => int_binary::<B, D>(*f, Tensor::from_primitive(x), Tensor::from_primitive(y)).into_primitive()),
            ),
            _ => panic!("two of one kind are wanted"),
        },
        Op::Logic(f) => {
            let (a, b) = (Tensor::<B, 1, Bool>::from_primitive(arg().bool()), Tensor::from_primitive(arg().bool()));
            let y = match f {
                Logic::And => a.bool_and(b),
                Logic::Or => a.bool_or(b),
                Logic::Xor => a.bool_xor(b),
            };
            Value::Bool(y.into_primitive())
        }
        Op::Not => Value::Bool(Tensor::<B, 1, Bool>::from_primitive(arg().bool()).bool_not().into_primitive()),
        Op::Compare(f) => match (arg(), arg()) {
            (Value::Float(x), Value::Float(y)) => Value::Bool(by_rank!(rank, D => compare(*f, wrap::<B, D>(x), wrap(y)).into_primitive())),
            (Value::Int(x), Value::Int(y)) => Value::Bool(by_rank!(rank, D =>
                compare::<B, D, Int>(*f, Tensor::from_primitive(x), Tensor::from_primitive(y)).into_primitive())),
            _ => panic!("two of one kind are wanted"),
        },
        Op::CompareScalar(f, c) => match arg() {
            Value::Float(x) => Value::Bool(compare_scalar(*f, wrap::<B, 1>(x), *c).into_primitive()),
            Value::Int(x) => Value::Bool(compare_scalar::<B, Int>(*f, Tensor::from_primitive(x), *c).into_primitive()),
            Value::Bool(_) => panic!("truth values are not compared"),
        },
        Op::ToInt => match arg() {
            Value::Float(x) => Value::Int(wrap::<B, 1>(x).mul_scalar(3.0).floor().int().cast(IntDType::I64).into_primitive()),
            Value::Bool(x) => Value::Int(Tensor::<B, 1, Bool>::from_primitive(x).int().cast(IntDType::I64).into_primitive()),
            Value::Int(_) => panic!("it is an integer"),
        },
        Op::ToFloat => match arg() {
            Value::Int(x) => Value::Float(plain(Tensor::<B, 1, Int>::from_primitive(x).cast(FloatDType::F64))),
            Value::Bool(x) => Value::Float(plain(Tensor::<B, 1, Bool>::from_primitive(x).cast(FloatDType::F64))),
            Value::Float(_) => panic!("it is a float"),
        },
        Op::Reduce(..)
        | Op::ReduceAll(_)
        | Op::SumDims(_)
        | Op::ArgMax(_)
        | Op::ArgMin(_)
        | Op::Scan(..)
        | Op::Sort(..)
        | Op::ArgSort(..)
        | Op::TopK(..) => by_rank!(rank, D => match arg() {
            Value::Float(x) => ordered_float::<B, D>(op, wrap(x)),
            Value::Int(x) => ordered_int::<B, D>(op, Tensor::from_primitive(x)),
            Value::Bool(x) => reduced_bool::<B, D>(op, Tensor::from_primitive(x)),
        }),
        Op::MaxWithIndices(_) | Op::Soft(..) | Op::Pad(..) | Op::Tril(_) | Op::Triu(_) | Op::SliceFill(..) => {
            let x = arg().float();
            Value::Float(by_rank!(rank, D => plain(lines(op, wrap::<B, D>(x)))))
        }
        Op::SelectAssign(_) | Op::Scatter(_) => {
            let (x, indices, values) = (arg().float(), arg().int(), arg().float());
            Value::Float(by_rank!(rank, D => plain(assign(op, wrap::<B, D>(x), indices, wrap(values)))))
        }
        Op::Matmul => {
            let (x, y) = (arg().float(), arg().float());
            Value::Float(by_rank!(rank, D => plain(wrap::<B, D>(x).matmul(wrap(y)))))
        }
        Op::Linear => {
            let (x, weight) = (arg().float(), arg().float());
            let bias = (shapes.len() == 3).then(|| wrap(arg().float()));
            Value::Float(by_rank!(rank, D => plain(module::linear(wrap::<B, D>(x), wrap(weight), bias))))
        }
        Op::Embedding => {
            let (weights, indices) = (wrap::<B, 2>(arg().float()), Tensor::<B, 2, Int>::from_primitive(arg().int()));
            let n = weights.dims()[0];
            Value::Float(plain(module::embedding(weights, indices.abs().remainder_scalar(n as i64))))
        }
        Op::Attention
        | Op::Conv(_)
        | Op::Transposed(_)
        | Op::PaddedConv(_)
        | Op::MaxPool(_)
        | Op::AvgPool(_)
        | Op::Adaptive(_)
        | Op::Interpolate(..)
        | Op::Upsample(..)
        | Op::BatchNorm(_)
        | Op::LayerNorm
        | Op::WholeVolume => Value::Float(windows::apply::<B>(op, rest.map(Value::float).collect())),
        Op::Reshape(_)
        | Op::Permute(_)
        | Op::Slice(_)
        | Op::SliceAssign(_)
        | Op::Cat(_)
        | Op::Repeat(..)
        | Op::Expand(_)
        | Op::Flip(_)
        | Op::Roll(..)
        | Op::Unfold(..) => match arg() {
            Value::Float(x) => {
                let all = std::iter::once(x).chain(rest.map(Value::float)).map(TensorPrimitive::Float).collect();
                Value::Float(moved::<B, Float>(op, all, rank).tensor())
            }
            Value::Int(x) => Value::Int(moved::<B, Int>(op, std::iter::once(x).chain(rest.map(Value::int)).collect(), rank)),
            Value::Bool(x) => Value::Bool(moved::<B, Bool>(op, std::iter::once(x).chain(rest.map(Value::bool)).collect(), rank)),
        },
        Op::MaskWhere | Op::MaskFill(_) | Op::Select(_) | Op::Gather(_) => match arg() {
            Value::Float(x) => {
                let other = (*op == Op::MaskWhere).then(|| rest.next_back().expect("values").float());
                Value::Float(
                    picked::<B, Float>(
                        op,
                        TensorPrimitive::Float(x),
                        rest.next().expect("an operand"),
                        other.map(TensorPrimitive::Float),
                        rank,
                    )
                    .tensor(),
                )
            }
            Value::Int(x) => {
                let other = (*op == Op::MaskWhere).then(|| rest.next_back().expect("values").int());
                Value::Int(picked::<B, Int>(op, x, rest.next().expect("an operand"), other, rank))
            }
            Value::Bool(_) => panic!("truth values are not picked"),
        },
    }
}

fn plain<B: Backend, const D: usize>(x: Tensor<B, D>) -> B::FloatTensorPrimitive {
    x.into_primitive().tensor()
}

fn distribution(random: Random) -> Distribution {
    match random {
        Random::Ones => Distribution::Bernoulli(1.0),
        Random::Coins => Distribution::Bernoulli(0.4),
        Random::Uniform => Distribution::Uniform(-1.0, 1.0),
        Random::Normal => Distribution::Normal(0.5, 1.0),
    }
}

fn unary<B: Backend, const D: usize>(f: Unary, x: Tensor<B, D>) -> Tensor<B, D> {
    // A number that is not small.
    let large = |x: Tensor<B, D>| x.square().add_scalar(1.0);
    match f {
        Unary::Neg => x.neg(),
        Unary::Abs => x.abs(),
        Unary::Exp => x.exp(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Tanh => x.tanh(),
        Unary::Square => x.square(),
        Unary::Recip => large(x).recip(),
        Unary::Sqrt => large(x).sqrt(),
        Unary::Log => large(x).log(),
        Unary::Log1p => large(x).log1p(),
        Unary::Erf => x.erf(),
        Unary::Sigmoid => activation::sigmoid(x),
        Unary::LogSigmoid => activation::log_sigmoid(x),
        Unary::Relu => activation::relu(x),
        Unary::LeakyRelu => activation::leaky_relu(x, 0.1),
        Unary::Gelu => activation::gelu(x),
        Unary::Silu => activation::silu(x),
        Unary::Softplus => activation::softplus(x, 1.5),
        Unary::Sign => x.sign(),
        Unary::Detach => x.detach(),
    }
}

fn scalar<B: Backend, const D: usize>(f: Scalar, x: Tensor<B, D>, c: f64) -> Tensor<B, D> {
    match f {
        Scalar::Add => x.add_scalar(c),
        Scalar::Mul => x.mul_scalar(c),
        Scalar::Powi => x.powi_scalar(c as i32),
        Scalar::ClampMin => x.clamp_min(c),
        Scalar::ClampMax => x.clamp_max(c),
        Scalar::Remainder => panic!("of integers only"),
    }
}

fn int_scalar<B: Backend, const D: usize>(f: Scalar, x: Tensor<B, D, Int>, c: i64) -> Tensor<B, D, Int> {
    match f {
        Scalar::Add => x.add_scalar(c),
        Scalar::Mul => x.mul_scalar(c),
        Scalar::ClampMin => x.clamp_min(c),
        Scalar::ClampMax => x.clamp_max(c),
        Scalar::Remainder => x.remainder_scalar(c),
        Scalar::Powi => panic!("of floats only"),
    }
}

fn binary<B: Backend, const D: usize>(f: Binary, x: Tensor<B, D>, y: Tensor<B, D>) -> Tensor<B, D> {
    match f {
        Binary::Add => x.add(y),
        Binary::Sub => x.sub(y),
        Binary::Mul => x.mul(y),
        Binary::Div => x.div(y.square().add_scalar(1.0)),
        Binary::MaxPair => x.max_pair(y),
        Binary::MinPair => x.min_pair(y),
        Binary::Atan2 => x.atan2(y.square().add_scalar(1.0)),
        Binary::Powf => x.square().add_scalar(1.0).powf(y.tanh()),
    }
}

fn int_binary<B: Backend, const D: usize>(f: Binary, x: Tensor<B, D, Int>, y: Tensor<B, D, Int>) -> Tensor<B, D, Int> {
    match f {
        Binary::Add => x.add(y),
        Binary::Sub => x.sub(y),
        // Small enough for sums of many.
        Binary::Mul => x.mul(y).remainder_scalar(101),
        Binary::MaxPair => x.max_pair(y),
        Binary::MinPair => x.min_pair(y),
        Binary::Div | Binary::Atan2 | Binary::Powf => panic!("of floats only"),
    }
}

fn compare<B: Backend, const D: usize, K: Ordered<B>>(f: Compare, x: Tensor<B, D, K>, y: Tensor<B, D, K>) -> Tensor<B, D, Bool> {
    match f {
        Compare::Greater => x.greater(y),
        Compare::GreaterEqual => x.greater_equal(y),
        Compare::Lower => x.lower(y),
        Compare::LowerEqual => x.lower_equal(y),
        Compare::Equal => x.equal(y),
        Compare::NotEqual => x.not_equal(y),
    }
}

fn compare_scalar<B: Backend, K: Ordered<B>>(f: Compare, x: Tensor<B, 1, K>, c: f64) -> Tensor<B, 1, Bool> {
    match f {
        Compare::Greater => x.greater_elem(c),
        Compare::GreaterEqual => x.greater_equal_elem(c),
        Compare::Lower => x.lower_elem(c),
        Compare::LowerEqual => x.lower_equal_elem(c),
        Compare::Equal => x.equal_elem(c),
        Compare::NotEqual => x.not_equal_elem(c),
    }
}

fn long<B: Backend, const D: usize>(x: Tensor<B, D, Int>) -> Value<B> {
    Value::Int(x.cast(IntDType::I64).into_primitive())
}

fn ordered_float<B: Backend, const D: usize>(op: &Op, x: Tensor<B, D>) -> Value<B> {
    let y = match *op {
        Op::Reduce(reduce, dim) => match reduce {
            Reduce::Sum => x.sum_dim(dim),
            Reduce::Mean => x.mean_dim(dim),
            Reduce::Prod => x.prod_dim(dim),
            Reduce::Max => x.max_dim(dim),
            Reduce::Min => x.min_dim(dim),
            Reduce::MaxAbs => x.max_abs_dim(dim),
            Reduce::Var => x.var(dim),
            Reduce::VarBias => x.var_bias(dim),
            Reduce::Any | Reduce::All => panic!("of truth values only"),
        },
        Op::ReduceAll(reduce) => {
            let y = match reduce {
                Reduce::Sum => x.sum(),
                Reduce::Mean => x.mean(),
                Reduce::Prod => x.prod(),
                Reduce::Max => x.max(),
                Reduce::Min => x.min(),
                Reduce::MaxAbs => x.max_abs(),
                _ => panic!("of one dimension only"),
            };
            return Value::Float(plain(y));
        }
        Op::SumDims(ref dims) => x.sum_dims(dims),
        Op::ArgMax(dim) => return long(x.argmax(dim)),
        Op::ArgMin(dim) => return long(x.argmin(dim)),
        Op::Scan(scan, dim) => match scan {
            Scan::Sum => x.cumsum(dim),
            Scan::Prod => x.cumprod(dim),
            Scan::Max => x.cummax(dim),
            Scan::Min => x.cummin(dim),
        },
        Op::Sort(dim, false) => x.sort(dim),
        Op::Sort(dim, true) => x.sort_descending(dim),
        Op::ArgSort(dim, false) => return long(x.argsort(dim)),
        Op::ArgSort(dim, true) => return long(x.argsort_descending(dim)),
        Op::TopK(k, dim) => x.topk(k, dim),
        _ => unreachable!("told apart before"),
    };
    Value::Float(plain(y))
}

fn ordered_int<B: Backend, const D: usize>(op: &Op, x: Tensor<B, D, Int>) -> Value<B> {
    let y = match *op {
        Op::Reduce(Reduce::Sum, dim) => x.sum_dim(dim),
        Op::Reduce(Reduce::Max, dim) => x.max_dim(dim),
        Op::Reduce(Reduce::Min, dim) => x.min_dim(dim),
        Op::ReduceAll(Reduce::Sum) => return Value::Int(x.sum().into_primitive()),
        Op::ReduceAll(Reduce::Max) => return Value::Int(x.max().into_primitive()),
        Op::ReduceAll(Reduce::Min) => return Value::Int(x.min().into_primitive()),
        Op::SumDims(ref dims) => x.sum_dims(dims),
        Op::ArgMax(dim) => return long(x.argmax(dim)),
        Op::ArgMin(dim) => return long(x.argmin(dim)),
        Op::Scan(Scan::Sum, dim) => x.cumsum(dim),
        Op::Scan(Scan::Max, dim) => x.cummax(dim),
        Op::Scan(Scan::Min, dim) => x.cummin(dim),
        Op::Sort(dim, false) => x.sort(dim),
        Op::Sort(dim, true) => x.sort_descending(dim),
        Op::TopK(k, dim) => x.topk(k, dim),
        _ => panic!("of floats only"),
    };
    Value::Int(y.into_primitive())
}

fn reduced_bool<B: Backend, const D: usize>(op: &Op, x: Tensor<B, D, Bool>) -> Value<B> {
    Value::Bool(match *op {
        Op::Reduce(Reduce::Any, dim) => x.any_dim(dim).into_primitive(),
        Op::Reduce(Reduce::All, dim) => x.all_dim(dim).into_primitive(),
        Op::ReduceAll(Reduce::Any) => x.any().into_primitive(),
        Op::ReduceAll(Reduce::All) => x.all().into_primitive(),
        _ => panic!("not of truth values"),
    })
}

fn lines<B: Backend, const D: usize>(op: &Op, x: Tensor<B, D>) -> Tensor<B, D> {
    match op {
        Op::MaxWithIndices(dim) => {
            let (values, at) = x.max_dim_with_indices(*dim);
            values + at.cast(FloatDType::F64).mul_scalar(0.25)
        }
        Op::Soft(soft, dim) => match soft {
            Soft::Max => activation::softmax(x, *dim),
            Soft::LogMax => activation::log_softmax(x, *dim),
            Soft::Min => activation::softmin(x, *dim),
            Soft::Quiet => activation::quiet_softmax(x, *dim),
        },
        Op::Pad(widths, mode) => x.pad(&widths[..], [PadMode::Constant(0.5), PadMode::Reflect, PadMode::Edge][*mode as usize]),
        Op::Tril(diagonal) => x.tril(*diagonal),
        Op::Triu(diagonal) => x.triu(*diagonal),
        Op::SliceFill(all, value) => x.slice_fill(&slices(all)[..], *value),
        _ => unreachable!("told apart before"),
    }
}

/// Indices into `n` elements.
fn indices<B: Backend, const D: usize>(indices: B::IntTensorPrimitive, n: usize) -> Tensor<B, D, Int> {
    Tensor::<B, D, Int>::from_primitive(indices).abs().remainder_scalar(n as i64)
}

fn assign<B: Backend, const D: usize>(op: &Op, x: Tensor<B, D>, at: B::IntTensorPrimitive, values: Tensor<B, D>) -> Tensor<B, D> {
    match *op {
        Op::SelectAssign(dim) => {
            let n = x.dims()[dim];
            x.select_assign(dim, indices::<B, 1>(at, n), values, IndexingUpdateOp::Add)
        }
        Op::Scatter(dim) => {
            let n = x.dims()[dim];
            x.scatter(dim, indices::<B, D>(at, n), values, IndexingUpdateOp::Add)
        }
        _ => unreachable!("told apart before"),
    }
}

fn slices(all: &Slices) -> Vec<Slice> {
    all.iter().map(|(start, end, step)| Slice::new(*start, Some(*end), *step)).collect()
}

/// Operations that move elements, of any kind.
fn moved<B: Backend, K: BasicOps<B>>(op: &Op, all: Vec<K::Primitive>, rank: usize) -> K::Primitive {
    let shape = |shape: &[usize]| Shape::from(shape.to_vec());
    if let Op::Cat(dim) = op {
        return by_rank!(rank, D => Tensor::<B, D, K>::cat(all.into_iter().map(Tensor::from_primitive).collect(), *dim).into_primitive());
    }
    let mut all = all.into_iter();
    let x = all.next().expect("an operand");
    match op {
        Op::Reshape(to) => K::reshape(x, shape(to)),
        Op::Permute(order) => K::permute(x, order),
        Op::Expand(to) => K::expand(x, shape(to)),
        Op::Flip(dims) => K::flip(x, dims),
        Op::Unfold(dim, size, step) => K::unfold(x, *dim, *size, *step),
        Op::Slice(cut) => by_rank!(rank, D => Tensor::<B, D, K>::from_primitive(x).slice(&slices(cut)[..]).into_primitive()),
        Op::SliceAssign(cut) => {
            let values = all.next().expect("values");
            by_rank!(rank, D => {
                Tensor::<B, D, K>::from_primitive(x).slice_assign(&slices(cut)[..], Tensor::from_primitive(values)).into_primitive()
            })
        }
        Op::Repeat(dim, times) => by_rank!(rank, D => Tensor::<B, D, K>::from_primitive(x).repeat_dim(*dim, *times).into_primitive()),
        Op::Roll(shift, dim) => by_rank!(rank, D => Tensor::<B, D, K>::from_primitive(x).roll_dim(*shift, *dim).into_primitive()),
        _ => unreachable!("told apart before"),
    }
}

/// Operations that pick elements by a mask or by indices.
fn picked<B: Backend, K: BasicOps<B> + TensorKind<B>>(
    op: &Op,
    x: K::Primitive,
    by: Value<B>,
    other: Option<K::Primitive>,
    rank: usize,
) -> K::Primitive {
    by_rank!(rank, D => {
        let x = Tensor::<B, D, K>::from_primitive(x);
        let y = match *op {
            Op::MaskWhere => x.mask_where(Tensor::from_primitive(by.bool()), Tensor::from_primitive(other.expect("values"))),
            Op::MaskFill(c) => x.mask_fill(Tensor::from_primitive(by.bool()), c),
            Op::Select(dim) => {
                let n = x.dims()[dim];
                x.select(dim, indices::<B, 1>(by.int(), n))
            }
            Op::Gather(dim) => {
                let n = x.dims()[dim];
                x.gather(dim, indices::<B, D>(by.int(), n))
            }
            _ => unreachable!("told apart before"),
        };
        y.into_primitive()
    })
}
