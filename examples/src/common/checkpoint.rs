//! Checkpoints: everything a training needs to go on, on any grid, to the same bits on the same one.
//!
//! A file is a line of JSON (the [`State`]), Burn's records of the network and the optimizer, and a CRC-32 of all that.
//! A new one is written beside the last and renamed, and the last is kept as `*.previous`.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::Optimizer;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn_spatial_models::Adam;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::data::Scaling;
use super::ranks::{Rank, bytes_on_first, on_all, on_first};
use super::training::Task;
use super::{Backend, Error};

/// Name of the newest checkpoint in the output folder.
pub const FILE_NAME: &str = "checkpoint.bin";

const VERSION: u32 = 1;

/// The optimizer of a network.
pub type AdamOptimizer<M> = OptimizerAdaptor<Adam, M, Backend>;

/// Where a training is; `S` is the network, and what a program says of its data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State<S> {
    /// Version of the file format.
    pub version: u32,
    /// The network and its data.
    #[serde(flatten)]
    pub setup: S,
    /// How the input is scaled.
    pub scaling: Scaling,
    /// What has to be the same for a training to go on: epochs, batch, seed, learning rate, number of samples and the like.
    pub schedule: String,
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
    /// The state before the first step.
    pub fn new(setup: S, scaling: Scaling, schedule: String) -> State<S> {
        State { version: VERSION, setup, scaling, schedule, epoch: 0, step: 0, random: (0, 0), losses: Vec::new(), lengths: [0; 2] }
    }
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
fn decode<S: DeserializeOwned>(bytes: &[u8]) -> Result<Parts<'_, S>, String> {
    let (content, sum) = bytes.split_last_chunk::<4>().ok_or("it is empty")?;
    if crc32fast::hash(content) != u32::from_le_bytes(*sum) {
        return Err("its checksum is wrong: it is damaged or no checkpoint".into());
    }
    let end = content.iter().position(|b| *b == b'\n').ok_or("it has no header")?;
    let state: State<S> = serde_json::from_slice(&content[..end]).map_err(|e| format!("its header cannot be read: {e}"))?;
    if state.version != VERSION {
        return Err(format!("it has version {}, this program reads version {VERSION}", state.version));
    }
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
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let write = |partial: &Path| {
            let mut file = File::create(partial)?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        write(&partial).map_err(Error::io(&partial))?;
        if path.exists() {
            fs::rename(path, previous(path)).map_err(Error::io(path))?;
        }
        fs::rename(&partial, path).map_err(Error::io(path))
    })
}

/// A usable file at `path` or, where that is damaged or missing, the previous one.
fn read<S: DeserializeOwned>(path: &Path) -> Result<Vec<u8>, Error> {
    let check = |path: &Path| {
        let bytes = fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        decode::<S>(&bytes).map_err(|e| format!("{}: {e}", path.display()))?;
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

/// What a checkpoint holds.
pub type Loaded<T> = (State<<T as Task>::Setup>, <T as Task>::Model, AdamOptimizer<<T as Task>::Model>);

/// The checkpoint at `path`, or the previous one with a message where that is damaged. Collective: rank 0 reads. The
/// grid may be another than the one that saved it.
///
/// # Errors
/// [`Error::Checkpoint`] when neither can be used.
pub fn load<T: Task>(rank: &Rank, path: &Path) -> Result<Loaded<T>, Error> {
    let bytes = bytes_on_first(rank.world(), || read::<T::Setup>(path))?;
    let parts = || -> Result<_, Error> {
        let bad = |cause: String| Error::Checkpoint(format!("{}: {cause}", path.display()));
        let (state, model, optimizer) = decode::<T::Setup>(&bytes).map_err(bad)?;
        let record = |bytes: &[u8]| bytes.to_vec();
        let model = Recorder::<Backend>::load(&recorder(), record(model), &rank.device).map_err(|e| bad(e.to_string()))?;
        let optimizer = Recorder::<Backend>::load(&recorder(), record(optimizer), &rank.device).map_err(|e| bad(e.to_string()))?;
        let network = T::model(&state.setup, &rank.device)?;
        Ok((state, network.load_record(model), Adam::default().init().load_record(optimizer)))
    };
    on_all(rank.world(), parts())
}
