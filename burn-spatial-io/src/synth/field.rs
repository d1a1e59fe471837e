//! Gaussian fields and the displacements that follow from them, on a periodic cube.

use std::f64::consts::TAU;
use std::sync::Arc;

use rayon::prelude::*;
use rustfft::num_complex::Complex64;
use rustfft::{Fft, FftPlanner};

use super::cosmology::Cosmology;
use crate::random;

/// Three-dimensional Fourier transforms of cubes of side `n`, over rows in parallel. Neither direction scales.
pub struct Fft3 {
    n: usize,
    forward: Arc<dyn Fft<f64>>,
    inverse: Arc<dyn Fft<f64>>,
}

impl Fft3 {
    pub fn new(n: usize) -> Fft3 {
        let mut planner = FftPlanner::new();
        Fft3 { n, forward: planner.plan_fft_forward(n), inverse: planner.plan_fft_inverse(n) }
    }

    pub fn forward(&self, cube: &mut Vec<Complex64>, spare: &mut Vec<Complex64>) {
        self.transform(&*self.forward, cube, spare);
    }

    pub fn inverse(&self, cube: &mut Vec<Complex64>, spare: &mut Vec<Complex64>) {
        self.transform(&*self.inverse, cube, spare);
    }

    /// The last axis is transformed, then the axes are rotated; after three rounds the order is the old one.
    fn transform(&self, fft: &dyn Fft<f64>, cube: &mut Vec<Complex64>, spare: &mut Vec<Complex64>) {
        let plane = self.n * self.n;
        spare.resize(cube.len(), Complex64::default());
        for _ in 0..3 {
            cube.par_chunks_exact_mut(plane).for_each(|rows| fft.process(rows));
            rotate(cube, spare, self.n);
            std::mem::swap(cube, spare);
        }
    }
}

/// `to[k][i][j] = from[i][j][k]`, a few k at a time so that whole cache lines are read.
fn rotate(from: &[Complex64], to: &mut [Complex64], n: usize) {
    const LINES: usize = 8;
    let plane = n * n;
    to.par_chunks_mut(LINES * plane).enumerate().for_each(|(block, to)| {
        for (row, values) in from.chunks_exact(n).enumerate() {
            for (line, value) in values[block * LINES..].iter().take(to.len() / plane).enumerate() {
                to[line * plane + row] = *value;
            }
        }
    });
}

/// A periodic cube of `n` points a side and `length` Mpc/h.
pub struct Cube {
    pub n: usize,
    pub length: f64,
    fft: Fft3,
}

/// First- and second-order displacements of every grid point, in Mpc/h: at growth factors D and D2 a particle has
/// moved by `D * first + D2 * second`.
pub struct Displacements {
    pub first: [Vec<f64>; 3],
    pub second: [Vec<f64>; 3],
}

impl Cube {
    pub fn new(n: usize, length: f64) -> Cube {
        Cube { n, length, fft: Fft3::new(n) }
    }

    /// Unit of wave number, h/Mpc.
    pub fn fundamental(&self) -> f64 {
        TAU / self.length
    }

    /// The signed whole wave number of index `i` along an axis.
    fn wave(&self, i: usize) -> i64 {
        if 2 * i < self.n { i as i64 } else { i as i64 - self.n as i64 }
    }

    /// `self.wave`, but 0 for the Nyquist mode: its odd derivatives have no sign, so they are dropped.
    fn odd_wave(&self, i: usize) -> f64 {
        if 2 * i == self.n { 0.0 } else { self.wave(i) as f64 }
    }

    /// Squared whole wave number of the element `index`.
    pub fn wave_squared(&self, index: usize) -> usize {
        let square = |i: usize| self.wave(i % self.n).unsigned_abs() as usize;
        let [x, y, z] = [index / (self.n * self.n), index / self.n, index].map(square);
        x * x + y * y + z * z
    }

    /// Unnormalised Fourier transform of a real field.
    pub fn spectrum(&self, field: impl IntoIterator<Item = f64>) -> Vec<Complex64> {
        let mut cube: Vec<Complex64> = field.into_iter().map(Complex64::from).collect();
        self.fft.forward(&mut cube, &mut Vec::new());
        cube
    }

    /// The spectrum of the linear density today, for white noise of `seed` and `stream`.
    ///
    /// Plane x of the noise starts at its own place in the generator's stream, so that threads do not matter.
    pub fn linear_density(&self, universe: &Cosmology, seed: u64, stream: u64) -> Vec<Complex64> {
        let plane = self.n * self.n;
        let pairs = plane.div_ceil(2);
        let start = random::stream(seed, b"noise\0\0\0", stream);
        let mut cube = vec![Complex64::default(); self.n * plane];
        cube.par_chunks_exact_mut(plane).enumerate().for_each(|(x, values)| {
            let mut rng = start.clone();
            // Two 64-bit numbers a pair: four 32-bit words.
            rng.set_word_pos((x * pairs * 4) as u128);
            for pair in values.chunks_mut(2) {
                let normal = random::normal_pair(&mut rng);
                pair.iter_mut().zip(normal).for_each(|(value, normal)| *value = normal.into());
            }
        });
        self.fft.forward(&mut cube, &mut Vec::new());

        // All modes of one squared wave number have one power.
        let density = (self.n as f64 / self.length).powi(3);
        let largest = 3 * (self.n / 2).pow(2);
        let amplitudes: Vec<f64> = (0..=largest)
            .into_par_iter()
            .map(|m| if m == 0 { 0.0 } else { (universe.power((m as f64).sqrt() * self.fundamental()) * density).sqrt() })
            .collect();
        cube.par_iter_mut().enumerate().for_each(|(i, mode)| *mode *= amplitudes[self.wave_squared(i)]);
        cube
    }

    /// Second-order Lagrangian perturbation theory (Bouchet et al. 1995, A&A 296, 575) for the spectrum `density`
    /// of the linear density: `first = -grad inv_laplacian density`, and `div second` is the sum over pairs of axes
    /// of `p_aa p_bb - p_ab^2`, p_ab being the second derivatives of the inverse Laplacian.
    pub fn displacements(&self, density: &[Complex64]) -> Displacements {
        let mut spare = Vec::new();
        let k = self.fundamental();
        // Two real fields share one inverse transform, as its real and imaginary part.
        let mut pair =
            |spectrum: &[Complex64], a: &(dyn Fn([usize; 3]) -> Complex64 + Sync), b: &(dyn Fn([usize; 3]) -> Complex64 + Sync)| {
                let mut cube: Vec<Complex64> = spectrum
                    .par_iter()
                    .enumerate()
                    .map(|(i, mode)| {
                        let squared = self.wave_squared(i) as f64;
                        let place = [i / (self.n * self.n), i / self.n % self.n, i % self.n];
                        // The mean does not move anything.
                        if i == 0 { Complex64::default() } else { mode / squared * (a(place) + Complex64::i() * b(place)) }
                    })
                    .collect();
                self.fft.inverse(&mut cube, &mut spare);
                let scale = 1.0 / cube.len() as f64;
                let real: Vec<f64> = cube.iter().map(|v| v.re * scale).collect();
                let imaginary: Vec<f64> = cube.iter().map(|v| v.im * scale).collect();
                (real, imaginary)
            };
        let slope = |axis: usize, sign: f64| move |place: [usize; 3]| Complex64::new(0.0, sign * self.odd_wave(place[axis]) / k);
        let square = |axis: usize| move |place: [usize; 3]| Complex64::from((self.wave(place[axis]) as f64).powi(2));
        let mixed = |a: usize, b: usize| move |place: [usize; 3]| Complex64::from(self.odd_wave(place[a]) * self.odd_wave(place[b]));
        let none = |_: [usize; 3]| Complex64::default();

        let (x, y) = pair(density, &slope(0, 1.0), &slope(1, 1.0));
        let (z, xx) = pair(density, &slope(2, 1.0), &square(0));
        let (yy, zz) = pair(density, &square(1), &square(2));
        let (xy, xz) = pair(density, &mixed(0, 1), &mixed(0, 2));
        let (yz, _) = pair(density, &mixed(1, 2), &none);
        let source = (0..xx.len()).map(|i| {
            let diagonal = xx[i] * yy[i] + xx[i] * zz[i] + yy[i] * zz[i];
            diagonal - xy[i] * xy[i] - xz[i] * xz[i] - yz[i] * yz[i]
        });
        let source = self.spectrum(source);
        let (second_x, second_y) = pair(&source, &slope(0, -1.0), &slope(1, -1.0));
        let (second_z, _) = pair(&source, &slope(2, -1.0), &none);
        Displacements { first: [x, y, z], second: [second_x, second_y, second_z] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plane_wave_has_one_mode() {
        let cube = Cube::new(6, 60.0);
        // cos(2 pi (x + 2 y - z) / 6): modes (1, 2, 5) and (5, 4, 1).
        let wave = (0..216).map(|i| (TAU * ((i / 36) as f64 + 2.0 * (i / 6 % 6) as f64 - (i % 6) as f64) / 6.0).cos());
        let spectrum = cube.spectrum(wave);
        for (i, mode) in spectrum.iter().enumerate() {
            let expected = if i == 36 + 2 * 6 + 5 || i == 5 * 36 + 4 * 6 + 1 { 108.0 } else { 0.0 };
            assert!((mode - expected).norm() < 1e-10, "{i}: {mode}");
        }
    }

    #[test]
    fn the_inverse_undoes_the_forward() {
        let fft = Fft3::new(10);
        let values: Vec<Complex64> = (0..1000).map(|i| Complex64::new((i % 7) as f64, (i % 11) as f64)).collect();
        let (mut cube, mut spare) = (values.clone(), Vec::new());
        fft.forward(&mut cube, &mut spare);
        fft.inverse(&mut cube, &mut spare);
        assert!(cube.iter().zip(&values).all(|(got, want)| (got / 1000.0 - want).norm() < 1e-12));
    }

    #[test]
    fn first_order_undoes_the_density() {
        // One wave along x: density cos(kx) is displaced by -sin(kx)/k, and has no second order.
        let cube = Cube::new(8, 40.0);
        let density = cube.spectrum((0..512).map(|i| (TAU * (i / 64) as f64 / 8.0).cos()));
        let moved = cube.displacements(&density);
        for i in 0..512 {
            let expected = -(TAU * (i / 64) as f64 / 8.0).sin() / cube.fundamental();
            assert!((moved.first[0][i] - expected).abs() < 1e-9);
            assert!(moved.first[1][i].abs() + moved.first[2][i].abs() < 1e-9);
            assert!(moved.second.iter().all(|axis| axis[i].abs() < 1e-9));
        }
    }

    #[test]
    fn second_order_of_crossed_waves() {
        // Density cos(kx) + cos(ky): p_xx = cos(kx), p_yy = cos(ky), source cos(kx) cos(ky); its displacement along
        // x is the x-derivative of the inverse Laplacian: k sin(kx) cos(ky) / (2 k^2).
        let cube = Cube::new(8, 40.0);
        let phase = |i: usize| TAU * i as f64 / 8.0;
        let density = cube.spectrum((0..512).map(|i| phase(i / 64).cos() + phase(i / 8 % 8).cos()));
        let moved = cube.displacements(&density);
        for i in 0..512 {
            let expected = phase(i / 64).sin() * phase(i / 8 % 8).cos() / (2.0 * cube.fundamental());
            assert!((moved.second[0][i] - expected).abs() < 1e-9, "{i}");
        }
    }
}
