//! One rank's view of the job, and what ranks do for each other.

use std::sync::Arc;

use burn::backend::flex::FlexDevice;
use burn_spatial::comm::Comm;
use burn_spatial::{Mesh, SpatialDevice, launch};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::cli::RankArgs;
use super::{Error, launcher};

/// A started rank: its place in the grid and its device.
#[derive(Clone, Debug)]
pub struct Rank {
    /// The grid.
    pub mesh: Arc<Mesh>,
    /// Where this rank computes.
    pub device: SpatialDevice<FlexDevice>,
}

impl Rank {
    /// Lays the grid of `args` over the ranks of `comm`. Collective.
    ///
    /// # Errors
    /// [`Error::Mesh`] when the number of ranks is another.
    pub fn new(comm: Comm, args: &RankArgs) -> Result<Rank, Error> {
        let mesh = on_all(&comm, Mesh::new(comm.clone(), args.grid).map_err(Error::from))?;
        let device = SpatialDevice::new(FlexDevice, mesh.clone())?;
        Ok(Rank { mesh, device })
    }

    /// Whether this rank prints and writes.
    pub fn is_first(&self) -> bool {
        self.mesh.rank() == 0
    }

    /// The communicator of all ranks.
    pub fn world(&self) -> &Comm {
        self.mesh.world()
    }
}

/// Runs `program` on all ranks: `--local-ranks` threads, or the processes that `mpirun` started.
///
/// # Errors
/// The first error of any rank; it ends all others. Under MPI it is printed, and the job ends, before this returns.
pub fn start<T: Send>(args: &RankArgs, program: impl Fn(Rank) -> Result<T, Error> + Sync) -> Result<T, Error> {
    let run = |comm: Comm| -> Result<T, Error> {
        if args.local_ranks.is_none() {
            share_cores(&comm)?;
        }
        program(Rank::new(comm, args)?)
    };
    match args.local_ranks {
        Some(count) => {
            if let Some(processes) = started_together() {
                return Err(Error::Usage(format!(
                    "{processes} processes were started, and each would run {count} ranks of its own for --local-ranks {count}: \
                     leave out --local-ranks, or start one process"
                )));
            }
            let mut results = launch::threads(count.get(), run)?;
            Ok(results.swap_remove(0))
        }
        None => from_launcher(run),
    }
}

#[cfg(feature = "mpi")]
fn from_launcher<T: Send>(run: impl Fn(Comm) -> Result<T, Error> + Sync) -> Result<T, Error> {
    launch::mpi(run).map_err(Error::from)
}

#[cfg(not(feature = "mpi"))]
fn from_launcher<T: Send>(run: impl Fn(Comm) -> Result<T, Error> + Sync) -> Result<T, Error> {
    let mut results = launch::threads(1, run)?;
    Ok(results.swap_remove(0))
}

/// The processes that a launcher has started with this one, where it is not alone.
fn started_together() -> Option<usize> {
    launcher::size().filter(|count| *count > 1)
}

/// Refuses to run `command`, which has no ranks, in several processes.
///
/// # Errors
/// [`Error::Usage`].
pub fn alone(command: &str) -> Result<(), Error> {
    let told = |processes| Error::Usage(format!("{processes} processes were started, but {command} is the work of one: leave out mpirun"));
    started_together().map_or(Ok(()), |processes| Err(told(processes)))
}

/// Gives each process of a job its share of the cores of its machine; `RAYON_NUM_THREADS` overrides. Collective.
fn share_cores(comm: &Comm) -> Result<(), Error> {
    let threads = launch::threads_of_rank(comm)?;
    if std::env::var_os("RAYON_NUM_THREADS").is_none() {
        // Fails only where a pool was made before, which then stays.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    }
    Ok(())
}

/// Passes on a result that is an error on all ranks or on none: rank 0 alone reports it.
///
/// # Errors
/// That of `result`.
pub fn on_all<T>(comm: &Comm, result: Result<T, Error>) -> Result<T, Error> {
    if result.is_err() && comm.rank() != 0 {
        // Rank 0 ends the job meanwhile.
        comm.barrier()?;
    }
    result
}

/// Runs `work` on rank 0 and gives its bytes to all ranks. Collective.
///
/// # Errors
/// That of rank 0, which reports it.
pub fn bytes_on_first(comm: &Comm, work: impl FnOnce() -> Result<Vec<u8>, Error>) -> Result<Vec<u8>, Error> {
    let mut own = None;
    let mut message = Vec::new();
    if comm.rank() == 0 {
        match work() {
            Ok(bytes) => {
                message = bytes;
                message.push(1);
            }
            Err(error) => {
                message = error.to_string().into_bytes();
                message.push(0);
                own = Some(error);
            }
        }
    }
    let mut message = comm.broadcast(0, message)?;
    match message.pop() {
        Some(1) => Ok(message),
        _ => {
            let told = || Error::First(String::from_utf8_lossy(&message).into_owned());
            on_all(comm, Err(own.unwrap_or_else(told)))
        }
    }
}

/// Runs `work` on rank 0 and gives its result to all ranks. Collective.
///
/// # Errors
/// That of rank 0, which reports it.
pub fn on_first<T: Serialize + DeserializeOwned>(comm: &Comm, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let encoded = |value: T| serde_json::to_vec(&value).map_err(|e| Error::First(e.to_string()));
    let bytes = bytes_on_first(comm, || work().and_then(encoded))?;
    serde_json::from_slice(&bytes).map_err(|e| Error::First(e.to_string()))
}
