//! Programs on plain Flex, step by step: which steps are valid, and whose results do not hang on rounding.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Flex;

use super::interpret::{self, Value};
use super::lab::Lab;
use super::{Binary, Input, Kind, Node, Op, Program, Reduce, Scalar, Scan, Unary};

/// Values further from 0 make rounding count.
const LARGEST: f64 = 1e4;
/// Integers beyond it might overflow soon.
const LARGEST_INT: f64 = 1e6;
/// Numbers nearer to each other may change their order by rounding.
const APART: f64 = 1e-8;
/// Larger tensors take too long.
const ELEMENTS: usize = 480;

/// The values of a program so far.
pub struct Replay {
    /// On the plain backend.
    pub values: Vec<Value<Flex>>,
    numbers: Vec<Vec<f64>>,
    /// Whether a value is the same to the bit however it is computed.
    exact: Vec<bool>,
}

impl Replay {
    /// Of a program with this seed.
    pub fn new(seed: u64) -> Replay {
        Flex::start(seed, &Default::default());
        Replay { values: Vec::new(), numbers: Vec::new(), exact: Vec::new() }
    }

    /// Adds an input.
    pub fn input(&mut self, input: &Input) {
        let value = interpret::input::<Flex>(input, [1; 4], &Default::default());
        self.keep(value, true);
    }

    fn keep(&mut self, value: Value<Flex>, exact: bool) {
        self.numbers.push(value.numbers());
        self.values.push(value);
        self.exact.push(exact);
    }

    /// Adds a step; whether it is valid, and small, and no rounding can change its result by much.
    pub fn step(&mut self, op: &Op, args: &[usize]) -> bool {
        let exact = args.iter().all(|a| self.exact[*a]);
        if (!exact && self.delicate(op, args)) || (product(op) && self.numbers[args[0]].iter().any(|v| *v < 1e-3)) {
            return false;
        }
        let operands: Vec<Value<Flex>> = args.iter().map(|a| self.values[*a].clone()).collect();
        let Ok(value) = catch_unwind(AssertUnwindSafe(|| interpret::apply::<Flex>(op, operands, &Default::default()))) else {
            return false;
        };
        let shape = value.shape();
        let elements: usize = shape.iter().product();
        if elements == 0 || elements > ELEMENTS || shape.len() > 5 || shape.is_empty() {
            return false;
        }
        let largest = if value.kind() == Kind::Int { LARGEST_INT } else { LARGEST };
        let numbers = value.numbers();
        if !numbers.iter().all(|v| v.abs() <= largest) {
            return false;
        }
        let exact = value.kind() != Kind::Float || (exact && keeps_bits(op));
        self.numbers.push(numbers);
        self.values.push(value);
        self.exact.push(exact);
        true
    }

    /// Forgets all but the first `n` values.
    pub fn truncate(&mut self, n: usize) {
        self.values.truncate(n);
        self.numbers.truncate(n);
        self.exact.truncate(n);
    }

    /// Whether rounding could change the result of `op` by much: a comparison of numbers that are nearly the same, a kink
    /// or a jump nearby.
    fn delicate(&self, op: &Op, args: &[usize]) -> bool {
        let x = || &self.numbers[args[0]];
        let near = |c: f64| x().iter().any(|v| (v - c).abs() < APART);
        match op {
            Op::Unary(Unary::Abs | Unary::Sign | Unary::Relu | Unary::LeakyRelu) => near(0.0),
            Op::Scalar(Scalar::ClampMin | Scalar::ClampMax, c) | Op::CompareScalar(_, c) => near(*c),
            Op::ToInt => x().iter().any(|v| (v * 3.0 - (v * 3.0).round()).abs() < APART),
            Op::Binary(Binary::MaxPair | Binary::MinPair) | Op::Compare(_) => {
                let difference = interpret::apply::<Flex>(
                    &Op::Binary(Binary::Sub),
                    args.iter().map(|a| self.values[*a].clone()).collect(),
                    &Default::default(),
                );
                self.values[args[0]].kind() == Kind::Float && difference.numbers().iter().any(|v| v.abs() < APART)
            }
            Op::Reduce(Reduce::MaxAbs, _) | Op::ReduceAll(Reduce::MaxAbs) => near(0.0) || close(x().iter().map(|v| v.abs())),
            Op::Reduce(Reduce::Max | Reduce::Min, _)
            | Op::ReduceAll(Reduce::Max | Reduce::Min)
            | Op::ArgMax(_)
            | Op::ArgMin(_)
            | Op::MaxWithIndices(_)
            | Op::Scan(Scan::Max | Scan::Min, _)
            | Op::Sort(..)
            | Op::ArgSort(..)
            | Op::TopK(..)
            | Op::MaxPool(_) => close(x().iter().copied()),
            _ => false,
        }
    }
}

/// Whether it is a product whose gradient Burn has for positive numbers only: it takes logarithms, or divides.
fn product(op: &Op) -> bool {
    matches!(op, Op::Reduce(Reduce::Prod, _) | Op::ReduceAll(Reduce::Prod) | Op::Scan(Scan::Prod, _))
}

/// Whether two of the numbers are nearly the same.
fn close(numbers: impl Iterator<Item = f64>) -> bool {
    let mut all: Vec<f64> = numbers.collect();
    all.sort_by(f64::total_cmp);
    all.windows(2).any(|pair| pair[1] - pair[0] < APART)
}

/// Whether an operation on the same bits gives the same bits, whatever the order of its computation.
fn keeps_bits(op: &Op) -> bool {
    match op {
        Op::Unary(f) => matches!(f, Unary::Neg | Unary::Abs | Unary::Relu | Unary::Sign | Unary::Detach),
        Op::Scalar(f, _) => *f != Scalar::Powi,
        Op::Binary(f) => matches!(f, Binary::Add | Binary::Sub | Binary::Mul | Binary::MaxPair | Binary::MinPair),
        Op::Reduce(f, _) | Op::ReduceAll(f) => matches!(f, Reduce::Max | Reduce::Min),
        Op::Scan(f, _) => matches!(f, Scan::Max | Scan::Min),
        Op::SumDims(_) | Op::Soft(..) | Op::Matmul | Op::Linear | Op::Attention | Op::Conv(_) | Op::Transposed(_) => false,
        Op::PaddedConv(_) | Op::AvgPool(_) | Op::Adaptive(_) | Op::Interpolate(..) | Op::Upsample(..) => false,
        Op::BatchNorm(_) | Op::LayerNorm | Op::SelectAssign(_) | Op::Scatter(_) => false,
        _ => true,
    }
}

/// A program's values on plain Flex; `None` if it is not valid, or its results hang on rounding.
pub fn replay(program: &Program) -> Option<Replay> {
    let mut replay = Replay::new(program.seed);
    for node in &program.nodes {
        match node {
            Node::Input(input) => replay.input(input),
            Node::Step(op, args) => {
                if !replay.step(op, args) {
                    return None;
                }
            }
        }
    }
    let floats = program.sinks.iter().all(|(i, _)| replay.values.get(*i).is_some_and(|v| v.kind() == Kind::Float));
    (floats && !program.sinks.is_empty()).then_some(replay)
}

/// The shapes of a program's values; none if it is not valid.
pub fn shapes(program: &Program) -> Vec<Vec<usize>> {
    replay(program).map(|replay| replay.values.iter().map(Value::shape).collect()).unwrap_or_default()
}
