//! Convolutions, pools and interpolations of split volumes. Each rank computes its outputs from a block, its shard and a halo
//! that comes from others; gradients of halos go back where they came from.

use std::ops::Range;
use std::sync::Arc;

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use super::{expanded, map_linear, split_over, sum_dim};
use crate::Spatial;
use crate::device::{RankContext, SpatialDevice};
use crate::gradients::Compute;
use crate::kernels::{self, Count, Filter, LocalKernels, Slab, Window, whole_slab};
use crate::kind::{Float, Int, Kind};
use crate::layout::{Axis, AxisNeed, Layout, Piece, Storage};
use crate::mesh::AxisSet;
use crate::nn::WindowBackend;
use crate::tensor::{Received, SpatialTensor, communicated};
use crate::trace::timed;
use crate::transfer::{Arrival, Exchange, KeyedPlan, Region, assemble, exchange_add, slices};
use crate::window::parts::{self, Part};
use crate::window::{AxisWindow, ConvSpec, PaddingMode, PoolSpec, Taps, UpsampleSpec, WindowPlan, scaled};

pub(super) type Tensor<B> = SpatialTensor<B, Float>;

/// Two volumes of which one is computed from blocks of the other.
struct Halo {
    /// How the volume lies of which blocks are needed.
    input: Layout,
    /// How the other lies.
    output: Layout,
    /// From the shards of the one to the blocks.
    plan: Arc<KeyedPlan>,
}

impl Halo {
    fn new(context: &RankContext, input: Layout, output: Layout, needs: [AxisNeed; 3]) -> Halo {
        let stored = input.local_shape(context.mesh.coords());
        let mut axes = vec![Axis::full(stored[0]), Axis::full(stored[1])];
        let mut all = vec![AxisNeed::whole(stored[0]), AxisNeed::whole(stored[1])];
        for (i, need) in needs.into_iter().enumerate() {
            axes.push(axis_of(&input, 2 + i));
            all.push(need);
        }
        Halo { plan: context.plan(&axes, &all), input, output }
    }

    /// What the block of `x` is made of: this rank's shard, and what came from others. While that is on its way, `compute`
    /// does with the shard what is in `near`. Collective, unless the same came before and was kept, on all ranks then.
    fn parts<B: LocalKernels, T, P>(
        &self,
        context: &RankContext,
        x: Tensor<B>,
        near: Vec<P>,
        out: T,
        mut compute: impl FnMut(T, &FloatTensor<B>, P) -> T,
    ) -> (T, FloatTensor<B>, Received<FloatTensor<B>>) {
        let device = x.device().clone();
        let x = x.into_layout(&self.input);
        let own = B::float_contiguous(x.clone().settle().0);
        let receive = |messages| self.receive(x.clone(), messages, device.inner_device());
        let mut received = x.received(&self.plan).map_or_else(|| Arrival::Coming(self.send::<B>(context, &own)), Arrival::Here);
        if !context.overlap() {
            received = Arrival::Here(received.get(receive));
        }
        let out = near.into_iter().fold(out, |out, part| {
            let out = compute(out, &own, part);
            if let Arrival::Coming(messages) = &mut received {
                communicated(messages.progress());
            }
            out
        });
        (out, own, received.get(receive))
    }

    /// Where this rank's shard lies in the block, if all of it does.
    fn shard(&self) -> Option<[Range<usize>; 3]> {
        self.plan.keeps.iter().find(|(from, _)| from.length == self.plan.own).map(|(_, to)| ranges(to))
    }

    /// The block in the boxes it is made of: the shard as it lies, what it has of itself as padding, and what was received.
    /// `None` where the block has not all of the shard, or is in too many boxes.
    fn slabs<B: LocalKernels>(&self, own: &FloatTensor<B>, received: &Received<FloatTensor<B>>) -> Option<Vec<Slab<B>>> {
        self.shard()?;
        let kept = self.plan.keeps.iter().map(|(from, to)| match from.length == self.plan.own {
            true => (ranges(to), own.clone()),
            false => (ranges(to), B::float_contiguous(B::float_slice(own.clone(), &slices(from)))),
        });
        let mut boxes: Vec<Slab<B>> = kept.chain(received.parts.iter().map(|(to, part)| (ranges(to), part.clone()))).collect();
        let voxels = |at: &[Range<usize>; 3]| at.iter().map(Range::len).product::<usize>();
        // Most rows are the shard's.
        boxes.sort_by_key(|(at, _)| std::cmp::Reverse(voxels(at)));
        let whole = (1..=B::BOXES).contains(&boxes.len())
            && boxes.iter().map(|(at, _)| voxels(at)).sum::<usize>() == voxels(&ranges(&self.plan.needed()));
        whole.then_some(boxes)
    }

    /// Starts the exchange: [`Halo::receive`] ends it. Collective.
    fn send<B: LocalKernels>(&self, context: &RankContext, own: &FloatTensor<B>) -> Exchange<'_> {
        self.count(context);
        timed!(HALO, "send");
        communicated(Exchange::start::<B, Float>(context.talking_as(&self.plan), &self.plan, own))
    }

    /// Waits for the halo of `x`, which keeps it: on every rank, so that none waits where another does not send.
    fn receive<B: LocalKernels>(&self, x: Tensor<B>, messages: Exchange<'_>, device: &B::Device) -> Received<FloatTensor<B>> {
        timed!(HALO, "receive");
        x.keep_received(&self.plan, communicated(messages.receive::<B, Float>(device)))
    }

    /// The box `at` of this rank's block.
    fn block<B: LocalKernels>(
        &self,
        own: &FloatTensor<B>,
        received: &Received<FloatTensor<B>>,
        at: &[Range<usize>; 3],
        device: &B::Device,
    ) -> FloatTensor<B> {
        timed!(HALO, "block");
        assemble::<B, Float>(&self.plan, own, &received.parts, &region(&own.shape(), at), device)
    }

    /// How many voxels a box may have that is assembled of shards like `own`.
    fn assembled<B: LocalKernels>(own: &FloatTensor<B>) -> usize {
        B::ASSEMBLED / (own.shape()[0] * own.shape()[1] * own.dtype().size()).max(1)
    }

    /// The gradient of a volume, from that of the blocks: `part` gives what lies in a box of this rank's block, first in
    /// those of other ranks; `None` stands for zeros. Collective.
    fn scatter<B: LocalKernels>(
        &self,
        context: &RankContext,
        device: SpatialDevice<B::Device>,
        dtype: DType,
        mut part: impl FnMut([Range<usize>; 3]) -> Option<FloatTensor<B>>,
    ) -> Tensor<B> {
        self.count(context);
        let zeros = |region: &Region| B::float_zeros(Shape::from(region.length.clone()), device.inner_device(), dtype.into());
        let part = |region: &Region| part(ranges(region)).unwrap_or_else(|| zeros(region));
        let (mesh, overlap) = (context.talking_as(&self.plan), context.overlap());
        let own = exchange_add::<B, Float>(mesh, &self.plan, dtype, device.inner_device(), overlap, part);
        SpatialTensor::new(communicated(own), self.input.clone(), device)
    }

    fn count(&self, context: &RankContext) {
        if !self.plan.sends.is_empty() || !self.plan.receives.is_empty() {
            context.stats.halo();
        }
    }
}

/// The volume's part of a box.
fn ranges(region: &Region) -> [Range<usize>; 3] {
    std::array::from_fn(|i| region.start[2 + i]..region.start[2 + i] + region.length[2 + i])
}

/// A box of all samples and channels of a tensor of `shape`.
fn region(shape: &Shape, at: &[Range<usize>; 3]) -> Region {
    let start = [0, 0].into_iter().chain(at.iter().map(|range| range.start)).collect();
    Region { start, length: [shape[0], shape[1]].into_iter().chain(at.iter().map(Range::len)).collect() }
}

/// A box of all samples and channels, without a copy where it is all.
fn box_of<B: LocalKernels, K: Kind<B>>(all: &K::Primitive, at: &[Range<usize>; 3]) -> K::Primitive {
    let region = region(&all.shape(), at);
    if region.length[..] == all.shape()[..] { all.clone() } else { K::slice(all.clone(), &slices(&region)) }
}

/// How a volume `x` has to lie for an operation that makes one of `extents` from it or of which it is made, and how that
/// one then lies: batch and volume stay split, channels are whole, an axis that has fewer voxels there than ranks is
/// whole.
pub(super) fn placed(x: &Layout, extents: [usize; 3]) -> (Layout, Layout) {
    let mut near = x.summed();
    for dim in 0..5 {
        let one = matches!(near.dim(dim), [] | [Axis { storage: Storage::Full | Storage::Split { .. }, .. }]);
        if dim == 1 || !one {
            near = near.full_dim(dim);
        }
    }
    let mut far = near.clone();
    for (i, extent) in extents.into_iter().enumerate() {
        let axis = scaled(&axis_of(&near, 2 + i), extent).unwrap_or_else(|| {
            tracing::debug!("axis {} of {near} would have fewer voxels than ranks: made whole", 2 + i);
            near = near.full_dim(2 + i);
            Axis::full(extent)
        });
        far = far.with_dim(2 + i, vec![axis]);
    }
    (near, far)
}

/// A window operation on one volume: layouts, and what this rank does.
struct Windowed {
    halo: Halo,
    /// The geometry on the assembled block.
    local: Window,
    /// Global position of the block's first voxel.
    origin: [isize; 3],
    /// Extents of the whole input volume.
    volume: [usize; 3],
}

impl Windowed {
    /// Windows over `x`.
    fn over(context: &RankContext, x: &Layout, windows: [AxisWindow; 3]) -> Windowed {
        let (input, output) = placed(x, std::array::from_fn(|i| windows[i].output(x.extent(2 + i))));
        Windowed::new(context, input, output, windows)
    }

    /// Windows over a volume of `channels` and `extents` that have an output for each voxel of `x`.
    fn onto(context: &RankContext, x: &Layout, channels: usize, extents: [usize; 3], windows: [AxisWindow; 3]) -> Windowed {
        let (output, input) = placed(x, extents);
        Windowed::new(context, input.with_dim(1, vec![Axis::full(channels)]), output, windows)
    }

    fn new(context: &RankContext, input: Layout, output: Layout, windows: [AxisWindow; 3]) -> Windowed {
        let coords = context.mesh.coords();
        let spatial: [WindowPlan; 3] =
            std::array::from_fn(|i| WindowPlan::new(&windows[i], &axis_of(&input, 2 + i), &axis_of(&output, 2 + i), coords));
        Windowed {
            local: std::array::from_fn(|i| spatial[i].local),
            origin: std::array::from_fn(|i| spatial[i].origin),
            volume: std::array::from_fn(|i| input.extent(2 + i)),
            halo: Halo::new(context, input, output, spatial.map(|plan| plan.need)),
        }
    }

    /// The operation on `x` in parts, each of which `compute` adds to `out`, given the boxes that make up the block it reads:
    /// first, while the halo is on its way, what needs none. Parts for which `reads_slabs` holds read the shard and the halo
    /// where they lie; for the others boxes are assembled. Collective.
    fn in_parts<B: LocalKernels, T>(
        &self,
        context: &RankContext,
        x: Tensor<B>,
        reads_slabs: impl Fn(&Window) -> bool,
        out: T,
        mut compute: impl FnMut(T, &[Slab<B>], &Part) -> T,
    ) -> T {
        let device = x.device().clone();
        let messages = !self.halo.plan.sends.is_empty() || !self.halo.plan.receives.is_empty();
        let shard = self.halo.shard().filter(|_| messages);
        let parts = shard.and_then(|shard| parts::split(&self.local, shard, B::PIECES));
        let (near, far) = parts.unwrap_or_else(|| (Vec::new(), vec![Part::whole(&self.local)]));
        let (out, own, received) =
            self.halo.parts::<B, _, _>(context, x, near, out, |out, own, part| compute(out, &[whole_slab::<B>(own.clone())], &part));
        let slabs = self.halo.slabs::<B>(&own, &received);
        far.iter().fold(out, |out, part| match &slabs {
            Some(slabs) if slabs.len() == 1 || reads_slabs(&part.window) => compute(out, slabs, &part.on_block(&self.local)),
            _ => part.cut(&self.local, Halo::assembled::<B>(&own)).iter().fold(out, |out, part| {
                let block = self.halo.block::<B>(&own, &received, &part.input, device.inner_device());
                compute(out, &[whole_slab::<B>(block)], part)
            }),
        })
    }

    /// The convolution of `x`. Collective.
    fn convolve<B: LocalKernels>(&self, context: &RankContext, x: Tensor<B>, filter: &Filter<B>) -> Tensor<B> {
        let (device, dtype) = (x.device().clone(), x.dtype());
        let output = self.output(filter.weight.shape()[0]);
        let y = B::float_unwritten(output.local_shape(context.mesh.coords()), device.inner_device(), dtype);
        let reads_slabs = |window: &Window| filter.weight.dtype() == dtype && B::conv3d_reads_slabs(dtype, window);
        let y = self.in_parts::<B, _>(context, x, reads_slabs, y, |y, slabs, part| {
            kernels::conv3d_part::<B>(y, part.at, slabs, filter, &part.window)
        });
        SpatialTensor::new(y, output, device)
    }

    /// The gradient of the input from that of the output: `compute` gives what the outputs of a
    /// part add to its box. Collective.
    fn back<B: LocalKernels>(
        &self,
        context: &RankContext,
        device: SpatialDevice<B::Device>,
        dtype: DType,
        mut compute: impl FnMut(&Part) -> FloatTensor<B>,
    ) -> Tensor<B> {
        self.halo.scatter::<B>(context, device, dtype, |input| parts::reading(&self.local, input).map(|part| compute(&part)))
    }

    /// This rank's share of the gradient of the weight that leads from `input` to `output`, whose gradient one of them is.
    /// Collective.
    fn weight_share<B: LocalKernels>(
        self,
        context: &RankContext,
        input: Tensor<B>,
        output: Tensor<B>,
        weight: [usize; 5],
        groups: usize,
    ) -> Share<B> {
        let device = input.device().inner_device().clone();
        let layout = self.output(weight[0]);
        let ((), own, received) = self.halo.parts::<B, _, ()>(context, input, Vec::new(), (), |_, _, _| ());
        let output = output.into_layout(&layout).settle().0;
        let (over, dtype) = (layout.split_over(), output.dtype());
        let held = (self.halo.plan.needed().elements() + output.shape().num_elements()) * dtype.size();
        let compute = move || {
            let reads_slabs = B::conv3d_weight_grad_reads_slabs(dtype, &self.local);
            let share = |x: &[Slab<B>], grad: &FloatTensor<B>, window: &Window| {
                kernels::conv3d_weight_grad_of::<B>(x, grad, weight, window, groups)
            };
            match self.halo.slabs::<B>(&own, &received) {
                Some(slabs) if slabs.len() == 1 || own.dtype() == dtype && reads_slabs => share(&slabs, &output, &self.local),
                _ => {
                    let parts = Part::whole(&self.local).cut(&self.local, Halo::assembled::<B>(&own));
                    let shares = parts.iter().map(|part| {
                        let block = self.halo.block::<B>(&own, &received, &part.input, &device);
                        let share = share(&[whole_slab::<B>(block)], &box_of::<B, Float>(&output, &part.outputs()), &part.window);
                        <Float as Kind<B>>::widened(share)
                    });
                    let zeros = || B::float_zeros(Shape::from(weight), &device, dtype.into());
                    shares.reduce(B::float_add).unwrap_or_else(zeros)
                }
            }
        };
        Share { compute: Box::new(compute), dtype, over, held }
    }

    /// For which parts a pool reads the shard and the halo where they lie. Of a few columns at a side a box is assembled:
    /// joining whole rows for each takes longer.
    fn pools_read_slabs<B: LocalKernels>(&self, dtype: DType) -> impl Fn(&Window) -> bool {
        let width = self.local[2].input;
        move |part| B::reads_slabs(dtype) && part[2].input == width
    }

    /// The output's layout with `channels`.
    fn output(&self, channels: usize) -> Layout {
        self.halo.output.with_dim(1, vec![Axis::full(channels)])
    }
}

/// An interpolation or an adaptive mean of one volume.
struct Resampled {
    halo: Halo,
    /// What the outputs read in the assembled block.
    local: [Taps; 3],
}

impl Resampled {
    fn new(context: &RankContext, x: &Layout, taps: &[Taps; 3]) -> Resampled {
        let (input, output) = placed(x, std::array::from_fn(|i| taps[i].outputs()));
        let coords = context.mesh.coords();
        let needs = std::array::from_fn(|i| {
            let piece = |start, end| {
                let (start, end) = taps[i].reach(start, end);
                vec![Piece { start, end, at: 0 }]
            };
            match axis_of(&output, 2 + i).as_split() {
                None => AxisNeed { mesh: None, by_coord: vec![piece(0, taps[i].outputs())] },
                Some((mesh, offsets)) => AxisNeed { mesh: Some(mesh), by_coord: offsets.windows(2).map(|o| piece(o[0], o[1])).collect() },
            }
        });
        let local = std::array::from_fn(|i| {
            let (start, end) = axis_of(&output, 2 + i).owned(coords);
            taps[i].part(start, end)
        });
        Resampled { halo: Halo::new(context, input, output, needs), local }
    }

    /// The `outputs` over a box of this rank's block.
    fn over(&self, outputs: &[Range<usize>; 3], input: &[Range<usize>; 3]) -> [Taps; 3] {
        std::array::from_fn(|i| self.local[i].over(&outputs[i], &input[i]))
    }

    /// `x` resampled, in parts as [`Windowed::in_parts`]. Collective.
    fn forward<B: LocalKernels>(&self, context: &RankContext, x: Tensor<B>) -> Tensor<B> {
        let (device, dtype) = (x.device().clone(), x.dtype());
        if self.halo.plan.is_identity() {
            let own = x.into_layout(&self.halo.input).settle().0;
            return SpatialTensor::new(kernels::resample::<B>(own, &self.local), self.halo.output.clone(), device);
        }
        let outputs = std::array::from_fn(|i| self.local[i].outputs());
        let shard = self.halo.shard().unwrap_or([const { 0..0 }; 3]);
        let inner: [Range<usize>; 3] = std::array::from_fn(|i| self.local[i].inner(&shard[i]));
        let (near, far) = match inner.iter().any(Range::is_empty) {
            true => (Vec::new(), vec![outputs.map(|n| 0..n)]),
            false => (parts::along_depth(&inner, B::PIECES).collect(), parts::around(&inner, outputs)),
        };
        let y = B::float_unwritten(self.halo.output.local_shape(context.mesh.coords()), device.inner_device(), dtype);
        let resampled = |y, block, outputs: &[Range<usize>; 3], input: &[Range<usize>; 3]| {
            kernels::resample_part::<B>(y, std::array::from_fn(|i| outputs[i].start), block, &self.over(outputs, input))
        };
        let (y, own, received) =
            self.halo.parts::<B, _, _>(context, x, near, y, |y, own, outputs| resampled(y, own.clone(), &outputs, &shard));
        let reach = |outputs: &[Range<usize>; 3]| {
            std::array::from_fn(|i| {
                let (start, end) = self.local[i].reach(outputs[i].start, outputs[i].end);
                start..end
            })
        };
        let far = far.into_iter().flat_map(|outputs| parts::cut(outputs, Halo::assembled::<B>(&own), &reach));
        let y = far.fold(y, |y, outputs| {
            let input = reach(&outputs);
            resampled(y, self.halo.block::<B>(&own, &received, &input, device.inner_device()), &outputs, &input)
        });
        SpatialTensor::new(y, self.halo.output.clone(), device)
    }

    /// The gradient of [`Resampled::forward`]'s x. Collective.
    fn back<B: LocalKernels>(&self, context: &RankContext, grad: Tensor<B>) -> Tensor<B> {
        let device = grad.device().clone();
        let grad = grad.into_layout(&self.halo.output).settle().0;
        self.halo.scatter::<B>(context, device, grad.dtype(), |input| {
            let readers: [Range<usize>; 3] = std::array::from_fn(|i| self.local[i].readers(&input[i]));
            let read = readers.iter().all(|range| !range.is_empty());
            read.then(|| kernels::resample_grad::<B>(box_of::<B, Float>(&grad, &readers), &self.over(&readers, &input)))
        })
    }
}

/// The one axis of a dimension; extent 1 is whole.
fn axis_of(layout: &Layout, dim: usize) -> Axis {
    layout.dim(dim).first().cloned().unwrap_or(Axis::full(1))
}

fn dims(shape: &Shape) -> [usize; 5] {
    shape.dims()
}

fn conv_windows(spec: &ConvSpec, x: &Shape, weight: [usize; 5]) -> [AxisWindow; 3] {
    spec.window(dims(x), weight).unwrap_or_else(|error| panic!("{error}")).map(|axis| AxisWindow::of(&axis, spec.mode))
}

/// A pool of split volumes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool {
    /// The windows over the whole volume.
    pub windows: Window,
    /// What an average divides by, with the whole volume as its block.
    pub count: Count,
}

impl Pool {
    fn of(spec: &PoolSpec, x: &Shape) -> Pool {
        let windows = spec.window(dims(x)).unwrap_or_else(|error| panic!("{error}"));
        Pool { windows, count: spec.count(windows.map(|axis| axis.input)) }
    }

    fn on(&self, context: &RankContext, x: &Layout) -> (Windowed, Count) {
        let windowed = Windowed::over(context, x, self.windows.map(|axis| AxisWindow::of(&axis, PaddingMode::Zeros)));
        let count = self.count.at(windowed.origin);
        (windowed, count)
    }

    /// The maxima and their flat positions in the volume. Collective.
    pub fn max<B: LocalKernels>(&self, x: Tensor<B>) -> (Tensor<B>, SpatialTensor<B, Int>) {
        let device = x.device().clone();
        let context = device.context();
        let (windowed, _) = self.on(&context, x.layout());
        let (shape, dtype) = (windowed.halo.output.local_shape(context.mesh.coords()), x.dtype());
        let y = B::float_unwritten(shape.clone(), device.inner_device(), dtype);
        let out = (y, B::int_unwritten(shape, device.inner_device(), DType::I64));
        let (y, indices) = windowed.in_parts::<B, _>(&context, x, windowed.pools_read_slabs::<B>(dtype), out, |out, slabs, part| {
            let origin = std::array::from_fn(|i| windowed.origin[i] + part.input[i].start as isize);
            kernels::max_pool3d_part::<B>(out, part.at, slabs, &part.window, origin, windowed.volume)
        });
        let output = windowed.halo.output;
        (SpatialTensor::new(y, output.clone(), device.clone()), SpatialTensor::new(indices, output, device))
    }

    /// The gradient of the maximum's x, which lay at `x`. Collective.
    pub fn max_grad<B: LocalKernels>(&self, x: &Placement<B::Device>, grad: Tensor<B>, indices: SpatialTensor<B, Int>) -> Tensor<B> {
        let context = x.device.context();
        let (windowed, _) = self.on(&context, &x.layout);
        let grad = grad.into_layout(&windowed.halo.output).settle().0;
        let indices = indices.into_layout(&windowed.halo.output).settle().0;
        windowed.back::<B>(&context, x.device.clone(), grad.dtype(), |part| {
            let (grad, indices) = (box_of::<B, Float>(&grad, &part.outputs()), box_of::<B, Int>(&indices, &part.outputs()));
            let origin = std::array::from_fn(|i| windowed.origin[i] + part.input[i].start as isize);
            kernels::max_pool3d_grad::<B>(grad, indices, &part.window, origin, windowed.volume)
        })
    }

    /// The means. Collective.
    pub fn mean<B: LocalKernels>(&self, x: Tensor<B>) -> Tensor<B> {
        let device = x.device().clone();
        let context = device.context();
        let (windowed, count) = self.on(&context, x.layout());
        let (shape, dtype) = (windowed.halo.output.local_shape(context.mesh.coords()), x.dtype());
        let y = B::float_unwritten(shape, device.inner_device(), dtype);
        let y = windowed.in_parts::<B, _>(&context, x, windowed.pools_read_slabs::<B>(dtype), y, |y, slabs, part| {
            let starts = std::array::from_fn(|i| part.input[i].start);
            kernels::avg_pool3d_part::<B>(y, part.at, slabs, &part.window, count.from(starts))
        });
        SpatialTensor::new(y, windowed.halo.output, device)
    }

    /// The gradient of the mean's x, which lay at `x`. Collective.
    pub fn mean_grad<B: LocalKernels>(&self, x: &Placement<B::Device>, grad: Tensor<B>) -> Tensor<B> {
        let context = x.device.context();
        let (windowed, count) = self.on(&context, &x.layout);
        let grad = grad.into_layout(&windowed.halo.output).settle().0;
        windowed.back::<B>(&context, x.device.clone(), grad.dtype(), |part| {
            let count = count.within(&windowed.local, std::array::from_fn(|i| part.input[i].start));
            kernels::avg_pool3d_grad::<B>(box_of::<B, Float>(&grad, &part.outputs()), &part.window, count)
        })
    }
}

/// x `[N, C, ...]` with each axis resampled. Collective.
pub(super) fn resample<B: LocalKernels>(x: Tensor<B>, taps: &[Taps; 3]) -> Tensor<B> {
    let context = x.context();
    Resampled::new(&context, x.layout(), taps).forward(&context, x)
}

/// The gradient of [`resample`]'s x, which lay at `x`. Collective.
pub(super) fn resample_grad<B: LocalKernels>(x: &Placement<B::Device>, grad: Tensor<B>, taps: &[Taps; 3]) -> Tensor<B> {
    let context = x.device.context();
    Resampled::new(&context, &x.layout, taps).back(&context, grad)
}

/// This rank's share of the gradient of a parameter.
pub(super) struct Share<B: LocalKernels> {
    compute: Compute<FloatTensor<B>>,
    dtype: DType,
    /// The mesh axes over which shares are summed.
    over: AxisSet,
    /// Bytes that are kept until it is computed.
    held: usize,
}

impl<B: LocalKernels> Share<B> {
    pub fn computed(share: FloatTensor<B>, over: AxisSet) -> Share<B> {
        let dtype = share.dtype();
        Share { compute: Box::new(move || share), dtype, over, held: 0 }
    }

    /// The gradient of the parameter of `shape`, on its way to the gradient engine.
    pub fn gradient(self, shape: Shape, device: SpatialDevice<B::Device>) -> Tensor<B> {
        let Share { compute, dtype, over, held } = self;
        let context = device.context();
        let share = {
            let shape = shape.clone();
            move || B::float_reshape(compute(), shape)
        };
        let gradient = SpatialTensor::open(Box::new(share), shape, dtype, over, device).gradient();
        if held > B::HELD {
            context.compute_shares();
        }
        gradient
    }
}

/// This rank's share of the gradient of a convolution's weight. Collective.
pub(super) fn conv_weight_share<B: LocalKernels>(x: Tensor<B>, grad: Tensor<B>, weight: [usize; 5], spec: &ConvSpec) -> Share<B> {
    let context = x.context();
    let windowed = Windowed::over(&context, x.layout(), conv_windows(spec, &x.shape(), weight));
    windowed.weight_share(&context, x, grad, weight, spec.groups)
}

/// A transposed convolution: the gradient of a convolution from y to x, as a function of x.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transposed {
    /// Channels of y.
    pub channels: usize,
    /// Extents of y.
    pub extents: [usize; 3],
    /// The convolution's windows over y.
    pub windows: [AxisWindow; 3],
    /// Independent groups of channels.
    pub groups: usize,
}

impl Transposed {
    fn on(&self, context: &RankContext, x: &Layout) -> Windowed {
        Windowed::onto(context, x, self.channels, self.extents, self.windows)
    }

    /// y, without bias. Collective.
    pub fn forward<B: LocalKernels>(&self, x: Tensor<B>, weight: Tensor<B>) -> Tensor<B> {
        let device = x.device().clone();
        let context = device.context();
        let windowed = self.on(&context, x.layout());
        let x = x.into_layout(&windowed.halo.output).settle().0;
        let weight = weight.into_whole();
        windowed.back::<B>(&context, device, x.dtype(), |part| {
            kernels::conv3d_data_grad::<B>(box_of::<B, Float>(&x, &part.outputs()), weight.clone(), &part.window, self.groups)
        })
    }

    /// The gradient of x, which lay at `x`. Collective.
    pub fn x_grad<B: LocalKernels>(&self, x: &Layout, weight: Tensor<B>, grad: Tensor<B>) -> Tensor<B> {
        let device = grad.device().clone();
        let context = device.context();
        let windowed = self.on(&context, x);
        windowed.convolve(&context, grad, &Filter { weight: weight.into_whole(), bias: None, slope: 1.0, groups: self.groups })
    }

    /// This rank's share of the gradient of the weight. Collective.
    pub fn weight_share<B: LocalKernels>(&self, x: Tensor<B>, grad: Tensor<B>, weight: [usize; 5]) -> Share<B> {
        let context = x.context();
        let windowed = self.on(&context, x.layout());
        windowed.weight_share(&context, grad, x, weight, self.groups)
    }
}

/// What a backward pass on a split backend needs of an input: how it lay, and where.
#[derive(Clone, Debug)]
pub struct Placement<D> {
    pub(crate) layout: Layout,
    pub(crate) device: SpatialDevice<D>,
}

impl<B: LocalKernels> WindowBackend for Spatial<B> {
    type Placement = Placement<B::Device>;

    fn placement(x: &FloatTensor<Self>) -> Self::Placement {
        Placement { layout: x.layout().clone(), device: x.device().clone() }
    }

    fn whole_volume(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let layout = (2..5).fold(x.layout().summed(), |layout, dim| layout.full_dim(dim));
        x.into_layout(&layout)
    }

    fn conv3d_padded(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        slope: f64,
        spec: &ConvSpec,
    ) -> FloatTensor<Self> {
        let device = x.device().clone();
        let context = device.context();
        let weight_dims = dims(&weight.shape());
        let windowed = Windowed::over(&context, x.layout(), conv_windows(spec, &x.shape(), weight_dims));
        let (weight, bias) = (weight.into_whole(), bias.map(SpatialTensor::into_whole));
        windowed.convolve(&context, x, &Filter { weight, bias, slope, groups: spec.groups })
    }

    fn activation_grad(y: FloatTensor<Self>, grad: FloatTensor<Self>, slope: f64) -> FloatTensor<Self> {
        let (device, layout) = (y.device().clone(), y.layout().summed().materialized());
        let grad = grad.into_layout(&layout).settle().0;
        let y = y.into_layout(&layout).settle().0;
        SpatialTensor::new(kernels::activation_grad::<B>(y, grad, slope), layout, device)
    }

    fn conv3d_padded_x_grad(x: &Self::Placement, weight: FloatTensor<Self>, grad: FloatTensor<Self>, spec: &ConvSpec) -> FloatTensor<Self> {
        let device = x.device.clone();
        let context = device.context();
        let weight_dims = dims(&weight.shape());
        let windowed = Windowed::over(&context, &x.layout, conv_windows(spec, &x.layout.shape(), weight_dims));
        let grad = grad.into_layout(&windowed.output(weight_dims[0])).settle().0;
        let weight = weight.into_whole();
        windowed.back::<B>(&context, device, grad.dtype(), |part| {
            kernels::conv3d_data_grad::<B>(box_of::<B, Float>(&grad, &part.outputs()), weight.clone(), &part.window, spec.groups)
        })
    }

    fn conv3d_padded_weight_grad(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        weight_shape: [usize; 5],
        spec: &ConvSpec,
    ) -> FloatTensor<Self> {
        let device = x.device().clone();
        conv_weight_share(x, grad, weight_shape, spec).gradient(Shape::from(weight_shape), device)
    }

    fn conv3d_padded_bias_grad(grad: FloatTensor<Self>) -> FloatTensor<Self> {
        bias_grad(grad)
    }

    fn max_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> (FloatTensor<Self>, IntTensor<Self>) {
        Pool::of(spec, &x.shape()).max(x)
    }

    fn max_pool3d_grad(x: &Self::Placement, grad: FloatTensor<Self>, indices: IntTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        Pool::of(spec, &x.layout.shape()).max_grad(x, grad, indices)
    }

    fn avg_pool3d(x: FloatTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        Pool::of(spec, &x.shape()).mean(x)
    }

    fn avg_pool3d_grad(x: &Self::Placement, grad: FloatTensor<Self>, spec: &PoolSpec) -> FloatTensor<Self> {
        Pool::of(spec, &x.layout.shape()).mean_grad(x, grad)
    }

    fn upsample3d(x: FloatTensor<Self>, spec: &UpsampleSpec) -> FloatTensor<Self> {
        let taps = spec.taps(dims(&x.shape()));
        resample(x, &taps)
    }

    fn upsample3d_grad(x: &Self::Placement, grad: FloatTensor<Self>, spec: &UpsampleSpec) -> FloatTensor<Self> {
        resample_grad(x, grad, &spec.taps(dims(&x.layout.shape())))
    }
}

/// The sum over everything but channels, as a gradient of a whole parameter.
pub(crate) fn bias_grad<B: LocalKernels>(grad: Tensor<B>) -> Tensor<B> {
    let channels = grad.shape()[1];
    // A channel split over ranks has no place in a parameter.
    let grad = if split_over(grad.layout().dim(1)).is_empty() {
        grad
    } else {
        let layout = grad.layout().full_dim(1);
        grad.into_layout(&layout)
    };
    let scale = |t, n: usize| B::float_mul_scalar(t, (n as f64).into());
    let dtype = grad.dtype();
    let mut sum = super::widened(grad);
    for dim in (0..sum.rank()).rev().filter(|d| *d != 1) {
        sum = sum_dim::<B, Float>(sum, dim, |t| B::float_sum_dim(t, dim), scale);
    }
    let sum = super::cast(super::reshape(sum, Shape::from(vec![channels])), dtype);
    // A gradient that does not vary along channels is stored for each of them; the sum stays pending.
    map_linear(sum, Layout::full(&[channels]), |t| expanded::<B, Float>(t, &Shape::from(vec![channels]))).gradient()
}
