//! 3D interpolation.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Tensor, TensorPrimitive};

use super::{SpecError, UpsampleMode, UpsampleSpec, WindowBackend};

/// x `[N, C, D, H, W]` interpolated to `[N, C, size..]`, larger or smaller, with PyTorch's conventions.
///
/// # Panics
/// If x or the output has no voxels, or a scale is not positive; see [`SpecError`](super::SpecError).
pub fn upsample3d<B: WindowBackend>(x: Tensor<B, 5>, spec: &UpsampleSpec) -> Tensor<B, 5> {
    spec.check(x.dims()).unwrap_or_else(|e| panic!("upsample3d: {e}"));
    Tensor::from_primitive(TensorPrimitive::Float(B::upsample3d(x.into_primitive().tensor(), spec)))
}

/// Makes an [`Upsample3d`].
#[derive(Config, Debug)]
pub struct Upsample3dConfig {
    /// Extents of the output; comes before `scale_factor`.
    #[config(default = "None")]
    pub output_size: Option<[usize; 3]>,
    /// Output voxels to one input voxel; the output has floor(extent * factor) voxels.
    #[config(default = "None")]
    pub scale_factor: Option<[f64; 3]>,
    /// How values between voxels are made.
    #[config(default = "UpsampleMode::Nearest")]
    pub mode: UpsampleMode,
    /// Whether the centres of the first and last voxels of input and output coincide, instead of their outer faces.
    #[config(default = false)]
    pub align_corners: bool,
}

/// 3D interpolation: [`upsample3d`] as a module. Should be made with [`Upsample3dConfig`].
#[derive(Module, Clone, Debug)]
pub struct Upsample3d {
    /// Extents of the output.
    pub output_size: Option<[usize; 3]>,
    /// Output voxels to one input voxel, where the output's extents are not given.
    pub scale_factor: Option<[f64; 3]>,
    /// How values between voxels are made.
    pub mode: UpsampleMode,
    /// Whether the centres of the first and last voxels coincide.
    pub align_corners: bool,
}

impl Upsample3dConfig {
    /// The module.
    ///
    /// # Panics
    /// If neither a size nor a factor is given, or a factor is not positive.
    pub fn init(&self) -> Upsample3d {
        match (self.output_size, self.scale_factor) {
            (None, None) => panic!("Upsample3d: give output_size or scale_factor"),
            (None, Some(scale)) if !scale.iter().all(|s| *s > 0.0 && s.is_finite()) => {
                panic!("Upsample3d: {}", SpecError::Scale { got: scale })
            }
            _ => {}
        }
        Upsample3d { output_size: self.output_size, scale_factor: self.scale_factor, mode: self.mode, align_corners: self.align_corners }
    }
}

impl Upsample3d {
    /// `[N, C, D, H, W]` -> `[N, C, out..]`.
    ///
    /// # Panics
    /// If x has no voxels or the factor leaves none.
    pub fn forward<B: WindowBackend>(&self, x: Tensor<B, 5>) -> Tensor<B, 5> {
        let [_, _, input @ ..] = x.dims();
        let scale = self.scale_factor.filter(|_| self.output_size.is_none());
        let scaled = |i: usize| scale.map_or(input[i], |scale| (input[i] as f64 * scale[i]) as usize);
        let size = self.output_size.unwrap_or_else(|| std::array::from_fn(scaled));
        upsample3d(x, &UpsampleSpec { size, scale, mode: self.mode, align_corners: self.align_corners })
    }
}
