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
pub(crate) use simd::{Isa, Real};
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
    let mut out = Vec::with_capacity(count * each);
    if count * each > 0 {
        let chunks = out.spare_capacity_mut()[..count * each].par_chunks_exact_mut(each);
        chunks.enumerate().for_each(|(i, chunk)| write(i, chunk));
    }
    // SAFETY: every value is written.
    unsafe { out.set_len(count * each) };
    out
}

/// Values of a dense tensor, as a place to write some of them.
pub(crate) fn space<T: Element + bytemuck::Pod>(tensor: &mut FlexTensor) -> &mut [MaybeUninit<T>] {
    let values = tensor.storage_mut::<T>();
    // SAFETY: what is initialised stays so: only values are written.
    unsafe { &mut *(std::ptr::from_mut(values) as *mut [MaybeUninit<T>]) }
}

/// A tensor of any values, for a result that is written part by part.
pub(crate) fn unwritten<T: Element + bytemuck::Pod + Default + Send + Sync>(shape: Shape) -> FlexTensor {
    let len = shape.num_elements();
    let mut values = Vec::<T>::with_capacity(len);
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[allow(clippy::uninit_vec, reason = "the compiler has to think that the code has written the values")]
    // SAFETY: there is room for the values, and any bits are one. What is no code to the machine may, to the compiler, have
    // written to the buffer.
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
    // SAFETY: every value is written.
    unsafe { &mut *(std::ptr::from_mut(chunk) as *mut [T]) }
}

#[cfg(test)]
mod tests;
