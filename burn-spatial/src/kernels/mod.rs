//! Local compute that the inner backend lacks or does slowly: window operations on one rank's block.

/// One axis of a window operation on a block. Tap `t` of output `o` reads input `o * stride + t * dilation - offset`;
/// what lies outside `0..input` is padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowAxis {
    /// Extent of the input block.
    pub input: usize,
    /// Extent of the output block.
    pub output: usize,
    /// Taps.
    pub kernel: usize,
    /// Step between outputs.
    pub stride: usize,
    /// Step between taps.
    pub dilation: usize,
    /// How far the first window starts before the block; negative when it starts inside.
    pub offset: isize,
}

/// Depth, height and width.
pub type Window = [WindowAxis; 3];
