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
//! new memory is needed, what is kept and not in use is given back as far as both together exceed the most that was in use
//! at once: what a process needs at its peak grows by [`KEPT`] and the rounding of sizes to 2 MiB at most.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes that may be kept beyond the most that was in use at once.
pub const KEPT: usize = 64 << 20;

/// Smaller allocations are the system's.
const LARGE: usize = 1 << 20;
/// Sizes are rounded up to whole large pages.
const PAGE: usize = 2 << 20;

/// The allocator. What it counts is that of the process: see [`counts`].
#[derive(Debug)]
pub struct Buffers;

/// Large buffers since the start of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Made anew by the system.
    pub made: u64,
    /// Bytes of these.
    pub made_bytes: u64,
    /// Taken from those that were kept.
    pub reused: u64,
    /// Bytes of these.
    pub reused_bytes: u64,
}

static MADE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
static REUSED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// What [`Buffers`] has counted; zeros where the program has another allocator.
pub fn counts() -> Counts {
    let [made, made_bytes] = [0, 1].map(|i| MADE[i].load(Relaxed));
    let [reused, reused_bytes] = [0, 1].map(|i| REUSED[i].load(Relaxed));
    Counts { made, made_bytes, reused, reused_bytes }
}

fn count(counters: &[AtomicU64; 2], bytes: usize) {
    counters[0].fetch_add(1, Relaxed);
    counters[1].fetch_add(bytes as u64, Relaxed);
}

/// The size of the buffer for a layout; `None` where the system's allocator serves.
fn buffer(layout: Layout) -> Option<usize> {
    (layout.size() >= LARGE && layout.align() <= PAGE).then(|| layout.size().next_multiple_of(PAGE))
}

#[cfg(target_os = "linux")]
mod kept {
    use std::ptr;
    use std::sync::Mutex;

    use super::{KEPT, MADE, PAGE, REUSED, count};

    /// Stretches that are kept at most; of more, buffers are given back when they are freed.
    const SPANS: usize = 1024;

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
        bytes: usize,
        /// In use now, and the most so far.
        used: usize,
        most: usize,
    }

    // SAFETY: the memory belongs to the list alone.
    unsafe impl Send for Kept {}

    const NONE: Span = Span { start: ptr::null_mut(), len: 0 };

    static ALL: Mutex<Kept> = Mutex::new(Kept { spans: [NONE; SPANS], count: 0, bytes: 0, used: 0, most: 0 });

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
            self.bytes -= size;
            Some(start)
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
            self.bytes += size;
            true
        }

        /// Gives back what is too much, the largest spans' ends first.
        fn shrink(&mut self) {
            let most = (self.most + KEPT).saturating_sub(self.used);
            while self.bytes > most {
                let Some(at) = (0..self.count).max_by_key(|i| self.spans[*i].len) else { return };
                let span = &mut self.spans[at];
                let cut = span.len.min((self.bytes - most).next_multiple_of(PAGE));
                span.len -= cut;
                // SAFETY: mapped memory that nothing refers to any more.
                unsafe { libc::munmap(span.start.wrapping_add(span.len).cast(), cut) };
                self.bytes -= cut;
                if self.spans[at].len == 0 {
                    self.remove(at);
                }
            }
        }
    }

    /// A buffer of `size` bytes, and whether it is of zeros; null when there is no memory.
    pub(super) fn take(size: usize) -> (*mut u8, bool) {
        let kept = with(|kept| {
            kept.used += size;
            kept.most = kept.most.max(kept.used);
            let buffer = kept.take(size);
            if buffer.is_none() {
                kept.shrink();
            }
            buffer
        });
        if let Some(buffer) = kept {
            count(&REUSED, size);
            return (buffer, false);
        }
        count(&MADE, size);
        (map(size), true)
    }

    /// Keeps a buffer that [`take`] gave.
    ///
    /// # Safety
    /// Nothing may refer to it any more.
    pub(super) unsafe fn keep(buffer: *mut u8, size: usize) {
        with(|kept| {
            kept.used -= size;
            if !kept.put(buffer, size) {
                // SAFETY: mapped memory that nothing refers to any more.
                unsafe { libc::munmap(buffer.cast(), size) };
            }
        });
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
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(size) = buffer(layout) else { return unsafe { System.alloc_zeroed(layout) } };
        let (buffer, zeros) = kept::take(size);
        if !zeros && !buffer.is_null() {
            unsafe { buffer.write_bytes(0, layout.size()) };
        }
        buffer
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match buffer(layout) {
            Some(size) => unsafe { kept::keep(block, size) },
            None => unsafe { System.dealloc(block, layout) },
        }
    }
}

/// The system's allocator, where large pages are not asked for in this way.
// SAFETY: all is the system's.
#[cfg(not(target_os = "linux"))]
unsafe impl GlobalAlloc for Buffers {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, buffer: *mut u8, layout: Layout) {
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
            assert_eq!(counts().reused, before.reused + 2);
            let other = Buffers.alloc(layout(100));
            assert!(!other.is_null());
            assert_eq!(counts().made, before.made + 1);
            // In any order they become one again.
            Buffers.dealloc(again, layout(23));
            Buffers.dealloc(rest, layout(16));
            let joined = Buffers.alloc(layout(40));
            assert_eq!(joined, first);
            Buffers.dealloc(joined, layout(40));
            Buffers.dealloc(other, layout(100));
            // A new size gives back what would go beyond the most that was in use.
            let large = Buffers.alloc(layout(300));
            assert_eq!(counts().made, before.made + 2);
            let fresh = Buffers.alloc(layout(100));
            assert_eq!(counts().made, before.made + 3, "the 100 MiB were given back");
            Buffers.dealloc(large, layout(300));
            Buffers.dealloc(fresh, layout(100));
            // What fits beside the rest stays.
            let small = Buffers.alloc(layout(20));
            let again = Buffers.alloc(layout(300));
            assert_eq!(counts().made, before.made + 3, "all that was in use was kept");
            Buffers.dealloc(small, layout(20));
            Buffers.dealloc(again, layout(300));
        }
    }
}
