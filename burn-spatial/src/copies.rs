//! Counts the bytes that are copied to move or rearrange tensors.

use std::sync::atomic::{AtomicU64, Ordering};

static COPIED: AtomicU64 = AtomicU64::new(0);

/// Counts bytes that are copied for another reason than computing with them.
pub(crate) fn copied(bytes: usize) {
    COPIED.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// All that this process has copied.
pub(crate) fn all() -> u64 {
    COPIED.load(Ordering::Relaxed)
}
