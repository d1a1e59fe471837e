//! Compares a program on a grid of thread ranks with plain Flex.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex};
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_flex::FlexDevice;
use burn_spatial::launch::LaunchError;
use burn_spatial::mesh::MeshError;
use burn_spatial::{Grid, Mesh, Spatial, SpatialDevice, launch};
use serde::{Deserialize, Serialize};

use super::interpret::{Outcome, run};
use super::replay::replay;
use super::{Node, Program};
use crate::suite::Device;

/// How many rank threads there are.
const RANKS: usize = 8;
/// The largest difference, as a part of the largest entry.
const TOLERANCE: f64 = 1e-9;
/// Gradients beyond it are made of terms that rounding makes unlike.
const LARGEST_GRADIENT: f64 = 1e6;

/// How a program fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// Values or gradients differ.
    Wrong(String),
    /// A rank panicked.
    Panic(String),
    /// The ranks did not come to an end.
    Hang,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Wrong(what) => write!(f, "{what}"),
            Failure::Panic(cause) => write!(f, "panicked: {cause}"),
            Failure::Hang => write!(f, "does not come to an end"),
        }
    }
}

type Task = Arc<dyn Fn(&Device) + Send + Sync>;

/// Threads that are the ranks of one program after the other, on any grid of up to eight.
pub struct Ranks {
    tasks: Vec<Sender<(Grid, Task)>>,
    ended: Receiver<()>,
    job: Option<JoinHandle<Result<Vec<()>, LaunchError>>>,
}

impl Default for Ranks {
    fn default() -> Self {
        let (tasks, receivers): (Vec<_>, Vec<_>) = (0..RANKS).map(|_| mpsc::channel()).unzip();
        let receivers: Vec<_> = receivers.into_iter().map(|receiver| Mutex::new(Some(receiver))).collect();
        let (end, ended) = mpsc::channel();
        let end = Mutex::new(Some(end));
        let job = thread::spawn(move || {
            let sender = end.lock().expect("not poisoned").take().expect("taken once");
            let result = launch::threads(RANKS, |comm| {
                let tasks: Receiver<(Grid, Task)> = receivers[comm.rank()].lock().expect("not poisoned").take().expect("taken once");
                let end = sender.clone();
                let mut devices: HashMap<[usize; 4], Option<Device>> = HashMap::new();
                for (grid, task) in tasks {
                    let device = match devices.entry(grid.0) {
                        Entry::Occupied(made) => made.into_mut(),
                        Entry::Vacant(place) => {
                            let member = comm.rank() < grid.ranks();
                            let part = comm.split(usize::from(!member), comm.rank()).map_err(MeshError::from)?;
                            place.insert(if member { Some(SpatialDevice::new(FlexDevice, Mesh::new(part, grid)?)?) } else { None })
                        }
                    };
                    if let Some(device) = device {
                        task(device);
                    }
                    let _ = end.send(());
                }
                Ok::<(), MeshError>(())
            });
            drop(sender);
            result
        });
        Ranks { tasks, ended, job: Some(job) }
    }
}

impl Ranks {
    /// What `program` makes on each rank of `grid`, in rank order.
    ///
    /// # Errors
    /// If a rank panics, or they take longer than `limit`: then some may wait for ever.
    pub fn run<T: Send + 'static>(
        &mut self,
        grid: Grid,
        limit: Duration,
        program: impl Fn(&Device) -> T + Send + Sync + 'static,
    ) -> Result<Vec<T>, Failure> {
        let made: Arc<Mutex<Vec<Option<T>>>> = Arc::new(Mutex::new((0..grid.ranks()).map(|_| None).collect()));
        let slots = made.clone();
        let task: Task = Arc::new(move |device: &Device| {
            let value = program(device);
            slots.lock().expect("not poisoned")[device.mesh().rank()] = Some(value);
        });
        for sender in &self.tasks {
            // A rank that has ended is told of below.
            let _ = sender.send((grid, task.clone()));
        }
        let deadline = Instant::now() + limit;
        for _ in 0..RANKS {
            match self.ended.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => return Err(Failure::Hang),
                Err(RecvTimeoutError::Disconnected) => {
                    let broken = std::mem::take(self);
                    let cause = match broken.job.expect("it was started").join() {
                        Ok(Err(error)) => error.to_string(),
                        _ => "the ranks ended without a word".to_owned(),
                    };
                    return Err(Failure::Panic(cause));
                }
            }
        }
        let all = std::mem::take(&mut *made.lock().expect("not poisoned"));
        Ok(all.into_iter().map(|value| value.expect("every rank has ended")).collect())
    }
}

/// Runs a program on plain Flex and on its grid; whether it could be compared.
///
/// # Errors
/// If what the ranks make is not what plain Flex makes.
pub fn check(program: &Program, ranks: &mut Ranks, limit: Duration) -> Result<bool, Failure> {
    if replay(program).is_none() {
        return Ok(false);
    }
    let plain = || run::<Autodiff<Flex>>(program, &Default::default());
    // Burn has no gradient for some, and says so by a panic.
    let Ok(expected) = catch_unwind(AssertUnwindSafe(plain)) else { return Ok(false) };
    let mut gradients = expected.gradients.iter().flat_map(|(_, g)| g).flatten();
    let mut values = expected.values.iter().flat_map(|(_, v)| v);
    if !gradients.all(|g| g.abs() <= LARGEST_GRADIENT) || !values.all(|v| v.is_finite()) {
        return Ok(false);
    }
    let again = program.clone();
    let all = ranks.run(program.grid(), limit, move |device| {
        if again.checkpointing {
            run::<Autodiff<Spatial<Flex>, BalancedCheckpointing>>(&again, device)
        } else {
            run::<Autodiff<Spatial<Flex>>>(&again, device)
        }
    })?;
    for (rank, got) in all.iter().enumerate() {
        compare(program, got, &expected).map_err(|what| Failure::Wrong(format!("on rank {rank} {what}")))?;
    }
    Ok(true)
}

/// Values in the order of the program, then gradients.
fn compare(program: &Program, got: &Outcome, all: &Outcome) -> Result<(), String> {
    for (i, (got, want)) in got.values.iter().zip(&all.values).enumerate() {
        if got.0 != want.0 {
            return Err(format!("the shape of v{i} is {:?} instead of {:?}", got.0, want.0));
        }
        // A value may be a difference of the operands' large ones.
        let operands = if let Node::Step(_, args) = &program.nodes[i] { args.as_slice() } else { &[] };
        let scale = operands.iter().map(|a| largest(&all.values[*a].1)).fold(largest(&want.1), f64::max);
        same(&format!("v{i}"), &got.1, &want.1, scale)?;
    }
    let scale = all.gradients.iter().flat_map(|(_, g)| g).map(|g| largest(g)).fold(0.0, f64::max);
    for ((i, got), (_, want)) in got.gradients.iter().zip(&all.gradients) {
        match (got, want) {
            (Some(got), Some(want)) => same(&format!("the gradient of v{i}"), got, want, largest(want).max(scale * 1e-3))?,
            (None, None) => {}
            _ => return Err(format!("the gradient of v{i} is there: {}, instead of: {}", got.is_some(), want.is_some())),
        }
    }
    Ok(())
}

fn largest(numbers: &[f64]) -> f64 {
    numbers.iter().fold(1e-3, |m, v| v.abs().max(m))
}

fn same(what: &str, got: &[f64], want: &[f64], scale: f64) -> Result<(), String> {
    if got.len() != want.len() {
        return Err(format!("{what} has {} elements instead of {}", got.len(), want.len()));
    }
    // What is not a number is not near.
    let near = |(g, w): (&f64, &f64)| (g - w).abs() <= TOLERANCE * scale;
    if !got.iter().zip(want).all(near) {
        let first = |numbers: &[f64]| numbers.iter().take(24).map(|v| format!("{v:.6}")).collect::<Vec<_>>().join(", ");
        return Err(format!("{what} is\n    {}\ninstead of\n    {}", first(got), first(want)));
    }
    Ok(())
}
