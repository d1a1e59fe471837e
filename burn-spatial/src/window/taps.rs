//! Weighted reads along one axis: interpolations and adaptive means, as tables.

use std::ops::Range;

/// Along one axis, output `o` is the sum over taps `t` of `weight(t, o) * input[index(t, o)]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Taps {
    /// Extent of the input.
    pub inputs: usize,
    outputs: usize,
    /// For each tap the index and the weight of every output; outputs of fewer taps have weights of 0.
    rows: Vec<(Vec<usize>, Vec<f64>)>,
}

/// Where the centres of output voxels lie among those of the input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Position {
    ratio: f64,
    align_corners: bool,
}

impl Position {
    /// `ratio` is input voxels to one output voxel; with `align_corners` it follows from the extents, for the first and
    /// the last centres coincide.
    pub fn new(input: usize, output: usize, ratio: f64, align_corners: bool) -> Position {
        let aligned = input.saturating_sub(1) as f64 / output.saturating_sub(1).max(1) as f64;
        Position { ratio: if align_corners { aligned } else { ratio }, align_corners }
    }

    fn at(self, output: usize) -> f64 {
        if self.align_corners { output as f64 * self.ratio } else { (output as f64 + 0.5) * self.ratio - 0.5 }
    }
}

impl Taps {
    /// From what each output reads; no list is empty.
    fn new(inputs: usize, reads: Vec<Vec<(usize, f64)>>) -> Taps {
        let most = reads.iter().map(Vec::len).max().unwrap_or(0);
        let tap = |t: usize| reads.iter().map(|r| r.get(t).copied().unwrap_or((r[0].0, 0.0))).unzip();
        Taps { inputs, outputs: reads.len(), rows: (0..most).map(tap).collect() }
    }

    /// Each output is the input of its number.
    pub fn identity(extent: usize) -> Taps {
        Taps::new(extent, (0..extent).map(|o| vec![(o, 1.0)]).collect())
    }

    /// Output `o` is input floor(o * ratio).
    pub fn nearest(inputs: usize, outputs: usize, ratio: f64) -> Taps {
        Taps::new(inputs, (0..outputs).map(|o| vec![((o as f64 * ratio) as usize, 1.0)]).map(|r| clamped(r, inputs)).collect())
    }

    /// [`nearest`](Self::nearest) in single precision, as PyTorch computes it for every type.
    pub fn nearest_single(inputs: usize, outputs: usize, ratio: f64) -> Taps {
        let ratio = ratio as f32;
        Taps::new(inputs, (0..outputs).map(|o| vec![((o as f32 * ratio) as usize, 1.0)]).map(|r| clamped(r, inputs)).collect())
    }

    /// Between the two nearest inputs; beyond the first and last centre the value there.
    pub fn linear(inputs: usize, outputs: usize, position: Position) -> Taps {
        let read = |o| {
            let at = position.at(o).clamp(0.0, (inputs - 1) as f64);
            let (low, part) = (at as usize, at.fract());
            if part == 0.0 { vec![(low, 1.0)] } else { vec![(low, 1.0 - part), (low + 1, part)] }
        };
        Taps::new(inputs, (0..outputs).map(read).collect())
    }

    /// Cubic convolution (Keys 1981) with a = -0.75 over four inputs; outside is the edge voxel.
    pub fn cubic(inputs: usize, outputs: usize, position: Position) -> Taps {
        const A: f64 = -0.75;
        let weight = |distance: f64| match distance.abs() {
            t if t < 1.0 => ((A + 2.0) * t - (A + 3.0)) * t * t + 1.0,
            t if t < 2.0 => ((A * t - 5.0 * A) * t + 8.0 * A) * t - 4.0 * A,
            _ => 0.0,
        };
        let read = |o| {
            let at = position.at(o);
            let tap = |t: isize| {
                let index = at.floor() as isize + t;
                (index.clamp(0, inputs as isize - 1) as usize, weight(at - index as f64))
            };
            (-1..=2).map(tap).collect()
        };
        Taps::new(inputs, (0..outputs).map(read).collect())
    }

    /// Lanczos' window of three lobes over the inputs inside, normalised.
    pub fn lanczos3(inputs: usize, outputs: usize, position: Position) -> Taps {
        let sinc = |x: f64| {
            let x = x * std::f64::consts::PI;
            if x == 0.0 { 1.0 } else { x.sin() / x }
        };
        let weight = |distance: f64| if distance.abs() < 3.0 { sinc(distance) * sinc(distance / 3.0) } else { 0.0 };
        let read = |o| {
            let at = position.at(o);
            let first = at.floor() as isize - 2;
            let inside = (first..first + 6).filter(|i| (0..inputs as isize).contains(i));
            let taps: Vec<(usize, f64)> = inside.map(|i| (i as usize, weight(at - i as f64))).collect();
            let sum: f64 = taps.iter().map(|t| t.1).sum();
            taps.into_iter().map(|(i, w)| (i, w / sum)).collect()
        };
        Taps::new(inputs, (0..outputs).map(read).collect())
    }

    /// Output `o` is the mean of the inputs floor(o * inputs / outputs) .. ceil((o + 1) * inputs / outputs).
    pub fn mean(inputs: usize, outputs: usize) -> Taps {
        let read = |o: usize| {
            let (start, end) = (o * inputs / outputs, ((o + 1) * inputs).div_ceil(outputs));
            (start..end).map(|i| (i, 1.0 / (end - start) as f64)).collect()
        };
        Taps::new(inputs, (0..outputs).map(read).collect())
    }

    /// Extent of the output.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// For each tap the index and the weight of every output.
    pub fn rows(&self) -> impl Iterator<Item = (&[usize], &[f64])> {
        self.rows.iter().map(|(indices, weights)| (&indices[..], &weights[..]))
    }

    /// Whether each output is the input of its number.
    pub fn is_identity(&self) -> bool {
        let one = |(indices, weights): &(Vec<usize>, Vec<f64>)| {
            indices.iter().enumerate().all(|(o, i)| o == *i) && weights.iter().all(|w| *w == 1.0)
        };
        self.inputs == self.outputs && self.rows.len() == 1 && one(&self.rows[0])
    }

    /// The inputs that outputs `start..end` (at least one) read: first, and one past the last.
    pub fn reach(&self, start: usize, end: usize) -> (usize, usize) {
        let read = || self.rows.iter().flat_map(|(indices, _)| &indices[start..end]);
        (read().min().copied().unwrap_or(0), read().max().map_or(0, |last| last + 1))
    }

    /// Outputs `start..end` over a block that holds the inputs they [`reach`](Self::reach).
    pub fn part(&self, start: usize, end: usize) -> Taps {
        let (low, high) = self.reach(start, end);
        self.over(&(start..end), &(low..high))
    }

    /// The `outputs` as sums over a block that holds the `inputs` (at least one): what they read of others is left out.
    pub(crate) fn over(&self, outputs: &Range<usize>, inputs: &Range<usize>) -> Taps {
        let cut = |(indices, weights): &(Vec<usize>, Vec<f64>)| {
            let reads = indices[outputs.clone()].iter().zip(&weights[outputs.clone()]);
            reads.map(|(i, weight)| if inputs.contains(i) { (i - inputs.start, *weight) } else { (0, 0.0) }).unzip()
        };
        Taps { inputs: inputs.len(), outputs: outputs.len(), rows: self.rows.iter().map(cut).collect() }
    }

    /// The outputs that read none but these inputs.
    pub(crate) fn inner(&self, inputs: &Range<usize>) -> Range<usize> {
        let inside = |o: usize| self.rows.iter().all(|(indices, _)| inputs.contains(&indices[o]));
        let start = (0..self.outputs).find(|o| inside(*o)).unwrap_or(self.outputs);
        start..start + (start..self.outputs).take_while(|o| inside(*o)).count()
    }

    /// The outputs that read any of these inputs, and perhaps some between them.
    pub(crate) fn readers(&self, inputs: &Range<usize>) -> Range<usize> {
        let reads = |o: &usize| self.rows.iter().any(|(indices, _)| inputs.contains(&indices[*o]));
        let start = (0..self.outputs).find(reads).unwrap_or(0);
        start..(start..self.outputs).rev().find(reads).map_or(start, |last| last + 1)
    }
}

/// Indices of at most the last input.
fn clamped(read: Vec<(usize, f64)>, inputs: usize) -> Vec<(usize, f64)> {
    read.into_iter().map(|(index, weight)| (index.min(inputs - 1), weight)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(taps: &Taps, x: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; taps.outputs()];
        for (indices, weights) in taps.rows() {
            out.iter_mut().zip(indices).zip(weights).for_each(|((o, i), w)| *o += w * x[*i]);
        }
        out
    }

    #[test]
    fn tables_by_hand() {
        let x = [0.0, 4.0, 8.0];
        assert_eq!(values(&Taps::nearest(3, 6, 0.5), &x), [0.0, 0.0, 4.0, 4.0, 8.0, 8.0]);
        assert_eq!(values(&Taps::nearest_single(2, 98, 1.0 / 49.0), &[0.0, 1.0])[49], 1.0);
        let half = Position::new(3, 6, 0.5, false);
        assert_eq!(values(&Taps::linear(3, 6, half), &x), [0.0, 1.0, 3.0, 5.0, 7.0, 8.0]);
        let aligned = Position::new(3, 5, 0.6, true);
        assert_eq!(values(&Taps::linear(3, 5, aligned), &x), [0.0, 2.0, 4.0, 6.0, 8.0]);
        assert_eq!(values(&Taps::cubic(3, 5, aligned), &x)[2], 4.0);
        assert_eq!(values(&Taps::mean(3, 2), &x), [2.0, 6.0]);
        assert_eq!(values(&Taps::mean(3, 1), &x), [4.0]);
    }

    #[test]
    fn weights_sum_to_one() {
        for (inputs, outputs) in [(5, 9), (9, 5), (1, 4), (4, 1), (7, 7)] {
            for align in [false, true] {
                let position = Position::new(inputs, outputs, inputs as f64 / outputs as f64, align);
                let all = [
                    Taps::linear(inputs, outputs, position),
                    Taps::cubic(inputs, outputs, position),
                    Taps::lanczos3(inputs, outputs, position),
                    Taps::mean(inputs, outputs),
                ];
                for taps in all {
                    assert!(values(&taps, &vec![1.0; inputs]).iter().all(|v| (v - 1.0).abs() < 1e-12), "{taps:?}");
                }
            }
        }
    }

    #[test]
    fn a_part_reads_what_the_whole_reads() {
        let x: Vec<f64> = (0..6).map(|i| f64::from(i * i)).collect();
        let whole = Taps::cubic(6, 11, Position::new(6, 11, 6.0 / 11.0, false));
        let all = values(&whole, &x);
        for (start, end) in [(0, 3), (3, 4), (4, 11)] {
            let (low, high) = whole.reach(start, end);
            assert_eq!(values(&whole.part(start, end), &x[low..high]), all[start..end]);
        }
        // Sums over a box of the inputs, added up, are those over all.
        let boxes = [0..2, 2..3, 3..6].map(|inputs| values(&whole.over(&(1..9), &inputs), &x[inputs]));
        for (o, all) in all[1..9].iter().enumerate() {
            assert!((boxes.iter().map(|sums| sums[o]).sum::<f64>() - all).abs() < 1e-12);
        }
        assert!(Taps::identity(3).is_identity() && !whole.is_identity());
        assert!(Taps::linear(3, 3, Position::new(3, 3, 1.0, false)).is_identity());
    }

    #[test]
    fn who_reads_what() {
        let linear = Taps::linear(4, 8, Position::new(4, 8, 0.5, false));
        // Outputs 0 to 7 read 0, 01, 01, 12, 12, 23, 23, 3.
        assert_eq!((linear.inner(&(0..2)), linear.readers(&(0..2))), (0..3, 0..5));
        assert_eq!((linear.inner(&(2..4)), linear.readers(&(2..4))), (5..8, 3..8));
        assert_eq!(Taps::linear(9, 3, Position::new(9, 3, 3.0, false)).readers(&(2..4)), 0..0);
        assert!(linear.inner(&(2..3)).is_empty());
    }
}
