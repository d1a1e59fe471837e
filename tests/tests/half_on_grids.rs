//! Half precision on thread ranks on every grid, against single precision on the plain backend.

burn_spatial_tests::on_threads! {
    half:
    means,
    sums,
    softmax,
    pools,
    batch_norm,
    losses,
    weight_gradients,
    optimizer,
}
