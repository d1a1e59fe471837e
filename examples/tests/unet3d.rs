//! The unet3d program on thread ranks: training, tests, predictions and errors.

use std::fs;
use std::path::Path;

use burn_spatial_examples::common::{Error, checkpoint, compare, ranks};
use burn_spatial_examples::unet3d::cli::{Cli, Command, TrainArgs};
use burn_spatial_examples::unet3d::train::{self, Outcome};
use burn_spatial_examples::unet3d::{evaluate, predict, synth};
use burn_spatial_io::open_file;
use burn_spatial_models::weights::read_safetensors;
use clap::Parser;
use tempfile::TempDir;

fn parse(words: &[&str]) -> Command {
    Cli::try_parse_from([&["unet3d"], words].concat()).unwrap().command
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn make(folder: &Path, count: &str, size: &str) {
    let Command::Synth(args) = parse(&["synth", "--out", text(folder), "--count", count, "--size", size]) else { unreachable!() };
    synth::run(&args).unwrap();
}

/// A folder with six volumes in `data`.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    make(&folder.path().join("data"), "6", "12");
    folder
}

/// Ranks of `grid`, as options.
fn on(grid: &str) -> [String; 4] {
    let ranks: usize = grid.split('x').map(|n| n.parse::<usize>().unwrap()).product();
    ["--grid".into(), grid.into(), "--local-ranks".into(), ranks.to_string()]
}

fn words<'a>(first: &[&'a str], grid: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    let grid: Vec<&str> = grid.iter().map(String::as_str).collect();
    [first, &grid, more].concat()
}

fn train_args(folder: &Path, out: &str, grid: &str, more: &[&str]) -> TrainArgs {
    let (data, out, grid) = (folder.join("data"), folder.join(out), on(grid));
    let first = ["train", "--data", text(&data), "--out", text(&out), "--depth", "2", "--width", "4", "--epochs", "4"];
    let more = [&["--test-fraction", "0.34"], more].concat();
    let Command::Train(args) = parse(&words(&first, &grid, &more)) else { unreachable!() };
    args
}

fn train(args: &TrainArgs) -> Result<Outcome, Error> {
    ranks::start(&args.ranks, |rank| train::train(&rank, args))
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn numbers(value: &serde_json::Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

#[test]
fn two_epochs_and_two_are_four_on_another_grid_too() {
    let folder = folder();
    let whole = train(&train_args(folder.path(), "whole", "1x2x1x1", &[])).unwrap();
    assert_eq!(whole.losses.len(), 4 * 2);
    let first = train(&train_args(folder.path(), "parts", "1x2x1x1", &["--stop-after", "2"])).unwrap();
    assert_eq!(first.losses, whole.losses[..4]);
    assert!(first.test.is_none());
    let file = folder.path().join("parts").join(checkpoint::FILE_NAME);
    let saved = fs::read(&file).unwrap();
    let second = train(&train_args(folder.path(), "parts", "1x2x1x1", &["--resume"])).unwrap();
    assert_eq!(second.losses, whole.losses);
    assert_eq!(second.test, whole.test);
    fs::write(&file, saved).unwrap();
    let other = train(&train_args(folder.path(), "parts", "1x1x2x2", &["--resume"])).unwrap();
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-3 * a.abs();
    assert!(other.losses.iter().zip(&whole.losses).all(near), "{:?} and {:?}", other.losses, whole.losses);
    let mut wider = train_args(folder.path(), "parts", "1x1x1x1", &["--resume"]);
    wider.model.width = 2;
    let message = train(&wider).err().unwrap().to_string();
    assert!(message.contains("made otherwise: width was 4, is 2; give the same, or another --out"), "{message}");
}

#[test]
fn a_training_is_replaced_or_continued_only_where_that_is_asked_for() {
    let folder = folder();
    let again = |more: &[&str]| train(&train_args(folder.path(), "run", "1x2x1x1", &[&["--stop-after", "1"], more].concat()));
    let file = folder.path().join("run").join(checkpoint::FILE_NAME);
    again(&[]).unwrap();
    let saved = fs::read(&file).unwrap();
    let message = again(&[]).err().unwrap().to_string();
    assert!(message.contains("run: holds a training: --resume goes on with it, --overwrite replaces it"), "{message}");
    assert_eq!(fs::read(&file).unwrap(), saved);
    again(&["--overwrite", "--lr", "1e-2"]).unwrap();
    assert_ne!(fs::read(&file).unwrap(), saved);
    assert!(!checkpoint::previous(&file).exists(), "what is left is of one training");

    fs::rename(folder.path().join("data"), folder.path().join("moved")).unwrap();
    fs::create_dir(folder.path().join("data")).unwrap();
    for entry in fs::read_dir(folder.path().join("moved")).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap().replace("anatomy", "other");
        fs::rename(entry.path(), folder.path().join("data").join(name)).unwrap();
    }
    let message = again(&["--resume", "--lr", "1e-2"]).err().unwrap().to_string();
    assert!(message.contains("made otherwise: the training files are others;"), "{message}");
}

#[test]
fn a_training_goes_on_with_another_rate_and_ruined_weights_replace_none() {
    let folder = folder();
    let run = |more: &[&str]| train(&train_args(folder.path(), "run", "1x2x1x1", &[&["--batch", "8"], more].concat()));
    let file = folder.path().join("run").join(checkpoint::FILE_NAME);
    // One step an epoch: its loss is that of the weights before it.
    let message = run(&["--lr", "1e39"]).err().unwrap().to_string();
    assert!(message.contains("step 0: ") && message.contains("not finite: lower --lr, and start again"), "{message}");
    assert!(!file.exists() && !checkpoint::previous(&file).exists());

    let first = run(&["--stop-after", "2"]).unwrap();
    let saved = [&file, &checkpoint::previous(&file)].map(|path| fs::read(path).unwrap());
    let message = run(&["--lr", "1e39", "--resume"]).err().unwrap().to_string();
    assert!(message.contains("step 2: ") && message.contains("lower --lr, and go on after epoch 2 with --resume"), "{message}");
    assert_eq!([&file, &checkpoint::previous(&file)].map(|path| fs::read(path).unwrap()), saved);
    let rest = run(&["--lr", "1e-4", "--resume"]).unwrap();
    assert_eq!((rest.losses.len(), &rest.losses[..2]), (4, &first.losses[..]));
    run(&["--lr", "1e-4", "--resume"]).unwrap();
}

#[test]
fn batches_in_which_nothing_counts_cost_nothing_and_are_told() {
    let folder = folder();
    for entry in fs::read_dir(folder.path().join("data")).unwrap().take(3) {
        let file = hdf5_metno::File::open_rw(entry.unwrap().path()).unwrap();
        file.dataset("segmentation").unwrap().write_raw(&vec![255u8; 12 * 12 * 12]).unwrap();
        file.close().unwrap();
    }
    let held_out = folder.path().join("held-out");
    make(&held_out, "1", "12");
    for (grid, out) in [("1x1x1x1", "one"), ("1x2x1x1", "two")] {
        let mut words: Vec<String> =
            ["train", "--data", text(&folder.path().join("data")), "--test-data", text(&held_out)].map(String::from).into();
        let more = ["--depth", "2", "--width", "2", "--batch", "1", "--epochs", "2", "--ignore-index", "255", "--no-progress", "--out"];
        words.extend(more.map(String::from));
        words.push(text(&folder.path().join(out)).into());
        words.extend(on(grid));
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_unet3d")).args(&words).output().unwrap();
        let (told, error) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{told}{error}");
        let lines = told.lines().filter(|line| line.contains("of 6 batches 3 had ignored voxels only and count as 0"));
        assert_eq!(lines.count(), 2, "{told}");
        let losses = numbers(&json(&folder.path().join(out).join("metrics.json"))["losses"]);
        assert_eq!((losses.len(), losses.iter().filter(|loss| **loss == 0.0).count()), (12, 6), "{losses:?}");
    }
}

#[test]
fn a_damaged_checkpoint_replaces_no_good_one() {
    let folder = folder();
    let run = |more: &[&str]| train(&train_args(folder.path(), "run", "1x1x1x1", more)).unwrap();
    run(&["--stop-after", "2"]);
    let file = folder.path().join("run").join(checkpoint::FILE_NAME);
    let (newest, good) = (fs::read(&file).unwrap(), fs::read(checkpoint::previous(&file)).unwrap());
    fs::write(&file, &newest[..newest.len() / 2]).unwrap();
    // From epoch 1; the one of epoch 2 is made again.
    run(&["--stop-after", "2", "--resume"]);
    assert!(fs::read(checkpoint::previous(&file)).unwrap() == good, "the only good one stays until there is another");
    assert_eq!(fs::read(&file).unwrap().len(), newest.len());
    run(&["--stop-after", "3", "--resume"]);
    assert!(fs::read(checkpoint::previous(&file)).unwrap() != good);
}

#[test]
fn what_would_go_wrong_later_is_refused_at_once() {
    let folder = folder();
    let out = folder.path().join("run");
    let refused_in = |into: &str, more: &[&str]| {
        let message = train(&train_args(folder.path(), into, "1x2x1x1", more)).err().unwrap().to_string();
        assert!(!out.join(checkpoint::FILE_NAME).exists(), "{message}");
        message
    };
    let refused = |more: &[&str]| refused_in("run", more);
    // Nobody can make a file there, the superuser included.
    let message = refused_in("/proc", &[]);
    assert!(message.contains("/proc: no file can be written there"), "{message}");
    // Of four volumes to train on, the last batch of three has one.
    for batch in ["1", "3"] {
        let mut args = train_args(folder.path(), "run", "1x2x1x1", &["--batch", batch]);
        args.model.depth = 5;
        let message = train(&args).err().unwrap().to_string();
        assert!(message.contains("level 5 of 5 has 1 voxel of 1 sample where the volume has 12 x 12 x 12"), "{message}");
        assert!(!out.join(checkpoint::FILE_NAME).exists());
    }
    assert!(refused(&["--stop-after", "0"]).contains("--stop-after must be at least 1"));
    assert!(refused(&["--lr", "-1"]).contains("--lr must be positive"));

    let held_out = folder.path().join("held-out");
    make(&held_out, "2", "12");
    let bad = fs::read_dir(&held_out).unwrap().next().unwrap().unwrap().path();
    let file = hdf5_metno::File::create(&bad).unwrap();
    file.new_dataset::<i16>().shape((12, 12, 12)).create("volume").unwrap();
    file.close().unwrap();
    let message = refused(&["--test-data", text(&held_out)]);
    assert!(message.contains(text(&bad)) && message.contains("no labels under this name; it has volume"), "{message}");
    make(&folder.path().join("data"), "1", "13");
    let message = refused(&[]);
    assert!(message.contains("1 channel of 12 x 12 x 12 voxels, but the first file, "), "{message}");
    assert!(message.contains("has 1 channel of 13 x 13 x 13 voxels: crop or resample it"), "{message}");

    let program = |words: &[&str], processes: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_unet3d"));
        let output = command.args(words).env("OMPI_COMM_WORLD_SIZE", processes).output().unwrap();
        assert_eq!(output.status.success(), processes == "1");
        String::from_utf8(output.stderr).unwrap()
    };
    let synth = ["synth", "--out", text(&out), "--count", "1", "--size", "4"];
    assert!(program(&synth, "2").contains("2 processes were started, but synth is the work of one"));
    program(&synth, "1");
    let message = program(&["predict", "--input", "a", "--checkpoint", "b", "--out", text(&out), "--local-ranks", "4"], "4");
    assert!(message.contains("leave out --local-ranks, or start one process"), "{message}");
    let Command::Synth(args) = parse(&["synth", "--out", text(&out), "--count", "0"]) else { unreachable!() };
    assert!(synth::run(&args).unwrap_err().to_string().contains("count must be at least 1"));
}

#[test]
fn a_trained_network_reports_is_tested_and_predicts() {
    let folder = folder();
    let mut args = train_args(folder.path(), "run", "2x1x2x1", &["--class-weights", "0.5,1,1", "--lr", "1e-2"]);
    args.run.epochs = 25;
    let outcome = train(&args).unwrap();
    assert!(outcome.losses.last() < outcome.losses.first());
    let run = folder.path().join("run");
    assert!(fs::read(run.join("loss.png")).unwrap().starts_with(b"\x89PNG"));
    let metrics = json(&run.join("metrics.json"));
    let counts = outcome.test.unwrap();
    assert_eq!(counts.truth.iter().sum::<u64>(), 2 * 12 * 12 * 12);
    let dice: Vec<f64> = counts.dice().into_iter().flatten().collect();
    assert!(dice.len() == 3 && numbers(&metrics["dice"]).iter().zip(&dice).all(|(a, b)| (a - b).abs() < 1e-12));
    assert_eq!(numbers(&metrics["iou"]).len(), 3);
    assert_eq!((&metrics["test_volumes"], &metrics["grid"]), (&2.into(), &"2x1x2x1".into()));

    // The same counts on every grid, for volumes of any extent.
    let (other, checkpoint) = (folder.path().join("other"), run.join(checkpoint::FILE_NAME));
    make(&other, "2", "13");
    let mut all = Vec::new();
    for grid in ["1x1x1x1", "1x2x1x2", "2x1x3x1"] {
        let (out, ranks) = (folder.path().join(grid), on(grid));
        let first = ["eval", "--data", text(&other), "--checkpoint", text(&checkpoint), "--out", text(&out)];
        let Command::Eval(args) = parse(&words(&first, &ranks, &[])) else { unreachable!() };
        ranks::start(&args.ranks, |rank| evaluate::run(rank, &args)).unwrap();
        let metrics = json(&out.join("metrics.json"));
        assert_eq!(metrics["test_volumes"], 2);
        all.push(numbers(&metrics["dice"]));
    }
    // A voxel whose two best classes are equal but for rounding may differ.
    for other in &all[1..] {
        assert!(other.iter().zip(&all[0]).all(|(a, b)| (a - b).abs() < 1e-3), "{all:?}");
    }

    let input = fs::read_dir(&other).unwrap().next().unwrap().unwrap().path();
    let mut predictions = Vec::new();
    for grid in ["1x1x1x1", "1x2x1x2", "1x1x2x1"] {
        let (out, ranks) = (folder.path().join(format!("predicted-{grid}")), on(grid));
        let first = ["predict", "--input", text(&input), "--checkpoint", text(&checkpoint), "--out", text(&out)];
        let Command::Predict(args) = parse(&words(&first, &ranks, &[])) else { unreachable!() };
        ranks::start(&args.ranks, |rank| predict::run(rank, &args)).unwrap();
        assert!(fs::read(out.join("prediction.png")).unwrap().starts_with(b"\x89PNG"));
        // Opened by the volume, checked against it: classes of the same extent.
        let file = hdf5_metno::File::open(out.join(predict::FILE_NAME)).unwrap();
        let data = file.dataset("segmentation").unwrap();
        assert_eq!(data.shape(), [13, 13, 13]);
        predictions.push(data.read_raw::<u8>().unwrap());
    }
    assert!(predictions[0].iter().all(|class| *class < 3));
    for other in &predictions[1..] {
        let differ = other.iter().zip(&predictions[0]).filter(|(a, b)| a != b).count();
        assert!(differ <= 2, "{differ} voxels differ");
    }
    let classes = open_file(&input, 0).unwrap().segmentation("segmentation").unwrap();
    let truth = classes.read_classes(classes.shape().whole(), 3, None, &mut Vec::new()).unwrap();
    let right = predictions[0].iter().zip(&truth).filter(|(a, b)| i32::from(**a) == **b).count();
    assert!(right > truth.len() / 2, "{right} of {} voxels are right", truth.len());
}

#[test]
fn a_step_is_the_same_on_every_grid() {
    let folder = folder();
    let data = folder.path().join("data");
    let steps: Vec<_> = ["1x1x1x1", "2x2x1x1", "1x2x2x2"]
        .into_iter()
        .map(|grid| {
            let (out, ranks) = (folder.path().join(format!("{grid}.safetensors")), on(grid));
            let first = ["compare-ranks", "--data", text(&data), "--out", text(&out), "--depth", "2", "--width", "4"];
            let Command::CompareRanks(args) = parse(&words(&first, &ranks, &[])) else { unreachable!() };
            ranks::start(&args.ranks, |rank| train::compare_ranks(rank, &args)).unwrap();
            read_safetensors(&out, "").unwrap()
        })
        .collect();
    // Loss; 6 convolutions with batch norms, a transposed one and the head; running statistics.
    assert_eq!(steps[0].len(), 1 + 6 * 3 + 2 + 2 + 6 * 2);
    for other in &steps[1..] {
        for (name, difference) in compare::differences(&steps[0], other).unwrap() {
            assert!(difference < 1e-3, "{name} differs by {difference}");
        }
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let folder = folder();
    let with = |change: &dyn Fn(&mut TrainArgs)| {
        let mut args = train_args(folder.path(), "run", "1x2x1x1", &[]);
        change(&mut args);
        train(&args).err().unwrap().to_string()
    };
    let message = with(&|args| args.ranks.grid = burn_spatial::Grid([1, 2, 2, 1]));
    assert!(message.contains("= 4 ranks, but 2 were started"), "{message}");
    let message = with(&|args| args.data = folder.path().join("elsewhere"));
    assert!(message.contains("elsewhere"), "{message}");
    let message = with(&|args| args.model.class_weights = vec![1.0; 2]);
    assert!(message.contains("2 weights for 3 classes"), "{message}");
    let message = with(&|args| args.model.depth = 0);
    assert!(message.contains("1 to 16 levels, not 0"), "{message}");
    let message = with(&|args| args.files.volume = "image".into());
    assert!(message.contains("dataset 'image'") && message.contains("the file has segmentation, volume"), "{message}");
    let message = with(&|args| args.files.segmentation = "label".into());
    assert!(message.contains("dataset 'label'") && message.contains("no labels"), "{message}");
    let message = with(&|args| args.model.classes = 2);
    assert!(message.contains("expected classes from 0 to 1, found 2 at depth"), "{message}");
    let message = with(&|args| args.run.epochs = 0);
    assert!(message.contains("--epochs"), "{message}");

    let (data, out, nothing) = (folder.path().join("data"), folder.path().join("out"), folder.path().join("none.bin"));
    let (first, one) = (["eval", "--data", text(&data), "--checkpoint", text(&nothing), "--out", text(&out)], on("1x1x1x1"));
    let Command::Eval(args) = parse(&words(&first, &one, &[])) else { unreachable!() };
    let message = ranks::start(&args.ranks, |rank| evaluate::run(rank, &args)).err().unwrap().to_string();
    assert!(message.contains("none.bin"), "{message}");
}
