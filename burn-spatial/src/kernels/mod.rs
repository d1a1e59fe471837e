//! Local compute that the inner backend lacks or does slowly: window operations on one rank's block.
//!
//! On `Flex` with f32 or f64 they run on own SIMD kernels, with the best instructions that all ranks' machines have;
//! `BURN_SPATIAL_ISA` = `avx512`, `avx2` or `portable` forces lesser ones. Anything else runs on the bodies in [`generic`],
//! made of Burn ops.

use std::any::{Any, TypeId};
use std::ops::Range;

use crate::comm::{Comm, CommError};
use crate::copies::copied;
use crate::kind::{Float, Int, Kind, accumulator, wide};
use crate::trace::timed;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, Slice, TensorMetadata};
use burn_flex::FlexTensor;
use burn_std::Shape;

mod cpu;
pub mod generic;

pub use crate::window::{Count, Position, Taps, Window, WindowAxis};
pub use cpu::Arithmetic;
pub(crate) use cpu::norm::Moments;

/// The instructions the CPU kernels use: `avx512`, `avx2` or `portable`.
pub fn instructions() -> &'static str {
    let isa = cpu::Isa::get();
    cpu::Isa::available().into_iter().find(|(other, _)| *other == isa).map_or("portable", |(_, name)| name)
}

/// Has all ranks use the same instructions, those that every one has: parameters are the same on all ranks only if what they
/// compute alike is. The number of threads changes no result, but the slowest rank sets the pace. Collective.
pub(crate) fn agree(comm: &Comm) -> Result<(), CommError> {
    let threads = u16::try_from(rayon::current_num_threads()).unwrap_or(u16::MAX);
    let own = [&[cpu::Isa::get().place()][..], &threads.to_ne_bytes()].concat();
    let all = comm.all_gather(&own)?;
    cpu::Isa::agree(all.iter().filter_map(|bytes| bytes.first().copied()));
    let mut counts: Vec<u16> = all.iter().filter_map(|bytes| Some(u16::from_ne_bytes(*bytes.last_chunk()?))).collect();
    counts.sort_unstable();
    if let [fewest, .., most] = counts[..]
        && fewest != most
        && comm.rank() == 0
    {
        tracing::warn!("ranks have {fewest} to {most} threads each (RAYON_NUM_THREADS), and wait for the slowest");
    }
    Ok(())
}

/// `t`, contiguous, if it is a tensor the CPU kernels work on.
fn flex<T: 'static>(t: &T) -> Option<FlexTensor> {
    let t = (t as &dyn Any).downcast_ref::<FlexTensor>().filter(|t| matches!(t.dtype(), DType::F32 | DType::F64))?;
    if !lies_dense(t) {
        copied(cpu::bytes(t));
    }
    Some(t.to_contiguous())
}

/// Whether a tensor is all of its buffer, in order.
fn lies_dense(t: &FlexTensor) -> bool {
    t.is_contiguous() && t.layout().start_offset() == 0 && t.shape().num_elements() * t.dtype().size() == t.bytes().len()
}

/// A tensor that the CPU kernels work on as they would otherwise make it for each of several uses; any other as it is.
pub(crate) fn contiguous<T: 'static>(t: T) -> T {
    flex(&t).map_or(t, primitive)
}

/// [`flex`] of two tensors of one type.
fn flex_pair<T: 'static>(a: &T, b: &T) -> Option<(FlexTensor, FlexTensor)> {
    let (a, b) = (flex(a)?, flex(b)?);
    (a.dtype() == b.dtype()).then_some((a, b))
}

/// One and the same type under two names.
pub(crate) fn recast<T: 'static, U: 'static>(value: T) -> U {
    let mut value = Some(value);
    (&mut value as &mut dyn Any).downcast_mut::<Option<U>>().and_then(Option::take).expect("the same type")
}

/// The backend's primitive, which is a Flex tensor wherever [`flex`] gave one.
fn primitive<T: 'static>(t: FlexTensor) -> T {
    recast(t)
}

/// Runs `$body` with `$t` the element type of the Flex tensor `$x`.
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

/// Whether sums of `dtype` are made in another type.
fn sums_widely(dtype: DType) -> bool {
    accumulator(dtype) != dtype
}

fn inputs(window: &Window) -> [usize; 3] {
    window.map(|a| a.input)
}

fn outputs(window: &Window) -> [usize; 3] {
    window.map(|a| a.output)
}

/// `[n, c]` of a tensor and the extents given.
fn with_extents(n: usize, c: usize, [d, h, w]: [usize; 3]) -> [usize; 5] {
    [n, c, d, h, w]
}

/// Element-wise arithmetic of a large tensor with one that varies along a part of its dimensions only, in one pass and
/// in place where the buffer is not shared. Gives the operands back where this is not the case on hand.
#[allow(clippy::type_complexity)]
pub fn arithmetic<B: Backend>(
    large: FloatTensor<B>,
    small: FloatTensor<B>,
    arithmetic: Arithmetic,
) -> Result<FloatTensor<B>, (FloatTensor<B>, FloatTensor<B>)> {
    timed!(KERNEL, "arithmetic");
    let runs = cpu::Runs::of(&large.shape(), &small.shape()).filter(|_| large.shape() != small.shape());
    let dtypes = matches!(large.dtype(), DType::F32 | DType::F64) && large.dtype() == small.dtype();
    let dense = (&large as &dyn Any).downcast_ref::<FlexTensor>().is_some_and(|t| t.is_contiguous() && t.layout().start_offset() == 0);
    let (Some(runs), true, true) = (runs, dtypes, dense) else { return Err((large, small)) };
    let small = flex(&small).expect("both are Flex tensors");
    let mut values = recast::<_, FlexTensor>(large);
    let n = values.shape().num_elements();
    typed!(values, T => runs.apply::<T>(&mut values.storage_mut::<T>()[..n], cpu::slice(&small), arithmetic));
    Ok(primitive(values))
}

/// A permuted tensor as a dense one where that can be done in long runs; anything else as it is.
pub(crate) fn dense<T: 'static>(tensor: T) -> T {
    timed!(KERNEL, "dense");
    let copy = (&tensor as &dyn Any).downcast_ref::<FlexTensor>().filter(|t| !t.is_contiguous()).and_then(|t| match t.dtype() {
        DType::F32 => cpu::dense::<f32>(t),
        DType::F64 => cpu::dense::<f64>(t),
        _ => None,
    });
    copy.map_or(tensor, |copy| {
        copied(cpu::bytes(&copy));
        primitive(copy)
    })
}

/// `target` with its box `at` replaced by `part`, in place; gives both back where this cannot be done here.
pub(crate) fn assign_box<T: 'static>(target: T, at: &[Range<usize>], part: T) -> Result<T, (T, T)> {
    in_box(target, at, part, cpu::boxes::Assign)
}

/// `target` with `part` added to its box `at`, as [`assign_box`].
pub(crate) fn add_box<T: 'static>(target: T, at: &[Range<usize>], part: T) -> Result<T, (T, T)> {
    in_box(target, at, part, cpu::boxes::Add)
}

fn in_box<T: 'static>(target: T, at: &[Range<usize>], part: T, f: impl cpu::boxes::RunFn) -> Result<T, (T, T)> {
    if !(&target as &dyn Any).is::<FlexTensor>() {
        return Err((target, part));
    }
    match cpu::boxes::each_run(recast(target), at, recast(part), f) {
        Ok(done) => Ok(primitive(done)),
        Err(operands) => Err((primitive(operands.0), primitive(operands.1))),
    }
}

/// A tensor whose every value is still to be written: until then they are any.
pub(crate) fn unwritten<B: Backend, K: Kind<B>>(shape: Shape, device: &B::Device, dtype: DType) -> K::Primitive {
    let flex = TypeId::of::<K::Primitive>() == TypeId::of::<FlexTensor>();
    match dtype {
        DType::F32 if flex => primitive(cpu::unwritten::<f32>(shape)),
        DType::F64 if flex => primitive(cpu::unwritten::<f64>(shape)),
        DType::I64 if flex => primitive(cpu::unwritten::<i64>(shape)),
        _ => K::empty(shape, device, dtype),
    }
}

/// A box of a block: its planes, rows and columns, and `[N, C, box..]`.
pub(crate) type Slab<B> = ([Range<usize>; 3], FloatTensor<B>);

/// A whole block as its only box.
pub(crate) fn whole_slab<B: Backend>(x: FloatTensor<B>) -> Slab<B> {
    let shape = x.shape();
    (std::array::from_fn(|i| 0..shape[2 + i]), x)
}

/// Whether pools read blocks in several boxes.
pub(crate) fn reads_slabs<B: Backend>(dtype: DType) -> bool {
    TypeId::of::<FloatTensor<B>>() == TypeId::of::<FlexTensor>() && matches!(dtype, DType::F32 | DType::F64)
}

/// Whether [`conv3d_part`] does.
pub(crate) fn conv3d_reads_slabs<B: Backend>(dtype: DType, window: &Window) -> bool {
    let own = cpu::Conv::new(cpu::Isa::get(), 1, [1; 2], window, 1);
    reads_slabs::<B>(dtype) && if dtype == DType::F64 { own.reads_slabs::<f64>() } else { own.reads_slabs::<f32>() }
}

/// Whether [`conv3d_weight_grad_of`] does.
pub(crate) fn conv3d_weight_grad_reads_slabs<B: Backend>(dtype: DType, window: &Window) -> bool {
    let own = cpu::Conv::new(cpu::Isa::get(), 1, [1; 2], window, 1);
    let reads = || if dtype == DType::F64 { own.weight_grad_reads_slabs::<f64>() } else { own.weight_grad_reads_slabs::<f32>() };
    reads_slabs::<B>(dtype) && reads()
}

/// The boxes as Flex tensors, if the kernels work on them.
fn flex_slabs<B: Backend>(x: &[Slab<B>]) -> Option<Vec<FlexTensor>> {
    let first = x.first()?.1.dtype();
    x.iter().map(|(_, part)| flex(part).filter(|f| f.dtype() == first)).collect()
}

fn cpu_slabs<'a, B: Backend, T: cpu::Real>(x: &[Slab<B>], values: &'a [FlexTensor]) -> Vec<cpu::Slab<'a, T>> {
    let slab = |((at, _), values): (&Slab<B>, &'a FlexTensor)| cpu::Slab { at: at.clone(), values: cpu::slice::<T>(values) };
    x.iter().zip(values).map(slab).collect()
}

/// The one box of a block that has to lie in one.
fn only<B: Backend>(x: &[Slab<B>]) -> FloatTensor<B> {
    let [(_, block)] = x else { unreachable!("only the CPU kernels' tensors come in several boxes") };
    block.clone()
}

/// The place of a box at voxel `at` of `out`, `[N, C, ..]`.
fn place(out: &FlexTensor, at: [usize; 3]) -> cpu::Place {
    let [_, _, extents @ ..]: [usize; 5] = out.shape().dims();
    cpu::Place { extents, at }
}

/// `out` `[N, C, ..]` with `part` of it, or all, written at voxel `at`.
fn put<B: Backend, K: Kind<B>>(out: K::Primitive, at: [usize; 3], part: K::Primitive) -> K::Primitive {
    let shape = part.shape();
    if shape == out.shape() {
        return part;
    }
    let slice = |start: usize, length: usize| Slice::new(start as isize, Some((start + length) as isize), 1);
    let slices = [0, 0].into_iter().chain(at).zip(shape.iter()).map(|(start, length)| slice(start, *length));
    K::slice_assign(out, &slices.collect::<Vec<_>>(), part)
}

/// Panics where a tensor is not of the shape that a window and the other operands ask for: the kernels do not ask again.
fn expect(what: &str, got: &[usize], needed: &[usize]) {
    assert!(got == needed, "{what} is of shape {got:?}, but has to be of {needed:?}");
}

/// Batch and channels of a block in boxes, which have to be of the same and to lie in the input of `window`.
fn expect_boxes<B: Backend>(x: &[Slab<B>], window: &Window) -> [usize; 2] {
    let (_, first) = x.first().expect("a block is one box at least");
    let [n, c, ..]: [usize; 5] = first.shape().dims();
    for (at, part) in x {
        expect("a box of the input", &part.shape(), &with_extents(n, c, std::array::from_fn(|i| at[i].len())));
        assert!((0..3).all(|i| at[i].end <= window[i].input), "a box {at:?} of an input of {:?}", inputs(window));
    }
    [n, c]
}

/// Panics unless the outputs of `window` have room in `out` at voxel `at`.
fn expect_room(out: &Shape, at: [usize; 3], n: usize, c: usize, window: &Window) {
    let extents: [usize; 3] = std::array::from_fn(|i| out[2 + i]);
    expect("the output", out, &with_extents(n, c, extents));
    assert!((0..3).all(|i| at[i] + window[i].output <= extents[i]), "outputs {:?} at {at:?} of {extents:?}", outputs(window));
}

/// Panics unless a weight of `shape` leads from `cin` to `cout` channels with the taps of `window`.
fn expect_weight(shape: &[usize], [cin, cout]: [usize; 2], window: &Window, groups: usize) {
    let fits = groups > 0 && cin.is_multiple_of(groups) && cout.is_multiple_of(groups);
    assert!(fits, "{cin} and {cout} channels in {groups} groups");
    expect("the weight", shape, &with_extents(cout, cin / groups, window.map(|axis| axis.kernel)));
}

/// Convolution of a block. x `[N, Cin, in..]`, weight `[Cout, Cin / groups, kernel..]`, bias `[Cout]` ->
/// `[N, Cout, out..]`.
///
/// # Panics
/// Here and in the other kernels: if a tensor is not of the shape that the window and the other operands ask for.
pub fn conv3d<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    activated_conv3d::<B>(x, weight, bias, 1.0, window, groups)
}

/// [`conv3d`] followed by a leaky ReLU: negative results are multiplied by `slope`, 1 for none, 0 for a ReLU.
pub fn activated_conv3d<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    slope: f64,
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    let shape = with_extents(x.shape()[0], weight.shape()[0], outputs(window));
    let out = unwritten::<B, Float>(shape.into(), &B::float_device(&x), x.dtype());
    conv3d_part::<B>(out, [0; 3], &[whole_slab::<B>(x)], &Filter { weight, bias, slope, groups }, window)
}

/// What a convolution does with the windows it reads.
pub(crate) struct Filter<B: Backend> {
    /// `[Cout, Cin / groups, kernel..]`.
    pub weight: FloatTensor<B>,
    /// `[Cout]`.
    pub bias: Option<FloatTensor<B>>,
    /// Factor of negative results.
    pub slope: f64,
    /// Independent groups of channels.
    pub groups: usize,
}

/// [`activated_conv3d`] of a part of the output: writes it into `out` `[N, Cout, ..]` at voxel `at`. The values are those of
/// the whole to the bit. x is in boxes.
pub(crate) fn conv3d_part<B: Backend>(
    out: FloatTensor<B>,
    at: [usize; 3],
    x: &[Slab<B>],
    filter: &Filter<B>,
    window: &Window,
) -> FloatTensor<B> {
    timed!(KERNEL, "conv3d");
    let Filter { weight, bias, slope, groups } = filter;
    let ([n, cin], cout) = (expect_boxes::<B>(x, window), weight.shape()[0]);
    expect_weight(&weight.shape(), [cin, cout], window, *groups);
    bias.iter().for_each(|bias| expect("the bias", &bias.shape(), &[cout]));
    expect_room(&out.shape(), at, n, cout, window);
    let boxes = flex_slabs::<B>(x).filter(|boxes| boxes[0].dtype() == weight.dtype());
    let flex_bias = bias.as_ref().map(flex);
    let (Some(boxes), Some(fw), Some(fb), Some(_)) = (boxes, flex(weight), flex_bias.map_or(Some(None), |b| b.map(Some)), flex(&out))
    else {
        let part = generic::conv3d::<B>(only::<B>(x), weight.clone(), bias.clone(), *slope, window, *groups);
        return put::<B, Float>(out, at, part);
    };
    let mut out = recast::<_, FlexTensor>(out);
    let place = place(&out, at);
    let own = cpu::Conv::new(cpu::Isa::get(), n, [cin, cout], window, *groups);
    typed!(fw, T => {
        let (x, bias) = (cpu_slabs::<B, T>(x, &boxes), fb.as_ref().map(cpu::slice::<T>));
        let operands = cpu::Operands { x: &x, weight: cpu::slice(&fw), bias, slope: *slope as T };
        own.forward_into(operands, cpu::space(&mut out), place);
    });
    primitive(out)
}

/// The gradient before a leaky ReLU from `grad`, that of its result `y` of the same shape: times `slope`, which must not be
/// negative, where y is. For a ReLU, with slope 0, this is wherever y is not positive.
pub fn activation_grad<B: Backend>(y: FloatTensor<B>, grad: FloatTensor<B>, slope: f64) -> FloatTensor<B> {
    timed!(KERNEL, "activation_grad");
    expect("the gradient", &grad.shape(), &y.shape());
    let Some((fy, mut fg)) = flex_pair(&y, &grad) else { return generic::activation_grad::<B>(y, grad, slope) };
    // In place where nothing else holds the gradient's buffer.
    drop(grad);
    let (start, end) = fg.layout().contiguous_offsets().unwrap_or_default();
    typed!(fy, T => {
        let grad = &mut fg.storage_mut::<T>()[start..end];
        cpu::activation_grad::<T>(cpu::Isa::get(), cpu::slice(&fy), grad, slope as T);
    });
    primitive(fg)
}

/// The gradient of [`conv3d`]'s x: grad `[N, Cout, out..]` -> `[N, Cin, in..]`.
pub fn conv3d_data_grad<B: Backend>(grad: FloatTensor<B>, weight: FloatTensor<B>, window: &Window, groups: usize) -> FloatTensor<B> {
    timed!(KERNEL, "conv3d_data_grad");
    let [n, cin, cout] = [grad.shape()[0], weight.shape()[1] * groups, weight.shape()[0]];
    expect_weight(&weight.shape(), [cin, cout], window, groups);
    expect("the gradient", &grad.shape(), &with_extents(n, cout, outputs(window)));
    let Some((fg, fw)) = flex_pair(&grad, &weight) else {
        return generic::conv3d_data_grad::<B>(grad, weight, window, groups);
    };
    let own = cpu::Conv::new(cpu::Isa::get(), n, [cin, cout], window, groups);
    primitive(typed!(fg, T => {
        let out = own.data_grad::<T>(cpu::slice(&fg), cpu::slice(&fw));
        cpu::tensor(out, with_extents(n, cin, inputs(window)))
    }))
}

/// The gradient of [`conv3d`]'s weight, of shape `weight_shape`, from x `[N, Cin, in..]` and grad `[N, Cout, out..]`.
pub fn conv3d_weight_grad<B: Backend>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    weight_shape: [usize; 5],
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    conv3d_weight_grad_of::<B>(&[whole_slab::<B>(x)], &grad, weight_shape, window, groups)
}

/// [`conv3d_weight_grad`] of x in boxes: in several only where [`conv3d_weight_grad_reads_slabs`].
pub(crate) fn conv3d_weight_grad_of<B: Backend>(
    x: &[Slab<B>],
    grad: &FloatTensor<B>,
    weight_shape: [usize; 5],
    window: &Window,
    groups: usize,
) -> FloatTensor<B> {
    timed!(KERNEL, "conv3d_weight_grad");
    let ([n, cin], cout) = (expect_boxes::<B>(x, window), weight_shape[0]);
    expect_weight(&weight_shape, [cin, cout], window, groups);
    expect("the gradient", &grad.shape(), &with_extents(n, cout, outputs(window)));
    let boxes = flex_slabs::<B>(x).filter(|boxes| boxes[0].dtype() == grad.dtype());
    let (Some(boxes), Some(fg)) = (boxes, flex(grad)) else {
        return generic::conv3d_weight_grad::<B>(only::<B>(x), grad.clone(), weight_shape, window, groups);
    };
    let own = cpu::Conv::new(cpu::Isa::get(), n, [cin, cout], window, groups);
    primitive(typed!(fg, T => {
        let out = own.weight_grad::<T>(&cpu_slabs::<B, T>(x, &boxes), cpu::slice(&fg));
        cpu::tensor(out, weight_shape)
    }))
}

/// The largest value of each window of x `[N, C, in..]`, and its flat position in the whole volume of D x H x W
/// voxels as I64; the block's voxel (0, 0, 0) lies at `origin` of the volume. Padding is minus infinity, the first
/// maximum in scan order wins, NaN propagates. A window without input gives minus infinity and position -1.
pub fn max_pool3d<B: Backend>(
    x: FloatTensor<B>,
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
) -> (FloatTensor<B>, IntTensor<B>) {
    let shape = Shape::from(with_extents(x.shape()[0], x.shape()[1], outputs(window)));
    let out = unwritten::<B, Float>(shape.clone(), &B::float_device(&x), x.dtype());
    let at = unwritten::<B, Int>(shape, &B::float_device(&x), DType::I64);
    max_pool3d_part::<B>((out, at), [0; 3], &[whole_slab::<B>(x)], window, origin, volume)
}

/// [`max_pool3d`] of a part of the outputs: written at voxel `at`. x is in boxes.
pub(crate) fn max_pool3d_part<B: Backend>(
    (out, indices): (FloatTensor<B>, IntTensor<B>),
    at: [usize; 3],
    x: &[Slab<B>],
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
) -> (FloatTensor<B>, IntTensor<B>) {
    timed!(KERNEL, "max_pool3d");
    let [n, c] = expect_boxes::<B>(x, window);
    expect_room(&out.shape(), at, n, c, window);
    expect("the positions", &indices.shape(), &out.shape());
    let (Some(boxes), Some(_)) = (flex_slabs::<B>(x), flex(&out)) else {
        let (part, part_indices) = generic::max_pool3d::<B>(only::<B>(x), window, origin, volume);
        return (put::<B, Float>(out, at, part), put::<B, Int>(indices, at, part_indices));
    };
    let (mut out, mut indices) = (recast::<_, FlexTensor>(out), recast::<_, FlexTensor>(indices));
    let place = place(&out, at);
    typed!(boxes[0], T => {
        let x = cpu_slabs::<B, T>(x, &boxes);
        cpu::max::<T>(cpu::Isa::get(), &x, window, origin, volume, cpu::space(&mut out), cpu::space(&mut indices), place);
    });
    (primitive(out), primitive(indices))
}

/// The gradient of [`max_pool3d`]: adds grad `[N, C, out..]` to the voxels that `indices` name, giving
/// `[N, C, in..]`. Positions outside the block are left out.
pub fn max_pool3d_grad<B: Backend>(
    grad: FloatTensor<B>,
    indices: IntTensor<B>,
    window: &Window,
    origin: [isize; 3],
    volume: [usize; 3],
) -> FloatTensor<B> {
    timed!(KERNEL, "max_pool3d_grad");
    expect("the gradient", &grad.shape(), &with_extents(grad.shape()[0], grad.shape()[1], outputs(window)));
    expect("the positions", &indices.shape(), &grad.shape());
    let at = (&indices as &dyn Any).downcast_ref::<FlexTensor>().filter(|i| i.dtype() == DType::I64).map(FlexTensor::to_contiguous);
    let (Some(fg), Some(at)) = (flex(&grad), at) else {
        return generic::max_pool3d_grad::<B>(grad, indices, window, origin, volume);
    };
    let shape = with_extents(grad.shape()[0], grad.shape()[1], inputs(window));
    primitive(typed!(fg, T => {
        let out = cpu::max_grad::<T>(cpu::slice(&fg), at.storage(), window, origin, volume);
        cpu::tensor(out, shape)
    }))
}

/// The mean of each window of x `[N, C, in..]`; what lies outside adds nothing. A window without input gives 0.
pub fn avg_pool3d<B: Backend>(x: FloatTensor<B>, window: &Window, count: Count) -> FloatTensor<B> {
    let shape = with_extents(x.shape()[0], x.shape()[1], outputs(window));
    let out = unwritten::<B, Float>(shape.into(), &B::float_device(&x), x.dtype());
    avg_pool3d_part::<B>(out, [0; 3], &[whole_slab::<B>(x)], window, count)
}

/// [`avg_pool3d`] of a part of the outputs: written at voxel `at`. x is in boxes.
pub(crate) fn avg_pool3d_part<B: Backend>(
    out: FloatTensor<B>,
    at: [usize; 3],
    x: &[Slab<B>],
    window: &Window,
    count: Count,
) -> FloatTensor<B> {
    timed!(KERNEL, "avg_pool3d");
    let [n, c] = expect_boxes::<B>(x, window);
    expect_room(&out.shape(), at, n, c, window);
    if sums_widely(x[0].1.dtype()) {
        return put::<B, Float>(out, at, wide::<B>(only::<B>(x), |x| avg_pool3d::<B>(x, window, count)));
    }
    let (Some(boxes), Some(_)) = (flex_slabs::<B>(x), flex(&out)) else {
        return put::<B, Float>(out, at, generic::avg_pool3d::<B>(only::<B>(x), window, count));
    };
    let mut out = recast::<_, FlexTensor>(out);
    let place = place(&out, at);
    typed!(boxes[0], T => {
        let x = cpu_slabs::<B, T>(x, &boxes);
        cpu::average::<T>(cpu::Isa::get(), &x, window, count, cpu::space(&mut out), place);
    });
    primitive(out)
}

/// The gradient of [`avg_pool3d`]: grad `[N, C, out..]` -> `[N, C, in..]`.
pub fn avg_pool3d_grad<B: Backend>(grad: FloatTensor<B>, window: &Window, count: Count) -> FloatTensor<B> {
    timed!(KERNEL, "avg_pool3d_grad");
    expect("the gradient", &grad.shape(), &with_extents(grad.shape()[0], grad.shape()[1], outputs(window)));
    if sums_widely(grad.dtype()) {
        return wide::<B>(grad, |grad| avg_pool3d_grad::<B>(grad, window, count));
    }
    let Some(fg) = flex(&grad) else { return generic::avg_pool3d_grad::<B>(grad, window, count) };
    let shape = with_extents(grad.shape()[0], grad.shape()[1], inputs(window));
    primitive(typed!(fg, T => cpu::tensor(cpu::average_grad::<T>(cpu::Isa::get(), cpu::slice(&fg), window, count), shape)))
}

/// x `[N, C, in..]` -> `[N, C, out..]`: along each axis the sums that `taps` describes.
pub fn resample<B: Backend>(x: FloatTensor<B>, taps: &[Taps; 3]) -> FloatTensor<B> {
    let shape = with_extents(x.shape()[0], x.shape()[1], std::array::from_fn(|i| taps[i].outputs()));
    let out = unwritten::<B, Float>(shape.into(), &B::float_device(&x), x.dtype());
    resample_part::<B>(out, [0; 3], x, taps)
}

/// [`resample`] of a part of the outputs: written at voxel `at`.
pub(crate) fn resample_part<B: Backend>(out: FloatTensor<B>, at: [usize; 3], x: FloatTensor<B>, taps: &[Taps; 3]) -> FloatTensor<B> {
    timed!(KERNEL, "resample");
    if sums_widely(x.dtype()) {
        return put::<B, Float>(out, at, wide::<B>(x, |x| resample::<B>(x, taps)));
    }
    let axes: Vec<usize> = (0..3).filter(|i| !taps[*i].is_identity()).collect();
    let Some((last, others)) = axes.split_last() else { return put::<B, Float>(out, at, x) };
    let along = |out: FloatTensor<B>, at: [usize; 3], x: FloatTensor<B>, axis: usize| {
        let (Some(fx), Some(_)) = (flex(&x), flex(&out)) else {
            return put::<B, Float>(out, at, generic::resample::<B>(x, axis, &taps[axis]));
        };
        let mut out = recast::<_, FlexTensor>(out);
        let place = place(&out, at);
        let [_, _, extents @ ..]: [usize; 5] = fx.shape().dims();
        typed!(fx, T => {
            cpu::resample::<T>(cpu::Isa::get(), cpu::slice(&fx), &taps[axis], axis, extents, cpu::space(&mut out), place);
        });
        primitive(out)
    };
    let x = others.iter().fold(x, |x, axis| {
        let mut shape: [usize; 5] = x.shape().dims();
        shape[2 + axis] = taps[*axis].outputs();
        let out = unwritten::<B, Float>(shape.into(), &B::float_device(&x), x.dtype());
        along(out, [0; 3], x, *axis)
    });
    along(out, at, x, *last)
}

/// The gradient of [`resample`]: grad `[N, C, out..]` -> `[N, C, in..]`.
pub fn resample_grad<B: Backend>(grad: FloatTensor<B>, taps: &[Taps; 3]) -> FloatTensor<B> {
    timed!(KERNEL, "resample_grad");
    if sums_widely(grad.dtype()) {
        return wide::<B>(grad, |grad| resample_grad::<B>(grad, taps));
    }
    (0..3).rev().filter(|i| !taps[*i].is_identity()).fold(grad, |grad, i| {
        let Some(fg) = flex(&grad) else { return generic::resample_grad::<B>(grad, i, &taps[i]) };
        let mut shape: [usize; 5] = grad.shape().dims();
        let inner = shape[3 + i..].iter().product();
        shape[2 + i] = taps[i].inputs;
        primitive(typed!(fg, T => cpu::tensor(cpu::resample_grad::<T>(cpu::slice(&fg), &taps[i], inner), shape)))
    })
}

/// What a channel's elements become: `leaky_relu((x - mean) * scale + shift)`. One number a channel, `[C]`.
#[derive(Debug)]
pub struct Channels<B: Backend> {
    /// Taken off.
    pub mean: FloatTensor<B>,
    /// Multiplied by.
    pub scale: FloatTensor<B>,
    /// Added then.
    pub shift: FloatTensor<B>,
    /// Factor of what is negative then: 1 changes nothing, 0 is a ReLU.
    pub slope: f64,
}

impl<B: Backend> Clone for Channels<B> {
    fn clone(&self) -> Self {
        Channels { mean: self.mean.clone(), scale: self.scale.clone(), shift: self.shift.clone(), slope: self.slope }
    }
}

/// Dense Flex tensors of x and of the channels' numbers.
fn flex_channels<B: Backend>(x: &FloatTensor<B>, channels: &Channels<B>) -> Option<[FlexTensor; 4]> {
    let of = |t: &FloatTensor<B>| flex(t).filter(|t| t.dtype() == x.dtype());
    Some([flex(x)?, of(&channels.mean)?, of(&channels.scale)?, of(&channels.shift)?])
}

/// Elements of one sample's channel.
fn plane(x: &FlexTensor) -> usize {
    x.shape()[2..].iter().product()
}

/// `[C]` from values.
fn line<T: burn_backend::Element + bytemuck::Pod + Send + Sync>(values: Vec<T>) -> FlexTensor {
    let shape = Shape::from(vec![values.len()]);
    FlexTensor::new(burn_std::Bytes::from_elems(values), burn_flex::Layout::contiguous(shape), T::dtype())
}

/// Mean, and sum of squared deviations from it, of each channel of x `[N, C, ..]`: `[C]` each.
pub fn channel_moments<B: Backend>(x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    timed!(KERNEL, "channel_moments");
    let Some(fx) = flex(&x) else { return generic::channel_moments::<B>(x) };
    typed!(fx, T => {
        let (mean, m2) = cpu::norm::moments::<T>(cpu::Isa::get(), cpu::slice(&fx), fx.shape()[1], plane(&fx));
        (primitive(line(mean)), primitive(line(m2)))
    })
}

/// x `[N, C, D, H, W]` with its channels shifted, scaled and activated.
pub fn channel_norm<B: Backend>(x: FloatTensor<B>, channels: &Channels<B>) -> FloatTensor<B> {
    timed!(KERNEL, "channel_norm");
    let Some([fx, mean, scale, shift]) = flex_channels::<B>(&x, channels) else { return generic::channel_norm::<B>(x, channels) };
    primitive(typed!(fx, T => {
        let (mean, scale, shift) = (cpu::slice(&mean), cpu::slice(&scale), cpu::slice(&shift));
        let channels = cpu::norm::Channels { mean, scale, shift, slope: channels.slope as T };
        cpu::tensor(cpu::norm::norm::<T>(cpu::Isa::get(), cpu::slice(&fx), plane(&fx), channels), fx.shape().dims())
    }))
}

/// Of each channel, the sum of the gradient before the activation, and of its product with x - mean: `[C]` each.
pub fn channel_grad_sums<B: Backend>(x: FloatTensor<B>, grad: FloatTensor<B>, channels: &Channels<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    timed!(KERNEL, "channel_grad_sums");
    let (Some([fx, mean, scale, shift]), Some(fg)) = (flex_channels::<B>(&x, channels), flex(&grad)) else {
        return generic::channel_grad_sums::<B>(x, grad, channels);
    };
    typed!(fx, T => {
        let (mean, scale, shift) = (cpu::slice(&mean), cpu::slice(&scale), cpu::slice(&shift));
        let channels = cpu::norm::Channels { mean, scale, shift, slope: channels.slope as T };
        let (sum, dot) = cpu::norm::grad_sums::<T>(cpu::Isa::get(), cpu::slice(&fx), cpu::slice(&fg), plane(&fx), channels);
        (primitive(line(sum)), primitive(line(dot)))
    })
}

/// The gradient of x, `scale * (g - a - (x - mean) * b)`: g is the gradient before the activation, a and b are `[C]`.
pub fn channel_grad<B: Backend>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    channels: &Channels<B>,
    a: FloatTensor<B>,
    b: FloatTensor<B>,
) -> FloatTensor<B> {
    timed!(KERNEL, "channel_grad");
    let flexed = (flex_channels::<B>(&x, channels), flex_pair(&grad, &a), flex(&b));
    let (Some([fx, mean, scale, shift]), Some((mut fg, fa)), Some(fb)) = flexed else {
        return generic::channel_grad::<B>(x, grad, channels, a, b);
    };
    // In place where nothing else holds the gradient's buffer.
    drop(grad);
    let (start, end) = fg.layout().contiguous_offsets().unwrap_or_default();
    typed!(fx, T => {
        let (mean, scale, shift) = (cpu::slice(&mean), cpu::slice(&scale), cpu::slice(&shift));
        let channels = cpu::norm::Channels { mean, scale, shift, slope: channels.slope as T };
        let grad = &mut fg.storage_mut::<T>()[start..end];
        cpu::norm::grad::<T>(cpu::Isa::get(), cpu::slice(&fx), grad, plane(&fx), channels, cpu::slice(&fa), cpu::slice(&fb));
    });
    primitive(fg)
}
