//! What a window operation on a whole volume is, and the backends that can run it.

use std::fmt::Debug;

use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::tensor::{FloatTensor, IntTensor};

use super::NormBackend;
use crate::window::{ConvSpec, PoolSpec, UpsampleSpec};

/// A backend that runs window operations on whole volumes `[N, C, D, H, W]`. Specs are taken to fit the shapes: the
/// modules check that with [`ConvSpec::window`], [`PoolSpec::window`] and [`UpsampleSpec::check`]. On a backend that
/// splits volumes every method is collective.
pub trait WindowBackend: NormBackend {
    /// What a backward pass needs to know of an input without keeping its values: its shape, or its layout on a
    /// backend that splits volumes.
    type Placement: Clone + Send + Sync + Debug + 'static;

    /// The placement of `x`.
    fn placement(x: &FloatTensor<Self>) -> Self::Placement;

    /// Convolution: x `[N, Cin, in..]`, weight `[Cout, Cin / groups, kernel..]`, bias `[Cout]` -> `[N, Cout, out..]`. Negative
    /// results are multiplied by `slope`, which is not negative itself: 1 without an activation, 0 for a ReLU, between them
    /// for a leaky one.
    fn conv3d_padded(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        slope: f64,
        spec: &ConvSpec,
    ) -> FloatTensor<Self>;

    /// The gradient before the convolution's activation, from that of its result y: times `slope` where y is negative, as y
    /// is where the sum was. Where y is 0 (also because so small a product is) a leaky ReLU passes the gradient on, and a
    /// ReLU, which is slope 0, does not: as Burn's. NaN passes it on.
    fn activation_grad(y: FloatTensor<Self>, grad: FloatTensor<Self>, slope: f64) -> FloatTensor<Self>;

    /// The gradient of the convolution's x, from the one before its activation, as are those of weight and bias.
    fn conv3d_padded_x_grad(x: &Self::Placement, weight: FloatTensor<Self>, grad: FloatTensor<Self>, spec: &ConvSpec) -> FloatTensor<Self>;

    /// The gradient of the convolution's weight.
    fn conv3d_padded_weight_grad(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        weight_shape: [usize; 5],
        spec: &ConvSpec,
    ) -> FloatTensor<Self>;

    /// The gradient of the convolution's bias: the sum over everything but channels.
    fn conv3d_padded_bias_grad(grad: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The maxima `[N, C, out..]` and where each lies: its flat position in the volume D x H x W. The first maximum
    /// in scan order wins, NaN propagates.
    fn max_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> (FloatTensor<Self>, IntTensor<Self>);

    /// The gradient of the maximum's x.
    fn max_pool3d_grad(x: &Self::Placement, grad: FloatTensor<Self>, indices: IntTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self>;

    /// The means `[N, C, out..]`.
    fn avg_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self>;

    /// The gradient of the mean's x.
    fn avg_pool3d_grad(x: &Self::Placement, grad: FloatTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self>;

    /// x interpolated to `[N, C, size..]`.
    fn upsample3d(x: FloatTensor<Self>, spec: &UpsampleSpec) -> FloatTensor<Self>;

    /// The gradient of the interpolation's x.
    fn upsample3d_grad(x: &Self::Placement, grad: FloatTensor<Self>, spec: &UpsampleSpec) -> FloatTensor<Self>;

    /// x with its volume whole on every rank, where it is split; the batch stays as it is.
    fn whole_volume(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// `[N, C, D, H, W]` with its volume whole on every rank, for what follows the convolutions: dense layers are computed on
/// all ranks alike then, and their weights' gradients sum over the batch alone. For volumes of few voxels: where they are
/// more than the weights of what follows, leave them split. Collective.
pub fn whole_volume<B: WindowBackend>(x: Tensor<B, 5>) -> Tensor<B, 5> {
    Tensor::from_primitive(TensorPrimitive::Float(B::whole_volume(x.into_primitive().tensor())))
}
