//! A second thread that reads tensors, on thread ranks, on every grid; and what it may not do.

use std::any::Any;
use std::sync::mpsc;
use std::thread;

use burn::backend::Flex;
use burn::optim::GradientsParams;
use burn_spatial::{Grid, Spatial};
use burn_spatial_tests::grid::on_grid;
use burn_spatial_tests::second_thread::{Net, Split, volume};

burn_spatial_tests::on_threads! {
    second_thread:
    reads_while_the_first_trains,
    full_tensors_leave_any_thread_without_a_message,
    threads_take_turns,
}

fn message(payload: Box<dyn Any + Send>) -> String {
    *payload.downcast::<String>().expect("a panic with a message")
}

#[test]
fn a_third_thread_is_told_what_to_do() {
    on_grid(Grid([1, 2, 1, 1]), |device| {
        let x = volume::<Spatial<Flex>>(0, device);
        let (has_read, read) = mpsc::channel();
        let (end, wait) = mpsc::channel::<()>();
        let second = thread::spawn({
            let x = x.clone();
            move || {
                has_read.send(x.into_data()).expect("the first thread waits");
                // Lives until `end` is dropped.
                wait.recv().unwrap_err();
            }
        });
        let expected = read.recv().expect("the second thread reads");
        assert_eq!(x.clone().into_data(), expected, "the rank's own thread still may");
        let third = thread::spawn({
            let x = x.clone();
            move || x.into_data()
        });
        let told = message(third.join().expect_err("a third thread"));
        assert!(told.starts_with(&format!("rank {}: a third thread", device.mesh().rank())), "{told}");
        assert!(told.contains("place::to_full"), "{told}");
        drop(end);
        second.join().expect("the second thread does not fail");
        assert_eq!(thread::spawn(move || x.into_data()).join().expect("the second has ended"), expected);
    });
}

#[test]
fn gradients_under_way_belong_to_the_ranks_own_thread() {
    on_grid(Grid([2, 2, 1, 1]), |device| {
        let net = Net::<Split>::new(device);
        let loss = net.forward(volume(0, device)).1.square().mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        let gradient = gradients.get::<Spatial<Flex>, 5>(net.conv.weight.id).expect("the weight has a gradient");
        let early = thread::spawn({
            let gradient = gradient.clone();
            move || gradient.into_data()
        });
        let told = message(early.join().expect_err("a gradient that is still being summed"));
        assert!(told.contains("reading a gradient that is still being summed"), "{told}");
        assert!(told.contains("the thread that made the SpatialDevice"), "{told}");
        let expected = gradient.clone().into_data();
        let before = device.stats().comm.total().calls;
        assert_eq!(thread::spawn(move || gradient.into_data()).join().expect("summed"), expected);
        assert_eq!(device.stats().comm.total().calls, before);
    });
}
