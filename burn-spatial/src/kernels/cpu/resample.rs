//! Weighted reads along one axis of a contiguous tensor, one line of the dimensions before it after the other.

use std::mem::MaybeUninit;

use burn_backend::ElementConversion;
use rayon::prelude::*;

use super::super::Taps;
use super::filled;
use super::simd::{Isa, Real, vectorised};
use super::slab::Place;

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
#[inline(always)]
fn add<T: Real>(to: &mut [T], from: &[T], weight: T) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += *from * weight);
}

/// Volumes of which one axis is resampled.
struct Along<T> {
    axis: usize,
    extents: [usize; 3],
    outputs: [usize; 3],
    /// What each output along the axis reads.
    rows: Vec<(Vec<usize>, Vec<T>)>,
}

vectorised! {
    /// Plane `d` of the outputs of the volume x.
    fn plane<T>(x: &[T], along: &Along<T>, d: usize, place: Place, out: &mut [MaybeUninit<T>]) {
        let Along { axis, extents, outputs, rows } = along;
        let line = |d: usize, h: usize| &x[(d * extents[1] + h) * extents[2]..][..extents[2]];
        for h in 0..outputs[1] {
            let out = filled(&mut out[place.in_plane(h, 0)..][..outputs[2]], T::default());
            for (indices, weights) in rows {
                match axis {
                    0 if weights[d] != T::default() => add(out, line(indices[d], h), weights[d]),
                    1 if weights[h] != T::default() => add(out, line(d, indices[h]), weights[h]),
                    0 | 1 => {}
                    _ => {
                        let line = line(d, h);
                        for (out, (i, weight)) in out.iter_mut().zip(indices.iter().zip(weights)) {
                            *out += if *weight != T::default() { line[*i] * *weight } else { T::default() };
                        }
                    }
                }
            }
        }
    }
}

/// x `[volumes, extents..]` with one axis resampled, written into `out` `[volumes, ..]`. Every value of the box is written,
/// and nothing else.
pub(crate) fn resample<T: Real>(
    isa: Isa,
    x: &[T],
    taps: &Taps,
    axis: usize,
    extents: [usize; 3],
    out: &mut [MaybeUninit<T>],
    place: Place,
) {
    let mut outputs = extents;
    outputs[axis] = taps.outputs();
    assert!(place.fits(outputs, out.len()));
    if out.is_empty() {
        return;
    }
    let along = Along { axis, extents, outputs, rows: rows(taps) };
    let each = extents.iter().product::<usize>();
    out.par_chunks_exact_mut(place.plane()).enumerate().for_each(|(i, out)| {
        if let Some((volume, d)) = place.of(i, outputs[0]) {
            plane(isa, &x[volume * each..][..each], &along, d, place, out);
        }
    });
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
