//! The cosmoflow program on thread ranks: training, checkpoints, reports and errors.

use std::fs;
use std::path::Path;

use burn_spatial_examples::common::{Error, checkpoint, compare, ranks};
use burn_spatial_examples::cosmoflow::cli::{Cli, Command, TrainArgs};
use burn_spatial_examples::cosmoflow::train::{self, Outcome};
use burn_spatial_examples::cosmoflow::{evaluate, synth};
use burn_spatial_models::weights::read_safetensors;
use clap::Parser;
use tempfile::TempDir;

fn parse(words: &[&str]) -> Command {
    Cli::try_parse_from([&["cosmoflow"], words].concat()).unwrap().command
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A folder with eight universes in `data`.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let words = ["synth", "--out", text(&data), "--count", "8", "--vary", "Omega_m,sigma_8", "--fixed-box"];
    let Command::Synth(args) = parse(&words) else { unreachable!() };
    synth::run(&args).unwrap();
    folder
}

fn train_args(folder: &Path, out: &str, grid: &str, more: &[&str]) -> TrainArgs {
    let (data, out) = (folder.join("data"), folder.join(out));
    let ranks: usize = grid.split('x').map(|n| n.parse::<usize>().unwrap()).product();
    let ranks = ranks.to_string();
    let words = [
        "train",
        "--data",
        text(&data),
        "--out",
        text(&out),
        "--grid",
        grid,
        "--local-ranks",
        &ranks,
        "--scale",
        "8",
        "--epochs",
        "4",
        "--batch",
        "2",
        "--test-fraction",
        "0.25",
        "--augment",
        "periodic",
    ];
    let Command::Train(args) = parse(&[&words, more].concat()) else { unreachable!() };
    args
}

fn train(args: &TrainArgs) -> Result<Outcome, Error> {
    ranks::start(&args.ranks, |rank| train::train(&rank, args))
}

fn bits(losses: &[f32]) -> Vec<u32> {
    losses.iter().map(|l| l.to_bits()).collect()
}

fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-3 * a.abs().max(b.abs()))
}

#[test]
fn two_epochs_and_two_are_four() {
    let folder = folder();
    for norm in ["--batch-norm", "--no-batch-norm"] {
        let whole = train(&train_args(folder.path(), &format!("whole{norm}"), "1x2x1x1", &[norm])).unwrap();
        assert_eq!(whole.losses.len(), 4 * 3);
        let out = format!("parts{norm}");
        let first = train(&train_args(folder.path(), &out, "1x2x1x1", &[norm, "--stop-after", "2"])).unwrap();
        assert_eq!(bits(&first.losses), bits(&whole.losses[..6]));
        assert!(first.test.is_none());
        let second = train(&train_args(folder.path(), &out, "1x2x1x1", &[norm, "--resume"])).unwrap();
        assert_eq!(bits(&second.losses), bits(&whole.losses));
        assert_eq!(second.test, whole.test);
        let third = train(&train_args(folder.path(), &out, "1x2x1x1", &[norm, "--resume"])).unwrap();
        assert_eq!(bits(&third.losses), bits(&whole.losses), "nothing is left to do");
    }
}

#[test]
fn a_checkpoint_goes_on_on_another_grid_and_a_damaged_one_gives_way_to_the_last() {
    let folder = folder();
    let args = |grid, more: &[&str]| train_args(folder.path(), "run", grid, more);
    train(&args("2x2x1x1", &["--stop-after", "2"])).unwrap();
    let file = folder.path().join("run").join(checkpoint::FILE_NAME);
    let good = fs::read(&file).unwrap();
    let one = train(&args("1x1x1x1", &["--resume"])).unwrap();

    // The newest holds two epochs again, and is then cut short.
    fs::write(&file, &good[..good.len() / 2]).unwrap();
    fs::remove_file(folder.path().join("run/metrics.json")).unwrap();
    let previous = checkpoint::previous(&file);
    assert!(previous.exists());
    fs::write(&previous, &good).unwrap();
    let split = train(&args("1x2x1x2", &["--resume"])).unwrap();
    assert_eq!(bits(&one.losses[..6]), bits(&split.losses[..6]));
    assert!(near(&one.losses, &split.losses), "{:?} and {:?}", one.losses, split.losses);

    let mut flipped = good.clone();
    flipped[good.len() / 3] ^= 1;
    fs::write(&file, &flipped).unwrap();
    fs::write(&previous, b"").unwrap();
    let message = train(&args("1x1x1x1", &["--resume"])).err().unwrap().to_string();
    assert!(message.contains("no usable checkpoint") && message.contains("checksum"), "{message}");

    fs::write(&file, &good).unwrap();
    let mut other = args("1x1x1x1", &["--resume"]);
    other.model.seed = 2;
    let message = train(&other).err().unwrap().to_string();
    assert!(message.contains("--seed was 1, is 2"), "{message}");

    // That of another program, with a right checksum.
    let header = good.iter().position(|b| *b == b'\n').unwrap();
    let text = std::str::from_utf8(&good[..header]).unwrap().replace("\"cosmoflow\"", "\"unet3d\"");
    let mut foreign = [text.as_bytes(), &good[header..good.len() - 4]].concat();
    foreign.extend(crc32fast::hash(&foreign).to_le_bytes());
    fs::write(&file, &foreign).unwrap();
    let message = train(&args("1x1x1x1", &["--resume"])).err().unwrap().to_string();
    assert!(message.contains("it is a checkpoint of unet3d, not of cosmoflow"), "{message}");
}

#[test]
fn a_training_reports_and_can_be_tested_again() {
    let folder = folder();
    let mut args = train_args(folder.path(), "run", "2x1x2x1", &[]);
    args.run.epochs = 1;
    let outcome = train(&args).unwrap();
    let test = outcome.test.unwrap();
    assert_eq!(test.names, ["Omega_m", "sigma_8"], "parameters that do not vary are not learned");
    assert_eq!(test.truth.len(), 2);
    let run = folder.path().join("run");
    for picture in ["loss.png", "predicted.png"] {
        assert!(fs::read(run.join(picture)).unwrap().starts_with(b"\x89PNG"));
    }
    let metrics: serde_json::Value = serde_json::from_slice(&fs::read(run.join("metrics.json")).unwrap()).unwrap();
    assert_eq!(metrics["grid"], "2x1x2x1");
    assert_eq!(metrics["losses"].as_array().unwrap().len(), 3);
    assert_eq!(metrics["communication"].as_array().unwrap().len(), 4);
    assert!(metrics["communication"][3]["halos"].as_u64().unwrap() > 0);
    assert!(metrics["peak_memory_mib"][0].as_f64().is_some_and(|m| m > 1.0));
    assert!(metrics["seconds_per_step"].as_f64().unwrap() > 0.0);
    for (column, name) in test.names.iter().enumerate() {
        assert_eq!(metrics["test_mse"][name].as_f64().unwrap(), test.mse()[column]);
        assert_eq!(metrics["constant_mse"][name].as_f64().unwrap(), test.constant_mse()[column]);
    }

    let (data, file, out) = (folder.path().join("data"), run.join(checkpoint::FILE_NAME), folder.path().join("eval"));
    let words =
        ["eval", "--data", text(&data), "--checkpoint", text(&file), "--out", text(&out), "--grid", "1x1x1x2", "--local-ranks", "2"];
    let Command::Eval(args) = parse(&words) else { unreachable!() };
    ranks::start(&args.ranks, |rank| evaluate::run(rank, &args)).unwrap();
    let metrics: serde_json::Value = serde_json::from_slice(&fs::read(out.join("metrics.json")).unwrap()).unwrap();
    assert_eq!(metrics["test_universes"], 8);
    assert!(metrics["test_mse"]["sigma_8"].as_f64().is_some_and(f64::is_finite));
}

#[test]
fn a_step_is_the_same_on_every_grid() {
    let folder = folder();
    let data = folder.path().join("data");
    let steps: Vec<_> = [("1x1x1x1", "1"), ("2x2x1x1", "4"), ("1x2x2x2", "8")]
        .into_iter()
        .map(|(grid, count)| {
            let out = folder.path().join(format!("{grid}.safetensors"));
            let words = [
                "compare-ranks",
                "--data",
                text(&data),
                "--out",
                text(&out),
                "--grid",
                grid,
                "--local-ranks",
                count,
                "--batch",
                "2",
                "--scale",
                "4",
                "--batch-norm",
            ];
            let Command::CompareRanks(args) = parse(&words) else { unreachable!() };
            ranks::start(&args.ranks, |rank| train::compare_ranks(rank, &args)).unwrap();
            read_safetensors(&out, "").unwrap()
        })
        .collect();
    assert_eq!(steps[0].len(), 1 + (7 + 2 * 7 + 2 * 3) + 2 * 7);
    for other in &steps[1..] {
        for (name, difference) in compare::differences(&steps[0], other).unwrap() {
            assert!(difference < 1e-4, "{name} differs by {difference}");
        }
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let folder = folder();
    let failure = |args: &TrainArgs| train(args).err().unwrap().to_string();
    let with = |change: &dyn Fn(&mut TrainArgs)| {
        let mut args = train_args(folder.path(), "run", "1x2x1x1", &[]);
        change(&mut args);
        failure(&args)
    };
    let message = with(&|args| args.ranks.grid = burn_spatial::Grid([1, 2, 2, 1]));
    assert!(message.contains("grid 1x2x2x1 needs 1 x 2 x 2 x 1 = 4 ranks, but 2 were started"), "{message}");
    let message = with(&|args| args.data = folder.path().join("elsewhere"));
    assert!(message.contains("elsewhere: there is no such folder"), "{message}");
    let message = with(&|args| args.test.test_fraction = 0.0);
    assert!(message.contains("--test-fraction"), "{message}");
    let message = with(&|args| args.model.scale = 3);
    assert!(message.contains("scale 3"), "{message}");
    fs::write(folder.path().join("file"), "").unwrap();
    let message = with(&|args| args.out = folder.path().join("file/out"));
    assert!(message.contains("file/out"), "{message}");
    let data = folder.path().join("data");
    let words = ["compare-ranks", "--data", text(&data), "--out", text(&data), "--local-ranks", "1"];
    let Command::CompareRanks(args) = parse(&words) else { unreachable!() };
    let message = ranks::start(&args.ranks, |rank| train::compare_ranks(rank, &args)).unwrap_err().to_string();
    assert!(message.contains("data: is a folder; give the name of a file"), "{message}");
    // One file is damaged: the rank that reads it first says so, and all end.
    let victim = fs::read_dir(folder.path().join("data")).unwrap().next().unwrap().unwrap().path();
    fs::write(&victim, b"no hdf5").unwrap();
    let message = with(&|_| ());
    assert!(message.contains(victim.file_name().unwrap().to_str().unwrap()), "{message}");
}
