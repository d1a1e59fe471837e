//! Halos: which part of a split axis a window needs beyond its own shard, who has it, and how it gets there.

pub mod exchange;
pub mod plan;
pub mod window;

pub use exchange::{exchange, exchange_add};
pub use plan::{AxisNeed, Piece, Plan};
pub use window::{AxisWindow, WindowPlan, pieces, scaled};
