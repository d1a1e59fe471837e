//! MPI ranks, through the bindings of the crate `mpi-sys` (feature `mpi`).
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
//!
//! | file | what |
//! |---|---|
//! | `init` | start and end of MPI, its errors, the launcher |
//! | `share` | which ranks share a node, and the memory that they share |
//! | `engine` | operations under way, who drives them, and handles on them |
//! | `group` | the communicators of a group of ranks, and their tags |
//! | `header` | what the first message of a payload tells |
//! | `transfer` | bytes from one rank to another |
//! | `exchange` | payloads to and from several ranks |
//! | `collective` | the all-reduce |

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_std::DType;
use mpi_sys as ffi;

mod collective;
mod engine;
mod exchange;
mod group;
mod header;
mod init;
mod share;
mod transfer;

use collective::AllReduce;
use engine::{Operation, Pending, started};
use exchange::{Exchange, Message, Payload};
use group::Group;
pub(crate) use init::abort_job;
use init::check;
pub use init::{InitError, finalize, init, local_rank};

use super::{Comm, CommCounters, CommError, Communicator, Kind, ReduceOp, Request, Signature, lock, reduce};

/// Up to this many bytes an all-reduce sends whole buffers.
pub const DIRECT: usize = 16 << 10;

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
        // SAFETY: a constant of the bindings, which nothing writes.
        let mut raw = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: a live communicator, and room for another.
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
