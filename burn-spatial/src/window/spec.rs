//! What a user says of a window operation on a whole volume.

use serde::{Deserialize, Serialize};

use super::{Count, Position, Taps, Window, WindowAxis};

/// What lies outside a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PaddingMode {
    /// Zeros.
    #[default]
    Zeros,
    /// The other end of the volume.
    Periodic,
    /// The volume mirrored at its last voxel, which is not repeated.
    Reflect,
    /// The last voxel again and again.
    Replicate,
}

/// A 3D convolution. Arrays are depth, height, width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvSpec {
    /// Voxels between outputs.
    pub stride: [usize; 3],
    /// Voxels added before and after the volume.
    pub padding: [(usize, usize); 3],
    /// What these voxels hold.
    pub mode: PaddingMode,
    /// Voxels between taps.
    pub dilation: [usize; 3],
    /// Independent groups of channels.
    pub groups: usize,
}

impl Default for ConvSpec {
    /// Stride 1, no padding, dilation 1, one group.
    fn default() -> Self {
        ConvSpec { stride: [1; 3], padding: [(0, 0); 3], mode: PaddingMode::Zeros, dilation: [1; 3], groups: 1 }
    }
}

/// A 3D pool. Arrays are depth, height, width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolSpec {
    /// Taps.
    pub kernel: [usize; 3],
    /// Voxels between outputs.
    pub stride: [usize; 3],
    /// Voxels added on each side; uncounted minus infinity for a maximum.
    pub padding: [usize; 3],
    /// Voxels between taps.
    pub dilation: [usize; 3],
    /// Whether an average counts the padding.
    pub count_include_pad: bool,
    /// What an average divides the sum of a window by, instead of the number of voxels counted.
    pub divisor: Option<usize>,
    /// Whether the number of outputs is rounded up: a last window may reach beyond the padding if it starts inside the
    /// volume or the padding before it (PyTorch's rule). What lies beyond counts nowhere.
    pub ceil: bool,
}

/// How a volume is interpolated to another extent. Conventions are PyTorch's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum UpsampleMode {
    /// The voxel at floor(output / scale).
    #[default]
    Nearest,
    /// Between the two nearest voxels along each axis, in proportion to the distance.
    Trilinear,
}

/// A 3D interpolation. Arrays are depth, height, width.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpsampleSpec {
    /// Extents of the output.
    pub size: [usize; 3],
    /// Output voxels to one input voxel, where it is to be another than size / input extent.
    pub scale: Option<[f64; 3]>,
    /// How values between voxels are made.
    pub mode: UpsampleMode,
    /// Whether the centres of the first and last voxels of input and output coincide, instead of their outer faces.
    /// Of no meaning to [`UpsampleMode::Nearest`].
    pub align_corners: bool,
}

/// Why a window operation cannot be done.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// A number that must not be zero is.
    #[error("{what} of a window operation must be at least 1 along every axis, but is {got:?}")]
    Zero {
        /// Which number.
        what: &'static str,
        /// What was given.
        got: Vec<usize>,
    },
    /// The kernel reaches beyond the padded input.
    #[error(
        "along the {axis} the kernel spans {span} voxels, but the padded input has only {padded} ({input} + padding): use a smaller kernel or dilation, or more padding"
    )]
    KernelTooLarge {
        /// Depth, height or width.
        axis: &'static str,
        /// From the first to the last tap.
        span: usize,
        /// Input extent with padding.
        padded: usize,
        /// Input extent.
        input: usize,
    },
    /// A pool window could lie wholly in padding.
    #[error("along the {axis} the padding {padding} of a pool is more than half its kernel {kernel}")]
    PoolPadding {
        /// Depth, height or width.
        axis: &'static str,
        /// The padding.
        padding: usize,
        /// The kernel.
        kernel: usize,
    },
    /// An average would divide by zero.
    #[error("the divisor of an average pool must be at least 1, but is 0")]
    Divisor,
    /// Periodic padding reaches around more than once.
    #[error("along the {axis} the periodic padding {padding:?} is larger than the input extent {input}")]
    PeriodicPadding {
        /// Depth, height or width.
        axis: &'static str,
        /// Before and after.
        padding: (usize, usize),
        /// Input extent.
        input: usize,
    },
    /// Mirrored padding reaches around more than once.
    #[error("along the {axis} the mirrored padding {padding:?} must be smaller than the input extent {input}")]
    ReflectPadding {
        /// Depth, height or width.
        axis: &'static str,
        /// Before and after.
        padding: (usize, usize),
        /// Input extent.
        input: usize,
    },
    /// The padding of a transposed convolution takes away all of its output.
    #[error("along the {axis} the padding {padding} of a transposed convolution removes all of its output")]
    NoOutput {
        /// Depth, height or width.
        axis: &'static str,
        /// The padding.
        padding: usize,
    },
    /// A scale that no volume has.
    #[error("the scale factors of an interpolation must be positive and finite, but are {got:?}")]
    Scale {
        /// What was given.
        got: [f64; 3],
    },
    /// Channels and groups disagree.
    #[error("{input} input and {output} output channels do not divide into {groups} groups")]
    Groups {
        /// Input channels.
        input: usize,
        /// Output channels.
        output: usize,
        /// Groups.
        groups: usize,
    },
    /// The input has other channels than the weight.
    #[error("the input has {got} channels, but the weight is for {expected}")]
    Channels {
        /// Channels of the input.
        got: usize,
        /// Channels of the weight times groups.
        expected: usize,
    },
}

pub(crate) const AXES: [&str; 3] = ["depth", "height", "width"];

fn nonzero(what: &'static str, got: &[usize]) -> Result<(), SpecError> {
    if got.contains(&0) { Err(SpecError::Zero { what, got: got.to_vec() }) } else { Ok(()) }
}

/// One axis: floor((input + padding - span) / stride) + 1 outputs.
fn axis(i: usize, input: usize, kernel: usize, stride: usize, dilation: usize, (lo, hi): (usize, usize)) -> Result<WindowAxis, SpecError> {
    let (span, padded) = ((kernel - 1) * dilation + 1, input + lo + hi);
    let Some(room) = padded.checked_sub(span) else {
        return Err(SpecError::KernelTooLarge { axis: AXES[i], span, padded, input });
    };
    Ok(WindowAxis { input, output: room / stride + 1, kernel, stride, dilation, offset: lo as isize })
}

fn axes(f: impl Fn(usize) -> Result<WindowAxis, SpecError>) -> Result<Window, SpecError> {
    Ok([f(0)?, f(1)?, f(2)?])
}

impl ConvSpec {
    /// Whether the options alone make sense, for `channels` in and out.
    pub fn check(&self, channels: [usize; 2], kernel: [usize; 3]) -> Result<(), SpecError> {
        nonzero("the kernel", &kernel)?;
        nonzero("the stride", &self.stride)?;
        nonzero("the dilation", &self.dilation)?;
        nonzero("the number of groups", &[self.groups])?;
        let [input, output] = channels;
        if !input.is_multiple_of(self.groups) || !output.is_multiple_of(self.groups) {
            return Err(SpecError::Groups { input, output, groups: self.groups });
        }
        Ok(())
    }

    /// The windows over a whole input x for a weight, after checking that they fit, whatever the padding holds.
    pub fn window(&self, x: [usize; 5], weight: [usize; 5]) -> Result<Window, SpecError> {
        let ([_, channels, input @ ..], [out_channels, per_group, kernel @ ..]) = (x, weight);
        self.check([per_group * self.groups, out_channels], kernel)?;
        if channels != per_group * self.groups {
            return Err(SpecError::Channels { got: channels, expected: per_group * self.groups });
        }
        axes(|i| {
            let (lo, hi) = self.padding[i];
            let (padding, most) = ((lo, hi), lo.max(hi));
            match self.mode {
                PaddingMode::Periodic if most > input[i] => {
                    return Err(SpecError::PeriodicPadding { axis: AXES[i], padding, input: input[i] });
                }
                PaddingMode::Reflect if most > 0 && most >= input[i] => {
                    return Err(SpecError::ReflectPadding { axis: AXES[i], padding, input: input[i] });
                }
                _ => {}
            }
            axis(i, input[i], kernel[i], self.stride[i], self.dilation[i], (lo, hi))
        })
    }
}

impl PoolSpec {
    /// Windows of `kernel` side by side: stride as large, no padding, which would be counted, outputs rounded down.
    pub fn new(kernel: [usize; 3]) -> PoolSpec {
        PoolSpec { kernel, stride: kernel, padding: [0; 3], dilation: [1; 3], count_include_pad: true, divisor: None, ceil: false }
    }

    /// Whether the options alone make sense. As in PyTorch, padding is at most half the kernel, so that no window
    /// lies wholly in padding.
    pub fn check(&self) -> Result<(), SpecError> {
        nonzero("the kernel", &self.kernel)?;
        nonzero("the stride", &self.stride)?;
        nonzero("the dilation", &self.dilation)?;
        if self.divisor == Some(0) {
            return Err(SpecError::Divisor);
        }
        match (0..3).find(|&i| self.padding[i] > self.kernel[i] / 2) {
            Some(i) => Err(SpecError::PoolPadding { axis: AXES[i], padding: self.padding[i], kernel: self.kernel[i] }),
            None => Ok(()),
        }
    }

    /// The windows over a whole input x, after checking that they fit.
    pub fn window(&self, x: [usize; 5]) -> Result<Window, SpecError> {
        self.check()?;
        axes(|i| {
            let (input, stride, padding) = (x[2 + i], self.stride[i], self.padding[i]);
            // Up to a stride less one beyond the padding may be missing to the last window.
            let beyond = if self.ceil { stride.saturating_sub(1) } else { 0 };
            let mut axis = axis(i, input, self.kernel[i], stride, self.dilation[i], (padding, padding + beyond))?;
            if self.ceil && (axis.output - 1) * stride >= input + padding {
                axis.output -= 1;
            }
            Ok(axis)
        })
    }

    /// What an average over a volume of `extents` divides by.
    pub(crate) fn count(&self, extents: [usize; 3]) -> Count {
        match self.divisor {
            Some(divisor) => Count::Fixed(divisor),
            None if self.count_include_pad => Count::padded(self.padding, extents),
            None => Count::Inside,
        }
    }
}

impl UpsampleSpec {
    /// Whether the options make sense for x.
    pub fn check(&self, x: [usize; 5]) -> Result<(), SpecError> {
        nonzero("the input extent", &x[2..])?;
        nonzero("the output size", &self.size)?;
        match self.scale {
            Some(got) if !got.iter().all(|s| *s > 0.0 && s.is_finite()) => Err(SpecError::Scale { got }),
            _ => Ok(()),
        }
    }

    /// What the outputs read along each axis of a whole x.
    pub(crate) fn taps(&self, x: [usize; 5]) -> [Taps; 3] {
        std::array::from_fn(|i| {
            let (input, output) = (x[2 + i], self.size[i]);
            let ratio = self.scale.map_or(input as f64 / output as f64, |scale| 1.0 / scale[i]);
            match self.mode {
                UpsampleMode::Nearest => Taps::nearest_single(input, output, ratio),
                UpsampleMode::Trilinear => Taps::linear(input, output, Position::new(input, output, ratio, self.align_corners)),
            }
        })
    }
}

/// The padding (before, after) of one axis that gives ceil(input / stride) outputs: as little as possible, and where
/// it is odd the extra voxel lies behind (the convention of ONNX's SAME_UPPER and of TensorFlow). An even kernel with
/// stride 1 gets (kernel / 2 - 1, kernel / 2), k = 3 with stride 2 on an even extent (0, 1). Zero strides, kernels
/// and dilations count as 1.
pub fn same_padding(input: usize, kernel: usize, stride: usize, dilation: usize) -> (usize, usize) {
    let (kernel, stride, dilation) = (kernel.max(1), stride.max(1), dilation.max(1));
    let outputs = input.div_ceil(stride);
    let needed = outputs.saturating_sub(1) * stride + (kernel - 1) * dilation + 1;
    let total = needed.saturating_sub(input);
    (total / 2, total - total / 2)
}
