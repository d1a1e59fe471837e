//! Window operations made of Burn ops: for any backend, each with the meaning of its namesake in
//! [`kernels`](super).

use burn_backend::ops::ConvOptions;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, Scalar, Shape, Slice, TensorData, TensorMetadata, get_device_settings};

use super::local::{only, put_float, put_int};
use super::{AdamStep, Arithmetic, Channels, Count, Filter, LocalKernels, Slab, Taps, Window, inputs, outputs, with_extents};

/// The part of the block that the windows read, as ranges of the block, and where it starts in the padded input
/// that begins with the first window.
fn overlap(window: &Window) -> Option<([Slice; 5], [Slice; 5])> {
    let mut block = [Slice::full(); 5];
    let mut padded = [Slice::full(); 5];
    for (i, axis) in window.iter().enumerate() {
        let lo = (-axis.offset).max(0);
        let hi = (axis.span() as isize - axis.offset).min(axis.input as isize);
        if hi <= lo {
            return None;
        }
        block[2 + i] = Slice::new(lo, Some(hi), 1);
        padded[2 + i] = Slice::new(lo + axis.offset, Some(hi + axis.offset), 1);
    }
    Some((block, padded))
}

/// The input from the first window's start to the last one's end, with `fill` outside the block.
fn padded<B: Backend>(x: FloatTensor<B>, window: &Window, fill: f64) -> FloatTensor<B> {
    let shape = x.shape();
    let whole = window.iter().all(|a| a.offset == 0 && a.span() == a.input);
    if whole {
        return x;
    }
    let to = Shape::from(with_extents(shape[0], shape[1], window.map(|a| a.span())));
    let out = B::float_full(to, Scalar::Float(fill), &B::float_device(&x), x.dtype().into());
    match overlap(window) {
        Some((block, place)) => B::float_slice_assign(out, &place, B::float_slice(x, &block)),
        None => out,
    }
}

/// The adjoint of [`padded`] with fill 0.
fn unpadded<B: Backend>(grad: FloatTensor<B>, window: &Window) -> FloatTensor<B> {
    let shape = grad.shape();
    if window.iter().all(|a| a.offset == 0 && a.span() == a.input) {
        return grad;
    }
    let to = Shape::from(with_extents(shape[0], shape[1], inputs(window)));
    let out = B::float_zeros(to, &B::float_device(&grad), grad.dtype().into());
    match overlap(window) {
        Some((block, place)) => B::float_slice_assign(out, &block, B::float_slice(grad, &place)),
        None => out,
    }
}

fn options(window: &Window, groups: usize) -> ConvOptions<3> {
    ConvOptions::new(window.map(|a| a.stride), [0; 3], window.map(|a| a.dilation), groups)
}

/// See [`LocalKernels::float_add_box`].
pub fn float_add_box<B: LocalKernels>(target: FloatTensor<B>, slices: &[Slice], part: FloatTensor<B>) -> FloatTensor<B> {
    let sum = B::float_add(B::float_slice(target.clone(), slices), part);
    B::float_assign_box(target, slices, sum)
}

/// See [`LocalKernels::int_add_box`].
pub fn int_add_box<B: LocalKernels>(target: IntTensor<B>, slices: &[Slice], part: IntTensor<B>) -> IntTensor<B> {
    let sum = B::int_add(B::int_slice(target.clone(), slices), part);
    B::int_assign_box(target, slices, sum)
}

/// See [`arithmetic`](super::arithmetic).
pub fn arithmetic<B: Backend>(large: FloatTensor<B>, small: FloatTensor<B>, arithmetic: Arithmetic) -> FloatTensor<B> {
    match arithmetic {
        Arithmetic::Add => B::float_add(large, small),
        Arithmetic::Sub => B::float_sub(large, small),
        Arithmetic::SubFrom => B::float_sub(small, large),
        Arithmetic::Mul => B::float_mul(large, small),
        Arithmetic::Div => B::float_div(large, small),
        Arithmetic::DivInto => B::float_div(small, large),
    }
}

/// See [`LocalKernels::block_conv3d`]: x is in one box.
pub fn conv3d_part<B: LocalKernels>(
    out: FloatTensor<B>,
    at: [usize; 3],
    x: &[Slab<B>],
    filter: &Filter<B>,
    window: &Window,
) -> FloatTensor<B> {
    let Filter { weight, bias, slope, groups } = filter;
    put_float::<B>(out, at, conv3d::<B>(only::<B>(x), weight.clone(), bias.clone(), *slope, window, *groups))
}

/// See [`activated_conv3d`](super::activated_conv3d).
pub fn conv3d<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    slope: f64,
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    let y = B::conv3d(padded::<B>(x, window, 0.0), weight, bias, options(window, groups));
    if slope == 1.0 {
        return y;
    }
    let negative = negative::<B>(y.clone(), slope);
    sloped::<B>(y, negative, slope)
}

/// Where a leaky ReLU sees negative values: 0 is one if it is a ReLU, as in Burn's.
fn negative<B: Backend>(y: FloatTensor<B>, slope: f64) -> BoolTensor<B> {
    let bools = get_device_settings::<B>(&B::float_device(&y)).bool_dtype;
    let zero = Scalar::Float(0.0);
    if slope == 0.0 { B::float_lower_equal_elem(y, zero, bools) } else { B::float_lower_elem(y, zero, bools) }
}

/// `x`, times the slope where it is `negative`.
fn sloped<B: Backend>(x: FloatTensor<B>, negative: BoolTensor<B>, slope: f64) -> FloatTensor<B> {
    if slope == 0.0 {
        // No product, or infinity would become NaN.
        return B::float_mask_fill(x, negative, Scalar::Float(0.0));
    }
    let scaled = B::float_mul_scalar(x.clone(), Scalar::Float(slope));
    B::float_mask_where(x, negative, scaled)
}

/// See [`activation_grad`](super::activation_grad).
pub fn activation_grad<B: Backend>(y: FloatTensor<B>, grad: FloatTensor<B>, slope: f64) -> FloatTensor<B> {
    sloped::<B>(grad, negative::<B>(y, slope), slope)
}

/// See [`conv3d_data_grad`](super::conv3d_data_grad).
pub fn conv3d_data_grad<B: Backend>(grad: FloatTensor<B>, weight: FloatTensor<B>, window: &Window, groups: usize) -> FloatTensor<B> {
    let shape = Shape::from(with_extents(grad.shape()[0], weight.shape()[1] * groups, window.map(|a| a.span())));
    // Only its shape is read.
    let x = B::float_empty(shape, &B::float_device(&grad), grad.dtype().into());
    unpadded::<B>(B::conv3d_x_backward(x, weight, grad, options(window, groups)), window)
}

/// See [`conv3d_weight_grad`](super::conv3d_weight_grad).
pub fn conv3d_weight_grad<B: Backend>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    weight_shape: [usize; 5],
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    // Only its shape is read.
    let weight = B::float_empty(Shape::from(weight_shape), &B::float_device(&grad), grad.dtype().into());
    B::conv3d_weight_backward(padded::<B>(x, window, 0.0), weight, grad, options(window, groups))
}

/// See [`LocalKernels::block_max_pool3d`]: x is in one box.
pub fn max_pool3d_part<B: LocalKernels>(
    (out, indices): (FloatTensor<B>, IntTensor<B>),
    at: [usize; 3],
    x: &[Slab<B>],
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
) -> (FloatTensor<B>, IntTensor<B>) {
    let (part, part_indices) = max_pool3d::<B>(only::<B>(x), window, origin, volume);
    (put_float::<B>(out, at, part), put_int::<B>(indices, at, part_indices))
}

/// See [`max_pool3d`](super::max_pool3d).
pub fn max_pool3d<B: Backend>(
    x: FloatTensor<B>,
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
) -> (FloatTensor<B>, IntTensor<B>) {
    let device = B::float_device(&x);
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let [n, c] = [x.shape()[0], x.shape()[1]];
    let extents = outputs(window);
    let shape = Shape::from(with_extents(n, c, extents));
    let x = padded::<B>(x, window, f64::NEG_INFINITY);
    let [kd, kh, kw] = window.map(|a| a.kernel);
    let mut best: Option<(FloatTensor<B>, IntTensor<B>)> = None;
    for tap in 0..kd * kh * kw {
        let t = [tap / (kh * kw), tap / kw % kh, tap % kw];
        let mut slices = [Slice::full(); 5];
        for (i, axis) in window.iter().enumerate() {
            let start = t[i] * axis.dilation;
            slices[2 + i] = Slice::new(start as isize, Some((start + (axis.output - 1) * axis.stride + 1) as isize), axis.stride as isize);
        }
        let value = B::float_slice(x.clone(), &slices);
        let at = TensorData::new(positions(window, t, origin, volume), Shape::from(with_extents(1, 1, extents)));
        let at = B::int_expand(B::int_from_data(at, &device), shape.clone());
        best = Some(match best {
            None => (value, at),
            Some((old, old_at)) => {
                let nan = |t: &FloatTensor<B>| B::float_is_nan(t.clone(), bools);
                let greater = B::float_greater(value.clone(), old.clone(), bools);
                let first_nan = B::bool_and(nan(&value), B::bool_not(nan(&old)));
                let first = B::int_lower_elem(old_at.clone(), Scalar::Int(0), bools);
                let better: BoolTensor<B> = B::bool_or(B::bool_or(greater, first_nan), first);
                (B::float_mask_where(old, better.clone(), value), B::int_mask_where(old_at, better, at))
            }
        });
    }
    best.expect("a window has taps")
}

/// For each output the position in the volume that tap `t` reads, -1 outside the block.
fn positions(window: &Window, t: [usize; 3], origin: [isize; 3], volume: [usize; 3]) -> Vec<i64> {
    let read = |i: usize| {
        let axis = window[i];
        (0..axis.output).map(move |o| {
            let at = (o * axis.stride + t[i] * axis.dilation) as isize - axis.offset;
            (0..axis.input as isize).contains(&at).then_some((at + origin[i]) as i64)
        })
    };
    let [_, vh, vw] = volume.map(|v| v as i64);
    let mut all = Vec::with_capacity(outputs(window).iter().product());
    for z in read(0) {
        for y in read(1) {
            for x in read(2) {
                all.push(match (z, y, x) {
                    (Some(z), Some(y), Some(x)) => (z * vh + y) * vw + x,
                    _ => -1,
                });
            }
        }
    }
    all
}

/// See [`max_pool3d_grad`](super::max_pool3d_grad).
pub fn max_pool3d_grad<B: Backend>(
    grad: FloatTensor<B>,
    indices: IntTensor<B>,
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
) -> FloatTensor<B> {
    let device = B::float_device(&grad);
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let [n, c] = [grad.shape()[0], grad.shape()[1]];
    let count: usize = outputs(window).iter().product();
    let block = inputs(window);
    let flat = Shape::from([n * c, count]);
    let int = |v: i64| Scalar::Int(v);
    let [vh, vw] = [volume[1] as i64, volume[2] as i64];
    let at = B::int_reshape(indices, flat.clone());
    // The position within the block, one coordinate at a time, and whether any lies outside.
    let mut outside = B::int_lower_elem(at.clone(), int(0), bools);
    let coordinates = [
        B::int_div_scalar(at.clone(), int(vh * vw)),
        B::int_remainder_scalar(B::int_div_scalar(at.clone(), int(vw)), int(vh)),
        B::int_remainder_scalar(at, int(vw)),
    ];
    let mut local: Option<IntTensor<B>> = None;
    for (i, coordinate) in coordinates.into_iter().enumerate() {
        let coordinate = B::int_sub_scalar(coordinate, int(origin[i] as i64));
        let extent = block[i] as i64;
        outside = B::bool_or(outside, B::int_lower_elem(coordinate.clone(), int(0), bools));
        outside = B::bool_or(outside, B::int_greater_equal_elem(coordinate.clone(), int(extent), bools));
        local = Some(match local {
            None => coordinate,
            Some(local) => B::int_add(B::int_mul_scalar(local, int(extent)), coordinate),
        });
    }
    let local = B::int_mask_fill(local.expect("three coordinates"), outside.clone(), int(0));
    let dtype = grad.dtype();
    let grad = B::float_mask_fill(B::float_reshape(grad, flat), outside, Scalar::Float(0.0));
    let zeros = B::float_zeros(Shape::from([n * c, block.iter().product()]), &device, dtype.into());
    B::float_reshape(B::float_scatter_add(1, zeros, local, grad), Shape::from(with_extents(n, c, block)))
}

/// A kernel of ones, so that a convolution of one channel sums windows.
fn ones<B: Backend>(like: &FloatTensor<B>, window: &Window) -> FloatTensor<B> {
    let shape = Shape::from(with_extents(1, 1, window.map(|a| a.kernel)));
    B::float_ones(shape, &B::float_device(like), like.dtype().into())
}

/// `sums` of windows, or gradients of them, divided by the counts.
fn divided<B: Backend>(sums: FloatTensor<B>, window: &Window, count: Count) -> FloatTensor<B> {
    let [d, h, w] = [0, 1, 2].map(|i| (0..window[i].output).map(|o| count.of(i, &window[i], o)).collect::<Vec<_>>());
    let scales: Vec<f64> =
        d.iter().flat_map(|d| h.iter().map(move |h| d * h)).flat_map(|dh| w.iter().map(move |w| 1.0 / (dh * w) as f64)).collect();
    let data = TensorData::new(scales, Shape::from(with_extents(1, 1, outputs(window)))).convert_dtype(sums.dtype());
    let scales = B::float_from_data(data, &B::float_device(&sums));
    B::float_mul(sums, scales)
}

/// The channels of a tensor as samples of one channel each.
fn single_channel<B: Backend>(x: FloatTensor<B>) -> (FloatTensor<B>, [usize; 2]) {
    let [n, c, d, h, w] = x.shape().dims();
    (B::float_reshape(x, Shape::from([n * c, 1, d, h, w])), [n, c])
}

/// See [`LocalKernels::block_avg_pool3d`]: x is in one box.
pub fn avg_pool3d_part<B: LocalKernels>(
    out: FloatTensor<B>,
    at: [usize; 3],
    x: &[Slab<B>],
    window: &Window,
    count: Count,
) -> FloatTensor<B> {
    put_float::<B>(out, at, avg_pool3d::<B>(only::<B>(x), window, count))
}

/// See [`avg_pool3d`](super::avg_pool3d).
pub fn avg_pool3d<B: Backend>(x: FloatTensor<B>, window: &Window, count: Count) -> FloatTensor<B> {
    let (x, [n, c]) = single_channel::<B>(padded::<B>(x, window, 0.0));
    let kernel = ones::<B>(&x, window);
    let sums = B::conv3d(x, kernel, None, options(window, 1));
    divided::<B>(B::float_reshape(sums, Shape::from(with_extents(n, c, outputs(window)))), window, count)
}

/// See [`avg_pool3d_grad`](super::avg_pool3d_grad).
pub fn avg_pool3d_grad<B: Backend>(grad: FloatTensor<B>, window: &Window, count: Count) -> FloatTensor<B> {
    let (grad, [n, c]) = single_channel::<B>(divided::<B>(grad, window, count));
    let kernel = ones::<B>(&grad, window);
    let out = conv3d_data_grad::<B>(grad, kernel, window, 1);
    B::float_reshape(out, Shape::from(with_extents(n, c, inputs(window))))
}

/// Calls `f` for each tap that `taps` has along dimension `2 + axis`: with the inputs it reads, and the weights
/// broadcastable to a volume if not all are 1.
fn each_tap<B: Backend>(
    like: &FloatTensor<B>,
    axis: usize,
    taps: &Taps,
    mut f: impl FnMut(IntTensor<B>, &dyn Fn(FloatTensor<B>) -> FloatTensor<B>),
) {
    let (device, dtype) = (B::float_device(like), like.dtype());
    let n = taps.outputs();
    let mut shape = [1; 5];
    shape[2 + axis] = n;
    for (indices, weights) in taps.rows() {
        let indices: Vec<i64> = indices.iter().map(|i| *i as i64).collect();
        let indices = B::int_from_data(TensorData::new(indices, Shape::from([n])), &device);
        if weights.iter().all(|w| *w == 1.0) {
            f(indices, &|t| t);
        } else {
            let data = TensorData::new(weights.to_vec(), Shape::from(shape)).convert_dtype(dtype);
            let weighs = weights.iter().all(|w| *w != 0.0);
            let weights = B::float_from_data(data, &device);
            f(indices, &|t| {
                let weighted = B::float_mul(t, weights.clone());
                if weighs {
                    return weighted;
                }
                // What weighs nothing adds nothing, were it infinite.
                let bools = get_device_settings::<B>(&device).bool_dtype;
                let nothing = B::float_equal_elem(weights.clone(), Scalar::Float(0.0), bools);
                let nothing = B::bool_expand(nothing, weighted.shape());
                B::float_mask_fill(weighted, nothing, Scalar::Float(0.0))
            });
        }
    }
}

/// See [`resample`](super::resample): along one axis, 0 to 2.
pub fn resample<B: Backend>(x: FloatTensor<B>, axis: usize, taps: &Taps) -> FloatTensor<B> {
    let mut sum: Option<FloatTensor<B>> = None;
    each_tap::<B>(&x, axis, taps, |indices, weighted| {
        let part = weighted(B::float_select(x.clone(), 2 + axis, indices));
        sum = Some(match sum.take() {
            Some(sum) => B::float_add(sum, part),
            None => part,
        });
    });
    sum.expect("an output has taps")
}

/// See [`resample_grad`](super::resample_grad): along one axis, 0 to 2.
pub fn resample_grad<B: Backend>(grad: FloatTensor<B>, axis: usize, taps: &Taps) -> FloatTensor<B> {
    let mut shape: [usize; 5] = grad.shape().dims();
    shape[2 + axis] = taps.inputs;
    let mut sum = Some(B::float_zeros(Shape::from(shape), &B::float_device(&grad), grad.dtype().into()));
    each_tap::<B>(&grad, axis, taps, |indices, weighted| {
        let before = sum.take().expect("put back after every tap");
        sum = Some(B::float_select_add(before, 2 + axis, indices, weighted(grad.clone())));
    });
    sum.expect("put back after every tap")
}

/// `[C]` beside x `[N, C, ..]`.
fn beside<B: Backend>(line: FloatTensor<B>, x: &FloatTensor<B>) -> FloatTensor<B> {
    let mut shape = vec![1; x.shape().num_dims()];
    shape[1] = line.shape()[0];
    B::float_reshape(line, Shape::from(shape))
}

/// The sum of each channel.
fn channel_sums<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let (channels, rank) = (x.shape()[1], x.shape().num_dims());
    let sum = (0..rank).rev().filter(|dim| *dim != 1).fold(x, |x, dim| B::float_sum_dim(x, dim));
    B::float_reshape(sum, Shape::from([channels]))
}

/// See [`kernels::channel_moments`](super::channel_moments).
pub fn channel_moments<B: Backend>(x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    let shape = x.shape();
    let n = shape.num_elements() / shape[1];
    let mean = B::float_div_scalar(channel_sums::<B>(x.clone()), (n as f64).into());
    let off = B::float_sub(x.clone(), beside::<B>(mean.clone(), &x));
    (mean, channel_sums::<B>(B::float_mul(off.clone(), off)))
}

/// x without its channels' means, and where the activation sees negative values.
fn off_and_negative<B: Backend>(x: FloatTensor<B>, channels: &Channels<B>) -> (FloatTensor<B>, FloatTensor<B>, BoolTensor<B>) {
    let wide = |t: &FloatTensor<B>| beside::<B>(t.clone(), &x);
    let off = B::float_sub(x.clone(), wide(&channels.mean));
    let y = B::float_add(B::float_mul(off.clone(), wide(&channels.scale)), wide(&channels.shift));
    let negative = negative::<B>(y.clone(), channels.slope);
    (off, y, negative)
}

/// See [`kernels::channel_norm`](super::channel_norm).
pub fn channel_norm<B: Backend>(x: FloatTensor<B>, channels: &Channels<B>) -> FloatTensor<B> {
    let (_, y, negative) = off_and_negative::<B>(x, channels);
    sloped::<B>(y, negative, channels.slope)
}

/// See [`kernels::channel_grad_sums`](super::channel_grad_sums).
pub fn channel_grad_sums<B: Backend>(x: FloatTensor<B>, grad: FloatTensor<B>, channels: &Channels<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    let (off, _, negative) = off_and_negative::<B>(x, channels);
    let back = sloped::<B>(grad, negative, channels.slope);
    (channel_sums::<B>(back.clone()), channel_sums::<B>(B::float_mul(back, off)))
}

/// See [`kernels::channel_grad`](super::channel_grad).
pub fn channel_grad<B: Backend>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    channels: &Channels<B>,
    a: FloatTensor<B>,
    b: FloatTensor<B>,
) -> FloatTensor<B> {
    let (off, y, negative) = off_and_negative::<B>(x, channels);
    let wide = |t: FloatTensor<B>| beside::<B>(t, &y);
    let back = B::float_sub(sloped::<B>(grad, negative, channels.slope), wide(a));
    B::float_mul(B::float_sub(back, B::float_mul(off, wide(b))), wide(channels.scale.clone()))
}

/// See [`LocalKernels::block_adam`]: a dozen passes over memory.
pub fn adam<B: Backend>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    moments: Option<[FloatTensor<B>; 2]>,
    step: &AdamStep,
) -> [FloatTensor<B>; 3] {
    let times = |t: FloatTensor<B>, factor: f64| B::float_mul_scalar(t, Scalar::Float(factor));
    let grad = if step.penalty == 0.0 { grad } else { B::float_add(times(x.clone(), step.penalty), grad) };
    let mut first = times(grad.clone(), 1.0 - step.beta_1);
    let mut second = times(B::float_mul(grad.clone(), grad), 1.0 - step.beta_2);
    if let Some([old_first, old_second]) = moments {
        first = B::float_add(times(old_first, step.beta_1), first);
        second = B::float_add(times(old_second, step.beta_2), second);
    }
    let root = B::float_div_scalar(B::float_sqrt(second.clone()), Scalar::Float(step.root));
    let root = B::float_add_scalar(root, Scalar::Float(step.epsilon));
    let change = B::float_div(times(first.clone(), step.rate), root);
    [B::float_sub(times(x, step.keep), change), first, second]
}
