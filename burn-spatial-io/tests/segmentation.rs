//! Volumes with the class of each voxel: read by blocks, and written by all ranks.

mod common;

use std::path::Path;
use std::sync::Arc;

use burn::backend::Flex;
use burn_spatial::comm::threads;
use burn_spatial::mesh::{Grid, Mesh};
use burn_spatial_io::synth::{AnatomyConfig, anatomy, generate_anatomies};
use burn_spatial_io::{
    DataError, GridRank, Loader, LoaderOptions, Sample, SampleSource, SegmentationBatch, SegmentationDataset, SegmentationOptions,
    VolumeBatcher, WriteError, write_volume,
};
use common::{WHOLE, labelled};
use hdf5_metno as hdf5;

const SHAPE: [usize; 3] = [3, 4, 5];

fn read(path: &Path, rank: GridRank, options: &SegmentationOptions) -> Result<Sample, DataError> {
    SegmentationDataset::new(vec![path.to_owned()], rank, options.clone())?.try_get(0)
}

/// The message of reading all of `path`.
fn message(path: &Path) -> String {
    let text = read(path, WHOLE, &SegmentationOptions::default()).unwrap_err().to_string();
    assert!(text.contains("rank 3") && text.contains(&*path.file_name().unwrap().to_string_lossy()), "{text}");
    text
}

#[test]
fn classes_of_every_type_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.h5");
    let want: Vec<i32> = (0..60).map(|i| i % 3).collect();
    macro_rules! check {
        ($($type:ty),*) => {$(
            labelled(&path, SHAPE, &want.iter().map(|c| *c as $type).collect::<Vec<_>>());
            assert_eq!(read(&path, WHOLE, &SegmentationOptions::default()).unwrap().classes, want, stringify!($type));
        )*};
    }
    check!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);
}

#[test]
fn blocks_of_volume_and_classes_belong_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.h5");
    let classes: Vec<u8> = (0..60).map(|i| (i * 7 % 11 % 3) as u8).collect();
    labelled(&path, SHAPE, &classes);
    for coords in [[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]] {
        let rank = common::rank([2, 2, 2], coords);
        let sample = read(&path, rank, &SegmentationOptions::default()).unwrap();
        let bounds = rank.block(SHAPE);
        assert_eq!((sample.shape[1..].to_vec(), sample.volume), (bounds.extent.to_vec(), [1, 3, 4, 5]));
        assert_eq!((sample.block.len(), sample.classes.len()), (bounds.voxels(), bounds.voxels()));
        for (value, class) in sample.block.iter().zip(&sample.classes) {
            assert_eq!(*class, i32::from(classes[*value as usize]));
        }
    }
}

#[test]
fn a_leading_channel_axis_is_read_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.h5");
    let file = hdf5::File::create(&path).unwrap();
    let values: Vec<f32> = (0..2 * 60).map(|v| v as f32 / 2.0).collect();
    file.new_dataset::<f32>().shape((2, 3, 4, 5)).create("volume").unwrap().write_raw(&values).unwrap();
    file.new_dataset::<u8>().shape((3, 4, 5)).create("segmentation").unwrap().write_raw(&[1u8; 60]).unwrap();
    file.close().unwrap();
    let sample = read(&path, WHOLE, &SegmentationOptions::default()).unwrap();
    assert_eq!((sample.shape, sample.block), ([2, 3, 4, 5], values));
}

#[test]
fn what_is_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.h5");
    labelled(&path, SHAPE, &(0..60).map(|i| if i == 27 { 7i16 } else { 1 }).collect::<Vec<_>>());
    let text = message(&path);
    assert!(
        text.contains("'segmentation'") && text.contains("expected classes from 0 to 2, found 7 at depth 1, height 1, width 2"),
        "{text}"
    );
    labelled(&path, SHAPE, &(0..60).map(|i| if i == 59 { 0.5f32 } else { 1.0 }).collect::<Vec<_>>());
    assert!(message(&path).contains("found 0.5 at depth 2, height 3, width 4"));
    labelled(&path, SHAPE, &[-1i8; 60]);
    assert!(message(&path).contains("found -1"));
    let ignoring = SegmentationOptions { ignored: Some(-1), ..Default::default() };
    assert_eq!(read(&path, WHOLE, &ignoring).unwrap().classes, [-1; 60]);

    let with = |make: &dyn Fn(&hdf5::File)| {
        let file = hdf5::File::create(&path).unwrap();
        file.new_dataset::<i16>().shape((3, 4, 5)).create("volume").unwrap().write_raw(&[0i16; 60]).unwrap();
        make(&file);
        file.close().unwrap();
        message(&path)
    };
    // All but the values shows before anything is read.
    let unread = |path: &Path| SegmentationOptions::default().check(path, 3).unwrap_err().to_string();
    let text = with(&|_| ());
    assert_eq!(text, unread(&path));
    assert!(text.contains("no labels under this name; it has volume"), "{text}");
    let text = with(&|file| drop(file.new_dataset::<u8>().shape((3, 4, 6)).create("segmentation").unwrap()));
    assert!(text.contains("expected the extent [3, 4, 5] of the dataset 'volume', found the shape [3, 4, 6]"), "{text}");
    let text = with(&|file| drop(file.new_dataset::<u8>().shape((60,)).create("segmentation").unwrap()));
    assert!(text.contains("expected 3 dimensions, found 1"), "{text}");
    assert_eq!(text, unread(&path));
    let text = with(&|file| drop(file.new_dataset::<bool>().shape((3, 4, 5)).create("segmentation").unwrap()));
    assert!(text.contains("expected elements of type integers, float32 or float64, found bool; rewrite it"), "{text}");
    assert_eq!(text, unread(&path));
    let file = hdf5::File::create(&path).unwrap();
    file.new_dataset::<i16>().shape((4, 5)).create("volume").unwrap();
    file.close().unwrap();
    assert!(message(&path).contains("dataset 'volume': expected 3 or 4 dimensions, found 2 [4, 5]"));
    hdf5::File::create(&path).unwrap().close().unwrap();
    assert!(message(&path).contains("no such dataset; the file is empty"));

    let other = folder.path().join("other.h5");
    labelled(&path, SHAPE, &[0u8; 60]);
    labelled(&other, [3, 4, 4], &[0u8; 48]);
    let set = SegmentationDataset::new(vec![path, other], WHOLE, SegmentationOptions::default()).unwrap();
    assert!(set.try_get(0).is_ok());
    let text = set.try_get(1).unwrap_err().to_string();
    assert!(text.contains("other.h5") && text.contains("the shape [1, 3, 4, 5] of the first file"), "{text}");
}

#[test]
fn batches_hold_integers() {
    let folder = tempfile::tempdir().unwrap();
    let config = AnatomyConfig { size: 8, count: 3, ..AnatomyConfig::default() };
    let files = generate_anatomies(&config, folder.path(), |_| ()).unwrap();
    let dataset = SegmentationDataset::new(files, GridRank::ONE, SegmentationOptions::default()).unwrap();
    let options = LoaderOptions { batch: 2, ..LoaderOptions::default() };
    let loader: Loader<Flex, SegmentationBatch<Flex>> =
        Loader::new(dataset, VolumeBatcher::whole(), options, GridRank::ONE, Default::default());
    let batches: Vec<_> = loader.epoch(0).collect::<Result<_, _>>().unwrap();
    assert_eq!(
        batches.iter().map(|b| (b.images.dims(), b.targets.dims())).collect::<Vec<_>>(),
        [([2, 1, 8, 8, 8], [2, 8, 8, 8]), ([1, 1, 8, 8, 8], [1, 8, 8, 8])]
    );
    let last = anatomy(&config, 2).unwrap();
    let image: Vec<f32> = last.volume.iter().map(|v| f32::from(*v)).collect();
    assert_eq!(batches[1].images.to_data().to_vec::<f32>().unwrap(), image);
    let classes: Vec<i32> = last.segmentation.iter().map(|c| i32::from(*c)).collect();
    assert_eq!(batches[1].targets.to_data().convert::<i32>().to_vec::<i32>().unwrap(), classes);
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
fn ranks_write_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let extent = [5, 3, 6];
    // The third grid has more ranks along height than there are rows; the last has two groups with the same blocks.
    for grid in [[1, 1, 1, 1], [1, 2, 1, 3], [1, 2, 4, 1], [2, 2, 2, 1]] {
        let path = folder.path().join(format!("{grid:?}.h5"));
        for _twice in 0..2 {
            let results = on_ranks(grid, |mesh| {
                let bounds = GridRank::of(&mesh).block(extent);
                let [d, h, w] = bounds.extent;
                let place = |i: usize| [i / (h * w), i / w % h, i % w].iter().zip(bounds.start).map(|(a, b)| a + b).collect::<Vec<_>>();
                let block: Vec<u8> = (0..d * h * w).map(place).map(|p| ((p[0] * 3 + p[1]) * 6 + p[2]) as u8).collect();
                write_volume(&path, "segmentation", extent, &block, &mesh)
            });
            assert!(results.iter().all(Result::is_ok), "{results:?}");
        }
        let data = hdf5::File::open(&path).unwrap().dataset("segmentation").unwrap();
        assert_eq!(data.shape(), extent);
        assert_eq!(data.read_raw::<u8>().unwrap(), (0..90).collect::<Vec<u8>>());
    }
    assert!(std::fs::read_dir(folder.path()).unwrap().all(|entry| entry.unwrap().path().extension().is_some_and(|e| e == "h5")));
}

#[test]
fn every_rank_learns_that_writing_failed() {
    let path = Path::new("/nonexistent/a.h5");
    let results = on_ranks([1, 1, 2, 1], |mesh| write_volume(path, "segmentation", [2, 2, 2], &[0u8; 4], &mesh));
    for result in results {
        match result {
            Err(error @ WriteError::Failed { rank: 0, .. }) => {
                let text = error.to_string();
                assert!(text.starts_with("rank 0: /nonexistent/a.h5, dataset 'segmentation': writing failed: "), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }
}
