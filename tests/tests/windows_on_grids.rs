//! Convolutions and pools of split volumes on thread ranks, on every grid.

burn_spatial_tests::on_threads! {
    windows:
    conv3d,
    avg_pool3d,
    max_pool3d,
}
