//! Memory that the processes of a node share: a long payload lies there for its readers, who are told where in a short
//! message. The sender is done as soon as it has been copied, and nothing more has to be driven on its side.
//!
//! Every rank puts blocks in a part of its own, and frees them there when all readers have left; nobody waits for room: a
//! payload that finds none goes the other way.

use std::ops::{Deref, Range};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use super::mpi::lock;
use crate::stats::copied;

/// Before each block, how many readers it still has.
const HEAD: usize = 64;

/// A part of the memory as this process sees it.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) start: *mut u8,
    pub(super) len: usize,
}

/// The parts of all ranks of the node.
pub(super) struct NodeMemory {
    /// By world rank; `None` for those of other nodes.
    parts: Vec<Option<Part>>,
    own: Part,
    /// Blocks in the own part, in the order of their places.
    blocks: Mutex<Vec<Range<usize>>>,
}

// SAFETY: the memory outlives the process's last use of it. Blocks are written by their owner before a message tells of
// them, and only read after it; readers are counted by atomics.
unsafe impl Send for NodeMemory {}
unsafe impl Sync for NodeMemory {}

/// Bytes in another rank's block, which waits for them to be dropped.
pub(super) struct Shelved {
    bytes: *const [u8],
    readers: *const AtomicU32,
}

// SAFETY: as for the memory.
unsafe impl Send for Shelved {}

impl Deref for Shelved {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block stays until its readers have left.
        unsafe { &*self.bytes }
    }
}

impl Drop for Shelved {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { &*self.readers }.fetch_sub(1, Ordering::Release);
    }
}

impl NodeMemory {
    /// # Safety
    /// Parts start at multiples of [`HEAD`], stay mapped, and are nobody's else; `own` is this rank's.
    pub(super) unsafe fn new(parts: Vec<Option<Part>>, own: Part) -> NodeMemory {
        NodeMemory { parts, own, blocks: Mutex::default() }
    }

    /// Whether a rank of the world is on this node.
    pub(super) fn holds(&self, world_rank: usize) -> bool {
        self.parts.get(world_rank).is_some_and(Option::is_some)
    }

    /// Copies `bytes` for so many readers; where they lie, or `None` without room.
    pub(super) fn put(&self, bytes: &[u8], readers: u32) -> Option<usize> {
        let need = (HEAD + bytes.len()).next_multiple_of(HEAD);
        let mut blocks = lock(&self.blocks);
        blocks.retain(|block| self.readers(block.start).load(Ordering::Acquire) > 0);
        let ends = || std::iter::once(0).chain(blocks.iter().map(|block| block.end));
        let starts = blocks.iter().map(|block| block.start).chain([self.own.len]);
        let place = ends().zip(starts).position(|(end, start)| start - end >= need)?;
        let start = ends().nth(place)?;
        blocks.insert(place, start..start + need);
        self.readers(start).store(readers, Ordering::Relaxed);
        copied(bytes.len());
        // SAFETY: the block lies in the own part and nobody reads it yet.
        unsafe { self.own.start.add(start + HEAD).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        fence(Ordering::SeqCst);
        Some(start)
    }

    fn readers(&self, block: usize) -> &AtomicU32 {
        // SAFETY: blocks lie in the own part, at multiples of HEAD.
        unsafe { &*self.own.start.add(block).cast() }
    }

    /// The block that `world_rank` put at `block`; `None` if there can be none. Once for each reader it was put for.
    pub(super) fn get(&self, world_rank: usize, block: usize, len: usize) -> Option<Shelved> {
        let part = (*self.parts.get(world_rank)?)?;
        let end = block.checked_add(HEAD)?.checked_add(len)?;
        if end > part.len || !block.is_multiple_of(HEAD) {
            return None;
        }
        fence(Ordering::SeqCst);
        // SAFETY: within the part; the block was written before the message that told of it.
        unsafe {
            let head = part.start.add(block);
            Some(Shelved { bytes: std::ptr::slice_from_raw_parts(head.add(HEAD), len), readers: head.cast() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks' views of two parts of `len` bytes, and a third rank that is elsewhere.
    fn pair(len: usize) -> [NodeMemory; 2] {
        let part = || {
            let memory = vec![[0u64; HEAD / 8]; len / HEAD + 1].leak();
            let start = memory.as_mut_ptr().cast::<u8>();
            Part { start: start.wrapping_add(start.align_offset(HEAD)), len }
        };
        let parts = [part(), part()];
        let all = vec![Some(parts[0]), Some(parts[1]), None];
        // SAFETY: the memory is leaked.
        parts.map(|own| unsafe { NodeMemory::new(all.clone(), own) })
    }

    #[test]
    fn what_one_puts_the_other_gets() {
        let [a, b] = pair(1024);
        let place = a.put(b"halo", 1).unwrap();
        assert_eq!(&*b.get(0, place, 4).unwrap(), b"halo");
        assert!(a.holds(1) && !a.holds(2) && !a.holds(3));
        assert!(b.get(2, place, 4).is_none() && b.get(0, 1024, 4).is_none() && b.get(0, place, usize::MAX).is_none());
    }

    #[test]
    fn a_block_is_free_when_its_readers_have_left() {
        let [a, b] = pair(4 * 128);
        let places: Vec<usize> = (0..4).map(|i| a.put(&[i; 60], 2).unwrap()).collect();
        assert!(a.put(&[9; 60], 1).is_none(), "no room");
        drop(b.get(0, places[1], 60));
        assert!(a.put(&[9; 60], 1).is_none(), "one reader has not come");
        drop(b.get(0, places[1], 60));
        assert_eq!(a.put(&[9; 60], 1), Some(places[1]));
        assert_eq!(&*b.get(0, places[1], 60).unwrap(), &[9; 60]);
        for place in [places[0], places[2], places[3]] {
            assert!(b.get(0, place, 60).unwrap().iter().all(|x| *x == (place / 128) as u8));
        }
        assert!(a.put(&[0; 449], 1).is_none(), "longer than the part");
    }
}
