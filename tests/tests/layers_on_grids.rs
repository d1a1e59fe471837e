//! Modules, losses and the optimizer on thread ranks, on every grid, against PyTorch's values.

burn_spatial_tests::on_threads! {
    layers:
    batch_norm,
    misc,
    adam,
    block,
}
