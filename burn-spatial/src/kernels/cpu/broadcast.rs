//! Element-wise operations of a volume with one number a channel (or a row, or a feature), in one pass; and dense
//! copies of permuted volumes, run by run.

use std::ops::Div;

use burn_flex::{FlexTensor, Layout};
use rayon::prelude::*;

use super::Real;

/// What is done with an element of the large operand and one of the small one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Their sum.
    Add,
    /// Large minus small.
    Sub,
    /// Small minus large.
    SubFrom,
    /// Their product.
    Mul,
    /// Large over small.
    Div,
    /// Small over large.
    DivInto,
}

/// The small operand varies along `middle` only, of a volume seen as `[outer, middle, inner]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Runs {
    middle: usize,
    inner: usize,
}

impl Runs {
    /// For operands of these shapes; `None` where the small one does not fit this form.
    pub(crate) fn of(large: &[usize], small: &[usize]) -> Option<Runs> {
        if large.len() != small.len() || large.iter().zip(small).any(|(l, s)| *s != 1 && s != l) {
            return None;
        }
        let varies: Vec<usize> = (0..large.len()).filter(|d| small[*d] != 1).collect();
        let (first, last) = match (varies.first(), varies.last()) {
            (Some(first), Some(last)) => (*first, *last),
            _ => return Some(Runs { middle: 1, inner: large.iter().product() }),
        };
        let whole = (first..=last).all(|d| small[d] == large[d]);
        let product = |dims: &[usize]| dims.iter().product();
        whole.then(|| Runs { middle: product(&large[first..=last]), inner: product(&large[last + 1..]) })
    }

    /// Writes the result over `values`.
    pub(crate) fn apply<T: Real + Div<Output = T>>(self, values: &mut [T], small: &[T], arithmetic: Arithmetic) {
        match arithmetic {
            Arithmetic::Add => self.each(values, small, |x, s| x + s),
            Arithmetic::Sub => self.each(values, small, |x, s| x - s),
            Arithmetic::SubFrom => self.each(values, small, |x, s| s - x),
            Arithmetic::Mul => self.each(values, small, |x, s| x * s),
            Arithmetic::Div => self.each(values, small, |x, s| x / s),
            Arithmetic::DivInto => self.each(values, small, |x, s| s / x),
        }
    }

    fn each<T: Real>(self, values: &mut [T], small: &[T], f: impl Fn(T, T) -> T + Sync) {
        if values.is_empty() {
            return;
        }
        if self.inner == 1 {
            values.par_chunks_mut(self.middle).for_each(|row| row.iter_mut().zip(small).for_each(|(x, s)| *x = f(*x, *s)));
            return;
        }
        values.par_chunks_mut(self.inner).enumerate().for_each(|(run, values)| {
            let s = small[run % self.middle];
            values.iter_mut().for_each(|x| *x = f(*x, s));
        });
    }
}

/// A dense copy of a permuted tensor: its last dimensions that lie densely are copied run by run. `None` where the runs
/// are too short to gain by it.
pub(crate) fn dense<T: Real>(tensor: &FlexTensor) -> Option<FlexTensor> {
    /// Elements of a run from which on copying it pays.
    const WORTH: usize = 64;
    let layout = tensor.layout();
    let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
    let mut outer = shape.len();
    let mut run = 1usize;
    while outer > 0 && (shape[outer - 1] == 1 || strides[outer - 1] == run as isize) {
        run *= shape[outer - 1];
        outer -= 1;
    }
    if outer == 0 || run < WORTH {
        return None;
    }
    let source = tensor.storage::<T>();
    let mut values = vec![T::default(); shape.iter().product()];
    values.par_chunks_mut(run).enumerate().for_each(|(index, out)| {
        let mut rest = index;
        let mut at = layout.start_offset() as isize;
        for d in (0..outer).rev() {
            at += (rest % shape[d]) as isize * strides[d];
            rest /= shape[d];
        }
        out.copy_from_slice(&source[at as usize..][..run]);
    });
    let bytes = burn_std::Bytes::from_elems(values);
    Some(FlexTensor::new(bytes, Layout::contiguous(layout.shape().clone()), tensor.dtype()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_shapes() {
        assert_eq!(Runs::of(&[2, 3, 4, 5], &[1, 3, 1, 1]), Some(Runs { middle: 3, inner: 20 }));
        assert_eq!(Runs::of(&[2, 3, 4, 5], &[1, 1, 4, 5]), Some(Runs { middle: 20, inner: 1 }));
        assert_eq!(Runs::of(&[2, 3, 1, 5], &[2, 3, 1, 1]), Some(Runs { middle: 6, inner: 5 }));
        assert_eq!(Runs::of(&[2, 3], &[1, 1]), Some(Runs { middle: 1, inner: 6 }));
        assert_eq!(Runs::of(&[2, 3, 4], &[2, 1, 4]), None);
        assert_eq!(Runs::of(&[2, 3], &[3]), None);
    }
}
