//! MPI ranks, through the crate `mpi` (feature `mpi`).
//!
//! **Why own collectives.** Everything is made of non-blocking point-to-point messages. MPI's own collectives must be
//! called in one order by all ranks, cannot be given up after a deadline, do not say who is missing, know no f16, and
//! promise no equal bits. Here a collective is a numbered exchange of messages on a communicator that carries nothing
//! else, and every message starts with a header that names the call, so that ranks which run different programs get
//! [`CommError::Mismatch`].
//!
//! **All-reduce.** Small buffers (up to [`DIRECT`] bytes) go whole to every rank, and each rank reduces all of them
//! itself in rank order: one message of latency. Larger ones are cut into one piece a rank: each rank collects its
//! piece from all, reduces it in rank order, and sends the result to all; every rank sends and receives
//! `2 (P - 1) / P` of the buffer, which is optimal. Each element is so computed in rank order, either by one rank or
//! by all from the same numbers: the same bits everywhere, and the same as with [`super::threads`].
//!
//! **Progress.** MPI moves data while some call is made. Each test or wait of any request drives every operation
//! under way in this process, so that a rank which waits for one thing still does its part of another. Where messages go
//! through MPI, because there are other nodes or no memory is shared, a thread of its own does so every half millisecond while
//! the rank computes (`BURN_SPATIAL_PROGRESS`: 0 for no such thread, 1 for one in any case); it sleeps while nothing is under
//! way.
//!
//! **Dropped requests.** The engine owns every operation and its buffers until it is done; a request is a handle.
//! Dropping one therefore neither blocks nor panics nor frees memory MPI still writes to; the operation goes on with
//! later tests and waits, at the latest in [`finalize`]. A dropped receive still takes its message.
//!
//! **Groups** have communicators of their own, so that they never interfere. These are not freed before the end of
//! the job, because MPI frees a communicator collectively, and a drop may happen at any time: make groups once.
//!
//! **Lengths.** A first message of bounded size holds the header and the beginning of the payload; the rest follows,
//! and its receive is started only when the header has told the right length: Open MPI 4.1 writes past the end of a
//! buffer that is too short for a long message, and reports it after that.
//!
//! **Within a node** what does not fit a first message lies in memory that its processes share (`comm::node`), as long
//! as there is room: `BURN_SPATIAL_NODE_MEMORY` MiB a rank (64 unless set, at most half of what `/dev/shm` has left; 0 for
//! none). All pages are reserved at the start, for other jobs may want the rest, and a page that is not there when it is
//! written ends the process; if they cannot be had, messages go through MPI. The header tells where a payload lies. An
//! all-reduce is so summed from where the others' shares lie.
//!
//! **Long payloads** between nodes are sent in parts of at most `BURN_SPATIAL_MAX_MESSAGE` bytes (1 GiB unless set; MPI counts in
//! `i32`). Of ranks that have it set differently, the smallest holds.

use std::fmt;
use std::io::Write;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use burn_std::{BoolStore, DType};
use mpi::ffi;

use super::node::{NodeMemory, Part, SharedFile, Shelved};
use super::{
    Comm, CommCounters, CommError, Communicator, Kind, ReduceOp, Request, Signature, env_number, reduce, timeout_from_env, without_rank,
};
use crate::mix::mix;
use crate::stats::copied;

/// Up to this many bytes an all-reduce sends whole buffers.
pub const DIRECT: usize = 16 << 10;

/// Payload that travels in the first message, with the header: both together fit the 4 KiB that Open MPI sends at
/// once between processes of a node.
const INLINE: usize = 4000;

/// Bytes of the header: kind, type, operation, whether the signature has a length; from byte 4 the tag of the rest,
/// from 8 that length, from 16 the payload's, from 24 one more than the payload's place in the node's memory.
const HEADER: usize = 32;

/// How long the thread that drives messages sleeps between two looks: at less than a percent of the rank's time.
const PERIOD: Duration = Duration::from_micros(500);

/// A part of the node's memory starts at a multiple of this.
const PAGE: usize = 4096;

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
    check(0, "MPI_Initialized", unsafe { ffi::MPI_Initialized(&mut before) })?;
    if before != 0 {
        return Err(InitError::Twice);
    }
    let mut provided = 0;
    let none = std::ptr::null_mut();
    // SAFETY: MPI allows null for both arguments.
    let rc = unsafe { ffi::MPI_Init_thread(none, none.cast(), ffi::RSMPI_THREAD_MULTIPLE, &mut provided) };
    check(0, "MPI_Init_thread", rc)?;
    let raw = unsafe { ffi::RSMPI_COMM_WORLD };
    return_errors(0, raw)?;
    let (mut rank, mut size) = (0, 0);
    check(0, "MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(raw, &mut rank) })?;
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

/// This rank's number among those of its node, and the memory they share, if they do. Collective.
fn node_of(world: ffi::MPI_Comm, rank: usize, size: usize) -> Result<(usize, Option<NodeMemory>), CommError> {
    let mut node = unsafe { ffi::RSMPI_COMM_NULL };
    let info = unsafe { ffi::RSMPI_INFO_NULL };
    let rc = unsafe { ffi::MPI_Comm_split_type(world, ffi::RSMPI_COMM_TYPE_SHARED, rank as i32, info, &mut node) };
    check(rank, "MPI_Comm_split_type", rc)?;
    return_errors(rank, node)?;
    let (mut local, mut count) = (0, 0);
    check(rank, "MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(node, &mut local) })?;
    check(rank, "MPI_Comm_size", unsafe { ffi::MPI_Comm_size(node, &mut count) })?;
    // All ranks of the node need to have the same idea.
    let least = |mut own: u64| {
        let (from, to) = ((&raw const own).cast(), (&raw mut own).cast());
        // SAFETY: one number of the type named, in and out.
        let rc = unsafe { ffi::MPI_Allreduce(from, to, 1, ffi::RSMPI_UINT64_T, ffi::RSMPI_MIN, node) };
        check(rank, "MPI_Allreduce", rc).map(|()| own)
    };
    let wanted = env_number("BURN_SPATIAL_NODE_MEMORY").unwrap_or(64).saturating_mul(1 << 20);
    let wanted = least(wanted)?;
    let len = least(wanted.min(shared_memory_left() / 2 / count as u64))? as usize / PAGE * PAGE;
    if count == 1 || wanted == 0 {
        return Ok((local as usize, None));
    }
    let from = |root: usize, mut number: u64| {
        // SAFETY: one number of the type named.
        let rc = unsafe { ffi::MPI_Bcast((&raw mut number).cast(), 1, ffi::RSMPI_UINT64_T, root as i32, node) };
        check(rank, "MPI_Bcast", rc).map(|()| number)
    };
    let (local, count) = (local as usize, count as usize);
    let number = from(0, mix(crate::random::entropy() ^ u64::from(std::process::id())))?;
    let mut file = match (len, local) {
        (0, _) => Err(std::io::Error::other("/dev/shm is full")),
        (_, 0) => SharedFile::create(number, len * count),
        _ => Err(std::io::ErrorKind::NotFound.into()),
    };
    // The others open it when it is there.
    let there = from(0, u64::from(file.is_ok()))? != 0;
    if there && local != 0 {
        file = SharedFile::open(number);
    }
    let start = file.and_then(|file| {
        file.reserve(local * len..(local + 1) * len)?;
        let start = file.map(count * len)?;
        Ok((start, file))
    });
    // The first that has none says so; with a rank that had no file to open, that is the first of all.
    let first = least(if start.is_ok() { count as u64 } else { local as u64 })? as usize;
    if first < count {
        match start {
            // SAFETY: nobody has the address.
            Ok((start, _)) => unsafe { SharedFile::unmap(start, count * len) },
            Err(error) if first == local => {
                let mib = (len * count) >> 20;
                tracing::warn!("messages within this node go through MPI: its ranks share no memory ({mib} MiB in /dev/shm: {error})");
            }
            Err(_) => {}
        }
        return Ok((local, None));
    }
    let Ok((start, file)) = start else { return Ok((local, None)) };
    // All have opened it: from here on nothing of it is left when the ranks end, however they do.
    drop(file);
    let mut parts = vec![None; size];
    let part = |local: usize| Part { start: start.wrapping_add(local * len), len };
    for peer in 0..count {
        parts[from(peer, rank as u64)? as usize] = Some(part(peer));
    }
    // SAFETY: whole pages, which stay mapped, one part a rank.
    Ok((local, Some(unsafe { NodeMemory::new(parts, part(local)) })))
}

/// Bytes that files in memory can still have; beyond them a write would end the process.
fn shared_memory_left() -> u64 {
    #[cfg(target_os = "linux")]
    {
        let mut found = MaybeUninit::<libc::statvfs>::zeroed();
        // SAFETY: the path ends with 0, and there is room for the answer, of which zeros are a valid one.
        let (rc, found) = unsafe { (libc::statvfs(c"/dev/shm".as_ptr(), found.as_mut_ptr()), found.assume_init()) };
        if rc == 0 {
            return found.f_bavail.saturating_mul(found.f_frsize);
        }
    }
    u64::MAX
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
fn check(rank: usize, call: &'static str, rc: i32) -> Result<(), CommError> {
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
fn return_errors(rank: usize, comm: ffi::MPI_Comm) -> Result<(), CommError> {
    let rc = unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) };
    check(rank, "MPI_Comm_set_errhandler", rc)
}

fn duplicate(rank: usize, comm: ffi::MPI_Comm) -> Result<ffi::MPI_Comm, CommError> {
    let mut copy = unsafe { ffi::RSMPI_COMM_NULL };
    check(rank, "MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(comm, &mut copy) })?;
    Ok(copy)
}

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps what MPI may still use alive for ever.
fn leak<T>(value: T) {
    let _ = ManuallyDrop::new(value);
}

/// `owner`, if starting its messages went well. Otherwise some may be under way all the same, and it is leaked.
fn started<T>(owner: T, result: Result<(), CommError>) -> Result<T, CommError> {
    match result {
        Ok(()) => Ok(owner),
        Err(error) => {
            leak(owner);
            Err(error)
        }
    }
}

/// An MPI communicator.
#[derive(Clone, Copy)]
struct Handle(ffi::MPI_Comm);

// SAFETY: a handle names an object inside MPI, which may be used from any thread under MPI_THREAD_MULTIPLE; `init`
// refuses a library that does not provide it.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

/// What all communicators of the process share.
struct Engine {
    world: Handle,
    rank: usize,
    local_rank: usize,
    node: Option<NodeMemory>,
    /// Bytes of the longest message.
    cap: usize,
    timeout: Option<Duration>,
    active: Mutex<Active>,
    /// Wakes the driver.
    submitted: Condvar,
    driver: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Active {
    slots: Vec<SharedSlot>,
    /// No more is to be driven beside the rank's own calls.
    ended: bool,
}

impl Engine {
    /// Starts the thread that drives messages while the rank computes. Without it they wait for the rank's calls.
    fn start_driver(engine: &Arc<Engine>) {
        let driven = engine.clone();
        match std::thread::Builder::new().name("messages".into()).spawn(move || driven.keep_driving()) {
            Ok(driver) => *lock(&engine.driver) = Some(driver),
            Err(cause) => tracing::warn!("no thread for the progress of messages, which make it in the rank's calls alone: {cause}"),
        }
    }

    fn keep_driving(&self) {
        loop {
            let mut active = lock(&self.active);
            while active.slots.is_empty() && !active.ended {
                active = self.submitted.wait(active).unwrap_or_else(PoisonError::into_inner);
            }
            if active.ended {
                return;
            }
            drop(active);
            self.drive();
            std::thread::sleep(PERIOD);
        }
    }

    fn end_driver(&self) {
        lock(&self.active).ended = true;
        self.submitted.notify_all();
        if let Some(driver) = lock(&self.driver).take() {
            // A panic of it has been printed, and nothing depends on the thread.
            let _ = driver.join();
        }
    }

    /// Takes over an operation that has been started.
    fn submit<T: Operation + 'static>(&self, op: T) -> Arc<Mutex<Slot<T>>> {
        let slot = Arc::new(Mutex::new(Slot { state: Progress::Pending, op }));
        lock(&self.active).slots.push(slot.clone());
        self.submitted.notify_one();
        slot
    }

    /// Lets every operation under way go on, and says whether none is left. A slot in use is being driven already.
    fn drive(&self) -> bool {
        let Ok(mut active) = self.active.try_lock() else { return false };
        active.slots.retain(|slot| {
            let Ok(mut held) = slot.try_lock() else { return true };
            held.poll();
            if let Progress::Failed(_) = held.state {
                // Other messages of the operation may still be under way.
                leak(slot.clone());
            }
            matches!(held.state, Progress::Pending)
        });
        active.slots.is_empty()
    }

    /// Waits for an operation. One that fails or is late stays with the engine.
    fn wait<T: Operation + ?Sized>(&self, slot: &Mutex<Slot<T>>, name: &'static str) -> Result<(), CommError> {
        let start = Instant::now();
        loop {
            {
                let mut held = lock(slot);
                held.poll();
                match &held.state {
                    Progress::Done => return Ok(()),
                    Progress::Failed(error) => return Err(error.clone()),
                    Progress::Pending => {}
                }
                if let Some(timeout) = self.timeout.filter(|timeout| start.elapsed() >= *timeout) {
                    let missing = held.op.missing();
                    return Err(CommError::Timeout { rank: self.rank, op: name, seconds: timeout.as_secs(), missing });
                }
            }
            self.drive();
            std::thread::yield_now();
        }
    }
}

/// Something under way that MPI messages complete.
trait Operation: Send {
    /// Goes as far as possible without waiting; true when done.
    fn poll(&mut self) -> Result<bool, CommError>;
    /// The world ranks whose messages have not come.
    fn missing(&self) -> Vec<usize>;
    /// The bytes a request yields, once done.
    fn take(&mut self) -> Vec<u8>;
    /// Cancels the messages nobody answered.
    fn abandon(&mut self);
}

enum Progress {
    Pending,
    Done,
    Failed(CommError),
}

/// Held by the engine and by the request.
type SharedSlot = Arc<Mutex<Slot<dyn Operation>>>;

struct Slot<T: ?Sized> {
    state: Progress,
    op: T,
}

impl<T: Operation + ?Sized> Slot<T> {
    fn poll(&mut self) {
        if let Progress::Pending = self.state {
            match self.op.poll() {
                Ok(false) => {}
                Ok(true) => self.state = Progress::Done,
                Err(error) => self.state = Progress::Failed(error),
            }
        }
    }
}

/// A group of ranks: the communicators and who is in it.
struct Group {
    engine: Arc<Engine>,
    rank: usize,
    /// World ranks.
    members: Vec<usize>,
    /// For [`Communicator::start_send`] and [`Communicator::start_recv`].
    user: Handle,
    /// For what does not fit the first message of these.
    rest: Handle,
    /// For collectives alone.
    own: Handle,
    /// The number of the next collective.
    seq: AtomicU32,
    /// The number of the next message of [`Group::user`].
    messages: AtomicU32,
}

impl Group {
    fn new(engine: &Arc<Engine>, user: ffi::MPI_Comm, members: Vec<usize>) -> Result<Arc<Group>, CommError> {
        let own = duplicate(engine.rank, user)?;
        return_errors(engine.rank, user)?;
        return_errors(engine.rank, own)?;
        let rest = duplicate(engine.rank, user)?;
        return_errors(engine.rank, rest)?;
        let mut rank = 0;
        check(engine.rank, "MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(own, &mut rank) })?;
        Ok(Arc::new(Group {
            engine: engine.clone(),
            rank: rank as usize,
            members,
            user: Handle(user),
            rest: Handle(rest),
            own: Handle(own),
            seq: AtomicU32::new(0),
            messages: AtomicU32::new(0),
        }))
    }

    /// The tag of the next collective: two for each, within the 32767 that every MPI allows. Numbers come again after
    /// 16384 collectives, when those before them are long over.
    fn next_tag(&self) -> u16 {
        (self.seq.fetch_add(1, Ordering::Relaxed) % (1 << 14)) as u16 * 2
    }

    /// A tag for the rest of a message, unlike those of all others that this rank has under way.
    fn next_rest_tag(&self) -> u16 {
        (self.messages.fetch_add(1, Ordering::Relaxed) % (1 << 15)) as u16
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.members.len()).filter(|rank| *rank != self.rank)
    }
}

/// Bytes to or from one rank, in as many messages as the cap asks for.
struct Transfer {
    rank: usize,
    /// The other side's world rank.
    peer: usize,
    receive: bool,
    requests: Vec<ffi::MPI_Request>,
    done: usize,
    /// Bytes received so far.
    got: usize,
}

// SAFETY: requests are handles like communicators, and each is used by the thread that holds its slot's lock.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Starts to receive `len` bytes to `data`, or to send those there.
    ///
    /// # Safety
    /// The bytes must stay in place until [`Transfer::poll`] has returned true, or be leaked, also after an error:
    /// unchanged for a send, untouched for a receive.
    unsafe fn start(
        group: &Group,
        (comm, tag): (Handle, u16),
        peer: usize,
        data: *mut u8,
        len: usize,
        receive: bool,
    ) -> Result<Self, CommError> {
        let Engine { cap, rank, .. } = *group.engine;
        let (to, tag) = (peer as i32, i32::from(tag));
        let bytes = unsafe { ffi::RSMPI_UINT8_T };
        let mut requests = Vec::with_capacity(len / cap + 1);
        for start in (0..len).step_by(cap) {
            let count = cap.min(len - start) as i32;
            let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
            // SAFETY: the caller vouches for the bytes; start + count <= len.
            let (call, rc) = unsafe {
                let at = data.add(start).cast();
                if receive {
                    ("MPI_Irecv", ffi::MPI_Irecv(at, count, bytes, to, tag, comm.0, &mut request))
                } else {
                    ("MPI_Isend", ffi::MPI_Isend(at, count, bytes, to, tag, comm.0, &mut request))
                }
            };
            check(rank, call, rc)?;
            requests.push(request);
        }
        let peer = group.members[peer];
        Ok(Transfer { rank, peer, receive, requests, done: 0, got: 0 })
    }

    fn poll(&mut self) -> Result<bool, CommError> {
        while self.done < self.requests.len() {
            let mut flag = 0;
            let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed();
            // SAFETY: the request is live: it is tested until it is done, and not after.
            let rc = unsafe { ffi::MPI_Test(&mut self.requests[self.done], &mut flag, status.as_mut_ptr()) };
            check(self.rank, "MPI_Test", rc)?;
            if flag == 0 {
                return Ok(false);
            }
            self.done += 1;
            if self.receive {
                self.got += self.count(&status)?;
            }
        }
        Ok(true)
    }

    fn count(&self, status: &MaybeUninit<ffi::MPI_Status>) -> Result<usize, CommError> {
        let mut count = 0;
        // SAFETY: MPI_Test has filled the status, or left it zero, which is a valid one.
        let rc = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count) };
        check(self.rank, "MPI_Get_count", rc)?;
        Ok(count.max(0) as usize)
    }

    fn is_done(&self) -> bool {
        self.done == self.requests.len()
    }

    fn abandon(&mut self) {
        for mut request in self.requests.drain(..).skip(self.done) {
            // SAFETY: the request is live, and not used again. Nothing is left to do about an error here.
            unsafe {
                if self.receive {
                    ffi::MPI_Cancel(&mut request);
                }
                ffi::MPI_Request_free(&mut request);
            }
        }
        self.done = 0;
    }
}

/// A message of the user: an exchange in one direction, and its buffer.
struct Message {
    exchange: Exchange,
    buffer: Vec<u8>,
    len: usize,
}

impl Operation for Message {
    fn poll(&mut self) -> Result<bool, CommError> {
        let done = self.exchange.poll()?;
        if done {
            // SAFETY: a sent buffer has this length, a received one is full.
            unsafe { self.buffer.set_len(self.len) };
        }
        Ok(done)
    }

    fn missing(&self) -> Vec<usize> {
        self.exchange.missing()
    }

    fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    fn abandon(&mut self) {
        self.exchange.abandon();
    }
}

/// The types a header can name, by their place.
const TYPES: [DType; 16] = [
    DType::F64,
    DType::F32,
    DType::Flex32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
    DType::Bool(BoolStore::Native),
    DType::Bool(BoolStore::U8),
    DType::Bool(BoolStore::U32),
];

const OPS: [ReduceOp; 6] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::And, ReduceOp::Or];

/// What the first message of a payload tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    signature: Signature,
    /// The tag of what does not fit the first message.
    rest: u16,
    /// Bytes of the payload.
    len: usize,
    /// Where it lies in the sender's part of the node's memory, if it does.
    block: Option<usize>,
}

/// The header as sent. Code 0 stands for none.
fn encode(Header { signature, rest, len, block }: Header) -> [u8; HEADER] {
    let code = |place: Option<usize>| place.map_or(0, |place| place as u8 + 1);
    let mut bytes = [0; HEADER];
    bytes[0] = signature.kind as u8;
    if let Some((dtype, op)) = signature.reduce {
        bytes[1] = code(TYPES.iter().position(|found| *found == dtype));
        bytes[2] = code(OPS.iter().position(|found| *found == op));
    }
    bytes[3] = u8::from(signature.len.is_some());
    bytes[4..6].copy_from_slice(&rest.to_le_bytes());
    bytes[8..16].copy_from_slice(&(signature.len.unwrap_or(0) as u64).to_le_bytes());
    bytes[16..24].copy_from_slice(&(len as u64).to_le_bytes());
    bytes[24..].copy_from_slice(&block.map_or(0, |block| block as u64 + 1).to_le_bytes());
    bytes
}

/// What [`encode`] made; `None` for anything else.
fn decode(bytes: &[u8]) -> Option<Header> {
    let bytes = bytes.first_chunk::<HEADER>()?;
    let number = |at: usize| Some(u64::from_le_bytes(*bytes[at..].first_chunk()?) as usize);
    let dtype = usize::from(bytes[1]).checked_sub(1).and_then(|place| TYPES.get(place));
    let op = usize::from(bytes[2]).checked_sub(1).and_then(|place| OPS.get(place));
    let signature = Signature {
        kind: *Kind::ALL.get(usize::from(bytes[0]))?,
        reduce: dtype.copied().zip(op.copied()),
        len: if bytes[3] == 1 { Some(number(8)?) } else { None },
    };
    let rest = u16::from_le_bytes([bytes[4], bytes[5]]);
    Some(Header { signature, rest, len: number(16)?, block: number(24)?.checked_sub(1) })
}

/// What one rank sent.
enum Payload {
    Own(Vec<u8>),
    Shelved(Shelved),
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Payload::Own(bytes) => bytes,
            Payload::Shelved(bytes) => bytes,
        }
    }
}

impl Payload {
    fn into_vec(self) -> Vec<u8> {
        match self {
            Payload::Own(bytes) => bytes,
            Payload::Shelved(bytes) => {
                copied(bytes.len());
                bytes.to_vec()
            }
        }
    }
}

/// Payloads to some ranks and from some ranks: one step of a collective, or one message.
struct Exchange {
    group: Arc<Group>,
    /// Where first messages go.
    first: (Handle, u16),
    /// Where the rest of what this rank sends goes.
    rest: (Handle, u16),
    signature: Signature,
    sends: Vec<Transfer>,
    /// First messages under way, and payloads that belong to the exchange.
    kept: Vec<Vec<u8>>,
    incoming: Vec<Incoming>,
}

/// A payload from one rank.
struct Incoming {
    from: usize,
    /// The header and the beginning of the payload.
    first: Vec<u8>,
    head: Transfer,
    body: Option<Transfer>,
    /// Where the payload goes: given by the caller with its length, or `data`.
    place: Option<(*mut u8, usize)>,
    data: Vec<u8>,
    /// The payload, if it lies in the sender's part of the node's memory.
    shelved: Option<Shelved>,
    done: bool,
}

// SAFETY: the pointer is used by whoever holds the lock of the operation that owns its buffer.
unsafe impl Send for Incoming {}

impl Exchange {
    /// A step of the collective with this tag.
    fn new(group: &Arc<Group>, tag: u16, signature: Signature) -> Self {
        let at = (group.own, tag);
        Self::at(group, at, at, signature)
    }

    /// A message of the user.
    fn message(group: &Arc<Group>, tag: u16) -> Self {
        let rest = (group.rest, group.next_rest_tag());
        Self::at(group, (group.user, tag), rest, Signature::of(Kind::PointToPoint))
    }

    fn at(group: &Arc<Group>, first: (Handle, u16), rest: (Handle, u16), signature: Signature) -> Self {
        let (sends, kept, incoming) = Default::default();
        Exchange { group: group.clone(), first, rest, signature, sends, kept, incoming }
    }

    /// Payload bytes in the first message, which is shorter than the cap.
    fn inline(&self) -> usize {
        INLINE.min(self.group.engine.cap - 1 - HEADER)
    }

    /// Starts to send `len` bytes at `data` to the ranks `to`.
    ///
    /// # Safety
    /// The bytes must stay in place and unchanged until the exchange is done, or be leaked with it.
    unsafe fn send(&mut self, to: impl Iterator<Item = usize>, data: *const u8, len: usize) -> Result<(), CommError> {
        let inline = self.inline().min(len);
        let mut far: Vec<usize> = to.collect();
        let header = Header { signature: self.signature, rest: self.rest.1, len, block: None };
        if len > inline
            && let Some(node) = &self.group.engine.node
        {
            let on_node = |to: &usize| node.holds(self.group.members[*to]);
            let near: Vec<usize> = far.iter().copied().filter(on_node).collect();
            // SAFETY: the caller's promise.
            let bytes = unsafe { std::slice::from_raw_parts(data, len) };
            let block = if near.is_empty() { None } else { node.put(bytes, near.len() as u32) };
            if block.is_some() {
                far.retain(|to| !on_node(to));
                let told = encode(Header { block, ..header }).to_vec();
                // SAFETY: nothing follows the first message.
                unsafe { self.send_first(&near, told, data, 0)? };
            }
        }
        if far.is_empty() {
            return Ok(());
        }
        let mut first = encode(header).to_vec();
        // SAFETY: inline <= len; the caller vouches for the rest.
        unsafe {
            first.extend_from_slice(std::slice::from_raw_parts(data, inline));
            self.send_first(&far, first, data.add(inline), len - inline)
        }
    }

    /// Starts to send `first`, and `len` bytes at `rest` after it.
    ///
    /// # Safety
    /// As for [`Exchange::send`].
    unsafe fn send_first(&mut self, to: &[usize], first: Vec<u8>, rest: *const u8, len: usize) -> Result<(), CommError> {
        let (start, bytes) = (first.as_ptr(), first.len());
        self.kept.push(first);
        for to in to {
            // SAFETY: `kept` holds the first message; the caller vouches for the rest.
            unsafe {
                self.transfer(self.first, *to, start, bytes)?;
                if len > 0 {
                    self.transfer(self.rest, *to, rest, len)?;
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Exchange::send`].
    unsafe fn transfer(&mut self, at: (Handle, u16), to: usize, data: *const u8, len: usize) -> Result<(), CommError> {
        let group = &self.group;
        // SAFETY: the caller's promise. MPI's interface takes a mutable pointer for both ways, and does not write here.
        let send = unsafe { Transfer::start(group, at, to, data.cast_mut(), len, false)? };
        self.sends.push(send);
        Ok(())
    }

    /// Starts to send `data`, which the exchange keeps, to the ranks `to`.
    fn send_kept(&mut self, to: impl Iterator<Item = usize>, data: Vec<u8>) -> Result<(), CommError> {
        let (start, len) = (data.as_ptr(), data.len());
        self.kept.push(data);
        // SAFETY: `kept` holds the bytes as long as the exchange lives.
        unsafe { self.send(to, start, len) }
    }

    /// Starts to receive from `from`, to a buffer of the exchange's own.
    fn receive(&mut self, from: usize) -> Result<(), CommError> {
        // SAFETY: no place is given.
        unsafe { self.receive_at(from, None) }
    }

    /// Starts to receive from `from`, to `place`: an address and a length.
    ///
    /// # Safety
    /// The place must stay valid, and nobody may touch it, until the exchange is done, or be leaked with it.
    unsafe fn receive_at(&mut self, from: usize, place: Option<(*mut u8, usize)>) -> Result<(), CommError> {
        let room = HEADER + self.inline();
        let mut first = Vec::with_capacity(room);
        let group = &self.group;
        // SAFETY: the buffer has the room and moves into `incoming`; one message starts or does not.
        let head = unsafe { Transfer::start(group, self.first, from, first.as_mut_ptr(), room, true)? };
        let (body, data, shelved) = Default::default();
        self.incoming.push(Incoming { from, first, head, body, place, data, shelved, done: false });
        Ok(())
    }

    fn poll(&mut self) -> Result<bool, CommError> {
        let mut done = true;
        let inline = self.inline();
        for incoming in &mut self.incoming {
            done &= incoming.poll(&self.group, self.rest.0, self.signature, inline)?;
        }
        for send in &mut self.sends {
            done &= send.poll()?;
        }
        Ok(done)
    }

    /// What came, in the order of the calls to [`Exchange::receive`].
    fn payloads(&mut self) -> impl Iterator<Item = Payload> {
        self.incoming.drain(..).map(|incoming| incoming.shelved.map_or(Payload::Own(incoming.data), Payload::Shelved))
    }
}

impl Operation for Exchange {
    fn poll(&mut self) -> Result<bool, CommError> {
        Exchange::poll(self)
    }

    fn missing(&self) -> Vec<usize> {
        let late = self.incoming.iter().filter(|incoming| !incoming.done);
        let mut ranks: Vec<usize> = late.map(|incoming| incoming.head.peer).collect();
        if ranks.is_empty() {
            ranks = self.sends.iter().filter(|send| !send.is_done()).map(|send| send.peer).collect();
            ranks.dedup();
        }
        ranks
    }

    fn take(&mut self) -> Vec<u8> {
        Vec::new()
    }

    fn abandon(&mut self) {
        for incoming in &mut self.incoming {
            incoming.head.abandon();
            incoming.body.iter_mut().for_each(Transfer::abandon);
        }
        self.sends.iter_mut().for_each(Transfer::abandon);
    }
}

impl Incoming {
    fn poll(&mut self, group: &Group, rest: Handle, expected: Signature, inline: usize) -> Result<bool, CommError> {
        if self.done {
            return Ok(true);
        }
        if self.body.is_none() {
            if !self.head.poll()? {
                return Ok(false);
            }
            // SAFETY: MPI has written this many bytes.
            unsafe { self.first.set_len(self.head.got) };
            let (rank, from) = (self.head.rank, self.head.peer);
            let Some(Header { signature, rest: tag, len, block }) = decode(&self.first) else {
                return Err(CommError::Length { rank, from, expected: HEADER, got: self.first.len() });
            };
            expected.check(rank, signature, from)?;
            if let Some((_, room)) = self.place.filter(|(_, room)| *room != len) {
                return Err(CommError::Length { rank, from, expected: room, got: len });
            }
            if let Some(block) = block {
                let shelved = group.engine.node.as_ref().and_then(|node| node.get(from, block, len));
                let Some(shelved) = shelved else { return Err(CommError::Length { rank, from, expected: 0, got: len }) };
                if let Some((start, _)) = self.place {
                    copied(len);
                    // SAFETY: there is room for len bytes.
                    unsafe { start.copy_from_nonoverlapping(shelved.as_ptr(), len) };
                } else {
                    self.shelved = Some(shelved);
                }
                self.done = true;
                return Ok(true);
            }
            let start = match self.place {
                None => {
                    self.data.reserve_exact(len);
                    self.data.as_mut_ptr()
                }
                Some((start, _)) => start,
            };
            let early = &self.first[HEADER..];
            if early.len() != len.min(inline) {
                return Err(CommError::Length { rank, from, expected: len.min(inline), got: early.len() });
            }
            // SAFETY: there is room for len bytes, of which the first message holds the beginning.
            unsafe { start.copy_from_nonoverlapping(early.as_ptr(), early.len()) };
            if len > inline {
                // SAFETY: the same room; `data` or the owner of `place` lives as long as this.
                let body = unsafe { Transfer::start(group, (rest, tag), self.from, start.add(inline), len - inline, true)? };
                self.body = Some(body);
            } else if self.place.is_none() {
                // SAFETY: all len bytes were in the first message.
                unsafe { self.data.set_len(len) };
            }
            self.done = len <= inline;
        }
        if let Some(body) = &mut self.body
            && body.poll()?
        {
            if self.place.is_none() {
                // SAFETY: the first message and the body are all of it.
                unsafe { self.data.set_len(inline + body.got) };
            }
            self.done = true;
        }
        Ok(self.done)
    }
}

/// An all-reduce under way; see the module's documentation.
struct AllReduce {
    group: Arc<Group>,
    tag: u16,
    data: Vec<u8>,
    dtype: DType,
    op: ReduceOp,
    step: Step,
}

enum Step {
    /// Whole buffers to and from all.
    Direct(Exchange),
    /// Pieces to their owners.
    Collect(Exchange),
    /// Reduced pieces to all.
    Share(Exchange),
    Done,
}

impl AllReduce {
    fn start(group: &Arc<Group>, data: Vec<u8>, dtype: DType, op: ReduceOp) -> Result<Self, CommError> {
        let tag = group.next_tag();
        let mut exchange = Exchange::new(group, tag, Signature::all_reduce(data.len(), dtype, op));
        let mut reduction = AllReduce { group: group.clone(), tag, data, dtype, op, step: Step::Done };
        let direct = reduction.data.len() <= DIRECT;
        let mut begin = || {
            group.others().try_for_each(|from| exchange.receive(from))?;
            let start = reduction.data.as_ptr();
            // SAFETY: `data` is not touched before the exchange is done, and lives as long.
            unsafe {
                if direct {
                    return exchange.send(group.others(), start, reduction.data.len());
                }
                group.others().try_for_each(|to| {
                    let piece = reduction.piece(to);
                    exchange.send([to].into_iter(), start.add(piece.start), piece.len())
                })
            }
        };
        let result = begin();
        reduction.step = if direct { Step::Direct(exchange) } else { Step::Collect(exchange) };
        started(reduction, result)
    }

    /// The bytes that `rank` reduces: whole elements, near-equal shares.
    fn piece(&self, rank: usize) -> Range<usize> {
        let (size, ranks) = (self.dtype.size(), self.group.members.len());
        let elements = self.data.len() / size;
        elements * rank / ranks * size..elements * (rank + 1) / ranks * size
    }

    /// Reduces `range` of the buffer with what came from the others.
    fn reduce(&mut self, range: Range<usize>, mut exchange: Exchange) {
        let parts: Vec<Payload> = exchange.payloads().collect();
        let others: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
        reduce::reduce(&mut self.data[range], self.group.rank, &others, self.dtype, self.op);
    }

    fn share(&mut self) -> Result<Exchange, CommError> {
        let signature = Signature::all_reduce(self.data.len(), self.dtype, self.op);
        let mut exchange = Exchange::new(&self.group, self.tag + 1, signature);
        let start = self.data.as_mut_ptr();
        let (group, own) = (&self.group, self.piece(self.group.rank));
        let mut begin = || {
            // SAFETY: pieces do not overlap; `data` is not touched before the exchange is done, and lives as long.
            unsafe {
                for from in group.others() {
                    let piece = self.piece(from);
                    exchange.receive_at(from, Some((start.add(piece.start), piece.len())))?;
                }
                exchange.send(group.others(), start.add(own.start), own.len())
            }
        };
        let result = begin();
        started(exchange, result)
    }

    fn exchange(&self) -> Option<&Exchange> {
        match &self.step {
            Step::Direct(exchange) | Step::Collect(exchange) | Step::Share(exchange) => Some(exchange),
            Step::Done => None,
        }
    }
}

impl Operation for AllReduce {
    fn poll(&mut self) -> Result<bool, CommError> {
        let (Step::Direct(exchange) | Step::Collect(exchange) | Step::Share(exchange)) = &mut self.step else {
            return Ok(true);
        };
        if !exchange.poll()? {
            return Ok(false);
        }
        match std::mem::replace(&mut self.step, Step::Done) {
            Step::Direct(exchange) => self.reduce(0..self.data.len(), exchange),
            Step::Collect(exchange) => {
                self.reduce(self.piece(self.group.rank), exchange);
                self.step = Step::Share(self.share()?);
                return Ok(false);
            }
            Step::Share(_) | Step::Done => {}
        }
        Ok(true)
    }

    fn missing(&self) -> Vec<usize> {
        self.exchange().map(Operation::missing).unwrap_or_default()
    }

    fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.data)
    }

    fn abandon(&mut self) {
        if let Step::Direct(exchange) | Step::Collect(exchange) | Step::Share(exchange) = &mut self.step {
            exchange.abandon();
        }
    }
}

/// A handle on an operation that the engine owns.
struct Pending {
    engine: Arc<Engine>,
    slot: SharedSlot,
    kind: Kind,
    counters: Arc<CommCounters>,
}

impl Request for Pending {
    fn test(&mut self) -> Result<bool, CommError> {
        self.engine.drive();
        let mut slot = lock(&self.slot);
        slot.poll();
        match &slot.state {
            Progress::Done => Ok(true),
            Progress::Pending => Ok(false),
            Progress::Failed(error) => Err(error.clone()),
        }
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>, CommError> {
        let start = Instant::now();
        let result = self.engine.wait(&self.slot, self.kind.name());
        self.counters.waited(self.kind, start.elapsed());
        result?;
        Ok(lock(&self.slot).op.take())
    }
}

/// A group of MPI ranks.
struct MpiComm {
    group: Arc<Group>,
    counters: Arc<CommCounters>,
}

impl fmt::Debug for MpiComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MpiComm({} of {})", self.group.rank, self.group.members.len())
    }
}

impl MpiComm {
    fn check_peer(&self, peer: usize) -> Result<(), CommError> {
        let size = self.size();
        if peer < size {
            return Ok(());
        }
        Err(CommError::Peer { rank: self.group.engine.rank, peer, size })
    }

    fn count(&self, kind: Kind, sent: usize, received: usize) {
        self.counters.call(kind);
        if self.size() > 1 {
            self.counters.bytes(kind, sent, received);
        }
    }

    fn request<T: Operation + 'static>(&self, kind: Kind, op: T) -> Box<dyn Request> {
        let engine = self.group.engine.clone();
        let slot = engine.submit(op);
        Box::new(Pending { engine, slot, kind, counters: self.counters.clone() })
    }

    /// Starts a message of `len` bytes to or from `buffer`, which has room for them.
    fn message(&self, peer: usize, tag: u16, mut buffer: Vec<u8>, len: usize, receive: bool) -> Result<Box<dyn Request>, CommError> {
        let mut exchange = Exchange::message(&self.group, tag);
        let start = buffer.as_mut_ptr();
        // SAFETY: the buffer moves with the exchange into an operation of the engine, or is leaked with it.
        let result = unsafe {
            match receive {
                true => exchange.receive_at(peer, Some((start, len))),
                false => exchange.send([peer].into_iter(), start, len),
            }
        };
        let message = started(Message { exchange, buffer, len }, result)?;
        Ok(self.request(Kind::PointToPoint, message))
    }

    /// Makes an exchange and waits for it: `data` to the ranks `to`, and what comes from the ranks `from`.
    fn exchange(
        &self,
        kind: Kind,
        tag: u16,
        data: Vec<u8>,
        to: impl Iterator<Item = usize>,
        from: impl Iterator<Item = usize>,
    ) -> Result<(Vec<u8>, Vec<Vec<u8>>), CommError> {
        let start = Instant::now();
        let mut exchange = Exchange::new(&self.group, tag, Signature::of(kind));
        let begin = || {
            for from in from {
                exchange.receive(from)?;
            }
            exchange.send_kept(to, data)
        };
        let result = begin();
        let exchange = started(exchange, result)?;
        let engine = &self.group.engine;
        let slot = engine.submit(exchange);
        let result = engine.wait(&slot, kind.name());
        self.counters.waited(kind, start.elapsed());
        result?;
        let mut slot = lock(&slot);
        let payloads = slot.op.payloads().map(Payload::into_vec).collect();
        // `send_kept` put the data first.
        Ok((slot.op.kept.swap_remove(0), payloads))
    }

    /// Every rank's bytes in rank order.
    fn exchange_all(&self, kind: Kind, data: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let group = &self.group;
        let (own, mut parts) = self.exchange(kind, group.next_tag(), data.to_vec(), group.others(), group.others())?;
        parts.insert(group.rank, own);
        Ok(parts)
    }

    fn received(&self, parts: &[Vec<u8>]) -> usize {
        self.group.others().map(|rank| parts[rank].len()).sum()
    }
}

impl Communicator for MpiComm {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    fn timeout(&self) -> Option<Duration> {
        self.group.engine.timeout
    }

    fn start_send(&self, to: usize, tag: u16, data: Vec<u8>) -> Result<Box<dyn Request>, CommError> {
        self.check_peer(to)?;
        self.counters.call(Kind::PointToPoint);
        self.counters.bytes(Kind::PointToPoint, data.len(), 0);
        let len = data.len();
        self.message(to, tag, data, len, false)
    }

    fn start_recv(&self, from: usize, tag: u16, len: usize) -> Result<Box<dyn Request>, CommError> {
        self.check_peer(from)?;
        self.counters.bytes(Kind::PointToPoint, 0, len);
        self.message(from, tag, Vec::with_capacity(len), len, true)
    }

    fn start_all_reduce(&self, mut data: Vec<u8>, dtype: DType, op: ReduceOp) -> Result<Box<dyn Request>, CommError> {
        reduce::check(data.len(), dtype, op)?;
        self.count(Kind::AllReduce, data.len(), 0);
        if self.size() == 1 {
            reduce::reduce(&mut data, 0, &[], dtype, op);
            return Ok(Box::new(Ready(data)));
        }
        Ok(self.request(Kind::AllReduce, AllReduce::start(&self.group, data, dtype, op)?))
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let parts = self.exchange_all(Kind::AllGather, data)?;
        self.count(Kind::AllGather, data.len(), self.received(&parts));
        Ok(parts)
    }

    fn gather(&self, root: usize, data: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.check_peer(root)?;
        let (group, none) = (&self.group, std::iter::empty());
        let (tag, data) = (group.next_tag(), data.to_vec());
        if group.rank != root {
            self.count(Kind::Gather, data.len(), 0);
            self.exchange(Kind::Gather, tag, data, [root].into_iter(), none)?;
            return Ok(Vec::new());
        }
        let (own, mut parts) = self.exchange(Kind::Gather, tag, data, none, group.others())?;
        parts.insert(root, own);
        self.count(Kind::Gather, 0, self.received(&parts));
        Ok(parts)
    }

    /// Along a binomial tree: in round i, 2^i ranks have the bytes and send them on.
    fn broadcast(&self, root: usize, data: Vec<u8>) -> Result<Vec<u8>, CommError> {
        self.check_peer(root)?;
        let (group, size) = (&self.group, self.size());
        let tag = group.next_tag();
        // Numbered from the root: the parent of a rank lacks its highest bit, its children have one more.
        let place = (group.rank + size - root) % size;
        let rank_at = |place: usize| (place + root) % size;
        let (data, children) = if place == 0 {
            self.count(Kind::Broadcast, data.len(), 0);
            (data, 0)
        } else {
            let bit = place.ilog2();
            let parent = rank_at(place - (1 << bit));
            let none = std::iter::empty();
            let (_, mut parts) = self.exchange(Kind::Broadcast, tag, Vec::new(), none, [parent].into_iter())?;
            let data = parts.swap_remove(0);
            self.count(Kind::Broadcast, 0, data.len());
            (data, bit + 1)
        };
        let children = (children..).map(|bit| place + (1 << bit)).take_while(|child| *child < size).map(rank_at);
        Ok(self.exchange(Kind::Broadcast, tag, data, children, std::iter::empty())?.0)
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.count(Kind::Barrier, 0, 0);
        self.exchange_all(Kind::Barrier, &[]).map(drop)
    }

    fn split(&self, color: usize, key: usize) -> Result<Comm, CommError> {
        let group = &self.group;
        let wish = [color as u64, key as u64].map(u64::to_le_bytes).concat();
        // Also lets the watchdog see who does not come: MPI_Comm_split below would wait for ever.
        let wishes = self.exchange_all(Kind::AllGather, &wish)?;
        let mut peers: Vec<(u64, usize)> = Vec::new();
        for (rank, wish) in wishes.iter().enumerate() {
            let number = |i: usize| wish.as_chunks::<8>().0.get(i).map(|bytes| u64::from_le_bytes(*bytes));
            if number(0) == Some(color as u64) {
                peers.push((number(1).unwrap_or_default(), rank));
            }
        }
        peers.sort_unstable();
        // MPI's colours and keys are i32: the first rank of the group, and the place in it, serve as well.
        let first = peers.iter().map(|(_, rank)| *rank).min().unwrap_or(group.rank);
        let place = peers.iter().take_while(|(_, rank)| *rank != group.rank).count();
        let mut raw = unsafe { ffi::RSMPI_COMM_NULL };
        let rc = unsafe { ffi::MPI_Comm_split(group.own.0, first as i32, place as i32, &mut raw) };
        check(group.engine.rank, "MPI_Comm_split", rc)?;
        let members = peers.iter().map(|(_, rank)| group.members[*rank]).collect();
        let group = Group::new(&group.engine, raw, members)?;
        Ok(Arc::new(MpiComm { group, counters: self.counters.clone() }))
    }

    fn abort(&self, cause: &str) {
        abort_job(cause);
    }

    fn counters(&self) -> &Arc<CommCounters> {
        &self.counters
    }
}

/// What a group of one has at once.
struct Ready(Vec<u8>);

impl Request for Ready {
    fn test(&mut self) -> Result<bool, CommError> {
        Ok(true)
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>, CommError> {
        Ok(self.0)
    }
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

    #[test]
    fn headers_round_trip() {
        for dtype in TYPES {
            for op in OPS {
                let signature = Signature::all_reduce(5 << 32, dtype, op);
                let header = Header { signature, rest: 999, len: 77, block: Some(6 << 30) };
                assert_eq!(decode(&encode(header)), Some(header));
            }
        }
        let barrier = Header { signature: Signature::of(Kind::Barrier), rest: 0, len: 0, block: None };
        assert_eq!(decode(&encode(barrier)), Some(barrier));
        assert_eq!(decode(&[0; HEADER - 1]), None);
    }
}
