//! Memory does not grow from step to step: in a process of its own, for the peak is the process's.

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::nn::conv::{Conv3d, Conv3dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig3d};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, activation};
use burn_spatial::nn::{PoolSpec, WindowBackend, avg_pool3d};
use burn_spatial::{Grid, Spatial, place};
use burn_spatial_tests::grid::on_grid;

type B = Autodiff<Spatial<Flex>>;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    conv: Conv3d<B>,
    norm: BatchNorm<B>,
    linear: Linear<B>,
}

impl<B: WindowBackend> Net<B> {
    fn forward(&self, x: Tensor<B, 5>) -> Tensor<B, 2> {
        let pool = PoolSpec::new([2; 3]);
        let x = avg_pool3d(activation::leaky_relu(self.norm.forward(self.conv.forward(x)), 0.01), &pool);
        self.linear.forward(x.flatten(1, 4))
    }
}

/// Enough for volumes to outweigh what the allocator keeps in its corners, which comes to most of a MiB.
const CHANNELS: usize = 24;

/// The most memory the process has had, in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).expect("a peak");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

#[test]
fn two_hundred_steps_need_no_more_than_twenty() {
    let peaks = on_grid(Grid([1, 2, 1, 1]), |device| {
        let mut net = Net::<B> {
            conv: Conv3dConfig::new([2, CHANNELS], [3; 3]).with_padding(PaddingConfig3d::Explicit(1, 1, 1)).init(device),
            norm: BatchNormConfig::new(CHANNELS).init(device),
            linear: LinearConfig::new(CHANNELS * 4096, 4).init(device),
        };
        let mut adam = AdamConfig::new().init();
        let mut peaks = Vec::new();
        for step in 1..=200 {
            let x = place::split(Tensor::<B, 5>::random([2, 2, 32, 32, 32], Distribution::Default, device));
            let loss = net.forward(x).square().mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            net = adam.step(1e-4, net, gradients);
            if step == 20 || step == 200 {
                device.mesh().world().barrier().expect("all ranks are here");
                let stats = device.stats();
                peaks.push((peak(), stats.peak_bytes, stats.live_bytes));
            }
        }
        peaks
    });
    for rank in peaks {
        let [early, late] = rank[..] else { panic!("two readings") };
        // Two ranks share the process: that both hold the most at once may happen early or late, and makes a difference of
        // what one of them frees in a step. A step that left a single volume behind would add twenty times as much.
        let freed = (early.1 - early.2) / 1024;
        let most = (early.0 as f64 * 1.02) as u64 + freed;
        assert!(late.0 <= most, "peak memory grew from {} to {} KiB, of which {freed} are freed in a step", early.0, late.0);
        assert_eq!(late.1, early.1, "peak of counted tensors");
        assert_eq!(late.2, early.2, "live tensors after a step");
    }
}
