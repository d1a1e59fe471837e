//! Burn's convolutions as window operations on volumes: options of one, two and three axes as specs.

use burn_backend::TensorMetadata;
use burn_backend::ops::{ConvOptions, ConvTransposeOptions};
use burn_std::Shape;

use super::window::{Tensor, Transposed, placed};
use crate::kernels::LocalKernels;
use crate::kind::Kind;
use crate::layout::{Axis, Layout};
use crate::tensor::SpatialTensor;
use crate::window::{AXES, AxisWindow, ConvSpec, PaddingMode, SpecError};

/// Numbers along the last axes of a volume, `fill` along the others.
pub(super) fn lifted<const N: usize>(values: [usize; N], fill: usize) -> [usize; 3] {
    std::array::from_fn(|i| (i + N).checked_sub(3).map_or(fill, |i| values[i]))
}

/// A shape with extents of 1 before its spatial ones.
pub(super) fn lifted_shape(shape: &Shape) -> [usize; 5] {
    let missing = 5 - shape.num_dims();
    std::array::from_fn(|i| if i < 2 { shape[i] } else { (i - 2).checked_sub(missing).map_or(1, |i| shape[2 + i]) })
}

/// A line or a plane `[N, C, ..]` as a volume; a convolution's weight likewise.
pub(super) fn volume<B: LocalKernels, K: Kind<B>>(tensor: SpatialTensor<B, K>) -> SpatialTensor<B, K> {
    let shape = lifted_shape(&tensor.shape());
    super::reshape(tensor, Shape::from(shape))
}

/// The volume that [`volume`] made of a tensor of `rank` dimensions as such a tensor.
pub(super) fn flat<B: LocalKernels, K: Kind<B>>(tensor: SpatialTensor<B, K>, rank: usize) -> SpatialTensor<B, K> {
    let shape = tensor.shape();
    let kept = (0..2).chain(2 + 5 - rank..5).map(|dim| shape[dim]);
    super::reshape(tensor, Shape::from(kept.collect::<Vec<_>>()))
}

/// Burn's options as a spec.
pub(super) fn spec<const N: usize>(options: &ConvOptions<N>) -> ConvSpec {
    ConvSpec {
        stride: lifted(options.stride, 1),
        padding: lifted(options.padding, 0).map(|p| (p, p)),
        dilation: lifted(options.dilation, 1),
        groups: options.groups,
        ..ConvSpec::default()
    }
}

/// Burn's options of a transposed convolution along three axes.
struct Options {
    stride: [usize; 3],
    padding: [usize; 3],
    padding_out: [usize; 3],
    dilation: [usize; 3],
    groups: usize,
}

impl Options {
    fn of<const N: usize>(options: &ConvTransposeOptions<N>) -> Options {
        Options {
            stride: lifted(options.stride, 1),
            padding: lifted(options.padding, 0),
            padding_out: lifted(options.padding_out, 0),
            dilation: lifted(options.dilation, 1),
            groups: options.groups,
        }
    }

    fn span(&self, i: usize, kernel: usize) -> usize {
        (kernel - 1) * self.dilation[i] + 1
    }

    /// For x of `extents` and a weight `[Cin, Cout / groups, kernel..]`.
    fn transposed(&self, extents: [usize; 3], weight: [usize; 5]) -> Result<Transposed, SpecError> {
        let [cin, per_group, kernel @ ..] = weight;
        let channels = per_group * self.groups;
        ConvSpec { stride: self.stride, dilation: self.dilation, groups: self.groups, ..Default::default() }
            .check([channels, cin], kernel)?;
        let mut y = [0; 3];
        for i in 0..3 {
            let all = extents[i].saturating_sub(1) * self.stride[i] + self.span(i, kernel[i]) + self.padding_out[i];
            y[i] = all
                .checked_sub(2 * self.padding[i])
                .filter(|n| *n > 0)
                .ok_or(SpecError::NoOutput { axis: AXES[i], padding: self.padding[i] })?;
        }
        let windows = std::array::from_fn(|i| AxisWindow {
            kernel: kernel[i],
            stride: self.stride[i],
            dilation: self.dilation[i],
            low: self.padding[i],
            high: 0,
            mode: PaddingMode::Zeros,
        });
        Ok(Transposed { channels, extents: y, windows, groups: self.groups })
    }
}

/// The transposed convolution of a volume x.
pub(super) fn transposed<const N: usize>(options: &ConvTransposeOptions<N>, x: [usize; 5], weight: [usize; 5]) -> Transposed {
    let [_, channels, extents @ ..] = x;
    if channels != weight[0] {
        panic!("{}", SpecError::Channels { got: channels, expected: weight[0] });
    }
    Options::of(options).transposed(extents, weight).unwrap_or_else(|error| panic!("{error}"))
}

/// How a gradient lies, or would if it were not the same everywhere: as volumes usually do.
fn spread<B: LocalKernels>(grad: &Tensor<B>) -> Layout {
    let usual = Layout::volume(&grad.shape(), grad.context().mesh.grid());
    [0, 2, 3, 4].into_iter().filter(|dim| grad.layout().is_uniform_dim(*dim)).fold(grad.layout().clone(), |layout, dim| {
        let free = usual.dim(dim).iter().filter_map(Axis::as_split).all(|(mesh, _)| !layout.split_over().contains(mesh));
        if free { layout.with_dim(dim, usual.dim(dim).to_vec()) } else { layout }
    })
}

/// The gradient of a transposed convolution's x from that of its output, a volume. The place of x is the one whose
/// output lies as `grad`.
pub(super) fn transposed_x_grad<B: LocalKernels, const N: usize>(
    weight: Tensor<B>,
    grad: Tensor<B>,
    options: &ConvTransposeOptions<N>,
) -> Tensor<B> {
    let weight_dims = lifted_shape(&weight.shape());
    let options = Options::of(options);
    let extents = std::array::from_fn(|i| {
        let all = grad.layout().extent(2 + i) + 2 * options.padding[i];
        (all - options.span(i, weight_dims[2 + i]) - options.padding_out[i]) / options.stride[i] + 1
    });
    let transposed = options.transposed(extents, weight_dims).unwrap_or_else(|error| panic!("{error}"));
    let x = placed(&spread(&grad), extents).1.with_dim(1, vec![Axis::full(weight_dims[0])]);
    transposed.x_grad(&x, weight, grad)
}
