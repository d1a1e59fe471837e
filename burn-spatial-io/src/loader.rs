//! Samples read ahead of need by threads, in an order that does not depend on them.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};

use crate::dataset::{Sample, SampleSource};
use crate::error::DataError;
use crate::plan::EpochPlan;
use crate::rank::GridRank;

/// How a [`Loader`] reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoaderOptions {
    /// Samples in a global batch; 0 counts as 1.
    pub batch: usize,
    /// Seed of the shuffle; `None` reads in stored order.
    pub seed: Option<u64>,
    /// Threads that read ahead; 0 reads in the calling thread. The order never depends on it.
    pub workers: usize,
    /// How many batches are read ahead, at least 1.
    pub prefetch: usize,
}

impl Default for LoaderOptions {
    /// Batches of one, stored order, one worker two batches ahead.
    fn default() -> Self {
        LoaderOptions { batch: 1, seed: None, workers: 1, prefetch: 2 }
    }
}

/// Yields the batches of an epoch through a Burn [`Batcher`], which runs on the calling thread.
///
/// [`Loader::epoch`] returns errors. The loader is a Burn [`DataLoader`] too, for Burn's own training loops.
pub struct Loader<B: Backend, O> {
    source: Arc<dyn SampleSource>,
    batcher: Arc<dyn Batcher<B, Sample, O>>,
    options: LoaderOptions,
    rank: GridRank,
    device: B::Device,
    /// The samples of `source` that are read.
    range: Range<usize>,
    /// The number of the next epoch of [`DataLoader::iter`].
    next_epoch: AtomicU64,
}

impl<B: Backend, O> Loader<B, O> {
    /// A loader of all samples of `source` that reads those of `rank`. All ranks give the same options. Local.
    pub fn new(
        source: impl SampleSource + 'static,
        batcher: impl Batcher<B, Sample, O> + 'static,
        options: LoaderOptions,
        rank: GridRank,
        device: B::Device,
    ) -> Self {
        let range = 0..source.len();
        Loader { source: Arc::new(source), batcher: Arc::new(batcher), options, rank, device, range, next_epoch: AtomicU64::new(0) }
    }

    /// The plan of epoch number `epoch`; its sample numbers count from the start of this loader's range.
    pub fn plan(&self, epoch: u64) -> EpochPlan {
        EpochPlan::new(self.range.len(), self.options.batch, self.options.seed, epoch)
    }

    /// The batches of epoch number `epoch`.
    pub fn epoch(&self, epoch: u64) -> Epoch<B, O> {
        self.epoch_from(epoch, 0)
    }

    /// The batches of epoch number `epoch` from step `step` on, to go on where a training stopped.
    pub fn epoch_from(&self, epoch: u64, step: usize) -> Epoch<B, O> {
        let plan = self.plan(epoch);
        let steps = step.min(plan.steps())..plan.steps();
        let jobs: Vec<usize> = steps.clone().flat_map(|step| plan.part(step, self.rank).ids).map(|id| self.range.start + id).collect();
        let batch = self.rank.samples(self.options.batch.max(1)).len();
        let ahead = batch.saturating_mul(self.options.prefetch.max(1));
        Epoch {
            reader: Reader::start(self.source.clone(), jobs, self.options.workers, ahead),
            batcher: self.batcher.clone(),
            device: self.device.clone(),
            rank: self.rank,
            plan,
            steps,
            processed: 0,
            failed: false,
        }
    }

    fn with(&self, device: B::Device, range: Range<usize>) -> Self {
        Loader {
            source: self.source.clone(),
            batcher: self.batcher.clone(),
            options: self.options.clone(),
            rank: self.rank,
            device,
            range,
            next_epoch: AtomicU64::new(self.next_epoch.load(Ordering::Relaxed)),
        }
    }
}

/// The batches of one epoch, in order. Ends after the first error. Dropping it ends its threads.
pub struct Epoch<B: Backend, O> {
    reader: Reader,
    batcher: Arc<dyn Batcher<B, Sample, O>>,
    device: B::Device,
    rank: GridRank,
    plan: EpochPlan,
    steps: Range<usize>,
    processed: usize,
    failed: bool,
}

impl<B: Backend, O> Iterator for Epoch<B, O> {
    type Item = Result<O, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let part = self.plan.part(self.steps.next()?, self.rank);
        let mut samples = Vec::with_capacity(part.ids.len());
        for _ in &part.ids {
            match self.reader.next() {
                Ok(sample) => samples.push(Sample { global_batch: Some(part.global), ..sample }),
                Err(error) => {
                    self.failed = true;
                    return Some(Err(error));
                }
            }
        }
        self.processed += part.global;
        Some(Ok(self.batcher.batch(samples, &self.device)))
    }
}

impl<B: Backend, O: Send + 'static> DataLoader<B, O> for Loader<B, O> {
    /// The next epoch, counted from 0.
    ///
    /// # Panics
    /// The iterator panics with the message of a [`DataError`]: Burn's trait returns no errors.
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let epoch = self.epoch(self.next_epoch.fetch_add(1, Ordering::Relaxed));
        Box::new(Unwrapped(epoch))
    }

    fn num_items(&self) -> usize {
        self.range.len()
    }

    fn to_device(&self, device: &B::Device) -> Arc<dyn DataLoader<B, O>> {
        Arc::new(self.with(device.clone(), self.range.clone()))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, O>> {
        let sample = |i: usize| self.range.start + i.min(self.range.len());
        let range = sample(start)..sample(end).max(sample(start));
        Arc::new(self.with(self.device.clone(), range))
    }
}

/// An epoch that panics on errors.
struct Unwrapped<B: Backend, O>(Epoch<B, O>);

impl<B: Backend, O> Iterator for Unwrapped<B, O> {
    type Item = O;

    fn next(&mut self) -> Option<O> {
        self.0.next().map(|batch| batch.unwrap_or_else(|error| panic!("{error}")))
    }
}

impl<B: Backend, O> DataLoaderIterator<O> for Unwrapped<B, O> {
    fn progress(&self) -> Progress {
        Progress::new(self.0.processed, self.0.plan.order().len())
    }
}

/// What a worker made of a sample, a panic included.
type Outcome = Result<Result<Sample, DataError>, Box<dyn Any + Send>>;

/// Reads a list of samples in order, ahead of need.
struct Reader {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    source: Arc<dyn SampleSource>,
    jobs: Vec<usize>,
    /// How many samples may be read and not yet taken.
    ahead: usize,
    state: Mutex<State>,
    /// Something was taken, or the reader stops.
    taken: Condvar,
    /// A sample is done.
    done: Condvar,
}

#[derive(Default)]
struct State {
    /// The next job that no worker has.
    claimed: usize,
    /// The next job that the caller takes.
    taken: usize,
    done: BTreeMap<usize, Outcome>,
    stop: bool,
}

impl Reader {
    fn start(source: Arc<dyn SampleSource>, jobs: Vec<usize>, workers: usize, ahead: usize) -> Reader {
        let count = workers.min(jobs.len());
        let shared = Arc::new(Shared {
            source,
            jobs,
            ahead: ahead.max(workers),
            state: Mutex::default(),
            taken: Condvar::new(),
            done: Condvar::new(),
        });
        let workers = (0..count)
            .map(|_| {
                let shared = shared.clone();
                std::thread::spawn(move || shared.work())
            })
            .collect();
        Reader { shared, workers }
    }

    /// The next sample of the list, which must not be at its end.
    fn next(&mut self) -> Result<Sample, DataError> {
        let mut state = self.shared.lock();
        let job = state.taken;
        state.taken += 1;
        self.shared.taken.notify_all();
        if self.workers.is_empty() {
            drop(state);
            return self.shared.source.try_get(self.shared.jobs[job]);
        }
        loop {
            if let Some(outcome) = state.done.remove(&job) {
                drop(state);
                return outcome.unwrap_or_else(|panic| resume_unwind(panic));
            }
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.taken.notify_all();
        for worker in self.workers.drain(..) {
            // Workers catch the panics of their source.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(job) = self.claim() {
            let outcome = catch_unwind(AssertUnwindSafe(|| self.source.try_get(self.jobs[job])));
            self.lock().done.insert(job, outcome);
            self.done.notify_all();
        }
    }

    /// Waits for room, then claims the next job; `None` when there is none or the reader stops.
    fn claim(&self) -> Option<usize> {
        let mut state = self.lock();
        while !state.stop && state.claimed < self.jobs.len() {
            if state.claimed < state.taken + self.ahead {
                state.claimed += 1;
                return Some(state.claimed - 1);
            }
            state = self.taken.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}
