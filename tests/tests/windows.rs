//! Convolutions and pools with PyTorch's values and small cases by hand, on the CPU backend with autodiff.

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::conv::Conv3dConfig;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::{DType, Distribution, Tensor, TensorData};
use burn_flex::Flex;
use burn_spatial::nn::{
    AvgPool3dConfig, ConvSpec, MaxPool3dConfig, PaddedConv3dConfig, PaddingMode, PoolSpec, SpecError, Upsample3dConfig, UpsampleMode,
    padded_conv3d, same_padding,
};
use burn_spatial_tests::fixtures::{cases, run_conv3d, run_pool3d, run_upsample, values};

type B = Autodiff<Flex>;

#[test]
fn convolutions_equal_pytorch() {
    let all = cases("conv3d");
    assert_eq!(all.len(), 14);
    for case in all {
        case.check(&run_conv3d::<B>(&case, DType::F32, &Default::default(), |x| x), 1e-4);
        case.check(&run_conv3d::<B>(&case, DType::F64, &Default::default(), |x| x), 1e-10);
    }
}

#[test]
fn pools_equal_pytorch() {
    let mut run = 0;
    for case in cases("max_pool3d").into_iter().chain(cases("avg_pool3d")) {
        case.check(&run_pool3d::<B>(&case, DType::F32, &Default::default(), |x| x), 1e-4);
        case.check(&run_pool3d::<B>(&case, DType::F64, &Default::default(), |x| x), 1e-10);
        run += 1;
    }
    assert_eq!(run, 16);
}

#[test]
fn interpolations_equal_pytorch() {
    let all = cases("upsample");
    assert_eq!(all.len(), 3);
    for case in all {
        case.check(&run_upsample::<B>(&case, DType::F32, &Default::default(), |x| x), 1e-4);
        case.check(&run_upsample::<B>(&case, DType::F64, &Default::default(), |x| x), 1e-10);
    }
}

/// `values` along the width of a volume of one row.
fn row(values: &[f32]) -> Tensor<B, 5> {
    Tensor::from_data(TensorData::new(values.to_vec(), [1, 1, 1, 1, values.len()]), &Default::default())
}

fn convolve(x: &[f32], w: &[f32], stride: usize, padding: (usize, usize), mode: PaddingMode) -> Vec<f64> {
    let spec = ConvSpec { stride: [1, 1, stride], padding: [(0, 0), (0, 0), padding], mode, ..Default::default() };
    values(padded_conv3d(row(x), row(w), None, &spec))
}

const TO_8: [f32; 8] = [1., 2., 3., 4., 5., 6., 7., 8.];

#[test]
fn asymmetric_padding_keeps_its_end() {
    assert_eq!(convolve(&[1., 2., 3., 4.], &[1., 1.], 1, (0, 1), PaddingMode::Zeros), [3., 5., 7., 4.]);
    let x = row(&[1., 2., 3., 4.]).require_grad();
    let spec = ConvSpec { padding: [(0, 0), (0, 0), (0, 1)], ..Default::default() };
    let grads = padded_conv3d(x.clone(), row(&[1., 10.]), None, &spec).sum().backward();
    assert_eq!(values(x.grad(&grads).unwrap()), [1., 11., 11., 11.]);
}

#[test]
fn same_padding_with_stride_2_is_0_1_on_even_extents() {
    assert_eq!(same_padding(8, 3, 2, 1), (0, 1));
    assert_eq!(convolve(&TO_8, &[1.; 3], 2, (0, 1), PaddingMode::Zeros), [6., 12., 18., 15.]);
    assert_eq!(convolve(&TO_8, &[1.; 3], 2, (1, 1), PaddingMode::Zeros), [3., 9., 15., 21.]);
    let extents = [8, 6, 3];
    let conv = PaddedConv3dConfig::new([2, 3], [3; 3]).with_stride([2; 3]).with_padding(extents.map(|n| same_padding(n, 3, 2, 1)));
    let y = conv.init::<B>(&Default::default()).forward(Tensor::ones([1, 2, 8, 6, 3], &Default::default()));
    assert_eq!(y.dims(), [1, 3, 4, 3, 2]);
}

#[test]
fn same_padding_with_an_even_kernel_keeps_the_extent() {
    assert_eq!(same_padding(8, 2, 1, 1), (0, 1));
    assert_eq!(same_padding(8, 4, 1, 1), (1, 2));
    assert_eq!(same_padding(9, 3, 1, 2), (2, 2));
    assert_eq!(convolve(&TO_8, &[1.; 2], 1, (0, 1), PaddingMode::Zeros), [3., 5., 7., 9., 11., 13., 15., 8.]);
}

#[test]
fn periodic_padding_wraps() {
    let wrap = |w: &[f32]| convolve(&[1., 2., 3., 4.], w, 1, (1, 1), PaddingMode::Periodic);
    assert_eq!(wrap(&[1., 0., 0.]), [4., 1., 2., 3.]);
    assert_eq!(wrap(&[0., 0., 1.]), [2., 3., 4., 1.]);
    assert_eq!(wrap(&[1., 1., 1.]), [7., 6., 9., 8.]);
    // An axis of one voxel is its own neighbour; zeros are not.
    assert_eq!(convolve(&[5.], &[1., 10., 100.], 1, (1, 1), PaddingMode::Periodic), [555.]);
    assert_eq!(convolve(&[5.], &[1., 10., 100.], 1, (1, 1), PaddingMode::Zeros), [50.]);
    // As large as the extent, another on each side, with gradient.
    let x = row(&[1., 2., 3.]).require_grad();
    let spec = ConvSpec { padding: [(0, 0), (0, 0), (3, 1)], mode: PaddingMode::Periodic, ..Default::default() };
    let y = padded_conv3d(x.clone(), row(&[1.]), None, &spec);
    assert_eq!(values(y.clone()), [1., 2., 3., 1., 2., 3., 1.]);
    let grads = (y * row(&[1., 2., 3., 10., 20., 30., 100.])).sum().backward();
    assert_eq!(values(x.grad(&grads).unwrap()), [111., 22., 33.]);
}

#[test]
fn pools_by_hand() {
    let pool =
        |include| AvgPool3dConfig::new([1, 1, 3]).with_strides([1, 1, 2]).with_padding([0, 0, 1]).with_count_include_pad(include).init();
    assert_eq!(values(pool(true).forward(row(&TO_8))), [1., 3., 5., 7.]);
    assert_eq!(values(pool(false).forward(row(&TO_8))), [1.5, 3., 5., 7.]);
    let max = MaxPool3dConfig::new([1, 1, 3]).with_strides([1, 1, 2]).with_padding([0, 0, 1]).init();
    assert_eq!(values(max.forward(row(&TO_8.map(|v| -v)))), [-1., -2., -4., -6.]);
    assert_eq!(MaxPool3dConfig::new([1, 2, 2]).init().stride, [1, 2, 2]);
}

#[test]
fn pools_rounded_up_by_hand() {
    let x = [1., 2., 3., 4., 5., 6., 7.];
    let max = |kernel, padding, dilation| {
        let pool = MaxPool3dConfig::new([1, 1, kernel]).with_strides([1, 1, 2]).with_padding([0, 0, padding]);
        values(pool.with_dilation([1, 1, dilation]).with_ceil_mode(true).init().forward(row(&x)))
    };
    assert_eq!(max(2, 0, 1), [2., 4., 6., 7.]);
    // A fifth window would start behind the input.
    assert_eq!(max(2, 1, 1), [1., 3., 5., 7.]);
    assert_eq!(max(2, 0, 3), [4., 6., 5.]);
    let mean = |x: &[f32], kernel, stride, padding, include| {
        let pool = AvgPool3dConfig::new([1, 1, kernel]).with_strides([1, 1, stride]).with_padding([0, 0, padding]);
        values(pool.with_count_include_pad(include).with_ceil_mode(true).init().forward(row(x)))
    };
    assert_eq!(mean(&x, 2, 2, 0, true), [1.5, 3.5, 5.5, 7.]);
    // The last window holds 6, one voxel of padding that counts, and one beyond that does not.
    assert_eq!(mean(&x[..6], 3, 2, 1, true), [1., 3., 5., 3.]);
    assert_eq!(mean(&x[..6], 3, 2, 1, false), [1.5, 3., 5., 6.]);
    // A window larger than the input.
    assert_eq!(mean(&x[..1], 2, 2, 0, true), [1.]);
}

#[test]
fn mirrored_and_replicated_padding_by_hand() {
    let x = [1., 2., 3., 4.];
    let pad = |mode, padding| convolve(&x, &[1.], 1, padding, mode);
    assert_eq!(pad(PaddingMode::Reflect, (3, 2)), [4., 3., 2., 1., 2., 3., 4., 3., 2.]);
    assert_eq!(pad(PaddingMode::Replicate, (2, 5)), [1., 1., 1., 2., 3., 4., 4., 4., 4., 4., 4.]);
    let gradient = |mode, gy: &[f32]| {
        let x = row(&[1., 2., 3.]).require_grad();
        let spec = ConvSpec { padding: [(0, 0), (0, 0), (2, 1)], mode, ..Default::default() };
        let grads = (padded_conv3d(x.clone(), row(&[1.]), None, &spec) * row(gy)).sum().backward();
        values(x.grad(&grads).unwrap())
    };
    let gy = [1., 10., 100., 1000., 10000., 100000.];
    assert_eq!(gradient(PaddingMode::Reflect, &gy), [100., 101010., 10001.]);
    assert_eq!(gradient(PaddingMode::Replicate, &gy), [111., 1000., 110000.]);
    let x = row(&[1., 2.]);
    let spec = ConvSpec { padding: [(0, 0), (0, 0), (2, 0)], mode: PaddingMode::Reflect, ..Default::default() };
    let error = spec.window(x.dims(), [1; 5]).unwrap_err();
    assert_eq!(error, SpecError::ReflectPadding { axis: "width", padding: (2, 0), input: 2 });
    let conv = PaddedConv3dConfig::new([1, 1], [1, 1, 3]).with_padding([(0, 0), (0, 0), (1, 1)]).with_padding_mode(PaddingMode::Reflect);
    assert_eq!(conv.init::<B>(&Default::default()).forward(x).dims(), [1, 1, 1, 1, 2]);
}

#[test]
fn interpolations_by_hand() {
    let x = [0., 4., 8.];
    let to = |size, mode, align| {
        let config = Upsample3dConfig::new().with_output_size(Some([1, 1, size])).with_mode(mode).with_align_corners(align);
        values(config.init().forward(row(&x)))
    };
    assert_eq!(to(5, UpsampleMode::Nearest, false), [0., 0., 4., 4., 8.]);
    assert_eq!(to(2, UpsampleMode::Nearest, false), [0., 4.]);
    assert_eq!(to(6, UpsampleMode::Trilinear, false), [0., 1., 3., 5., 7., 8.]);
    assert_eq!(to(5, UpsampleMode::Trilinear, true), [0., 2., 4., 6., 8.]);
    // floor(3 * 1.5) voxels at the factor's distance, as in PyTorch, not at that of the extents.
    let factor = Upsample3dConfig::new().with_scale_factor(Some([1., 1., 1.5])).with_mode(UpsampleMode::Trilinear).init();
    let y = values(factor.forward(row(&x)));
    let want = [0., 2., 14. / 3., 22. / 3.];
    assert!(y.len() == 4 && y.iter().zip(want).all(|(y, w)| (y - w).abs() < 1e-6), "{y:?}");
}

#[test]
#[should_panic = "Upsample3d: give output_size or scale_factor"]
fn an_interpolation_needs_a_size() {
    let _ = Upsample3dConfig::new().init();
}

#[test]
fn a_padded_convolution_is_burns_where_burn_has_it() {
    let device = Default::default();
    let theirs =
        Conv3dConfig::new([4, 6], [3; 3]).with_groups(2).with_padding(burn::nn::PaddingConfig3d::Explicit(1, 1, 1)).init::<B>(&device);
    let config = PaddedConv3dConfig::new([4, 6], [3; 3]).with_groups(2).with_padding([(1, 1); 3]);
    let x = Tensor::<B, 5>::random([2, 4, 5, 6, 7], Distribution::Default, &device);
    let want = values(theirs.forward(x.clone()));
    let near = |got: Vec<f64>| assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-5));

    let named = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = named.record(theirs.clone().into_record(), ()).unwrap();
    let ours = config.init::<B>(&device).load_record(named.load(bytes, &device).unwrap());
    near(values(ours.forward(x.clone())));
    let plain = BinBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = plain.record(ours.into_record(), ()).unwrap();
    let again =
        Conv3dConfig::new([4, 6], [3; 3]).with_groups(2).with_padding(burn::nn::PaddingConfig3d::Explicit(1, 1, 1)).init::<B>(&device);
    near(values(again.load_record(plain.load(bytes, &device).unwrap()).forward(x)));

    // Burn's default initializer: within 1 / sqrt(fan in).
    let fresh = config.init::<B>(&device);
    let bound = 1.0 / f64::sqrt(2.0 * 27.0);
    let weights = values(fresh.weight.val());
    assert!(weights.iter().all(|w| w.abs() <= bound) && weights.iter().any(|w| w.abs() > bound / 2.0));
    assert_eq!(fresh.bias.unwrap().dims(), [6]);
}

#[test]
fn frozen_parameters_and_inputs_get_no_gradient() {
    let device = Default::default();
    let x = Tensor::<B, 5>::ones([1, 1, 3, 3, 3], &device);
    let w = Tensor::<B, 5>::ones([1, 1, 3, 3, 3], &device);
    let spec = ConvSpec { padding: [(1, 1); 3], ..Default::default() };
    let trained = w.clone().require_grad();
    let grads = padded_conv3d(x.clone(), trained.clone(), None, &spec).sum().backward();
    assert!(x.grad(&grads).is_none());
    assert_eq!(values(trained.grad(&grads).unwrap())[13], 27.0);
    let seen = x.require_grad();
    let grads = padded_conv3d(seen.clone(), w.clone(), None, &spec).sum().backward();
    assert!(w.grad(&grads).is_none());
    assert_eq!(values(seen.grad(&grads).unwrap())[13], 27.0);
}

#[test]
fn specs_that_do_not_fit_are_named() {
    let x = [1, 4, 8, 8, 2];
    let spec = ConvSpec::default();
    let error = spec.window(x, [4, 4, 3, 3, 3]).unwrap_err();
    assert_eq!(error, SpecError::KernelTooLarge { axis: "width", span: 3, padded: 2, input: 2 });
    assert!(error.to_string().contains("along the width the kernel spans 3 voxels"));
    assert_eq!(spec.window(x, [4, 3, 1, 1, 1]).unwrap_err(), SpecError::Channels { got: 4, expected: 3 });
    let zero = ConvSpec { stride: [1, 0, 1], ..spec }.window(x, [4, 4, 1, 1, 1]).unwrap_err();
    assert_eq!(zero, SpecError::Zero { what: "the stride", got: vec![1, 0, 1] });
    let groups = ConvSpec { groups: 3, ..spec }.check([4, 6], [1; 3]).unwrap_err();
    assert_eq!(groups, SpecError::Groups { input: 4, output: 6, groups: 3 });
    let periodic = ConvSpec { padding: [(0, 0), (0, 0), (0, 3)], mode: PaddingMode::Periodic, ..spec };
    let error = periodic.window(x, [4, 4, 1, 1, 1]).unwrap_err();
    assert_eq!(error, SpecError::PeriodicPadding { axis: "width", padding: (0, 3), input: 2 });
    let pool = PoolSpec { stride: [1; 3], padding: [0, 2, 0], ..PoolSpec::new([2; 3]) };
    assert_eq!(pool.check().unwrap_err(), SpecError::PoolPadding { axis: "height", padding: 2, kernel: 2 });
}

#[test]
#[should_panic = "MaxPool3d: along the depth the padding 2 of a pool is more than half its kernel 3"]
fn a_config_that_makes_no_sense_is_refused_at_init() {
    let _ = MaxPool3dConfig::new([3; 3]).with_padding([2, 1, 1]).init();
}

#[test]
#[should_panic = "the scale factors of an interpolation must be positive and finite, but are [2.0, -1.0, 2.0]"]
fn a_scale_is_positive() {
    let _ = Upsample3dConfig::new().with_scale_factor(Some([2.0, -1.0, 2.0])).init();
}
