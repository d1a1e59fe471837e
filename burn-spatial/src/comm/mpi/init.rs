//! The start and the end of MPI.

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use mpi_sys as ffi;

use super::MpiComm;
use super::engine::{Engine, Handle, leak};
use super::group::Group;
use super::header::HEADER;
use super::share::node_of;
use crate::comm::{Comm, CommError, env_number, lock, timeout_from_env, without_rank};

/// The engine of this process; MPI has one world.
static ENGINE: OnceLock<Arc<Engine>> = OnceLock::new();

/// Why MPI could not be started.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The process was started by the launcher of another MPI library.
    #[error(
        "{variable}={started}, but this program's MPI sees 1 rank: it was built with another MPI than the launcher's; start it with the mpirun of the MPI it was built with"
    )]
    Launcher {
        /// The variable the launcher set.
        variable: &'static str,
        /// How many ranks it started.
        started: usize,
    },
    /// The library cannot be called from several threads.
    #[error("this MPI does not provide MPI_THREAD_MULTIPLE (level {0} only): use a build with thread support")]
    Threads(i32),
    /// MPI was started or ended before; a process can do so once.
    #[error("MPI was already started in this process: it can be started once, and not again after its end")]
    Twice,
    /// An MPI call failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Starts MPI and returns the communicator of all ranks. Collective; once a process. Most programs call
/// [`crate::launch::mpi`], which does this and ends the job when a rank fails.
pub fn init() -> Result<Comm, InitError> {
    let cap = env_number("BURN_SPATIAL_MAX_MESSAGE").unwrap_or(1 << 30);
    // Room for the header and some payload; MPI counts in i32.
    let cap = cap.clamp(2 * HEADER as u64, i32::MAX as u64);
    let mut before = 0;
    // SAFETY: may be called at any time; there is room for the answer.
    check(0, "MPI_Initialized", unsafe { ffi::MPI_Initialized(&mut before) })?;
    if before != 0 {
        return Err(InitError::Twice);
    }
    let mut provided = 0;
    let none = std::ptr::null_mut();
    // SAFETY: MPI allows null for both arguments.
    let rc = unsafe { ffi::MPI_Init_thread(none, none.cast(), ffi::RSMPI_THREAD_MULTIPLE, &mut provided) };
    check(0, "MPI_Init_thread", rc)?;
    // SAFETY: a constant of the bindings, which nothing writes.
    let raw = unsafe { ffi::RSMPI_COMM_WORLD };
    return_errors(0, raw)?;
    let (mut rank, mut size) = (0, 0);
    // SAFETY: a live communicator, and room for one number.
    check(0, "MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(raw, &mut rank) })?;
    // SAFETY: a live communicator, and room for one number.
    check(0, "MPI_Comm_size", unsafe { ffi::MPI_Comm_size(raw, &mut size) })?;
    let (rank, size) = (rank as usize, size as usize);
    let (own, mut cap) = (cap, cap);
    // SAFETY: one number of the type named, in and out.
    let rc = unsafe {
        let (from, to) = ((&raw const own).cast(), (&raw mut cap).cast());
        ffi::MPI_Allreduce(from, to, 1, ffi::RSMPI_UINT64_T, ffi::RSMPI_MIN, raw)
    };
    check(rank, "MPI_Allreduce", rc)?;
    if let Some((variable, started)) = foreign_launcher(size, |name| std::env::var(name).ok()) {
        return Err(InitError::Launcher { variable, started });
    }
    // A library may provide more than asked for, and orders the levels.
    // SAFETY: a constant of the bindings, which nothing writes.
    if provided < unsafe { ffi::RSMPI_THREAD_MULTIPLE } {
        return Err(InitError::Threads(provided));
    }
    let (local_rank, node) = node_of(raw, rank, size)?;
    let engine = Arc::new(Engine {
        world: Handle(raw),
        rank,
        local_rank,
        node,
        cap: cap as usize,
        timeout: timeout_from_env(),
        active: Mutex::default(),
        submitted: Condvar::new(),
        driver: Mutex::default(),
    });
    let through_mpi = (0..size).any(|peer| !engine.node.as_ref().is_some_and(|node| node.holds(peer)));
    if env_number("BURN_SPATIAL_PROGRESS").map_or(size > 1 && through_mpi, |wanted| wanted > 0) {
        Engine::start_driver(&engine);
    }
    let group = Group::new(&engine, duplicate(rank, raw)?, (0..size).collect())?;
    if ENGINE.set(engine).is_err() {
        return Err(InitError::Twice);
    }
    Ok(Arc::new(MpiComm { group, counters: Arc::default() }))
}

/// Ends MPI: waits for every rank, gives the operations under way a few seconds to finish, gives up those that
/// nobody answers, and finalises. Collective; the last call of the job.
pub fn finalize(world: &Comm) -> Result<(), CommError> {
    world.barrier()?;
    let Some(engine) = ENGINE.get() else { return Ok(()) };
    engine.end_driver();
    let start = Instant::now();
    while !engine.drive() && start.elapsed() < Duration::from_secs(2) {
        std::thread::yield_now();
    }
    for slot in lock(&engine.active).slots.drain(..) {
        lock(&slot).op.abandon();
        leak(slot);
    }
    // SAFETY: MPI was initialised, and this is the last call: what is still under way was given up.
    check(engine.rank, "MPI_Finalize", unsafe { ffi::MPI_Finalize() })
}

/// Prints `rank R: cause` and ends all ranks of the job with exit code 1. Does not return while MPI is running.
pub(crate) fn abort_job(cause: &str) {
    let Some(engine) = ENGINE.get() else { return };
    let cause = without_rank(engine.rank, cause);
    // In one write, so that the lines of ranks that fail together do not mix. There is nobody to tell of an error.
    let _ = std::io::stderr().write_all(format!("rank {}: {cause}\n", engine.rank).as_bytes());
    // The launcher passes the line on by one way and hears of the abort by another: what it says of it itself comes last.
    std::thread::sleep(Duration::from_millis(200));
    // SAFETY: MPI is initialised; aborting is allowed from any thread.
    unsafe { ffi::MPI_Abort(engine.world.0, 1) };
}

/// This process's number among the ranks of its node, from 0; `None` before [`init`].
pub fn local_rank() -> Option<usize> {
    ENGINE.get().map(|engine| engine.local_rank)
}

/// The variable by which a launcher says that it started several ranks, where MPI sees one.
///
/// Open MPI's and the PMI launchers' variables decide where they are set: a Slurm step may hold Open MPI's daemons.
fn foreign_launcher(size: usize, env: impl Fn(&str) -> Option<String>) -> Option<(&'static str, usize)> {
    if size > 1 {
        return None;
    }
    let read = |name: &'static str| Some((name, env(name)?.trim().parse::<usize>().ok()?));
    let by_mpi = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"].into_iter().filter_map(read).max_by_key(|v| v.1);
    by_mpi.or_else(|| read("SLURM_STEP_NUM_TASKS")).filter(|(_, started)| *started > 1)
}

/// The error of an MPI call, if any.
pub(super) fn check(rank: usize, call: &'static str, rc: i32) -> Result<(), CommError> {
    if rc == ffi::MPI_SUCCESS as i32 {
        return Ok(());
    }
    Err(CommError::Mpi { rank, call, message: error_text(rc) })
}

fn error_text(rc: i32) -> String {
    let mut text = vec![0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer has the length MPI asks for.
    let found = unsafe { ffi::MPI_Error_string(rc, text.as_mut_ptr().cast(), &mut len) };
    if found != ffi::MPI_SUCCESS as i32 {
        return format!("error code {rc}");
    }
    text.truncate(len as usize);
    String::from_utf8_lossy(&text).into_owned()
}

/// Makes MPI return the errors of `comm` instead of ending the process.
pub(super) fn return_errors(rank: usize, comm: ffi::MPI_Comm) -> Result<(), CommError> {
    // SAFETY: a live communicator, and a constant of the bindings.
    let rc = unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) };
    check(rank, "MPI_Comm_set_errhandler", rc)
}

pub(super) fn duplicate(rank: usize, comm: ffi::MPI_Comm) -> Result<ffi::MPI_Comm, CommError> {
    // SAFETY: a constant of the bindings, which nothing writes.
    let mut copy = unsafe { ffi::RSMPI_COMM_NULL };
    // SAFETY: a live communicator, and room for another.
    check(rank, "MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(comm, &mut copy) })?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_launcher_is_noticed() {
        let env = |pairs: &'static [(&str, &str)]| move |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        assert_eq!(foreign_launcher(1, env(&[("PMI_SIZE", "4")])), Some(("PMI_SIZE", 4)));
        assert_eq!(foreign_launcher(1, env(&[("OMPI_COMM_WORLD_SIZE", "2")])), Some(("OMPI_COMM_WORLD_SIZE", 2)));
        assert_eq!(foreign_launcher(1, env(&[("SLURM_STEP_NUM_TASKS", "8")])), Some(("SLURM_STEP_NUM_TASKS", 8)));
        // mpirun -n 1 on a node of a Slurm job whose step holds two daemons.
        let daemons = env(&[("OMPI_COMM_WORLD_SIZE", "1"), ("SLURM_STEP_NUM_TASKS", "2")]);
        assert_eq!(foreign_launcher(1, daemons), None);
        assert_eq!(foreign_launcher(4, env(&[("PMI_SIZE", "4")])), None);
        assert_eq!(foreign_launcher(1, env(&[])), None);
        let message = InitError::Launcher { variable: "PMI_SIZE", started: 4 }.to_string();
        assert!(message.starts_with("PMI_SIZE=4, but this program's MPI sees 1 rank"), "{message}");
    }
}
