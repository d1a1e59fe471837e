//! Boxes of dense tensors, written in place. Flex's own assignment copies the whole tensor first.

use std::ops::Range;

use burn_backend::{DType, Element, TensorMetadata};
use burn_flex::FlexTensor;
use burn_std::{bf16, f16};

use super::bytes;
use crate::copies::copied;

/// Combines the box `at` of `target` with `part`, of that box's shape: `f(target, part)` for each run of neighbours. Gives
/// both back where the target is shared or not dense, or of a type without this.
pub(crate) fn each_run<F: RunFn>(mut target: FlexTensor, at: &[Range<usize>], part: FlexTensor, f: F) -> Result<FlexTensor, Operands> {
    let shape = target.shape();
    let dense = target.is_contiguous() && target.layout().start_offset() == 0 && target.dtype() == part.dtype();
    let fits = at.len() == shape.rank() && at.iter().zip(&shape[..]).all(|(range, extent)| range.end <= *extent);
    if !dense || !fits || !part.shape().iter().copied().eq(at.iter().map(Range::len)) {
        return Err(Box::new((target, part)));
    }
    macro_rules! run {
        ($t:ty) => {{
            let Some(values) = target.try_storage_mut::<$t>() else { return Err(Box::new((target, part))) };
            copied(bytes(&part) * if part.is_contiguous() { 1 } else { 2 });
            let part = part.to_contiguous();
            walk(values, &shape, at, part.storage::<$t>(), |a, b| f.run(a, b));
        }};
    }
    match target.dtype() {
        DType::F32 => run!(f32),
        DType::F64 => run!(f64),
        DType::I64 => run!(i64),
        DType::I32 => run!(i32),
        DType::F16 => run!(f16),
        DType::BF16 => run!(bf16),
        _ => return Err(Box::new((target, part))),
    }
    Ok(target)
}

/// A target and a part that are given back.
pub(crate) type Operands = Box<(FlexTensor, FlexTensor)>;

/// What is done with each run.
pub(crate) trait RunFn {
    fn run<T: Element + Copy + std::ops::AddAssign>(&self, target: &mut [T], part: &[T]);
}

/// The part replaces what was there.
pub(crate) struct Assign;

impl RunFn for Assign {
    fn run<T: Element + Copy + std::ops::AddAssign>(&self, target: &mut [T], part: &[T]) {
        target.copy_from_slice(part);
    }
}

/// The part is added to what is there.
pub(crate) struct Add;

impl RunFn for Add {
    fn run<T: Element + Copy + std::ops::AddAssign>(&self, target: &mut [T], part: &[T]) {
        target.iter_mut().zip(part).for_each(|(t, p)| *t += *p);
    }
}

/// Calls `f` for each pair of runs: what lies together in both.
fn walk<T>(target: &mut [T], shape: &[usize], at: &[Range<usize>], part: &[T], f: impl Fn(&mut [T], &[T])) {
    // Trailing dimensions that the part covers make one run with a stretch of the one before them.
    let mut outer = shape.len();
    let (mut run, mut covered) = (1, 1);
    while outer > 0 {
        outer -= 1;
        run = covered * at[outer].len();
        covered *= shape[outer];
        if at[outer].len() != shape[outer] {
            break;
        }
    }
    if run == 0 {
        return;
    }
    let inner: usize = shape[outer..].iter().skip(1).product();
    let first = at.get(outer).map_or(0, |range| range.start * inner);
    for (index, part) in part.chunks_exact(run).enumerate() {
        let (mut rest, mut from, mut step) = (index, first, covered);
        for d in (0..outer).rev() {
            from += (at[d].start + rest % at[d].len()) * step;
            rest /= at[d].len();
            step *= shape[d];
        }
        f(&mut target[from..from + run], part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tensor(values: Vec<f32>, shape: &[usize]) -> FlexTensor {
        let layout = burn_flex::Layout::contiguous(burn_std::Shape::from(shape.to_vec()));
        FlexTensor::new(burn_std::Bytes::from_elems(values), layout, DType::F32)
    }

    fn boxes() -> impl Strategy<Value = (Vec<usize>, Vec<Range<usize>>)> {
        let axis = (1usize..5).prop_flat_map(|n| (Just(n), 0..n)).prop_flat_map(|(n, a)| (Just(n), Just(a), a..=n));
        prop::collection::vec(axis, 1..5).prop_map(|axes| axes.into_iter().map(|(n, a, b)| (n, a..b)).unzip())
    }

    proptest! {
        #[test]
        fn a_box_is_written_where_it_belongs((shape, at) in boxes(), add in any::<bool>()) {
            let n: usize = shape.iter().product();
            let lengths: Vec<usize> = at.iter().map(Range::len).collect();
            let part: Vec<f32> = (0..lengths.iter().product()).map(|i| 1000.0 + i as f32).collect();
            let target: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let mut want = target.clone();
            let mut next = 0;
            for (i, want) in want.iter_mut().enumerate() {
                let mut rest = i;
                let mut inside = true;
                for d in (0..shape.len()).rev() {
                    inside &= at[d].contains(&(rest % shape[d]));
                    rest /= shape[d];
                }
                if inside {
                    *want = part[next] + if add { *want } else { 0.0 };
                    next += 1;
                }
            }
            let (target, part) = (tensor(target, &shape), tensor(part, &lengths));
            let out = if add { each_run(target, &at, part, Add) } else { each_run(target, &at, part, Assign) };
            let out = out.map_err(|_| TestCaseError::fail("given back"))?;
            prop_assert_eq!(out.storage::<f32>(), &want[..]);
        }
    }

    #[test]
    fn shared_tensors_and_wrong_shapes_are_given_back() {
        let target = tensor(vec![0.0; 6], &[2, 3]);
        let other = target.clone();
        assert!(each_run(target, &[0..1, 0..3], tensor(vec![1.0; 3], &[1, 3]), Assign).is_err());
        assert_eq!(other.storage::<f32>(), [0.0; 6]);
        assert!(each_run(other, &[0..1, 0..3], tensor(vec![1.0; 2], &[1, 2]), Assign).is_err());
    }
}
