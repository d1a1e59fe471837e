//! Samples into tensors.

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_spatial::mesh::{Mesh, MeshAxis};

use crate::block::BlockSpec;
use crate::dataset::Sample;
use crate::plan::DataGroup;

/// Makes a global tensor of the part that this rank holds, without communication.
pub trait Place<B: Backend>: Send + Sync {
    /// A tensor of shape `global`, of which this rank holds `local`. Dimension i is split near-equally (the first
    /// `global[i] % ranks` ranks have one more) over the mesh axis `split[i]`, or not split where that is `None`.
    fn place<const D: usize>(
        &self,
        local: TensorData,
        global: [usize; D],
        split: [Option<MeshAxis>; D],
        device: &B::Device,
    ) -> Tensor<B, D>;
}

/// [`Place`] for one rank: the part is the whole.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlaceWhole;

impl<B: Backend> Place<B> for PlaceWhole {
    /// # Panics
    /// When something is split: this rank's part is not a tensor of the global shape.
    fn place<const D: usize>(
        &self,
        local: TensorData,
        global: [usize; D],
        split: [Option<MeshAxis>; D],
        device: &B::Device,
    ) -> Tensor<B, D> {
        assert_eq!(local.shape.as_slice(), global, "PlaceWhole cannot place a part split over {split:?}");
        Tensor::from_data(local, device)
    }
}

/// A global batch.
#[derive(Clone, Debug)]
pub struct CosmoFlowBatch<B: Backend> {
    /// `[batch, channels, depth, height, width]` of the whole volumes.
    pub volumes: Tensor<B, 5>,
    /// `[batch, labels]`.
    pub targets: Tensor<B, 2>,
    /// The samples this rank holds blocks of: its data group's part of the batch.
    pub ids: Vec<usize>,
}

/// Makes [`CosmoFlowBatch`]es of this rank's samples, without communication.
///
/// Samples from [`crate::Loader`] are this data group's part of the batch. Samples from Burn's own loaders are the
/// whole batch on every rank, and the part of this group is taken here; that reads more than is needed. Use Burn's
/// with 0 or 1 worker only: with more, it yields batches in the order they arrive, another one on every rank.
#[derive(Clone, Debug)]
pub struct CosmoFlowBatcher<P> {
    block: BlockSpec,
    group: DataGroup,
    place: P,
}

impl CosmoFlowBatcher<PlaceWhole> {
    /// For one rank.
    pub fn whole() -> Self {
        CosmoFlowBatcher { block: BlockSpec::WHOLE, group: DataGroup::ONE, place: PlaceWhole }
    }
}

impl<P> CosmoFlowBatcher<P> {
    /// For this rank of `mesh`.
    pub fn new(mesh: &Mesh, place: P) -> Self {
        CosmoFlowBatcher { block: BlockSpec::of(mesh), group: DataGroup::of(mesh), place }
    }
}

impl<B: Backend, P: Place<B>> Batcher<B, Sample, CosmoFlowBatch<B>> for CosmoFlowBatcher<P> {
    /// # Panics
    /// When `items` is empty or mixes shapes; no loader over one dataset does either.
    fn batch(&self, mut items: Vec<Sample>, device: &B::Device) -> CosmoFlowBatch<B> {
        let global = items.first().and_then(|sample| sample.global_batch).unwrap_or_else(|| {
            let all = items.len();
            items = items.drain(self.group.part(all)).collect();
            all
        });
        let first = items.first().expect("a batch has at least one sample");
        let (shape, volume, labels) = (first.shape, first.volume, first.labels.len());
        assert!(items.iter().all(|s| s.shape == shape && s.labels.len() == labels), "samples of one batch differ in shape");

        let ids: Vec<usize> = items.iter().map(|sample| sample.id).collect();
        let targets: Vec<f32> = items.iter().flat_map(|sample| sample.labels.iter().copied()).collect();
        // A batch of one sample keeps its buffer.
        let mut blocks = items.into_iter().map(|sample| sample.block);
        let mut voxels = blocks.next().unwrap_or_default();
        voxels.reserve_exact((ids.len() - 1) * voxels.len());
        blocks.for_each(|block| voxels.extend_from_slice(&block));

        let data = self.group.splits(global).then_some(MeshAxis::Data);
        let [c, d, h, w] = shape;
        let [_, depth, height, width] = volume;
        let splits = self.block.splits([depth, height, width]);
        let axis = |i: usize| splits[i].then_some(MeshAxis::SPATIAL[i]);
        CosmoFlowBatch {
            volumes: self.place.place(
                TensorData::new(voxels, [ids.len(), c, d, h, w]),
                [global, c, depth, height, width],
                [data, None, axis(0), axis(1), axis(2)],
                device,
            ),
            targets: self.place.place(TensorData::new(targets, [ids.len(), labels]), [global, labels], [data, None], device),
            ids,
        }
    }
}
