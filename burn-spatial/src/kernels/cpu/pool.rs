//! Pools and their gradients, one plane of channels after the other.

use std::ops::Range;

use rayon::prelude::*;

use super::super::{Count, Window, WindowAxis};
use super::simd::Real;

/// For each tap the outputs that read inside the input, and the input of output 0.
fn taps(axis: &WindowAxis) -> Vec<(Range<usize>, isize)> {
    (0..axis.kernel)
        .map(|t| {
            let base = (t * axis.dilation) as isize - axis.offset;
            let first = |bound: isize| (bound - base).max(0).unsigned_abs().div_ceil(axis.stride).min(axis.output);
            (first(0)..first(axis.input as isize), base)
        })
        .collect()
}

/// Calls `f(output row, input row)` for each pair of rows that the taps `td`, `th` join.
fn read(o: usize, tap: &(Range<usize>, isize), stride: usize) -> Option<usize> {
    tap.0.contains(&o).then(|| (o * stride).wrapping_add_signed(tap.1))
}

/// x `[planes, in..]` -> the maxima `[planes, out..]` and where in the volume they lie, -1 for a window without input.
pub(crate) fn max<T: Real>(x: &[T], window: &Window, origin: [isize; 3], volume: [usize; 3]) -> (Vec<T>, Vec<i64>) {
    let [d, h, w] = window;
    let (inputs, row) = (d.input * h.input * w.input, w.output);
    let planes = x.len() / inputs.max(1);
    let [td, th, tw] = [taps(d), taps(h), taps(w)];
    let size = planes * d.output * h.output * row;
    let (mut out, mut at) = (vec![T::NEG_INFINITY; size], vec![-1i64; size]);
    if size == 0 {
        return (out, at);
    }
    let flat = |d: isize, h: isize, w: isize| ((d * volume[1] as isize + h) * volume[2] as isize + w) as i64;
    // How far each tap lies from that at the origin, in the volume.
    let mut of_taps = Vec::with_capacity(td.len() * th.len() * tw.len());
    for (_, d) in &td {
        for (_, h) in &th {
            of_taps.extend(tw.iter().map(|(_, w)| flat(*d, *h, *w)));
        }
    }
    let slice = h.output * row;
    out.par_chunks_exact_mut(slice).zip(at.par_chunks_exact_mut(slice)).enumerate().for_each(|(i, (out, at))| {
        let (x, od) = (&x[i / d.output * inputs..][..inputs], i % d.output);
        // Of each output the best tap, counted from 1; and what a tap reads.
        let (mut best_tap, mut read_row) = (vec![0u32; row], vec![T::default(); row]);
        for (oh, (out, at)) in out.chunks_exact_mut(row).zip(at.chunks_exact_mut(row)).enumerate() {
            best_tap.fill(0);
            for (nd, id) in td.iter().enumerate().filter_map(|(n, t)| Some((n, read(od, t, d.stride)?))) {
                for (nh, ih) in th.iter().enumerate().filter_map(|(n, t)| Some((n, read(oh, t, h.stride)?))) {
                    let x = &x[(id * h.input + ih) * w.input..][..w.input];
                    for (nw, (range, base)) in tw.iter().enumerate() {
                        let Some(first) = range.clone().next().map(|o| (o * w.stride).wrapping_add_signed(*base)) else {
                            continue;
                        };
                        let n = range.len();
                        read_row[..n].iter_mut().zip(x[first..].iter().step_by(w.stride)).for_each(|(to, x)| *to = *x);
                        let tap = ((nd * th.len() + nh) * tw.len() + nw + 1) as u32;
                        let (out, best_tap) = (&mut out[range.clone()][..n], &mut best_tap[range.clone()][..n]);
                        // Without a branch: which is larger is as good as random.
                        for ((best, best_tap), x) in out.iter_mut().zip(best_tap).zip(&read_row[..n]) {
                            // The second test finds a NaN that is the first one.
                            #[allow(clippy::eq_op, reason = "only NaN differs from itself")]
                            let better = (*x > *best) | ((*x != *x) & (*best == *best)) | (*best_tap == 0);
                            *best = if better { *x } else { *best };
                            *best_tap = if better { tap } else { *best_tap };
                        }
                    }
                }
            }
            let start = |o: usize, axis: usize| (o * window[axis].stride) as isize + origin[axis];
            for (ow, (at, tap)) in at.iter_mut().zip(&best_tap).enumerate().filter(|(_, (_, tap))| **tap > 0) {
                *at = flat(start(od, 0), start(oh, 1), start(ow, 2)) + of_taps[*tap as usize - 1];
            }
        }
    });
    (out, at)
}

/// Adds each output's gradient to the input it came from; positions outside the block are left out.
pub(crate) fn max_grad<T: Real>(grad: &[T], at: &[i64], window: &Window, origin: [isize; 3], volume: [usize; 3]) -> Vec<T> {
    let inputs: usize = window.iter().map(|a| a.input).product();
    let outputs: usize = window.iter().map(|a| a.output).product();
    let mut out = vec![T::default(); grad.len() / outputs.max(1) * inputs];
    if out.is_empty() {
        return out;
    }
    let [d, h, w] = [0, 1, 2].map(|i| window[i].input as i64);
    let [vh, vw] = [volume[1] as i64, volume[2] as i64];
    let [z0, y0, x0] = origin.map(|o| o as i64);
    let whole = origin == [0; 3] && window.map(|axis| axis.input) == volume;
    out.par_chunks_exact_mut(inputs).zip(grad.par_chunks_exact(outputs)).zip(at.par_chunks_exact(outputs)).for_each(|((out, grad), at)| {
        if whole {
            for (g, at) in grad.iter().zip(at) {
                if let Some(out) = usize::try_from(*at).ok().and_then(|at| out.get_mut(at)) {
                    *out += *g;
                }
            }
            return;
        }
        for (g, at) in grad.iter().zip(at).filter(|(_, at)| **at >= 0) {
            let (z, y, x) = (at / (vh * vw) - z0, at / vw % vh - y0, at % vw - x0);
            if (0..d).contains(&z) && (0..h).contains(&y) && (0..w).contains(&x) {
                out[((z * h + y) * w + x) as usize] += *g;
            }
        }
    });
    out
}

/// What the sum over each output's taps is multiplied by: one table an axis.
fn scales<T: Real>(window: &Window, count: Count) -> [Vec<T>; 3] {
    [0, 1, 2].map(|i| {
        let axis = &window[i];
        (0..axis.output).map(|o| T::reciprocal(count.of(i, axis, o))).collect()
    })
}

/// x `[planes, in..]` -> means `[planes, out..]`.
pub(crate) fn average<T: Real>(x: &[T], window: &Window, count: Count) -> Vec<T> {
    let [d, h, w] = window;
    let (inputs, row) = (d.input * h.input * w.input, w.output);
    let planes = x.len() / inputs.max(1);
    let [td, th, tw] = [taps(d), taps(h), taps(w)];
    let [sd, sh, sw] = scales::<T>(window, count);
    let mut out = vec![T::default(); planes * d.output * h.output * row];
    if out.is_empty() {
        return out;
    }
    out.par_chunks_exact_mut(h.output * row).enumerate().for_each(|(i, out)| {
        let (x, od) = (&x[i / d.output * inputs..][..inputs], i % d.output);
        for (oh, out) in out.chunks_exact_mut(row).enumerate() {
            for id in td.iter().filter_map(|t| read(od, t, d.stride)) {
                for ih in th.iter().filter_map(|t| read(oh, t, h.stride)) {
                    let x = &x[(id * h.input + ih) * w.input..][..w.input];
                    for (range, base) in &tw {
                        let Some(first) = range.clone().next().map(|o| (o * w.stride).wrapping_add_signed(*base)) else {
                            continue;
                        };
                        out[range.clone()].iter_mut().zip(x[first..].iter().step_by(w.stride)).for_each(|(o, x)| *o += *x);
                    }
                }
            }
            let scale = sd[od] * sh[oh];
            out.iter_mut().zip(&sw).for_each(|(o, s)| *o = *o * (scale * *s));
        }
    });
    out
}

/// Spreads each output's gradient over the inputs of its window.
pub(crate) fn average_grad<T: Real>(grad: &[T], window: &Window, count: Count) -> Vec<T> {
    let [d, h, w] = window;
    let inputs = d.input * h.input * w.input;
    let outputs = d.output * h.output * w.output;
    let [td, th, tw] = [taps(d), taps(h), taps(w)];
    let [sd, sh, sw] = scales::<T>(window, count);
    let mut out = vec![T::default(); grad.len() / outputs.max(1) * inputs];
    if out.is_empty() {
        return out;
    }
    out.par_chunks_exact_mut(inputs).zip(grad.par_chunks_exact(outputs)).for_each(|(out, grad)| {
        let mut scaled = vec![T::default(); w.output];
        for (o, grad) in grad.chunks_exact(w.output).enumerate() {
            let (od, oh) = (o / h.output, o % h.output);
            let scale = sd[od] * sh[oh];
            scaled.iter_mut().zip(grad).zip(&sw).for_each(|((to, g), s)| *to = *g * (scale * *s));
            for id in td.iter().filter_map(|t| read(od, t, d.stride)) {
                for ih in th.iter().filter_map(|t| read(oh, t, h.stride)) {
                    let out = &mut out[(id * h.input + ih) * w.input..][..w.input];
                    for (range, base) in &tw {
                        let Some(first) = range.clone().next().map(|o| (o * w.stride).wrapping_add_signed(*base)) else {
                            continue;
                        };
                        out[first..].iter_mut().step_by(w.stride).zip(&scaled[range.clone()]).for_each(|(o, g)| *o += *g);
                    }
                }
            }
        }
    });
    out
}
