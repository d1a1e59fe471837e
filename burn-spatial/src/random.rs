//! Counter-based random numbers: a value depends on the seed, the stream and the *global* element alone, so every
//! rank draws its own block and any grid draws the same tensor.
//!
//! The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

use std::collections::HashMap;
use std::sync::Mutex;
use std::thread::{self, ThreadId};

use burn_backend::{DType, Distribution, TensorData};
use burn_std::{Shape, bf16, f16};
use rayon::prelude::*;

use crate::layout::Layout;
use crate::mix::{mix, mix_text};

/// Streams of threads beside the main one have numbers of their own.
const BESIDE: u64 = 1 << 63;

/// The stream positions of a rank: the main thread's, and one a name for other threads. These have a key of their own, so that
/// no two of their streams are the same.
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
        let current = thread::current();
        if current.id() == self.main {
            state.next += 1;
            return Draw { seed: state.seed, stream: state.next, distribution };
        }
        // Another thread's draws never shift the main thread's.
        let name = current.name().unwrap_or("unnamed");
        let seed = mix(state.seed ^ mix_text(name));
        let position = state.others.entry(name.to_owned()).or_default();
        *position += 1;
        Draw { seed, stream: BESIDE | *position, distribution }
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
            DType::I64 => self.integers(shape, rows, row, first, i64::MAX as f64, |v| v as i64),
            DType::I32 => self.integers(shape, rows, row, first, i32::MAX as f64, |v| v as i32),
            DType::I16 => self.integers(shape, rows, row, first, i16::MAX as f64, |v| v as i16),
            DType::I8 => self.integers(shape, rows, row, first, i8::MAX as f64, |v| v as i8),
            DType::U64 => self.integers(shape, rows, row, first, u64::MAX as f64, |v| v as u64),
            DType::U32 => self.integers(shape, rows, row, first, u32::MAX as f64, |v| v as u32),
            DType::U16 => self.integers(shape, rows, row, first, u16::MAX as f64, |v| v as u16),
            DType::U8 => self.integers(shape, rows, row, first, u8::MAX as f64, |v| v as u8),
            other => panic!("random tensors of type {other:?} do not exist"),
        }
    }

    /// Whole numbers. By default they are in [0, 255), as on Burn's own backends ([0, 1) has but one), or as many of these as
    /// are below `top`. Like there, normal numbers are cut, not rounded.
    fn integers<E: burn_backend::Element + Default>(
        &self,
        shape: Shape,
        rows: usize,
        row: usize,
        first: impl Fn(usize) -> u64 + Sync,
        top: f64,
        convert: impl Fn(f64) -> E + Sync,
    ) -> TensorData {
        let distribution = match self.distribution {
            Distribution::Default => Distribution::Uniform(0.0, top.min(255.0)),
            other => other,
        };
        let whole = match distribution {
            Distribution::Normal(..) => f64::trunc,
            _ => f64::floor,
        };
        Draw { distribution, ..*self }.fill::<E>(shape, rows, row, first, |v, high| convert(whole(below(v, high, f64::next_down))))
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

    /// Numbers of a draw.
    fn numbers(draw: Draw, n: usize) -> Vec<f64> {
        draw.block(&Layout::full(&[n]), [0; 4], DType::F64).to_vec::<f64>().unwrap()
    }

    /// The draws of each thread of `names`, one thread after another.
    fn on_threads(generator: &Generator, names: &[String], draws: usize) -> Vec<Vec<Draw>> {
        let draw = || (0..draws).map(|_| generator.next(Distribution::Default)).collect();
        let one = |name: &String| {
            thread::scope(|scope| thread::Builder::new().name(name.clone()).spawn_scoped(scope, draw).unwrap().join().unwrap())
        };
        names.iter().map(one).collect()
    }

    #[test]
    fn every_draw_of_every_thread_differs() {
        let mut names = vec!["worker".to_owned(), String::new(), "a".repeat(200)];
        names.extend((0..47).map(|i| format!("worker {i}")));
        let generator = Generator::new(9);
        let mut seen = std::collections::HashSet::new();
        // More draws than numbers that happen to be alike: 53 bits each.
        for draws in
            on_threads(&generator, &names, 1000).into_iter().chain([(0..1000).map(|_| generator.next(Distribution::Default)).collect()])
        {
            for draw in draws {
                assert!(seen.insert(numbers(draw, 2).map_bits()), "a stream is there twice");
            }
        }
        assert_eq!(seen.len(), 51_000);
        // A name goes on where it was, and a new seed starts anew.
        let again = on_threads(&generator, &names[..1], 1)[0][0];
        assert!(seen.insert(numbers(again, 2).map_bits()));
        generator.seed(9);
        assert!(!seen.insert(numbers(on_threads(&generator, &names[..1], 1)[0][0], 2).map_bits()));
    }

    /// The bits of numbers, which can be hashed.
    trait MapBits {
        fn map_bits(self) -> Vec<u64>;
    }

    impl MapBits for Vec<f64> {
        fn map_bits(self) -> Vec<u64> {
            self.into_iter().map(f64::to_bits).collect()
        }
    }

    /// Correlations of draws with the same position on other threads, and with the draw before on the same one, are those of
    /// numbers that know nothing of each other: normal, of variance 1 / n.
    #[test]
    fn streams_of_threads_know_nothing_of_each_other() {
        let n = 1000;
        let names: Vec<String> = (0..50).map(|i| format!("worker {i}")).collect();
        let generator = Generator::new(3);
        let centred = |values: Vec<f64>| values.into_iter().map(|v| (v - 0.5) * 12f64.sqrt()).collect::<Vec<_>>();
        // The first number of each draw.
        let mut firsts: Vec<Vec<f64>> = on_threads(&generator, &names, n + 1)
            .into_iter()
            .map(|draws| centred(draws.into_iter().map(|draw| numbers(draw, 1)[0]).collect()))
            .collect();
        firsts.push(centred((0..=n).map(|_| numbers(generator.next(Distribution::Default), 1)[0]).collect()));
        let correlation = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() / (n as f64).sqrt();
        let mut all = Vec::new();
        for (i, a) in firsts.iter().enumerate() {
            all.push(correlation(&a[..n], &a[1..]));
            all.extend(firsts[..i].iter().map(|b| correlation(&a[..n], &b[..n])));
            all.extend(firsts[..i].iter().map(|b| correlation(&a[..n], &b[1..])));
        }
        // Normal: the largest of 2,601 is beyond 5.5 once in 10,000 tries, and the mean square is within 0.15 of 1.
        let largest = all.iter().fold(0.0, |most: f64, c| most.max(c.abs()));
        assert!(largest < 5.5, "{largest} deviations");
        let square = all.iter().map(|c| c * c).sum::<f64>() / all.len() as f64;
        assert!((square - 1.0).abs() < 0.15, "{square}");
    }

    /// Integers of the default distribution are Burn's: from 0 to 254, all alike often.
    #[test]
    fn default_integers_are_bytes() {
        let draw = Generator::new(5).next(Distribution::Default);
        let count = |dtype: DType, top: usize| {
            let data = draw.block(&Layout::full(&[200_000]), [0; 4], dtype).convert_dtype(DType::I64);
            let mut counts = vec![0usize; top];
            data.to_vec::<i64>().unwrap().into_iter().for_each(|v| counts[v as usize] += 1);
            let expected = 200_000.0 / top as f64;
            let square: f64 = counts.iter().map(|n| (*n as f64 - expected).powi(2) / expected).sum();
            // Chi squared: mean `top` - 1, variance twice that.
            assert!(square < top as f64 + 5.0 * (2.0 * top as f64).sqrt(), "{square} for {top} numbers of {dtype:?}");
        };
        for dtype in [DType::I64, DType::I32, DType::I16, DType::U64, DType::U32, DType::U16, DType::U8] {
            count(dtype, 255);
        }
        count(DType::I8, 127);
    }

    #[test]
    fn other_integers_are_whole_numbers_of_their_distribution() {
        let generator = Generator::new(6);
        let draw = |distribution| generator.next(distribution).block(&Layout::full(&[50_000]), [0; 4], DType::I32).to_vec::<i32>().unwrap();
        let share = |values: &[i32], wanted: i32| values.iter().filter(|v| **v == wanted).count() as f64 / values.len() as f64;
        let uniform = draw(Distribution::Uniform(-2.0, 2.0));
        for value in -2..2 {
            assert!((share(&uniform, value) - 0.25).abs() < 0.02);
        }
        assert!((share(&draw(Distribution::Bernoulli(0.3)), 1) - 0.3).abs() < 0.02);
        // Cut: between -1 and 1 all are 0.
        assert!((share(&draw(Distribution::Normal(0.0, 1.0)), 0) - 0.683).abs() < 0.02);
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
