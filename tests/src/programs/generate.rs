//! Draws programs.

use super::interpret::Value;
use super::replay::{Replay, replay};
use super::{
    Binary, Compare, Draws, Input, Kind, Logic, Node, Op, Program, Random, Reduce, Scalar, Scan, Sink, Slices, Soft, Unary, Window,
};

/// A program of 4 to 12 operations. The same seed gives the same program.
pub fn generate(seed: u64) -> Program {
    let mut draws = Draws(seed);
    loop {
        if let Some(program) = attempt(seed, &mut draws) {
            return program;
        }
    }
}

/// All grids of 1 to 8 ranks.
fn grids() -> Vec<[usize; 4]> {
    let all = (0..8 * 8 * 8 * 8).map(|i: usize| [i / 512 + 1, i / 64 % 8 + 1, i / 8 % 8 + 1, i % 8 + 1]);
    all.filter(|grid| grid.iter().product::<usize>() <= 8).collect()
}

fn attempt(seed: u64, draws: &mut Draws) -> Option<Program> {
    // Few ranks more often than many: most faults need two.
    let most = draws.pick(&[1, 2, 2, 2, 3, 4, 4, 4, 6, 8, 8]);
    let grids: Vec<[usize; 4]> = grids().into_iter().filter(|grid| grid.iter().product::<usize>() == most).collect();
    let program = Program { seed, grid: draws.pick(&grids), checkpointing: draws.once_in(3), nodes: Vec::new(), sinks: Vec::new() };
    let mut writer = Writer { draws: Draws(draws.any()), program, replay: Replay::new(seed) };
    let shape = writer.shape();
    let first = writer.fresh(Kind::Float, shape);
    if let Node::Input(input) = &mut writer.program.nodes[first] {
        input.tracked = true;
    }
    let steps = writer.draws.within(4, 12);
    for _ in 0..steps * 12 {
        if writer.program.steps() == steps {
            break;
        }
        let before = writer.program.nodes.len();
        let taken = match writer.propose() {
            Some((op, args)) => writer.step(op, args),
            None => false,
        };
        if !taken {
            writer.program.nodes.truncate(before);
            writer.replay.truncate(before);
        }
    }
    let program = writer.finish(first);
    // Once more from the start, with the random numbers that it will draw.
    (program.steps() >= steps.min(4) && replay(&program).is_some()).then_some(program)
}

struct Writer {
    draws: Draws,
    program: Program,
    replay: Replay,
}

impl Writer {
    /// A shape of rank 1 to 5, seldom with an extent of 1.
    fn shape(&mut self) -> Vec<usize> {
        let rank = self.draws.pick(&[1, 2, 2, 3, 3, 3, 4, 4, 5, 5]);
        self.shape_of(rank)
    }

    fn shape_of(&mut self, rank: usize) -> Vec<usize> {
        loop {
            let shape: Vec<usize> = (0..rank).map(|_| self.draws.pick(&[1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 9])).collect();
            if shape.iter().product::<usize>() <= 240 {
                return shape;
            }
        }
    }

    /// A new input.
    fn fresh(&mut self, kind: Kind, shape: Vec<usize>) -> usize {
        let layout = if self.draws.once_in(5) { 0 } else { self.draws.any() >> 8 };
        let tracked = kind == Kind::Float && !self.draws.once_in(4);
        let input = Input { kind, shape, values: self.draws.any() >> 8, layout, blocks: self.draws.once_in(3), tracked };
        self.replay.input(&input);
        self.program.nodes.push(Node::Input(input));
        self.program.nodes.len() - 1
    }

    /// A weight: whole on every rank but for a few.
    fn weight(&mut self, shape: Vec<usize>) -> usize {
        let i = self.operand(Kind::Float, shape);
        let usual = !self.draws.once_in(4);
        if let (true, Node::Input(input)) = (usual && i + 1 == self.program.nodes.len(), &mut self.program.nodes[i]) {
            input.layout = 0;
        }
        i
    }

    fn shape_at(&self, i: usize) -> Vec<usize> {
        self.replay.values[i].shape()
    }

    /// An earlier value that `fits`, the latest more often.
    fn earlier(&mut self, fits: impl Fn(&Value<burn::backend::Flex>) -> bool) -> Option<usize> {
        let all: Vec<usize> = (0..self.replay.values.len()).filter(|i| fits(&self.replay.values[*i])).collect();
        if all.is_empty() {
            return None;
        }
        let late = self.draws.once_in(3);
        Some(if late { self.draws.pick(&all) } else { all[all.len() - 1 - self.draws.below(all.len().min(3))] })
    }

    fn of(&mut self, kind: Kind) -> Option<usize> {
        self.earlier(|v| v.kind() == kind)
    }

    /// A float, or seldom an integer or a truth value.
    fn any(&mut self) -> Option<usize> {
        let kind = self.draws.pick(&[Kind::Float, Kind::Float, Kind::Float, Kind::Float, Kind::Int, Kind::Bool]);
        self.of(kind).or_else(|| self.of(Kind::Float))
    }

    /// A value of a kind and a shape: an earlier one, or new.
    fn operand(&mut self, kind: Kind, shape: Vec<usize>) -> usize {
        let old = self.draws.once_in(2);
        let found = if old { self.earlier(|v| v.kind() == kind && v.shape() == shape) } else { None };
        found.unwrap_or_else(|| self.fresh(kind, shape))
    }

    /// A value that broadcasts with `shape`: an earlier one, or new.
    fn partner(&mut self, kind: Kind, shape: &[usize]) -> usize {
        let broadcasts = |other: &[usize]| other.len() == shape.len() && shape.iter().zip(other).all(|(a, b)| a == b || *a == 1 || *b == 1);
        let old = !self.draws.once_in(3);
        let found = if old { self.earlier(|v| v.kind() == kind && broadcasts(&v.shape())) } else { None };
        found.unwrap_or_else(|| {
            let narrow = self.draws.once_in(2);
            let shape = shape.iter().map(|n| if narrow && self.draws.once_in(2) { 1 } else { *n }).collect();
            self.fresh(kind, shape)
        })
    }

    /// Of a float of `rank`, new if there is none.
    fn ranked(&mut self, ranks: &[usize]) -> usize {
        match self.earlier(|v| v.kind() == Kind::Float && ranks.contains(&v.shape().len())) {
            Some(i) if !self.draws.once_in(4) => i,
            _ => {
                let rank = self.draws.pick(ranks);
                let shape = self.shape_of(rank);
                self.fresh(Kind::Float, shape)
            }
        }
    }

    fn step(&mut self, op: Op, args: Vec<usize>) -> bool {
        let taken = self.replay.step(&op, &args);
        if taken {
            self.program.nodes.push(Node::Step(op, args));
        }
        taken
    }

    /// What nothing else uses comes into the loss, and some of the rest.
    fn finish(mut self, first: usize) -> Program {
        let used: Vec<usize> =
            self.program.nodes.iter().flat_map(|node| if let Node::Step(_, args) = node { args.clone() } else { Vec::new() }).collect();
        for i in 0..self.program.nodes.len() {
            if self.replay.values[i].kind() != Kind::Float && !used.contains(&i) && self.step(Op::ToFloat, vec![i]) {
                self.program.sinks.push((self.program.nodes.len() - 1, Sink::Sum));
            }
            let float = self.replay.values[i].kind() == Kind::Float;
            if float && i != first && (!used.contains(&i) || self.draws.once_in(8)) {
                let sink = match self.draws.below(7) {
                    0 => Sink::Sum,
                    1 => Sink::Mean,
                    2 | 3 => Sink::Squares,
                    4 | 5 => {
                        let shape = self.shape_at(i);
                        Sink::SquaredSums(self.dim(&shape))
                    }
                    _ => Sink::Weighted(self.draws.any() >> 8),
                };
                self.program.sinks.push((i, sink));
            }
        }
        // So that the loss depends on something.
        self.program.sinks.push((first, Sink::Squares));
        self.program
    }

    /// A dimension of a shape.
    fn dim(&mut self, shape: &[usize]) -> usize {
        self.draws.below(shape.len())
    }

    fn propose(&mut self) -> Option<(Op, Vec<usize>)> {
        match self.draws.below(100) {
            0..=13 => self.pointwise(),
            14..=19 => self.truth(),
            20..=33 => self.reduction(),
            34..=57 => self.movement(),
            58..=65 => self.indexing(),
            66..=70 => self.product(),
            71..=77 => self.lines(),
            78..=80 => self.random(),
            81..=83 => self.constant(),
            _ => self.window(),
        }
    }

    fn pointwise(&mut self) -> Option<(Op, Vec<usize>)> {
        let f = match self.draws.below(8) {
            0..=2 => {
                use Unary::*;
                let f = self.draws.pick(&[
                    Neg, Abs, Exp, Sin, Cos, Tanh, Square, Recip, Sqrt, Log, Log1p, Erf, Sigmoid, LogSigmoid, Relu, LeakyRelu, Gelu, Silu,
                    Softplus, Sign, Detach,
                ]);
                return Some((Op::Unary(f), vec![self.of(Kind::Float)?]));
            }
            3 => {
                let i = if self.draws.once_in(4) { self.of(Kind::Int) } else { self.of(Kind::Float) }?;
                let float = self.replay.values[i].kind() == Kind::Float;
                let (f, c) = match (self.draws.below(5), float) {
                    (0, _) => (Scalar::Add, self.draws.pick(&[-2.0, 1.0, 3.0])),
                    (1, true) => (Scalar::Mul, self.draws.pick(&[-1.5, 0.5, 0.0])),
                    (1, false) => (Scalar::Mul, self.draws.pick(&[-1.0, 2.0])),
                    (2, true) => (Scalar::Powi, self.draws.pick(&[2.0, 3.0])),
                    (2, false) => (Scalar::Remainder, self.draws.pick(&[2.0, 5.0])),
                    (3, _) => (Scalar::ClampMin, self.draws.pick(&[-1.0, 0.0])),
                    _ => (Scalar::ClampMax, self.draws.pick(&[0.0, 1.0])),
                };
                return Some((Op::Scalar(f, c), vec![i]));
            }
            4 if self.draws.once_in(2) => {
                let i = self.of(Kind::Int)?;
                let shape = self.shape_at(i);
                let f = self.draws.pick(&[Binary::Add, Binary::Sub, Binary::Mul, Binary::MaxPair, Binary::MinPair]);
                return Some((Op::Binary(f), vec![i, self.partner(Kind::Int, &shape)]));
            }
            _ => self.draws.pick(&[
                Binary::Add,
                Binary::Add,
                Binary::Sub,
                Binary::Mul,
                Binary::Mul,
                Binary::Mul,
                Binary::Div,
                Binary::MaxPair,
                Binary::MinPair,
                Binary::Atan2,
                Binary::Powf,
            ]),
        };
        let i = self.of(Kind::Float)?;
        let shape = self.shape_at(i);
        let j = self.partner(Kind::Float, &shape);
        Some((Op::Binary(f), if self.draws.once_in(2) { vec![i, j] } else { vec![j, i] }))
    }

    fn truth(&mut self) -> Option<(Op, Vec<usize>)> {
        use self::Compare::*;
        match self.draws.below(8) {
            0 | 1 => {
                let kind = self.draws.pick(&[Kind::Float, Kind::Float, Kind::Int]);
                let i = self.of(kind)?;
                let shape = self.shape_at(i);
                let j = self.partner(kind, &shape);
                Some((Op::Compare(self.draws.pick(&[Greater, GreaterEqual, Lower, LowerEqual, Equal, NotEqual])), vec![i, j]))
            }
            2 => {
                let kind = self.draws.pick(&[Kind::Float, Kind::Int]);
                let c = self.draws.pick(&[0.0, 1.0]);
                Some((Op::CompareScalar(self.draws.pick(&[Greater, LowerEqual, Equal, NotEqual]), c), vec![self.of(kind)?]))
            }
            3 => {
                let i = self.of(Kind::Bool)?;
                if self.draws.once_in(3) {
                    return Some((Op::Not, vec![i]));
                }
                let shape = self.shape_at(i);
                let j = self.operand(Kind::Bool, shape);
                Some((Op::Logic(self.draws.pick(&[Logic::And, Logic::Or, Logic::Xor])), vec![i, j]))
            }
            4 => {
                let kind = self.draws.pick(&[Kind::Int, Kind::Bool]);
                Some((Op::ToFloat, vec![self.of(kind)?]))
            }
            5 => {
                let kind = self.draws.pick(&[Kind::Float, Kind::Bool]);
                Some((Op::ToInt, vec![self.of(kind)?]))
            }
            _ => {
                let kind = self.draws.pick(&[Kind::Float, Kind::Float, Kind::Int]);
                let i = self.of(kind)?;
                let shape = self.shape_at(i);
                let mask = self.operand(Kind::Bool, shape.clone());
                if self.draws.once_in(2) {
                    return Some((Op::MaskFill(self.draws.pick(&[0.0, 2.0])), vec![i, mask]));
                }
                let values = self.operand(kind, shape);
                Some((Op::MaskWhere, vec![i, mask, values]))
            }
        }
    }

    fn reduction(&mut self) -> Option<(Op, Vec<usize>)> {
        use self::Reduce::*;
        let i = self.any()?;
        let shape = self.shape_at(i);
        let dim = self.dim(&shape);
        let kind = self.replay.values[i].kind();
        let reduce = match kind {
            // Sums over split dimensions are left to be made.
            Kind::Float => self.draws.pick(&[Sum, Sum, Sum, Sum, Mean, Mean, Prod, Max, Min, MaxAbs, Var, VarBias]),
            Kind::Int => self.draws.pick(&[Sum, Sum, Max, Min]),
            Kind::Bool => self.draws.pick(&[Any, All]),
        };
        let op = match self.draws.below(8) {
            0 if !matches!(reduce, Var | VarBias) => Op::ReduceAll(reduce),
            1 if kind != Kind::Bool => {
                let dims: Vec<usize> = (0..shape.len()).filter(|_| self.draws.once_in(2)).collect();
                if dims.is_empty() {
                    return None;
                }
                Op::SumDims(dims)
            }
            2 if kind != Kind::Bool => self.draws.pick(&[Op::ArgMax(dim), Op::ArgMin(dim)]),
            3 if kind == Kind::Float => Op::MaxWithIndices(dim),
            _ => Op::Reduce(reduce, dim),
        };
        if shape[dim] == 1 && matches!(reduce, Var) {
            return None;
        }
        Some((op, vec![i]))
    }

    /// A slice of each dimension that is not empty; with steps where `steps`.
    fn slices(&mut self, shape: &[usize], steps: bool) -> Slices {
        let mut slice = |n: usize| {
            if self.draws.once_in(3) {
                return (0, n as isize, 1);
            }
            let start = self.draws.below(n);
            let end = self.draws.within(start + 1, n);
            let step = if steps { self.draws.pick(&[1, 1, 1, 2, 3, -1, -2]) } else { 1 };
            (start as isize, end as isize, step)
        };
        shape.iter().map(|n| slice(*n)).collect()
    }

    /// Another shape of as many elements.
    fn reshaped(&mut self, shape: &[usize]) -> Vec<usize> {
        // Merge neighbours and cut dimensions, a few times.
        let mut to = shape.to_vec();
        for _ in 0..self.draws.within(1, 4) {
            let at = self.draws.below(to.len());
            match self.draws.below(3) {
                0 if at + 1 < to.len() => {
                    let next = to.remove(at + 1);
                    to[at] *= next;
                }
                1 if to.len() < 5 => {
                    let factors: Vec<usize> = (1..=to[at]).filter(|f| to[at].is_multiple_of(*f)).collect();
                    let factor = self.draws.pick(&factors);
                    to[at] /= factor;
                    to.insert(at, factor);
                }
                2 if to[at] == 1 && to.len() > 1 => {
                    to.remove(at);
                }
                _ => {}
            }
        }
        to
    }

    fn movement(&mut self) -> Option<(Op, Vec<usize>)> {
        let i = self.any()?;
        let kind = self.replay.values[i].kind();
        let shape = self.shape_at(i);
        let dim = self.dim(&shape);
        let op = match self.draws.below(19) {
            0..=3 => Op::Reshape(self.reshaped(&shape)),
            4 | 5 => {
                let mut order: Vec<usize> = (0..shape.len()).collect();
                for at in (1..order.len()).rev() {
                    order.swap(at, self.draws.below(at + 1));
                }
                Op::Permute(order)
            }
            6 | 7 => Op::Slice(self.slices(&shape, true)),
            8 => {
                // Flex assigns with a step of 1, or -1 or more along some dimensions.
                let steps = self.draws.once_in(2);
                let slices = self.slices(&shape, steps);
                if kind == Kind::Float && self.draws.once_in(3) {
                    return Some((Op::SliceFill(slices, 0.5), vec![i]));
                }
                let length = |(start, end, step): &(isize, isize, isize)| (end - start).unsigned_abs().div_ceil(step.unsigned_abs());
                let values = self.operand(kind, slices.iter().map(length).collect());
                return Some((Op::SliceAssign(slices), vec![i, values]));
            }
            9 | 10 => {
                let others = self.draws.within(1, 2);
                let mut all = vec![i];
                for _ in 0..others {
                    let mut other = shape.clone();
                    if self.draws.once_in(2) {
                        other[dim] = self.draws.within(1, 4);
                    }
                    all.push(self.operand(kind, other));
                }
                let turn = self.draws.below(all.len());
                all.rotate_left(turn);
                return Some((Op::Cat(dim), all));
            }
            11 => Op::Repeat(dim, self.draws.within(1, 3)),
            12 => {
                let mut to: Vec<usize> = shape.iter().map(|n| if *n == 1 { self.draws.within(1, 4) } else { *n }).collect();
                while to.len() < 5 && self.draws.once_in(3) {
                    to.insert(0, self.draws.within(1, 3));
                }
                Op::Expand(to)
            }
            13 => {
                let dims: Vec<usize> = (0..shape.len()).filter(|_| self.draws.once_in(2)).collect();
                if dims.is_empty() {
                    return None;
                }
                Op::Flip(dims)
            }
            14 => Op::Roll(self.draws.within(0, 8) as isize - 4, dim),
            15 | 16 if shape.len() < 5 => {
                let size = self.draws.within(1, shape[dim]);
                Op::Unfold(dim, size, self.draws.within(1, 3))
            }
            17 if kind == Kind::Float => {
                let mode = self.draws.below(3) as u8;
                let mut width = |n: usize| {
                    if self.draws.once_in(2) { 0 } else { self.draws.below(if mode == 1 { n.min(3) } else { 3 }) }
                };
                Op::Pad(shape.iter().map(|n| (width(*n), width(*n))).collect(), mode)
            }
            18 if kind == Kind::Float && shape.len() > 1 => {
                let diagonal = self.draws.within(0, 4) as i64 - 2;
                self.draws.pick(&[Op::Tril(diagonal), Op::Triu(diagonal)])
            }
            _ => return None,
        };
        Some((op, vec![i]))
    }

    fn indexing(&mut self) -> Option<(Op, Vec<usize>)> {
        let kind = self.draws.pick(&[Kind::Float, Kind::Float, Kind::Float, Kind::Int]);
        let i = self.of(kind)?;
        let shape = self.shape_at(i);
        let dim = self.dim(&shape);
        let n = self.draws.within(1, 5);
        let mut along = shape.clone();
        along[dim] = n;
        match self.draws.below(5) {
            0 => {
                let at = self.operand(Kind::Int, vec![n]);
                Some((Op::Select(dim), vec![i, at]))
            }
            1 if kind == Kind::Float => {
                let at = self.operand(Kind::Int, vec![n]);
                let values = self.operand(Kind::Float, along);
                Some((Op::SelectAssign(dim), vec![i, at, values]))
            }
            2 => {
                let at = self.operand(Kind::Int, along);
                Some((Op::Gather(dim), vec![i, at]))
            }
            3 if kind == Kind::Float => {
                let at = self.operand(Kind::Int, along.clone());
                let values = self.operand(Kind::Float, along);
                Some((Op::Scatter(dim), vec![i, at, values]))
            }
            _ => {
                let weights = self.ranked(&[2]);
                let shape = vec![self.draws.within(1, 4), self.draws.within(1, 4)];
                let at = self.operand(Kind::Int, shape);
                Some((Op::Embedding, vec![weights, at]))
            }
        }
    }

    fn product(&mut self) -> Option<(Op, Vec<usize>)> {
        let n = self.draws.within(1, 4);
        match self.draws.below(5) {
            0 => {
                let i = self.ranked(&[4]);
                let shape = self.shape_at(i);
                let key = self.operand(Kind::Float, vec![shape[0], shape[1], n, shape[3]]);
                let last = self.draws.within(1, 3);
                let value = self.operand(Kind::Float, vec![shape[0], shape[1], n, last]);
                Some((Op::Attention, vec![i, key, value]))
            }
            1 => {
                let i = self.of(Kind::Float)?;
                let k = *self.shape_at(i).last()?;
                let mut args = vec![i, self.weight(vec![k, n])];
                if self.draws.once_in(2) {
                    args.push(self.weight(vec![n]));
                }
                Some((Op::Linear, args))
            }
            _ => {
                let i = self.ranked(&[2, 3, 4, 5]);
                let mut shape = self.shape_at(i);
                let rank = shape.len();
                (shape[rank - 2], shape[rank - 1]) = (shape[rank - 1], n);
                if self.draws.once_in(3) {
                    shape[..rank - 2].iter_mut().for_each(|n| *n = 1);
                }
                let j = self.operand(Kind::Float, shape);
                Some((Op::Matmul, vec![i, j]))
            }
        }
    }

    fn lines(&mut self) -> Option<(Op, Vec<usize>)> {
        let kind = self.draws.pick(&[Kind::Float, Kind::Float, Kind::Float, Kind::Float, Kind::Int]);
        let i = self.of(kind)?;
        let shape = self.shape_at(i);
        let dim = self.dim(&shape);
        let down = self.draws.once_in(2);
        let op = match self.draws.below(6) {
            0 | 1 => Op::Scan(self.draws.pick(&[Scan::Sum, Scan::Prod, Scan::Max, Scan::Min]), dim),
            2 => Op::Sort(dim, down),
            3 if kind == Kind::Float => Op::ArgSort(dim, down),
            4 => Op::TopK(self.draws.within(1, shape[dim]), dim),
            _ if kind == Kind::Float => Op::Soft(self.draws.pick(&[Soft::Max, Soft::LogMax, Soft::Min, Soft::Quiet]), dim),
            _ => return None,
        };
        Some((op, vec![i]))
    }

    fn random(&mut self) -> Option<(Op, Vec<usize>)> {
        let random = self.draws.pick(&[Random::Ones, Random::Coins, Random::Uniform, Random::Normal]);
        let op = if self.draws.once_in(2) { Op::TimesRandom(random) } else { Op::Random(random) };
        Some((op, vec![self.of(Kind::Float)?]))
    }

    fn constant(&mut self) -> Option<(Op, Vec<usize>)> {
        let shape = if self.draws.once_in(2) {
            let i = self.of(Kind::Float)?;
            self.shape_at(i)
        } else {
            self.shape()
        };
        let op = match self.draws.below(6) {
            0 => Op::FullInt(self.draws.within(0, 2) as i64, shape),
            1 => Op::Arange(self.draws.within(2, 8) as i64),
            _ => Op::Full(self.draws.pick(&[0.0, 1.0, 1.0, -0.5]), shape),
        };
        Some((op, Vec::new()))
    }

    fn window(&mut self) -> Option<(Op, Vec<usize>)> {
        let what = self.draws.below(12);
        let i = match what {
            4 | 9 => self.ranked(&[5]),
            7 => self.ranked(&[3, 4]),
            8 => self.ranked(&[4]),
            10 => self.of(Kind::Float)?,
            _ => self.ranked(&[3, 4, 5]),
        };
        let shape = self.shape_at(i);
        let extents = shape.get(2..).unwrap_or_default().to_vec();
        let n = extents.len();
        let draw = |writer: &mut Writer, most: usize| (0..n).map(|_| writer.draws.below(most)).collect::<Vec<usize>>();
        let one = |all: Vec<usize>| all.into_iter().map(|k| k + 1).collect::<Vec<usize>>();
        let even: Vec<usize> = draw(self, 3);
        let mut window = Window {
            kernel: one(draw(self, 4)),
            stride: one(draw(self, 3)),
            dilation: one(draw(self, 2)),
            padding: even.iter().map(|p| (*p, *p)).collect(),
            longer: vec![0; n],
            groups: 1,
            mode: 0,
            slope: 1.0,
            ceil: self.draws.once_in(2),
            include: self.draws.once_in(2),
        };
        match what {
            0..=4 => {
                let channels = shape[1];
                if channels.is_multiple_of(2) && self.draws.once_in(3) {
                    window.groups = 2;
                }
                // The CPU backend's gradient of this weight is wrong where the stride leaves out inputs at the end.
                if n == 1 && window.groups > 1 {
                    window.stride = vec![1];
                }
                let out = self.draws.within(1, 2);
                let transposed = what == 2 || what == 3;
                let mut weight = if transposed { vec![channels, out] } else { vec![out * window.groups, channels / window.groups] };
                weight.extend(&window.kernel);
                let mut args = vec![i, self.weight(weight)];
                if self.draws.once_in(2) {
                    args.push(self.weight(vec![out * window.groups]));
                }
                if transposed {
                    window.longer = (0..n).map(|d| self.draws.below(window.stride[d].max(window.dilation[d]))).collect();
                    return Some((Op::Transposed(window), args));
                }
                if what == 4 {
                    let far = draw(self, 3);
                    window.padding.iter_mut().zip(far).for_each(|(pad, far)| pad.1 = far);
                    window.mode = self.draws.below(4) as u8;
                    window.slope = self.draws.pick(&[1.0, 0.1, 0.0]);
                    return Some((Op::PaddedConv(window), args));
                }
                Some((Op::Conv(window), args))
            }
            5 | 6 => {
                window.padding.iter_mut().zip(&window.kernel).for_each(|(pad, k)| *pad = (pad.0.min(k / 2), pad.0.min(k / 2)));
                if self.draws.once_in(2) {
                    return Some((Op::MaxPool(window), vec![i]));
                }
                // What the CPU backend's average of lines and planes divides by at a rounded-up end, its gradient forgets.
                window.include &= n == 3 || !window.ceil;
                Some((Op::AvgPool(window), vec![i]))
            }
            7 => Some((Op::Adaptive(extents.iter().map(|_| self.draws.within(1, 4)).collect()), vec![i])),
            8 => {
                let size = [self.draws.within(1, 8), self.draws.within(1, 8)];
                Some((Op::Interpolate(size, self.draws.below(3) as u8, self.draws.once_in(2)), vec![i]))
            }
            9 => match self.draws.below(3) {
                0 => {
                    let size = std::array::from_fn(|_| self.draws.within(1, 6));
                    Some((Op::Upsample(size, self.draws.once_in(2), self.draws.once_in(2)), vec![i]))
                }
                1 => {
                    let (gamma, beta) = (self.weight(vec![shape[1]]), self.weight(vec![shape[1]]));
                    Some((Op::BatchNorm(self.draws.pick(&[1.0, 0.1, 0.0])), vec![i, gamma, beta]))
                }
                _ => Some((Op::WholeVolume, vec![i])),
            },
            _ => {
                let last = *shape.last()?;
                let (gamma, beta) = (self.weight(vec![last]), self.weight(vec![last]));
                Some((Op::LayerNorm, vec![i, gamma, beta]))
            }
        }
    }
}
