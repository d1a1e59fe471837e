//! How ranks talk: the [`Communicator`] trait, its counters and its errors.
//!
//! Two implementations: one thread a rank within a process ([`threads`]), and MPI (`mpi`, behind the feature of
//! that name). Buffers are owned: they move into a request and come back from [`Request::wait`], which suits both.

use std::fmt::{self, Debug, Display};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn_std::DType;

mod counters;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "mpi")]
mod node;
mod reduce;
pub mod threads;

pub use counters::{CommCounters, CommSnapshot, Kind, KindCounters};

/// A shared handle on a communicator.
pub type Comm = Arc<dyn Communicator>;

/// What a reduction does with the elements of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Product.
    Prod,
    /// Largest; NaN wins.
    Max,
    /// Smallest; NaN wins.
    Min,
    /// Logical and of booleans (bytes, non-zero is true).
    And,
    /// Logical or of booleans (bytes, non-zero is true).
    Or,
}

/// What went wrong while ranks talked. Ranks are numbered as in the world, not as in a group split from it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CommError {
    /// Another rank failed first; its cause ends the whole group.
    #[error("rank {rank} failed: {cause}")]
    Poisoned {
        /// The rank that failed first.
        rank: usize,
        /// Its message.
        cause: String,
    },
    /// An MPI call returned an error class.
    #[error("rank {rank}: {call} failed: {message}")]
    Mpi {
        /// The calling rank.
        rank: usize,
        /// The name of the MPI call.
        call: &'static str,
        /// MPI's own words.
        message: String,
    },
    /// A message of another length than the plan says: ranks run different programs.
    #[error(
        "rank {rank}: received {got} bytes from rank {from} where {expected} were expected; do all ranks run the same program on the same shapes?"
    )]
    Length {
        /// The receiving rank.
        rank: usize,
        /// The sending rank.
        from: usize,
        /// Bytes expected.
        expected: usize,
        /// Bytes received.
        got: usize,
    },
    /// A collective waited longer than the watchdog allows.
    #[error("rank {rank}: {op} waited {seconds} s; ranks that did not arrive: {missing:?}")]
    Timeout {
        /// The waiting rank.
        rank: usize,
        /// The operation.
        op: &'static str,
        /// How long it waited.
        seconds: u64,
        /// Who did not arrive, where that is known.
        missing: Vec<usize>,
    },
    /// Ranks of a group called different operations, or the same one with other lengths or types.
    #[error("rank {rank} is in {op}, but rank {other} in {other_op}; do all ranks run the same program on the same shapes?")]
    Mismatch {
        /// The rank that noticed.
        rank: usize,
        /// What it called.
        op: String,
        /// The rank that disagrees.
        other: usize,
        /// What that one called.
        other_op: String,
    },
    /// A rank number outside the group.
    #[error("rank {rank}: there is no rank {peer} in a group of {size}")]
    Peer {
        /// The calling rank.
        rank: usize,
        /// The number it named.
        peer: usize,
        /// How many ranks the group has.
        size: usize,
    },
    /// A type that cannot be reduced so: a quantized one, or a boolean operation on numbers.
    #[error("no such reduction over elements of type {0:?}")]
    Type(DType),
    /// A buffer that ends within an element.
    #[error("{bytes} bytes are not a whole number of elements of type {dtype:?}")]
    Elements {
        /// The buffer's length.
        bytes: usize,
        /// The element type.
        dtype: DType,
    },
}

/// What a rank calls in a collective: compared between the ranks, so that different programs end in an error instead
/// of wrong values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Signature {
    kind: Kind,
    reduce: Option<(DType, ReduceOp)>,
    /// Bytes, where all ranks must pass equally many.
    len: Option<usize>,
}

impl Signature {
    fn of(kind: Kind) -> Self {
        Signature { kind, reduce: None, len: None }
    }

    fn all_reduce(len: usize, dtype: DType, op: ReduceOp) -> Self {
        Signature { kind: Kind::AllReduce, reduce: Some((dtype, op)), len: Some(len) }
    }

    /// An error unless `other`, from world rank `from`, is the same.
    fn check(self, rank: usize, other: Signature, from: usize) -> Result<(), CommError> {
        if self == other {
            return Ok(());
        }
        Err(CommError::Mismatch { rank, op: self.to_string(), other: from, other_op: other.to_string() })
    }
}

impl Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some((dtype, op)) = self.reduce {
            write!(f, " {op:?} of {dtype:?}")?;
        }
        match self.len {
            Some(len) => write!(f, ", {len} bytes"),
            None => Ok(()),
        }
    }
}

/// `cause` without a leading `rank R: `, for messages that begin with that themselves.
fn without_rank(rank: usize, cause: &str) -> &str {
    cause.strip_prefix(&format!("rank {rank}: ")).unwrap_or(cause)
}

/// The watchdog: how long a wait may last. `BURN_SPATIAL_TIMEOUT` gives it in seconds, 0 for ever; 300 otherwise.
pub(crate) fn timeout_from_env() -> Option<Duration> {
    let seconds = env_number("BURN_SPATIAL_TIMEOUT").unwrap_or(300);
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

/// A number from the environment. One that cannot be read is ignored with a warning.
fn env_number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = text.trim().parse().ok();
    if number.is_none() {
        tracing::warn!("{name}={text} is not a whole number and is ignored");
    }
    number
}

/// A group of ranks that exchange messages. Every method but `rank`, `size`, `timeout`, `abort`, `counters` and the two
/// `start_` point-to-point calls is collective over the group, in program order.
pub trait Communicator: Send + Sync + Debug {
    /// This process's number in the group.
    fn rank(&self) -> usize;

    /// How many ranks the group has.
    fn size(&self) -> usize;

    /// How long a wait for others may last; `None` for ever.
    fn timeout(&self) -> Option<Duration>;

    /// Starts to send `data` to `to`. Messages of the same pair and tag arrive in order. Any length, 0 included.
    fn start_send(&self, to: usize, tag: u16, data: Vec<u8>) -> Result<Box<dyn Request>, CommError>;

    /// Starts to receive exactly `len` bytes from `from`.
    fn start_recv(&self, from: usize, tag: u16, len: usize) -> Result<Box<dyn Request>, CommError>;

    /// Starts an element-wise reduction over all ranks; the request yields the same bits on every rank. Elements
    /// are of type `dtype` in native byte order; f16 and bf16 are accumulated in f32.
    fn start_all_reduce(&self, data: Vec<u8>, dtype: DType, op: ReduceOp) -> Result<Box<dyn Request>, CommError>;

    /// Every rank's bytes, in rank order; lengths may differ.
    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;

    /// Every rank's bytes on `root` (in rank order), an empty vector elsewhere.
    fn gather(&self, root: usize, data: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;

    /// The bytes of `root` on every rank. What other ranks pass is ignored.
    fn broadcast(&self, root: usize, data: Vec<u8>) -> Result<Vec<u8>, CommError>;

    /// Waits until every rank is here.
    fn barrier(&self) -> Result<(), CommError>;

    /// Groups of equal colour; within one, ranks are ordered by `key`, then by rank here. The new group has the
    /// same [`Communicator::counters`].
    fn split(&self, color: usize, key: usize) -> Result<Comm, CommError>;

    /// Ends the whole job with `cause`: MPI_Abort, or poison for the threads that wait. Does not return under MPI.
    fn abort(&self, cause: &str);

    /// Calls, bytes and seconds so far, shared by all groups split from the same world, one set a rank.
    fn counters(&self) -> &Arc<CommCounters>;

    /// [`Communicator::start_all_reduce`] and its wait.
    fn all_reduce(&self, data: Vec<u8>, dtype: DType, op: ReduceOp) -> Result<Vec<u8>, CommError> {
        self.start_all_reduce(data, dtype, op)?.wait()
    }
}

/// A mutex whose data are whole even where a thread panicked that held it: that another rank failed is told elsewhere.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The signs of life of a rank that works alone while the others wait for it: see [`broadcast_of`].
pub struct Alive<'a> {
    comm: &'a dyn Communicator,
    /// Time between two signs; `None` where nobody needs them.
    every: Option<Duration>,
    last: Instant,
    failed: Option<CommError>,
}

/// At the end of what [`broadcast_of`] sends: a sign of life, or the result.
const SIGN: u8 = 0;
const RESULT: u8 = 1;

impl<'a> Alive<'a> {
    fn new(comm: &'a dyn Communicator) -> Self {
        let every = comm.timeout().filter(|_| comm.size() > 1).map(|timeout| timeout / 8);
        Alive { comm, every, last: Instant::now(), failed: None }
    }

    /// Tells the others that the work goes on. Cheap: a sign is sent where an eighth of the watchdog's time has passed
    /// since the last one. To be called after every part of the work, so that work which hangs is found out.
    ///
    /// # Errors
    /// [`CommError`] when the job has failed meanwhile: the work is then for nobody.
    pub fn beat(&mut self) -> Result<(), CommError> {
        if self.failed.is_none() && self.every.is_some_and(|every| self.last.elapsed() >= every) {
            self.failed = self.comm.broadcast(self.comm.rank(), vec![SIGN]).err();
            self.last = Instant::now();
        }
        self.failed.clone().map_or(Ok(()), Err)
    }
}

/// What `work` makes on `root`, on every rank. Collective.
///
/// The others wait as long as `work` gives signs of life: the watchdog's time is that between two of them, whatever the
/// work takes as a whole. Each is a broadcast of one byte; short work sends none.
///
/// # Errors
/// [`CommError::Timeout`] on the others when the last sign is too long ago, and what [`Communicator::broadcast`] returns.
pub fn broadcast_of(comm: &dyn Communicator, root: usize, work: impl FnOnce(&mut Alive<'_>) -> Vec<u8>) -> Result<Vec<u8>, CommError> {
    let mut bytes = Vec::new();
    if comm.rank() == root {
        let mut alive = Alive::new(comm);
        bytes = work(&mut alive);
        bytes.push(RESULT);
        if let Some(error) = alive.failed {
            return Err(error);
        }
    }
    loop {
        bytes = comm.broadcast(root, bytes)?;
        if bytes.pop() == Some(RESULT) {
            return Ok(bytes);
        }
    }
}

/// An operation under way. Dropping one is allowed and never blocks another rank.
pub trait Request: Send {
    /// Whether it is done; drives progress.
    fn test(&mut self) -> Result<bool, CommError>;

    /// Waits and returns the buffer: the received or reduced bytes, or the sent ones.
    fn wait(self: Box<Self>) -> Result<Vec<u8>, CommError>;
}
