//! Index mathematics of windows on split axes.
//!
//! Output `o` reads inputs `o * stride - low + {0, dilation, .., (kernel - 1) * dilation}`. Outside the volume is
//! padding: nothing, or voxels of the volume itself as a [`PaddingMode`] says.

use crate::layout::{Axis, AxisNeed, Piece};
use crate::window::{PaddingMode, WindowAxis};

/// A window along one axis of the whole volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AxisWindow {
    /// Taps.
    pub kernel: usize,
    /// Step between outputs.
    pub stride: usize,
    /// Step between taps.
    pub dilation: usize,
    /// Padding before the first voxel.
    pub low: usize,
    /// Padding after the last voxel.
    pub high: usize,
    /// What the padding holds.
    pub mode: PaddingMode,
}

impl AxisWindow {
    /// The window with the geometry `whole` has on the whole volume: where it reads beyond the input and the padding
    /// before it, there is padding behind.
    pub fn of(whole: &WindowAxis, mode: PaddingMode) -> AxisWindow {
        let low = whole.offset.max(0) as usize;
        let high = whole.span().saturating_sub(whole.input + low);
        // Without padding nothing outside is read.
        let mode = if low + high == 0 { PaddingMode::Zeros } else { mode };
        AxisWindow { kernel: whole.kernel, stride: whole.stride, dilation: whole.dilation, low, high, mode }
    }

    /// From first tap to last, both included.
    pub fn span(&self) -> usize {
        (self.kernel - 1) * self.dilation + 1
    }

    /// Extent of the output over `input` voxels; the window fits into the padded input.
    pub fn output(&self, input: usize) -> usize {
        (input + self.low + self.high - self.span()) / self.stride + 1
    }

    /// The axis of the output when the input lies as `axis`. An output with fewer voxels than the axis has shards
    /// cannot be split: `None`, and the input has to be made full first.
    pub fn output_axis(&self, axis: &Axis) -> Option<Axis> {
        scaled(axis, self.output(axis.extent))
    }

    /// The interval of inputs (not clipped) that outputs `start..end` read.
    fn reach(&self, start: usize, end: usize) -> (isize, isize) {
        let first = start as isize * self.stride as isize - self.low as isize;
        let last = (end as isize - 1) * self.stride as isize - self.low as isize + self.span() as isize;
        (first, last)
    }
}

/// An axis of `extent` voxels with shards in proportion to those of `axis`; `None` if it has fewer voxels than shards.
pub fn scaled(axis: &Axis, extent: usize) -> Option<Axis> {
    match axis.as_split() {
        None => Some(Axis::full(extent)),
        Some((_, offsets)) if extent < offsets.len() - 1 => None,
        Some((mesh, offsets)) => Some(Axis::split(mesh, proportional(offsets, extent))),
    }
}

/// Output shard boundaries near-proportional to `input` ones and strictly monotone: rounded to nearest, then repaired
/// from the left and from the right, for rounding alone leaves empty shards. `output` is at least the number of shards.
fn proportional(input: &[usize], output: usize) -> Vec<usize> {
    let (shards, extent) = (input.len() - 1, input[input.len() - 1] as u128);
    let mut offsets: Vec<usize> = input.iter().map(|o| ((*o as u128 * output as u128 * 2 + extent) / (2 * extent)) as usize).collect();
    offsets[0] = 0;
    offsets[shards] = output;
    for i in 1..shards {
        offsets[i] = offsets[i].max(offsets[i - 1] + 1);
    }
    for i in (1..shards).rev() {
        offsets[i] = offsets[i].min(offsets[i + 1] - 1);
    }
    offsets
}

/// One axis of a window operation on one rank: what it needs and the local geometry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowPlan {
    /// What every coordinate of the axis's mesh needs of the input.
    pub need: AxisNeed,
    /// Geometry on the block this rank assembles.
    pub local: WindowAxis,
    /// Global index of the block's first voxel; negative where the block holds padding.
    pub origin: isize,
}

impl WindowPlan {
    /// For the rank at `coords`, with `input` and `output` split over the same mesh axis or not at all.
    pub fn new(window: &AxisWindow, input: &Axis, output: &Axis, coords: [usize; 4]) -> WindowPlan {
        let extent = input.extent;
        let clipped = window.mode == PaddingMode::Zeros;
        // The block outputs start..end of a coordinate read: clipped to the volume (and at least one voxel, for the inner
        // backend never sees an empty tensor), or unclipped where padding is made of voxels.
        let block = |coord: usize, start: usize, end: usize| -> (isize, isize, isize) {
            let (first, last) = window.reach(start, end);
            if !clipped {
                return (first, last, first);
            }
            let low = first.clamp(0, extent as isize - 1);
            let high = last.clamp(low + 1, extent as isize);
            // With the voxels of the shard beside it that a stride leaves unread: so all of it lies in the block as it is.
            match input.as_split().map(|(_, offsets)| (offsets[coord] as isize, offsets[coord + 1] as isize)) {
                Some((start, end)) if start <= high && low <= end => (low.min(start), high.max(end), first),
                _ => (low, high, first),
            }
        };
        let whole = output.as_split().is_none() && clipped;
        let need = match output.as_split() {
            // Nothing to move: the block is the axis.
            None if whole => AxisNeed::whole(extent),
            None => {
                let (low, high, _) = block(0, 0, output.extent);
                AxisNeed { mesh: None, by_coord: vec![pieces(low, high, extent, window.mode)] }
            }
            Some((mesh, offsets)) => AxisNeed {
                mesh: Some(mesh),
                by_coord: offsets
                    .windows(2)
                    .enumerate()
                    .map(|(coord, o)| {
                        let (low, high, _) = block(coord, o[0], o[1]);
                        pieces(low, high, extent, window.mode)
                    })
                    .collect(),
            },
        };
        let (start, end) = output.owned(coords);
        let coord = output.as_split().map_or(0, |(mesh, _)| coords[mesh.index()]);
        let (low, high, first) = if whole { (0, extent as isize, -(window.low as isize)) } else { block(coord, start, end) };
        let local = WindowAxis {
            input: (high - low) as usize,
            output: end - start,
            kernel: window.kernel,
            stride: window.stride,
            dilation: window.dilation,
            offset: low - first,
        };
        WindowPlan { need, local, origin: low }
    }
}

/// Where the voxels at `low..high` of a padded axis of `extent` come from, in runs; an interval inside the volume is one
/// piece. Without a volume behind the padding (zeros), `low..high` lies inside.
pub fn pieces(low: isize, high: isize, extent: usize, mode: PaddingMode) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut at = low;
    while at < high {
        let (start, run) = source(at, extent, mode);
        let length = run.min((high - at) as usize);
        pieces.push(Piece { start, end: start + length, at: (at - low) as usize });
        at += length as isize;
    }
    pieces
}

/// The voxel that lies at `at` of the padded axis, and how many from it on lie in order.
fn source(at: isize, extent: usize, mode: PaddingMode) -> (usize, usize) {
    let n = extent as isize;
    if (0..n).contains(&at) {
        return (at as usize, (n - at) as usize);
    }
    match mode {
        PaddingMode::Periodic => {
            let start = at.rem_euclid(n);
            (start as usize, (n - start) as usize)
        }
        // The mirror stands on the last voxel, which is not repeated.
        PaddingMode::Reflect => {
            let period = 2 * (n - 1).max(1);
            let there = at.rem_euclid(period);
            (there.min(period - there).min(n - 1) as usize, 1)
        }
        PaddingMode::Zeros | PaddingMode::Replicate => (at.clamp(0, n - 1) as usize, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::MeshAxis;

    fn window(kernel: usize, stride: usize, low: usize, high: usize) -> AxisWindow {
        AxisWindow { kernel, stride, dilation: 1, low, high, mode: PaddingMode::Zeros }
    }

    #[test]
    fn even_kernel_without_padding_gives_4_and_3() {
        let axis = Axis::split(MeshAxis::Depth, vec![0, 4, 8]);
        let out = window(2, 1, 0, 0).output_axis(&axis).unwrap();
        assert_eq!(out, Axis::split(MeshAxis::Depth, vec![0, 4, 7]));
    }

    #[test]
    fn proportional_is_strictly_monotone() {
        assert_eq!(proportional(&[0, 1, 2, 10], 3), [0, 1, 2, 3]);
        assert_eq!(proportional(&[0, 8, 9, 10], 3), [0, 1, 2, 3]);
        assert_eq!(proportional(&[0, 5, 10], 5), [0, 3, 5]);
    }

    #[test]
    fn every_tap_is_inside_the_block_or_outside_the_volume() {
        for kernel in 1..6 {
            for stride in 1..4 {
                for dilation in 1..3 {
                    for low in 0..4 {
                        for extent in 1..9usize {
                            check(AxisWindow { kernel, stride, dilation, low, high: 3 - low, mode: PaddingMode::Zeros }, extent);
                        }
                    }
                }
            }
        }
    }

    fn check(window: AxisWindow, extent: usize) {
        for shards in 1..=extent.min(3) {
            let axis = match shards {
                1 => Axis::full(extent),
                n => Axis::split(MeshAxis::Depth, crate::layout::balanced_offsets(extent, n)),
            };
            if window.span() > extent + window.low + window.high {
                continue;
            }
            let Some(output) = window.output_axis(&axis) else { continue };
            for coord in 0..shards {
                let plan = WindowPlan::new(&window, &axis, &output, [0, coord, 0, 0]);
                let (start, end) = output.owned([0, coord, 0, 0]);
                assert_eq!(plan.local.output, end - start);
                for o in start..end {
                    for t in 0..window.kernel {
                        let global = (o * window.stride + t * window.dilation) as isize - window.low as isize;
                        let local = ((o - start) * window.stride + t * window.dilation) as isize - plan.local.offset;
                        let inside = (0..extent as isize).contains(&global);
                        assert_eq!((0..plan.local.input as isize).contains(&local), inside);
                        if inside {
                            assert_eq!(local + plan.origin, global);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn padding_comes_from_the_volume() {
        let at = |low, high, extent, mode| -> Vec<usize> { pieces(low, high, extent, mode).iter().flat_map(|p| p.start..p.end).collect() };
        let runs = pieces(-1, 3, 4, PaddingMode::Periodic);
        assert_eq!(runs, [Piece { start: 3, end: 4, at: 0 }, Piece { start: 0, end: 3, at: 1 }]);
        assert_eq!(pieces(1, 3, 4, PaddingMode::Periodic), [Piece { start: 1, end: 3, at: 0 }]);
        assert_eq!(at(-2, 6, 4, PaddingMode::Reflect), [2, 1, 0, 1, 2, 3, 2, 1]);
        assert_eq!(at(-2, 6, 4, PaddingMode::Replicate), [0, 0, 0, 1, 2, 3, 3, 3]);
        assert_eq!(at(4, 6, 4, PaddingMode::Replicate), [3, 3]);
        assert_eq!(at(0, 1, 1, PaddingMode::Reflect), [0]);
    }

    #[test]
    fn a_window_keeps_its_outputs() {
        for (input, output, stride) in [(5, 3, 2), (5, 2, 2), (4, 4, 1), (6, 1, 5)] {
            let whole = WindowAxis { input, output, kernel: 2, stride, dilation: 1, offset: 0 };
            assert_eq!(AxisWindow::of(&whole, PaddingMode::Zeros).output(input), output);
        }
    }

    #[test]
    fn twice_as_many_voxels_lie_on_twice_the_boundaries() {
        let axis = Axis::split(MeshAxis::Depth, vec![0, 1, 4, 5]);
        let twice = scaled(&axis, 10).unwrap();
        assert_eq!(twice, Axis::split(MeshAxis::Depth, vec![0, 2, 8, 10]));
        assert_eq!(scaled(&twice, 5).unwrap(), axis);
        assert_eq!(scaled(&axis, 2), None);
    }
}
