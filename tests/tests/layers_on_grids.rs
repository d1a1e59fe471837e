//! Modules, losses and the optimizer on thread ranks, on every grid, against PyTorch's values.

burn_spatial_tests::on_threads! {
    layers:
    batch_norm,
    fused_batch_norm,
    batch_norm_with_activation,
    batch_norm_communicates_little,
    convolution_with_activation,
    whole_volume,
    misc,
    adam,
    block,
}
