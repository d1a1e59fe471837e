//! A second thread on every rank that reads tensors while the first trains, as Burn's `Learner` has it.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::nn::conv::{Conv3d, Conv3dConfig};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig3d};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Int, Tensor, TensorData};
use burn_spatial::{Spatial, place};

use crate::suite::{Device, Program, agree};

/// The backend of the programs.
pub type Split = Autodiff<Spatial<Flex>>;

/// A network with batch norm, whose loss is a pending sum where the batch is split.
#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    /// What makes the features.
    pub conv: Conv3d<B>,
    norm: BatchNorm<B>,
    head: Linear<B>,
}

impl<B: Backend> Net<B> {
    /// With random weights.
    pub fn new(device: &B::Device) -> Self {
        let conv = Conv3dConfig::new([2, 3], [3; 3]).with_padding(PaddingConfig3d::Explicit(1, 1, 1)).init(device);
        Net { conv, norm: BatchNormConfig::new(3).init(device), head: LinearConfig::new(3, 2).init(device) }
    }

    /// Features and predictions.
    pub fn forward(&self, x: Tensor<B, 5>) -> (Tensor<B, 5>, Tensor<B, 2>) {
        let features = relu(self.norm.forward(self.conv.forward(x)));
        let output = self.head.forward(features.clone().mean_dim(2).mean_dim(3).mean_dim(4).flatten(1, 4));
        (features, output)
    }
}

/// A split volume that depends on `step`.
pub fn volume<B: burn_spatial::SpatialBackend>(step: usize, device: &B::Device) -> Tensor<B, 5> {
    let values = (0..4 * 2 * 216).map(|i| ((i * 37 + step * 101) % 29) as f32 / 14.0 - 1.0).collect();
    place::split(Tensor::from_data(TensorData::new::<f32, _>(values, [4, 2, 6, 6, 6]), device))
}

/// What a step hands over: a pending sum, predictions split along the batch, a split volume, whole numbers.
struct Item {
    loss: Tensor<Split, 1>,
    output: Tensor<Split, 2>,
    features: Tensor<Split, 5>,
    classes: Tensor<Split, 1, Int>,
}

impl Item {
    fn read(self) -> Vec<TensorData> {
        vec![self.loss.into_data(), self.output.into_data(), self.features.into_data(), self.classes.into_data()]
    }
}

const STEPS: usize = 9;

/// Trains, hands each step's item over, and reads some losses itself: in every third step before, in every third after.
fn train(device: &Device, mut hand_over: impl FnMut(usize, Item)) -> Vec<TensorData> {
    Split::seed(device, 3);
    let (mut net, mut adam) = (Net::<Split>::new(device), AdamConfig::new().init());
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let target = Tensor::from_data([[0.1, 0.2], [0.3, -0.4], [0.5, 0.6], [-0.7, 0.8]], device);
        let (features, output) = net.forward(volume(step, device));
        let loss = MseLoss::new().forward(output.clone(), target, Reduction::Mean);
        let classes = output.clone().argmax(1).squeeze_dim::<1>(1);
        if step % 3 == 1 {
            losses.push(loss.clone().into_data());
        }
        hand_over(step, Item { loss: loss.clone(), output, features, classes });
        if step % 3 == 2 {
            losses.push(loss.clone().into_data());
        }
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = adam.step(0.01, net, gradients);
    }
    losses.push(net.head.weight.val().into_data());
    losses
}

/// Waits for a time that differs by rank, so that the threads of different ranks meet in many orders.
fn dawdle(device: &Device, step: usize, salt: usize) {
    let rank = device.mesh().rank();
    thread::sleep(Duration::from_millis(((rank * 5 + step * 3 + salt) % 4) as u64));
}

/// What the second thread reads, and what the first computes meanwhile, are what one thread alone gets.
pub fn reads_while_the_first_trains(device: &Device) {
    let mut expected = Vec::new();
    let alone = train(device, |_, item| expected.push(item.read()));
    let (sender, receiver) = mpsc::sync_channel::<(usize, Item)>(1);
    let reader = thread::spawn({
        let device = device.clone();
        move || {
            let mut read = Vec::new();
            for (step, item) in receiver {
                dawdle(&device, step, 1);
                read.push(item.read());
            }
            read
        }
    });
    let beside = train(device, |step, item| {
        sender.send((step, item)).expect("the reader lives");
        dawdle(device, step, 2);
    });
    drop(sender);
    let read = reader.join().expect("the reader does not fail");
    assert_eq!(alone, beside);
    assert_eq!(read.len(), STEPS);
    assert_eq!(read, expected);
    agree(device, "what the second thread read", &read.iter().flatten().flat_map(|data| data.as_bytes().to_vec()).collect::<Vec<u8>>());
}

/// A full tensor leaves on any thread, and on several at once, and nothing is sent.
pub fn full_tensors_leave_any_thread_without_a_message(device: &Device) {
    type B = Spatial<Flex>;
    let full = Tensor::<B, 2>::from_data([[1.0, 2.0], [3.0, 4.0]], device);
    let uniform = Tensor::<B, 3>::ones([2, 3, 4], device);
    let random = Tensor::<B, 1>::random([8], Distribution::Default, device);
    // A sum over the ranks, made on this thread.
    let resolved = place::to_full(volume::<B>(1, device).sum());
    let read = move || [full.clone().into_data(), uniform.clone().into_data(), random.clone().into_data(), resolved.clone().into_data()];
    let expected = read();
    let before = device.stats().comm.total().calls;
    let all: Vec<_> = (0..3).map(|_| read.clone()).map(thread::spawn).collect();
    for thread in all {
        assert_eq!(thread.join().expect("nothing fails"), expected);
    }
    assert_eq!(device.stats().comm.total().calls, before);
}

/// Threads that read one after another: each takes the place of the one before.
pub fn threads_take_turns(device: &Device) {
    let x = volume::<Spatial<Flex>>(2, device);
    let expected = x.clone().into_data();
    for _ in 0..3 {
        let x = x.clone();
        let read = thread::spawn(move || x.into_data()).join().expect("the thread before has ended");
        assert_eq!(read, expected);
    }
}

/// The programs of this module.
pub const PROGRAMS: &[Program] = &[
    Program { name: "reads_while_the_first_trains", run: reads_while_the_first_trains },
    Program { name: "full_tensors_leave_any_thread_without_a_message", run: full_tensors_leave_any_thread_without_a_message },
    Program { name: "threads_take_turns", run: threads_take_turns },
];
