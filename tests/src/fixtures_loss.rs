//! Runners of the losses' cases on any backend, and losses and metrics of split volumes on every grid.

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_spatial::layout::{Axis, Layout};
use burn_spatial::{Spatial, place};
use burn_spatial_models::loss::{DiceCrossEntropy, DiceLoss, Reduction, VoxelCrossEntropy};
use burn_spatial_models::metric::ClassCounts;

use crate::fixtures::{Case, Outcome, cases, values};
use crate::suite::{Device, Program, agree};

type Split = Autodiff<Spatial<Flex>>;

/// The array `name` of `case` as integers.
///
/// # Panics
/// If the case has none.
pub fn integers<B: Backend, const D: usize>(case: &Case, name: &str, device: &B::Device) -> Tensor<B, D, Int> {
    let array = &case.arrays[name];
    let integers: Vec<i64> = array.values.iter().map(|v| *v as i64).collect();
    Tensor::from_data(TensorData::new(integers, array.shape.clone()), (device, DType::I64))
}

/// Runs `cross_entropy` or `dice` and its backward pass in `dtype`; `place` is applied to the logits, `place_targets`
/// to the targets.
///
/// # Panics
/// If a gradient is missing.
pub fn run_loss<B: AutodiffBackend>(
    case: &Case,
    dtype: DType,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
    place_targets: impl Fn(Tensor<B, 4, Int>) -> Tensor<B, 4, Int>,
) -> Outcome {
    let x = place(case.tensor("x", dtype, device)).require_grad();
    let targets = place_targets(integers(case, "t", device));
    let cross_entropy = || {
        VoxelCrossEntropy::new()
            .with_class_weights(case.arrays.get("w").map(|w| w.values.clone()))
            .with_ignore_index(case.params["ignore_index"].as_i64())
            .with_label_smoothing(case.number("label_smoothing"))
            .with_reduction(if case.params["reduction"] == "sum" { Reduction::Sum } else { Reduction::Mean })
    };
    let mut outcome = Outcome::default();
    let loss = match case.op.as_str() {
        "dice" => DiceLoss::new()
            .with_epsilon(case.params["eps"].as_f64().expect("a number"))
            .with_squared(case.flag("squared"))
            .with_per_sample(case.flag("per_sample"))
            .with_skip_background(case.flag("skip_background"))
            .forward(x.clone(), targets),
        _ if case.params["reduction"] == "none" => {
            let losses = cross_entropy().forward_no_reduction(x.clone(), targets);
            outcome.values.insert("y", values(losses.clone()));
            (losses * case.tensor("gy", dtype, device)).sum()
        }
        _ => cross_entropy().forward(x.clone(), targets),
    };
    if !outcome.values.contains_key("y") {
        outcome.values.insert("y", values(loss.clone()));
    }
    let gradients = loss.backward();
    outcome.values.insert("gx", values(x.grad(&gradients).expect("a gradient of x")));
    outcome
}

/// Classes split as the volume is.
pub fn split_targets<B: place::SpatialBackend>(targets: Tensor<B, 4, Int>) -> Tensor<B, 4, Int> {
    let [n, d, h, w] = targets.dims();
    let layout = Layout::volume(&[n, 1, d, h, w], B::grid(&targets.device()));
    let axes: Vec<Vec<Axis>> = [0, 2, 3, 4].map(|dim| layout.dim(dim).to_vec()).into();
    place::to_layout_int(targets, &Layout::try_new(axes).expect("one dimension"))
}

/// All cases of both losses on a split volume give PyTorch's values, and nothing is gathered.
pub fn losses_equal_pytorch(device: &Device) {
    let all: Vec<Case> = ["cross_entropy", "dice"].into_iter().flat_map(cases).collect();
    assert_eq!(all.len(), 16);
    device.set_strict(true);
    for case in all {
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F64, 1e-10)] {
            let split = run_loss::<Split>(&case, dtype, device, place::split, split_targets);
            case.check(&split, tolerance);
            // Targets that every rank has whole are the same targets.
            let whole = run_loss::<Split>(&case, dtype, device, place::split, |targets| targets);
            case.check(&whole, tolerance);
            let bits = split.values.values().flatten().flat_map(|v| v.to_ne_bytes()).collect::<Vec<_>>();
            agree(device, &case.name, &bits);
        }
    }
    assert_eq!(device.stats().gathered(), 0, "{}", device.stats());
}

/// The combined loss and counts of classes of a split batch are those of the whole batch; nothing is gathered.
pub fn segmentation_is_that_of_the_whole(device: &Device) {
    let shape = [3usize, 4, 5, 6, 7];
    let number = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) % 1000;
    let logits: Vec<f32> = (0..shape.iter().product()).map(|i| number(i) as f32 / 250.0 - 2.0).collect();
    let classes: Vec<i64> = (0..3 * 5 * 6 * 7).map(|i| [0, 1, 2, 3, 255][number(i + 7) % 5]).collect();
    let loss = DiceCrossEntropy::new().with_class_weights(Some(vec![0.5, 1.0, 2.0, 0.25])).with_ignore_index(Some(255));
    fn run<B: AutodiffBackend>(
        loss: &DiceCrossEntropy,
        logits: Tensor<B, 5>,
        targets: Tensor<B, 4, Int>,
    ) -> (Vec<f64>, Vec<f64>, ClassCounts) {
        let logits = logits.require_grad();
        let value = loss.forward(logits.clone(), targets.clone());
        let gradients = value.backward();
        let mut counts = ClassCounts::new(4);
        counts.add(logits.clone().inner(), targets.inner(), Some(255));
        (values(value), values(logits.grad(&gradients).expect("a gradient")), counts)
    }
    let data = || TensorData::new(logits.clone(), shape);
    let targets = || TensorData::new(classes.clone(), [3, 5, 6, 7]);
    let here = Default::default();
    let whole = run::<Autodiff<Flex>>(&loss, Tensor::from_data(data(), &here), Tensor::from_data(targets(), &here));

    device.set_strict(true);
    let split = run::<Split>(&loss, place::split(Tensor::from_data(data(), device)), split_targets(Tensor::from_data(targets(), device)));
    assert_eq!(device.stats().gathered(), 0, "{}", device.stats());
    for (a, b) in [(&split.0, &whole.0), (&split.1, &whole.1)] {
        let scale = b.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        assert_eq!(a.len(), b.len());
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * scale));
    }
    assert_eq!(split.2, whole.2);
    let counted: u64 = whole.2.truth.iter().sum();
    assert_eq!(counted, classes.iter().filter(|c| **c != 255).count() as u64);
}

/// What of this module runs on every grid.
pub const PROGRAMS: &[Program] = &[
    Program { name: "losses_equal_pytorch", run: losses_equal_pytorch },
    Program { name: "segmentation_is_that_of_the_whole", run: segmentation_is_that_of_the_whole },
];
