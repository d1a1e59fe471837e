//! The activation behind convolutions and batch norms.

use burn_backend::ElementConversion;
use rayon::prelude::*;

use super::simd::vectorised;
use super::{Isa, Real};

/// A leaky ReLU: what is negative is multiplied by a slope. With slope 0 it is a ReLU, for which 0 counts as negative, as in
/// Burn's; not in its leaky ReLU.
#[derive(Clone, Copy)]
pub(crate) struct Activation<T> {
    slope: T,
    relu: bool,
}

impl<T: Real> Activation<T> {
    pub(crate) fn new(slope: T) -> Activation<T> {
        Activation { slope, relu: slope == T::default() }
    }

    /// [`Activation::new`], unless it changes nothing.
    pub(crate) fn changing(slope: T) -> Option<Activation<T>> {
        (slope != 1.0.elem::<T>()).then(|| Activation::new(slope))
    }

    #[inline(always)]
    pub(crate) fn apply(self, y: T) -> T {
        self.back(y, y)
    }

    /// The gradient before the activation. `y` is a value before it; if the slope is not negative, one behind it does too.
    #[inline(always)]
    pub(crate) fn back(self, y: T, grad: T) -> T {
        let negative = (y < T::default()) | (self.relu & (y == T::default()));
        // No product, or infinity would become NaN.
        let below = if self.relu { T::default() } else { grad * self.slope };
        if negative { below } else { grad }
    }
}

vectorised! {
    fn chunk_grad<T>(y: &[T], grad: &mut [T], activation: Activation<T>) {
        grad.iter_mut().zip(y).for_each(|(grad, y)| *grad = activation.back(*y, *grad));
    }
}

/// Makes `grad`, that of the activated `y`, the one before the activation.
pub(crate) fn activation_grad<T: Real>(isa: Isa, y: &[T], grad: &mut [T], slope: T) {
    const CHUNK: usize = 1 << 14;
    let activation = Activation::new(slope);
    grad.par_chunks_mut(CHUNK).zip(y.par_chunks(CHUNK)).for_each(|(grad, y)| chunk_grad(isa, y, grad, activation));
}
