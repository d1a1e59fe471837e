//! Kernels for the CPU backend's buffers: f32 and f64, AVX-512, AVX2 or portable code, threads through rayon.

use burn_backend::{Element, Shape};
use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;

pub(crate) mod boxes;
mod broadcast;
mod conv;
pub(crate) mod norm;
mod pool;
mod resample;
mod simd;

pub use broadcast::Arithmetic;
pub(crate) use broadcast::{Runs, dense};
pub(crate) use conv::Conv;
pub(crate) use pool::{average, average_grad, max, max_grad};
pub(crate) use resample::{resample, resample_grad};
pub(crate) use simd::{Isa, Real};

/// The elements of a contiguous tensor.
pub(crate) fn slice<T: Real>(tensor: &FlexTensor) -> &[T] {
    let (start, end) = tensor.layout().contiguous_offsets().unwrap_or_default();
    &tensor.storage::<T>()[start..end]
}

/// A tensor of `values`.
pub(crate) fn tensor<T: Element + bytemuck::Pod + Send + Sync>(values: Vec<T>, shape: [usize; 5]) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(Shape::from(shape)), T::dtype())
}

#[cfg(test)]
mod tests;
