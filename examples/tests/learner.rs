//! Burn's Learner on thread ranks: the same metrics on every rank and grid, files of rank 0, checkpoints.

use std::path::Path;

use burn::backend::Flex;
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::record::CompactRecorder;
use burn::tensor::Tensor;
use burn_spatial::launch;
use burn_spatial_examples::common::ranks::Rank;
use burn_spatial_examples::learner::data::{Waves, stack};
use burn_spatial_examples::learner::model::Classifier;
use burn_spatial_examples::learner::progress::Epoch;
use burn_spatial_examples::learner::{Args, train};
use clap::Parser;

/// Trains on `grid`; what rank 0 has, after all were seen to have the same.
fn learn(grid: &str, out: &Path, more: &[&str]) -> Vec<Epoch> {
    let words = [&["learner", "--grid", grid, "--out", out.to_str().unwrap()], more].concat();
    let args = Args::try_parse_from(words).unwrap();
    let results = launch::threads(args.ranks.grid.ranks(), |comm| {
        let rank = Rank::new(comm, &args.ranks)?;
        rank.device.set_strict(true);
        train::run(&rank, &args)
    });
    let mut results: Vec<Vec<Epoch>> = results.unwrap();
    for other in &results[1..] {
        assert_eq!(*other, results[0], "every rank has the same metrics");
    }
    results.swap_remove(0)
}

#[test]
fn every_rank_and_grid_learns_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let alone = learn("1x1x1x1", &folder.path().join("alone"), &[]);
    assert_eq!(alone.len(), 3);
    let last = &alone[2].valid;
    assert_eq!(last.keys().collect::<Vec<_>>(), ["Accuracy", "Loss"]);
    assert!(last["Accuracy"] >= 90.0, "{last:?}");
    for grid in ["2x1x2x1", "1x2x2x1", "4x1x1x1"] {
        let split = learn(grid, &folder.path().join(grid), &[]);
        assert_eq!(split.len(), 3);
        for (a, b) in split.iter().zip(&alone) {
            let near = |a: f64, b: f64| (a - b).abs() <= 2e-2 * b.abs();
            assert!(near(a.train["Loss"], b.train["Loss"]) && near(a.valid["Loss"], b.valid["Loss"]), "{grid}: {a:?}, not {b:?}");
        }
    }
}

#[test]
fn rank_0_writes_what_plain_burn_reads_and_training_goes_on_from() {
    let folder = tempfile::tempdir().unwrap();
    let epochs = learn("2x2x1x1", folder.path(), &["--epochs", "2"]);
    for file in ["train/epoch-1/Loss.log", "valid/epoch-2/Accuracy.log", "checkpoint/optim-2.mpk"] {
        assert!(folder.path().join(file).is_file(), "{file}");
    }
    // One line a batch: written once, not by every rank.
    let log = std::fs::read_to_string(folder.path().join("valid/epoch-2/Accuracy.log")).unwrap();
    assert_eq!(log.lines().count(), 12, "{log}");

    let device = Default::default();
    let model = Classifier::<Flex>::new(&device).load_file(folder.path().join("checkpoint/model-2"), &CompactRecorder::new(), &device);
    let held_out = Waves { count: 48, size: 12, seed: 2 };
    let (volumes, classes) = stack(held_out.iter().collect());
    let (volumes, classes) = (Tensor::<Flex, 5>::from_data(volumes, &device), Tensor::from_data(classes, &device));
    let right = model.unwrap().forward(volumes).argmax(1).squeeze_dim::<1>(1).equal(classes).int().sum().into_scalar();
    let accuracy = 100.0 * right as f64 / 48.0;
    // Weights are saved in half precision: a sample or two may fall on the other side.
    assert!((accuracy - epochs[1].valid["Accuracy"]).abs() < 10.0, "{accuracy}, not {:?}", epochs[1].valid);

    let more = learn("1x2x2x1", folder.path(), &["--epochs", "4", "--resume", "2"]);
    assert_eq!(more.len(), 2, "epochs 3 and 4");
    assert!(more[0].train["Loss"] < epochs[0].train["Loss"], "{more:?} after {epochs:?}");
}
