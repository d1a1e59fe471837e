//! One mixer of bits, for numbers that have to differ and need not be drawn by the generator.

use std::hash::{BuildHasher, RandomState};
use std::thread;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A step of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): one to one, and each bit depends on all.
pub(crate) fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(GOLDEN);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A number for a text.
pub(crate) fn mix_text(text: &str) -> u64 {
    text.bytes().fold(mix(text.len() as u64), |hash, byte| mix(hash ^ u64::from(byte)))
}

/// A seed that differs from process to process.
pub(crate) fn entropy() -> u64 {
    RandomState::new().hash_one(thread::current().id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // The first numbers of splitmix64 from the state 0, whose steps add the constant.
        let first: Vec<u64> = (0..3u64).map(|i| mix(i.wrapping_mul(GOLDEN))).collect();
        assert_eq!(first, [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F]);
    }

    #[test]
    fn texts_that_are_alike_have_numbers_that_are_not() {
        let texts = ["", "\0", "a", "b", "ab", "ba", "worker", "worker 1", "worker 2"];
        for (i, a) in texts.iter().enumerate() {
            for b in &texts[..i] {
                let bits = (mix_text(a) ^ mix_text(b)).count_ones();
                assert!((12..=52).contains(&bits), "{a:?} and {b:?} differ in {bits} bits");
            }
        }
    }
}
