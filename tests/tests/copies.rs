//! Halos are read where they lie: in a process of its own, for the bytes counted are the process's.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};
use burn_spatial::nn::{ConvSpec, PaddingMode, PoolSpec, UpsampleMode, UpsampleSpec, avg_pool3d, max_pool3d, padded_conv3d, upsample3d};
use burn_spatial::{Grid, Spatial, place};
use burn_spatial_tests::grid::on_grid;

type B = Autodiff<Spatial<Flex>>;

#[test]
fn no_volume_is_copied_for_its_halo() {
    for grid in [Grid([1, 2, 1, 1]), Grid([1, 1, 2, 1]), Grid([1, 1, 1, 2])] {
        let shape = [1, 4, 64, 64, 64];
        let copied = on_grid(grid, |device| {
            let random = |shape: [usize; 5]| Tensor::<B, 5>::random(shape, Distribution::Default, device);
            let x = place::split(random(shape)).require_grad();
            let weight = random([4, 4, 3, 3, 3]).require_grad();
            let together = || {
                device.mesh().world().barrier().expect("all ranks are here");
                let copied = device.stats().copied_bytes;
                device.mesh().world().barrier().expect("all ranks are here");
                copied
            };
            let pool = PoolSpec { stride: [2; 3], padding: [1; 3], ..PoolSpec::new([3; 3]) };
            let up = UpsampleSpec { size: [128; 3], scale: None, mode: UpsampleMode::Trilinear, align_corners: false };
            let mut copied = Vec::new();
            let mut last = together();
            let mut count = |what| {
                let now = together();
                copied.push((what, now - last));
                last = now;
            };
            let y = padded_conv3d(x.clone(), weight.clone(), None, &ConvSpec { padding: [(1, 1); 3], ..Default::default() });
            count("a convolution");
            let (largest, mean) = (max_pool3d(y.clone(), &pool).0, avg_pool3d(y, &pool));
            count("pools");
            let gradients = (largest + mean).sum().backward();
            let _ = weight.grad(&gradients).expect("a gradient").into_data();
            count("gradients");
            let _ = upsample3d(x.clone(), &up);
            count("an interpolation");
            let periodic = ConvSpec { padding: [(1, 1); 3], mode: PaddingMode::Periodic, ..Default::default() };
            let y = padded_conv3d(x, weight.clone(), None, &periodic);
            count("a periodic convolution");
            let _ = weight.grad(&y.sum().backward()).expect("a gradient").into_data();
            count("gradients of a periodic one");
            copied
        });
        // Messages, and boxes of as many columns as a kernel where the width is split; for periodic padding on every side.
        let bytes = shape.iter().product::<usize>() as u64 * 4;
        for (what, copied) in &copied[0] {
            let most = if what.contains("periodic") { bytes } else { bytes / 2 };
            assert!(*copied < most, "{what} on {grid}: {copied} bytes copied of a volume of {bytes}");
        }
    }
}
