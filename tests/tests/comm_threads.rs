//! The checks of a communicator on thread ranks.

use burn_spatial::comm::CommError;
use burn_spatial::launch;
use burn_spatial_tests::comm_checks;

#[test]
fn thread_ranks() {
    for ranks in [1, 2, 3, 4, 8] {
        let done = launch::threads(ranks, |comm| {
            let count = std::cell::Cell::new(0);
            comm_checks::run(&comm, |_| count.set(count.get() + 1));
            Ok::<_, CommError>(count.get())
        });
        assert_eq!(done.unwrap()[0], comm_checks::CHECKS.len(), "{ranks} ranks");
    }
}
