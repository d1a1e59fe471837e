//! What moves between ranks. A [`Plan`] says who sends which box to whom; an [`Exchange`] carries it out; a redistribution
//! brings a tensor from one layout to another.
//!
//! | path | when |
//! |---|---|
//! | [`exchange()`] | every rank gets the block it needs, whole: redistributions |
//! | [`Exchange::start`], then [`Exchange::receive`] | halos, which are on their way while the interior is computed |
//! | [`exchange_add`] | the adjoint: boxes go back where they came from, and are added |

mod cache;
pub(crate) mod collective;
mod exchange;
mod plan;
mod redistribute;

pub(crate) use cache::{KeyedPlan, Plans};
pub(crate) use exchange::{Arrival, slices};
pub use exchange::{Exchange, assemble, exchange, exchange_add};
pub use plan::{Message, Plan, Region};
pub(crate) use redistribute::redistribute;
