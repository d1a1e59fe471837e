//! 3D pools.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorPrimitive};

use super::{PoolSpec, WindowBackend};

/// The largest value of each window of x `[N, C, D, H, W]`, and its flat position in the volume D x H x W. Padding is
/// never the largest; of equal values the first in scan order counts; NaN propagates.
///
/// # Panics
/// If the spec does not fit x; see [`SpecError`](super::SpecError).
pub fn max_pool3d<B: WindowBackend>(x: Tensor<B, 5>, spec: &PoolSpec) -> (Tensor<B, 5>, Tensor<B, 5, Int>) {
    spec.window(x.dims()).unwrap_or_else(|e| panic!("max_pool3d: {e}"));
    let (out, indices) = B::max_pool3d(x.into_primitive().tensor(), spec);
    (Tensor::from_primitive(TensorPrimitive::Float(out)), Tensor::from_primitive(indices))
}

/// The mean of each window of x `[N, C, D, H, W]`.
///
/// # Panics
/// If the spec does not fit x; see [`SpecError`](super::SpecError).
pub fn avg_pool3d<B: WindowBackend>(x: Tensor<B, 5>, spec: &PoolSpec) -> Tensor<B, 5> {
    spec.window(x.dims()).unwrap_or_else(|e| panic!("avg_pool3d: {e}"));
    Tensor::from_primitive(TensorPrimitive::Float(B::avg_pool3d(x.into_primitive().tensor(), spec)))
}

/// Makes a [`MaxPool3d`].
#[derive(Config, Debug)]
pub struct MaxPool3dConfig {
    /// Taps along depth, height and width.
    pub kernel_size: [usize; 3],
    /// Voxels between windows; the kernel size if not given.
    #[config(default = "kernel_size")]
    pub strides: [usize; 3],
    /// Voxels added on each side, at most half the kernel.
    #[config(default = "[0, 0, 0]")]
    pub padding: [usize; 3],
    /// Voxels between taps.
    #[config(default = "[1, 1, 1]")]
    pub dilation: [usize; 3],
    /// Whether the number of outputs is rounded up; see [`PoolSpec::ceil`].
    #[config(default = "false")]
    pub ceil_mode: bool,
}

/// 3D maximum pool: [`max_pool3d`] as a module. Should be made with [`MaxPool3dConfig`].
#[derive(Module, Clone, Debug)]
pub struct MaxPool3d {
    /// Taps along depth, height and width.
    pub kernel_size: [usize; 3],
    /// Voxels between windows.
    pub stride: [usize; 3],
    /// Voxels added on each side.
    pub padding: [usize; 3],
    /// Voxels between taps.
    pub dilation: [usize; 3],
    /// Whether the number of outputs is rounded up.
    pub ceil_mode: bool,
}

impl MaxPool3dConfig {
    /// The module.
    ///
    /// # Panics
    /// On a zero kernel, stride or dilation and on padding of more than half the kernel.
    pub fn init(&self) -> MaxPool3d {
        let pool = MaxPool3d {
            kernel_size: self.kernel_size,
            stride: self.strides,
            padding: self.padding,
            dilation: self.dilation,
            ceil_mode: self.ceil_mode,
        };
        pool.spec().check().unwrap_or_else(|e| panic!("MaxPool3d: {e}"));
        pool
    }
}

impl MaxPool3d {
    fn spec(&self) -> PoolSpec {
        PoolSpec {
            kernel: self.kernel_size,
            stride: self.stride,
            padding: self.padding,
            dilation: self.dilation,
            count_include_pad: false,
            divisor: None,
            ceil: self.ceil_mode,
        }
    }

    /// `[N, C, D, H, W]` -> `[N, C, out..]` with out = floor((in + 2 padding - (kernel - 1) dilation - 1) / stride) + 1,
    /// or more with `ceil_mode`.
    ///
    /// # Panics
    /// If the kernel is larger than the padded input.
    pub fn forward<B: WindowBackend>(&self, x: Tensor<B, 5>) -> Tensor<B, 5> {
        max_pool3d(x, &self.spec()).0
    }
}

/// Makes an [`AvgPool3d`].
#[derive(Config, Debug)]
pub struct AvgPool3dConfig {
    /// Taps along depth, height and width.
    pub kernel_size: [usize; 3],
    /// Voxels between windows; the kernel size if not given.
    #[config(default = "kernel_size")]
    pub strides: [usize; 3],
    /// Zeros added on each side, at most half the kernel.
    #[config(default = "[0, 0, 0]")]
    pub padding: [usize; 3],
    /// Whether the mean counts the padding.
    #[config(default = "true")]
    pub count_include_pad: bool,
    /// What the sum of a window is divided by, instead of the number of voxels counted.
    pub divisor_override: Option<usize>,
    /// Whether the number of outputs is rounded up; see [`PoolSpec::ceil`].
    #[config(default = "false")]
    pub ceil_mode: bool,
}

/// 3D average pool: [`avg_pool3d`] as a module. Should be made with [`AvgPool3dConfig`].
#[derive(Module, Clone, Debug)]
pub struct AvgPool3d {
    /// Taps along depth, height and width.
    pub kernel_size: [usize; 3],
    /// Voxels between windows.
    pub stride: [usize; 3],
    /// Zeros added on each side.
    pub padding: [usize; 3],
    /// Whether the mean counts the padding.
    pub count_include_pad: bool,
    /// What the sum of a window is divided by, instead of the number of voxels counted.
    #[module(skip)]
    pub divisor_override: Option<usize>,
    /// Whether the number of outputs is rounded up.
    pub ceil_mode: bool,
}

impl AvgPool3dConfig {
    /// The module.
    ///
    /// # Panics
    /// On a zero kernel, stride or divisor and on padding of more than half the kernel.
    pub fn init(&self) -> AvgPool3d {
        let pool = AvgPool3d {
            kernel_size: self.kernel_size,
            stride: self.strides,
            padding: self.padding,
            count_include_pad: self.count_include_pad,
            divisor_override: self.divisor_override,
            ceil_mode: self.ceil_mode,
        };
        pool.spec().check().unwrap_or_else(|e| panic!("AvgPool3d: {e}"));
        pool
    }
}

impl AvgPool3d {
    fn spec(&self) -> PoolSpec {
        PoolSpec {
            kernel: self.kernel_size,
            stride: self.stride,
            padding: self.padding,
            dilation: [1; 3],
            count_include_pad: self.count_include_pad,
            divisor: self.divisor_override,
            ceil: self.ceil_mode,
        }
    }

    /// `[N, C, D, H, W]` -> `[N, C, out..]` with out = floor((in + 2 padding - kernel) / stride) + 1, or more with
    /// `ceil_mode`.
    ///
    /// # Panics
    /// If the kernel is larger than the padded input.
    pub fn forward<B: WindowBackend>(&self, x: Tensor<B, 5>) -> Tensor<B, 5> {
        avg_pool3d(x, &self.spec())
    }
}
