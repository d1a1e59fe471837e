//! Convolutions, pools and interpolations of split volumes against PyTorch's values.

use burn::backend::{Autodiff, Flex};
use burn::tensor::DType;
use burn_spatial::{Spatial, place};

use crate::fixtures::{self, Case, Outcome};
use crate::suite::{Device, Program};

type B = Autodiff<Spatial<Flex>>;

fn check(device: &Device, op: &str, run: impl Fn(&Case, DType) -> Outcome) {
    let mut ran = 0;
    for case in &fixtures::cases(op) {
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F64, 1e-10)] {
            case.check(&run(case, dtype), tolerance);
            ran += 1;
        }
    }
    assert!(ran > 0, "there are cases of {op}");
    assert_eq!(device.stats().gathered(), 0, "{op} gathered: {}", device.stats());
}

/// Padded, strided, dilated, grouped and periodic convolutions, with all gradients.
pub fn conv3d(device: &Device) {
    check(device, "conv3d", |case, dtype| fixtures::run_conv3d::<B>(case, dtype, device, place::split));
}

/// Transposed convolutions, with all gradients.
pub fn conv_transpose3d(device: &Device) {
    check(device, "conv_transpose3d", |case, dtype| fixtures::run_conv_transpose3d::<B>(case, dtype, device, place::split));
}

/// Interpolations, with their gradient.
pub fn upsample(device: &Device) {
    check(device, "upsample", |case, dtype| fixtures::run_upsample::<B>(case, dtype, device, place::split));
}

/// Average pools, with their gradient.
pub fn avg_pool3d(device: &Device) {
    check(device, "avg_pool3d", |case, dtype| fixtures::run_pool3d::<B>(case, dtype, device, place::split));
}

/// Maximum pools, their positions, and their gradient.
pub fn max_pool3d(device: &Device) {
    check(device, "max_pool3d", |case, dtype| fixtures::run_pool3d::<B>(case, dtype, device, place::split));
}

/// What of this module runs on every grid.
pub const PROGRAMS: &[Program] = &[
    Program { name: "conv3d", run: conv3d },
    Program { name: "conv_transpose3d", run: conv_transpose3d },
    Program { name: "upsample", run: upsample },
    Program { name: "avg_pool3d", run: avg_pool3d },
    Program { name: "max_pool3d", run: max_pool3d },
];
