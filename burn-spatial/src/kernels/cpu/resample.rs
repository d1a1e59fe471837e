//! Weighted reads along one axis of a contiguous tensor, one line of the dimensions before it after the other.

use burn_backend::ElementConversion;
use rayon::prelude::*;

use super::super::Taps;
use super::simd::Real;

/// Calls `f(output, input, weight)` for each read of a line; what weighs nothing is not read.
fn each<T: Real>(rows: &[(Vec<usize>, Vec<T>)], outputs: usize, mut f: impl FnMut(usize, usize, T)) {
    for o in 0..outputs {
        for (indices, weights) in rows {
            if weights[o] != T::default() {
                f(o, indices[o], weights[o]);
            }
        }
    }
}

fn rows<T: Real>(taps: &Taps) -> Vec<(Vec<usize>, Vec<T>)> {
    taps.rows().map(|(indices, weights)| (indices.to_vec(), weights.iter().map(|w| w.elem::<T>()).collect())).collect()
}

/// `to += from * weight`, element by element.
fn add<T: Real>(to: &mut [T], from: &[T], weight: T) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += *from * weight);
}

/// x `[lines, inputs, inner]` -> `[lines, outputs, inner]`.
pub(crate) fn resample<T: Real>(x: &[T], taps: &Taps, inner: usize) -> Vec<T> {
    let (from, to) = (taps.inputs * inner, taps.outputs() * inner);
    let rows = rows::<T>(taps);
    let mut out = vec![T::default(); x.len() / from.max(1) * to];
    if out.is_empty() {
        return out;
    }
    out.par_chunks_exact_mut(to).zip(x.par_chunks_exact(from)).for_each(|(out, x)| match inner {
        1 => each(&rows, taps.outputs(), |o, i, weight| out[o] += x[i] * weight),
        _ => each(&rows, taps.outputs(), |o, i, weight| add(&mut out[o * inner..][..inner], &x[i * inner..][..inner], weight)),
    });
    out
}

/// The adjoint of [`resample`]: grad `[lines, outputs, inner]` -> `[lines, inputs, inner]`.
pub(crate) fn resample_grad<T: Real>(grad: &[T], taps: &Taps, inner: usize) -> Vec<T> {
    let (from, to) = (taps.outputs() * inner, taps.inputs * inner);
    let rows = rows::<T>(taps);
    let mut out = vec![T::default(); grad.len() / from.max(1) * to];
    if out.is_empty() {
        return out;
    }
    out.par_chunks_exact_mut(to).zip(grad.par_chunks_exact(from)).for_each(|(out, grad)| match inner {
        1 => each(&rows, taps.outputs(), |o, i, weight| out[i] += grad[o] * weight),
        _ => each(&rows, taps.outputs(), |o, i, weight| add(&mut out[i * inner..][..inner], &grad[o * inner..][..inner], weight)),
    });
    out
}
