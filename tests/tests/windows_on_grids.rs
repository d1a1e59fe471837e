//! Convolutions, pools and interpolations of split volumes on thread ranks, on every grid.

burn_spatial_tests::on_threads! {
    windows:
    conv3d,
    conv_transpose3d,
    upsample,
    avg_pool3d,
    max_pool3d,
}
