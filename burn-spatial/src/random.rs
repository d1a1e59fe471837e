//! Counter-based random numbers: a value depends on the seed, the stream and the *global* element alone, so every
//! rank draws its own block and any grid draws the same tensor.
//!
//! The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::thread::{self, ThreadId};

use burn_backend::{DType, Distribution, TensorData};
use burn_std::{Shape, bf16, f16};
use rayon::prelude::*;

use crate::layout::Layout;

/// A seed that differs from process to process.
pub(crate) fn entropy() -> u64 {
    RandomState::new().hash_one(thread::current().id())
}

/// The stream positions of a rank: the main thread's, and one a name for other threads.
pub(crate) struct Generator {
    main: ThreadId,
    state: Mutex<State>,
}

struct State {
    seed: u64,
    next: u64,
    others: HashMap<String, u64>,
}

impl Generator {
    pub(crate) fn new(seed: u64) -> Generator {
        let state = State { seed, next: 0, others: HashMap::new() };
        Generator { main: thread::current().id(), state: Mutex::new(state) }
    }

    pub(crate) fn seed(&self, seed: u64) {
        *self.state.lock().expect("drawing does not panic") = State { seed, next: 0, others: HashMap::new() };
    }

    pub(crate) fn state(&self) -> (u64, u64) {
        let state = self.state.lock().expect("drawing does not panic");
        (state.seed, state.next)
    }

    pub(crate) fn set_state(&self, (seed, next): (u64, u64)) {
        let mut state = self.state.lock().expect("drawing does not panic");
        (state.seed, state.next) = (seed, next);
    }

    /// A tensor of its own stream.
    pub(crate) fn next(&self, distribution: Distribution) -> Draw {
        let mut state = self.state.lock().expect("drawing does not panic");
        let seed = state.seed;
        let current = thread::current();
        let stream = if current.id() == self.main {
            state.next += 1;
            state.next
        } else {
            // Another thread's draws never shift the main thread's.
            let name = current.name().unwrap_or("unnamed").to_owned();
            let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3));
            let position = state.others.entry(name).or_default();
            *position += 1;
            hash | 1 << 63 | *position
        };
        Draw { seed, stream, distribution }
    }
}

/// A random tensor not yet drawn. Every clone draws the same numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw {
    seed: u64,
    stream: u64,
    distribution: Distribution,
}

impl Draw {
    /// The block that the rank at `coords` holds under `layout` (which has no uniform axes).
    pub(crate) fn block(&self, layout: &Layout, coords: [usize; 4], dtype: DType) -> TensorData {
        let shape = layout.local_shape(coords);
        // Along each axis: where it starts, how many, and the stride of its global index.
        let mut stride = 1u64;
        let mut axes: Vec<(u64, usize, u64)> = layout
            .axes()
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .map(|axis| {
                let (start, end) = axis.owned(coords);
                let this = (start as u64, end - start, stride);
                stride *= axis.extent as u64;
                this
            })
            .collect();
        axes.reverse();
        let (row_start, row, _) = axes.pop().unwrap_or((0, 1, 1));
        let rows: usize = axes.iter().map(|a| a.1).product();
        let first = |index: usize| -> u64 {
            let mut rest = index;
            let outer: u64 = axes
                .iter()
                .rev()
                .map(|(start, length, stride)| {
                    let i = (rest % length) as u64;
                    rest /= length;
                    (start + i) * stride
                })
                .sum();
            outer + row_start
        };
        match dtype {
            DType::F64 => self.fill::<f64>(shape, rows, row, first, |v, _| v),
            DType::F32 | DType::Flex32 => self.fill::<f32>(shape, rows, row, first, |v, high| below(v as f32, high as f32, f32::next_down)),
            DType::F16 => self.fill::<f16>(shape, rows, row, first, |v, high| below(f16::from_f64(v), f16::from_f64(high), down_f16)),
            DType::BF16 => self.fill::<bf16>(shape, rows, row, first, |v, high| below(bf16::from_f64(v), bf16::from_f64(high), down_bf16)),
            DType::I64 => self.fill::<i64>(shape, rows, row, first, |v, _| v.floor() as i64),
            DType::I32 => self.fill::<i32>(shape, rows, row, first, |v, _| v.floor() as i32),
            DType::I16 => self.fill::<i16>(shape, rows, row, first, |v, _| v.floor() as i16),
            DType::I8 => self.fill::<i8>(shape, rows, row, first, |v, _| v.floor() as i8),
            DType::U64 => self.fill::<u64>(shape, rows, row, first, |v, _| v.floor() as u64),
            DType::U32 => self.fill::<u32>(shape, rows, row, first, |v, _| v.floor() as u32),
            DType::U16 => self.fill::<u16>(shape, rows, row, first, |v, _| v.floor() as u16),
            DType::U8 => self.fill::<u8>(shape, rows, row, first, |v, _| v.floor() as u8),
            other => panic!("random tensors of type {other:?} do not exist"),
        }
    }

    fn fill<E: burn_backend::Element + Default>(
        &self,
        shape: Shape,
        rows: usize,
        row: usize,
        first: impl Fn(usize) -> u64 + Sync,
        convert: impl Fn(f64, f64) -> E + Sync,
    ) -> TensorData {
        let high = match self.distribution {
            Distribution::Default => 1.0,
            Distribution::Uniform(_, high) => high,
            Distribution::Bernoulli(_) | Distribution::Normal(..) => f64::INFINITY,
        };
        let mut values = vec![E::default(); rows * row];
        if row > 0 {
            values.par_chunks_mut(row).enumerate().for_each(|(index, out)| {
                let start = first(index);
                for (i, value) in out.iter_mut().enumerate() {
                    *value = convert(self.value(start + i as u64), high);
                }
            });
        }
        TensorData::new(values, shape)
    }

    /// The value of a global element.
    fn value(&self, element: u64) -> f64 {
        let counter = [element as u32, (element >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32];
        let word = philox(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        let bits = (word[0] as u64) << 32 | word[1] as u64;
        // 53 bits in [0, 1).
        let unit = (bits >> 11) as f64 / (1u64 << 53) as f64;
        match self.distribution {
            Distribution::Default => unit,
            Distribution::Uniform(low, high) => low + (high - low) * unit,
            Distribution::Bernoulli(probability) => (unit < probability) as u8 as f64,
            Distribution::Normal(mean, deviation) => {
                // Box-Muller; 1 - unit is in (0, 1].
                let angle = word[2] as f64 / (1u64 << 32) as f64 * std::f64::consts::TAU;
                mean + deviation * (-2.0 * (1.0 - unit).ln()).sqrt() * angle.cos()
            }
        }
    }
}

/// Rounding must not reach the excluded upper end.
fn below<T: PartialOrd>(value: T, high: T, down: impl Fn(T) -> T) -> T {
    if value >= high { down(high) } else { value }
}

fn down_f16(value: f16) -> f16 {
    let bits = value.to_bits();
    f16::from_bits(if value.to_f32() > 0.0 { bits - 1 } else { (bits | 0x8000) + 1 })
}

fn down_bf16(value: bf16) -> bf16 {
    let bits = value.to_bits();
    bf16::from_bits(if value.to_f32() > 0.0 { bits - 1 } else { (bits | 0x8000) + 1 })
}

/// Philox4x32 with ten rounds.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let left = 0xD251_1F53u64 * counter[0] as u64;
        let right = 0xCD9E_8D57u64 * counter[2] as u64;
        counter = [(right >> 32) as u32 ^ counter[1] ^ key[0], right as u32, (left >> 32) as u32 ^ counter[3] ^ key[1], left as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;

    #[test]
    fn philox_known_answers() {
        // From the known-answer file of the Random123 library.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn blocks_of_any_grid_are_parts_of_one_tensor() {
        let draw = Generator::new(7).next(Distribution::Normal(1.0, 2.0));
        let shape = [2, 3, 5, 4, 6];
        let whole = draw.block(&Layout::full(&shape), [0; 4], DType::F32).to_vec::<f32>().unwrap();
        let grid = Grid([2, 2, 1, 3]);
        let layout = Layout::volume(&shape, grid);
        for rank in 0..grid.ranks() {
            let coords = grid.coords(rank);
            let block = draw.block(&layout, coords, DType::F32).to_vec::<f32>().unwrap();
            let owned: Vec<(usize, usize)> = (0..5).map(|d| layout.dim(d).first().map_or((0, 1), |a| a.owned(coords))).collect();
            let mut at = 0;
            for n in owned[0].0..owned[0].1 {
                for c in 0..3 {
                    for d in owned[2].0..owned[2].1 {
                        for h in 0..4 {
                            for w in owned[4].0..owned[4].1 {
                                assert_eq!(block[at], whole[(((n * 3 + c) * 5 + d) * 4 + h) * 6 + w]);
                                at += 1;
                            }
                        }
                    }
                }
            }
            assert_eq!(at, block.len());
        }
    }

    #[test]
    fn moments_are_right() {
        let generator = Generator::new(1);
        let shape = [200_000];
        let mean_of = |distribution| {
            let values = generator.next(distribution).block(&Layout::full(&shape), [0; 4], DType::F64).to_vec::<f64>().unwrap();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
            (mean, variance)
        };
        let near = |got: (f64, f64), mean: f64, variance: f64| {
            assert!((got.0 - mean).abs() < 0.01 && (got.1 - variance).abs() < 0.02 * variance.max(1.0), "{got:?}");
        };
        near(mean_of(Distribution::Default), 0.5, 1.0 / 12.0);
        near(mean_of(Distribution::Uniform(-1.0, 1.0)), 0.0, 1.0 / 3.0);
        near(mean_of(Distribution::Bernoulli(0.3)), 0.3, 0.21);
        near(mean_of(Distribution::Normal(0.5, 1.0)), 0.5, 1.0);
    }
}
