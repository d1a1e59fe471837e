//! Where the time goes: `tracing` spans of level debug, on the rank's thread, around everything that takes long. Their
//! targets say what they are; any subscriber can sum or draw them.

/// Local computation by the kernels for windows and norms.
pub const KERNEL: &str = "burn_spatial::kernel";
/// Halo exchanges, waits and copies included.
pub const HALO: &str = "burn_spatial::halo";
/// Sums and other reductions over ranks, waits and copies included.
pub const REDUCE: &str = "burn_spatial::reduce";
/// Changes of layout.
pub const LAYOUT: &str = "burn_spatial::layout";
/// Steps of [`Adam`](crate::optim::Adam).
pub const OPTIMIZER: &str = "burn_spatial::optimizer";

/// All of them.
pub const TARGETS: [&str; 5] = [KERNEL, HALO, REDUCE, LAYOUT, OPTIMIZER];

/// Opens a span until the end of the block.
macro_rules! timed {
    ($target:ident, $name:literal) => {
        let _span = tracing::debug_span!(target: $crate::trace::$target, $name).entered();
    };
}
pub(crate) use timed;
