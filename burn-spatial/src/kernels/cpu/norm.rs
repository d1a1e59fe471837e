//! Batch norm with a leaky ReLU behind it: statistics in one pass over memory, results in one, gradients in two.

use std::ops::Sub;

use burn_backend::ElementConversion;
use rayon::prelude::*;

use super::Real;

/// Elements summed in their own type before they are added up in f64; they stay in the first cache.
const BLOCK: usize = 1024;
/// Sums side by side, for the compiler to make vectors of.
const LANES: usize = 16;

/// What an element of a channel becomes: `activation((x - mean) * scale + shift)`.
#[derive(Clone, Copy)]
pub(crate) struct Channels<'a, T> {
    pub(crate) mean: &'a [T],
    pub(crate) scale: &'a [T],
    pub(crate) shift: &'a [T],
    /// Factor of what is negative behind the shift.
    pub(crate) slope: T,
}

/// One channel of [`Channels`].
#[derive(Clone, Copy)]
struct Channel<T> {
    mean: T,
    scale: T,
    shift: T,
    slope: T,
    /// Whether 0 counts as negative, as in Burn's ReLU; not in its leaky ReLU.
    zero: bool,
}

impl<T: Real + Sub<Output = T>> Channels<'_, T> {
    fn of(&self, plane: usize) -> Channel<T> {
        let c = plane % self.mean.len();
        Channel { mean: self.mean[c], scale: self.scale[c], shift: self.shift[c], slope: self.slope, zero: self.slope == T::default() }
    }
}

impl<T: Real + Sub<Output = T>> Channel<T> {
    /// `x` before the activation, and the activation's factor there.
    fn before(self, x: T) -> (T, bool) {
        let y = (x - self.mean) * self.scale + self.shift;
        (y, y < T::default() || (self.zero && y == T::default()))
    }

    fn apply(self, x: T) -> T {
        let (y, negative) = self.before(x);
        if negative { y * self.slope } else { y }
    }

    /// The gradient before the activation.
    fn back(self, x: T, grad: T) -> T {
        if self.before(x).1 { grad * self.slope } else { grad }
    }
}

/// The sum of `f` over elements at the same place, lanes first.
fn sum<T: Real>(n: usize, f: impl Fn(usize) -> T) -> f64 {
    let mut lanes = [T::default(); LANES];
    let whole = n - n % LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += f(start + lane);
        }
    }
    (whole..n).for_each(|i| lanes[i - whole] += f(i));
    lanes.iter().map(|lane| lane.elem::<f64>()).sum()
}

/// Count, mean, and sum of squared deviations from it (Chan, Golub and LeVeque, "Updating formulae and a pairwise
/// algorithm for computing sample variances", 1979).
#[derive(Clone, Copy, Default)]
struct Moments {
    n: f64,
    mean: f64,
    m2: f64,
}

impl Moments {
    fn of<T: Real + Sub<Output = T>>(block: &[T]) -> Moments {
        let n = block.len() as f64;
        let mean = sum(block.len(), |i| block[i]) / n;
        // Deviations from the rounded mean, and what that adds.
        let rounded: T = mean.elem();
        let m2 = sum(block.len(), |i| (block[i] - rounded) * (block[i] - rounded));
        let off = mean - rounded.elem::<f64>();
        Moments { n, mean, m2: (m2 - n * off * off).max(0.0) }
    }

    fn with(self, other: Moments) -> Moments {
        let n = self.n + other.n;
        if n == 0.0 {
            return self;
        }
        let delta = other.mean - self.mean;
        Moments { n, mean: self.mean + delta * other.n / n, m2: self.m2 + other.m2 + delta * delta * self.n * other.n / n }
    }
}

/// Adds up what the planes of each of `channels` gave.
fn by_channel<A: Copy + Default>(planes: &[A], channels: usize, add: impl Fn(A, A) -> A) -> Vec<A> {
    (0..channels).map(|c| planes.iter().skip(c).step_by(channels).fold(A::default(), |a, b| add(a, *b))).collect()
}

/// Mean and sum of squared deviations of each channel of `x`, `[N, C, plane]`.
pub(crate) fn moments<T: Real + Sub<Output = T>>(x: &[T], channels: usize, plane: usize) -> (Vec<T>, Vec<T>) {
    let of_plane = |x: &[T]| x.chunks(BLOCK).map(Moments::of).fold(Moments::default(), Moments::with);
    let planes: Vec<Moments> = x.par_chunks(plane).map(of_plane).collect();
    by_channel(&planes, channels, Moments::with).into_iter().map(|m| (m.mean.elem::<T>(), m.m2.elem::<T>())).unzip()
}

/// The normalised, activated volume.
pub(crate) fn norm<T: Real + Sub<Output = T>>(x: &[T], plane: usize, channels: Channels<'_, T>) -> Vec<T> {
    let mut out = vec![T::default(); x.len()];
    out.par_chunks_mut(plane).zip(x.par_chunks(plane)).enumerate().for_each(|(i, (out, x))| {
        let channel = channels.of(i);
        out.iter_mut().zip(x).for_each(|(out, x)| *out = channel.apply(*x));
    });
    out
}

/// Of each channel, the sums of the gradient before the activation and of its product with `x - mean`.
pub(crate) fn grad_sums<T: Real + Sub<Output = T>>(x: &[T], grad: &[T], plane: usize, channels: Channels<'_, T>) -> (Vec<T>, Vec<T>) {
    let of_plane = |(i, (x, grad)): (usize, (&[T], &[T]))| {
        let channel = channels.of(i);
        let of_block = |(x, grad): (&[T], &[T])| {
            let back = |i: usize| channel.back(x[i], grad[i]);
            (sum(x.len(), back), sum(x.len(), |i| back(i) * (x[i] - channel.mean)))
        };
        x.chunks(BLOCK).zip(grad.chunks(BLOCK)).map(of_block).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1))
    };
    let planes: Vec<(f64, f64)> = x.par_chunks(plane).zip(grad.par_chunks(plane)).enumerate().map(of_plane).collect();
    let sums = by_channel(&planes, channels.mean.len(), |a, b| (a.0 + b.0, a.1 + b.1));
    sums.into_iter().map(|(sum, dot)| (sum.elem::<T>(), dot.elem::<T>())).unzip()
}

/// The gradient of x: `scale * (g - a - (x - mean) * b)`, g the gradient before the activation.
pub(crate) fn grad<T: Real + Sub<Output = T>>(x: &[T], grad: &[T], plane: usize, channels: Channels<'_, T>, a: &[T], b: &[T]) -> Vec<T> {
    let mut out = vec![T::default(); x.len()];
    let both = x.par_chunks(plane).zip(grad.par_chunks(plane));
    out.par_chunks_mut(plane).zip(both).enumerate().for_each(|(i, (out, (x, grad)))| {
        let channel = channels.of(i);
        let (a, b) = (a[i % a.len()], b[i % b.len()]);
        for ((out, x), grad) in out.iter_mut().zip(x).zip(grad) {
            *out = channel.scale * (channel.back(*x, *grad) - a - (*x - channel.mean) * b);
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_values_far_from_zero() {
        // Two channels of two planes of 3000 values around 1e4: a naive sum of squares in f32 would be off by the variance.
        let value = |i: usize| 1e4 + ((i * 7919) % 1000) as f32 / 500.0;
        let x: Vec<f32> = (0..12_000).map(value).collect();
        let (mean, m2) = moments(&x, 2, 3000);
        for c in 0..2 {
            let of: Vec<f64> = (0..2).flat_map(|n| (0..3000).map(move |i| (n * 2 + c) * 3000 + i)).map(|i| f64::from(x[i])).collect();
            let want = of.iter().sum::<f64>() / 6000.0;
            let want_m2: f64 = of.iter().map(|v| (v - want) * (v - want)).sum();
            assert!((f64::from(mean[c]) - want).abs() < 1e-3, "{} for {want}", mean[c]);
            assert!((f64::from(m2[c]) - want_m2).abs() < 1e-4 * want_m2, "{} for {want_m2}", m2[c]);
        }
    }
}
