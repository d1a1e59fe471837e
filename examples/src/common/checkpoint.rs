//! Checkpoints: everything a training needs to go on, on any grid, to the same bits on the same one.
//!
//! A file is a line of JSON (the [`State`]), Burn's records of the network and the optimizer, and a CRC-32 of all that.
//! A new one is written beside the last and renamed, and the last is kept as `*.previous`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::Optimizer;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn_spatial_io::whole_file;
use burn_spatial_models::Adam;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::data::Scaling;
use super::ranks::{Rank, bytes_on_first, on_all, on_first};
use super::training::Task;
use super::{Backend, Error};

/// Name of the newest checkpoint in the output folder.
pub const FILE_NAME: &str = "checkpoint.bin";

const VERSION: u32 = 2;

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

/// Writes a checkpoint to `path`, the one there becoming the previous one. Collective: rank 0 writes, and every rank
/// learns whether it worked.
///
/// # Errors
/// [`Error::Io`] and [`Error::Checkpoint`].
pub fn save<T: Task>(
    rank: &Rank,
    path: &Path,
    state: &State<T::Setup>,
    model: &T::Model,
    optimizer: &AdamOptimizer<T::Model>,
) -> Result<(), Error> {
    on_first(rank.world(), || {
        let bytes = encode::<T>(state, model, optimizer).map_err(|e| Error::Checkpoint(format!("{}: {e}", path.display())))?;
        let write = |partial: &Path| {
            let mut file = File::create(partial)?;
            file.write_all(&bytes)?;
            // Before the last one makes way.
            file.sync_all()?;
            if path.exists() { fs::rename(path, previous(path)) } else { Ok(()) }
        };
        whole_file(path, |partial| write(partial).map_err(Error::io(path)), Error::io(path))
    })
}

/// A usable file at `path` or, where that is damaged or missing, the previous one.
fn read<T: Task>(path: &Path) -> Result<Vec<u8>, Error> {
    let check = |path: &Path| {
        let bytes = fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        decode::<T>(&bytes).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(bytes)
    };
    check(path).or_else(|newest: String| {
        let bytes = check(&previous(path)).map_err(|before| Error::Checkpoint(format!("no usable checkpoint: {newest}; {before}")))?;
        eprintln!("{newest}; going on from the previous checkpoint, {}", previous(path).display());
        Ok(bytes)
    })
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
    let bytes = bytes_on_first(rank.world(), || read::<T>(path))?;
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
