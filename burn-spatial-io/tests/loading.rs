//! From files to batches.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::backend::Flex;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::Dataset;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_spatial::comm::threads;
use burn_spatial::layout::{Axis, Layout};
use burn_spatial::mesh::{Grid, Mesh, MeshAxis};
use burn_spatial_io::{
    CosmoFlowBatch, CosmoFlowDataset, CosmoFlowOptions, DataError, GridRank, IdsError, Loader, LoaderOptions, Place, Sample, SampleSource,
    SegmentationBatch, SegmentationDataset, SegmentationOptions, VolumeBatcher, check_ids,
};

type Ids = Vec<usize>;

/// Makes no tensors: yields the ids.
struct IdsOnly;

impl Batcher<Flex, Sample, Ids> for IdsOnly {
    fn batch(&self, items: Vec<Sample>, _device: &Device<Flex>) -> Ids {
        items.iter().map(|sample| sample.id).collect()
    }
}

/// Samples that take uneven time to read; number `bad` fails.
struct Uneven {
    len: usize,
    bad: Option<usize>,
    reads: Arc<AtomicUsize>,
}

impl Uneven {
    fn new(len: usize, bad: Option<usize>) -> Uneven {
        Uneven { len, bad, reads: Arc::default() }
    }
}

impl SampleSource for Uneven {
    fn try_get(&self, index: usize) -> Result<Sample, DataError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros((index * 7 % 5 * 300) as u64));
        match self.bad {
            Some(bad) if bad == index => Err(DataError::Index { rank: 0, index, len: self.len }),
            _ => Ok(Sample { id: index, ..Sample::default() }),
        }
    }

    fn len(&self) -> usize {
        self.len
    }
}

fn options(batch: usize, seed: Option<u64>, workers: usize) -> LoaderOptions {
    LoaderOptions { batch, seed, workers, prefetch: 2 }
}

fn ids_loader(source: Uneven, options: LoaderOptions, rank: GridRank) -> Loader<Flex, Ids> {
    Loader::new(source, IdsOnly, options, rank, Default::default())
}

#[test]
fn the_order_does_not_depend_on_workers() {
    let sequence = |workers| {
        let loader = ids_loader(Uneven::new(30, None), options(4, Some(7), workers), GridRank::ONE);
        (0..2).flat_map(|epoch| loader.epoch(epoch)).collect::<Result<Vec<Ids>, _>>().unwrap()
    };
    let expected = sequence(0);
    assert_eq!(expected.len(), 16);
    assert_eq!(expected[7].len(), 2);
    assert_ne!(expected[..8], expected[8..]);
    for workers in [1, 2, 4, 9] {
        assert_eq!(sequence(workers), expected);
    }
}

#[test]
fn groups_share_batches() {
    let of = |rank| {
        let loader = ids_loader(Uneven::new(16, None), options(8, Some(3), 2), GridRank { grid: Grid([4, 1, 1, 1]), rank });
        loader.epoch(5).collect::<Result<Vec<Ids>, _>>().unwrap()
    };
    let all: Vec<Vec<Ids>> = (0..4).map(of).collect();
    let plan = ids_loader(Uneven::new(16, None), options(8, Some(3), 2), GridRank::ONE).plan(5);
    for step in 0..2 {
        assert_eq!(all.iter().flat_map(|group| group[step].clone()).collect::<Vec<_>>(), plan.batch(step));
    }
}

#[test]
fn an_epoch_goes_on_where_it_stopped() {
    let loader = ids_loader(Uneven::new(20, None), options(3, Some(1), 2), GridRank::ONE);
    let all: Vec<Ids> = loader.epoch(2).collect::<Result<_, _>>().unwrap();
    let rest: Vec<Ids> = loader.epoch_from(2, 4).collect::<Result<_, _>>().unwrap();
    assert_eq!(rest, all[4..]);
    assert!(loader.epoch_from(2, 7).next().is_none());
}

#[test]
fn errors_come_at_their_step() {
    for workers in [0, 1, 4] {
        let loader = ids_loader(Uneven::new(12, Some(5)), options(2, None, workers), GridRank::ONE);
        let mut epoch = loader.epoch(0);
        assert_eq!(epoch.next().unwrap().unwrap(), [0, 1]);
        assert_eq!(epoch.next().unwrap().unwrap(), [2, 3]);
        assert_eq!(epoch.next().unwrap().unwrap_err(), DataError::Index { rank: 0, index: 5, len: 12 });
        assert!(epoch.next().is_none());
    }
}

#[test]
fn dropping_early_joins_the_workers() {
    let source = Uneven::new(1000, None);
    let reads = source.reads.clone();
    let loader = ids_loader(source, options(2, None, 4), GridRank::ONE);
    let mut epoch = loader.epoch(0);
    epoch.next().unwrap().unwrap();
    drop(epoch);
    // Nobody reads any more, and nobody has read further than allowed: 2 taken, 4 ahead.
    let after = reads.load(Ordering::SeqCst);
    assert!(after <= 6, "{after} reads");
    drop(loader.epoch(1));
    std::thread::sleep(Duration::from_millis(5));
    let later = reads.load(Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(reads.load(Ordering::SeqCst), later);
}

#[test]
#[should_panic(expected = "the source broke")]
fn a_panicking_source_does_not_hang() {
    struct Broken;
    impl SampleSource for Broken {
        fn try_get(&self, _: usize) -> Result<Sample, DataError> {
            panic!("the source broke")
        }
        fn len(&self) -> usize {
            4
        }
    }
    let loader: Loader<Flex, Ids> = Loader::new(Broken, IdsOnly, options(2, None, 2), GridRank::ONE, Default::default());
    let _ = loader.epoch(0).next();
}

#[test]
fn the_loader_is_a_burn_loader() {
    let loader = ids_loader(Uneven::new(9, None), options(4, Some(7), 2), GridRank::ONE);
    let expected: Vec<Vec<Ids>> = (0..2).map(|epoch| loader.epoch(epoch).collect::<Result<_, _>>().unwrap()).collect();
    let burn: &dyn DataLoader<Flex, Ids> = &loader;
    assert_eq!(burn.num_items(), 9);
    // Every iteration is the next epoch.
    assert_eq!(burn.iter().collect::<Vec<_>>(), expected[0]);
    assert_eq!(burn.iter().collect::<Vec<_>>(), expected[1]);
    let mut iter = burn.iter();
    iter.next();
    assert_eq!((iter.progress().items_processed, iter.progress().items_total), (4, 9));
    let slice = burn.slice(2, 7).to_device(&Default::default());
    assert_eq!(slice.num_items(), 5);
    let mut ids: Ids = slice.iter().flatten().collect();
    ids.sort_unstable();
    assert_eq!(ids, [2, 3, 4, 5, 6]);
}

#[test]
fn batches_are_global_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let files = common::set(folder.path(), 5, 4);
    let loader: Loader<Flex, CosmoFlowBatch<Flex>> =
        Loader::new(common::dataset(files), VolumeBatcher::whole(), options(2, None, 2), GridRank::ONE, Default::default());
    let batches: Vec<CosmoFlowBatch<Flex>> = loader.epoch(0).collect::<Result<_, _>>().unwrap();
    assert_eq!(batches.iter().map(|b| b.volumes.dims()).collect::<Vec<_>>(), [[2, 2, 4, 4, 4], [2, 2, 4, 4, 4], [1, 2, 4, 4, 4]]);
    assert_eq!(batches[1].ids, [2, 3]);
    batches[1].targets.to_data().assert_eq(&TensorData::from([[2f32], [3.0]]), true);
    let voxels = batches[1].volumes.to_data().to_vec::<f32>().unwrap();
    assert_eq!(voxels[..128], [3f32.ln(); 128]);
    assert_eq!(voxels[128..], [4f32.ln(); 128]);
}

#[test]
fn burns_own_loader_works() {
    let folder = tempfile::tempdir().unwrap();
    let files = common::set(folder.path(), 5, 4);
    for workers in [0, 1] {
        let loader = DataLoaderBuilder::<Flex, Sample, CosmoFlowBatch<Flex>>::new(VolumeBatcher::whole())
            .batch_size(2)
            .num_workers(workers)
            .build(common::dataset(files.clone()));
        let ids: Vec<Ids> = loader.iter().map(|batch| batch.ids).collect();
        assert_eq!(ids, [vec![0, 1], vec![2, 3], vec![4]]);
    }
}

#[test]
#[should_panic(expected = "box001.hdf5: there is no such file")]
fn burns_dataset_panics_with_the_message() {
    let folder = tempfile::tempdir().unwrap();
    let files = common::set(folder.path(), 2, 2);
    let dataset = common::dataset(files.clone());
    assert!(Dataset::get(&dataset, 2).is_none());
    std::fs::remove_file(&files[1]).unwrap();
    Dataset::get(&dataset, 1);
}

/// Records what it is asked to place, and makes a tensor of zeros.
#[derive(Default, Clone)]
struct Recorder(Arc<std::sync::Mutex<Vec<Placed>>>);

/// Local shape, global shape, split.
type Placed = (Vec<usize>, Vec<usize>, Vec<Option<MeshAxis>>);

impl Recorder {
    fn record(&self, block: &TensorData, layout: &Layout) {
        let split = layout.dims().iter().map(|axes| axes.iter().find_map(Axis::as_split).map(|(mesh, _)| mesh)).collect();
        self.0.lock().unwrap().push((block.shape.to_vec(), layout.shape().to_vec(), split));
    }
}

impl Place<Flex> for Recorder {
    fn place<const D: usize>(&self, block: TensorData, layout: Layout, device: &Device<Flex>) -> Tensor<Flex, D> {
        self.record(&block, &layout);
        Tensor::zeros(layout.shape(), device)
    }

    fn place_int<const D: usize>(&self, block: TensorData, layout: Layout, device: &Device<Flex>) -> Tensor<Flex, D, Int> {
        self.record(&block, &layout);
        Tensor::zeros(layout.shape(), device)
    }
}

/// Runs `f` on every rank of `grid`, a thread each; results in rank order.
fn on_ranks<T: Send>(grid: [usize; 4], f: impl Fn(Arc<Mesh>) -> T + Sync) -> Vec<T> {
    let f = &f;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = threads::world(Grid(grid).ranks())
            .into_iter()
            .map(|comm| scope.spawn(move || f(Mesh::new(comm, Grid(grid)).unwrap())))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_places_its_block() {
    let folder = tempfile::tempdir().unwrap();
    let files = common::set(folder.path(), 4, 5);
    let placed = on_ranks([2, 2, 1, 1], |mesh| {
        let dataset = CosmoFlowDataset::new(files.clone(), GridRank::of(&mesh), CosmoFlowOptions::default()).unwrap();
        let recorder = Recorder::default();
        let batcher = VolumeBatcher::new(&mesh, recorder.clone());
        let loader =
            Loader::<Flex, CosmoFlowBatch<Flex>>::new(dataset, batcher, options(3, None, 1), GridRank::of(&mesh), Default::default());
        for batch in loader.epoch(0) {
            let batch = batch.unwrap();
            check_ids(&batch.ids, &mesh).unwrap();
        }
        recorder.0.lock().unwrap().clone()
    });
    let (data, depth) = (Some(MeshAxis::Data), Some(MeshAxis::Depth));
    // Ranks 0 to 3 are (group, depth) 00, 01, 10, 11: 2 + 1 samples of 3, 3 + 2 planes of 5.
    for (rank, (samples, planes)) in [(2, 3), (2, 2), (1, 3), (1, 2)].into_iter().enumerate() {
        assert_eq!(placed[rank][0], (vec![samples, 2, planes, 5, 5], vec![3, 2, 5, 5, 5], vec![data, None, depth, None, None]));
        assert_eq!(placed[rank][1], (vec![samples, 1], vec![3, 1], vec![data, None]));
        // The last batch has one sample for two groups: both hold it.
        assert_eq!(placed[rank][2], (vec![1, 2, planes, 5, 5], vec![1, 2, 5, 5, 5], vec![None, None, depth, None, None]));
    }
}

#[test]
fn classes_are_placed_as_their_volume() {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<_> = (0..3).map(|i| folder.path().join(format!("{i}.h5"))).collect();
    files.iter().for_each(|path| common::labelled(path, [5, 3, 4], &[1u8; 60]));
    let placed = on_ranks([2, 1, 2, 1], |mesh| {
        let dataset = SegmentationDataset::new(files.clone(), GridRank::of(&mesh), SegmentationOptions::default()).unwrap();
        let recorder = Recorder::default();
        let batcher = VolumeBatcher::new(&mesh, recorder.clone());
        let loader =
            Loader::<Flex, SegmentationBatch<Flex>>::new(dataset, batcher, options(3, None, 1), GridRank::of(&mesh), Default::default());
        loader.epoch(0).for_each(|batch| check_ids(&batch.unwrap().ids, &mesh).unwrap());
        recorder.0.lock().unwrap().clone()
    });
    let (data, height) = (Some(MeshAxis::Data), Some(MeshAxis::Height));
    for (rank, (samples, rows)) in [(2, 2), (2, 1), (1, 2), (1, 1)].into_iter().enumerate() {
        assert_eq!(placed[rank][0], (vec![samples, 1, 5, rows, 4], vec![3, 1, 5, 3, 4], vec![data, None, None, height, None]));
        assert_eq!(placed[rank][1], (vec![samples, 5, rows, 4], vec![3, 5, 3, 4], vec![data, None, height, None]));
    }
}

#[test]
fn burns_own_loader_takes_the_part_of_the_group() {
    let folder = tempfile::tempdir().unwrap();
    let files = common::set(folder.path(), 3, 2);
    let ids = on_ranks([2, 1, 1, 1], |mesh| {
        let recorder = Recorder::default();
        let batcher = VolumeBatcher::new(&mesh, recorder.clone());
        let loader =
            DataLoaderBuilder::<Flex, Sample, CosmoFlowBatch<Flex>>::new(batcher).batch_size(3).build(common::dataset(files.clone()));
        let ids: Vec<Ids> = loader.iter().map(|batch| batch.ids).collect();
        let placed = recorder.0.lock().unwrap();
        assert_eq!(placed[0].1, [3, 2, 2, 2, 2]);
        ids
    });
    assert_eq!(ids, [vec![vec![0, 1]], vec![vec![2]]]);
}

#[test]
fn ranks_that_disagree_are_named() {
    let results = on_ranks([2, 1, 2, 1], |mesh| {
        // Rank 3, the second of the second group, has another order.
        let ids: &[usize] = if mesh.rank() == 3 { &[4, 6] } else { &[4, 5] };
        check_ids(ids, &mesh)
    });
    assert!(results[0].is_ok() && results[1].is_ok());
    for result in &results[2..] {
        match result {
            Err(error @ IdsError::Mismatch { rank: 2, other: 3, .. }) => {
                let text = error.to_string();
                assert!(text.contains("rank 2 has [4, 5], rank 3 has [4, 6]"), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }
    let lonely = on_ranks([1, 1, 1, 1], |mesh| check_ids(&[1], &mesh));
    assert!(lonely[0].is_ok());
}
