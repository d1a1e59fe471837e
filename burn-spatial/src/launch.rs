//! Starts the ranks of a job and ends them together: the first failure of any rank ends the whole job.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use crate::comm::{self, Comm, CommError};

/// Stack of a rank's thread, in bytes: deep models recurse deeply in their backward pass.
const STACK: usize = 16 << 20;

/// Why a job ended.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A rank panicked or returned an error; the others were ended.
    #[error("rank {rank}: {cause}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// Its error or the message of its panic.
        cause: String,
    },
    /// A thread could not be started.
    #[error("the thread of rank {rank} could not be started: {cause}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The system's words.
        cause: std::io::Error,
    },
    /// MPI could not be started.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Init(#[from] comm::mpi::InitError),
    /// Ranks could not talk.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Runs `run` on `n` threads, one a rank, and returns their results in rank order.
///
/// The first rank that panics or returns an error ends the waits of all others with [`CommError::Poisoned`], and its
/// number and cause are the error. A rank that neither waits nor returns is waited for.
pub fn threads<T, E, F>(n: usize, run: F) -> Result<Vec<T>, LaunchError>
where
    T: Send,
    E: Display,
    F: Fn(Comm) -> Result<T, E> + Sync,
{
    let (world, comms) = comm::threads::build(n, comm::timeout_from_env());
    let body = |comm: Comm| match catch_unwind(AssertUnwindSafe(|| run(comm.clone()))) {
        Ok(Ok(value)) => Some(value),
        Ok(Err(error)) => {
            comm.abort(&error.to_string());
            None
        }
        Err(payload) => {
            comm.abort(panic_message(&*payload));
            None
        }
    };
    let body = &body;
    let results = thread::scope(|scope| {
        let mut handles = Vec::with_capacity(n);
        for (rank, comm) in comms.into_iter().enumerate() {
            let builder = thread::Builder::new().name(format!("rank {rank}")).stack_size(STACK);
            match builder.spawn_scoped(scope, move || body(comm)) {
                Ok(handle) => handles.push(handle),
                Err(cause) => {
                    world.abort(rank, "its thread could not be started");
                    return Err(LaunchError::Spawn { rank, cause });
                }
            }
        }
        // `body` catches panics, so that a join does not fail.
        Ok(handles.into_iter().filter_map(|handle| handle.join().ok().flatten()).collect::<Vec<T>>())
    })?;
    match world.poison() {
        Some((rank, cause)) => Err(LaunchError::Rank { rank, cause }),
        None => Ok(results),
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("panicked without a message")
}

/// Runs `run` on every rank of an MPI job: start the program with `mpirun -n P`. Without, it is one rank.
///
/// A panic on any thread, and an error that `run` returns, print `rank R: cause` as a line of stderr and end all
/// ranks by MPI_Abort with exit code 1: this function does not return then. For that it replaces the panic hook; a
/// panic is fatal even where the program would catch it. It can be called once a process.
///
/// `run` has to return on every rank. A rank that returns early waits at the end of the job for the others; if these
/// wait for it in a collective of the world, both get [`CommError::Mismatch`], else the watchdog's
/// [`CommError::Timeout`]. `std::process::exit` within `run` leaves without telling MPI: most launchers then kill
/// the other ranks, some wait for ever; call [`crate::comm::Communicator::abort`] instead.
#[cfg(feature = "mpi")]
pub fn mpi<T, E, F>(run: F) -> Result<T, LaunchError>
where
    E: Display,
    F: FnOnce(Comm) -> Result<T, E>,
{
    let world = comm::mpi::init()?;
    let rank = world.rank();
    std::panic::set_hook(Box::new(|info| {
        let cause = panic_message(info.payload());
        let place = info.location().map(|place| format!(" at {}:{}", place.file(), place.line())).unwrap_or_default();
        comm::mpi::abort_job(&format!("{cause}{place}"));
    }));
    let value = match run(world.clone()) {
        Ok(value) => value,
        Err(error) => {
            let cause = error.to_string();
            world.abort(&cause);
            return Err(LaunchError::Rank { rank, cause });
        }
    };
    if let Err(error) = comm::mpi::finalize(&world) {
        world.abort(&error.to_string());
        return Err(error.into());
    }
    // MPI has ended: a later panic is the program's own affair.
    drop(std::panic::take_hook());
    Ok(value)
}

/// The device of a rank: ranks of one node (numbered by `local_rank`) take the `visible` devices in turn. Where
/// they must share, or where there is none, a warning says so.
pub fn device_of(local_rank: usize, visible: usize) -> (usize, Option<String>) {
    if visible == 0 {
        return (0, Some(format!("local rank {local_rank} sees no device and asks for device 0")));
    }
    let device = local_rank % visible;
    let shared = local_rank >= visible;
    let warning = || format!("local rank {local_rank} shares device {device}: its node has more ranks than the {visible} devices it sees");
    (device, shared.then(warning))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::ReduceOp;
    use burn_std::DType;

    #[test]
    fn results_come_in_rank_order() {
        let results = threads(4, |comm| Ok::<_, CommError>((comm.rank(), thread::current().name().map(str::to_owned))));
        let expected: Vec<_> = (0..4).map(|rank| (rank, Some(format!("rank {rank}")))).collect();
        assert_eq!(results.unwrap(), expected);
        assert_eq!(threads(0, |_| Ok::<_, CommError>(())).unwrap(), []);
    }

    #[test]
    fn an_error_of_one_rank_ends_all() {
        let result = threads(4, |comm| {
            comm.barrier().map_err(|e| e.to_string())?;
            if comm.rank() == 2 {
                return Err("the file x.h5 is missing".to_owned());
            }
            comm.barrier().map_err(|e| e.to_string())
        });
        let error = result.unwrap_err();
        assert_eq!(error.to_string(), "rank 2: the file x.h5 is missing");
    }

    #[test]
    fn a_panic_of_one_rank_ends_all_groups() {
        let result = threads(4, |comm| {
            let pair = comm.split(comm.rank() / 2, 0)?;
            if comm.rank() == 1 {
                panic!("index {} out of range", 7);
            }
            pair.barrier()?;
            comm.all_reduce(vec![0; 8], DType::F32, ReduceOp::Sum).map(drop)
        });
        assert_eq!(result.unwrap_err().to_string(), "rank 1: index 7 out of range");
    }

    #[test]
    fn devices_are_taken_in_turn() {
        let devices: Vec<_> = (0..4).map(|rank| device_of(rank, 2)).collect();
        assert_eq!(devices.iter().map(|d| d.0).collect::<Vec<_>>(), [0, 1, 0, 1]);
        assert_eq!(devices.iter().map(|d| d.1.is_some()).collect::<Vec<_>>(), [false, false, true, true]);
        assert_eq!(devices[2].1.as_deref(), Some("local rank 2 shares device 0: its node has more ranks than the 2 devices it sees"));
        assert!(device_of(0, 0).1.is_some());
    }
}
