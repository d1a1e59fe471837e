//! Random numbers that are the same on every platform: ChaCha8 with an explicit key.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The generator of `seed` for one `purpose`, at the start of stream `stream`.
///
/// The 32-byte key is the seed (8 bytes, little-endian), then `purpose`, then zeros; the stream is ChaCha's 64-bit
/// stream number.
pub(crate) fn stream(seed: u64, purpose: &[u8; 8], stream: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(purpose);
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(stream);
    rng
}

/// Uniform in `0..bound`, without bias: the high half of a 128-bit product, drawn again where the low half falls
/// into the incomplete part (Lemire, arXiv 1805.10941).
pub(crate) fn below(rng: &mut impl RngCore, bound: u64) -> u64 {
    let threshold = bound.wrapping_neg() % bound;
    loop {
        let product = u128::from(rng.next_u64()) * u128::from(bound);
        if product as u64 >= threshold {
            return (product >> 64) as u64;
        }
    }
}

/// A random order of `0..len`: Fisher and Yates, from the last position down.
pub(crate) fn permutation(len: usize, rng: &mut impl RngCore) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        order.swap(last, below(rng, last as u64 + 1) as usize);
    }
    order
}

/// Uniform in [0, 1), 53 bits.
pub(crate) fn unit(rng: &mut impl RngCore) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Two independent standard normal numbers (Box and Muller).
pub(crate) fn normal_pair(rng: &mut impl RngCore) -> [f64; 2] {
    // 1 - u is in (0, 1]: the logarithm is finite.
    let radius = (-2.0 * (1.0 - unit(rng)).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * unit(rng)).sin_cos();
    [radius * cos, radius * sin]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_are_whole_and_pinned() {
        let order = permutation(16, &mut stream(7, b"test\0\0\0\0", 0));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..16).collect::<Vec<_>>());
        assert_ne!(order, permutation(16, &mut stream(7, b"test\0\0\0\0", 1)));
        assert_eq!(order, permutation(16, &mut stream(7, b"test\0\0\0\0", 0)));
    }

    #[test]
    fn bounded_numbers_are_even() {
        let mut rng = stream(1, b"test\0\0\0\0", 0);
        let mut seen = [0; 3];
        (0..3000).for_each(|_| seen[below(&mut rng, 3) as usize] += 1);
        assert!(seen.iter().all(|n| (900..1100).contains(n)), "{seen:?}");
    }

    #[test]
    fn normal_numbers_have_unit_variance() {
        let mut rng = stream(2, b"test\0\0\0\0", 0);
        let values: Vec<f64> = (0..20_000).flat_map(|_| normal_pair(&mut rng)).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }
}
