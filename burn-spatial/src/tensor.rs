//! The tensor primitive: a local value, and how the global tensor lies on the mesh.

use std::fmt;
use std::sync::{Arc, OnceLock};

use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use crate::comm::CommError;
use crate::device::{RankContext, SpatialDevice};
use crate::gradients::{Compute, Deferred};
use crate::kernels::LocalKernels;
use crate::kind::{Kind, accumulator};
use crate::layout::{Layout, Storage};
use crate::mesh::AxisSet;
use crate::random::Draw;
use crate::stats::Live;
use crate::transfer::{KeyedPlan, Region, collective, redistribute};

/// A tensor of global shape of which this rank stores a block.
pub struct SpatialTensor<B: LocalKernels, K: Kind<B>> {
    value: Value<B, K>,
    layout: Layout,
    device: SpatialDevice<B::Device>,
    dtype: DType,
}

/// What others sent of the surroundings of a block: boxes of the block that `plan` needs.
#[derive(Clone)]
pub(crate) struct Received<P> {
    pub(crate) plan: Arc<KeyedPlan>,
    pub(crate) parts: Arc<Vec<(Region, P)>>,
    #[allow(dead_code)]
    live: Arc<Live>,
}

/// What the clones of a block have in common.
struct Block<P> {
    #[allow(dead_code)]
    live: Live,
    /// The first halo that came to it, for the next operation that needs the same.
    received: OnceLock<Received<P>>,
}

enum Value<B: LocalKernels, K: Kind<B>> {
    /// This rank's block.
    Local(K::Primitive, Arc<Block<K::Primitive>>),
    /// A sum over ranks, made when read. With `layout.pending` empty it is a weight gradient on its way.
    Deferred(Arc<Deferred<B, K>>, #[allow(dead_code)] Arc<Live>),
    /// Drawn when it meets a layout.
    Random(Draw),
}

impl<B: LocalKernels, K: Kind<B>> Clone for SpatialTensor<B, K> {
    fn clone(&self) -> Self {
        let value = match &self.value {
            Value::Local(local, block) => Value::Local(local.clone(), block.clone()),
            Value::Deferred(deferred, live) => Value::Deferred(deferred.clone(), live.clone()),
            Value::Random(draw) => Value::Random(*draw),
        };
        SpatialTensor { value, layout: self.layout.clone(), device: self.device.clone(), dtype: self.dtype }
    }
}

impl<B: LocalKernels, K: Kind<B>> fmt::Debug for SpatialTensor<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} on {:?}", self.dtype, self.layout, self.device)
    }
}

impl<B: LocalKernels, K: Kind<B>> TensorMetadata for SpatialTensor<B, K> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Shape {
        self.layout.shape()
    }

    fn rank(&self) -> usize {
        self.layout.rank()
    }
}

/// A failure to communicate ends the rank: the launcher reports it and ends the job.
pub(crate) fn communicated<T>(result: Result<T, CommError>) -> T {
    result.unwrap_or_else(|error| match error {
        // Of another rank's failure nothing is printed: its own message tells.
        CommError::Poisoned { .. } => std::panic::resume_unwind(Box::new(error.to_string())),
        error => panic!("{error}"),
    })
}

impl<B: LocalKernels, K: Kind<B>> SpatialTensor<B, K> {
    /// From this rank's block under `layout`, whose sums are made.
    pub(crate) fn new(local: K::Primitive, layout: Layout, device: SpatialDevice<B::Device>) -> Self {
        assert!(layout.pending().is_empty(), "a block is no share of a sum: {layout}");
        let dtype = local.dtype();
        Self::share(local, layout, dtype, device)
    }

    /// A tensor of `dtype` from this rank's share of a sum over the pending axes of `layout`, if any: for operations that leave
    /// sums pending. The share may be of the type in which `dtype` is summed.
    pub(crate) fn share(local: K::Primitive, layout: Layout, dtype: DType, device: SpatialDevice<B::Device>) -> Self {
        let context = device.context();
        debug_assert_eq!(local.shape(), layout.local_shape(context.mesh.coords()), "block and layout {layout} agree");
        let pending = context.mesh.effective(layout.pending());
        let layout = layout.with_pending(pending);
        let local = K::cast(local, if pending.is_empty() { dtype } else { accumulator(dtype) });
        let live = context.stats.live(local.shape().num_elements() * local.dtype().size());
        let value = if pending.is_empty() {
            Value::Local(local, Arc::new(Block { live, received: OnceLock::new() }))
        } else {
            Value::Deferred(Arc::new(Deferred::new(local, dtype, pending, device.inner_device().clone())), Arc::new(live))
        };
        SpatialTensor { value, layout, device, dtype }
    }

    /// The same value on every rank.
    pub(crate) fn full(local: K::Primitive, device: SpatialDevice<B::Device>) -> Self {
        let layout = Layout::full(&local.shape());
        Self::new(local, layout, device)
    }

    /// From data that every rank has.
    pub(crate) fn input(data: K::Primitive, device: &SpatialDevice<B::Device>) -> Self {
        let layout = device.context().input(&data.shape());
        Self::full(data, device.clone()).into_layout(&layout)
    }

    /// A tensor that is drawn when it meets a layout.
    pub(crate) fn random(draw: Draw, shape: Shape, dtype: DType, device: SpatialDevice<B::Device>) -> Self {
        SpatialTensor { value: Value::Random(draw), layout: Layout::full(&shape), device, dtype }
    }

    /// A sum over ranks of shares that each computes when there is time; at once if it has no others to wait for. Shares may
    /// be of the type in which `dtype` is summed.
    pub(crate) fn open(share: Compute<K::Primitive>, shape: Shape, dtype: DType, over: AxisSet, device: SpatialDevice<B::Device>) -> Self {
        let context = device.context();
        let layout = Layout::full(&shape).with_pending(context.mesh.effective(over));
        if layout.pending().is_empty() {
            return Self::share(share(), layout, dtype, device);
        }
        let live = Arc::new(context.stats.live(shape.num_elements() * accumulator(dtype).size()));
        let deferred = Deferred::open(share, shape, dtype, layout.pending(), device.inner_device().clone());
        SpatialTensor { value: Value::Deferred(Arc::new(deferred), live), layout, device, dtype }
    }

    /// A weight gradient: this rank's share of a full value, summed by the gradient engine.
    pub(crate) fn gradient(self) -> Self {
        let context = self.context();
        match self.value {
            Value::Deferred(deferred, live) if !self.layout.pending().is_empty() => {
                let layout = self.layout.summed();
                assert!(layout.is_full(), "a weight gradient is full, not {layout}");
                let mesh = context.talking_alone("a backward pass");
                communicated(context.gradients.push(mesh, &context.stats, deferred.clone()));
                SpatialTensor { value: Value::Deferred(deferred, live), layout, device: self.device, dtype: self.dtype }
            }
            value => SpatialTensor { value, ..self },
        }
    }

    /// How the tensor lies on the mesh.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where it lives.
    pub fn device(&self) -> &SpatialDevice<B::Device> {
        &self.device
    }

    pub(crate) fn context(&self) -> Arc<RankContext> {
        self.device.context()
    }

    pub(crate) fn is_random(&self) -> bool {
        matches!(self.value, Value::Random(_))
    }

    /// What came for `plan` before, if that is what was kept.
    pub(crate) fn received(&self, plan: &KeyedPlan) -> Option<Received<K::Primitive>> {
        let Value::Local(_, block) = &self.value else { return None };
        block.received.get().filter(|received| received.plan.is(plan)).cloned()
    }

    /// Keeps what came for `plan`, as long as the block lives, unless something else was kept before.
    pub(crate) fn keep_received(&self, plan: &Arc<KeyedPlan>, parts: Vec<(Region, K::Primitive)>) -> Received<K::Primitive> {
        let bytes: usize = parts.iter().map(|(region, _)| region.elements() * self.dtype.size()).sum();
        let live = Arc::new(self.context().stats.live(bytes));
        let received = Received { plan: plan.clone(), parts: Arc::new(parts), live };
        if let Value::Local(_, block) = &self.value {
            let _ = block.received.set(received.clone());
        }
        received
    }

    /// This rank's share of a pending sum, of the type in which it is summed.
    pub(crate) fn partial(&self) -> Option<K::Primitive> {
        match &self.value {
            Value::Deferred(deferred, _) if !self.layout.pending().is_empty() => deferred.partial(),
            _ => None,
        }
    }

    /// The local block, with pending sums made and random values drawn. Collective where a sum is pending.
    pub(crate) fn settle(self) -> (K::Primitive, Layout) {
        let layout = self.layout.summed();
        match self.value {
            Value::Local(local, _) => (local, layout),
            Value::Deferred(deferred, _) => {
                let context = self.device.context();
                (communicated(collective::read(&context, &deferred)), layout)
            }
            Value::Random(draw) => {
                let coords = self.device.context().mesh.coords();
                let data = draw.block(&layout, coords, self.dtype);
                (K::from_data(data, self.device.inner_device()), layout)
            }
        }
    }

    /// The same tensor under `layout`, with its sums made, whatever `layout` says of them: a value is a share of a sum only
    /// where an operation left it so. Collective where data has to move between ranks.
    pub(crate) fn into_layout(self, layout: &Layout) -> Self {
        let layout = &layout.summed();
        if self.layout == *layout && matches!(self.value, Value::Local(..)) {
            return self;
        }
        let device = self.device.clone();
        let context = device.context();
        if let Value::Random(draw) = self.value {
            // Each rank draws its own block; uniform axes have to be stored.
            let target = layout.materialized();
            let data = draw.block(&target, context.mesh.coords(), self.dtype);
            return Self::new(K::from_data(data, device.inner_device()), target, device);
        }
        let (local, from) = self.settle();
        let local = communicated(redistribute::<B, K>(&context, local, &from, layout, device.inner_device()));
        Self::new(local, layout.clone(), device)
    }

    /// Whole on every rank: gathers what is split and stores what is uniform.
    pub(crate) fn into_full(self) -> Self {
        let layout = Layout::full(&self.layout.shape());
        self.into_layout(&layout)
    }

    /// The value, whole, as the inner backend's.
    pub(crate) fn into_whole(self) -> K::Primitive {
        self.into_full().settle().0
    }

    /// The block for an operation without a rule: gathered, counted, logged once, and refused in strict mode.
    pub(crate) fn gathered(self, op: &'static str) -> K::Primitive {
        let moves = self.layout.axes().any(|a| matches!(a.storage, Storage::Split { .. }));
        if moves {
            let context = self.context();
            if context.strict() {
                panic!(
                    "{op} has no rule for a tensor that lies as {} and would gather it (strict mode). Make it full first with to_full(), or unset {}",
                    self.layout,
                    crate::device::STRICT_VARIABLE
                );
            }
            if context.stats.gather(op) && context.mesh.rank() == 0 {
                tracing::warn!("{op} has no rule for a tensor that lies as {}: gathered on every rank (said once)", self.layout);
            }
        }
        self.into_whole()
    }
}
