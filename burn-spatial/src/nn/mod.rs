//! Modules that Burn lacks, for the inner backends, `Spatial<B>` and `Autodiff` of either.
