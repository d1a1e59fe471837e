//! A flat universe of matter and a cosmological constant: its growth and its linear power spectrum.

use std::f64::consts::{E, PI};

/// Baryon fraction of the critical density, the same in every universe.
pub const OMEGA_B: f64 = 0.045;
/// Temperature of the microwave background in units of 2.7 K.
const THETA: f64 = 2.7255 / 2.7;

/// One universe's parameters, with what follows from them.
///
/// The transfer function is the one with baryon wiggles of Eisenstein & Hu (1998, ApJ 496, 605); numbers in
/// brackets below are its equations. Wave numbers are in h/Mpc, powers in (Mpc/h)^3.
#[derive(Clone, Debug)]
pub struct Cosmology {
    omega_m: f64,
    n_spec: f64,
    hubble: f64,
    amplitude: f64,
    growth_today: f64,
    transfer: Transfer,
}

/// Constants of the transfer function.
#[derive(Clone, Debug)]
struct Transfer {
    baryons: f64,
    k_equal: f64,
    sound: f64,
    silk: f64,
    alpha_c: f64,
    beta_c: f64,
    alpha_b: f64,
    beta_b: f64,
    beta_node: f64,
}

impl Cosmology {
    /// A universe of matter density `omega_m` (of the critical one), fluctuations `sigma_8`, spectral index
    /// `n_spec` and Hubble constant `h_0` in km/s/Mpc. All must be positive, and `omega_m` above [`OMEGA_B`].
    pub fn new(omega_m: f64, sigma_8: f64, n_spec: f64, h_0: f64) -> Cosmology {
        let hubble = h_0 / 100.0;
        let transfer = Transfer::new(omega_m, hubble);
        let mut universe = Cosmology { omega_m, n_spec, hubble, amplitude: 1.0, growth_today: 1.0, transfer };
        universe.growth_today = universe.growth(1.0);
        universe.amplitude = (sigma_8 / universe.sigma(8.0)).powi(2);
        universe
    }

    /// The linear growth factor at scale factor `a`, 1 today: Heath's integral (1977, MNRAS 179, 351)
    /// `5/2 omega_m E(a) * integral of da / (a E)^3`.
    pub fn growth(&self, a: f64) -> f64 {
        let dark = 1.0 - self.omega_m;
        // With a = t^2 the integrand 2 t^4 / (omega_m + dark t^6)^(3/2) is smooth at 0.
        let integral = simpson(0.0, a.sqrt(), 400, |t| 2.0 * t.powi(4) / (self.omega_m + dark * t.powi(6)).powf(1.5));
        2.5 * self.omega_m * self.expansion(a) * integral / self.growth_today
    }

    /// The second-order growth factor, negative: `-3/7 D^2 Omega_m(a)^(-1/143)` (Bouchet et al. 1995, A&A 296, 575).
    pub fn growth_second(&self, a: f64) -> f64 {
        let matter = self.omega_m / a.powi(3) / self.expansion(a).powi(2);
        -3.0 / 7.0 * self.growth(a).powi(2) * matter.powf(-1.0 / 143.0)
    }

    /// The linear power spectrum today at wave number `k` > 0.
    pub fn power(&self, k: f64) -> f64 {
        self.amplitude * k.powf(self.n_spec) * self.transfer(k).powi(2)
    }

    /// The transfer function at wave number `k` > 0, 1 for large scales.
    pub fn transfer(&self, k: f64) -> f64 {
        self.transfer.at(k * self.hubble)
    }

    /// Root mean square of the linear density in spheres of radius `r` Mpc/h.
    pub fn sigma(&self, r: f64) -> f64 {
        let variance = simpson(1e-4f64.ln(), 1e2f64.ln(), 8000, |ln_k| {
            let k = ln_k.exp();
            k.powi(3) * self.power(k) * top_hat(k * r).powi(2) / (2.0 * PI * PI)
        });
        variance.sqrt()
    }

    /// The Hubble rate at scale factor `a`, 1 today.
    fn expansion(&self, a: f64) -> f64 {
        (self.omega_m / a.powi(3) + 1.0 - self.omega_m).sqrt()
    }
}

impl Transfer {
    fn new(omega_m: f64, hubble: f64) -> Transfer {
        let (matter, baryon) = (omega_m * hubble * hubble, OMEGA_B * hubble * hubble);
        let z_equal = 2.5e4 * matter * THETA.powi(-4); // (2)
        let k_equal = 7.46e-2 * matter * THETA.powi(-2); // (3)
        let b1 = 0.313 * matter.powf(-0.419) * (1.0 + 0.607 * matter.powf(0.674));
        let b2 = 0.238 * matter.powf(0.223);
        let z_drag = 1291.0 * matter.powf(0.251) / (1.0 + 0.659 * matter.powf(0.828)) * (1.0 + b1 * baryon.powf(b2)); // (4)
        let ratio = |z: f64| 31.5 * baryon * THETA.powi(-4) * 1e3 / z; // (5)
        let (r_drag, r_equal) = (ratio(z_drag), ratio(z_equal));
        let root = (1.0 + r_drag).sqrt() + (r_drag + r_equal).sqrt();
        let sound = 2.0 / (3.0 * k_equal) * (6.0 / r_equal).sqrt() * (root / (1.0 + r_equal.sqrt())).ln(); // (6)
        let silk = 1.6 * baryon.powf(0.52) * matter.powf(0.73) * (1.0 + (10.4 * matter).powf(-0.95)); // (7)
        let baryons = OMEGA_B / omega_m;
        let a1 = (46.9 * matter).powf(0.670) * (1.0 + (32.1 * matter).powf(-0.532)); // (11)
        let a2 = (12.0 * matter).powf(0.424) * (1.0 + (45.0 * matter).powf(-0.582));
        let c1 = 0.944 / (1.0 + (458.0 * matter).powf(-0.708)); // (12)
        let c2 = (0.395 * matter).powf(-0.0266);
        let y = (1.0 + z_equal) / (1.0 + z_drag);
        let s = (1.0 + y).sqrt();
        let g = y * (-6.0 * s + (2.0 + 3.0 * y) * ((s + 1.0) / (s - 1.0)).ln()); // (15)
        Transfer {
            baryons,
            k_equal,
            sound,
            silk,
            alpha_c: a1.powf(-baryons) * a2.powf(-baryons.powi(3)),
            beta_c: 1.0 / (1.0 + c1 * ((1.0 - baryons).powf(c2) - 1.0)),
            alpha_b: 2.07 * k_equal * sound * (1.0 + r_drag).powf(-0.75) * g, // (14)
            beta_b: 0.5 + baryons + (3.0 - 2.0 * baryons) * ((17.2 * matter).powi(2) + 1.0).sqrt(), // (24)
            beta_node: 8.41 * matter.powf(0.435),                             // (23)
        }
    }

    /// `k` in 1/Mpc.
    fn at(&self, k: f64) -> f64 {
        let q = k / (13.41 * self.k_equal); // (10)
        let smooth = |alpha: f64, beta: f64| {
            let c = 14.2 / alpha + 386.0 / (1.0 + 69.9 * q.powf(1.08)); // (20)
            let log = (E + 1.8 * beta * q).ln();
            log / (log + c * q * q) // (19)
        };
        let ks = k * self.sound;
        let f = 1.0 / (1.0 + (ks / 5.4).powi(4)); // (18)
        let cold = f * smooth(1.0, self.beta_c) + (1.0 - f) * smooth(self.alpha_c, self.beta_c); // (17)
        let shifted = k * self.sound / (1.0 + (self.beta_node / ks).powi(3)).cbrt(); // (22)
        let baryons = smooth(1.0, 1.0) / (1.0 + (ks / 5.2).powi(2))
            + self.alpha_b / (1.0 + (self.beta_b / ks).powi(3)) * (-(k / self.silk).powf(1.4)).exp(); // (21)
        let bessel = if shifted > 0.0 { shifted.sin() / shifted } else { 1.0 };
        self.baryons * baryons * bessel + (1.0 - self.baryons) * cold // (16)
    }
}

/// Fourier transform of a sphere of radius 1 and volume 1, at `x` > 0.
pub fn top_hat(x: f64) -> f64 {
    if x < 1e-2 { 1.0 - x * x / 10.0 } else { 3.0 * (x.sin() - x * x.cos()) / x.powi(3) }
}

/// Simpson's rule over `intervals` (an even number).
fn simpson(from: f64, to: f64, intervals: usize, f: impl Fn(f64) -> f64) -> f64 {
    let step = (to - from) / intervals as f64;
    let inner: f64 = (1..intervals).map(|i| f(from + i as f64 * step) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum();
    (f(from) + inner + f(to)) * step / 3.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, want: f64, relative: f64) {
        assert!((got / want - 1.0).abs() < relative, "got {got}, expected {want}");
    }

    // From an independent implementation in Python (scipy's adaptive quadrature), at z = 0, 0.5, 1.5, 3.
    const GROWTH: [([f64; 4], [f64; 4], [f64; 4]); 2] = [
        (
            [0.3, 0.8, 0.96, 70.0],
            [1.0, 0.7731811501800167, 0.5004482370327615, 0.3188404010514633],
            [-0.4321949712794735, -0.2571471898527683, -0.10743956501426083, -0.04357914068392085],
        ),
        (
            [0.25, 0.9, 0.92, 64.0],
            [1.0, 0.7888662444810302, 0.5188195052554685, 0.3322156194839258],
            [-0.43274636089085267, -0.2678930668853256, -0.11550192051046236, -0.04731539110040865],
        ),
    ];

    #[test]
    fn growth_agrees_with_reference() {
        for ([om, s8, ns, h0], first, second) in GROWTH {
            let universe = Cosmology::new(om, s8, ns, h0);
            for (i, z) in [0.0, 0.5, 1.5, 3.0].into_iter().enumerate() {
                close(universe.growth(1.0 / (1.0 + z)), first[i], 1e-6);
                close(universe.growth_second(1.0 / (1.0 + z)), second[i], 1e-6);
            }
        }
    }

    #[test]
    fn spectrum_agrees_with_reference() {
        // Same source; k = 0.01, 0.05, 0.1, 0.3, 1 h/Mpc.
        let cases = [
            (
                [0.3, 0.8, 0.96, 70.0],
                [0.7802508568040231, 0.2745947008224384, 0.1325352920982555, 0.03101953602245454, 0.004778492620683038],
                [20610.490755136474, 11967.827817412279, 5423.540699224033, 852.9563838289696, 64.29862173000618],
            ),
            (
                [0.25, 0.9, 0.92, 64.0],
                [0.7162290267744608, 0.20411731951455397, 0.09008898439595672, 0.01990439135377532, 0.002929407452536276],
                [53815.149640838616, 19213.780884728254, 7081.807193599417, 949.8391696118284, 62.28167455520571],
            ),
        ];
        for ([om, s8, ns, h0], transfer, power) in cases {
            let universe = Cosmology::new(om, s8, ns, h0);
            for (i, k) in [0.01, 0.05, 0.1, 0.3, 1.0].into_iter().enumerate() {
                close(universe.transfer(k), transfer[i], 1e-9);
                close(universe.power(k), power[i], 1e-3);
            }
            close(universe.sigma(8.0), s8, 1e-12);
        }
    }
}
