//! Burn's modules on split volumes on thread ranks, on every grid.

burn_spatial_tests::on_threads! {
    modules:
    training,
    clipped_training,
    accumulated_training,
    dropout_is_the_same_on_every_grid,
    what_is_not_split_has_the_bits_of_the_plain_backend,
    batch_norm_costs_two_all_reduces_of_c_numbers,
    gradient_of_a_replicated_factor,
    batch_norm_of_two_shards,
    gradients_are_made_whole_and_normed,
}
