//! Memory that the processes of a node share: a long payload lies there for its readers, who are told where in a short
//! message. The sender is done as soon as it has been copied, and nothing more has to be driven on its side.
//!
//! Every rank puts blocks in a part of its own, and frees them there when all readers have left; nobody waits for room: a
//! payload that finds none goes the other way.

use std::ffi::{CString, c_int};
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use super::lock;
use crate::copies::copied;

/// Before each block, how many readers it still has.
const HEAD: usize = 64;

/// A file in memory that the processes of a node open by its number. Its name goes when the process that made it drops it, at
/// the latest; what is mapped stays until it is unmapped.
pub(super) struct SharedFile {
    file: OwnedFd,
    /// In the process that made it.
    name: Option<CString>,
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // SAFETY: a string that ends with 0. There is nobody to tell of an error.
            unsafe { libc::shm_unlink(name.as_ptr()) };
        }
    }
}

/// The result of a call that is negative where it failed.
fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl SharedFile {
    fn name(number: u64) -> CString {
        CString::new(format!("/burn-spatial-{number:016x}")).expect("no 0 within")
    }

    fn at(number: u64, flags: c_int) -> io::Result<OwnedFd> {
        let name = Self::name(number);
        // SAFETY: a string that ends with 0, and a descriptor that is nobody else's.
        unsafe { Ok(OwnedFd::from_raw_fd(checked(libc::shm_open(name.as_ptr(), libc::O_RDWR | flags, 0o600))?)) }
    }

    /// A new one of `len` bytes, none of which has a page yet.
    pub(super) fn create(number: u64, len: usize) -> io::Result<SharedFile> {
        let file = Self::at(number, libc::O_CREAT | libc::O_EXCL)?;
        let shared = SharedFile { file, name: Some(Self::name(number)) };
        let len = len.try_into().map_err(io::Error::other)?;
        // SAFETY: an open file.
        checked(unsafe { libc::ftruncate(shared.file.as_raw_fd(), len) })?;
        Ok(shared)
    }

    /// The one that another process has made.
    pub(super) fn open(number: u64) -> io::Result<SharedFile> {
        Ok(SharedFile { file: Self::at(number, 0)?, name: None })
    }

    /// Gets the pages of a range, so that no later write can find that there are none left, which would end the process. They
    /// lie near the calling process.
    pub(super) fn reserve(&self, range: Range<usize>) -> io::Result<()> {
        let start = range.start.try_into().map_err(io::Error::other)?;
        let len = range.len().try_into().map_err(io::Error::other)?;
        loop {
            // SAFETY: an open file.
            match unsafe { libc::posix_fallocate(self.file.as_raw_fd(), start, len) } {
                0 => return Ok(()),
                libc::EINTR => {}
                code => return Err(io::Error::from_raw_os_error(code)),
            }
        }
    }

    /// The first `len` bytes in the memory of this process, as long as it lives.
    pub(super) fn map(&self, len: usize) -> io::Result<*mut u8> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping of an open file.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, self.file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start.cast()) }
    }

    /// Gives a mapping back.
    ///
    /// # Safety
    /// Nobody uses it any more.
    pub(super) unsafe fn unmap(start: *mut u8, len: usize) {
        // SAFETY: as the caller says. It cannot fail with what `map` returned.
        unsafe { libc::munmap(start.cast(), len) };
    }
}

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
// SAFETY: as above.
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
        // SAFETY: blocks lie in the own part, at multiples of HEAD; other processes change the count by atomics only.
        unsafe { &*self.own.start.add(block).cast() }
    }

    /// The block that `world_rank` put at `block`; `None` if there can be none.
    ///
    /// # Safety
    /// `block` and `len` are what [`NodeMemory::put`] was given and returned on that rank, and this is called once for each
    /// reader that the block was put for: the last one to leave gives it back.
    pub(super) unsafe fn get(&self, world_rank: usize, block: usize, len: usize) -> Option<Shelved> {
        let part = (*self.parts.get(world_rank)?)?;
        let end = block.checked_add(HEAD)?.checked_add(len)?;
        if end > part.len || !block.is_multiple_of(HEAD) {
            return None;
        }
        fence(Ordering::SeqCst);
        // SAFETY: within the part; as the caller says, the block was written before the message that told of it, and stays
        // until this reader has left.
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

    /// [`NodeMemory::get`].
    fn get(memory: &NodeMemory, rank: usize, block: usize, len: usize) -> Option<Shelved> {
        // SAFETY: the tests ask for blocks that were put, once a reader, or for places where there can be none.
        unsafe { memory.get(rank, block, len) }
    }

    #[test]
    fn what_one_puts_the_other_gets() {
        let [a, b] = pair(1024);
        let place = a.put(b"halo", 1).unwrap();
        assert_eq!(&*get(&b, 0, place, 4).unwrap(), b"halo");
        assert!(a.holds(1) && !a.holds(2) && !a.holds(3));
        assert!(get(&b, 2, place, 4).is_none() && get(&b, 0, 1024, 4).is_none() && get(&b, 0, place, usize::MAX).is_none());
    }

    #[test]
    fn a_shared_file_is_seen_by_all_and_leaves_nothing() {
        let number = u64::from(std::process::id()) << 32 | 1;
        let path = format!("/dev/shm{}", SharedFile::name(number).to_str().unwrap());
        let made = SharedFile::create(number, 1 << 20).unwrap();
        assert!(SharedFile::create(number, 1).is_err(), "there is one");
        let other = SharedFile::open(number).unwrap();
        made.reserve(0..1 << 19).unwrap();
        other.reserve(1 << 19..1 << 20).unwrap();
        // The pages are there, not only the length.
        let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).unwrap());
        assert_eq!(blocks * 512, 1 << 20);
        let (a, b) = (made.map(1 << 20).unwrap(), other.map(1 << 20).unwrap());
        drop(other);
        drop(made);
        assert!(!std::path::Path::new(&path).exists());
        // SAFETY: both mappings stay.
        unsafe {
            a.add(12345).write_volatile(7);
            assert_eq!(b.add(12345).read_volatile(), 7);
        }
        assert!(SharedFile::open(number).is_err());
    }

    #[test]
    fn pages_that_are_not_there_are_an_error() {
        let number = u64::from(std::process::id()) << 32 | 2;
        let made = SharedFile::create(number, 4096).unwrap();
        // More than any machine has.
        let error = made.reserve(0..1 << 60).unwrap_err();
        assert!([libc::ENOSPC, libc::EFBIG, libc::ENOMEM].contains(&error.raw_os_error().unwrap()), "{error}");
        drop(made);
        assert!(SharedFile::open(number).is_err());
    }

    #[test]
    fn a_block_is_free_when_its_readers_have_left() {
        let [a, b] = pair(4 * 128);
        let places: Vec<usize> = (0..4).map(|i| a.put(&[i; 60], 2).unwrap()).collect();
        assert!(a.put(&[9; 60], 1).is_none(), "no room");
        drop(get(&b, 0, places[1], 60));
        assert!(a.put(&[9; 60], 1).is_none(), "one reader has not come");
        drop(get(&b, 0, places[1], 60));
        assert_eq!(a.put(&[9; 60], 1), Some(places[1]));
        assert_eq!(&*get(&b, 0, places[1], 60).unwrap(), &[9; 60]);
        for place in [places[0], places[2], places[3]] {
            assert!(get(&b, 0, place, 60).unwrap().iter().all(|x| *x == (place / 128) as u8));
        }
        assert!(a.put(&[0; 449], 1).is_none(), "longer than the part");
    }
}
