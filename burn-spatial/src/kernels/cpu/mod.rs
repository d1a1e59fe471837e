//! Kernels for the CPU backend's buffers: f32 and f64, AVX-512, AVX2 or portable code, threads through rayon.

use std::mem::MaybeUninit;

use burn_backend::{Element, Shape, TensorMetadata};
use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;
use rayon::prelude::*;

mod activation;
pub(crate) mod boxes;
mod broadcast;
mod conv;
pub(crate) mod norm;
mod pool;
mod resample;
mod simd;
mod slab;

pub(crate) use activation::{Activation, activation_grad};
pub use broadcast::Arithmetic;
pub(crate) use broadcast::{Runs, dense};
pub(crate) use conv::{Conv, Operands};
pub(crate) use pool::{average, average_grad, max, max_grad};
pub(crate) use resample::{resample, resample_grad};
pub(crate) use simd::{Isa, Real, Set};
pub(crate) use slab::{Place, Slab};

/// The elements of a contiguous tensor.
pub(crate) fn slice<T: Real>(tensor: &FlexTensor) -> &[T] {
    let (start, end) = tensor.layout().contiguous_offsets().unwrap_or_default();
    &tensor.storage::<T>()[start..end]
}

/// Bytes of a tensor's values.
pub(crate) fn bytes(tensor: &FlexTensor) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}

/// A tensor of `values`.
pub(crate) fn tensor<T: Element + bytemuck::Pod + Send + Sync>(values: Vec<T>, shape: [usize; 5]) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(Shape::from(shape)), T::dtype())
}

/// `count` chunks of `each` values, of which `write(i, chunk)` writes each, in parallel: large buffers are not filled
/// with zeros first.
///
/// # Safety
/// `write` must write every value of its chunk.
pub(crate) unsafe fn written<T: Real>(count: usize, each: usize, write: impl Fn(usize, &mut [MaybeUninit<T>]) + Sync) -> Vec<T> {
    let len = product([count, each]);
    let mut out = Vec::with_capacity(len);
    if len > 0 {
        let chunks = out.spare_capacity_mut()[..len].par_chunks_exact_mut(each);
        chunks.enumerate().for_each(|(i, chunk)| write(i, chunk));
    }
    // SAFETY: there is room for the values, whole chunks, every value of which has been written as the caller promises.
    unsafe { out.set_len(len) };
    out
}

/// A product of extents.
///
/// # Panics
/// If it is larger than any buffer.
pub(crate) fn product<const N: usize>(extents: [usize; N]) -> usize {
    let all = extents.iter().try_fold(1usize, |all, extent| all.checked_mul(*extent));
    all.filter(|all| *all <= isize::MAX as usize / 16).unwrap_or_else(|| panic!("a volume of {extents:?} values is too large"))
}

/// Values of a dense tensor, as a place to write some of them.
///
/// # Safety
/// Only values may be written, nothing uninitialised.
pub(crate) unsafe fn space<T: Element + bytemuck::Pod>(tensor: &mut FlexTensor) -> &mut [MaybeUninit<T>] {
    let values = tensor.storage_mut::<T>();
    // SAFETY: the layout is the same, and what is initialised stays so, as the caller promises.
    unsafe { &mut *(std::ptr::from_mut(values) as *mut [MaybeUninit<T>]) }
}

/// A tensor of any values, for a result that is written part by part: zeros would be one more pass over memory.
///
/// What `Vec::with_capacity` gives is uninitialised to the compiler, and to read or reference it as values would be undefined
/// behaviour, even though no kernel reads a value that it has not written. So its address is passed to inline assembly that is empty, but opaque: as far as the compiler can know, it may have
/// stored any bytes there, and what lies there afterwards is some fixed value. That the memory itself is real (of the process, with
/// bytes of some kind in each cell) is the allocator's part; of these element types any bytes are a value. Where the compiler has
/// no inline assembly the values are written.
pub(crate) fn unwritten<T: Element + bytemuck::Pod + Default + Send + Sync>(shape: Shape) -> FlexTensor {
    let len = shape.num_elements();
    let mut values = Vec::<T>::with_capacity(len);
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[allow(clippy::uninit_vec, reason = "the opaque assembly stands for a write of all values")]
    // SAFETY: there is room for `len` values. The assembly does nothing to the machine; its default options say that it may write
    // memory that it has a pointer to, so that the values count as written, with whatever bytes there are, and any bits are a
    // value of a `Pod` type.
    unsafe {
        std::arch::asm!("/* {} */", in(reg) values.as_mut_ptr(), options(nostack, preserves_flags));
        values.set_len(len);
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    values.resize(len, T::default());
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape), T::dtype())
}

/// The chunk, after `value` was written everywhere.
pub(crate) fn filled<T: Copy>(chunk: &mut [MaybeUninit<T>], value: T) -> &mut [T] {
    chunk.fill(MaybeUninit::new(value));
    // SAFETY: every value is written, and the layout is the same.
    unsafe { &mut *(std::ptr::from_mut(chunk) as *mut [T]) }
}

#[cfg(test)]
mod tests;
