//! Samples into tensors.

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_spatial::Layout;
use burn_spatial::mesh::Mesh;
use burn_spatial::place::{self, SpatialBackend};

use crate::dataset::Sample;
use crate::rank::GridRank;

/// Makes a global tensor of this rank's block, without communication.
pub trait Place<B: Backend>: Send + Sync {
    /// The tensor of which this rank holds `block` under `layout`.
    fn place<const D: usize>(&self, block: TensorData, layout: Layout, device: &B::Device) -> Tensor<B, D>;

    /// [`Place::place`] for integers.
    fn place_int<const D: usize>(&self, block: TensorData, layout: Layout, device: &B::Device) -> Tensor<B, D, Int>;
}

/// [`Place`] for one rank on any backend: its block is the whole tensor.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlaceWhole;

/// `block`, which has to be all of `layout`.
fn whole(block: TensorData, layout: &Layout) -> TensorData {
    assert_eq!(block.shape, layout.shape(), "PlaceWhole cannot place a part of {layout}");
    block
}

impl<B: Backend> Place<B> for PlaceWhole {
    /// # Panics
    /// When something is split: this rank's block is not a tensor of the global shape.
    fn place<const D: usize>(&self, block: TensorData, layout: Layout, device: &B::Device) -> Tensor<B, D> {
        Tensor::from_data(whole(block, &layout), device)
    }

    /// # Panics
    /// When something is split: this rank's block is not a tensor of the global shape.
    fn place_int<const D: usize>(&self, block: TensorData, layout: Layout, device: &B::Device) -> Tensor<B, D, Int> {
        Tensor::from_data(whole(block, &layout), device)
    }
}

/// [`Place`] for the ranks of a mesh, on [`burn_spatial::Spatial`] with or without autodiff.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlaceOnMesh;

impl<B: SpatialBackend> Place<B> for PlaceOnMesh {
    fn place<const D: usize>(&self, block: TensorData, layout: Layout, device: &B::Device) -> Tensor<B, D> {
        place::from_local(block, layout, device)
    }

    fn place_int<const D: usize>(&self, block: TensorData, layout: Layout, device: &B::Device) -> Tensor<B, D, Int> {
        place::from_local_int(block, layout, device)
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

/// A global batch of volumes with the class of each voxel.
#[derive(Clone, Debug)]
pub struct SegmentationBatch<B: Backend> {
    /// `[batch, channels, depth, height, width]` of the whole volumes.
    pub images: Tensor<B, 5>,
    /// `[batch, depth, height, width]`.
    pub targets: Tensor<B, 4, Int>,
    /// The samples this rank holds blocks of: its data group's part of the batch.
    pub ids: Vec<usize>,
}

/// Makes [`CosmoFlowBatch`]es and [`SegmentationBatch`]es of this rank's samples, without communication.
///
/// Samples from [`crate::Loader`] are this data group's part of the batch. Samples from Burn's own loaders are the
/// whole batch on every rank, and the part of this group is taken here; that reads more than is needed. Use Burn's
/// with 0 or 1 worker only: with more, it yields batches in the order they arrive, another one on every rank.
#[derive(Clone, Debug)]
pub struct VolumeBatcher<P> {
    rank: GridRank,
    place: P,
}

impl VolumeBatcher<PlaceWhole> {
    /// For one rank.
    pub fn whole() -> Self {
        VolumeBatcher { rank: GridRank::ONE, place: PlaceWhole }
    }
}

impl<P> VolumeBatcher<P> {
    /// For this rank of `mesh`.
    pub fn new(mesh: &Mesh, place: P) -> Self {
        VolumeBatcher { rank: GridRank::of(mesh), place }
    }

    /// This group's part of the batch, and the size of the global one.
    ///
    /// # Panics
    /// When `items` is empty or mixes shapes; no loader over one dataset does either.
    fn part(&self, mut items: Vec<Sample>) -> (Vec<Sample>, usize) {
        let global = items.first().and_then(|sample| sample.global_batch).unwrap_or_else(|| {
            let all = items.len();
            items = items.drain(self.rank.samples(all)).collect();
            all
        });
        let first = items.first().expect("a batch has at least one sample");
        let same = |s: &Sample| s.shape == first.shape && s.labels.len() == first.labels.len() && s.classes.len() == first.classes.len();
        assert!(items.iter().all(same), "samples of one batch differ in shape");
        (items, global)
    }

    /// The layout of a global batch of volumes.
    fn layout(&self, global: usize, [c, d, h, w]: [usize; 4]) -> Layout {
        Layout::volume(&[global, c, d, h, w], self.rank.grid)
    }

    /// The blocks of `items` as a tensor; a batch of one sample keeps its buffer.
    fn volumes<B: Backend>(&self, items: &mut [Sample], global: usize, device: &B::Device) -> Tensor<B, 5>
    where
        P: Place<B>,
    {
        let ([c, d, h, w], volume, count) = (items[0].shape, items[0].volume, items.len());
        let layout = self.layout(global, volume);
        let mut blocks = items.iter_mut().map(|sample| std::mem::take(&mut sample.block));
        let mut voxels = blocks.next().unwrap_or_default();
        voxels.reserve_exact((count - 1) * voxels.len());
        blocks.for_each(|block| voxels.extend_from_slice(&block));
        self.place.place(TensorData::new(voxels, [count, c, d, h, w]), layout, device)
    }
}

fn ids(items: &[Sample]) -> Vec<usize> {
    items.iter().map(|sample| sample.id).collect()
}

impl<B: Backend, P: Place<B>> Batcher<B, Sample, CosmoFlowBatch<B>> for VolumeBatcher<P> {
    /// # Panics
    /// When `items` is empty or mixes shapes; no loader over one dataset does either.
    fn batch(&self, items: Vec<Sample>, device: &B::Device) -> CosmoFlowBatch<B> {
        let (mut items, global) = self.part(items);
        let labels = items[0].labels.len();
        let targets: Vec<f32> = items.iter().flat_map(|sample| sample.labels.iter().copied()).collect();
        let targets = TensorData::new(targets, [items.len(), labels]);
        CosmoFlowBatch {
            ids: ids(&items),
            volumes: self.volumes(&mut items, global, device),
            targets: self.place.place(targets, Layout::volume(&[global, labels], self.rank.grid), device),
        }
    }
}

impl<B: Backend, P: Place<B>> Batcher<B, Sample, SegmentationBatch<B>> for VolumeBatcher<P> {
    /// # Panics
    /// When `items` is empty, mixes shapes or has no classes; no loader over one dataset does either.
    fn batch(&self, items: Vec<Sample>, device: &B::Device) -> SegmentationBatch<B> {
        let (mut items, global) = self.part(items);
        let ([_, d, h, w], volume) = (items[0].shape, items[0].volume);
        let classes: Vec<i32> = items.iter().flat_map(|sample| sample.classes.iter().copied()).collect();
        let classes = TensorData::new(classes, [items.len(), d, h, w]);
        let [_, depth, height, width] = volume;
        let layout = self.layout(global, [1, depth, height, width]).reshape(&[global, depth, height, width]);
        let layout = layout.expect("a dimension of 1 is left out");
        SegmentationBatch {
            ids: ids(&items),
            images: self.volumes(&mut items, global, device),
            targets: self.place.place_int(classes, layout, device),
        }
    }
}
