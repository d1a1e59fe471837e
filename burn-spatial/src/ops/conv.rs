//! Burn's 3D convolutions as window operations with symmetric padding.

use burn_backend::ops::ConvOptions;

use crate::nn::ConvSpec;

/// Burn's options as a spec.
pub(crate) fn spec(options: &ConvOptions<3>) -> ConvSpec {
    ConvSpec {
        stride: options.stride,
        padding: options.padding.map(|p| (p, p)),
        dilation: options.dilation,
        groups: options.groups,
        ..ConvSpec::default()
    }
}
