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

/// What a process may use of its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cores {
    /// The machine.
    node: String,
    /// The cores its threads may run on; empty where nobody tells.
    mask: Vec<u32>,
    /// How many of them it may use at once: a container may have less time than cores.
    at_once: u32,
}

impl Cores {
    /// Those of the calling thread.
    fn own() -> Cores {
        // Of containers of one machine, each has a name.
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let node = read("/proc/sys/kernel/random/boot_id") + &read("/proc/sys/kernel/hostname");
        let at_once = thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX));
        Cores { node, mask: affinity(), at_once }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.at_once, self.mask.len() as u32].into_iter().chain(self.mask.iter().copied());
        numbers.flat_map(u32::to_le_bytes).chain(self.node.bytes()).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Cores> {
        let (head, rest) = bytes.split_first_chunk::<8>()?;
        let number = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let (mask, node) = rest.split_at_checked(number(&head[4..]) as usize * 4)?;
        let mask = mask.as_chunks::<4>().0.iter().map(|core| number(core)).collect();
        Some(Cores { node: String::from_utf8_lossy(node).into_owned(), mask, at_once: number(head) })
    }
}

/// The cores the calling thread may run on.
fn affinity() -> Vec<u32> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a set of bits, of which zeros are a valid one, and its size; the macros stay within it.
        unsafe {
            let mut set = std::mem::zeroed::<libc::cpu_set_t>();
            if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) == 0 {
                return (0..libc::CPU_SETSIZE as u32).filter(|core| libc::CPU_ISSET(*core as usize, &set)).collect();
            }
        }
    }
    Vec::new()
}

/// The share of the rank `own` in the cores of its machine. A core that several ranks may use is divided among them: where a
/// launcher has given each rank cores of its own, all of these are the rank's, and where all may use all, each has its part.
fn share(own: &Cores, all: &[Cores]) -> usize {
    let here = || all.iter().filter(|other| other.node == own.node);
    let together = here().count().max(1);
    // In parts of a core that come out even where ranks share in the same way.
    let parts: f64 = own.mask.iter().map(|core| 1.0 / here().filter(|other| other.mask.contains(core)).count().max(1) as f64).sum();
    let at_once = own.at_once as usize;
    let cores = match own.mask.is_empty() {
        true => at_once / together,
        // Less time than cores is a limit of all processes of a container together.
        false if at_once < own.mask.len() => (parts + 1e-6).min((at_once / together) as f64) as usize,
        false => (parts + 1e-6) as usize,
    };
    cores.max(1)
}

/// How many threads a rank should compute with: the cores that its launcher has bound it to, or its part of those that it
/// shares with other ranks of its machine. For ranks that are processes; those of [`threads`] have one pool in common.
/// Collective.
///
/// # Errors
/// Where ranks cannot talk.
pub fn threads_of_rank(comm: &Comm) -> Result<usize, CommError> {
    let own = Cores::own();
    let all: Vec<Cores> = comm.all_gather(&own.to_bytes())?.iter().filter_map(|bytes| Cores::from_bytes(bytes)).collect();
    Ok(share(&own, &all))
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

    fn cores(node: &str, mask: std::ops::Range<u32>, at_once: u32) -> Cores {
        Cores { node: node.into(), mask: mask.collect(), at_once }
    }

    fn shares(all: &[Cores]) -> Vec<usize> {
        all.iter().map(|own| share(own, all)).collect()
    }

    #[test]
    fn bound_ranks_have_all_cores_they_are_bound_to() {
        // Two nodes of 4 ranks, 8 cores each: not divided again.
        let bound: Vec<Cores> =
            (0..8).map(|rank| cores(["a", "b"][rank / 4], (rank as u32 % 4) * 8..(rank as u32 % 4 + 1) * 8, 8)).collect();
        assert_eq!(shares(&bound), [8; 8]);
        // All of a machine for all, or all of a job's part of it.
        assert_eq!(shares(&vec![cores("a", 0..32, 32); 4]), [8; 4]);
        assert_eq!(shares(&vec![cores("a", 32..64, 32); 4]), [8; 4]);
        assert_eq!(shares(&vec![cores("a", 0..2, 2); 3]), [1; 3]);
        // Two by two on each socket, and parts that do not divide.
        let sockets: Vec<Cores> = (0..4).map(|rank| cores("a", rank / 2 * 9..(rank / 2 + 1) * 9, 9)).collect();
        assert_eq!(shares(&sockets), [4; 4]);
        assert_eq!(shares(&vec![cores("a", 0..30, 30); 3]), [10; 3]);
        // One is bound, the other not.
        assert_eq!(shares(&[cores("a", 0..4, 4), cores("a", 0..8, 8)]), [2, 6]);
    }

    #[test]
    fn the_time_of_a_container_is_divided() {
        assert_eq!(shares(&vec![cores("a", 0..64, 8); 4]), [2; 4]);
        // Nobody tells the mask.
        assert_eq!(shares(&vec![cores("a", 0..0, 8); 4]), [2; 4]);
        assert_eq!(shares(&[cores("a", 0..64, 8), cores("b", 0..64, 8)]), [8, 8]);
    }

    #[test]
    fn cores_are_told_as_they_are() {
        for own in [Cores::own(), cores("", 0..0, 1), cores("a node", 5..300, 7)] {
            assert_eq!(Cores::from_bytes(&own.to_bytes()), Some(own));
        }
        assert_eq!(Cores::from_bytes(&[1, 0, 0, 0, 9, 0, 0, 0, 1]), None);
    }

    /// Ranks that may use one core each, in a process of its own that `taskset` starts: [`under_taskset`] looks.
    #[test]
    fn a_mask_is_a_ranks_own() {
        let all = affinity();
        for (mask, expected) in [(all[..1].to_vec(), 1), (all.clone(), all.len())] {
            let list = mask.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let mut command = std::process::Command::new("taskset");
            command.args(["-c", &list]).arg(std::env::current_exe().unwrap());
            command
                .args(["--exact", "launch::tests::under_taskset", "--ignored", "--nocapture"])
                .env("EXPECTED_CORES", expected.to_string());
            let output = command.output().expect("taskset is there");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
    }

    #[test]
    #[ignore = "started by a_mask_is_a_ranks_own"]
    fn under_taskset() {
        let expected: usize = std::env::var("EXPECTED_CORES").unwrap().parse().unwrap();
        let alone = threads(1, |comm| threads_of_rank(&comm)).unwrap();
        assert_eq!(alone, [expected]);
        // Ranks that share the mask divide it.
        assert_eq!(threads(2, |comm| threads_of_rank(&comm)).unwrap(), [(expected / 2).max(1); 2]);
        // Ranks that are bound, one to a core each.
        let cores = affinity();
        let bound = threads(cores.len().min(8), |comm| {
            // SAFETY: as in `affinity`.
            unsafe {
                let mut set = std::mem::zeroed::<libc::cpu_set_t>();
                libc::CPU_SET(cores[comm.rank()] as usize, &mut set);
                assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set), 0);
            }
            threads_of_rank(&comm)
        });
        assert!(bound.unwrap().iter().all(|n| *n == 1));
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
