//! A window operation on a block, and what its averages divide by.

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

impl WindowAxis {
    /// Inputs from the first to the last one read, padding included.
    pub fn span(&self) -> usize {
        self.output.saturating_sub(1) * self.stride + (self.kernel - 1) * self.dilation + 1
    }
}

/// Depth, height and width.
pub type Window = [WindowAxis; 3];

/// What an average divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Count {
    /// The number of taps before these positions of the block, where the padding behind it ends.
    Padded([isize; 3]),
    /// The number of taps at positions of the block from the first up to before the second.
    Between([[isize; 2]; 3]),
    /// The number of taps that read inside the input block.
    Inside,
    /// This number, whatever a window reads.
    Fixed(usize),
}

impl Count {
    /// Taps in a volume of `extents`, which is the block, and in `padding` around it are counted.
    pub(crate) fn padded(padding: [usize; 3], extents: [usize; 3]) -> Count {
        Count::Padded(std::array::from_fn(|i| (extents[i] + padding[i]) as isize))
    }

    /// The same for a box of the block that starts at `start`.
    pub(crate) fn from(self, start: [usize; 3]) -> Count {
        self.at(start.map(|start| start as isize))
    }

    /// The same for a block whose first voxel is the one at `origin` of this one.
    pub(crate) fn at(self, origin: [isize; 3]) -> Count {
        match self {
            Count::Padded(ends) => Count::Padded(std::array::from_fn(|i| ends[i] - origin[i])),
            Count::Between(ranges) => Count::Between(std::array::from_fn(|i| ranges[i].map(|end| end - origin[i]))),
            count => count,
        }
    }

    /// The same for a box of the block of `window` that starts at `start` and lacks some of what its outputs read.
    pub(crate) fn within(self, window: &Window, start: [usize; 3]) -> Count {
        match self {
            Count::Inside => Count::Between(window.map(|axis| [0, axis.input as isize])).from(start),
            count => count.from(start),
        }
    }

    /// How many taps of output `o` along axis `i` of a window are counted; 1 where there are none. The product over the axes is
    /// what is divided by.
    pub(crate) fn of(self, i: usize, axis: &WindowAxis, o: usize) -> usize {
        let start = (o * axis.stride) as isize - axis.offset;
        let counted = match self {
            Count::Padded(ends) => isize::MIN..ends[i],
            Count::Between(ranges) => ranges[i][0]..ranges[i][1],
            Count::Inside => 0..axis.input as isize,
            Count::Fixed(divisor) => return if i == 0 { divisor } else { 1 },
        };
        (0..axis.kernel).filter(|t| counted.contains(&(start + (t * axis.dilation) as isize))).count().max(1)
    }
}
