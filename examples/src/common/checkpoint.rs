//! Checkpoints: everything a training needs to go on, on any grid, to the same bits on the same one.
//!
//! A file is a line of JSON (the [`State`]), Burn's records of the network and the optimizer, and a CRC-32 of all that.
//! A new one is written beside the last and renamed, and the last is kept as `*.previous` unless it is damaged.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::Optimizer;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::record::AdaptorRecord;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::Tensor;
use burn_spatial::comm::{Alive, CommError};
use burn_spatial_io::whole_file;
use burn_spatial_models::{Adam, weights};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::data::Scaling;
use super::ranks::{Rank, bytes_on_first, long_on_first, on_all};
use super::training::Task;
use super::{Backend, Error};

/// Name of the newest checkpoint in the output folder.
pub const FILE_NAME: &str = "checkpoint.bin";

const VERSION: u32 = 2;

/// Bytes read or written at once: between them the other ranks hear that this one is alive.
const PART: usize = 64 << 20;

/// What has to be the same for a training to go on, by the user's names: options, and what the data are.
pub type Schedule = BTreeMap<String, String>;

/// The optimizer of a network.
pub type AdamOptimizer<M> = OptimizerAdaptor<Adam, M, Backend>;

/// Where a training is; `S` is the network, and what a program says of its data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State<S> {
    /// Version of the file format.
    pub version: u32,
    /// The program it is of.
    pub program: String,
    /// The network and its data.
    #[serde(flatten)]
    pub setup: S,
    /// How the input is scaled.
    pub scaling: Scaling,
    /// Epochs, batch, seed, learning rate, number of samples and the like.
    pub schedule: Schedule,
    /// Fingerprint of the training files.
    pub files: u32,
    /// Epochs done.
    pub epoch: usize,
    /// Steps done.
    pub step: usize,
    /// Position of the random stream.
    pub random: (u64, u64),
    /// The loss of every step so far.
    pub losses: Vec<f32>,
    /// Lengths of the two records.
    pub lengths: [usize; 2],
}

impl<S> State<S> {
    /// The state of `T` before the first step.
    pub fn new<T: Task<Setup = S>>(setup: S, scaling: Scaling, schedule: Schedule, files: u32) -> State<S> {
        State {
            version: VERSION,
            program: T::PROGRAM.into(),
            setup,
            scaling,
            schedule,
            files,
            epoch: 0,
            step: 0,
            random: (0, 0),
            losses: Vec::new(),
            lengths: [0; 2],
        }
    }
}

impl<S: Serialize> State<S> {
    /// What keeps a training from going on from `self` as `now`, in words; empty where nothing does.
    pub fn differences(&self, now: &State<S>) -> Vec<String> {
        let mut found = Vec::new();
        let value = |state: &State<S>| serde_json::to_value((&state.schedule, &state.setup)).unwrap_or_default();
        differ("", &value(self), &value(now), &mut found);
        if self.files != now.files {
            found.push("the training files are others".into());
        }
        found
    }
}

/// Adds what differs between two values of one kind, an entry a field.
fn differ(name: &str, saved: &Value, now: &Value, found: &mut Vec<String>) {
    if saved == now {
        return;
    }
    match (saved, now) {
        (Value::Object(a), Value::Object(b)) => {
            let both = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
            both.for_each(|key| differ(key, a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null), found));
        }
        // The pair of schedule and setup.
        (Value::Array(a), Value::Array(b)) if name.is_empty() => a.iter().zip(b).for_each(|(a, b)| differ("", a, b, found)),
        (Value::Array(a), Value::Array(b)) if !a.iter().chain(b).all(Value::is_string) => found.push(format!("other {name}")),
        _ => found.push(format!("{name} was {}, is {}", word(saved), word(now))),
    }
}

/// A value as one writes it.
fn word(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(word).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

/// What every version of a header says.
#[derive(Deserialize)]
struct Kind {
    version: u32,
    #[serde(default)]
    program: String,
}

fn recorder() -> BinBytesRecorder<FullPrecisionSettings> {
    BinBytesRecorder::default()
}

/// The file kept when `path` is replaced.
pub fn previous(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".previous");
    name.into()
}

fn encode<T: Task>(state: &State<T::Setup>, model: &T::Model, optimizer: &AdamOptimizer<T::Model>) -> Result<Vec<u8>, String> {
    let model: Vec<u8> = Recorder::<Backend>::record(&recorder(), model.clone().into_record(), ()).map_err(|e| e.to_string())?;
    let optimizer: Vec<u8> = Recorder::<Backend>::record(&recorder(), optimizer.to_record(), ()).map_err(|e| e.to_string())?;
    let state = State { lengths: [model.len(), optimizer.len()], ..state.clone() };
    let mut bytes = serde_json::to_vec(&state).map_err(|e| e.to_string())?;
    bytes.push(b'\n');
    bytes.extend(model);
    bytes.extend(optimizer);
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    Ok(bytes)
}

/// A state, and the records of the network and the optimizer.
type Parts<'a, S> = (State<S>, &'a [u8], &'a [u8]);

/// The parts of a whole file.
fn decode<T: Task>(bytes: &[u8]) -> Result<Parts<'_, T::Setup>, String> {
    let (content, sum) = bytes.split_last_chunk::<4>().ok_or("it is empty")?;
    if crc32fast::hash(content) != u32::from_le_bytes(*sum) {
        return Err("its checksum is wrong: it is damaged or no checkpoint".into());
    }
    let end = content.iter().position(|b| *b == b'\n').ok_or("it has no header")?;
    let unread = |e: serde_json::Error| format!("its header cannot be read: {e}");
    let kind: Kind = serde_json::from_slice(&content[..end]).map_err(unread)?;
    if kind.version != VERSION {
        return Err(format!("it has version {}, this program reads version {VERSION}", kind.version));
    }
    if kind.program != T::PROGRAM {
        return Err(format!("it is a checkpoint of {}, not of {}", kind.program, T::PROGRAM));
    }
    let state: State<T::Setup> = serde_json::from_slice(&content[..end]).map_err(unread)?;
    let records = &content[end + 1..];
    if state.lengths[0].checked_add(state.lengths[1]) != Some(records.len()) {
        return Err("its parts have other lengths than its header says".into());
    }
    let (model, optimizer) = records.split_at(state.lengths[0]);
    Ok((state, model, optimizer))
}

/// What is not finite in network or optimizer, in words.
fn not_finite<T: Task>(model: &T::Model, optimizer: &AdamOptimizer<T::Model>) -> Option<String> {
    /// Looks for a parameter's moments; `found` is the number of the parameter in the network.
    struct Moments<F> {
        of: F,
        parameters: usize,
        found: Option<usize>,
    }

    impl<F: Fn(burn::module::ParamId) -> Option<AdaptorRecord<Adam, Backend>>> ModuleVisitor<Backend> for Moments<F> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Backend, D>>) {
            self.parameters += 1;
            if self.found.is_none()
                && let Some(record) = (self.of)(param.id)
            {
                let momentum = record.into_state::<D>().momentum;
                if !weights::is_finite(momentum.moment_1) || !weights::is_finite(momentum.moment_2) {
                    self.found = Some(self.parameters);
                }
            }
        }
    }

    if let Some(name) = weights::not_finite(&model.valid()) {
        return Some(format!("{name} holds numbers that are not finite"));
    }
    let record = optimizer.to_record();
    let mut moments = Moments { of: |id| record.get(&id).cloned(), parameters: 0, found: None };
    model.visit(&mut moments);
    moments.found.map(|number| format!("the optimizer's moments of parameter {number} are not finite"))
}

/// Writes `bytes` to `file` and to the disk, part by part.
fn write_all(file: &mut File, bytes: &[u8], path: &Path, alive: &mut Alive<'_>) -> Result<(), Error> {
    for part in bytes.chunks(PART) {
        file.write_all(part).and_then(|()| file.sync_data()).map_err(Error::io(path))?;
        alive.beat()?;
    }
    file.sync_all().map_err(Error::io(path))
}

/// What the file `path` holds, read part by part.
fn read_all(path: &Path, alive: &mut Alive<'_>) -> Result<std::io::Result<Vec<u8>>, CommError> {
    let mut bytes = Vec::new();
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(cause) => return Ok(Err(cause)),
    };
    loop {
        match (&mut file).take(PART as u64).read_to_end(&mut bytes) {
            Ok(0) => return Ok(Ok(bytes)),
            Ok(_) => alive.beat()?,
            Err(cause) => return Ok(Err(cause)),
        }
    }
}

/// Writes a checkpoint to `path`; the one there becomes the previous one, unless it is damaged: then it is replaced, and the
/// previous one stays. Collective: rank 0 writes, and every rank learns whether it worked.
///
/// # Errors
/// [`Error::Io`] and [`Error::Checkpoint`]; [`Error::Diverged`], with all files as they were, when network or optimizer hold
/// numbers that are not finite.
pub fn save<T: Task>(
    rank: &Rank,
    path: &Path,
    state: &State<T::Setup>,
    model: &T::Model,
    optimizer: &AdamOptimizer<T::Model>,
) -> Result<(), Error> {
    long_on_first(rank.world(), |alive| {
        if let Some(what) = not_finite::<T>(model, optimizer) {
            return Err(Error::Diverged { step: state.step.saturating_sub(1), what, saved: state.epoch.saturating_sub(1) });
        }
        let bytes = encode::<T>(state, model, optimizer).map_err(|e| Error::Checkpoint(format!("{}: {e}", path.display())))?;
        let write = |partial: &Path| {
            let mut file = File::create(partial).map_err(Error::io(partial))?;
            // On the disk before the last one makes way.
            write_all(&mut file, &bytes, partial, alive)?;
            match check::<T>(path, alive)? {
                Ok(_) => fs::rename(path, previous(path)).map_err(Error::io(path)),
                Err(_) => Ok(()),
            }
        };
        whole_file(path, write, Error::io(path))
    })
}

/// The bytes of a whole checkpoint, or what is wrong with it.
fn check<T: Task>(path: &Path, alive: &mut Alive<'_>) -> Result<Result<Vec<u8>, String>, CommError> {
    let whole = |bytes: Vec<u8>| decode::<T>(&bytes).map(drop).map(|()| bytes);
    let read = read_all(path, alive)?.map_err(|e| e.to_string());
    Ok(read.and_then(whole).map_err(|e| format!("{}: {e}", path.display())))
}

/// A usable file at `path` or, where that is damaged or missing, the previous one.
fn read<T: Task>(path: &Path, alive: &mut Alive<'_>) -> Result<Vec<u8>, Error> {
    let newest = match check::<T>(path, alive)? {
        Ok(bytes) => return Ok(bytes),
        Err(newest) => newest,
    };
    let before = check::<T>(&previous(path), alive)?;
    let bytes = before.map_err(|before| Error::Checkpoint(format!("no usable checkpoint: {newest}; {before}")))?;
    eprintln!("{newest}; going on from the previous checkpoint, {}", previous(path).display());
    Ok(bytes)
}

/// Whether there is something to resume from.
pub fn exists(path: &Path) -> bool {
    path.exists() || previous(path).exists()
}

/// Removes what is at `path`, and the previous one.
///
/// # Errors
/// [`Error::Io`].
pub fn remove(path: &Path) -> Result<(), Error> {
    let there = [path.to_owned(), previous(path)].into_iter().filter(|path| path.exists());
    there.into_iter().try_for_each(|path| fs::remove_file(&path).map_err(Error::io(&path)))
}

/// What a checkpoint holds.
pub type Loaded<T> = (State<<T as Task>::Setup>, <T as Task>::Model, AdamOptimizer<<T as Task>::Model>);

/// The checkpoint at `path`, or the previous one with a message where that is damaged. Collective: rank 0 reads. The
/// grid may be another than the one that saved it.
///
/// # Errors
/// [`Error::Checkpoint`] when neither can be used.
pub fn load<T: Task>(rank: &Rank, path: &Path) -> Result<Loaded<T>, Error> {
    let bytes = bytes_on_first(rank.world(), |alive| read::<T>(path, alive))?;
    let parts = || -> Result<_, Error> {
        let bad = |cause: String| Error::Checkpoint(format!("{}: {cause}", path.display()));
        let (state, model, optimizer) = decode::<T>(&bytes).map_err(bad)?;
        let record = |bytes: &[u8]| bytes.to_vec();
        let model = Recorder::<Backend>::load(&recorder(), record(model), &rank.device).map_err(|e| bad(e.to_string()))?;
        let optimizer = Recorder::<Backend>::load(&recorder(), record(optimizer), &rank.device).map_err(|e| bad(e.to_string()))?;
        let network = T::model(&state.setup, &rank.device)?;
        Ok((state, network.load_record(model), Adam::default().init().load_record(optimizer)))
    };
    on_all(rank.world(), parts())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cosmoflow::data::Targets;
    use crate::cosmoflow::train::{Network, Regression, Setup};

    /// Numbers in [0.5, 1), whose decimals are long.
    fn numbers(seed: u64) -> impl Iterator<Item = f64> {
        std::iter::successors(Some(seed), |x| Some(x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407)))
            .map(|x| f64::from_bits((x >> 12) | (1022 << 52)))
    }

    #[test]
    fn a_header_comes_back_to_the_bit() {
        let means: Vec<f64> = numbers(1).take(20_000).collect();
        let config = Network { width: 32, inputs: 4, outputs: 1, batch_norm: true, dropout: means[7] / 3.0, scale: 1 };
        let setup = Setup { config, targets: Targets { names: vec!["a".into()], columns: vec![0], means } };
        let single = |seed| numbers(seed).take(20_000).map(|x| (x * 1e-3) as f32).collect::<Vec<f32>>();
        let scaling = Scaling { mean: single(2), deviation: single(3) };
        let schedule = Schedule::from([("--lr".into(), numbers(4).next().unwrap().to_string())]);
        let mut state = State::new::<Regression>(setup, scaling, schedule, 5);
        state.losses = single(6);
        state.random = (u64::MAX - 2, 1 << 53 | 1);
        let text = serde_json::to_vec(&state).unwrap();
        let read: State<Setup> = serde_json::from_slice(&text).unwrap();
        assert_eq!(read, state);
        assert!(read.differences(&state).is_empty());
        // As earlier versions wrote them.
        let plain = r#"{"names":["a"],"columns":[0],"means":[0.5]}"#;
        assert_eq!(serde_json::from_str::<Targets>(plain).unwrap().means, [0.5]);
    }
}
