//! Adam in one pass, and what concerns the gradients of a whole model: their norm, and their layouts. All is collective
//! where a gradient is split or on its way.

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

pub use crate::adam::{Adam, AdamBackend};
use crate::kind::accumulator;
use crate::place::{self, SpatialBackend};

/// The Euclidean norm of all gradients of `model` together, in single precision for those of half; 0 without any.
pub fn gradient_norm<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    gradients: &GradientsParams,
    device: &B::Device,
) -> Tensor<B::InnerBackend, 1> {
    struct Squares<'a, B: AutodiffBackend>(&'a GradientsParams, Tensor<B::InnerBackend, 1>);

    impl<B: AutodiffBackend> ModuleVisitor<B> for Squares<'_, B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(gradient) = self.0.get::<B::InnerBackend, D>(param.id) {
                // Squares of half precision exceed its range, or vanish.
                let dtype = accumulator(gradient.dtype());
                self.1 = self.1.clone().cast(dtype) + gradient.cast(dtype).square().sum();
            }
        }
    }

    let mut squares = Squares::<B>(gradients, Tensor::zeros([1], device));
    model.visit(&mut squares);
    squares.1.sqrt()
}

/// `gradients` with every one whole on every rank, as parameters are. Needed only where a parameter of a volume's own
/// shape meets a split volume element by element: its gradient is split like the volume, and so would be the
/// optimizer's moments and, after a step, the parameter.
pub fn whole_gradients<B, M>(model: &M, gradients: GradientsParams) -> GradientsParams
where
    B: AutodiffBackend,
    B::InnerBackend: SpatialBackend,
    M: AutodiffModule<B>,
{
    struct Whole(GradientsParams, GradientsParams);

    impl<B: AutodiffBackend> ModuleVisitor<B> for Whole
    where
        B::InnerBackend: SpatialBackend,
    {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(gradient) = self.0.remove::<B::InnerBackend, D>(param.id) {
                self.1.register::<B::InnerBackend, D>(param.id, place::to_full(gradient));
            }
        }
    }

    let mut whole = Whole(gradients, GradientsParams::new());
    model.visit(&mut whole);
    whole.1
}
