//! One rank's view of the job, and what ranks do for each other.

use std::sync::Arc;

use burn::backend::flex::FlexDevice;
use burn_spatial::comm::{Alive, Comm, broadcast_of};
use burn_spatial::mesh::MeshError;
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

/// Passes on a result that is good on all ranks; otherwise the first rank with an error reports it, and ends the others.
/// Collective.
///
/// # Errors
/// That of `result`; on a rank without, that another one failed.
pub fn on_all<T>(comm: &Comm, result: Result<T, Error>) -> Result<T, Error> {
    if matches!(result, Err(Error::Comm(_) | Error::Mesh(MeshError::Comm(_)))) {
        // There is nobody to ask.
        return result;
    }
    let own = result.as_ref().err().map(Error::to_string).unwrap_or_default();
    let all = comm.all_gather(own.as_bytes())?;
    match all.iter().position(|cause| !cause.is_empty()) {
        Some(first) if first != comm.rank() => {
            // It ends the job meanwhile.
            comm.barrier()?;
            Err(Error::First(format!("rank {first}: {}", String::from_utf8_lossy(&all[first]))))
        }
        _ => result,
    }
}

/// Runs `work`, which may take long and gives signs of life, on rank 0 and gives its bytes to all ranks. Collective.
///
/// # Errors
/// That of rank 0, which reports it.
pub fn bytes_on_first(comm: &Comm, work: impl FnOnce(&mut Alive<'_>) -> Result<Vec<u8>, Error>) -> Result<Vec<u8>, Error> {
    let mut own = None;
    let mut message = broadcast_of(&**comm, 0, |alive| match work(alive) {
        Ok(mut bytes) => {
            bytes.push(1);
            bytes
        }
        Err(error) => {
            let mut message = error.to_string().into_bytes();
            message.push(0);
            own = Some(error);
            message
        }
    })?;
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
    long_on_first(comm, |_| work())
}

/// [`on_first`] for work that may take long: the others wait for it as long as it gives signs of life. Collective.
///
/// # Errors
/// That of rank 0, which reports it.
pub fn long_on_first<T: Serialize + DeserializeOwned>(
    comm: &Comm,
    work: impl FnOnce(&mut Alive<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let encoded = |value: T| serde_json::to_vec(&value).map_err(|e| Error::First(e.to_string()));
    let bytes = bytes_on_first(comm, |alive| work(alive).and_then(encoded))?;
    serde_json::from_slice(&bytes).map_err(|e| Error::First(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_cause_is_that_of_the_rank_that_has_it() {
        for failing in [vec![2], vec![1, 3], vec![0, 1, 2, 3]] {
            let result = launch::threads(4, |comm| {
                let missing = || Error::io(Path::new("x.h5"))(std::io::Error::other(format!("gone from {}", comm.rank())));
                let result = if failing.contains(&comm.rank()) { Err(missing()) } else { Ok(()) };
                on_all(&comm, result)?;
                // Where the others would be.
                comm.broadcast(0, Vec::new()).map(drop).map_err(Error::from)
            });
            let first = failing[0];
            assert_eq!(result.unwrap_err().to_string(), format!("rank {first}: x.h5: gone from {first}"));
        }
        let all_good = launch::threads(3, |comm| on_all(&comm, Ok::<_, Error>(comm.rank())));
        assert_eq!(all_good.unwrap(), [0, 1, 2]);
    }
}
