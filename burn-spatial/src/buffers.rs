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
//! Where new memory is needed, what is kept and not in use is given back as far as both together exceed the most that
//! was in use at once: what a process needs at its peak grows by [`KEPT`] and the rounding of sizes (an eighth) at most.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes that may be kept beyond the most that was in use at once.
pub const KEPT: usize = 64 << 20;

/// Smaller allocations are the system's.
const LARGE: usize = 1 << 20;
/// Sizes are rounded up to whole large pages.
const PAGE: usize = 2 << 20;
/// Sizes between two powers of two.
const STEPS: usize = 8;
/// Sizes up to 2 MiB * 2^20.
const CLASSES: usize = 20 * STEPS;

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

/// The class of a size, and the size of its buffers; `None` of sizes that are not kept.
fn class(size: usize) -> Option<(usize, usize)> {
    if size < LARGE {
        return None;
    }
    let pages = size.div_ceil(PAGE);
    // Eight sizes an octave: a power of two and an eighth of it at a time.
    let octave = pages.ilog2() as usize;
    let step = (1usize << octave).div_ceil(STEPS);
    let steps = (pages - (1 << octave)).div_ceil(step);
    let class = octave * STEPS + steps;
    (class < CLASSES).then_some((class, ((1 << octave) + steps * step) * PAGE))
}

#[cfg(target_os = "linux")]
mod kept {
    use std::ptr;
    use std::sync::Mutex;

    use super::{CLASSES, KEPT, MADE, PAGE, REUSED, count};

    /// Buffers that wait for their next use: of each class a list through their first words.
    struct Kept {
        first: [*mut Free; CLASSES],
        bytes: usize,
        /// In use now, and the most so far.
        used: usize,
        most: usize,
    }

    struct Free {
        next: *mut Free,
        size: usize,
    }

    // SAFETY: the buffers belong to the lists alone.
    unsafe impl Send for Kept {}

    static ALL: Mutex<Kept> = Mutex::new(Kept { first: [ptr::null_mut(); CLASSES], bytes: 0, used: 0, most: 0 });

    fn with<R>(work: impl FnOnce(&mut Kept) -> R) -> R {
        // Nothing below panics, and an allocator must not.
        work(&mut ALL.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    impl Kept {
        fn take(&mut self, class: usize) -> Option<(*mut u8, usize)> {
            let first = self.first[class];
            if first.is_null() {
                return None;
            }
            // SAFETY: what is in a list is a mapped buffer that starts with a `Free`.
            let Free { next, size } = unsafe { first.read() };
            self.first[class] = next;
            self.bytes -= size;
            Some((first.cast(), size))
        }

        /// Gives unused buffers back to the system, the largest first, as far as there are too many.
        fn shrink(&mut self) {
            let most = (self.most + KEPT).saturating_sub(self.used);
            for class in (0..CLASSES).rev() {
                while self.bytes > most {
                    let Some((buffer, size)) = self.take(class) else { break };
                    // SAFETY: a whole mapping that nothing refers to any more.
                    unsafe { libc::munmap(buffer.cast(), size) };
                }
            }
        }
    }

    /// A buffer of `size` bytes, and whether it is of zeros; null when there is no memory.
    pub(super) fn take(class: usize, size: usize) -> (*mut u8, bool) {
        let kept = with(|kept| {
            kept.used += size;
            kept.most = kept.most.max(kept.used);
            let buffer = kept.take(class);
            if buffer.is_none() {
                kept.shrink();
            }
            buffer
        });
        if let Some((buffer, _)) = kept {
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
    pub(super) unsafe fn keep(class: usize, buffer: *mut u8, size: usize) {
        with(|kept| {
            let free = buffer.cast::<Free>();
            // SAFETY: the buffer is ours, large enough and aligned to a page.
            unsafe { free.write(Free { next: kept.first[class], size }) };
            kept.first[class] = free;
            kept.bytes += size;
            kept.used -= size;
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

// SAFETY: large blocks are mappings of their class's size, from `take` until `keep`; all others are the system's. Which it
// is follows from the layout, which is the same for both calls.
#[cfg(target_os = "linux")]
unsafe impl GlobalAlloc for Buffers {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class(layout.size()) {
            Some((class, size)) if layout.align() <= PAGE => kept::take(class, size).0,
            _ => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((class, size)) = class(layout.size()).filter(|_| layout.align() <= PAGE) else {
            return unsafe { System.alloc_zeroed(layout) };
        };
        let (buffer, zeros) = kept::take(class, size);
        if !zeros && !buffer.is_null() {
            unsafe { buffer.write_bytes(0, layout.size()) };
        }
        buffer
    }

    unsafe fn dealloc(&self, buffer: *mut u8, layout: Layout) {
        match class(layout.size()) {
            Some((class, size)) if layout.align() <= PAGE => unsafe { kept::keep(class, buffer, size) },
            _ => unsafe { System.dealloc(buffer, layout) },
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
    fn sizes_grow_by_an_eighth_at_most() {
        assert_eq!(class(LARGE - 1), None);
        let mut last = class(PAGE).unwrap();
        for pages in 2..5000usize {
            let (class, size) = class(pages * PAGE).unwrap();
            assert!(size >= pages * PAGE && size * 8 <= pages * PAGE * 9 + 8 * PAGE, "{pages} pages became {size} bytes");
            assert!(class > last.0 && size > last.1 || (class, size) == last, "{pages} pages: {class} after {last:?}");
            // All sizes of a class are the same buffer's.
            assert_eq!(super::class(size), Some((class, size)));
            last = (class, size);
        }
        assert_eq!(class(usize::MAX / 2), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn buffers_are_kept_cleared_and_given_back() {
        let layout = |mib: usize| Layout::from_size_align(mib << 20, 64).unwrap();
        // SAFETY: each block is written within its layout and freed once, with the same layout.
        unsafe {
            let first = Buffers.alloc(layout(40));
            assert_eq!(first.addr() % PAGE, 0);
            first.write_bytes(7, 40 << 20);
            Buffers.dealloc(first, layout(40));
            let before = counts();
            let again = Buffers.alloc_zeroed(layout(39));
            assert_eq!(again, first, "39 MiB fit the buffer of 40");
            assert!((0..39 << 20).step_by(4096).all(|i| *again.add(i) == 0));
            assert_eq!(counts().reused, before.reused + 1);
            let other = Buffers.alloc(layout(100));
            assert!(!other.is_null() && other != again);
            assert_eq!(counts().made, before.made + 1);
            Buffers.dealloc(again, layout(39));
            Buffers.dealloc(other, layout(100));
            // A new size gives back what would go beyond the most that was in use.
            let large = Buffers.alloc(layout(300));
            let fresh = Buffers.alloc(layout(100));
            assert_eq!(counts().made, before.made + 3, "the 100 MiB were given back");
            Buffers.dealloc(large, layout(300));
            Buffers.dealloc(fresh, layout(100));
            // What fits beside the rest stays.
            let small = Buffers.alloc(layout(20));
            let again = Buffers.alloc(layout(300));
            assert_eq!(counts().made, before.made + 4, "the 300 MiB were kept");
            Buffers.dealloc(small, layout(20));
            Buffers.dealloc(again, layout(300));
        }
    }
}
