//! The ranks of a node, and the memory that they share.

use std::mem::MaybeUninit;

use mpi_sys as ffi;

use super::init::{check, return_errors};
use crate::comm::node::{NodeMemory, Part, SharedFile};
use crate::comm::{CommError, env_number};
use crate::mix::mix;

/// A part of the node's memory starts at a multiple of this.
const PAGE: usize = 4096;

/// This rank's number among those of its node, and the memory they share, if they do. Collective.
pub(super) fn node_of(world: ffi::MPI_Comm, rank: usize, size: usize) -> Result<(usize, Option<NodeMemory>), CommError> {
    // SAFETY: a constant of the bindings, which nothing writes.
    let mut node = unsafe { ffi::RSMPI_COMM_NULL };
    // SAFETY: a constant of the bindings, which nothing writes.
    let info = unsafe { ffi::RSMPI_INFO_NULL };
    // SAFETY: a live communicator, and room for another.
    let rc = unsafe { ffi::MPI_Comm_split_type(world, ffi::RSMPI_COMM_TYPE_SHARED, rank as i32, info, &mut node) };
    check(rank, "MPI_Comm_split_type", rc)?;
    return_errors(rank, node)?;
    let (mut local, mut count) = (0, 0);
    // SAFETY: a live communicator, and room for one number.
    check(rank, "MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(node, &mut local) })?;
    // SAFETY: a live communicator, and room for one number.
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
    let number = from(0, mix(crate::mix::entropy() ^ u64::from(std::process::id())))?;
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
