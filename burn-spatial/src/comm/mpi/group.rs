//! A group of ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mpi_sys as ffi;

use super::engine::{Engine, Handle};
use super::init::{check, duplicate, return_errors};
use crate::comm::CommError;

/// A group of ranks: the communicators and who is in it.
pub(super) struct Group {
    pub(super) engine: Arc<Engine>,
    pub(super) rank: usize,
    /// World ranks.
    pub(super) members: Vec<usize>,
    /// For [`Communicator::start_send`] and [`Communicator::start_recv`].
    pub(super) user: Handle,
    /// For what does not fit the first message of these.
    pub(super) rest: Handle,
    /// For collectives alone.
    pub(super) own: Handle,
    /// The number of the next collective.
    pub(super) seq: AtomicU32,
    /// The number of the next message of [`Group::user`].
    pub(super) messages: AtomicU32,
}

impl Group {
    pub(super) fn new(engine: &Arc<Engine>, user: ffi::MPI_Comm, members: Vec<usize>) -> Result<Arc<Group>, CommError> {
        let own = duplicate(engine.rank, user)?;
        return_errors(engine.rank, user)?;
        return_errors(engine.rank, own)?;
        let rest = duplicate(engine.rank, user)?;
        return_errors(engine.rank, rest)?;
        let mut rank = 0;
        // SAFETY: a live communicator, and room for one number.
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
    pub(super) fn next_tag(&self) -> u16 {
        (self.seq.fetch_add(1, Ordering::Relaxed) % (1 << 14)) as u16 * 2
    }

    /// A tag for the rest of a message, unlike those of all others that this rank has under way.
    pub(super) fn next_rest_tag(&self) -> u16 {
        (self.messages.fetch_add(1, Ordering::Relaxed) % (1 << 15)) as u16
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.members.len()).filter(|rank| *rank != self.rank)
    }
}
