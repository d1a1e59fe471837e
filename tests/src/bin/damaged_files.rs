//! Writes folders of small volumes that cannot be trained on: `damaged_files FOLDER` makes `good`, `truncated`,
//! `wrong_type`, `no_labels`, `nan_labels` and `empty` in it, each of 16 boxes of 32^3 with one that is damaged.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use hdf5_metno::File;

const BOXES: usize = 16;
/// The damaged box: neither the first nor the last.
const BAD: usize = 5;
const SIDE: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("damaged_files FOLDER")?);
    for kind in ["good", "truncated", "wrong_type", "no_labels", "nan_labels"] {
        let folder = folder.join(kind);
        fs::create_dir_all(&folder)?;
        for i in 0..BOXES {
            let path = folder.join(format!("box{i:03}.hdf5"));
            write(&path, i, if i == BAD { kind } else { "good" })?;
        }
    }
    fs::create_dir_all(folder.join("empty"))?;
    Ok(())
}

/// One box of particle counts, channels last, with four labels in [-1, 1].
fn write(path: &Path, seed: usize, kind: &str) -> Result<(), Box<dyn Error>> {
    let file = File::create(path)?;
    let shape = (SIDE, SIDE, SIDE, 4);
    let value = |i: usize| ((i * 2_654_435_761 + seed * 97) >> 7) & 3;
    let len = SIDE * SIDE * SIDE * 4;
    if kind == "wrong_type" {
        let text: hdf5_metno::types::FixedAscii<4> = hdf5_metno::types::FixedAscii::from_ascii("text")?;
        file.new_dataset::<hdf5_metno::types::FixedAscii<4>>().shape(shape).create("full")?.write_raw(&vec![text; len])?;
    } else {
        file.new_dataset::<i16>().shape(shape).create("full")?.write_raw(&(0..len).map(|i| value(i) as i16).collect::<Vec<_>>())?;
    }
    if kind != "no_labels" {
        let mut labels = [0, 1, 2, 3].map(|k| value(seed + k * 31) as f32 / 2.0 - 0.75);
        if kind == "nan_labels" {
            labels[1] = f32::NAN;
        }
        file.new_dataset_builder().with_data(&labels).create("unitPar")?;
    }
    file.close()?;
    if kind == "truncated" {
        let half = fs::metadata(path)?.len() / 2;
        OpenOptions::new().write(true).open(path)?.set_len(half)?;
    }
    Ok(())
}
