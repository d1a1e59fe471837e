//! The CPU kernels on Flex's tensors. They work on f32 and f64; other types have the bodies made of Burn's operations.

use std::ops::Range;

use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_backend::{DType, Element, Shape, Slice, TensorMetadata};
use burn_flex::{Flex, FlexTensor, Layout};
use rayon::prelude::*;

use super::local::put_float;
use super::{AdamStep, Arithmetic, Channels, Count, Filter, LocalKernels, Slab, Taps, Window, cpu, generic, inputs, with_extents};
use crate::copies::copied;

/// Runs `$body` with `$t` the element type of the tensor `$x`, f32 or f64.
macro_rules! typed {
    ($x:expr, $t:ident => $body:expr) => {
        match $x.dtype() {
            DType::F64 => {
                type $t = f64;
                $body
            }
            _ => {
                type $t = f32;
                $body
            }
        }
    };
}

/// Whether the kernels work on a type.
fn is_real(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64)
}

/// Whether a tensor is all of its buffer, in order.
fn lies_dense(t: &FlexTensor) -> bool {
    t.is_contiguous() && t.layout().start_offset() == 0 && t.shape().num_elements() * t.dtype().size() == t.bytes().len()
}

/// `t`, contiguous, if the kernels work on its type.
fn real(t: &FlexTensor) -> Option<FlexTensor> {
    if !is_real(t.dtype()) {
        return None;
    }
    if !lies_dense(t) {
        copied(cpu::bytes(t));
    }
    Some(t.to_contiguous())
}

/// [`real`] of tensors that all are of one type.
fn reals<const N: usize>(tensors: [&FlexTensor; N]) -> Option<[FlexTensor; N]> {
    let same = tensors.iter().all(|t| is_real(t.dtype()) && t.dtype() == tensors[0].dtype());
    same.then(|| tensors.map(|t| real(t).expect("a type the kernels work on")))
}

/// The boxes, contiguous, if the kernels work on their one type.
fn boxes(x: &[Slab<Flex>]) -> Option<Vec<FlexTensor>> {
    let dtype = x.first()?.1.dtype();
    x.iter().map(|(_, part)| real(part).filter(|part| part.dtype() == dtype)).collect()
}

fn slabs<'a, T: cpu::Real>(x: &[Slab<Flex>], values: &'a [FlexTensor]) -> Vec<cpu::Slab<'a, T>> {
    let slab = |((at, _), values): (&Slab<Flex>, &'a FlexTensor)| cpu::Slab { at: at.clone(), values: cpu::slice::<T>(values) };
    x.iter().zip(values).map(slab).collect()
}

/// A tensor that is all of its buffer, in order, for results that are written part by part.
fn whole_buffer(t: FlexTensor) -> FlexTensor {
    if lies_dense(&t) { t } else { t.to_contiguous() }
}

/// The place of a box at voxel `at` of `out`, `[N, C, ..]`.
fn place(out: &FlexTensor, at: [usize; 3]) -> cpu::Place {
    let [_, _, extents @ ..]: [usize; 5] = out.shape().dims();
    cpu::Place { extents, at }
}

/// Elements of one sample's channel.
fn plane(x: &FlexTensor) -> usize {
    x.shape()[2..].iter().product()
}

/// `[C]` from values.
fn line<T: Element + bytemuck::Pod + Send + Sync>(values: Vec<T>) -> FlexTensor {
    let shape = Shape::from(vec![values.len()]);
    FlexTensor::new(burn_std::Bytes::from_elems(values), Layout::contiguous(shape), T::dtype())
}

/// The ranges that slices of step 1 with plain ends name; of others something that no box of a tensor has.
fn ranges(slices: &[Slice]) -> Vec<Range<usize>> {
    let plain = |slice: &Slice| {
        let (start, end) = (usize::try_from(slice.start).ok()?, usize::try_from(slice.end?).ok()?);
        (slice.step == 1 && start <= end).then_some(start..end)
    };
    slices.iter().map(plain).collect::<Option<_>>().unwrap_or_default()
}

impl LocalKernels for Flex {
    fn reads_slabs(dtype: DType) -> bool {
        is_real(dtype)
    }

    fn conv3d_reads_slabs(dtype: DType, window: &Window) -> bool {
        let own = cpu::Conv::new(cpu::Isa::get(), 1, [1; 2], window, 1);
        is_real(dtype) && if dtype == DType::F64 { own.reads_slabs::<f64>() } else { own.reads_slabs::<f32>() }
    }

    fn conv3d_weight_grad_reads_slabs(dtype: DType, window: &Window) -> bool {
        let own = cpu::Conv::new(cpu::Isa::get(), 1, [1; 2], window, 1);
        let reads = || if dtype == DType::F64 { own.weight_grad_reads_slabs::<f64>() } else { own.weight_grad_reads_slabs::<f32>() };
        is_real(dtype) && reads()
    }

    fn float_unwritten(shape: Shape, device: &Self::Device, dtype: DType) -> FlexTensor {
        match dtype {
            DType::F32 => cpu::unwritten::<f32>(shape),
            DType::F64 => cpu::unwritten::<f64>(shape),
            _ => Flex::float_empty(shape, device, dtype.into()),
        }
    }

    fn int_unwritten(shape: Shape, device: &Self::Device, dtype: DType) -> FlexTensor {
        match dtype {
            DType::I64 => cpu::unwritten::<i64>(shape),
            _ => Flex::int_empty(shape, device, dtype.into()),
        }
    }

    fn float_contiguous(tensor: FlexTensor) -> FlexTensor {
        real(&tensor).unwrap_or(tensor)
    }

    fn float_dense(tensor: FlexTensor) -> FlexTensor {
        let copy = match tensor.dtype() {
            _ if tensor.is_contiguous() => None,
            DType::F32 => cpu::dense::<f32>(&tensor),
            DType::F64 => cpu::dense::<f64>(&tensor),
            _ => None,
        };
        if let Some(copy) = &copy {
            copied(cpu::bytes(copy));
        }
        copy.unwrap_or(tensor)
    }

    /// In place where the target's buffer is not shared: Flex's own assignment copies it first.
    fn float_assign_box(target: FlexTensor, slices: &[Slice], part: FlexTensor) -> FlexTensor {
        cpu::boxes::each_run(target, &ranges(slices), part, cpu::boxes::Assign)
            .unwrap_or_else(|operands| Flex::float_slice_assign(operands.0, slices, operands.1))
    }

    fn int_assign_box(target: FlexTensor, slices: &[Slice], part: FlexTensor) -> FlexTensor {
        cpu::boxes::each_run(target, &ranges(slices), part, cpu::boxes::Assign)
            .unwrap_or_else(|operands| Flex::int_slice_assign(operands.0, slices, operands.1))
    }

    fn float_add_box(target: FlexTensor, slices: &[Slice], part: FlexTensor) -> FlexTensor {
        cpu::boxes::each_run(target, &ranges(slices), part, cpu::boxes::Add)
            .unwrap_or_else(|operands| generic::float_add_box::<Flex>(operands.0, slices, operands.1))
    }

    fn int_add_box(target: FlexTensor, slices: &[Slice], part: FlexTensor) -> FlexTensor {
        cpu::boxes::each_run(target, &ranges(slices), part, cpu::boxes::Add)
            .unwrap_or_else(|operands| generic::int_add_box::<Flex>(operands.0, slices, operands.1))
    }

    /// In one pass, in place where the large operand's buffer is not shared.
    fn block_arithmetic(large: FlexTensor, small: FlexTensor, arithmetic: Arithmetic) -> FlexTensor {
        let runs = cpu::Runs::of(&large.shape(), &small.shape()).filter(|_| large.shape() != small.shape());
        let suits = is_real(large.dtype()) && large.dtype() == small.dtype();
        let dense = large.is_contiguous() && large.layout().start_offset() == 0;
        let (Some(runs), true, Some(small_values)) = (runs, suits && dense, real(&small)) else {
            return generic::arithmetic::<Flex>(large, small, arithmetic);
        };
        let mut values = large;
        let n = values.shape().num_elements();
        typed!(values, T => runs.apply::<T>(&mut values.storage_mut::<T>()[..n], cpu::slice(&small_values), arithmetic));
        values
    }

    fn block_conv3d(out: FlexTensor, at: [usize; 3], x: &[Slab<Flex>], filter: &Filter<Flex>, window: &Window) -> FlexTensor {
        let Filter { weight, bias, slope, groups } = filter;
        let dtype = weight.dtype();
        let same = is_real(dtype) && out.dtype() == dtype && bias.as_ref().is_none_or(|b| b.dtype() == dtype);
        let parts = boxes(x).filter(|parts| same && parts[0].dtype() == dtype);
        let (Some(parts), Some(weight), bias) = (parts, real(weight), bias.as_ref().and_then(real)) else {
            return generic::conv3d_part::<Flex>(out, at, x, filter, window);
        };
        let mut out = whole_buffer(out);
        let (place, [n, cin, cout]) = (place(&out, at), [out.shape()[0], parts[0].shape()[1], out.shape()[1]]);
        let own = cpu::Conv::new(cpu::Isa::get(), n, [cin, cout], window, *groups);
        typed!(weight, T => {
            let (x, bias) = (slabs::<T>(x, &parts), bias.as_ref().map(cpu::slice::<T>));
            let operands = cpu::Operands { x: &x, weight: cpu::slice(&weight), bias, slope: *slope as T };
            // SAFETY: `forward_into` only writes values.
            own.forward_into(operands, unsafe { cpu::space(&mut out) }, place);
        });
        out
    }

    fn block_activation_grad(y: FlexTensor, grad: FlexTensor, slope: f64) -> FlexTensor {
        let Some([y, mut values]) = reals([&y, &grad]) else { return generic::activation_grad::<Flex>(y, grad, slope) };
        // In place where nothing else holds the gradient's buffer.
        drop(grad);
        let (start, end) = values.layout().contiguous_offsets().unwrap_or_default();
        typed!(y, T => {
            let grad = &mut values.storage_mut::<T>()[start..end];
            cpu::activation_grad::<T>(cpu::Isa::get(), cpu::slice(&y), grad, slope as T);
        });
        values
    }

    fn block_conv3d_data_grad(grad: FlexTensor, weight: FlexTensor, window: &Window, groups: usize) -> FlexTensor {
        let Some([grad, weight]) = reals([&grad, &weight]) else {
            return generic::conv3d_data_grad::<Flex>(grad, weight, window, groups);
        };
        let [n, cin, cout] = [grad.shape()[0], weight.shape()[1] * groups, weight.shape()[0]];
        let own = cpu::Conv::new(cpu::Isa::get(), n, [cin, cout], window, groups);
        typed!(grad, T => {
            let out = own.data_grad::<T>(cpu::slice(&grad), cpu::slice(&weight));
            cpu::tensor(out, with_extents(n, cin, inputs(window)))
        })
    }

    fn block_conv3d_weight_grad(
        x: &[Slab<Flex>],
        grad: &FlexTensor,
        weight_shape: [usize; 5],
        window: &Window,
        groups: usize,
    ) -> FlexTensor {
        let parts = boxes(x).filter(|parts| parts[0].dtype() == grad.dtype());
        let (Some(parts), Some(values)) = (parts, real(grad)) else {
            let x = super::local::only::<Flex>(x);
            return generic::conv3d_weight_grad::<Flex>(x, grad.clone(), weight_shape, window, groups);
        };
        let [n, cin, cout] = [parts[0].shape()[0], parts[0].shape()[1], weight_shape[0]];
        let own = cpu::Conv::new(cpu::Isa::get(), n, [cin, cout], window, groups);
        typed!(values, T => cpu::tensor(own.weight_grad::<T>(&slabs::<T>(x, &parts), cpu::slice(&values)), weight_shape))
    }

    fn block_max_pool3d(
        (out, indices): (FlexTensor, FlexTensor),
        at: [usize; 3],
        x: &[Slab<Flex>],
        window: &Window,
        origin: [isize; 3],
        volume: [usize; 3],
    ) -> (FlexTensor, FlexTensor) {
        let parts = boxes(x).filter(|parts| parts[0].dtype() == out.dtype() && indices.dtype() == DType::I64);
        let Some(parts) = parts else { return generic::max_pool3d_part::<Flex>((out, indices), at, x, window, origin, volume) };
        let (mut out, mut indices) = (whole_buffer(out), whole_buffer(indices));
        let place = place(&out, at);
        typed!(out, T => {
            let x = slabs::<T>(x, &parts);
            // SAFETY: `max` only writes values.
            let (out, indices) = unsafe { (cpu::space(&mut out), cpu::space(&mut indices)) };
            cpu::max::<T>(cpu::Isa::get(), &x, window, origin, volume, out, indices, place);
        });
        (out, indices)
    }

    fn block_max_pool3d_grad(grad: FlexTensor, indices: FlexTensor, window: &Window, origin: [isize; 3], volume: [usize; 3]) -> FlexTensor {
        let (Some(values), DType::I64) = (real(&grad), indices.dtype()) else {
            return generic::max_pool3d_grad::<Flex>(grad, indices, window, origin, volume);
        };
        let at = indices.to_contiguous();
        let shape = with_extents(grad.shape()[0], grad.shape()[1], inputs(window));
        typed!(values, T => cpu::tensor(cpu::max_grad::<T>(cpu::slice(&values), at.storage(), window, origin, volume), shape))
    }

    fn block_avg_pool3d(out: FlexTensor, at: [usize; 3], x: &[Slab<Flex>], window: &Window, count: Count) -> FlexTensor {
        let parts = boxes(x).filter(|parts| parts[0].dtype() == out.dtype());
        let Some(parts) = parts else { return generic::avg_pool3d_part::<Flex>(out, at, x, window, count) };
        let mut out = whole_buffer(out);
        let place = place(&out, at);
        typed!(out, T => {
            let x = slabs::<T>(x, &parts);
            // SAFETY: `average` only writes values.
            cpu::average::<T>(cpu::Isa::get(), &x, window, count, unsafe { cpu::space(&mut out) }, place);
        });
        out
    }

    fn block_avg_pool3d_grad(grad: FlexTensor, window: &Window, count: Count) -> FlexTensor {
        let Some(grad) = real(&grad) else { return generic::avg_pool3d_grad::<Flex>(grad, window, count) };
        let shape = with_extents(grad.shape()[0], grad.shape()[1], inputs(window));
        typed!(grad, T => cpu::tensor(cpu::average_grad::<T>(cpu::Isa::get(), cpu::slice(&grad), window, count), shape))
    }

    fn block_resample(out: FlexTensor, at: [usize; 3], x: FlexTensor, axis: usize, taps: &Taps) -> FlexTensor {
        let Some(x) = real(&x).filter(|x| x.dtype() == out.dtype()) else {
            return put_float::<Flex>(out, at, generic::resample::<Flex>(x, axis, taps));
        };
        let mut out = whole_buffer(out);
        let place = place(&out, at);
        let [_, _, extents @ ..]: [usize; 5] = x.shape().dims();
        typed!(out, T => {
            // SAFETY: `resample` only writes values.
            let out = unsafe { cpu::space(&mut out) };
            cpu::resample::<T>(cpu::Isa::get(), cpu::slice(&x), taps, axis, extents, out, place);
        });
        out
    }

    fn block_resample_grad(grad: FlexTensor, axis: usize, taps: &Taps) -> FlexTensor {
        let Some(grad) = real(&grad) else { return generic::resample_grad::<Flex>(grad, axis, taps) };
        let mut shape: [usize; 5] = grad.shape().dims();
        let inner = shape[3 + axis..].iter().product();
        shape[2 + axis] = taps.inputs;
        typed!(grad, T => cpu::tensor(cpu::resample_grad::<T>(cpu::slice(&grad), taps, inner), shape))
    }

    fn block_channel_moments(x: FlexTensor) -> (FlexTensor, FlexTensor) {
        let Some(x) = real(&x) else { return generic::channel_moments::<Flex>(x) };
        typed!(x, T => {
            let (mean, m2) = cpu::norm::moments::<T>(cpu::Isa::get(), cpu::slice(&x), x.shape()[1], plane(&x));
            (line(mean), line(m2))
        })
    }

    fn block_channel_norm(x: FlexTensor, channels: &Channels<Flex>) -> FlexTensor {
        let Some([x, mean, scale, shift]) = reals([&x, &channels.mean, &channels.scale, &channels.shift]) else {
            return generic::channel_norm::<Flex>(x, channels);
        };
        typed!(x, T => {
            let (mean, scale, shift) = (cpu::slice(&mean), cpu::slice(&scale), cpu::slice(&shift));
            let channels = cpu::norm::Channels { mean, scale, shift, slope: channels.slope as T };
            cpu::tensor(cpu::norm::norm::<T>(cpu::Isa::get(), cpu::slice(&x), plane(&x), channels), x.shape().dims())
        })
    }

    fn block_channel_grad_sums(x: FlexTensor, grad: FlexTensor, channels: &Channels<Flex>) -> (FlexTensor, FlexTensor) {
        let Some([x, mean, scale, shift, grad]) = reals([&x, &channels.mean, &channels.scale, &channels.shift, &grad]) else {
            return generic::channel_grad_sums::<Flex>(x, grad, channels);
        };
        typed!(x, T => {
            let (mean, scale, shift) = (cpu::slice(&mean), cpu::slice(&scale), cpu::slice(&shift));
            let channels = cpu::norm::Channels { mean, scale, shift, slope: channels.slope as T };
            let (sum, dot) = cpu::norm::grad_sums::<T>(cpu::Isa::get(), cpu::slice(&x), cpu::slice(&grad), plane(&x), channels);
            (line(sum), line(dot))
        })
    }

    fn block_channel_grad(x: FlexTensor, grad: FlexTensor, channels: &Channels<Flex>, a: FlexTensor, b: FlexTensor) -> FlexTensor {
        let all = [&x, &channels.mean, &channels.scale, &channels.shift, &grad, &a, &b];
        let Some([x, mean, scale, shift, mut values, a, b]) = reals(all) else {
            return generic::channel_grad::<Flex>(x, grad, channels, a, b);
        };
        // In place where nothing else holds the gradient's buffer.
        drop(grad);
        let (start, end) = values.layout().contiguous_offsets().unwrap_or_default();
        typed!(x, T => {
            let (mean, scale, shift) = (cpu::slice(&mean), cpu::slice(&scale), cpu::slice(&shift));
            let channels = cpu::norm::Channels { mean, scale, shift, slope: channels.slope as T };
            let grad = &mut values.storage_mut::<T>()[start..end];
            cpu::norm::grad::<T>(cpu::Isa::get(), cpu::slice(&x), grad, plane(&x), channels, cpu::slice(&a), cpu::slice(&b));
        });
        values
    }

    /// In one pass, in place where buffers are not shared. Rounds exactly like Burn's operations.
    fn block_adam(x: FlexTensor, grad: FlexTensor, moments: Option<[FlexTensor; 2]>, step: &AdamStep) -> [FlexTensor; 3] {
        let (dtype, shape) = (x.dtype(), x.shape());
        let suits = |t: &FlexTensor| t.dtype() == dtype && t.shape() == shape;
        if !is_real(dtype) || !suits(&grad) || !moments.iter().flatten().all(suits) {
            return generic::adam::<Flex>(x, grad, moments, step);
        }
        // Buffers that start at 0, as their slices are walked side by side.
        let dense = |t: FlexTensor| if t.is_contiguous() && t.layout().start_offset() == 0 { t } else { t.to_contiguous() };
        let n = shape.num_elements();
        let (mut x, grad) = (dense(x), dense(grad));
        let zeros = || FlexTensor::zeros(shape.clone(), dtype);
        let [mut m1, mut m2] = moments.map_or_else(|| [zeros(), zeros()], |moments| moments.map(dense));
        match dtype {
            DType::F64 => {
                let (x, m1, m2) = (x.storage_mut::<f64>(), m1.storage_mut::<f64>(), m2.storage_mut::<f64>());
                adam_f64(step, &mut x[..n], &grad.storage::<f64>()[..n], &mut m1[..n], &mut m2[..n]);
            }
            _ => {
                let (x, m1, m2) = (x.storage_mut::<f32>(), m1.storage_mut::<f32>(), m2.storage_mut::<f32>());
                adam_f32(step, &mut x[..n], &grad.storage::<f32>()[..n], &mut m1[..n], &mut m2[..n]);
            }
        }
        [x, m1, m2]
    }
}

/// One pass of rounding exactly like [`generic::adam`], over blocks of all threads.
macro_rules! adam {
    ($name:ident, $type:ty) => {
        fn $name(step: &AdamStep, x: &mut [$type], grad: &[$type], moment_1: &mut [$type], moment_2: &mut [$type]) {
            /// Elements of a block: all four streams of it fit the second cache.
            const BLOCK: usize = 1 << 14;
            let (b1, c1) = (step.beta_1 as $type, (1.0 - step.beta_1) as $type);
            let (b2, c2) = (step.beta_2 as $type, (1.0 - step.beta_2) as $type);
            let (epsilon, rate, root) = (step.epsilon as $type, step.rate as $type, step.root as $type);
            let (keep, penalty) = (step.keep as $type, step.penalty as $type);
            let blocks = x.par_chunks_mut(BLOCK).zip(grad.par_chunks(BLOCK));
            blocks.zip(moment_1.par_chunks_mut(BLOCK)).zip(moment_2.par_chunks_mut(BLOCK)).for_each(|(((x, grad), m1), m2)| {
                for (((x, g), m1), m2) in x.iter_mut().zip(grad).zip(m1).zip(m2) {
                    let g = if penalty == 0.0 { *g } else { *x * penalty + *g };
                    *m1 = *m1 * b1 + g * c1;
                    *m2 = *m2 * b2 + (g * g) * c2;
                    *x = *x * keep - (*m1 * rate) / (m2.sqrt() / root + epsilon);
                }
            });
        }
    };
}

adam!(adam_f32, f32);
adam!(adam_f64, f64);
