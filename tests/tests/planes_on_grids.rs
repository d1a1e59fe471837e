//! Burn's operations on lines and planes that lie split, on thread ranks, on every grid.

burn_spatial_tests::on_threads! {
    planes:
    lines,
    planes,
    whole_planes,
    uniform_gradients,
}
