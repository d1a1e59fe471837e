//! Weight gradients that nobody reads do not pile up: in a process of its own, for memory is the process's.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};
use burn_spatial::nn::{ConvSpec, padded_conv3d};
use burn_spatial::{Grid, Spatial, SpatialDevice, place};
use burn_spatial_tests::grid::on_grid;

type B = Autodiff<Spatial<Flex>>;
type Device = SpatialDevice<burn_flex::FlexDevice>;

/// Tests run one after another: the other one's memory is no growth of this one's.
fn lock() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The memory the process has now, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).expect("resident memory");
    line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).expect("a number") << 10
}

/// The layers of a network on a volume of one voxel and many channels, where weights are large and all else is small.
fn weights(channels: &[usize], device: &Device) -> Vec<Tensor<B, 5>> {
    let random = |pair: &[usize]| Tensor::random([pair[1], pair[0], 1, 1, 1], Distribution::Normal(0.0, 0.1), device).require_grad();
    channels.windows(2).map(random).collect()
}

/// The gradient of the input alone, as for a saliency map; and, of the weights, those that `read` names.
fn pass(x: &Tensor<B, 5>, weights: &[Tensor<B, 5>], read: &[usize]) -> Vec<Vec<f32>> {
    let x = x.clone().detach().require_grad();
    let y = weights.iter().fold(x.clone(), |x, w| padded_conv3d(x, w.clone(), None, &ConvSpec::default()));
    let gradients = y.square().sum().backward();
    let own = x.grad(&gradients).expect("a gradient");
    let read = read.iter().map(|i| weights[*i].grad(&gradients).expect("a gradient"));
    let read: Vec<_> = read.map(|gradient| gradient.into_data().to_vec::<f32>().expect("floats")).collect();
    drop(own);
    read
}

fn volume(channels: usize, device: &Device) -> Tensor<B, 5> {
    place::split(Tensor::random([2, channels, 4, 1, 1], Distribution::Default, device))
}

#[test]
fn a_hundred_passes_need_no_more_than_ten() {
    let _alone = lock();
    // Weights that fill a bucket (1 MiB), smaller ones (256 KiB), and both.
    let two = [Grid([1, 2, 1, 1]), Grid([2, 1, 1, 1])];
    let four = [Grid([2, 2, 1, 1]), Grid([1, 4, 1, 1])];
    for (channels, grids) in [(&[512, 512][..], two), (&[256, 256, 256, 256], four), (&[32, 512, 512, 32], two)] {
        for grid in grids {
            let grown = on_grid(grid, |device| {
                let (weights, x) = (weights(channels, device), volume(channels[0], device));
                let mut readings = Vec::new();
                for number in 1..=100 {
                    pass(&x, &weights, &[]);
                    if number == 10 || number == 100 {
                        device.mesh().world().barrier().expect("all ranks are here");
                        readings.push((resident(), device.stats().live_bytes));
                        device.mesh().world().barrier().expect("all ranks are here");
                    }
                }
                assert_eq!(readings[0].1, readings[1].1, "live bytes on {grid} with {channels:?}");
                readings[1].0.saturating_sub(readings[0].0)
            });
            // One gradient of a rank in each of the ninety passes would be 90 MiB at least.
            assert!(grown[0] < 24 << 20, "{} bytes more on {grid} with {channels:?}", grown[0]);
        }
    }
}

/// Ranks that drop gradients at other times than others send the same and read the same.
#[test]
fn dropping_is_a_ranks_own_affair() {
    let _alone = lock();
    let channels = [64, 1024, 1024, 300, 64];
    for grid in [Grid([1, 2, 1, 1]), Grid([2, 2, 1, 1])] {
        let all = on_grid(grid, |device| {
            let (weights, x) = (weights(&channels, device), volume(channels[0], device));
            let values = |gradients: &_| -> Vec<Vec<f32>> {
                weights.iter().map(|w| w.grad(gradients).expect("a gradient").into_data().to_vec().expect("floats")).collect()
            };
            let expected = pass(&x, &weights, &[0, 1, 2, 3]);
            // All ranks keep the first; rank 1 keeps all, more than may be on its way: there the first has come when it is read.
            let mut kept = Vec::new();
            for number in 0..30 {
                let y = weights.iter().fold(x.clone().require_grad(), |x, w| padded_conv3d(x, w.clone(), None, &ConvSpec::default()));
                let gradients = y.square().sum().backward();
                if number == 0 || device.mesh().rank() == 1 {
                    kept.push(gradients);
                }
            }
            let first = values(&kept[0]);
            let after = pass(&x, &weights, &[3, 0, 2, 1]);
            // What the others have dropped is there, and nothing is sent for it.
            let calls = device.stats().comm.total().calls;
            kept.iter().for_each(|gradients| assert_eq!(values(gradients), expected));
            assert_eq!(device.stats().comm.total().calls, calls);
            (expected, first, after)
        });
        for (expected, first, after) in &all {
            assert_eq!(expected, &all[0].0);
            assert_eq!(expected, first);
            assert_eq!([&after[1], &after[3], &after[2], &after[0]], [&expected[0], &expected[1], &expected[2], &expected[3]]);
        }
    }
}
