//! Bytes from one rank to another.

use std::mem::MaybeUninit;

use mpi_sys as ffi;

use super::engine::{Engine, Handle};
use super::group::Group;
use super::init::check;
use crate::comm::CommError;

/// Bytes to or from one rank, in as many messages as the cap asks for.
pub(super) struct Transfer {
    pub(super) rank: usize,
    /// The other side's world rank.
    pub(super) peer: usize,
    pub(super) receive: bool,
    pub(super) requests: Vec<ffi::MPI_Request>,
    pub(super) done: usize,
    /// Bytes received so far.
    pub(super) got: usize,
}

// SAFETY: requests are handles like communicators, and each is used by the thread that holds its slot's lock.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Starts to receive `len` bytes to `data`, or to send those there.
    ///
    /// # Safety
    /// The bytes must stay in place until [`Transfer::poll`] has returned true, or be leaked, also after an error:
    /// unchanged for a send, untouched for a receive.
    pub(super) unsafe fn start(
        group: &Group,
        (comm, tag): (Handle, u16),
        peer: usize,
        data: *mut u8,
        len: usize,
        receive: bool,
    ) -> Result<Self, CommError> {
        let Engine { cap, rank, .. } = *group.engine;
        let (to, tag) = (peer as i32, i32::from(tag));
        // SAFETY: a constant of the bindings, which nothing writes.
        let bytes = unsafe { ffi::RSMPI_UINT8_T };
        let mut requests = Vec::with_capacity(len / cap + 1);
        for start in (0..len).step_by(cap) {
            let count = cap.min(len - start) as i32;
            // SAFETY: a constant of the bindings, which nothing writes.
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

    pub(super) fn poll(&mut self) -> Result<bool, CommError> {
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

    pub(super) fn count(&self, status: &MaybeUninit<ffi::MPI_Status>) -> Result<usize, CommError> {
        let mut count = 0;
        // SAFETY: MPI_Test has filled the status, or left it zero, which is a valid one.
        let rc = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count) };
        check(self.rank, "MPI_Get_count", rc)?;
        Ok(count.max(0) as usize)
    }

    pub(super) fn is_done(&self) -> bool {
        self.done == self.requests.len()
    }

    pub(super) fn abandon(&mut self) {
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
