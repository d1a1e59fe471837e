//! Batch norm of split volumes: each rank's block, and sums of one number a channel.

use burn_backend::tensor::FloatTensor;
use burn_backend::{TensorData, TensorMetadata};

use crate::Spatial;
use crate::comm::{CommError, ReduceOp};
use crate::device::RankContext;
use crate::kernels::{LocalKernels, Moments};
use crate::kind::{Float, Kind};
use crate::layout::Layout;
use crate::mesh::AxisSet;
use crate::nn::{NormBackend, NormSpec, norm};
use crate::tensor::{SpatialTensor, communicated};
use crate::trace::timed;
use crate::transfer::collective::all_reduce;

/// How x has to lie: channels whole, all else split as it is.
fn stored(x: &Layout) -> Layout {
    x.summed().full_dim(1).materialized()
}

/// Mean, and sum of squared deviations from it, of each channel of a volume, out of those of the ranks' blocks, of which
/// this rank's has `count` elements a channel. The same bits on all ranks. Collective over the axes.
fn of_blocks<B: LocalKernels>(
    context: &RankContext,
    own: [FloatTensor<B>; 2],
    count: usize,
    axes: AxisSet,
    device: &B::Device,
) -> Result<[FloatTensor<B>; 2], CommError> {
    if context.mesh.group(axes).is_none() {
        return Ok(own);
    }
    let comm = context.talking().group(axes).expect("there are others");
    timed!(REDUCE, "moments");
    let (shape, dtype) = (own[0].shape(), own[0].dtype());
    let mut bytes = (count as f64).to_ne_bytes().to_vec();
    for tensor in own {
        bytes.extend_from_slice(<Float as Kind<B>>::into_data(tensor).convert::<f64>().as_bytes());
    }
    let channels = shape.num_elements();
    let mut blocks = Vec::new();
    for (rank, bytes) in comm.all_gather(&bytes)?.into_iter().enumerate() {
        let (numbers, _) = bytes.as_chunks::<8>();
        let expected = (1 + 2 * channels) * size_of::<f64>();
        if bytes.len() != expected {
            return Err(CommError::Length { rank: context.mesh.rank(), from: rank, expected, got: bytes.len() });
        }
        blocks.push(numbers.iter().map(|x| f64::from_ne_bytes(*x)).collect::<Vec<f64>>());
    }
    let whole = |c: usize| {
        let of = |block: &Vec<f64>| Moments { n: block[0], mean: block[1 + c], m2: block[1 + channels + c] };
        let all = blocks.iter().map(of).fold(Moments::default(), Moments::with);
        (all.mean, all.m2)
    };
    let (mean, m2): (Vec<f64>, Vec<f64>) = (0..channels).map(whole).unzip();
    Ok([mean, m2].map(|values| <Float as Kind<B>>::from_data(TensorData::new(values, shape.clone()).convert_dtype(dtype), device)))
}

impl<B: LocalKernels> NormBackend for Spatial<B> {
    fn batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        spec: NormSpec,
    ) -> (FloatTensor<Self>, [FloatTensor<Self>; 2]) {
        let device = x.device().clone();
        let context = device.context();
        let (layout, n) = (stored(x.layout()), norm::each(&x.shape()));
        let x = x.into_layout(&layout).settle().0;
        let count = norm::each(&x.shape());
        let combine = |own| communicated(of_blocks::<B>(&context, own, count, layout.split_over(), device.inner_device()));
        let (y, statistics) = norm::of_block::<B>(x, gamma.into_whole(), beta.into_whole(), spec, n, combine);
        let whole = statistics.map(|t| SpatialTensor::full(t, device.clone()));
        (SpatialTensor::new(y, layout, device.clone()), whole)
    }

    fn batch_norm_grad(
        x: FloatTensor<Self>,
        statistics: [FloatTensor<Self>; 2],
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: NormSpec,
    ) -> [FloatTensor<Self>; 3] {
        let device = x.device().clone();
        let context = device.context();
        let (layout, n) = (stored(x.layout()), norm::each(&x.shape()));
        let over = layout.split_over();
        let reduce = |own| {
            communicated(all_reduce::<B, Float>(&context, own, over, ReduceOp::Sum, device.inner_device(), || context.compute_shares()))
        };
        let x = x.into_layout(&layout).settle().0;
        let grad = grad.into_layout(&layout).settle().0;
        let statistics = statistics.map(SpatialTensor::into_whole);
        let [x, gamma, beta] = norm::grad_of_block::<B>(x, statistics, gamma.into_whole(), beta.into_whole(), grad, spec, n, reduce);
        [SpatialTensor::new(x, layout, device.clone()), SpatialTensor::full(gamma, device.clone()), SpatialTensor::full(beta, device)]
    }

    fn given_norm(
        x: FloatTensor<Self>,
        statistics: [FloatTensor<Self>; 2],
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        spec: NormSpec,
    ) -> FloatTensor<Self> {
        let device = x.device().clone();
        let layout = stored(x.layout());
        let x = x.into_layout(&layout).settle().0;
        let y = norm::given_of_block::<B>(x, statistics.map(SpatialTensor::into_whole), gamma.into_whole(), beta.into_whole(), spec);
        SpatialTensor::new(y, layout, device)
    }
}
