//! Pools and their gradients, one plane of channels after the other.

use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;

use super::super::{Count, Window, WindowAxis, outputs};
use super::simd::{Isa, Real, interleave, strided, vectorised};
use super::slab::{self, Place, Slab};
use super::{filled, written};

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

/// What output `o` reads with a tap, if that is inside the input.
fn read(o: usize, tap: &(Range<usize>, isize), stride: usize) -> Option<usize> {
    tap.0.contains(&o).then(|| (o * stride).wrapping_add_signed(tap.1))
}

/// A window's taps along each axis.
struct Reads<'a> {
    window: &'a Window,
    taps: [Vec<(Range<usize>, isize)>; 3],
}

impl Reads<'_> {
    fn of(window: &Window) -> Reads<'_> {
        Reads { window, taps: [0, 1, 2].map(|i| taps(&window[i])) }
    }

    /// The taps of output `o` along an axis, and the inputs they read.
    fn along(&self, axis: usize, o: usize) -> impl Iterator<Item = (usize, usize)> {
        let stride = self.window[axis].stride;
        self.taps[axis].iter().enumerate().filter_map(move |(n, tap)| Some((n, read(o, tap, stride)?)))
    }

    /// For each input along an axis the outputs that read it, in order.
    fn readers(&self, axis: usize) -> Vec<Vec<usize>> {
        let mut readers = vec![Vec::new(); self.window[axis].input];
        for o in 0..self.window[axis].output {
            self.along(axis, o).for_each(|(_, i)| readers[i].push(o));
        }
        readers
    }
}

vectorised! {
    /// Of one plane of outputs, `at` its channel and its number: writes the maxima into their rows of `out`, and into `best_taps`, 0 at first,
    /// the number of the tap that each is from, counted from 1.
    fn max_slice<T>(
        x: &[Slab<'_, T>],
        reads: &Reads<'_>,
        at: (usize, usize),
        place: Place,
        out: &mut [MaybeUninit<T>],
        best_taps: &mut [u32],
    ) {
        let [_, h, w] = reads.window;
        let (channel, od) = at;
        let [mut read_row, mut next] = [0; 2].map(|_| vec![T::default(); w.output]);
        let (mut next_taps, mut line) = (vec![0u32; w.output], Vec::new());
        for (oh, best_taps) in best_taps.chunks_exact_mut(w.output).enumerate() {
            let out = filled(&mut out[place.in_plane(oh, 0)..][..w.output], T::NEG_INFINITY);
            for (nd, id) in reads.along(0, od) {
                for (nh, ih) in reads.along(1, oh) {
                    let x = slab::row(x, channel, id, ih, w.input, &mut line);
                    for (nw, tap) in reads.taps[2].iter().enumerate() {
                        let range = tap.0.clone();
                        let Some(first) = read(range.start, tap, w.stride) else { continue };
                        let read_row = &mut read_row[..range.len()];
                        strided(read_row, &x[first..], w.stride, |to, x| *to = x);
                        let tap = ((nd * h.kernel + nh) * w.kernel + nw + 1) as u32;
                        let (out, best_taps) = (&mut out[range.clone()], &mut best_taps[range.clone()]);
                        let (next, next_taps) = (&mut next[range.clone()], &mut next_taps[range]);
                        // Without a branch, which is larger is as good as random, and without stores that depend on it.
                        let best = out.iter().zip(&*best_taps).zip(&*read_row);
                        for ((next, next_tap), ((best, best_tap), x)) in next.iter_mut().zip(&mut *next_taps).zip(best) {
                            // The second test finds a NaN that is the first one.
                            #[allow(clippy::eq_op, reason = "only NaN differs from itself")]
                            let better = (*x > *best) | ((*x != *x) & (*best == *best)) | (*best_tap == 0);
                            *next = if better { *x } else { *best };
                            *next_tap = if better { tap } else { *best_tap };
                        }
                        out.copy_from_slice(next);
                        best_taps.copy_from_slice(next_taps);
                    }
                }
            }
        }
    }
}

/// x `[planes, in..]` in boxes -> the maxima, and where in the volume they lie, -1 for a window without input: written into
/// `out` and `at`, `[planes, extents..]`. Every value of the box is written, and nothing else.
#[allow(clippy::too_many_arguments)]
pub(crate) fn max<T: Real>(
    isa: Isa,
    x: &[Slab<'_, T>],
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
    out: &mut [MaybeUninit<T>],
    at: &mut [MaybeUninit<i64>],
    place: Place,
) {
    let [d, h, w] = window;
    assert!(place.fits(outputs(window), out.len()) && at.len() == out.len());
    if out.is_empty() || window.iter().any(|axis| axis.output == 0) {
        return;
    }
    let reads = Reads::of(window);
    let flat = |[d, h, w]: [isize; 3]| ((d * volume[1] as isize + h) * volume[2] as isize + w) as i64;
    // How far each tap lies from that at the origin, in the volume; no tap comes first.
    let mut of_taps = vec![0];
    for (_, d) in &reads.taps[0] {
        for (_, h) in &reads.taps[1] {
            of_taps.extend(reads.taps[2].iter().map(|(_, w)| flat([*d, *h, *w])));
        }
    }
    let outs = out.par_chunks_exact_mut(place.plane());
    outs.zip(at.par_chunks_exact_mut(place.plane())).enumerate().for_each(|(i, (out, at))| {
        let Some((channel, od)) = place.of(i, window[0].output) else { return };
        let mut best_taps = vec![0u32; h.output * w.output];
        max_slice(isa, x, &reads, (channel, od), place, out, &mut best_taps);
        for (oh, best_taps) in best_taps.chunks_exact(w.output).enumerate() {
            let of_row = flat([(od * d.stride) as isize + origin[0], (oh * h.stride) as isize + origin[1], origin[2]]);
            for (ow, (at, tap)) in at[place.in_plane(oh, 0)..].iter_mut().zip(best_taps).enumerate() {
                let position = of_row + (ow * w.stride) as i64 + of_taps[*tap as usize];
                at.write(if *tap > 0 { position } else { -1 });
            }
        }
    });
}

/// Adds each output's gradient to the input it came from; positions outside the block are left out.
pub(crate) fn max_grad<T: Real>(grad: &[T], at: &[i64], window: &Window, origin: [isize; 3], volume: [usize; 3]) -> Vec<T> {
    let inputs: usize = window.iter().map(|a| a.input).product();
    let outputs: usize = window.iter().map(|a| a.output).product();
    let [d, h, w] = [0, 1, 2].map(|i| window[i].input as i64);
    let [vh, vw] = [volume[1] as i64, volume[2] as i64];
    let [z0, y0, x0] = origin.map(|o| o as i64);
    let whole = origin == [0; 3] && window.map(|axis| axis.input) == volume;
    let within = |at: i64| -> Option<usize> {
        if whole {
            return usize::try_from(at).ok().filter(|at| *at < inputs);
        }
        let (z, y, x) = (at / (vh * vw) - z0, at / vw % vh - y0, at % vw - x0);
        let inside = at >= 0 && (0..d).contains(&z) && (0..h).contains(&y) && (0..w).contains(&x);
        inside.then(|| ((z * h + y) * w + x) as usize)
    };
    let spread = |plane: usize, out: &mut [MaybeUninit<T>]| {
        let outputs = plane * outputs..(plane + 1) * outputs;
        // Zeros plane by plane: they are in the cache still when the gradients come.
        let (mut zeros, area) = (0, (h * w) as usize);
        for (g, at) in grad[outputs.clone()].iter().zip(&at[outputs]) {
            let Some(at) = within(*at) else { continue };
            if at >= zeros {
                let end = (at / area + 1) * area;
                filled(&mut out[zeros..end], T::default());
                zeros = end;
            }
            // SAFETY: zeros lie up to behind it.
            unsafe { *out[at].assume_init_mut() += *g };
        }
        filled(&mut out[zeros..], T::default());
    };
    // SAFETY: there are zeros everywhere.
    unsafe { written(grad.len() / outputs.max(1), inputs, spread) }
}

/// The means of a window, or their gradients: a window's taps, and what the sum over each output's is multiplied by, one
/// table an axis.
struct Means<'a, T> {
    reads: Reads<'a>,
    scales: [Vec<T>; 3],
}

impl<T: Real> Means<'_, T> {
    fn of(window: &Window, count: Count) -> Means<'_, T> {
        let scales = |i: usize| (0..window[i].output).map(|o| T::reciprocal(count.of(i, &window[i], o))).collect();
        Means { reads: Reads::of(window), scales: [0, 1, 2].map(scales) }
    }
}

/// `to += from`, element by element.
#[inline(always)]
fn add<T: Real>(to: &mut [T], from: &[T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += *from);
}

vectorised! {
    /// One plane of means, `at` its channel and its number: the rows that an output row reads are added up first, then neighbours.
    fn mean_slice<T>(
        x: &[Slab<'_, T>],
        means: &Means<'_, T>,
        at: (usize, usize),
        place: Place,
        out: &mut [MaybeUninit<T>],
    ) {
        let Means { reads, scales: [sd, sh, sw] } = means;
        let [_, _, w] = reads.window;
        let (channel, od) = at;
        let (mut rows, mut sums, mut line) = (vec![T::default(); w.input], vec![T::default(); w.output], Vec::new());
        for (oh, sh) in sh.iter().enumerate() {
            let out = &mut out[place.in_plane(oh, 0)..][..w.output];
            rows.fill(T::default());
            for (_, id) in reads.along(0, od) {
                for (_, ih) in reads.along(1, oh) {
                    add(&mut rows, slab::row(x, channel, id, ih, w.input, &mut line));
                }
            }
            sums.fill(T::default());
            for tap in &reads.taps[2] {
                if let Some(first) = read(tap.0.start, tap, w.stride) {
                    strided(&mut sums[tap.0.clone()], &rows[first..], w.stride, |sum, x| *sum += x);
                }
            }
            let scale = sd[od] * *sh;
            for ((out, sum), sw) in out.iter_mut().zip(&sums).zip(sw) {
                out.write(*sum * (scale * *sw));
            }
        }
    }
}

/// x `[planes, in..]` in boxes -> means, written into `out` `[planes, extents..]`. Every value of the box is written, and
/// nothing else.
pub(crate) fn average<T: Real>(isa: Isa, x: &[Slab<'_, T>], window: &Window, count: Count, out: &mut [MaybeUninit<T>], place: Place) {
    assert!(place.fits(outputs(window), out.len()));
    if out.is_empty() {
        return;
    }
    let means = Means::of(window, count);
    out.par_chunks_exact_mut(place.plane()).enumerate().for_each(|(i, out)| {
        if let Some(at) = place.of(i, window[0].output) {
            mean_slice(isa, x, &means, at, place, out);
        }
    });
}

vectorised! {
    /// One plane of inputs of a channel, whose outputs have the gradient `grad`: `depth` names the planes of outputs that
    /// read it, `height` the rows of them that read each of its rows.
    fn mean_grad_slice<T>(grad: &[T], means: &Means<'_, T>, depth: &[usize], height: &[Vec<usize>], out: &mut [MaybeUninit<T>]) {
        let Means { reads, scales: [sd, sh, sw] } = means;
        let [_, h, w] = reads.window;
        let slice = h.output * w.output;
        let mut sums = vec![T::default(); slice];
        for od in depth {
            let of_plane = sums.iter_mut().zip(&grad[od * slice..][..slice]);
            of_plane.for_each(|(sum, g)| *sum += *g * sd[*od]);
        }
        // Along the width each tap adds to every `stride`-th input: those side by side, then in their order.
        let pitch = w.input.div_ceil(w.stride);
        let mut phases = vec![T::default(); w.stride * pitch];
        let mut spread = vec![T::default(); h.output * w.input];
        for ((sums, spread), sh) in sums.chunks_exact_mut(w.output).zip(spread.chunks_exact_mut(w.input)).zip(sh) {
            sums.iter_mut().zip(sw).for_each(|(sum, sw)| *sum = *sum * (*sh * *sw));
            phases.fill(T::default());
            for tap in &reads.taps[2] {
                if let Some(first) = read(tap.0.start, tap, w.stride) {
                    add(&mut phases[first % w.stride * pitch + first / w.stride..], &sums[tap.0.clone()]);
                }
            }
            interleave(&phases, pitch, w.stride, spread, |x| x);
        }
        let mut total = vec![T::default(); w.input];
        for (out, rows) in out.chunks_exact_mut(w.input).zip(height) {
            total.fill(T::default());
            rows.iter().for_each(|oh| add(&mut total, &spread[oh * w.input..][..w.input]));
            out.iter_mut().zip(&total).for_each(|(out, total)| *out = MaybeUninit::new(*total));
        }
    }
}

/// Spreads each output's gradient over the inputs of its window.
pub(crate) fn average_grad<T: Real>(isa: Isa, grad: &[T], window: &Window, count: Count) -> Vec<T> {
    let [d, h, w] = window;
    let outputs = d.output * h.output * w.output;
    let means = Means::of(window, count);
    let [depth, height] = [0, 1].map(|axis| means.reads.readers(axis));
    let slice = |i: usize, out: &mut [MaybeUninit<T>]| {
        let grad = &grad[i / d.input * outputs..][..outputs];
        mean_grad_slice(isa, grad, &means, &depth[i % d.input], &height, out);
    };
    // SAFETY: a slice is whole rows, of which each value is written.
    unsafe { written(grad.len() / outputs.max(1) * d.input, h.input * w.input, slice) }
}
