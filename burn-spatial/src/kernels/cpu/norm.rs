//! Batch norm with a leaky ReLU behind it: statistics in one pass over memory, results in one, gradients in two.

use std::mem::MaybeUninit;

use burn_backend::ElementConversion;
use rayon::prelude::*;

use super::simd::vectorised;
use super::{Activation, Isa, Real, written};

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
    activation: Activation<T>,
}

impl<T: Real> Channels<'_, T> {
    fn of(&self, plane: usize) -> Channel<T> {
        let c = plane % self.mean.len();
        Channel { mean: self.mean[c], scale: self.scale[c], shift: self.shift[c], activation: Activation::new(self.slope) }
    }
}

impl<T: Real> Channel<T> {
    /// What the activation sees.
    #[inline(always)]
    fn before(self, x: T) -> T {
        (x - self.mean) * self.scale + self.shift
    }

    #[inline(always)]
    fn apply(self, x: T) -> T {
        self.activation.apply(self.before(x))
    }

    /// The gradient before the activation.
    #[inline(always)]
    fn back(self, x: T, grad: T) -> T {
        self.activation.back(self.before(x), grad)
    }
}

/// The sum of what `f` makes of the elements at the same place of `a` and `b`, lanes first.
#[inline(always)]
fn sum<T: Real>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> f64 {
    let mut lanes = [T::default(); LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += f(a[lane], b[lane]);
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += f(*a, *b);
    }
    lanes.iter().map(|lane| lane.elem::<f64>()).sum()
}

/// Count, mean, and sum of squared deviations from it (Chan, Golub and LeVeque, "Updating formulae and a pairwise
/// algorithm for computing sample variances", 1979).
#[derive(Clone, Copy, Default)]
pub(crate) struct Moments {
    pub(crate) n: f64,
    pub(crate) mean: f64,
    pub(crate) m2: f64,
}

impl Moments {
    #[inline(always)]
    fn of<T: Real>(block: &[T]) -> Moments {
        let n = block.len() as f64;
        let mean = sum(block, block, |x, _| x) / n;
        // Deviations from the rounded mean, and what that adds.
        let rounded: T = mean.elem();
        let m2 = sum(block, block, |x, _| (x - rounded) * (x - rounded));
        let off = mean - rounded.elem::<f64>();
        Moments { n, mean, m2: (m2 - n * off * off).max(0.0) }
    }

    /// Those of all elements of both.
    pub(crate) fn with(self, other: Moments) -> Moments {
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

vectorised! {
    fn plane_moments<T>(x: &[T]) -> Moments {
        // A loop, for what an iterator's fold calls is compiled for the plainest machine.
        let mut all = Moments::default();
        for block in x.chunks(BLOCK) {
            all = all.with(Moments::of(block));
        }
        all
    }
}

/// Mean and sum of squared deviations of each channel of `x`, `[N, C, plane]`.
pub(crate) fn moments<T: Real>(isa: Isa, x: &[T], channels: usize, plane: usize) -> (Vec<T>, Vec<T>) {
    let planes: Vec<Moments> = x.par_chunks(plane).map(|x| plane_moments(isa, x)).collect();
    by_channel(&planes, channels, Moments::with).into_iter().map(|m| (m.mean.elem::<T>(), m.m2.elem::<T>())).unzip()
}

vectorised! {
    fn plane_norm<T>(x: &[T], channel: Channel<T>, out: &mut [MaybeUninit<T>]) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = MaybeUninit::new(channel.apply(*x)));
    }
}

/// The normalised, activated volume.
pub(crate) fn norm<T: Real>(isa: Isa, x: &[T], plane: usize, channels: Channels<'_, T>) -> Vec<T> {
    let of_plane = |i: usize, out: &mut [MaybeUninit<T>]| plane_norm(isa, &x[i * plane..][..plane], channels.of(i), out);
    // SAFETY: every value of a plane is written.
    unsafe { written(x.len() / plane.max(1), plane, of_plane) }
}

vectorised! {
    fn plane_sums<T>(x: &[T], grad: &[T], channel: Channel<T>) -> [f64; 2] {
        let mut totals = [0.0; 2];
        // What is chosen by the activation first: in one loop with the sums neither would become vectors.
        let mut backs = [T::default(); BLOCK];
        for (x, grad) in x.chunks(BLOCK).zip(grad.chunks(BLOCK)) {
            let backs = &mut backs[..x.len()];
            for ((back, x), grad) in backs.iter_mut().zip(x).zip(grad) {
                *back = channel.back(*x, *grad);
            }
            let all = sum(backs, backs, |back, _| back);
            let dot = sum(x, backs, |x, back| back * (x - channel.mean));
            totals = [totals[0] + all, totals[1] + dot];
        }
        totals
    }
}

/// Of each channel, the sums of the gradient before the activation and of its product with `x - mean`.
pub(crate) fn grad_sums<T: Real>(isa: Isa, x: &[T], grad: &[T], plane: usize, channels: Channels<'_, T>) -> (Vec<T>, Vec<T>) {
    let of_plane = |(i, (x, grad)): (usize, (&[T], &[T]))| plane_sums(isa, x, grad, channels.of(i));
    let planes: Vec<[f64; 2]> = x.par_chunks(plane).zip(grad.par_chunks(plane)).enumerate().map(of_plane).collect();
    let sums = by_channel(&planes, channels.mean.len(), |a, b| [a[0] + b[0], a[1] + b[1]]);
    sums.into_iter().map(|[sum, dot]| (sum.elem::<T>(), dot.elem::<T>())).unzip()
}

vectorised! {
    fn plane_grad<T>(x: &[T], grad: &mut [T], channel: Channel<T>, a: T, b: T) {
        for (x, grad) in x.iter().zip(grad) {
            *grad = channel.scale * (channel.back(*x, *grad) - a - (*x - channel.mean) * b);
        }
    }
}

/// Makes `grad` that of x: `scale * (g - a - (x - mean) * b)`, g the gradient before the activation.
pub(crate) fn grad<T: Real>(isa: Isa, x: &[T], grad: &mut [T], plane: usize, channels: Channels<'_, T>, a: &[T], b: &[T]) {
    let planes = x.par_chunks(plane).zip(grad.par_chunks_mut(plane)).enumerate();
    planes.for_each(|(i, (x, grad))| plane_grad(isa, x, grad, channels.of(i), a[i % a.len()], b[i % b.len()]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_values_far_from_zero() {
        // Two channels of two planes of 3000 values around 1e4: a naive sum of squares in f32 would be off by the variance.
        let value = |i: usize| 1e4 + ((i * 7919) % 1000) as f32 / 500.0;
        let x: Vec<f32> = (0..12_000).map(value).collect();
        let (mean, m2) = moments(Isa::get(), &x, 2, 3000);
        for c in 0..2 {
            let of: Vec<f64> = (0..2).flat_map(|n| (0..3000).map(move |i| (n * 2 + c) * 3000 + i)).map(|i| f64::from(x[i])).collect();
            let want = of.iter().sum::<f64>() / 6000.0;
            let want_m2: f64 = of.iter().map(|v| (v - want) * (v - want)).sum();
            assert!((f64::from(mean[c]) - want).abs() < 1e-3, "{} for {want}", mean[c]);
            assert!((f64::from(m2[c]) - want_m2).abs() < 1e-4 * want_m2, "{} for {want_m2}", m2[c]);
        }
    }
}
