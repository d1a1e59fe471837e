//! Sums over ranks that wait to be read: pending sums, and weight gradients in buckets.
//!
//! A weight gradient is handed to the rank's [`Engine`] as soon as the backward pass asks for it. A rank's share of it may be
//! left to be computed: by the next gradient at the latest, sooner where this rank would wait for others in the meantime,
//! which makes up for ranks that are early and late in turn. A large gradient is summed by itself; small ones queue in program
//! order, and a full bucket is summed in one all-reduce, as is what is queued when one of them is first read. Which ranks sum
//! what, and when, depends on the program alone.
//!
//! **Gradients that nobody reads** are summed like all others, for a rank cannot know what others do with theirs. Their sums
//! are waited for and thrown away when the next one is sent, so that nothing piles up from pass to pass, not even where a
//! rank is ahead of others. Waiting for a sum sends nothing: all others have sent their shares, or do so at the same place in
//! the program. When a rank waits may therefore depend on what it has dropped.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use burn_backend::{DType, TensorData, TensorMetadata};
use burn_std::Shape;

use crate::comm::{CommError, ReduceOp, Request};
use crate::copies::copied;
use crate::kernels::LocalKernels;
use crate::kind::{Kind, accumulator};
use crate::mesh::{AxisSet, Mesh};
use crate::stats::{Live, Stats};
use crate::trace::timed;

/// A bucket is sent when it holds this many bytes, and a gradient that has as many needs none.
const BUCKET: usize = 1 << 20;

/// The most bytes of gradients on their way, beyond which the oldest are waited for.
const IN_FLIGHT: usize = 128 << 20;

/// A value that is a sum over ranks, made when first read and shared by all clones.
pub(crate) struct Deferred<B: LocalKernels, K: Kind<B>> {
    pub(crate) axes: AxisSet,
    pub(crate) shape: Shape,
    /// Of the sum: shares are of its [`accumulator`].
    pub(crate) dtype: DType,
    pub(crate) device: B::Device,
    /// The number of the flush that is sure to make it, where it is a weight gradient; 0 for other sums.
    flush: AtomicU64,
    state: Mutex<State<K::Primitive>>,
}

enum State<P> {
    /// This rank's share, to be computed.
    Open(Compute<P>),
    /// This rank's share.
    Partial(P),
    /// The share is on its way in a bucket.
    Sent,
    /// The sum.
    Done(P),
}

/// Computes a value, without other ranks.
pub(crate) type Compute<P> = Box<dyn FnOnce() -> P + Send>;

impl<B: LocalKernels, K: Kind<B>> Deferred<B, K> {
    /// A sum of `dtype`, with this rank's share of its [`accumulator`].
    pub(crate) fn new(partial: K::Primitive, dtype: DType, axes: AxisSet, device: B::Device) -> Self {
        let shape = partial.shape();
        Deferred { axes, shape, dtype, device, flush: AtomicU64::new(0), state: Mutex::new(State::Partial(partial)) }
    }

    /// With a share that is computed later, of `dtype` or its [`accumulator`].
    pub(crate) fn open(share: Compute<K::Primitive>, shape: Shape, dtype: DType, axes: AxisSet, device: B::Device) -> Self {
        Deferred { axes, shape, dtype, device, flush: AtomicU64::new(0), state: Mutex::new(State::Open(share)) }
    }

    /// The state, after this rank's share was computed.
    fn state(&self) -> MutexGuard<'_, State<K::Primitive>> {
        let mut state = self.locked();
        *state = match std::mem::replace(&mut *state, State::Sent) {
            State::Open(compute) => State::Partial(K::widened(compute())),
            computed => computed,
        };
        state
    }

    fn locked(&self) -> MutexGuard<'_, State<K::Primitive>> {
        self.state.lock().expect("a failed sum ends the rank")
    }

    /// This rank's share, for operations that keep a sum pending; `None` once it has been summed.
    pub(crate) fn partial(&self) -> Option<K::Primitive> {
        match &*self.state() {
            State::Partial(partial) => Some(partial.clone()),
            _ => None,
        }
    }

    /// The number of the flush that is sure to make it, where it is a weight gradient.
    pub(crate) fn flush(&self) -> Option<u64> {
        Some(self.flush.load(Ordering::Relaxed)).filter(|flush| *flush > 0)
    }

    /// Keeps the sum, for all clones.
    pub(crate) fn done(&self, sum: K::Primitive) {
        *self.locked() = State::Done(sum);
    }

    /// The sum and true, or this rank's share and false.
    pub(crate) fn value(&self) -> (K::Primitive, bool) {
        match &*self.state() {
            State::Done(sum) => (sum.clone(), true),
            State::Partial(partial) => (partial.clone(), false),
            State::Open(_) | State::Sent => unreachable!("a flush delivers every queued sum"),
        }
    }
}

/// What the engine needs of a queued gradient.
trait Member: Send + Sync {
    fn axes(&self) -> AxisSet;
    /// The type in which shares are summed.
    fn dtype(&self) -> DType;
    fn bytes(&self) -> usize;
    /// Whether this rank's share is still to be computed.
    fn is_open(&self) -> bool;
    /// Computes this rank's share, if that is still to be done.
    fn compute(&self);
    /// Adds this rank's share to the bucket.
    fn send_into(&self, bucket: &mut Vec<u8>);
    fn deliver(&self, sum: Vec<u8>);
}

impl<B: LocalKernels, K: Kind<B>> Member for Deferred<B, K> {
    fn axes(&self) -> AxisSet {
        self.axes
    }

    fn dtype(&self) -> DType {
        accumulator(self.dtype)
    }

    fn bytes(&self) -> usize {
        self.shape.num_elements() * self.dtype().size()
    }

    fn is_open(&self) -> bool {
        matches!(*self.locked(), State::Open(_))
    }

    fn compute(&self) {
        drop(self.state());
    }

    fn send_into(&self, bucket: &mut Vec<u8>) {
        if let State::Partial(partial) = std::mem::replace(&mut *self.state(), State::Sent) {
            bucket.extend_from_slice(K::into_data(partial).as_bytes());
            copied(self.bytes());
        }
    }

    fn deliver(&self, sum: Vec<u8>) {
        let data = TensorData::from_bytes_vec(sum, self.shape.clone(), self.dtype());
        *self.locked() = State::Done(K::cast(K::from_data(data, &self.device), self.dtype));
    }
}

/// A rank's queue of gradients.
#[derive(Default)]
pub(crate) struct Engine {
    queue: Mutex<Queue>,
    /// How many there were.
    flushes: AtomicU64,
}

/// Gradients whose sum is on its way.
struct Bucket {
    members: Vec<Arc<dyn Member>>,
    request: Box<dyn Request>,
    #[allow(dead_code)]
    live: Live,
}

impl Bucket {
    fn bytes(&self) -> usize {
        bytes_of(&self.members)
    }

    /// Whether somebody may still read one of its gradients. What the engine alone has, nobody gets any more.
    fn is_wanted(&self) -> bool {
        self.members.iter().any(is_wanted)
    }

    /// Waits for the sum, and hands it to those that are still wanted.
    fn complete(self) -> Result<(), CommError> {
        let sums = self.request.wait()?;
        if let [member] = &self.members[..] {
            if is_wanted(member) {
                member.deliver(sums);
            }
            return Ok(());
        }
        let mut rest = &sums[..];
        for member in &self.members {
            let (this, next) = rest.split_at(member.bytes());
            if is_wanted(member) {
                copied(this.len());
                member.deliver(this.to_vec());
            }
            rest = next;
        }
        Ok(())
    }
}

fn is_wanted(member: &Arc<dyn Member>) -> bool {
    Arc::strong_count(member) > 1
}

#[derive(Default)]
struct Queue {
    /// The newest gradient, if its share was left to be computed.
    newest: Option<Arc<dyn Member>>,
    /// What waits for its bucket to be full.
    waiting: Vec<Arc<dyn Member>>,
    /// The oldest first.
    in_flight: VecDeque<Bucket>,
}

impl Engine {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("a failed sum ends the rank")
    }

    /// How many flushes there have been.
    pub(crate) fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    /// Queues a gradient, and sends the one before it on its way.
    pub(crate) fn push<B: LocalKernels, K: Kind<B>>(
        &self,
        mesh: &Mesh,
        stats: &Stats,
        gradient: Arc<Deferred<B, K>>,
    ) -> Result<(), CommError> {
        let mut queue = self.queue();
        gradient.flush.store(self.flushes() + 1, Ordering::Relaxed);
        queue.close(mesh, stats)?;
        if gradient.is_open() {
            queue.newest = Some(gradient);
            return Ok(());
        }
        queue.add(mesh, stats, gradient)
    }

    /// Computes what was left to be computed, and sends nothing.
    pub(crate) fn compute(&self) {
        if let Some(newest) = &self.queue().newest {
            newest.compute();
        }
    }

    /// Sums all that is queued.
    pub(crate) fn flush(&self, mesh: &Mesh, stats: &Stats) -> Result<(), CommError> {
        let mut queue = self.queue();
        queue.close(mesh, stats)?;
        timed!(REDUCE, "flush");
        queue.send(mesh, stats)?;
        queue.in_flight.drain(..).try_for_each(Bucket::complete)?;
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn bytes_of(members: &[Arc<dyn Member>]) -> usize {
    members.iter().map(|member| member.bytes()).sum()
}

impl Queue {
    /// Sends the newest gradient on its way, if it was left behind.
    fn close(&mut self, mesh: &Mesh, stats: &Stats) -> Result<(), CommError> {
        let Some(newest) = self.newest.take() else { return Ok(()) };
        newest.compute();
        self.add(mesh, stats, newest)
    }

    /// Starts a sum when the bucket is full.
    fn add(&mut self, mesh: &Mesh, stats: &Stats, gradient: Arc<dyn Member>) -> Result<(), CommError> {
        if let Some(last) = self.waiting.last()
            && (last.axes() != gradient.axes() || last.dtype() != gradient.dtype())
        {
            self.send(mesh, stats)?;
        }
        if gradient.bytes() >= BUCKET {
            return self.start(mesh, stats, vec![gradient]);
        }
        self.waiting.push(gradient);
        if bytes_of(&self.waiting) >= BUCKET {
            self.send(mesh, stats)?;
        }
        Ok(())
    }

    fn send(&mut self, mesh: &Mesh, stats: &Stats) -> Result<(), CommError> {
        let members = std::mem::take(&mut self.waiting);
        self.start(mesh, stats, members)
    }

    /// Starts the sum of gradients of one kind.
    fn start(&mut self, mesh: &Mesh, stats: &Stats, members: Vec<Arc<dyn Member>>) -> Result<(), CommError> {
        let Some(first) = members.first() else { return Ok(()) };
        timed!(REDUCE, "bucket");
        let comm = mesh.group(first.axes()).expect("only sums over several ranks are queued");
        let mut bucket = Vec::with_capacity(bytes_of(&members));
        let live = stats.live(bucket.capacity());
        members.iter().for_each(|member| member.send_into(&mut bucket));
        let request = comm.start_all_reduce(bucket, first.dtype(), ReduceOp::Sum)?;
        self.limit()?;
        self.in_flight.push_back(Bucket { members, request, live });
        Ok(())
    }

    /// Waits for what nobody wants any more, and for the oldest while too much is on its way.
    fn limit(&mut self) -> Result<(), CommError> {
        let mut bytes: usize = self.in_flight.iter().map(Bucket::bytes).sum();
        for bucket in std::mem::take(&mut self.in_flight) {
            if bytes > IN_FLIGHT || !bucket.is_wanted() {
                bytes -= bucket.bytes();
                timed!(REDUCE, "limit");
                bucket.complete()?;
            } else {
                self.in_flight.push_back(bucket);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use burn_flex::Flex;

    use super::*;
    use crate::device::SpatialDevice;
    use crate::kind::Float;
    use crate::launch;
    use crate::mesh::MeshAxis;
    use crate::transfer::collective;

    type Gradient = Arc<Deferred<Flex, Float>>;

    /// A share of `n` times `value`, and how often it was computed.
    fn open(value: f32, n: usize) -> (Gradient, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let device = Default::default();
        let share = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            <Float as Kind<Flex>>::from_data(TensorData::new(vec![value; n], [n]), &device)
        };
        let axes = [MeshAxis::Depth].into_iter().collect();
        (Arc::new(Deferred::open(Box::new(share), Shape::from([n]), DType::F32, axes, device)), count)
    }

    /// Shares are computed once: where a rank would wait for another, before the next gradient, or when one is read; whichever
    /// it is, and whether it is the same on all ranks, sums are made in the same order.
    #[test]
    fn shares_are_computed_when_there_is_time() {
        let grid: crate::mesh::Grid = "1x2x1x1".parse().unwrap();
        let sums = launch::threads(2, |comm| {
            let rank = comm.rank();
            let mesh = Mesh::new(comm, grid).map_err(|error| error.to_string())?;
            let device = SpatialDevice::new(burn_flex::FlexDevice, mesh).map_err(|error| error.to_string())?;
            let context = device.context();
            let times = |count: &Arc<AtomicUsize>| count.load(Ordering::Relaxed);
            // The second has a sum of its own, the others share one.
            let all = [(1.0, 3), (2.0, BUCKET / 4), (3.0, 5)].map(|(value, n)| open(value + rank as f32, n));
            for (i, (gradient, count)) in all.iter().enumerate() {
                context.gradients.push(&context.mesh, &context.stats, gradient.clone()).map_err(|error| error.to_string())?;
                assert_eq!(times(count), 0, "left to be computed");
                assert!(all[..i].iter().all(|(_, before)| times(before) == 1), "computed before the next one");
                if rank == i % 2 {
                    context.gradients.compute();
                    context.gradients.compute();
                    assert_eq!(times(count), 1, "computed while waiting");
                }
            }
            let mut first = Vec::new();
            for (gradient, count) in &all {
                let sum = collective::read(&context, gradient).map_err(|error| error.to_string())?;
                let sum = <Float as Kind<Flex>>::into_data(sum).to_vec::<f32>().unwrap();
                assert!(sum.iter().all(|x| *x == sum[0]));
                assert_eq!(times(count), 1);
                first.push((sum.len(), sum[0]));
            }
            Ok::<_, String>(first)
        });
        assert_eq!(sums.unwrap(), vec![vec![(3, 3.0), (BUCKET / 4, 5.0), (5, 7.0)]; 2]);
    }

    /// An operation that keeps a sum pending takes the share, which is computed for it.
    #[test]
    fn a_share_is_computed_for_who_takes_it() {
        let (gradient, count) = open(4.0, 2);
        for _ in 0..2 {
            let share = <Float as Kind<Flex>>::into_data(gradient.partial().unwrap());
            assert_eq!(share.to_vec::<f32>().unwrap(), [4.0; 2]);
        }
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
