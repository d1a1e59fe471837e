//! Convolution and its gradients as matrix products over small packed tiles of shifted windows: no column buffer of
//! the whole activation, only tiles of at most a few hundred kilobytes a thread.
//!
//! Every result is a sum in an order that depends on shapes and the instruction set alone, never on threads.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::super::{Window, WindowAxis};
use super::simd::{Isa, Panel, Real, VECTORS};

/// Rows of the packed matrix (channels x taps, or positions) between two updates of the sums: a panel of that many
/// rows stays in the first-level cache.
const DEPTH: usize = 256;
/// Panels of one tile at most: a tile of weights is read once for all of them.
const PANELS: usize = 4;

/// One axis of a gather: position `j` with tap `t` reads source `j * step + bases[t]`, zero outside `0..source`, and
/// writes target `start + j * spread`.
struct Axis {
    count: usize,
    step: usize,
    bases: Vec<isize>,
    /// For each tap the positions that read inside the source.
    inside: Vec<Range<usize>>,
    source: usize,
    target: usize,
    start: usize,
    spread: usize,
}

impl Axis {
    fn new(
        count: usize,
        step: usize,
        bases: Vec<isize>,
        source: usize,
        target: usize,
        start: usize,
        spread: usize,
    ) -> Axis {
        let inside = bases
            .iter()
            .map(|&base| {
                // First j with j * step + base >= bound.
                let first = |bound: isize| (bound - base).max(0).unsigned_abs().div_ceil(step).min(count);
                first(0)..first(source as isize)
            })
            .collect();
        Axis { count, step, bases, inside, source, target, start, spread }
    }

    /// The axis of a forward window.
    fn forward(axis: &WindowAxis) -> Axis {
        let bases = (0..axis.kernel).map(|t| (t * axis.dilation) as isize - axis.offset).collect();
        Axis::new(axis.output, axis.stride, bases, axis.input, axis.output, 0, 1)
    }

    /// The inputs `phase`, `phase + stride`, .. of a window read as a gather from its outputs, and the taps that
    /// reach them: input q takes from output o = (q + offset - t * dilation) / stride where that is whole.
    fn backward(axis: &WindowAxis, phase: usize) -> (Axis, Vec<usize>) {
        let stride = axis.stride as isize;
        let shift = |t: usize| phase as isize + axis.offset - (t * axis.dilation) as isize;
        let taps: Vec<usize> = (0..axis.kernel).filter(|&t| shift(t).rem_euclid(stride) == 0).collect();
        let bases = taps.iter().map(|&t| shift(t).div_euclid(stride)).collect();
        let count = axis.input.saturating_sub(phase).div_ceil(axis.stride);
        (Axis::new(count, 1, bases, axis.output, axis.input, phase, axis.stride), taps)
    }

    /// The source index of position `j` with tap `t`, if it is inside.
    #[inline]
    fn read(&self, j: usize, t: usize) -> Option<usize> {
        self.inside[t].contains(&j).then(|| (j * self.step).wrapping_add_signed(self.bases[t]))
    }
}

/// Positions and taps of a gather.
struct Gather([Axis; 3]);

/// Positions next to each other along the width: columns `column..column + len` of a tile.
#[derive(Clone, Copy)]
struct Run {
    sample: usize,
    d: usize,
    h: usize,
    w: usize,
    column: usize,
    len: usize,
}

impl Gather {
    fn positions(&self) -> usize {
        self.0.iter().map(|a| a.count).product()
    }

    fn taps(&self) -> usize {
        self.0.iter().map(|a| a.bases.len()).product()
    }

    fn source(&self) -> usize {
        self.0.iter().map(|a| a.source).product()
    }

    fn target(&self) -> usize {
        self.0.iter().map(|a| a.target).product()
    }

    /// The runs of `range`, numbered over all samples.
    fn runs(&self, range: Range<usize>) -> Vec<Run> {
        let [_, h, w] = [0, 1, 2].map(|i| self.0[i].count);
        let each = self.positions();
        let mut runs = Vec::with_capacity(range.len() / w + 2);
        let mut p = range.start;
        while p < range.end {
            let within = p % each;
            let (row, x) = (within / w, within % w);
            let len = (w - x).min(range.end - p);
            runs.push(Run { sample: p / each, d: row / h, h: row % h, w: x, column: p - range.start, len });
            p += len;
        }
        runs
    }

    /// The source row that `run` reads with the taps `td` and `th`, if it is inside.
    #[inline]
    fn row(&self, run: &Run, td: usize, th: usize) -> Option<usize> {
        let [d, h, w] = &self.0;
        Some((d.read(run.d, td)? * h.source + h.read(run.h, th)?) * w.source)
    }

    /// Writes `channels` x taps rows of `width` columns: what each tap reads for each position. Channel c of sample s
    /// starts at `(s * per_sample + c) * source`.
    fn pack<T: Real>(
        &self,
        x: &[T],
        per_sample: usize,
        channels: Range<usize>,
        runs: &[Run],
        width: usize,
        out: &mut [T],
    ) {
        let [ad, ah, aw] = &self.0;
        let source = self.source();
        let mut rows = out.chunks_exact_mut(width);
        for c in channels {
            for td in 0..ad.bases.len() {
                for th in 0..ah.bases.len() {
                    for tw in 0..aw.bases.len() {
                        let Some(out) = rows.next() else { return };
                        let inside = &aw.inside[tw];
                        for run in runs {
                            let out = &mut out[run.column..run.column + run.len];
                            let Some(row) = self.row(run, td, th) else {
                                out.fill(T::default());
                                continue;
                            };
                            let from = (run.sample * per_sample + c) * source + row;
                            let lo = inside.start.clamp(run.w, run.w + run.len) - run.w;
                            let hi = inside.end.clamp(run.w + lo, run.w + run.len) - run.w;
                            out[..lo].fill(T::default());
                            out[hi..].fill(T::default());
                            if hi > lo {
                                let first = ((run.w + lo) * aw.step).wrapping_add_signed(aw.bases[tw]);
                                let out = &mut out[lo..hi];
                                let x = &x[from + first..from + first + (hi - lo - 1) * aw.step + 1];
                                match aw.step {
                                    1 => copy(x, out),
                                    step => out.iter_mut().zip(x.iter().step_by(step)).for_each(|(o, x)| *o = *x),
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// Like [`Gather::pack`] turned over: rows are positions, and the columns from 0 are `columns` of the numbering
    /// (channel, depth tap, height tap, width tap).
    fn pack_transposed<T: Real>(
        &self,
        x: &[T],
        per_sample: usize,
        first_channel: usize,
        columns: Range<usize>,
        runs: &[Run],
        width: usize,
        out: &mut [T],
    ) {
        let [_, ah, aw] = &self.0;
        let (kh, kw, taps, source) = (ah.bases.len(), aw.bases.len(), self.taps(), self.source());
        for (i, column) in columns.enumerate() {
            let (c, tap) = (first_channel + column / taps, column % taps);
            let (td, th, tw) = (tap / (kh * kw), tap / kw % kh, tap % kw);
            for run in runs {
                let mut out = out[run.column * width..(run.column + run.len) * width].iter_mut().skip(i).step_by(width);
                let row = self.row(run, td, th);
                let inside = if row.is_some() { aw.inside[tw].clone() } else { 0..0 };
                let lo = inside.start.clamp(run.w, run.w + run.len) - run.w;
                let hi = inside.end.clamp(run.w + lo, run.w + run.len) - run.w;
                out.by_ref().take(lo).for_each(|o| *o = T::default());
                if let (Some(row), true) = (row, hi > lo) {
                    let from = (run.sample * per_sample + c) * source + row;
                    let from = from + ((run.w + lo) * aw.step).wrapping_add_signed(aw.bases[tw]);
                    let x = &x[from..from + (hi - lo - 1) * aw.step + 1];
                    out.by_ref().take(hi - lo).zip(x.iter().step_by(aw.step)).for_each(|(o, x)| *o = *x);
                }
                out.take(run.len - hi).for_each(|o| *o = T::default());
            }
        }
    }
}

/// A copy that stays a loop: most are too short for a call.
#[inline(always)]
fn copy<T: Copy>(from: &[T], to: &mut [T]) {
    let mut from = from.chunks_exact(8);
    let mut to = to.chunks_exact_mut(8);
    for (from, to) in from.by_ref().zip(to.by_ref()) {
        for i in 0..8 {
            to[i] = from[i];
        }
    }
    for (from, to) in from.remainder().iter().zip(to.into_remainder()) {
        *to = *from;
    }
}

/// Disjoint parts of one buffer, written by several threads.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);
// SAFETY: each task writes its own elements.
unsafe impl<T: Send> Send for Shared<T> {}
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// `at..at + len` must lie in the buffer and be written by no one else meanwhile.
    #[allow(clippy::mut_from_ref, reason = "the caller promises disjoint parts")]
    unsafe fn part(&self, at: usize, len: usize) -> &mut [T] {
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}

/// Runs `f` on two buffers that this thread keeps from call to call; their contents are arbitrary numbers.
fn with_scratch<T: Real, R>(packed: usize, sums: usize, f: impl FnOnce(&mut [T], &mut [T]) -> R) -> R {
    thread_local!(static SCRATCH: RefCell<Vec<f64>> = const { RefCell::new(Vec::new()) });
    SCRATCH.with_borrow_mut(|scratch| {
        let need = (packed + sums) * size_of::<T>() / size_of::<f64>() + 1;
        if scratch.len() < need {
            scratch.resize(need, 0.0);
        }
        let (packed, rest) = bytemuck::cast_slice_mut::<f64, T>(scratch).split_at_mut(packed);
        f(packed, &mut rest[..sums])
    })
}

/// How a convolution of `groups` groups maps `source` channels onto `target` channels.
struct Channels {
    source: usize,
    target: usize,
    groups: usize,
}

/// `out[target channel][position] = bias + sum over source channels and taps of matrix * gathered x`. The matrix is
/// `[groups][target / groups][source / groups * taps]`.
fn gather_product<T: Real>(
    isa: Isa,
    x: &[T],
    samples: usize,
    gather: &Gather,
    channels: &Channels,
    matrix: &[T],
    bias: Option<&[T]>,
    out: &mut [T],
) {
    let (taps, target) = (gather.taps(), gather.target());
    let (rows, inner) = (channels.target / channels.groups, channels.source / channels.groups);
    let (depth, positions) = (inner * taps, gather.positions() * samples);
    if positions == 0 || rows == 0 {
        return;
    }
    let panel = VECTORS * T::lanes(isa);
    let threads = rayon::current_num_threads();
    // How the work is cut depends on the threads, the order of each sum does not.
    let panels = positions.div_ceil(panel).div_ceil(2 * threads).clamp(1, PANELS);
    let tiles = positions.div_ceil(panels * panel);
    let parts = match threads {
        1 => 1,
        _ => (2 * threads).div_ceil(tiles * channels.groups).clamp(1, rows.div_ceil(16)),
    };
    let part_rows = rows.div_ceil(parts).next_multiple_of(4);
    let block = (DEPTH / taps).clamp(1, inner);
    let shared = Shared(out.as_mut_ptr());
    let [ad, ah, aw] = &gather.0;

    (0..channels.groups * tiles * parts).into_par_iter().for_each(|task| {
        let (group, tile, part) = (task / (tiles * parts), task / parts % tiles, task % parts);
        let m = (part * part_rows).min(rows)..((part + 1) * part_rows).min(rows);
        if m.is_empty() {
            return;
        }
        let p0 = tile * panels * panel;
        let columns = (panels * panel).min(positions - p0);
        let starts: Vec<usize> = (0..columns).step_by(panel).collect();
        let runs: Vec<Vec<Run>> = starts.iter().map(|s| gather.runs(p0 + s..p0 + (s + panel).min(columns))).collect();
        let ldc = starts.len() * panel;
        with_scratch(block * taps * panel, m.len() * ldc, |packed: &mut [T], sums: &mut [T]| {
            for c in (0..inner).step_by(block) {
                let c_end = (c + block).min(inner);
                for (start, runs) in starts.iter().zip(&runs) {
                    let vectors = (columns - start).min(panel).div_ceil(T::lanes(isa));
                    let width = vectors * T::lanes(isa);
                    let packed = &mut packed[..(c_end - c) * taps * width];
                    gather.pack(x, channels.source, group * inner + c..group * inner + c_end, runs, width, packed);
                    let a = &matrix[(group * rows + m.start) * depth + c * taps..];
                    debug_assert!(a.len() >= (m.len() - 1) * depth + (c_end - c) * taps);
                    // SAFETY: the extents above; `isa` comes from `Isa::available`.
                    unsafe {
                        T::product(
                            isa,
                            &Panel {
                                a: a.as_ptr(),
                                lda: depth,
                                rows: m.len(),
                                b: packed.as_ptr(),
                                depth: (c_end - c) * taps,
                                vectors,
                                c: sums[*start..].as_mut_ptr(),
                                ldc,
                                add: c > 0,
                            },
                        );
                    }
                }
            }
            for (i, sums) in sums.chunks_exact(ldc).enumerate() {
                let channel = group * rows + m.start + i;
                let bias = bias.map_or(T::default(), |b| b[channel]);
                for (start, runs) in starts.iter().zip(&runs) {
                    for run in runs {
                        let row = (ad.start + run.d * ad.spread) * ah.target + ah.start + run.h * ah.spread;
                        let at = (run.sample * channels.target + channel) * target
                            + row * aw.target
                            + aw.start
                            + run.w * aw.spread;
                        // SAFETY: a task owns its channels and positions.
                        let out = unsafe { shared.part(at, (run.len - 1) * aw.spread + 1) };
                        let sums = &sums[start + run.column..][..run.len];
                        match aw.spread {
                            1 => out.iter_mut().zip(sums).for_each(|(o, s)| *o = *s + bias),
                            spread => out.iter_mut().step_by(spread).zip(sums).for_each(|(o, s)| *o = *s + bias),
                        }
                    }
                }
            }
        });
    });
}

/// x `[samples, source, in..]`, weight `[target, source / groups, kernel..]`, out `[samples, target, out..]`.
pub(crate) fn conv<T: Real>(
    isa: Isa,
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    samples: usize,
    channels: [usize; 2],
    window: &Window,
    groups: usize,
) -> Vec<T> {
    let gather = Gather([0, 1, 2].map(|i| Axis::forward(&window[i])));
    let mut out = vec![T::default(); samples * channels[1] * gather.target()];
    let channels = Channels { source: channels[0], target: channels[1], groups };
    gather_product(isa, x, samples, &gather, &channels, weight, bias, &mut out);
    out
}

/// The gradient of x: for each phase of the strides one gather from `grad` with the taps that reach it.
/// `channels` are those of x and of `grad`.
pub(crate) fn conv_data_grad<T: Real>(
    isa: Isa,
    grad: &[T],
    weight: &[T],
    samples: usize,
    channels: [usize; 2],
    window: &Window,
    groups: usize,
) -> Vec<T> {
    let (inner, outer) = (channels[0] / groups, channels[1] / groups);
    let mut out = vec![T::default(); samples * channels[0] * window.iter().map(|a| a.input).product::<usize>()];
    let taps: usize = window.iter().map(|a| a.kernel).product();
    let [sd, sh, sw] = [0, 1, 2].map(|i| window[i].stride);
    let mut matrix: Vec<T> = Vec::new();
    for phase in 0..sd * sh * sw {
        let phases = [phase / (sh * sw), phase / sw % sh, phase % sw];
        let axes = [0, 1, 2].map(|i| Axis::backward(&window[i], phases[i]));
        let reach: Vec<usize> = axes[0]
            .1
            .iter()
            .flat_map(|d| axes[1].1.iter().map(move |h| d * window[1].kernel + h))
            .flat_map(|dh| axes[2].1.iter().map(move |w| dh * window[2].kernel + w))
            .collect();
        if reach.is_empty() {
            continue;
        }
        // [groups][inner][outer][reach] from weight [groups][outer][inner][taps].
        let row = outer * reach.len();
        matrix.resize(groups * inner * row, T::default());
        matrix.par_chunks_exact_mut(row).enumerate().for_each(|(i, to)| {
            let (g, c) = (i / inner, i % inner);
            for (o, to) in to.chunks_exact_mut(reach.len()).enumerate() {
                let from = &weight[((g * outer + o) * inner + c) * taps..][..taps];
                to.iter_mut().zip(&reach).for_each(|(to, t)| *to = from[*t]);
            }
        });
        let gather = Gather(axes.map(|(axis, _)| axis));
        let channels = Channels { source: channels[1], target: channels[0], groups };
        gather_product(isa, grad, samples, &gather, &channels, &matrix, None, &mut out);
    }
    out
}

/// The gradient of the weight, `[target, source / groups, kernel..]`: the product of `grad`, as it lies, with packed
/// windows turned over. `channels` are those of x and of `grad`.
pub(crate) fn conv_weight_grad<T: Real>(
    isa: Isa,
    x: &[T],
    grad: &[T],
    samples: usize,
    channels: [usize; 2],
    window: &Window,
    groups: usize,
) -> Vec<T> {
    let gather = Gather([0, 1, 2].map(|i| Axis::forward(&window[i])));
    let (inner, rows) = (channels[0] / groups, channels[1] / groups);
    let (all, positions) = (inner * gather.taps(), gather.positions());
    let size = channels[1] * all;
    if size == 0 || positions * samples == 0 {
        return vec![T::default(); size];
    }
    let panel = VECTORS * T::lanes(isa);
    let blocks: Vec<(usize, Range<usize>)> = (0..samples)
        .flat_map(|s| (0..positions).step_by(DEPTH).map(move |p| (s, p..(p + DEPTH).min(positions))))
        .collect();
    // Few columns are cut along the positions too, into chunks that depend on the shape alone.
    const TASKS: usize = 64;
    const PARTIAL: usize = 1 << 18;
    let chunks = (TASKS / (groups * all.div_ceil(24))).min(PARTIAL / size).clamp(1, blocks.len());
    let chunk = blocks.len().div_ceil(chunks);
    let chunks = blocks.len().div_ceil(chunk);
    let panels = (groups * all.div_ceil(panel) * chunks).div_ceil(2 * rayon::current_num_threads()).clamp(1, PANELS);
    let tiles = all.div_ceil(panels * panel);
    let mut out = vec![T::default(); chunks * size];
    let shared = Shared(out.as_mut_ptr());

    (0..chunks * groups * tiles).into_par_iter().for_each(|task| {
        let (part, group, tile) = (task / (groups * tiles), task / tiles % groups, task % tiles);
        let first = tile * panels * panel;
        let columns = (panels * panel).min(all - first);
        let ldc = columns.next_multiple_of(panel);
        with_scratch(DEPTH.min(positions) * panel, rows * ldc, |packed: &mut [T], sums: &mut [T]| {
            for (i, (sample, p)) in blocks[part * chunk..((part + 1) * chunk).min(blocks.len())].iter().enumerate() {
                let runs = gather.runs(sample * positions + p.start..sample * positions + p.end);
                for start in (0..columns).step_by(panel) {
                    let count = (columns - start).min(panel);
                    let vectors = count.div_ceil(T::lanes(isa));
                    let width = vectors * T::lanes(isa);
                    let packed = &mut packed[..p.len() * width];
                    let range = first + start..first + start + count;
                    gather.pack_transposed(x, channels[0], group * inner, range, &runs, width, packed);
                    let a = &grad[(sample * channels[1] + group * rows) * positions + p.start..];
                    debug_assert!(a.len() >= (rows - 1) * positions + p.len());
                    // SAFETY: the extents above; `isa` comes from `Isa::available`.
                    unsafe {
                        T::product(
                            isa,
                            &Panel {
                                a: a.as_ptr(),
                                lda: positions,
                                rows,
                                b: packed.as_ptr(),
                                depth: p.len(),
                                vectors,
                                c: sums[start..].as_mut_ptr(),
                                ldc,
                                add: i > 0,
                            },
                        );
                    }
                }
            }
            for (i, sums) in sums.chunks_exact(ldc).enumerate() {
                let at = part * size + (group * rows + i) * all + first;
                // SAFETY: a task owns its columns of its part.
                unsafe { shared.part(at, columns) }.copy_from_slice(&sums[..columns]);
            }
        });
    });
    let (total, parts) = out.split_at_mut(size);
    for part in parts.chunks_exact(size) {
        total.iter_mut().zip(part).for_each(|(t, p)| *t += *p);
    }
    out.truncate(size);
    out
}
