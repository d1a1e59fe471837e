//! Halos: which part of a split axis a window needs beyond its own shard, who has it, and how it gets there.

pub mod exchange;
pub mod plan;
pub mod window;

pub(crate) use exchange::{Arrival, slices};
pub use exchange::{Exchange, assemble, exchange, exchange_add};
pub use plan::{AxisNeed, Piece, Plan, Region};
pub use window::{AxisWindow, WindowPlan, pieces, scaled};
