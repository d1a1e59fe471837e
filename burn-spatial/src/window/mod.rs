//! Windows: which inputs an output reads, on the whole volume, on the block of a rank, and in parts of that block. Pure
//! index arithmetic, without tensors and without communication.
//!
//! - `spec`: what a user says of it;
//! - `global`: one axis of the whole volume, and from it what each rank needs and its window on the block that it assembles;
//! - `local`: the window on a block;
//! - `parts`: the interior, which needs no halo, the boundary, and the outputs that read a box;
//! - `taps`: the weights of an interpolation.

mod global;
mod local;
pub(crate) mod parts;
mod spec;
mod taps;

pub use global::{AxisWindow, WindowPlan, pieces, scaled};
pub use local::{Count, Window, WindowAxis};
pub(crate) use spec::AXES;
pub use spec::{ConvSpec, PaddingMode, PoolSpec, SpecError, UpsampleMode, UpsampleSpec, same_padding};
pub use taps::{Position, Taps};
