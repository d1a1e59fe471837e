//! A window operation in parts: what a rank's own shard suffices for, and the rest, which waits for halos; and its gradient
//! in parts: boxes of the block, each with the outputs that read it.

use std::ops::Range;

use super::{Window, WindowAxis};

/// Outputs next to each other, and a box of the block: what they are computed from together, or what they give back.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    /// Where the first one lies among all outputs.
    pub at: [usize; 3],
    /// The box of the block.
    pub input: [Range<usize>; 3],
    /// The geometry on that box.
    pub window: Window,
}

impl Part {
    /// All outputs, from the whole block.
    pub fn whole(window: &Window) -> Part {
        Part { at: [0; 3], input: std::array::from_fn(|i| 0..window[i].input), window: *window }
    }

    /// Where its outputs lie among all.
    pub fn outputs(&self) -> [Range<usize>; 3] {
        std::array::from_fn(|i| self.at[i]..self.at[i] + self.window[i].output)
    }

    /// The same outputs, read from the whole block of `window`.
    pub fn on_block(&self, window: &Window) -> Part {
        Part::new(window, &self.outputs(), std::array::from_fn(|i| 0..window[i].input))
    }

    /// The same outputs of `window` in parts that read boxes of at most so many `voxels`, if those of a row do.
    pub fn cut(&self, window: &Window, voxels: usize) -> Vec<Part> {
        cut(self.outputs(), voxels, &|outputs| read_by(window, outputs)).iter().map(|outputs| Part::alone(window, outputs)).collect()
    }

    /// These outputs, from a box that has no more than what they read.
    fn alone(window: &Window, outputs: &[Range<usize>; 3]) -> Part {
        Part::new(window, outputs, read_by(window, outputs))
    }

    fn new(window: &Window, outputs: &[Range<usize>; 3], input: [Range<usize>; 3]) -> Part {
        let axis = |i: usize| WindowAxis {
            input: input[i].len(),
            output: outputs[i].len(),
            offset: window[i].offset + input[i].start as isize - (outputs[i].start * window[i].stride) as isize,
            ..window[i]
        };
        Part { at: std::array::from_fn(|i| outputs[i].start), window: std::array::from_fn(axis), input }
    }
}

/// The outputs of an axis that read nothing of the block outside `own`; what lies outside the block is padding.
fn inner(axis: &WindowAxis, own: &Range<usize>) -> Range<usize> {
    let (stride, reach) = (axis.stride as isize, ((axis.kernel - 1) * axis.dilation) as isize);
    let first = match own.start {
        0 => 0,
        start => (start as isize + axis.offset).max(0).unsigned_abs().div_ceil(axis.stride),
    };
    let end = match own.end == axis.input {
        true => axis.output,
        // The last tap of output o reads o * stride - offset + reach, which is to lie before the shard's end.
        false => usize::try_from((own.end as isize - 1 - reach + axis.offset).div_euclid(stride) + 1).unwrap_or(0).min(axis.output),
    };
    first.min(end)..end
}

/// What outputs of an axis read of the block; one voxel where they read padding alone.
fn reads(axis: &WindowAxis, outputs: &Range<usize>) -> Range<usize> {
    let first = (outputs.start * axis.stride) as isize - axis.offset;
    let last = ((outputs.end - 1) * axis.stride + (axis.kernel - 1) * axis.dilation) as isize - axis.offset;
    let start = first.clamp(0, axis.input as isize).unsigned_abs();
    let end = (last + 1).clamp(0, axis.input as isize).unsigned_abs();
    if start < end { start..end } else { 0..1 }
}

/// The box of the block that a box of outputs reads.
fn read_by(window: &Window, outputs: &[Range<usize>; 3]) -> [Range<usize>; 3] {
    std::array::from_fn(|i| reads(&window[i], &outputs[i]))
}

/// The outputs of an axis that read any of `inputs`, and perhaps some between them.
fn readers(axis: &WindowAxis, inputs: &Range<usize>) -> Range<usize> {
    let reach = ((axis.kernel - 1) * axis.dilation) as isize;
    let first = (inputs.start as isize + axis.offset - reach).max(0).unsigned_abs().div_ceil(axis.stride);
    let last = (inputs.end as isize - 1 + axis.offset).div_euclid(axis.stride as isize);
    let end = usize::try_from(last + 1).unwrap_or(0).min(axis.output);
    first.min(end)..end
}

/// The box `input` of the block and the outputs that read it; `None` where none does.
pub(crate) fn reading(window: &Window, input: [Range<usize>; 3]) -> Option<Part> {
    let outputs: [Range<usize>; 3] = std::array::from_fn(|i| readers(&window[i], &input[i]));
    outputs.iter().all(|range| !range.is_empty()).then(|| Part::new(window, &outputs, input))
}

/// The outputs computed from the shard, which lies at `own` in the block, in up to `pieces` pieces along the depth; and
/// the others. `None` where the shard suffices for no output.
pub(crate) fn split(window: &Window, own: [Range<usize>; 3], pieces: usize) -> Option<(Vec<Part>, Vec<Part>)> {
    let inner: [Range<usize>; 3] = std::array::from_fn(|i| inner(&window[i], &own[i]));
    if inner.iter().any(Range::is_empty) {
        return None;
    }
    let near = along_depth(&inner, pieces).map(|outputs| Part::new(window, &outputs, own.clone())).collect();
    let far = around(&inner, window.map(|axis| axis.output)).iter().map(|outputs| Part::alone(window, outputs)).collect();
    Some((near, far))
}

/// A box in up to `pieces` pieces along the depth.
pub(crate) fn along_depth(outputs: &[Range<usize>; 3], pieces: usize) -> impl Iterator<Item = [Range<usize>; 3]> {
    let [depth, height, width] = outputs.clone();
    let step = depth.len().div_ceil(pieces).max(1);
    depth.clone().step_by(step).map(move |start| [start..(start + step).min(depth.end), height.clone(), width.clone()])
}

/// Boxes of the outputs outside of `inner`: two slabs an axis, without what those of the axes before it have.
pub(crate) fn around(inner: &[Range<usize>; 3], outputs: [usize; 3]) -> Vec<[Range<usize>; 3]> {
    let sides = |axis: usize| [0..inner[axis].start, inner[axis].end..outputs[axis]].map(|side| (axis, side));
    let slab = |(axis, side): (usize, Range<usize>)| -> [Range<usize>; 3] {
        std::array::from_fn(|i| match i {
            i if i < axis => inner[i].clone(),
            i if i == axis => side.clone(),
            i => 0..outputs[i],
        })
    };
    (0..3).flat_map(sides).map(slab).filter(|slab| slab.iter().all(|range| !range.is_empty())).collect()
}

/// A box of outputs cut along depth and height, the longer first, until each piece reads a box of at most so many `voxels`, or is a row.
pub(crate) fn cut(
    outputs: [Range<usize>; 3],
    voxels: usize,
    input: &impl Fn(&[Range<usize>; 3]) -> [Range<usize>; 3],
) -> Vec<[Range<usize>; 3]> {
    if outputs.iter().any(Range::is_empty) {
        return Vec::new();
    }
    let axis = if outputs[0].len() >= outputs[1].len() { 0 } else { 1 };
    if outputs[axis].len() == 1 || input(&outputs).iter().map(Range::len).product::<usize>() <= voxels {
        return vec![outputs];
    }
    let Range { start, end } = outputs[axis];
    let half = |range: Range<usize>| {
        let mut outputs = outputs.clone();
        outputs[axis] = range;
        cut(outputs, voxels, input)
    };
    [half(start..start.midpoint(end)), half(start.midpoint(end)..end)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn axis() -> impl Strategy<Value = (WindowAxis, Range<usize>)> {
        let sizes = (1usize..12, 1usize..5, 1usize..4, 1usize..3, -2isize..4, 1usize..9);
        sizes.prop_flat_map(|(input, kernel, stride, dilation, offset, output)| {
            (0..input).prop_flat_map(move |start| {
                (start + 1..=input).prop_map(move |end| (WindowAxis { input, output, kernel, stride, dilation, offset }, start..end))
            })
        })
    }

    proptest! {
        /// An output reads a box if it is one of those found, where it reads as in the block.
        #[test]
        fn the_readers_of_a_box_are_found(axes in [axis(), axis(), axis()]) {
            let window = axes.clone().map(|(axis, _)| axis);
            let input = axes.map(|(_, own)| own);
            let part = reading(&window, input.clone());
            for i in 0..3 {
                for o in 0..window[i].output {
                    for tap in 0..window[i].kernel {
                        let tap = (tap * window[i].dilation) as isize;
                        let in_block = (o * window[i].stride) as isize - window[i].offset + tap;
                        let reads = usize::try_from(in_block).is_ok_and(|p| input[i].contains(&p));
                        let Some(part) = &part else { continue };
                        let found = o.checked_sub(part.at[i]).filter(|o| *o < part.window[i].output);
                        prop_assert!(!reads || found.is_some());
                        if let Some(o) = found {
                            let in_box = (o * window[i].stride) as isize - part.window[i].offset + tap;
                            prop_assert_eq!(in_block, in_box + input[i].start as isize);
                        }
                    }
                }
            }
            if part.is_none() {
                let none = (0..3).any(|i| (0..window[i].output).all(|o| (0..window[i].kernel).all(|tap| {
                    let p = (o * window[i].stride + tap * window[i].dilation) as isize - window[i].offset;
                    usize::try_from(p).map_or(true, |p| !input[i].contains(&p))
                })));
                prop_assert!(none);
            }
        }

        /// Every output belongs to one part, whose box has all of the block that it reads.
        #[test]
        fn parts_cover_the_output_once(axes in [axis(), axis(), axis()], pieces in 1usize..4, voxels in 1usize..200) {
            let window = axes.clone().map(|(axis, _)| axis);
            let own = axes.map(|(_, own)| own);
            let Some((near, far)) = split(&window, own.clone(), pieces) else { return Ok(()) };
            let far: Vec<Part> = far.iter().flat_map(|part| part.cut(&window, voxels)).collect();
            for Part { window, input, .. } in &far {
                let row = window[0].output * window[1].output == 1;
                prop_assert!(row || input.iter().map(Range::len).product::<usize>() <= voxels);
            }
            let count: usize = window.iter().map(|axis| axis.output).product();
            let mut seen = vec![0; count];
            for (part, is_near) in near.iter().map(|p| (p, true)).chain(far.iter().map(|p| (p, false))) {
                if is_near {
                    prop_assert_eq!(&part.input, &own);
                }
                for d in 0..part.window[0].output {
                    for h in 0..part.window[1].output {
                        for w in 0..part.window[2].output {
                            let at = [d, h, w];
                            let whole: [usize; 3] = std::array::from_fn(|i| part.at[i] + at[i]);
                            seen[(whole[0] * window[1].output + whole[1]) * window[2].output + whole[2]] += 1;
                            for i in 0..3 {
                                for tap in 0..window[i].kernel {
                                    let tap = (tap * window[i].dilation) as isize;
                                    let in_block = (whole[i] * window[i].stride) as isize - window[i].offset + tap;
                                    let in_box = (at[i] * window[i].stride) as isize - part.window[i].offset + tap;
                                    prop_assert_eq!(in_block, in_box + part.input[i].start as isize);
                                    let outside = in_block < 0 || in_block >= window[i].input as isize;
                                    prop_assert_eq!(outside, in_box < 0 || in_box >= part.window[i].input as isize);
                                }
                            }
                        }
                    }
                }
            }
            prop_assert!(seen.iter().all(|n| *n == 1), "{:?}", seen);
        }
    }
}
