//! Volumes crossed by waves along one axis, which is their class.

use std::f32::consts::TAU;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use burn_spatial::{SpatialBackend, place};

/// Cubes of waves and noise, made when asked for; the same on every rank.
#[derive(Clone, Debug)]
pub struct Waves {
    /// How many.
    pub count: usize,
    /// Voxels along each axis.
    pub size: usize,
    /// Seed of lengths, phases and noise.
    pub seed: u64,
}

/// One cube.
#[derive(Clone, Debug)]
pub struct Wave {
    /// Values, width fastest.
    pub voxels: Vec<f32>,
    /// Voxels along each axis.
    pub size: usize,
    /// The axis: 0 depth, 1 height, 2 width.
    pub class: usize,
}

/// A number in [0, 1) that depends on the seed and on `i`.
fn draw(seed: u64, i: u64) -> f32 {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(i.wrapping_mul(0xD1B5_4A32_D192_ED03));
    x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    (x >> 40) as f32 / (1 << 24) as f32
}

impl Dataset<Wave> for Waves {
    fn get(&self, index: usize) -> Option<Wave> {
        let (size, class) = (self.size, index % 3);
        let seed = self.seed.wrapping_mul(1_000_003).wrapping_add(index as u64);
        let (length, phase) = (3.0 + 2.0 * draw(seed, 0), TAU * draw(seed, 1));
        let value = |i: usize| {
            let at = [i / (size * size), i / size % size, i % size][class];
            (TAU * at as f32 / length + phase).sin() + 2.0 * (draw(seed, 2 + i as u64) - 0.5)
        };
        (index < self.count).then(|| Wave { voxels: (0..size.pow(3)).map(value).collect(), size, class })
    }

    fn len(&self) -> usize {
        self.count
    }
}

/// Some cubes, split over the grid, and their classes.
#[derive(Clone, Debug)]
pub struct WaveBatch<B: Backend> {
    /// Volumes `[N, 1, D, H, W]`.
    pub volumes: Tensor<B, 5>,
    /// Classes `[N]`.
    pub classes: Tensor<B, 1, Int>,
}

/// Volumes `[N, 1, D, H, W]` and classes `[N]`.
pub fn stack(items: Vec<Wave>) -> (TensorData, TensorData) {
    let size = items.first().map_or(0, |wave| wave.size);
    let shape = [items.len(), 1, size, size, size];
    let classes: Vec<i32> = items.iter().map(|wave| wave.class as i32).collect();
    let voxels: Vec<f32> = items.into_iter().flat_map(|wave| wave.voxels).collect();
    (TensorData::new(voxels, shape), TensorData::new(classes, [shape[0]]))
}

/// Makes batches: the one place that knows of ranks.
#[derive(Clone, Debug)]
pub struct WaveBatcher;

impl<B: SpatialBackend> Batcher<B, Wave, WaveBatch<B>> for WaveBatcher {
    fn batch(&self, items: Vec<Wave>, device: &B::Device) -> WaveBatch<B> {
        let (volumes, classes) = stack(items);
        WaveBatch { volumes: place::split(Tensor::from_data(volumes, device)), classes: Tensor::from_data(classes, device) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waves_run_along_their_class() {
        let waves = Waves { count: 6, size: 8, seed: 5 };
        assert!(waves.get(6).is_none());
        for index in 0..6 {
            let wave = waves.get(index).unwrap();
            assert_eq!(wave.class, index % 3);
            // Squared differences of neighbours: along the waves noise alone.
            let steps = [64, 8, 1].map(|stride| {
                let pairs = wave.voxels.iter().zip(&wave.voxels[stride..]);
                pairs.map(|(a, b)| (a - b).powi(2)).sum::<f32>() / (512 - stride) as f32
            });
            let most = (0..3).max_by(|a, b| steps[*a].total_cmp(&steps[*b])).unwrap();
            assert_eq!(most, wave.class, "{steps:?}");
        }
    }
}
