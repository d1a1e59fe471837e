//! Halos are read where they lie: in a process of its own, for the bytes counted are the process's.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};
use burn_spatial::nn::{ConvSpec, PoolSpec, avg_pool3d, max_pool3d, padded_conv3d};
use burn_spatial::{Grid, Spatial, place};
use burn_spatial_tests::grid::on_grid;

type B = Autodiff<Spatial<Flex>>;

#[test]
fn no_volume_is_copied_for_its_halo() {
    for grid in [Grid([1, 2, 1, 1]), Grid([1, 1, 2, 1]), Grid([1, 1, 1, 2])] {
        let shape = [1, 8, 32, 32, 64];
        let copied = on_grid(grid, |device| {
            let random = |shape: [usize; 5]| Tensor::<B, 5>::random(shape, Distribution::Default, device);
            let x = place::split(random(shape)).require_grad();
            let weight = random([8, 8, 3, 3, 3]).require_grad();
            let together = || {
                device.mesh().world().barrier().expect("all ranks are here");
                let copied = device.stats().copied_bytes;
                device.mesh().world().barrier().expect("all ranks are here");
                copied
            };
            let conv = ConvSpec { padding: [(1, 1); 3], ..Default::default() };
            let pool = PoolSpec { stride: [2; 3], padding: [1; 3], ..PoolSpec::new([3; 3]) };
            let before = together();
            let y = padded_conv3d(x.clone(), weight.clone(), None, &conv);
            let conv_forward = together();
            let (largest, mean) = (max_pool3d(y.clone(), &pool).0, avg_pool3d(y, &pool));
            let pools = together();
            let gradients = (largest + mean).sum().backward();
            let _ = weight.grad(&gradients).expect("a gradient").into_data();
            [conv_forward - before, pools - conv_forward, together() - pools]
        });
        // Messages, and boxes of as many columns as a kernel where the width is split.
        let bytes = shape.iter().product::<usize>() as u64 * 4;
        for (what, copied, most) in
            [("convolution", copied[0][0], bytes / 4), ("pools", copied[0][1], bytes / 4), ("gradients", copied[0][2], bytes / 2)]
        {
            assert!(copied < most, "{what} on {grid}: {copied} bytes copied of a volume of {bytes}");
        }
    }
}
