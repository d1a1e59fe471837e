//! Convolution and its gradients as matrix products over small packed tiles of shifted windows: no column buffer of
//! the whole activation, only tiles of at most a few hundred kilobytes a thread.
//!
//! Every result is a sum in an order that depends on shapes and the instruction set alone, never on threads.

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

use burn_backend::ElementConversion;
use rayon::prelude::*;

use super::super::{Window, WindowAxis};
use super::simd::{Dots, Isa, MAX_VECTORS, Panel, Real, interleave, strided, vectorised};
use super::slab::{self, Place, Slab};
use super::{Activation, product, written};

/// Rows of the packed matrix (channels x taps, or positions) between two updates of the sums: a panel of that many
/// rows stays in the first-level cache, and long sums are rounded less in short blocks. Ten steps of CosmoFlow in
/// float32 stayed within 1e-5 of float64 with 128 rows, where 256 let a voxel cross the activation's kink.
const DEPTH: usize = 128;
/// Panels of one tile at most: a tile of weights is read once for all of them.
const PANELS: usize = 6;

/// Columns of a gradient whose products are spread over the voxels together, about.
const COLUMNS: usize = 64;

/// Input channels whose weight's gradients are summed together, at most.
const TOGETHER: usize = 8;

/// One axis of a window: output `j` with tap `t` reads source `j * step + bases[t]`, zero outside `0..source`.
struct Axis {
    count: usize,
    step: usize,
    bases: Vec<isize>,
    /// For each tap the outputs that read inside the source.
    inside: Vec<Range<usize>>,
    source: usize,
}

impl Axis {
    fn new(axis: &WindowAxis) -> Axis {
        let bases = (0..axis.kernel).map(|t| (t * axis.dilation) as isize - axis.offset).collect();
        Axis::with_bases(axis.output, axis.stride, bases, axis.input)
    }

    fn with_bases(count: usize, step: usize, bases: Vec<isize>, source: usize) -> Axis {
        let inside = bases
            .iter()
            .map(|&base| {
                // First j with j * step + base >= bound.
                let first = |bound: isize| (bound - base).max(0).unsigned_abs().div_ceil(step).min(count);
                first(0)..first(source as isize)
            })
            .collect();
        Axis { count, step, bases, inside, source }
    }

    /// The outputs that read any of `sources`, and perhaps some between them.
    fn outputs_of(&self, sources: &Range<usize>) -> Range<usize> {
        let reach = |t: usize| {
            let first = |bound: usize| (bound as isize - self.bases[t]).max(0).unsigned_abs().div_ceil(self.step);
            first(sources.start).min(self.count)..first(sources.end).min(self.count)
        };
        let reached = || (0..self.bases.len()).map(reach).filter(|r| !r.is_empty());
        let start = reached().map(|r| r.start).min().unwrap_or(0);
        start..reached().map(|r| r.end).max().unwrap_or(start)
    }

    /// Sources from the first tap's to the last one's.
    fn span(&self) -> usize {
        self.bases[self.bases.len() - 1].abs_diff(self.bases[0]) + 1
    }

    /// Whether windows do not overlap: no source is read twice.
    fn apart(&self) -> bool {
        self.step >= self.span()
    }

    /// The source index of position `j` with tap `t`, if it is inside.
    #[inline]
    fn read(&self, j: usize, t: usize) -> Option<usize> {
        self.inside[t].contains(&j).then(|| (j * self.step).wrapping_add_signed(self.bases[t]))
    }
}

/// Outputs and taps of a window.
struct Gather([Axis; 3]);

/// Outputs next to each other along the width: columns `column..column + len` of a tile.
#[derive(Clone, Copy)]
struct Run {
    sample: usize,
    /// The first one's number within its sample.
    position: usize,
    column: usize,
    len: usize,
}

/// What one tap along the width reads for a run: its columns `lo..hi` read a source row from `first` on.
#[derive(Clone, Copy)]
struct Span {
    lo: usize,
    hi: usize,
    first: usize,
}

/// Where the taps of a tile's outputs read: tables that all channels share.
struct Reads {
    runs: Vec<Run>,
    /// For each tap along depth and height, for each run: where the source row starts, or [`OUTSIDE`].
    rows: Vec<usize>,
    /// For each tap along the width, for each run.
    spans: Vec<Span>,
}

/// A row in the padding.
const OUTSIDE: usize = usize::MAX;

impl Reads {
    /// For each run: the run, where its source row starts, and what it reads of it.
    #[inline(always)]
    fn of(&self, tap_row: usize, tap: usize) -> impl Iterator<Item = (&Run, usize, &Span)> {
        let n = self.runs.len();
        let rows = &self.rows[tap_row * n..][..n];
        let spans = &self.spans[tap * n..][..n];
        self.runs.iter().zip(rows).zip(spans).map(|((run, row), span)| (run, *row, span))
    }
}

impl Gather {
    /// # Panics
    /// If the window has no taps, or reaches further than can be counted.
    fn new(window: &Window) -> Gather {
        let reach = window.map(|axis| {
            let WindowAxis { input, output, kernel, stride, dilation, offset } = axis;
            assert!(kernel > 0 && stride > 0 && dilation > 0, "a window without taps, stride or dilation: {axis:?}");
            let sides = [input, product([output, stride]), product([kernel, dilation]), offset.unsigned_abs()];
            sides.into_iter().try_fold(0usize, usize::checked_add).unwrap_or(usize::MAX)
        });
        // What is copied, counted and compared below is less.
        product([product(reach), DEPTH]);
        Gather([0, 1, 2].map(|i| Axis::new(&window[i])))
    }

    fn positions(&self) -> usize {
        self.0.iter().map(|a| a.count).product()
    }

    fn taps(&self) -> usize {
        self.0.iter().map(|a| a.bases.len()).product()
    }

    /// Taps along depth and height, and along the width.
    fn tap_rows(&self) -> (usize, usize) {
        let [d, h, w] = [0, 1, 2].map(|i| self.0[i].bases.len());
        (d * h, w)
    }

    fn source(&self) -> usize {
        self.0.iter().map(|a| a.source).product()
    }

    /// The tables for the outputs `range`, numbered over all samples, of which one has `per_sample` channels.
    fn reads(&self, range: Range<usize>, per_sample: usize) -> Reads {
        let [ad, ah, aw] = &self.0;
        let (each, w) = (self.positions(), aw.count);
        let mut runs = Vec::with_capacity(range.len() / w + 2);
        let mut p = range.start;
        while p < range.end {
            let position = p % each;
            let len = (w - position % w).min(range.end - p);
            runs.push(Run { sample: p / each, position, column: p - range.start, len });
            p += len;
        }
        let mut rows = Vec::with_capacity(self.tap_rows().0 * runs.len());
        for td in 0..ad.bases.len() {
            for th in 0..ah.bases.len() {
                rows.extend(runs.iter().map(|run| {
                    let row = run.position / w;
                    match (ad.read(row / ah.count, td), ah.read(row % ah.count, th)) {
                        (Some(d), Some(h)) => run.sample * per_sample * self.source() + (d * ah.source + h) * aw.source,
                        _ => OUTSIDE,
                    }
                }));
            }
        }
        let span = |run: &Run, tap: usize| {
            let (inside, start) = (&aw.inside[tap], run.position % w);
            let lo = inside.start.clamp(start, start + run.len) - start;
            let hi = inside.end.clamp(start + lo, start + run.len) - start;
            let first = if lo < hi { ((start + lo) * aw.step).wrapping_add_signed(aw.bases[tap]) } else { 0 };
            Span { lo, hi, first }
        };
        let spans = (0..aw.bases.len()).flat_map(|tap| runs.iter().map(move |run| span(run, tap))).collect();
        Reads { runs, rows, spans }
    }

    /// Writes `channels` x taps rows of `width` columns: what each tap reads for each output.
    fn pack<T: Real>(&self, x: &[T], channels: Range<usize>, reads: &Reads, width: usize, out: &mut [T]) {
        let (source, step, (tap_rows, taps)) = (self.source(), self.0[2].step, self.tap_rows());
        let mut rows = out.chunks_exact_mut(width);
        for c in channels {
            let x = &x[c * source..];
            for tap_row in 0..tap_rows {
                for tap in 0..taps {
                    let Some(out) = rows.next() else { return };
                    for (run, row, &Span { lo, hi, first }) in reads.of(tap_row, tap) {
                        let out = &mut out[run.column..run.column + run.len];
                        if row == OUTSIDE || lo == hi {
                            out.fill(T::default());
                            continue;
                        }
                        if hi - lo < run.len {
                            out[..lo].fill(T::default());
                            out[hi..].fill(T::default());
                        }
                        let x = &x[row + first..row + first + (hi - lo - 1) * step + 1];
                        match step {
                            1 => copy(x, &mut out[lo..hi]),
                            step => out[lo..hi].iter_mut().zip(x.iter().step_by(step)).for_each(|(o, x)| *o = *x),
                        }
                    }
                }
            }
        }
    }

    /// The adjoint of [`Gather::pack`] for one channel: adds each of the taps' rows of `width` columns to the voxels
    /// they read. `out` holds the planes from `first_plane` on; others are left out.
    fn scatter<T: Real>(&self, sums: &[T], width: usize, reads: &Reads, first_plane: usize, out: &mut [T]) {
        let (step, (tap_rows, taps)) = (self.0[2].step, self.tap_rows());
        let skipped = first_plane * self.0[1].source * self.0[2].source;
        let mut rows = sums.chunks_exact(width);
        for tap_row in 0..tap_rows {
            for tap in 0..taps {
                let Some(sums) = rows.next() else { return };
                for (run, row, &Span { lo, hi, first }) in reads.of(tap_row, tap) {
                    // Rows outside the volume lie beyond the planes too.
                    if row < skipped || row - skipped >= out.len() || lo == hi {
                        continue;
                    }
                    let from = row - skipped + first;
                    let out = &mut out[from..from + (hi - lo - 1) * step + 1];
                    let sums = &sums[run.column + lo..run.column + hi];
                    match step {
                        1 => out.iter_mut().zip(sums).for_each(|(o, s)| *o += *s),
                        step => out.iter_mut().step_by(step).zip(sums).for_each(|(o, s)| *o += *s),
                    }
                }
            }
        }
    }

    /// Like [`Gather::pack`] turned over: rows are outputs, and the columns from 0 are `columns` of the numbering
    /// (channel, depth tap, height tap, width tap).
    fn pack_transposed<T: Real>(&self, x: &[T], columns: Range<usize>, reads: &Reads, width: usize, out: &mut [T]) {
        let (source, all, step, (_, taps)) = (self.source(), self.taps(), self.0[2].step, self.tap_rows());
        for (i, column) in columns.enumerate() {
            let (x, tap) = (&x[column / all * source..], column % all);
            for (run, row, &Span { lo, hi, first }) in reads.of(tap / taps, tap % taps) {
                let (lo, hi) = if row == OUTSIDE { (0, 0) } else { (lo, hi) };
                let mut out = out[run.column * width..(run.column + run.len) * width].iter_mut().skip(i).step_by(width);
                out.by_ref().take(lo).for_each(|o| *o = T::default());
                if lo < hi {
                    let x = &x[row + first..row + first + (hi - lo - 1) * step + 1];
                    out.by_ref().take(hi - lo).zip(x.iter().step_by(step)).for_each(|(o, x)| *o = *x);
                }
                out.for_each(|o| *o = T::default());
            }
        }
    }
}

/// Outputs in boxes of whole rows: the input of a box is copied once, padding included, and every tap reads it at an
/// offset of its own. Neighbours along the width read neighbours of the copy, since elements of a row that lie a stride
/// apart are side by side in it: first all those that output 0's first tap leads to, then those after them, and so on.
struct Tiles {
    /// Planes and rows of outputs in a tile.
    planes: usize,
    rows: usize,
    /// Vectors that cover a row of outputs.
    vectors: usize,
    /// Planes, rows and elements of a row of a tile's input.
    extents: [usize; 3],
    /// Elements of a row that lie a stride apart.
    phase: usize,
    /// For each tap, in order, where it reads for a tile's first output.
    offsets: Vec<usize>,
}

impl Tiles {
    /// Whether a row fills enough of its last vector.
    fn fit(gather: &Gather, lanes: usize) -> bool {
        let row = gather.0[2].count;
        5 * row.next_multiple_of(lanes) <= 6 * row
    }

    /// Tiles of about `columns` outputs, if they [`Tiles::fit`].
    fn of(gather: &Gather, lanes: usize, columns: usize) -> Option<Tiles> {
        let [ad, ah, aw] = &gather.0;
        if !Tiles::fit(gather, lanes) {
            return None;
        }
        let vectors = aw.count.div_ceil(lanes);
        let wanted = (columns / (vectors * lanes)).max(1);
        let planes = (wanted / ah.count).clamp(1, ad.count);
        let rows = wanted.clamp(1, ah.count);
        let reach = |axis: &Axis, outputs: usize| (outputs - 1) * axis.step + axis.span();
        let phase = vectors * lanes + (aw.span() - 1) / aw.step;
        let extents = [reach(ad, planes), reach(ah, rows), phase * aw.step.min(aw.span())];
        // The inputs of [`DEPTH`] channels are counted, in lines of the cache.
        product([product(extents), 2 * DEPTH]);
        let tap = |axis: &Axis, t: usize| axis.bases[t].abs_diff(axis.bases[0]);
        let mut offsets = Vec::with_capacity(gather.taps());
        for td in 0..ad.bases.len() {
            for th in 0..ah.bases.len() {
                let row = (tap(ad, td) * extents[1] + tap(ah, th)) * extents[2];
                offsets.extend((0..aw.bases.len()).map(|tw| row + tap(aw, tw) % aw.step * phase + tap(aw, tw) / aw.step));
            }
        }
        Some(Tiles { planes, rows, vectors, extents, phase, offsets })
    }

    /// Tiles for a product with `rows` output channels, whose sums stay in the second-level cache.
    fn new(gather: &Gather, lanes: usize, rows: usize) -> Option<Tiles> {
        Tiles::of(gather, lanes, ((1 << 16) / rows.max(1)).clamp(96, 512))
    }

    /// Tiles of rows that whole vectors cover, for sums of [`DEPTH`] vectors.
    fn whole_rows(gather: &Gather, lanes: usize) -> Option<Tiles> {
        let whole = gather.0[2].count.is_multiple_of(lanes);
        whole.then(|| Tiles::of(gather, lanes, DEPTH * lanes)).flatten()
    }

    /// How far the inputs of channels lie apart: an odd number of cache lines, or they would share a few sets of the cache.
    fn elements(&self) -> usize {
        const LINE: usize = 16;
        (self.extents.iter().product::<usize>().div_ceil(LINE) | 1) * LINE
    }

    /// How many tiles a sample has along depth and height.
    fn counts(&self, gather: &Gather) -> [usize; 2] {
        [gather.0[0].count.div_ceil(self.planes), gather.0[1].count.div_ceil(self.rows)]
    }

    /// The outputs of tile `index` of a sample: planes and rows.
    fn outputs(&self, gather: &Gather, index: usize) -> [Range<usize>; 2] {
        let rows = self.counts(gather)[1];
        let range = |i: usize, step: usize, count: usize| i * step..((i + 1) * step).min(count);
        [range(index / rows, self.planes, gather.0[0].count), range(index % rows, self.rows, gather.0[1].count)]
    }
}

vectorised! {
    /// [`Gather::scatter`] for windows that are apart, into voxels without values: those that no tap reads are left out.
    fn place<T>(gather: &Gather, sums: &[T], width: usize, reads: &Reads, first_plane: usize, out: &mut [MaybeUninit<T>]) {
        let (step, taps) = (gather.0[2].step, gather.tap_rows().1);
        let skipped = first_plane * gather.0[1].source * gather.0[2].source;
        let n = reads.runs.len();
        for (sums, rows) in sums.chunks_exact(taps * width).zip(reads.rows.chunks_exact(n)) {
            for (i, (run, row)) in reads.runs.iter().zip(rows).enumerate() {
                // Rows outside the volume lie beyond the planes too.
                if *row < skipped || row - skipped >= out.len() {
                    continue;
                }
                let (sums, out) = (&sums[run.column..], &mut out[row - skipped..]);
                let span = |tap: usize| reads.spans[tap * n + i];
                if taps == step && (0..taps).all(|tap| span(tap).hi - span(tap).lo == run.len) {
                    let first = reads.spans[i].first;
                    interleave(sums, width, step, &mut out[first..first + run.len * step], MaybeUninit::new);
                    continue;
                }
                for (tap, sums) in sums.chunks(width).enumerate().take(taps) {
                    let Span { lo, hi, first } = span(tap);
                    let to = out[first..].iter_mut().step_by(step);
                    to.zip(&sums[lo..hi]).for_each(|(to, sum)| *to = MaybeUninit::new(*sum));
                }
            }
        }
    }
}

vectorised! {
    /// Copies what the `outputs` of a tile read of channel `channel` of x, counted over all samples, with zeros outside of it.
    fn pack_tile<T>(tiles: &Tiles, gather: &Gather, x: &[Slab<'_, T>], channel: usize, outputs: &[Range<usize>; 2], out: &mut [T]) {
        let [ad, ah, aw] = &gather.0;
        let [_, tile_rows, pitch] = tiles.extents;
        let first = |axis: &Axis, outputs: &Range<usize>| (outputs.start * axis.step) as isize + axis.bases[0];
        let reach = |axis: &Axis, outputs: &Range<usize>| (outputs.len() - 1) * axis.step + axis.span();
        let mut line = Vec::new();
        for d in 0..reach(ad, &outputs[0]) {
            let source_d = first(ad, &outputs[0]) + d as isize;
            for h in 0..reach(ah, &outputs[1]) {
                let source_h = first(ah, &outputs[1]) + h as isize;
                let out = &mut out[(d * tile_rows + h) * pitch..][..pitch];
                if !(0..ad.source as isize).contains(&source_d) || !(0..ah.source as isize).contains(&source_h) {
                    out.fill(T::default());
                    continue;
                }
                let (source_d, source_h) = (source_d.unsigned_abs(), source_h.unsigned_abs());
                let row = slab::row(x, channel, source_d, source_h, aw.source, &mut line);
                for (p, out) in out.chunks_exact_mut(tiles.phase).enumerate() {
                    let base = aw.bases[0] + p as isize;
                    // The first element at or behind a bound of the source.
                    let behind = |bound: isize| (bound - base).max(0).unsigned_abs().div_ceil(aw.step).min(out.len());
                    let (lo, hi) = (behind(0), behind(aw.source as isize));
                    if lo == hi {
                        out.fill(T::default());
                        continue;
                    }
                    out[..lo].fill(T::default());
                    let x = &row[(lo * aw.step).wrapping_add_signed(base)..];
                    match aw.step {
                        1 => out[lo..hi].copy_from_slice(&x[..hi - lo]),
                        step => strided(&mut out[lo..hi], x, step, |to, x| *to = x),
                    }
                    out[hi..].fill(T::default());
                }
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
        // A length known here is not a call.
        to[..8].copy_from_slice(&from[..8]);
    }
    for (from, to) in from.remainder().iter().zip(to.into_remainder()) {
        *to = *from;
    }
}

/// Where the vectors of a packed panel start.
fn vectors_of<T: Real>(packed: &[T], lanes: usize) -> [*const T; MAX_VECTORS] {
    // Of those that a narrow panel lacks nothing is read.
    std::array::from_fn(|j| packed.as_ptr().wrapping_add(j * lanes))
}

/// For each number of vectors in a packed panel, where its first `depth` rows start.
struct PackedRows {
    lanes: usize,
    starts: [Vec<usize>; MAX_VECTORS],
}

impl PackedRows {
    fn new(lanes: usize, depth: usize) -> PackedRows {
        PackedRows { lanes, starts: std::array::from_fn(|n| (0..depth).map(|r| r * (n + 1) * lanes).collect()) }
    }

    /// Of rows of `width`, whole vectors.
    fn of(&self, width: usize, depth: usize) -> &[usize] {
        &self.starts[width / self.lanes - 1][..depth]
    }
}

/// Disjoint parts of one buffer, written by several threads.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);
// SAFETY: it is a pointer; what is made of it, whoever calls the unsafe functions below answers for.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// `at..at + len` must lie in the buffer, which is alive and holds values there, and no one else may read or write it
    /// meanwhile.
    #[allow(clippy::mut_from_ref, reason = "the caller promises disjoint parts")]
    unsafe fn part(&self, at: usize, len: usize) -> &mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }

    /// [`Shared::part`] of a buffer that may not hold values yet.
    ///
    /// # Safety
    /// As [`Shared::part`]; only values may be written.
    #[allow(clippy::mut_from_ref, reason = "the caller promises disjoint parts")]
    unsafe fn space(&self, at: usize, len: usize) -> &mut [MaybeUninit<T>] {
        // SAFETY: the caller's promise; any memory is a `MaybeUninit`.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at).cast(), len) }
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

vectorised! {
    /// Writes sums with a bias added, activated.
    fn finish<T>(sums: &[T], bias: T, activation: Option<Activation<T>>, out: &mut [MaybeUninit<T>]) {
        let sums = out.iter_mut().zip(sums);
        match activation {
            None => sums.for_each(|(out, sum)| *out = MaybeUninit::new(*sum + bias)),
            Some(activation) => sums.for_each(|(out, sum)| *out = MaybeUninit::new(activation.apply(*sum + bias))),
        }
    }
}

/// The values of a block in one box.
fn only<'a, T>(x: &[Slab<'a, T>]) -> &'a [T] {
    let [Slab { values, .. }] = x else { unreachable!("short rows are read from a block in one box") };
    values
}

/// What the output of a convolution is made of.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a, T> {
    /// Boxes that make up x. Several only where [`Conv::reads_slabs`].
    pub(crate) x: &'a [Slab<'a, T>],
    pub(crate) weight: &'a [T],
    /// Added to the sums of each output channel.
    pub(crate) bias: Option<&'a [T]>,
    /// Factor of what is negative then, see [`Activation`].
    pub(crate) slope: T,
}

impl<'a, T: Real> Operands<'a, T> {
    /// The sums as they are.
    pub(crate) fn product(x: &'a [Slab<'a, T>], weight: &'a [T]) -> Operands<'a, T> {
        Operands { x, weight, bias: None, slope: 1.0.elem() }
    }
}

/// A convolution of x `[samples, channels[0], in..]` to `[samples, channels[1], out..]` with a weight
/// `[channels[1], channels[0] / groups, kernel..]`.
pub(crate) struct Conv {
    isa: Isa,
    samples: usize,
    channels: [usize; 2],
    groups: usize,
    gather: Gather,
}

impl Conv {
    /// # Panics
    /// If the groups do not divide the channels, or the volumes are too large to be counted.
    pub(crate) fn new(isa: Isa, samples: usize, channels: [usize; 2], window: &Window, groups: usize) -> Conv {
        let divides = groups > 0 && channels.iter().all(|c| c.is_multiple_of(groups));
        assert!(divides, "{groups} groups of {} input and {} output channels", channels[0], channels[1]);
        let conv = Conv { isa, samples, channels, groups, gather: Gather::new(window) };
        let [inputs, outputs] = channels;
        product([samples, inputs, conv.gather.source()]);
        product([samples, outputs, conv.gather.positions()]);
        product([inputs, outputs, conv.gather.taps()]);
        conv
    }

    /// Values of the weight.
    fn weights(&self) -> usize {
        self.channels[1] * self.group_channels()[0] * self.gather.taps()
    }

    /// Panics unless x has the samples and channels of the convolution.
    fn check_x<T>(&self, x: &[Slab<'_, T>]) {
        for Slab { at, values } in x {
            let len = product([self.samples, self.channels[0], product([0, 1, 2].map(|i| at[i].len()))]);
            assert_eq!(values.len(), len, "values of a box of {} samples of {} channels at {at:?}", self.samples, self.channels[0]);
        }
        if let [Slab { values, .. }] = x {
            assert_eq!(values.len(), self.samples * self.channels[0] * self.gather.source(), "values of x");
        }
    }

    /// Panics unless there is a gradient for each output.
    fn check_grad<T>(&self, grad: &[T]) {
        assert_eq!(grad.len(), self.samples * self.channels[1] * self.gather.positions(), "values of the gradient");
    }

    /// Input and output channels of a group.
    fn group_channels(&self) -> [usize; 2] {
        self.channels.map(|c| c / self.groups)
    }

    /// All of `x` as a box.
    pub(crate) fn whole<'a, T>(&self, x: &'a [T]) -> Slab<'a, T> {
        Slab::whole([0, 1, 2].map(|i| self.gather.0[i].source), x)
    }

    /// Whether the output is computed from x in several boxes.
    pub(crate) fn reads_slabs<T: Real>(&self) -> bool {
        Tiles::fit(&self.gather, T::lanes(self.isa))
    }

    /// Whether the weight's gradient is.
    pub(crate) fn weight_grad_reads_slabs<T: Real>(&self) -> bool {
        Tiles::whole_rows(&self.gather, T::lanes(self.isa)).is_some()
    }

    /// The output.
    pub(crate) fn forward<T: Real>(&self, operands: Operands<'_, T>) -> Vec<T> {
        let counts = [0, 1, 2].map(|i| self.gather.0[i].count);
        let write = |_, out: &mut [MaybeUninit<T>]| self.forward_into(operands, out, Place::whole(counts));
        // SAFETY: the box is the whole volume, so that every value is written.
        unsafe { written(1, self.samples * self.channels[1] * self.gather.positions(), write) }
    }

    /// Writes the output, the product of the weight, as it lies, with packed windows, into the volumes `out`: every value
    /// of its box, and nothing else. Each is the same to the bit whichever part of a larger output it is computed with.
    pub(crate) fn forward_into<T: Real>(&self, operands: Operands<'_, T>, out: &mut [MaybeUninit<T>], place: Place) {
        let Conv { isa, samples, channels, groups, ref gather } = *self;
        let [inner, rows] = self.group_channels();
        let (taps, each) = (gather.taps(), gather.positions());
        let (depth, positions) = (inner * taps, each * samples);
        let counts = [0, 1, 2].map(|i| gather.0[i].count);
        let volumes = product([samples, channels[1], product(place.extents)]);
        assert!(
            place.fits(counts, out.len()) && out.len() == volumes,
            "a box of {counts:?} voxels at {:?} of {samples} samples of {} channels of {:?}, {} values",
            place.at,
            channels[1],
            place.extents,
            out.len()
        );
        self.check_x(operands.x);
        assert_eq!(operands.weight.len(), self.weights(), "values of the weight");
        assert!(operands.bias.is_none_or(|bias| bias.len() == channels[1]), "a bias for each of {} channels", channels[1]);
        if positions == 0 || channels[1] == 0 {
            return;
        }
        if let Some(tiles) = Tiles::new(gather, T::lanes(isa), rows) {
            return self.forward_tiles(&tiles, operands, out, place);
        }
        let Operands { x, weight, bias, slope } = operands;
        let x = only(x);
        let activation = Activation::changing(slope);
        let panel = T::panel(isa);
        // How the work is cut depends on the threads, the order of each sum does not.
        let panels = positions.div_ceil(panel).div_ceil(2 * rayon::current_num_threads()).clamp(1, PANELS);
        let tiles = positions.div_ceil(panels * panel);
        let (parts, part_rows) = row_parts(rows, tiles * groups);
        let block = (DEPTH / taps).clamp(1, inner);
        let table = PackedRows::new(T::lanes(isa), block * taps);
        let shared = Shared(out.as_mut_ptr());

        (0..groups * tiles * parts).into_par_iter().for_each(|task| {
            let (group, tile, part) = (task / (tiles * parts), task / parts % tiles, task % parts);
            let m = part * part_rows..((part + 1) * part_rows).min(rows);
            let p0 = tile * panels * panel;
            let columns = (panels * panel).min(positions - p0);
            let starts: Vec<usize> = (0..columns).step_by(panel).collect();
            let reads: Vec<Reads> = starts.iter().map(|s| gather.reads(p0 + s..p0 + (s + panel).min(columns), channels[0])).collect();
            let ldc = starts.len() * panel;
            with_scratch(block * taps * panel, m.len() * ldc, |packed: &mut [T], sums: &mut [T]| {
                for c in (0..inner).step_by(block) {
                    let c_end = (c + block).min(inner);
                    for (start, reads) in starts.iter().zip(&reads) {
                        let vectors = (columns - start).min(panel).div_ceil(T::lanes(isa));
                        let width = vectors * T::lanes(isa);
                        let packed = &mut packed[..(c_end - c) * taps * width];
                        gather.pack(x, group * inner + c..group * inner + c_end, reads, width, packed);
                        let a = &weight[(group * rows + m.start) * depth + c * taps..];
                        // SAFETY: of the weight, whose length was checked, `m` rows of `depth` are left and `c_end - c`
                        // channels of each; `packed` has that many rows of `width`, `sums` `m` rows of `ldc` with a whole
                        // panel from `start` on, which this task alone has.
                        unsafe {
                            T::product(
                                isa,
                                &Panel {
                                    a: a.as_ptr(),
                                    lda: depth,
                                    step: 1,
                                    rows: m.len(),
                                    b: vectors_of(packed, T::lanes(isa)),
                                    offsets: table.of(width, (c_end - c) * taps),
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
                    for (start, reads) in starts.iter().zip(&reads) {
                        for run in &reads.runs {
                            let (row, w) = (run.position / counts[2], run.position % counts[2]);
                            let from = place.voxel(run.sample * channels[1] + channel, [row / counts[1], row % counts[1], w]);
                            // SAFETY: a task owns its channels and positions, and the box lies in the volume.
                            let out = unsafe { shared.part(from, run.len) };
                            finish(isa, &sums[start + run.column..], bias, activation, out);
                        }
                    }
                }
            });
        });
    }

    /// [`Conv::forward_into`] by tiles. The order of every sum is the same.
    fn forward_tiles<T: Real>(&self, tiles: &Tiles, operands: Operands<'_, T>, out: &mut [MaybeUninit<T>], place: Place) {
        let Conv { isa, samples, channels, groups, ref gather } = *self;
        let [inner, rows] = self.group_channels();
        let [ad, ah, aw] = &gather.0;
        let (taps, lanes) = (gather.taps(), T::lanes(isa));
        let Operands { x, weight, bias, slope } = operands;
        let activation = Activation::changing(slope);
        let depth = inner * taps;
        let [_, tile_rows, pitch] = tiles.extents;
        let each: usize = tiles.counts(gather).iter().product();
        let (parts, part_rows) = row_parts(rows, each * samples * groups);
        let block = (DEPTH / taps).clamp(1, inner);
        let offsets: Vec<usize> = (0..block).flat_map(|c| tiles.offsets.iter().map(move |o| c * tiles.elements() + o)).collect();
        let shared = Shared(out.as_mut_ptr());

        (0..samples * groups * each * parts).into_par_iter().for_each(|task| {
            let (outer, tile, part) = (task / (each * parts), task / parts % each, task % parts);
            let (sample, group) = (outer / groups, outer % groups);
            let m = part * part_rows..((part + 1) * part_rows).min(rows);
            let outputs = tiles.outputs(gather, tile);
            let lines: Vec<(usize, usize)> = outputs[0].clone().flat_map(|d| outputs[1].clone().map(move |h| (d, h))).collect();
            // Where each vector of outputs reads with the first tap.
            let start = |&(d, h): &(usize, usize)| {
                let line = (d - outputs[0].start) * ad.step * tile_rows + (h - outputs[1].start) * ah.step;
                (0..tiles.vectors).map(move |v| line * pitch + v * lanes)
            };
            let starts: Vec<usize> = lines.iter().flat_map(start).collect();
            let ldc = starts.len() * lanes;
            let together = T::panel(isa) / lanes;
            with_scratch(block * tiles.elements(), m.len() * ldc, |packed: &mut [T], sums: &mut [T]| {
                for c in (0..inner).step_by(block) {
                    let c_end = (c + block).min(inner);
                    for (packed, c) in packed.chunks_exact_mut(tiles.elements()).zip(c..c_end) {
                        pack_tile(isa, tiles, gather, x, sample * channels[0] + group * inner + c, &outputs, packed);
                    }
                    let a = &weight[(group * rows + m.start) * depth + c * taps..];
                    for (i, starts) in starts.chunks(together).enumerate() {
                        let at = |j: usize| starts.get(j).map_or(packed.as_ptr(), |start| packed[*start..].as_ptr());
                        let panel = Panel {
                            a: a.as_ptr(),
                            lda: depth,
                            step: 1,
                            rows: m.len(),
                            b: std::array::from_fn(at),
                            offsets: &offsets[..(c_end - c) * taps],
                            vectors: starts.len(),
                            c: sums[i * together * lanes..].as_mut_ptr(),
                            ldc,
                            add: c > 0,
                        };
                        // SAFETY: of the weight, whose length was checked, `m` rows of `depth` are left and `c_end - c`
                        // channels of each. A tile's input has, behind each vector's start, what its lanes read with every
                        // tap: `Tiles::of` made it so. `sums` has `m` rows of all the vectors, which this task alone has.
                        unsafe { T::product(isa, &panel) };
                    }
                }
                for (i, sums) in sums.chunks_exact(ldc).enumerate() {
                    let channel = group * rows + m.start + i;
                    let bias = bias.map_or(T::default(), |b| b[channel]);
                    for ((d, h), sums) in lines.iter().zip(sums.chunks_exact(tiles.vectors * lanes)) {
                        let from = place.voxel(sample * channels[1] + channel, [*d, *h, 0]);
                        // SAFETY: a task owns its channels and rows, and the box lies in the volume.
                        let out = unsafe { shared.part(from, aw.count) };
                        finish(isa, sums, bias, activation, out);
                    }
                }
            });
        });
    }

    /// The convolution that gives this one's gradient of x from that of the output, with [`turned_weight`]: with stride 1
    /// every voxel of x is a sum over outputs at fixed offsets. `None` with other strides, and where turning the weight
    /// over would take longer than it saves.
    fn turned(&self, lanes: usize) -> Option<Conv> {
        const POSITIONS: usize = 2048;
        let [d, h, w] = &self.gather.0;
        if [d, h, w].iter().any(|axis| axis.step != 1) || self.samples * self.gather.positions() < POSITIONS {
            return None;
        }
        let turned = |axis: &Axis| Axis::with_bases(axis.source, 1, axis.bases.iter().rev().map(|base| -base).collect(), axis.count);
        let gather = Gather([turned(d), turned(h), turned(w)]);
        let [inputs, outputs] = self.channels;
        Tiles::fit(&gather, lanes).then_some(Conv {
            isa: self.isa,
            samples: self.samples,
            channels: [outputs, inputs],
            groups: self.groups,
            gather,
        })
    }

    /// The gradient of x: the product of the weight, turned over by its strides alone, with tiles of `grad`, each entry
    /// added to the voxel its tap reads.
    pub(crate) fn data_grad<T: Real>(&self, grad: &[T], weight: &[T]) -> Vec<T> {
        let Conv { isa, samples, channels, groups, ref gather } = *self;
        let [inner, depth] = self.group_channels();
        let (taps, source, positions) = (gather.taps(), gather.source(), gather.positions());
        let len = samples * channels[0] * source;
        self.check_grad(grad);
        assert_eq!(weight.len(), self.weights(), "values of the weight");
        if len == 0 || positions == 0 || depth == 0 {
            return vec![T::default(); len];
        }
        if let Some(turned) = self.turned(T::lanes(isa)) {
            return turned.forward(Operands::product(&[turned.whole(grad)], &turned_weight(weight, [inner, depth], taps)));
        }
        let [ad, ah, aw] = &gather.0;
        let (panel, lanes) = (T::panel(isa), T::lanes(isa));
        // How the work is cut depends on the threads, the order of each sum does not: columns lie on one grid.
        let width = (COLUMNS / panel).max(1) * panel;
        let wanted = 2 * rayon::current_num_threads();
        let block = inner.div_ceil(wanted.div_ceil(samples * groups)).clamp(1, (DEPTH / taps).max(1));
        let blocks = inner.div_ceil(block);
        let slabs = wanted.div_ceil(samples * groups * blocks).clamp(1, (ad.source / 8).max(1));
        let slab = ad.source.div_ceil(slabs);
        let offsets: Vec<usize> = (0..depth).map(|o| o * width).collect();
        let apart = gather.0.iter().all(Axis::apart);
        // Where each voxel is read by one tap of one output, each is written once.
        let whole = apart && gather.0.iter().all(|axis| axis.inside.iter().map(Range::len).sum::<usize>() == axis.source);
        let mut out = if whole { Vec::with_capacity(len) } else { vec![T::default(); len] };
        let shared = Shared(out.as_mut_ptr());

        (0..samples * groups * blocks * slabs).into_par_iter().for_each(|task| {
            let (outer, first, part) = (task / (blocks * slabs), task / slabs % blocks * block, task % slabs);
            let (sample, group) = (outer / groups, outer % groups);
            let count = block.min(inner - first);
            let planes = (part * slab).min(ad.source)..((part + 1) * slab).min(ad.source);
            let area = ah.count * aw.count;
            let reached = ad.outputs_of(&planes);
            let part_rows = count * taps;
            with_scratch(depth * (part_rows + width), part_rows * width, |packed: &mut [T], sums: &mut [T]| {
                // This task's part of the weight, close together: in place its rows are a whole filter apart.
                let (a, packed) = packed.split_at_mut(depth * part_rows);
                for (o, a) in a.chunks_exact_mut(part_rows).enumerate() {
                    let from = ((group * depth + o) * inner + first) * taps;
                    a.copy_from_slice(&weight[from..from + part_rows]);
                }
                for p0 in (reached.start * area / width * width..reached.end * area).step_by(width) {
                    let columns = width.min(positions - p0);
                    for (o, packed) in packed.chunks_exact_mut(width).enumerate() {
                        let from = (sample * channels[1] + group * depth + o) * positions + p0;
                        copy(&grad[from..from + columns], &mut packed[..columns]);
                    }
                    for start in (0..columns).step_by(panel) {
                        let tile = Panel {
                            a: a.as_ptr(),
                            lda: 1,
                            step: part_rows,
                            rows: part_rows,
                            b: vectors_of(&packed[start..], lanes),
                            offsets: &offsets,
                            vectors: (columns - start).min(panel).div_ceil(lanes),
                            c: sums[start..].as_mut_ptr(),
                            ldc: width,
                            add: false,
                        };
                        // SAFETY: `a` has `part_rows` values for each of `depth` channels, as `packed` has `width`, and
                        // `sums` `part_rows` rows of `width`, whole panels: this task alone has all three.
                        unsafe { T::product(isa, &tile) };
                    }
                    let reads = gather.reads(p0..p0 + columns, 0);
                    for (c, sums) in sums.chunks_exact(taps * width).take(count).enumerate() {
                        let at = ((sample * channels[0] + group * inner + first + c) * ad.source + planes.start) * ah.source * aw.source;
                        let voxels = planes.len() * ah.source * aw.source;
                        // SAFETY: a task owns these planes of its channels; where windows overlap they hold values.
                        unsafe {
                            match apart {
                                true => place(isa, gather, sums, width, &reads, planes.start, shared.space(at, voxels)),
                                false => gather.scatter(sums, width, &reads, planes.start, shared.part(at, voxels)),
                            }
                        }
                    }
                }
            });
        });
        // SAFETY: the buffer has room for `len` values, and holds zeros with what was added to them, or a value was placed
        // everywhere: `whole` says that each voxel is read by one tap of one output, and all outputs were walked.
        unsafe { out.set_len(len) };
        out
    }

    /// The gradient of the weight: the product of `grad`, as it lies, with packed windows turned over. x is in several boxes
    /// only where [`Conv::weight_grad_reads_slabs`].
    pub(crate) fn weight_grad<T: Real>(&self, x: &[Slab<'_, T>], grad: &[T]) -> Vec<T> {
        let Conv { isa, samples, channels, groups, ref gather } = *self;
        let [inner, rows] = self.group_channels();
        let (all, positions) = (inner * gather.taps(), gather.positions());
        let size = channels[1] * all;
        self.check_x(x);
        self.check_grad(grad);
        if size == 0 || positions * samples == 0 {
            return vec![T::default(); size];
        }
        if let Some(tiles) = Tiles::whole_rows(gather, T::lanes(isa)) {
            return self.weight_grad_tiles(&tiles, x, grad);
        }
        let x = only(x);
        if positions >= DEPTH {
            return self.weight_grad_dots(x, grad);
        }
        let panel = T::panel(isa);
        let blocks: Vec<(usize, Range<usize>)> =
            (0..samples).flat_map(|s| (0..positions).step_by(DEPTH).map(move |p| (s, p..(p + DEPTH).min(positions)))).collect();
        let (chunk, chunks) = chunks(blocks.len(), groups * all.div_ceil(16), size);
        let panels = (groups * all.div_ceil(panel) * chunks).div_ceil(2 * rayon::current_num_threads()).clamp(1, PANELS);
        let tiles = all.div_ceil(panels * panel);
        let table = PackedRows::new(T::lanes(isa), DEPTH.min(positions));
        let mut out = vec![T::default(); chunks * size];
        let shared = Shared(out.as_mut_ptr());

        (0..chunks * groups * tiles).into_par_iter().for_each(|task| {
            let (part, group, tile) = (task / (groups * tiles), task / tiles % groups, task % tiles);
            let first = tile * panels * panel;
            let columns = (panels * panel).min(all - first);
            let ldc = columns.next_multiple_of(panel);
            with_scratch(DEPTH.min(positions) * panel, rows * ldc, |packed: &mut [T], sums: &mut [T]| {
                for (i, (sample, p)) in blocks[part * chunk..((part + 1) * chunk).min(blocks.len())].iter().enumerate() {
                    let reads = gather.reads(sample * positions + p.start..sample * positions + p.end, channels[0]);
                    for start in (0..columns).step_by(panel) {
                        let count = (columns - start).min(panel);
                        let vectors = count.div_ceil(T::lanes(isa));
                        let width = vectors * T::lanes(isa);
                        let packed = &mut packed[..p.len() * width];
                        let range = group * all + first + start..group * all + first + start + count;
                        gather.pack_transposed(x, range, &reads, width, packed);
                        let a = &grad[(sample * channels[1] + group * rows) * positions + p.start..];
                        // SAFETY: of the gradient, whose length was checked, a sample's channels from the group's first one
                        // are left, from position `p.start` on; `packed` has a row of `width` for each position, `sums`
                        // `rows` of `ldc` with a whole panel from `start` on, which this task alone has.
                        unsafe {
                            T::product(
                                isa,
                                &Panel {
                                    a: a.as_ptr(),
                                    lda: positions,
                                    step: 1,
                                    rows,
                                    b: vectors_of(packed, T::lanes(isa)),
                                    offsets: table.of(width, p.len()),
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
        sum_parts(out, size)
    }

    /// The gradient of the weight by tiles: of some input channels, and each row of `grad` as it lies.
    fn weight_grad_tiles<T: Real>(&self, tiles: &Tiles, x: &[Slab<'_, T>], grad: &[T]) -> Vec<T> {
        let Conv { isa, samples, channels, groups, ref gather } = *self;
        let [inner, rows] = self.group_channels();
        let [ad, ah, aw] = &gather.0;
        let (taps, positions) = (gather.taps(), gather.positions());
        let (all, size) = (inner * taps, channels[1] * inner * taps);
        let [_, tile_rows, pitch] = tiles.extents;
        let each: usize = tiles.counts(gather).iter().product();
        let (chunk, chunks) = chunks(samples * each, groups * inner, size);
        let mut out = vec![T::default(); chunks * size];
        let shared = Shared(out.as_mut_ptr());

        // Channels that share a tile's gradients while they are in the cache: of any number the sums are the same.
        let together = (chunks * groups * inner).div_ceil(8 * rayon::current_num_threads()).clamp(1, inner.min(TOGETHER));
        let blocks = inner.div_ceil(together);

        (0..chunks * groups * blocks).into_par_iter().for_each(|task| {
            let (part, group, start) = (task / (groups * blocks), task / blocks % groups, task % blocks * together);
            let count = together.min(inner - start);
            with_scratch(tiles.elements(), count * rows * taps, |packed: &mut [T], sums: &mut [T]| {
                sums.fill(T::default());
                for index in part * chunk..((part + 1) * chunk).min(samples * each) {
                    let (sample, outputs) = (index / each, tiles.outputs(gather, index % each));
                    let first = (outputs[0].start * ah.count + outputs[1].start) * aw.count;
                    let a = &grad[(sample * channels[1] + group * rows) * positions + first..];
                    for (c, sums) in sums.chunks_exact_mut(rows * taps).enumerate() {
                        pack_tile(isa, tiles, gather, x, sample * channels[0] + group * inner + start + c, &outputs, packed);
                        let dots = Dots {
                            a: a.as_ptr(),
                            lda: positions,
                            rows,
                            b: packed.as_ptr(),
                            offsets: &tiles.offsets,
                            len: aw.count,
                            lines: outputs[1].len(),
                            planes: outputs[0].len(),
                            a_steps: [aw.count, ah.count * aw.count],
                            b_steps: [ah.step * pitch, ad.step * tile_rows * pitch],
                            c: sums.as_mut_ptr(),
                            ldc: taps,
                        };
                        // SAFETY: a tile's input has what its outputs read with every tap: `Tiles::of` made it so. Of the
                        // gradient, whose length was checked, a sample's channels from the group's first one are left, from
                        // the tile's first output on. Whole vectors cover a row. This task alone has `sums`, `rows` of `taps`.
                        unsafe { T::dots(isa, &dots) };
                    }
                }
                for (i, sums) in sums.chunks_exact(taps).enumerate() {
                    let at = part * size + (group * rows + i % rows) * all + (start + i / rows) * taps;
                    // SAFETY: a task owns its channels of its part.
                    unsafe { shared.part(at, taps) }.copy_from_slice(sums);
                }
            });
        });
        sum_parts(out, size)
    }

    /// The gradient of the weight where there are many positions: windows packed as they lie, multiplied along the
    /// positions.
    fn weight_grad_dots<T: Real>(&self, x: &[T], grad: &[T]) -> Vec<T> {
        let Conv { isa, samples, channels, groups, ref gather } = *self;
        let ([inner, rows], lanes) = (self.group_channels(), T::lanes(isa));
        // Enough vectors for what adding up a sum's lanes takes.
        let block = (2 * DEPTH).max(32 * lanes);
        let (taps, positions) = (gather.taps(), gather.positions());
        let (all, size) = (inner * taps, channels[1] * inner * taps);
        let blocks: Vec<(usize, Range<usize>)> =
            (0..samples).flat_map(|s| (0..positions).step_by(block).map(move |p| (s, p..(p + block).min(positions)))).collect();
        let (chunk, chunks) = chunks(blocks.len(), groups * inner, size);
        let mut out = vec![T::default(); chunks * size];
        let shared = Shared(out.as_mut_ptr());

        (0..chunks * groups * inner).into_par_iter().for_each(|task| {
            let (part, group, c) = (task / (groups * inner), task / inner % groups, task % inner);
            with_scratch(taps * block.next_multiple_of(lanes), rows * (taps + lanes), |packed: &mut [T], rest: &mut [T]| {
                let (sums, ends) = rest.split_at_mut(rows * taps);
                sums.fill(T::default());
                for (sample, p) in &blocks[part * chunk..((part + 1) * chunk).min(blocks.len())] {
                    let width = p.len().next_multiple_of(lanes);
                    let reads = gather.reads(sample * positions + p.start..sample * positions + p.end, channels[0]);
                    let packed = &mut packed[..taps * width];
                    let channel = group * inner + c;
                    gather.pack(x, channel..channel + 1, &reads, width, packed);
                    let a = &grad[(sample * channels[1] + group * rows) * positions + p.start..];
                    let whole = p.len() / lanes * lanes;
                    let offsets: Vec<usize> = (0..taps).map(|tap| tap * width).collect();
                    let dots = |a: *const T, lda: usize, b: *const T, len: usize, sums: &mut [T]| {
                        let (c, offsets, steps) = (sums.as_mut_ptr(), &offsets[..], [0; 2]);
                        let (lines, planes) = (1, 1);
                        let dots = Dots { a, lda, rows, b, offsets, len, lines, planes, a_steps: steps, b_steps: steps, c, ldc: taps };
                        // SAFETY: `a` is the gradient, whose length was checked, from a sample's first channel of the group
                        // and position `p.start` on, and `len` positions of it, or `ends`, `rows` of a vector; `b` is
                        // `packed`, `taps` rows of `width`, from `width - len` on at most; this task alone has the sums,
                        // `rows` of `taps`.
                        unsafe { T::dots(isa, &dots) }
                    };
                    dots(a.as_ptr(), positions, packed.as_ptr(), whole, sums);
                    if whole < width {
                        // The last positions, filled up to a vector with zeros.
                        packed.chunks_exact_mut(width).for_each(|row| row[p.len()..].fill(T::default()));
                        for (end, row) in ends.chunks_exact_mut(lanes).zip(a.chunks(positions)) {
                            end.fill(T::default());
                            end[..p.len() - whole].copy_from_slice(&row[whole..p.len()]);
                        }
                        dots(ends.as_ptr(), lanes, packed[whole..].as_ptr(), lanes, sums);
                    }
                }
                for (i, sums) in sums.chunks_exact(taps).enumerate() {
                    let at = part * size + (group * rows + i) * all + c * taps;
                    // SAFETY: a task owns its channel of its part.
                    unsafe { shared.part(at, taps) }.copy_from_slice(sums);
                }
            });
        });
        sum_parts(out, size)
    }
}

/// The weight of the [`Conv::turned`] convolution: `[groups * depth, inner, taps]` becomes `[groups * inner, depth,
/// taps]`, taps from the last to the first.
fn turned_weight<T: Real>(weight: &[T], [inner, depth]: [usize; 2], taps: usize) -> Vec<T> {
    let mut out = vec![T::default(); weight.len()];
    out.par_chunks_mut((depth * taps).max(1)).enumerate().for_each(|(row, out)| {
        let (group, c) = (row / inner, row % inner);
        for (o, out) in out.chunks_exact_mut(taps).enumerate() {
            let from = ((group * depth + o) * inner + c) * taps;
            out.iter_mut().zip(weight[from..from + taps].iter().rev()).for_each(|(out, w)| *out = *w);
        }
    });
    out
}

/// Cuts `rows` among threads where there are fewer than enough `tasks` without: how many parts there are, and the rows of
/// one.
fn row_parts(rows: usize, tasks: usize) -> (usize, usize) {
    let parts = match rayon::current_num_threads() {
        1 => 1,
        threads => (2 * threads).div_ceil(tasks).clamp(1, rows.div_ceil(16)),
    };
    let part_rows = rows.div_ceil(parts).next_multiple_of(4);
    (rows.div_ceil(part_rows), part_rows)
}

/// Cuts `blocks` of positions, where there are fewer than enough `tasks` without, into chunks whose results of
/// `size` entries are summed at the end: how many a chunk has and how many chunks there are. They depend on the
/// shape alone.
fn chunks(blocks: usize, tasks: usize, size: usize) -> (usize, usize) {
    const TASKS: usize = 64;
    const ENTRIES: usize = 1 << 18;
    let chunk = blocks.div_ceil((TASKS / tasks).min(ENTRIES / size).clamp(1, blocks));
    (chunk, blocks.div_ceil(chunk))
}

/// The sum of the parts of `size` entries each.
fn sum_parts<T: Real>(mut all: Vec<T>, size: usize) -> Vec<T> {
    let (total, parts) = all.split_at_mut(size);
    for part in parts.chunks_exact(size) {
        total.iter_mut().zip(part).for_each(|(t, p)| *t += *p);
    }
    all.truncate(size);
    all
}
