//! Windows: which inputs an output reads, on the whole volume, on the block of a rank, and in parts of that block. Pure
//! index arithmetic, without tensors and without communication.
//!
//! - `global`: one axis of the whole volume, and from it what each rank needs and its window on the block that it assembles;
//! - `parts`: the interior, which needs no halo, the boundary, and the outputs that read a box;
//! - `taps`: the weights of an interpolation.

mod global;
pub(crate) mod parts;
mod taps;

pub use global::{AxisWindow, WindowPlan, pieces, scaled};
pub use taps::{Position, Taps};
