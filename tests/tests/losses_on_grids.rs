//! Losses and metrics of segmentation: on the plain backend, and on split volumes on thread ranks on every grid.

use burn::backend::{Autodiff, Flex};
use burn::tensor::DType;
use burn_spatial_tests::fixtures::cases;
use burn_spatial_tests::fixtures_loss::run_loss;

burn_spatial_tests::on_threads! {
    fixtures_loss:
    losses_equal_pytorch,
    segmentation_is_that_of_the_whole,
}

#[test]
fn losses_on_the_plain_backend_equal_pytorch() {
    for case in ["cross_entropy", "dice"].into_iter().flat_map(cases) {
        let run = |dtype| run_loss::<Autodiff<Flex>>(&case, dtype, &Default::default(), |x| x, |t| t);
        case.check(&run(DType::F32), 1e-4);
        case.check(&run(DType::F64), 1e-10);
    }
}
