//! An allocator for programs that train: large buffers are kept from step to step, and lie in large pages.
//!
//! A training step makes and frees the same large tensors again and again. The system's allocator gives each back to
//! the kernel, which then has to find, clear and map every 4 KiB page of the next one: a quarter of a step's time. A
//! program opts in:
//!
//! ```
//! #[global_allocator]
//! static BUFFERS: burn_spatial::buffers::Buffers = burn_spatial::buffers::Buffers;
//! ```
//!
//! A buffer is cut from the smallest stretch of kept memory that holds it, and joins its neighbours when it is freed. Where
//! none is large enough, the pages of several are moved to a new place, without copying them, and the system adds what is
//! still missing: a process never has more large buffers, used and kept together, than were in use at once (in whole pages
//! of 2 MiB). Beyond 32 GiB, where moved pages could be more mappings than a process may have, as much is given back to the
//! system instead, and made anew.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Smaller allocations are the system's.
const LARGE: usize = 1 << 20;
/// Sizes are rounded up to whole large pages.
const PAGE: usize = 2 << 20;

/// The allocator. What it counts is that of the process: see [`counts`].
#[derive(Debug)]
pub struct Buffers;

/// Bytes of large buffers since the start of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Made anew by the system.
    pub made: u64,
    /// Taken from what was kept.
    pub reused: u64,
    /// Of these, moved to a new place.
    pub moved: u64,
}

static MADE: AtomicU64 = AtomicU64::new(0);
static REUSED: AtomicU64 = AtomicU64::new(0);
static MOVED: AtomicU64 = AtomicU64::new(0);

/// What [`Buffers`] has counted; zeros where the program has another allocator.
pub fn counts() -> Counts {
    Counts { made: MADE.load(Relaxed), reused: REUSED.load(Relaxed), moved: MOVED.load(Relaxed) }
}

#[cfg(target_os = "linux")]
fn count(counter: &AtomicU64, bytes: usize) {
    counter.fetch_add(bytes as u64, Relaxed);
}

/// The size of the buffer for a layout; `None` where the system's allocator serves.
fn buffer(layout: Layout) -> Option<usize> {
    (layout.size() >= LARGE && layout.align() <= PAGE).then(|| layout.size().next_multiple_of(PAGE))
}

#[cfg(target_os = "linux")]
mod kept {
    use std::ptr;
    use std::sync::Mutex;

    use super::{MADE, MOVED, PAGE, REUSED, count};

    /// Stretches that are kept at most; of more, buffers are given back when they are freed.
    const SPANS: usize = 1024;

    /// Pages are moved while a process has no more than this: each may become a mapping of its own, and the system allows
    /// 65,530 of them unless told otherwise.
    const MOVABLE: usize = 32 << 30;

    /// Mapped memory that nobody uses.
    #[derive(Clone, Copy)]
    struct Span {
        start: *mut u8,
        len: usize,
    }

    /// What waits for its next use, in the order of addresses; neighbours are one.
    struct Kept {
        spans: [Span; SPANS],
        count: usize,
        /// Bytes that are mapped, in use or kept.
        mapped: usize,
        /// Whether the system has failed to move a page.
        stuck: bool,
    }

    // SAFETY: the memory belongs to the list alone.
    unsafe impl Send for Kept {}

    const NONE: Span = Span { start: ptr::null_mut(), len: 0 };

    static ALL: Mutex<Kept> = Mutex::new(Kept { spans: [NONE; SPANS], count: 0, mapped: 0, stuck: false });

    fn with<R>(work: impl FnOnce(&mut Kept) -> R) -> R {
        // Nothing below panics, and an allocator must not.
        work(&mut ALL.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    impl Kept {
        fn spans(&self) -> &[Span] {
            &self.spans[..self.count]
        }

        fn remove(&mut self, at: usize) {
            self.spans.copy_within(at + 1..self.count, at);
            self.count -= 1;
        }

        /// Cuts `size` bytes from the smallest span that has them.
        fn take(&mut self, size: usize) -> Option<*mut u8> {
            let fits = self.spans().iter().enumerate().filter(|(_, span)| span.len >= size);
            let at = fits.min_by_key(|(_, span)| span.len)?.0;
            let span = &mut self.spans[at];
            let start = span.start;
            *span = Span { start: start.wrapping_add(size), len: span.len - size };
            if span.len == 0 {
                self.remove(at);
            }
            Some(start)
        }

        /// Moves kept pages to `buffer`, `size` bytes of fresh mapping, as far as there are any: how many bytes. One page after
        /// the other, for a page lies in one mapping: a system before Linux 6.17 that is to move more than one mapping clears
        /// the target first and fails then, and another thread's memory may come to lie there.
        ///
        /// An error where the system fails all the same: what it left of the page after that many bytes is not known.
        fn gather(&mut self, buffer: *mut u8, size: usize) -> Result<usize, usize> {
            let mut moved = 0;
            while moved < size {
                let Some(at) = (0..self.count).max_by_key(|i| self.spans[*i].len) else { break };
                // In the order of addresses, so that neighbours stay one mapping.
                for _ in 0..self.spans[at].len.min(size - moved) / PAGE {
                    let span = &mut self.spans[at];
                    let (from, to) = (span.start, buffer.wrapping_add(moved));
                    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    // SAFETY: a kept page and a page of the new mapping, which nothing refers to.
                    if unsafe { libc::mremap(from.cast(), PAGE, PAGE, flags, to) } == libc::MAP_FAILED {
                        return Err(moved);
                    }
                    *span = Span { start: from.wrapping_add(PAGE), len: span.len - PAGE };
                    moved += PAGE;
                }
                if self.spans[at].len == 0 {
                    self.remove(at);
                }
            }
            self.mapped -= moved;
            Ok(moved)
        }

        /// A new buffer made of kept pages, and of new ones where they do not suffice; how many bytes were kept. `None` where
        /// pages cannot be moved.
        fn moved(&mut self, size: usize) -> Option<(*mut u8, usize)> {
            if self.stuck || self.mapped + size > MOVABLE {
                return None;
            }
            let buffer = self.map(size);
            if buffer.is_null() {
                return None;
            }
            match self.gather(buffer, size) {
                Ok(moved) => Some((buffer, moved)),
                Err(moved) => {
                    // The page in question is left alone for ever. What was moved is kept, and the rest given back.
                    self.stuck = true;
                    self.mapped -= moved;
                    if moved > 0 {
                        self.keep(buffer, moved);
                    }
                    let (rest, len) = (buffer.wrapping_add(moved + PAGE), size - moved - PAGE);
                    if len > 0 {
                        self.unmap(rest, len);
                    }
                    None
                }
            }
        }

        /// New zeros.
        fn map(&mut self, size: usize) -> *mut u8 {
            let buffer = map(size);
            if !buffer.is_null() {
                self.mapped += size;
            }
            buffer
        }

        /// Gives memory that nothing refers to back to the system; whether it was taken. It is not where that would cut a
        /// mapping in two, and the process has as many as it may.
        fn unmap(&mut self, start: *mut u8, size: usize) -> bool {
            // SAFETY: mapped memory that nothing refers to.
            let taken = unsafe { libc::munmap(start.cast(), size) } == 0;
            if taken {
                self.mapped -= size;
            }
            taken
        }

        /// Keeps memory that nothing refers to, or gives it back.
        fn keep(&mut self, start: *mut u8, size: usize) {
            if !self.put(start, size) {
                self.unmap(start, size);
            }
        }

        /// Gives stretches back to the system, the largest first, until it has `size` bytes of them: what it makes anew takes
        /// their place.
        fn release(&mut self, size: usize) {
            let mut given = 0;
            while given < size {
                let Some(at) = (0..self.count).max_by_key(|i| self.spans[*i].len) else { return };
                let span = self.spans[at];
                let len = span.len.min(size - given);
                let from = span.start.wrapping_add(span.len - len);
                if !self.unmap(from, len) {
                    return;
                }
                let span = &mut self.spans[at];
                span.len -= len;
                given += len;
                if span.len == 0 {
                    self.remove(at);
                }
            }
        }

        /// Takes back what [`Kept::take`] gave; whether there was a place for it.
        fn put(&mut self, start: *mut u8, size: usize) -> bool {
            let at = self.spans().partition_point(|span| span.start < start);
            let after = at < self.count && start.wrapping_add(size) == self.spans[at].start;
            let before = at > 0 && self.spans[at - 1].start.wrapping_add(self.spans[at - 1].len) == start;
            match (before, after) {
                (true, true) => {
                    self.spans[at - 1].len += size + self.spans[at].len;
                    self.remove(at);
                }
                (true, false) => self.spans[at - 1].len += size,
                (false, true) => self.spans[at] = Span { start, len: size + self.spans[at].len },
                (false, false) if self.count < SPANS => {
                    self.spans.copy_within(at..self.count, at + 1);
                    self.spans[at] = Span { start, len: size };
                    self.count += 1;
                }
                (false, false) => return false,
            }
            true
        }
    }

    /// A buffer of `size` bytes, and whether it is of zeros; null when there is no memory.
    pub(super) fn take(size: usize) -> (*mut u8, bool) {
        with(|kept| {
            if let Some(buffer) = kept.take(size) {
                count(&REUSED, size);
                return (buffer, false);
            }
            if let Some((buffer, moved)) = kept.moved(size) {
                count(&MADE, size - moved);
                count(&REUSED, moved);
                count(&MOVED, moved);
                return (buffer, moved == 0);
            }
            kept.release(size);
            let buffer = kept.map(size);
            if !buffer.is_null() {
                count(&MADE, size);
            }
            (buffer, true)
        })
    }

    /// As after a page that the system could not move.
    #[cfg(test)]
    pub(super) fn stick(stuck: bool) {
        with(|kept| kept.stuck = stuck);
    }

    /// Keeps a buffer that [`take`] gave.
    ///
    /// # Safety
    /// Nothing may refer to it any more.
    pub(super) unsafe fn keep(buffer: *mut u8, size: usize) {
        with(|kept| kept.keep(buffer, size));
    }

    /// New zeros, aligned to large pages.
    fn map(size: usize) -> *mut u8 {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping touches no other; what is cut off below is a part of it alone.
        unsafe {
            let start = libc::mmap(ptr::null_mut(), size + PAGE, protection, flags, -1, 0);
            if start == libc::MAP_FAILED {
                return ptr::null_mut();
            }
            let before = start.addr().next_multiple_of(PAGE) - start.addr();
            let buffer = start.byte_add(before);
            if before > 0 {
                libc::munmap(start, before);
            }
            if before < PAGE {
                libc::munmap(buffer.byte_add(size), PAGE - before);
            }
            // Only a wish: without large pages the buffer works as well.
            libc::madvise(buffer, size, libc::MADV_HUGEPAGE);
            buffer.cast()
        }
    }
}

// SAFETY: large blocks are mapped memory of their rounded size, from `take` until `keep`; all others are the system's. Which
// it is follows from the layout, which is the same for both calls.
#[cfg(target_os = "linux")]
unsafe impl GlobalAlloc for Buffers {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match buffer(layout) {
            Some(size) => kept::take(size).0,
            // SAFETY: the caller's promise.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(size) = buffer(layout) else {
            // SAFETY: the caller's promise.
            return unsafe { System.alloc_zeroed(layout) };
        };
        let (buffer, zeros) = kept::take(size);
        if !zeros && !buffer.is_null() {
            // SAFETY: a new buffer of at least this size.
            unsafe { buffer.write_bytes(0, layout.size()) };
        }
        buffer
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match buffer(layout) {
            // SAFETY: the caller frees what `take` gave with this layout, and uses it no more.
            Some(size) => unsafe { kept::keep(block, size) },
            // SAFETY: the caller's promise.
            None => unsafe { System.dealloc(block, layout) },
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises a size that makes a layout.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (buffer(layout), buffer(new)) {
            (Some(old), Some(new)) if old == new => block,
            // SAFETY: the caller's promise.
            (None, None) => unsafe { System.realloc(block, layout, size) },
            _ => {
                // SAFETY: the caller's promise, for the new layout.
                let moved = unsafe { self.alloc(new) };
                if !moved.is_null() {
                    // SAFETY: two blocks, each of at least this size; the old one is not used after this.
                    unsafe {
                        moved.copy_from_nonoverlapping(block, layout.size().min(size));
                        self.dealloc(block, layout);
                    }
                }
                moved
            }
        }
    }
}

/// The system's allocator, where large pages are not asked for in this way.
// SAFETY: all is the system's.
#[cfg(not(target_os = "linux"))]
unsafe impl GlobalAlloc for Buffers {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, buffer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(buffer, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_to_large_pages() {
        let of = |size: usize, align: usize| buffer(Layout::from_size_align(size, align).unwrap());
        assert_eq!(of(LARGE - 1, 8), None);
        assert_eq!(of(LARGE, 8), Some(PAGE));
        assert_eq!(of(PAGE, 64), Some(PAGE));
        assert_eq!(of(PAGE + 1, 64), Some(2 * PAGE));
        assert_eq!(of(PAGE, 2 * PAGE), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn buffers_are_kept_cleared_joined_and_given_back() {
        let layout = |mib: usize| Layout::from_size_align(mib << 20, 64).unwrap();
        // SAFETY: each block is written within its layout and freed once, with the same layout.
        unsafe {
            let first = Buffers.alloc(layout(40));
            assert_eq!(first.addr() % PAGE, 0);
            first.write_bytes(7, 40 << 20);
            Buffers.dealloc(first, layout(40));
            let before = counts();
            // Two buffers are cut from it.
            let again = Buffers.alloc_zeroed(layout(23));
            let rest = Buffers.alloc(layout(16));
            assert_eq!((again, rest), (first, first.add(24 << 20)));
            assert!((0..23 << 20).step_by(4096).all(|i| *again.add(i) == 0));
            assert_eq!(*rest, 7);
            let other = Buffers.alloc(layout(100));
            assert!(!other.is_null());
            let since = |counts: Counts| [counts.made - before.made, counts.reused - before.reused, counts.moved].map(|n| n >> 20);
            assert_eq!(since(counts()), [100, 40, 0]);
            // In any order they become one again.
            Buffers.dealloc(again, layout(23));
            Buffers.dealloc(rest, layout(16));
            let joined = Buffers.alloc(layout(40));
            assert_eq!(joined, first);
            // What is longer than any that is kept is made of several, and of new pages.
            joined.write_bytes(3, 40 << 20);
            other.write_bytes(4, 100 << 20);
            let between = Buffers.alloc(layout(2));
            Buffers.dealloc(joined, layout(40));
            Buffers.dealloc(other, layout(100));
            let large = Buffers.alloc(layout(150));
            let [made, _, moved] = since(counts());
            assert!([made, moved] == [100 + 2 + 10, 140], "{made} MiB made and {moved} moved");
            let values = |value: u8| (0..150 << 20).step_by(4096).filter(|i| *large.add(*i) == value).count() >> 8;
            assert_eq!([3, 4, 0].map(values), [40, 100, 10]);
            large.write_bytes(5, 150 << 20);
            assert_eq!(Buffers.realloc(large, layout(150), (150 << 20) - 3), large, "the pages are the same");
            let longer = Buffers.realloc(large, Layout::from_size_align((150 << 20) - 3, 64).unwrap(), 151 << 20);
            assert!((0..(150 << 20) - 3).step_by(4096).all(|i| *longer.add(i) == 5));
            let large = Buffers.realloc(longer, layout(151), 150 << 20);
            Buffers.dealloc(large, layout(150));
            Buffers.dealloc(between, layout(2));
            // Where pages cannot be moved, as much is given back instead.
            kept::stick(true);
            let before = counts();
            let anew = Buffers.alloc(layout(400));
            assert!((0..400 << 20).step_by(4096).all(|i| *anew.add(i) == 0));
            assert_eq!((counts().made - before.made, counts().reused), (400 << 20, before.reused));
            Buffers.dealloc(anew, layout(400));
            kept::stick(false);
            // A shorter one in its place, or in that of the others, whichever they are.
            let last = Buffers.alloc_zeroed(layout(152));
            assert!((0..152 << 20).step_by(4096).all(|i| *last.add(i) == 0));
            Buffers.dealloc(last, layout(152));
        }
    }
}
