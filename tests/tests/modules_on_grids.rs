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
}

/// A parameter of a volume's own shape: its gradient lies as the volume does, until made whole.
#[derive(Module, Debug)]
struct Field<B: Backend> {
    field: Param<Tensor<B, 5>>,
}

#[test]
fn gradients_are_made_whole_and_normed() {
    let shape = [1, 2, 4, 5, 6];
    let n: usize = shape.iter().product();
    for grid in GRIDS {
        let (norm, before, after) = agreed_on_grid(grid, |device| {
            let data = |seed| TensorData::new(numbers(n, seed), shape);
            let model = Field { field: Param::from_tensor(Tensor::<Split, 5>::from_data(data(1), device).require_grad()) };
            let x = place::split(Tensor::<Split, 5>::from_data(data(2), device));
            let gradients = (model.field.val() * x).sum().backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            let get = |g: &GradientsParams| place::layout(&g.get::<Spatial<Flex>, 5>(model.field.id).unwrap());
            let before = get(&gradients).is_full();
            let gradients = burn_spatial::optim::whole_gradients::<Split, _>(&model, gradients);
            let norm = burn_spatial::optim::gradient_norm::<Split, _>(&model, &gradients, device).into_data().to_vec::<f32>().unwrap()[0];
            (norm, before, get(&gradients).is_full())
        });
        let expected = numbers(n, 2).iter().map(|v| (*v as f64).powi(2)).sum::<f64>().sqrt();
        assert!((norm as f64 - expected).abs() < 1e-5 * expected, "on {grid}: {norm}, not {expected}");
        let split = grid.0[1..].iter().any(|n| *n > 1);
        assert_eq!((before, after), (!split, true), "on {grid}");
    }
}
