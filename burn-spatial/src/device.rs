//! Where a tensor lives: a device of the inner backend and a rank of a mesh.
//!
//! **Threads.** The thread that made a rank's [`SpatialDevice`] is the rank's own: it runs the program. Any thread may read
//! tensors that are full, for nothing is sent. One thread beside the rank's own, from its first message until it ends, may
//! read others too: it has communicators to itself, so that the two do not disturb each other. The second threads of all
//! ranks read the same tensors in the same order, as Burn's `Learner` does. Backward passes, and gradients that are still
//! being summed, belong to the rank's own thread.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock, Weak};
use std::thread::ThreadId;

use burn_backend::{DeviceId, DeviceOps};
use burn_std::device::Device;

use crate::comm::CommError;
use crate::gradients::Engine;
use crate::layout::{Axis, AxisNeed, Layout};
use crate::mesh::Mesh;
use crate::random::Generator;
pub use crate::split_inputs::SPLIT_INPUTS_VARIABLE;
use crate::split_inputs::SplitInputs;
use crate::stats::Stats;
use crate::transfer::{KeyedPlan, Plan, Plans};

/// The environment variable that turns strict mode on.
pub const STRICT_VARIABLE: &str = "BURN_SPATIAL_STRICT";

/// The environment variable that, as 0, has halos arrive before anything is computed.
pub const OVERLAP_VARIABLE: &str = "BURN_SPATIAL_OVERLAP";

/// A device of the inner backend, and the mesh rank that computes on it.
///
/// `Default` is the calling thread's rank; where no rank was registered on the thread, the only one of the process.
#[derive(Clone)]
pub struct SpatialDevice<D> {
    inner: D,
    id: u16,
    /// The rank: another one may have the number later.
    context: Weak<RankContext>,
}

/// What a rank keeps between operations.
pub(crate) struct RankContext {
    pub(crate) mesh: Arc<Mesh>,
    pub(crate) stats: Stats,
    pub(crate) generator: Generator,
    pub(crate) gradients: Engine,
    /// The thread that runs the program; no other communicates on its communicators.
    main: ThreadId,
    inner: DeviceId,
    strict: AtomicBool,
    overlap: AtomicBool,
    split_inputs: RwLock<Option<SplitInputs>>,
    plans: Plans,
}

impl RankContext {
    /// The plan from how `axes` are stored to what all ranks need of them.
    pub(crate) fn plan(&self, axes: &[Axis], needs: &[AxisNeed]) -> Arc<KeyedPlan> {
        self.plans.get(&self.mesh, axes, needs)
    }

    /// Computes the share of a weight's gradient that was left to be computed, if any: for moments in which this rank would
    /// wait for others, and so for its own thread only.
    pub(crate) fn compute_shares(&self) {
        if self.on_own_thread() {
            self.gradients.compute();
        }
    }

    /// Whether the calling thread is the rank's own.
    pub(crate) fn on_own_thread(&self) -> bool {
        // Test harnesses run every test on a thread of its own, one after another.
        let test = || self.split_inputs.read().is_ok_and(|mode| mode.is_some());
        std::thread::current().id() == self.main || test()
    }

    /// The mesh on which the calling thread communicates: messages of two threads must not be mixed up.
    pub(crate) fn talking(&self) -> &Mesh {
        if self.on_own_thread() {
            return &self.mesh;
        }
        self.mesh.beside().unwrap_or_else(|| {
            panic!(
                "rank {}: a third thread would have to communicate: one beside the rank's own does so already, and lives. Read split tensors on one of these two, or make them full on the rank's own (place::to_full) before they are passed on",
                self.mesh.rank()
            )
        })
    }

    /// [`RankContext::talking`] if `plan` has messages.
    pub(crate) fn talking_as(&self, plan: &Plan) -> &Mesh {
        if plan.sends.is_empty() && plan.receives.is_empty() { &self.mesh } else { self.talking() }
    }

    /// The mesh, for `what` only the rank's own thread may do.
    pub(crate) fn talking_alone(&self, what: &str) -> &Mesh {
        assert!(
            self.on_own_thread(),
            "rank {}: {what} on a thread that is not the rank's own. Do that on the thread that made the SpatialDevice",
            self.mesh.rank()
        );
        &self.mesh
    }

    /// How a tensor made from data lies: whole, or, in the test mode, split in some way.
    pub(crate) fn input(&self, shape: &[usize]) -> Layout {
        let mode = self.split_inputs.read().expect("no panic while the mode is set");
        mode.as_ref().map_or_else(|| Layout::full(shape), |mode| mode.next(shape, self.mesh.grid()))
    }

    pub(crate) fn strict(&self) -> bool {
        self.strict.load(Ordering::Relaxed)
    }

    pub(crate) fn overlap(&self) -> bool {
        self.overlap.load(Ordering::Relaxed)
    }
}

static RANKS: LazyLock<RwLock<Ranks>> = LazyLock::new(Default::default);

/// The ranks of this process by number.
#[derive(Default)]
struct Ranks {
    all: HashMap<u16, Arc<RankContext>>,
    /// Where the search for a free number starts: one that was given back is taken as late as can be.
    next: u16,
}

impl Ranks {
    fn insert(&mut self, context: Arc<RankContext>) -> u16 {
        let free = (0..=u16::MAX).map(|i| self.next.wrapping_add(i)).find(|id| !self.all.contains_key(id));
        let id = free.expect("a process has at most 65,536 ranks at once: drop their devices and tensors, or end their threads");
        self.next = id.wrapping_add(1);
        self.all.insert(id, context);
        id
    }
}

thread_local! {
    static CURRENT: RefCell<Vec<Registration>> = const { RefCell::new(Vec::new()) };
}

/// Ends a rank with the thread that registered it.
struct Registration(u16);

impl Drop for Registration {
    fn drop(&mut self) {
        let ended = RANKS.write().ok().and_then(|mut ranks| ranks.all.remove(&self.0));
        // Not under the lock.
        drop(ended);
    }
}

/// Ends the ranks that this thread registered and of which no device and no tensor is left.
fn end_unused() {
    let unused = |registration: &Registration| {
        RANKS.read().is_ok_and(|ranks| ranks.all.get(&registration.0).is_some_and(|context| Arc::weak_count(context) == 0))
    };
    let ended: Vec<Registration> = CURRENT.with(|current| {
        let mut current = current.borrow_mut();
        let (ended, kept) = current.drain(..).partition(unused);
        *current = kept;
        ended
    });
    drop(ended);
}

fn lookup(id: u16) -> Option<Arc<RankContext>> {
    RANKS.read().expect("no panic while ranks are registered").all.get(&id).cloned()
}

const ENDED: &str = "the rank of this tensor or device has ended with its thread; keep what it computed as data";

impl<D: DeviceOps> SpatialDevice<D> {
    /// Registers this thread as the rank of `mesh` that computes on `inner`, until the thread ends, or registers another
    /// rank when no device and no tensor of this one is left. The default device of the thread from now on. Collective, for
    /// ranks agree on a random seed and on the instructions of their kernels.
    ///
    /// # Panics
    /// Where the process has 65,536 ranks already.
    pub fn new(inner: D, mesh: Arc<Mesh>) -> Result<Self, CommError> {
        let seed = mesh.world().broadcast(0, crate::mix::entropy().to_ne_bytes().to_vec())?;
        let seed = u64::from_ne_bytes(seed.try_into().expect("rank 0 sends 8 bytes"));
        crate::kernels::agree(mesh.world())?;
        end_unused();
        let strict = std::env::var(STRICT_VARIABLE).is_ok_and(|v| !v.is_empty() && v != "0");
        let context = RankContext {
            mesh,
            stats: Stats::default(),
            generator: Generator::new(seed),
            gradients: Engine::default(),
            main: std::thread::current().id(),
            inner: inner.to_id(),
            strict: AtomicBool::new(strict),
            overlap: AtomicBool::new(std::env::var(OVERLAP_VARIABLE).map_or(true, |v| v != "0")),
            split_inputs: RwLock::new(SplitInputs::from_env()),
            plans: Plans::default(),
        };
        let context = Arc::new(context);
        let device = Arc::downgrade(&context);
        let id = RANKS.write().unwrap_or_else(PoisonError::into_inner).insert(context);
        CURRENT.with(|current| current.borrow_mut().push(Registration(id)));
        Ok(SpatialDevice { inner, id, context: device })
    }

    /// The device of the inner backend.
    pub fn inner_device(&self) -> &D {
        &self.inner
    }

    /// The process grid this device's rank belongs to.
    pub fn mesh(&self) -> Arc<Mesh> {
        self.context().mesh.clone()
    }

    /// Whether convolutions, pools and interpolations compute what needs no halo while halos are on their way, as they do by
    /// default. The results are the same to the bit.
    pub fn set_overlap(&self, overlap: bool) {
        self.context().overlap.store(overlap, Ordering::Relaxed);
    }

    /// In strict mode an operation that would gather a split tensor for want of a rule is an error (a panic that
    /// names it). Also set by the environment variable `BURN_SPATIAL_STRICT`.
    pub fn set_strict(&self, strict: bool) {
        self.context().strict.store(strict, Ordering::Relaxed);
    }

    /// For tests: from now on every tensor made from data is split over the mesh in a way that `seed` decides, along
    /// dimensions with at least as many elements as ranks, in shards of uneven lengths; `None` ends the mode. Any thread
    /// may communicate in it, one at a time. All ranks make the same tensors in the same order. Also set by the
    /// environment variable `BURN_SPATIAL_SPLIT_INPUTS`.
    pub fn set_split_inputs(&self, seed: Option<u64>) {
        *self.context().split_inputs.write().expect("no panic while the mode is set") = seed.map(SplitInputs::new);
    }

    /// What this rank has counted so far.
    pub fn stats(&self) -> crate::stats::Snapshot {
        let context = self.context();
        context.stats.snapshot(context.plans.counts(), context.mesh.world().counters().snapshot())
    }

    /// The position of the random stream: what [`SpatialDevice::set_random_state`] resumes.
    pub fn random_state(&self) -> (u64, u64) {
        self.context().generator.state()
    }

    /// Continues the random stream at a position taken with [`SpatialDevice::random_state`].
    pub fn set_random_state(&self, state: (u64, u64)) {
        self.context().generator.set_state(state);
    }

    pub(crate) fn context(&self) -> Arc<RankContext> {
        self.context.upgrade().expect(ENDED)
    }
}

impl<D: DeviceOps> Default for SpatialDevice<D> {
    fn default() -> Self {
        let current = CURRENT.with(|current| current.borrow().last().map(|r| r.0));
        let id = current.or_else(|| {
            let ranks = RANKS.read().expect("no panic while ranks are registered");
            if ranks.all.len() == 1 { ranks.all.keys().next().copied() } else { None }
        });
        let id = id.unwrap_or_else(|| {
            panic!(
                "this thread is no rank of a mesh, so there is no default SpatialDevice: make one with SpatialDevice::new on the rank's thread, and pass it on to others"
            )
        });
        Self::from_id(DeviceId::new(0, id))
    }
}

impl<D: DeviceOps> Device for SpatialDevice<D> {
    fn from_id(id: DeviceId) -> Self {
        let context = lookup(id.index_id).expect(ENDED);
        SpatialDevice { inner: D::from_id(context.inner), id: id.index_id, context: Arc::downgrade(&context) }
    }

    /// The index names the rank; the inner device is the one the rank was registered with.
    fn to_id(&self) -> DeviceId {
        DeviceId::new(self.inner.to_id().type_id, self.id)
    }
}

impl<D: DeviceOps> DeviceOps for SpatialDevice<D> {}

impl<D> PartialEq for SpatialDevice<D> {
    fn eq(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.context, &other.context)
    }
}

impl<D> Eq for SpatialDevice<D> {}

impl<D: Debug> Debug for SpatialDevice<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.context.upgrade() {
            Some(context) => write!(f, "{:?} as rank {} of {}", self.inner, context.mesh.rank(), context.mesh.grid()),
            None => write!(f, "{:?} of an ended rank", self.inner),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::tensor::Tensor;
    use burn_flex::{Flex, FlexDevice};

    use super::*;
    use crate::comm::threads::world;
    use crate::mesh::Grid;

    type D = SpatialDevice<FlexDevice>;

    fn mesh() -> Arc<Mesh> {
        Mesh::new(world(1).remove(0), Grid::ONE).unwrap()
    }

    fn ranks_of_this_thread() -> usize {
        CURRENT.with(|current| current.borrow().len())
    }

    /// More registrations than there are numbers; what is still used stays.
    #[test]
    fn seventy_thousand_registrations() {
        let mesh = mesh();
        let kept = D::new(FlexDevice, mesh.clone()).unwrap();
        // A tensor keeps its rank, too.
        let tensor = Tensor::<crate::Spatial<Flex>, 1>::from_data([1.0, 2.0], &D::new(FlexDevice, mesh.clone()).unwrap());
        for _ in 0..70_000 {
            let device = D::new(FlexDevice, mesh.clone()).unwrap();
            assert_eq!(device, D::default());
            assert_eq!(device, D::from_id(device.to_id()));
            assert_ne!(device, kept);
            assert!(ranks_of_this_thread() <= 3);
        }
        assert_eq!(kept, D::from_id(kept.to_id()));
        assert_eq!(tensor.clone().mul_scalar(2.0).into_data().to_vec::<f32>().unwrap(), [2.0, 4.0]);
        assert_ne!(tensor.device(), kept);
    }

    /// A device of an ended rank is never taken for the one that got its number.
    #[test]
    fn an_ended_rank_stays_ended() {
        let ended = thread::spawn(|| D::new(FlexDevice, mesh()).unwrap()).join().unwrap();
        let next = D::new(FlexDevice, mesh()).unwrap();
        let same_number = D { id: ended.id, ..next.clone() };
        assert_ne!(ended, same_number);
        assert!(format!("{ended:?}").ends_with("of an ended rank"));
        let error = thread::spawn(move || ended.mesh()).join().unwrap_err();
        let text = error.downcast_ref::<String>().map(String::as_str).or(error.downcast_ref::<&str>().copied());
        assert!(text.is_some_and(|text| text.contains("has ended with its thread")), "{text:?}");
    }

    #[test]
    fn numbers_are_taken_again_as_late_as_can_be() {
        let context = D::new(FlexDevice, mesh()).unwrap().context();
        let mut ranks = Ranks::default();
        assert_eq!([ranks.insert(context.clone()), ranks.insert(context.clone())], [0, 1]);
        ranks.all.remove(&0);
        assert_eq!(ranks.insert(context.clone()), 2);
        ranks.next = u16::MAX;
        assert_eq!([ranks.insert(context.clone()), ranks.insert(context.clone())], [u16::MAX, 0]);
        assert_eq!(ranks.insert(context), 3);
    }
}
