//! Convolutions and pools of split volumes against PyTorch's values, on every grid.

use burn::backend::{Autodiff, Flex};
use burn::tensor::DType;
use burn_spatial::{Spatial, place};
use burn_spatial_tests::fixtures::{self, Case, Outcome};
use burn_spatial_tests::grid::{GRIDS, on_grid};

type B = Autodiff<Spatial<Flex>>;

fn check(op: &str, skip: impl Fn(&Case) -> bool + Sync, run: impl Fn(&Case, DType, &burn::tensor::Device<B>) -> Outcome + Sync) {
    let cases = fixtures::cases(op);
    assert!(!cases.is_empty());
    for grid in GRIDS {
        on_grid(grid, |device| {
            for case in cases.iter().filter(|c| !skip(c)) {
                for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F64, 1e-10)] {
                    case.check(&run(case, dtype, device), tolerance);
                }
            }
            assert_eq!(device.stats().gathered(), 0, "{op} gathered: {}", device.stats());
        });
    }
}

#[test]
fn conv3d() {
    check("conv3d", |_| false, |case, dtype, device| fixtures::run_conv3d::<B>(case, dtype, device, place::split));
}

#[test]
fn avg_pool3d() {
    check("avg_pool3d", |c| c.flag("ceil_mode"), |case, dtype, device| fixtures::run_avg_pool3d::<B>(case, dtype, device, place::split));
}

#[test]
fn max_pool3d() {
    check("max_pool3d", |c| c.flag("ceil_mode"), |case, dtype, device| fixtures::run_max_pool3d::<B>(case, dtype, device, place::split));
}
