//! Makes a program that fails smaller, as long as it fails.

use super::interpret::Value;
use super::replay::replay;
use super::{Input, Kind, Node, Op, Program, Sink};

/// A smaller program for which `fails` holds, as it does for `program`.
pub fn shrink(program: Program, mut fails: impl FnMut(&Program) -> bool) -> Program {
    let mut smallest = program;
    'again: loop {
        for candidate in candidates(&smallest) {
            if replay(&candidate).is_some() && fails(&candidate) {
                smallest = candidate;
                continue 'again;
            }
        }
        return smallest;
    }
}

/// Programs a little smaller, the much smaller ones first.
fn candidates(program: &Program) -> Vec<Program> {
    let mut all = Vec::new();
    let Some(replayed) = replay(program) else { return all };
    let changed = |change: &dyn Fn(&mut Program)| {
        let mut candidate = program.clone();
        change(&mut candidate);
        tidy(candidate)
    };
    // The loss of one value.
    for (i, value) in replayed.values.iter().enumerate() {
        if value.kind() == Kind::Float && program.sinks != [(i, Sink::Sum)] && matches!(program.nodes[i], Node::Step(..)) {
            all.push(changed(&|p| p.sinks = vec![(i, Sink::Sum)]));
        }
    }
    // One term of the loss, and none but one.
    if program.sinks.len() > 1 {
        for i in 0..program.sinks.len() {
            all.push(changed(&|p| p.sinks = vec![p.sinks[i]]));
        }
        for i in 0..program.sinks.len() {
            all.push(changed(&|p| p.sinks = p.sinks.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, s)| *s).collect()));
        }
    }
    // A fresh input for a step, or one of its operands.
    for (i, node) in program.nodes.iter().enumerate().rev() {
        let Node::Step(_, args) = node else { continue };
        let value: &Value<burn::backend::Flex> = &replayed.values[i];
        let kind = value.kind();
        for arg in args {
            if replayed.values[*arg].kind() == kind && replayed.values[*arg].shape() == value.shape() {
                all.push(changed(&|p| rename(p, i, *arg)));
            }
        }
        let input =
            |layout| Input { kind, shape: value.shape(), values: i as u64 + 1, layout, blocks: false, tracked: kind == Kind::Float };
        for layout in [0, 1, 2, 3, 5, 8] {
            all.push(changed(&|p| p.nodes[i] = Node::Input(input(layout))));
        }
        // The loss of an operand, where the step is its end.
        for arg in args {
            if replayed.values[*arg].kind() == Kind::Float && program.sinks.iter().any(|(sink, _)| *sink == i) {
                all.push(changed(&|p| p.sinks.iter_mut().filter(|(sink, _)| *sink == i).for_each(|(sink, _)| *sink = *arg)));
            }
        }
    }
    if program.checkpointing {
        all.push(changed(&|p| p.checkpointing = false));
    }
    for axis in 0..4 {
        for ranks in 1..program.grid[axis] {
            all.push(changed(&|p| p.grid[axis] = ranks));
        }
    }
    for (i, (_, sink)) in program.sinks.iter().enumerate() {
        if *sink != Sink::Sum {
            all.push(changed(&|p| p.sinks[i].1 = Sink::Sum));
        }
    }
    for (i, node) in program.nodes.iter().enumerate() {
        let Node::Input(input) = node else { continue };
        let mut simpler: Vec<Input> = Vec::new();
        if input.layout != 0 {
            simpler.push(Input { layout: 0, ..input.clone() });
            simpler.extend((1..input.layout.min(9)).map(|layout| Input { layout, ..input.clone() }));
        }
        if input.blocks {
            simpler.push(Input { blocks: false, ..input.clone() });
        }
        if input.tracked {
            simpler.push(Input { tracked: false, ..input.clone() });
        }
        simpler.into_iter().for_each(|input| all.push(changed(&|p| p.nodes[i] = Node::Input(input.clone()))));
    }
    all.extend(smaller_extents(program));
    for (i, node) in program.nodes.iter().enumerate() {
        let Node::Step(op, args) = node else { continue };
        simpler_ops(op).into_iter().for_each(|op| all.push(changed(&|p| p.nodes[i] = Node::Step(op.clone(), args.clone()))));
    }
    all
}

/// Inputs with one extent that is smaller: of each by itself, and of all that have this extent at once.
fn smaller_extents(program: &Program) -> Vec<Program> {
    let mut all = Vec::new();
    let mut extents: Vec<usize> = Vec::new();
    for node in &program.nodes {
        if let Node::Input(input) = node {
            extents.extend(&input.shape);
        }
    }
    extents.sort_unstable();
    extents.dedup();
    for extent in extents.into_iter().filter(|n| *n > 1) {
        for to in 1..extent {
            let mut candidate = program.clone();
            for node in &mut candidate.nodes {
                let replace = |n: &mut usize| *n = if *n == extent { to } else { *n };
                match node {
                    Node::Input(input) => input.shape.iter_mut().for_each(replace),
                    Node::Step(Op::Expand(shape) | Op::Reshape(shape) | Op::Full(_, shape), _) => shape.iter_mut().for_each(replace),
                    Node::Step(..) => {}
                }
            }
            all.push(candidate);
        }
    }
    for (i, node) in program.nodes.iter().enumerate() {
        let Node::Input(input) = node else { continue };
        for dim in 0..input.shape.len() {
            for to in 1..input.shape[dim] {
                let mut candidate = program.clone();
                if let Node::Input(input) = &mut candidate.nodes[i] {
                    input.shape[dim] = to;
                }
                all.push(candidate);
            }
        }
    }
    all
}

/// The same operation with less of everything.
fn simpler_ops(op: &Op) -> Vec<Op> {
    let mut all = Vec::new();
    match op {
        Op::Slice(slices) | Op::SliceAssign(slices) => {
            for i in 0..slices.len() {
                for step in [1, -1, 2].into_iter().take_while(|step| *step != slices[i].2) {
                    let mut simpler = slices.clone();
                    simpler[i].2 = step;
                    all.push(if matches!(op, Op::Slice(_)) { Op::Slice(simpler) } else { Op::SliceAssign(simpler) });
                }
            }
        }
        Op::Conv(window) | Op::Transposed(window) | Op::PaddedConv(window) | Op::MaxPool(window) | Op::AvgPool(window) => {
            let mut add = |change: &dyn Fn(&mut super::Window)| {
                let mut simpler = window.clone();
                change(&mut simpler);
                if simpler == *window {
                    return;
                }
                all.push(match op {
                    Op::Conv(_) => Op::Conv(simpler),
                    Op::Transposed(_) => Op::Transposed(simpler),
                    Op::PaddedConv(_) => Op::PaddedConv(simpler),
                    Op::MaxPool(_) => Op::MaxPool(simpler),
                    _ => Op::AvgPool(simpler),
                });
            };
            for i in 0..window.kernel.len() {
                add(&|w| w.stride[i] = 1);
                add(&|w| w.dilation[i] = 1);
                add(&|w| w.padding[i] = (0, 0));
                add(&|w| w.longer[i] = 0);
                add(&|w| w.kernel[i] = 1);
            }
            add(&|w| w.mode = 0);
            add(&|w| w.slope = 1.0);
            add(&|w| w.ceil = false);
            add(&|w| w.include = false);
        }
        Op::Flip(dims) if dims.len() > 1 => all.extend(dims.iter().map(|d| Op::Flip(vec![*d]))),
        Op::SumDims(dims) if dims.len() > 1 => all.extend(dims.iter().map(|d| Op::SumDims(vec![*d]))),
        _ => {}
    }
    all
}

/// Uses `to` wherever `from` is used.
fn rename(program: &mut Program, from: usize, to: usize) {
    for node in &mut program.nodes {
        if let Node::Step(_, args) = node {
            args.iter_mut().filter(|a| **a == from).for_each(|a| *a = to);
        }
    }
    program.sinks.iter_mut().filter(|(i, _)| *i == from).for_each(|(i, _)| *i = to);
}

/// Without the values that the loss does not need.
fn tidy(mut program: Program) -> Program {
    let mut needed = vec![false; program.nodes.len()];
    program.sinks.iter().for_each(|(i, _)| needed[*i] = true);
    for i in (0..program.nodes.len()).rev() {
        if let (true, Node::Step(_, args)) = (needed[i], &program.nodes[i]) {
            args.iter().for_each(|a| needed[*a] = true);
        }
    }
    let mut numbers = Vec::new();
    let mut next = 0;
    for needed in &needed {
        numbers.push(next);
        next += usize::from(*needed);
    }
    let mut keep = needed.iter();
    program.nodes.retain(|_| *keep.next().expect("one each"));
    for node in &mut program.nodes {
        if let Node::Step(_, args) = node {
            args.iter_mut().for_each(|a| *a = numbers[*a]);
        }
    }
    program.sinks.iter_mut().for_each(|(i, _)| *i = numbers[*i]);
    program
}
