//! What a backend that computes on blocks can do itself.

use std::ops::Range;

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, Shape, Slice, TensorMetadata};

use super::{Arithmetic, Count, Taps, Window, generic};

/// A box of a block: its planes, rows and columns, and `[N, C, box..]`.
pub type Slab<B> = ([Range<usize>; 3], FloatTensor<B>);

/// What a convolution does with the windows it reads.
#[derive(Debug)]
pub struct Filter<B: Backend> {
    /// `[Cout, Cin / groups, kernel..]`.
    pub weight: FloatTensor<B>,
    /// `[Cout]`.
    pub bias: Option<FloatTensor<B>>,
    /// Factor of negative results.
    pub slope: f64,
    /// Independent groups of channels.
    pub groups: usize,
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

/// The numbers of one step of [`Adam`](crate::optim::Adam), from parameters x, their gradients g and the moments m1 and m2, 0
/// at first: with `g' = x * penalty + g` (or g where the penalty is 0), `m1 = m1 * beta_1 + g' * (1 - beta_1)` and
/// `m2 = m2 * beta_2 + g'^2 * (1 - beta_2)`, `x = x * keep - (m1 * rate) / (sqrt(m2) / root + epsilon)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Rate over the correction of the first moment.
    pub rate: f64,
    /// Root of the correction of the second moment.
    pub root: f64,
    /// What weight decay leaves of a parameter.
    pub keep: f64,
    /// Share of a parameter in its gradient.
    pub penalty: f64,
}

/// A backend that computes on blocks: the inner backend of [`Spatial`](crate::Spatial), and one on which the modules of
/// [`nn`](crate::nn) run. Every method has a body made of Burn's operations, so that a backend joins with
///
/// ```ignore
/// impl LocalKernels for Mine {}
/// ```
///
/// and overrides what it does faster; a backend of another crate joins in this one, as `Cuda` does. Whatever a method may do in place, it does only where nothing else holds the buffer.
/// Shapes have been checked where the functions of [`kernels`](super), which say what the methods named after them compute,
/// call a method.
pub trait LocalKernels: Backend {
    /// While a halo is on its way, its messages are driven after each of so many pieces of the rank's own work.
    const PIECES: usize = 4;

    /// Boxes that are assembled for a kernel have about so many bytes at most.
    const ASSEMBLED: usize = 8 << 20;

    /// A block in more boxes is assembled, also where a kernel reads boxes: to look for each row in all of them takes longer.
    const BOXES: usize = 27;

    /// A share of a weight's gradient is computed at once where more bytes would be kept for it.
    const HELD: usize = 32 << 20;

    /// Whether pools of `dtype` read blocks in several boxes.
    fn reads_slabs(_dtype: DType) -> bool {
        false
    }

    /// Whether [`block_conv3d`](LocalKernels::block_conv3d) does.
    fn conv3d_reads_slabs(_dtype: DType, _window: &Window) -> bool {
        false
    }

    /// Whether [`block_conv3d_weight_grad`](LocalKernels::block_conv3d_weight_grad) does.
    fn conv3d_weight_grad_reads_slabs(_dtype: DType, _window: &Window) -> bool {
        false
    }

    /// A tensor whose every value is still to be written: until then they are any.
    fn float_unwritten(shape: Shape, device: &Self::Device, dtype: DType) -> FloatTensor<Self> {
        Self::float_empty(shape, device, dtype.into())
    }

    /// [`float_unwritten`](LocalKernels::float_unwritten) of integers.
    fn int_unwritten(shape: Shape, device: &Self::Device, dtype: DType) -> IntTensor<Self> {
        Self::int_empty(shape, device, dtype.into())
    }

    /// `tensor` as the kernels would otherwise make it for each of several uses.
    fn float_contiguous(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    /// A permuted tensor as a dense one, where that is faster here than in the operation behind it; else as it is.
    fn float_dense(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    /// `target` with a box replaced by `part`.
    fn float_assign_box(target: FloatTensor<Self>, slices: &[Slice], part: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_slice_assign(target, slices, part)
    }

    /// [`float_assign_box`](LocalKernels::float_assign_box) of integers.
    fn int_assign_box(target: IntTensor<Self>, slices: &[Slice], part: IntTensor<Self>) -> IntTensor<Self> {
        Self::int_slice_assign(target, slices, part)
    }

    /// `target` with `part` added to a box.
    fn float_add_box(target: FloatTensor<Self>, slices: &[Slice], part: FloatTensor<Self>) -> FloatTensor<Self> {
        generic::float_add_box::<Self>(target, slices, part)
    }

    /// [`float_add_box`](LocalKernels::float_add_box) of integers.
    fn int_add_box(target: IntTensor<Self>, slices: &[Slice], part: IntTensor<Self>) -> IntTensor<Self> {
        generic::int_add_box::<Self>(target, slices, part)
    }

    /// See [`arithmetic`](super::arithmetic).
    fn block_arithmetic(large: FloatTensor<Self>, small: FloatTensor<Self>, arithmetic: Arithmetic) -> FloatTensor<Self> {
        generic::arithmetic::<Self>(large, small, arithmetic)
    }

    /// See [`activated_conv3d`](super::activated_conv3d): of a part of the output, written into `out` `[N, Cout, ..]` at voxel
    /// `at`. x is in boxes that make up the block, in several only where
    /// [`conv3d_reads_slabs`](LocalKernels::conv3d_reads_slabs). The values must not depend on how the output is cut.
    fn block_conv3d(out: FloatTensor<Self>, at: [usize; 3], x: &[Slab<Self>], filter: &Filter<Self>, window: &Window) -> FloatTensor<Self> {
        generic::conv3d_part::<Self>(out, at, x, filter, window)
    }

    /// See [`activation_grad`](super::activation_grad).
    fn block_activation_grad(y: FloatTensor<Self>, grad: FloatTensor<Self>, slope: f64) -> FloatTensor<Self> {
        generic::activation_grad::<Self>(y, grad, slope)
    }

    /// See [`conv3d_data_grad`](super::conv3d_data_grad).
    fn block_conv3d_data_grad(grad: FloatTensor<Self>, weight: FloatTensor<Self>, window: &Window, groups: usize) -> FloatTensor<Self> {
        generic::conv3d_data_grad::<Self>(grad, weight, window, groups)
    }

    /// See [`conv3d_weight_grad`](super::conv3d_weight_grad). x is in boxes, in several only where
    /// [`conv3d_weight_grad_reads_slabs`](LocalKernels::conv3d_weight_grad_reads_slabs).
    fn block_conv3d_weight_grad(
        x: &[Slab<Self>],
        grad: &FloatTensor<Self>,
        weight_shape: [usize; 5],
        window: &Window,
        groups: usize,
    ) -> FloatTensor<Self> {
        generic::conv3d_weight_grad::<Self>(only::<Self>(x), grad.clone(), weight_shape, window, groups)
    }

    /// See [`max_pool3d`](super::max_pool3d): of a part of the outputs, written into `out` and `indices` `[N, C, ..]` at voxel
    /// `at`. x is in boxes, in several only where [`reads_slabs`](LocalKernels::reads_slabs).
    fn block_max_pool3d(
        (out, indices): (FloatTensor<Self>, IntTensor<Self>),
        at: [usize; 3],
        x: &[Slab<Self>],
        window: &Window,
        origin: [isize; 3],
        volume: [usize; 3],
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        generic::max_pool3d_part::<Self>((out, indices), at, x, window, origin, volume)
    }

    /// See [`max_pool3d_grad`](super::max_pool3d_grad).
    fn block_max_pool3d_grad(
        grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
        window: &Window,
        origin: [isize; 3],
        volume: [usize; 3],
    ) -> FloatTensor<Self> {
        generic::max_pool3d_grad::<Self>(grad, indices, window, origin, volume)
    }

    /// See [`avg_pool3d`](super::avg_pool3d): of a part of the outputs, as
    /// [`block_max_pool3d`](LocalKernels::block_max_pool3d). Never of half precision, as the other sums here.
    fn block_avg_pool3d(out: FloatTensor<Self>, at: [usize; 3], x: &[Slab<Self>], window: &Window, count: Count) -> FloatTensor<Self> {
        generic::avg_pool3d_part::<Self>(out, at, x, window, count)
    }

    /// See [`avg_pool3d_grad`](super::avg_pool3d_grad).
    fn block_avg_pool3d_grad(grad: FloatTensor<Self>, window: &Window, count: Count) -> FloatTensor<Self> {
        generic::avg_pool3d_grad::<Self>(grad, window, count)
    }

    /// See [`resample`](super::resample): along one axis, 0 to 2, of a part of the outputs, written into `out` at voxel `at`.
    fn block_resample(out: FloatTensor<Self>, at: [usize; 3], x: FloatTensor<Self>, axis: usize, taps: &Taps) -> FloatTensor<Self> {
        put_float::<Self>(out, at, generic::resample::<Self>(x, axis, taps))
    }

    /// See [`resample_grad`](super::resample_grad): along one axis, 0 to 2.
    fn block_resample_grad(grad: FloatTensor<Self>, axis: usize, taps: &Taps) -> FloatTensor<Self> {
        generic::resample_grad::<Self>(grad, axis, taps)
    }

    /// See [`channel_moments`](super::channel_moments).
    fn block_channel_moments(x: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        generic::channel_moments::<Self>(x)
    }

    /// See [`channel_norm`](super::channel_norm).
    fn block_channel_norm(x: FloatTensor<Self>, channels: &Channels<Self>) -> FloatTensor<Self> {
        generic::channel_norm::<Self>(x, channels)
    }

    /// See [`channel_grad_sums`](super::channel_grad_sums).
    fn block_channel_grad_sums(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        channels: &Channels<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        generic::channel_grad_sums::<Self>(x, grad, channels)
    }

    /// See [`channel_grad`](super::channel_grad).
    fn block_channel_grad(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        channels: &Channels<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        generic::channel_grad::<Self>(x, grad, channels, a, b)
    }

    /// Parameters, and their moments, after a step. All are of one type and shape; without `moments` these are zeros.
    fn block_adam(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        moments: Option<[FloatTensor<Self>; 2]>,
        step: &AdamStep,
    ) -> [FloatTensor<Self>; 3] {
        generic::adam::<Self>(x, grad, moments, step)
    }
}

#[cfg(feature = "cuda")]
impl LocalKernels for burn_cuda::Cuda {}

/// The one box of a block that has to lie in one.
pub(super) fn only<B: Backend>(x: &[Slab<B>]) -> FloatTensor<B> {
    let [(_, block)] = x else { panic!("a kernel that reads a block in one box got {}", x.len()) };
    block.clone()
}

/// The box of `out` `[N, C, ..]` that a part of `shape` at voxel `at` is, unless it is all of it.
fn box_of(out: &Shape, at: [usize; 3], shape: &Shape) -> Option<Vec<Slice>> {
    let slice = |start: usize, length: usize| Slice::new(start as isize, Some((start + length) as isize), 1);
    let slices = || [0, 0].into_iter().chain(at).zip(shape.iter()).map(|(start, length)| slice(start, *length)).collect();
    (shape != out).then(slices)
}

/// `out` `[N, C, ..]` with `part` of it, or all, written at voxel `at`.
pub(super) fn put_float<B: LocalKernels>(out: FloatTensor<B>, at: [usize; 3], part: FloatTensor<B>) -> FloatTensor<B> {
    match box_of(&out.shape(), at, &part.shape()) {
        Some(slices) => B::float_assign_box(out, &slices, part),
        None => part,
    }
}

/// [`put_float`] of integers.
pub(super) fn put_int<B: LocalKernels>(out: IntTensor<B>, at: [usize; 3], part: IntTensor<B>) -> IntTensor<B> {
    match box_of(&out.shape(), at, &part.shape()) {
        Some(slices) => B::int_assign_box(out, &slices, part),
        None => part,
    }
}
