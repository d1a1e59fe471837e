//! What a rank counts: gathers for want of a rule, changes of layout, halos, and the memory of live tensors.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde::Serialize;

use crate::comm::CommSnapshot;
use crate::copies;

#[derive(Default)]
pub(crate) struct Stats {
    gathers: Mutex<BTreeMap<&'static str, u64>>,
    redistributions: AtomicU64,
    halos: AtomicU64,
    memory: Arc<Memory>,
}

#[derive(Default)]
struct Memory {
    live: AtomicU64,
    peak: AtomicU64,
}

/// Counts the bytes of one local buffer as live until dropped.
pub(crate) struct Live {
    bytes: u64,
    memory: Arc<Memory>,
}

impl Drop for Live {
    fn drop(&mut self) {
        self.memory.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Stats {
    /// Counts a gather of `op`; true the first time.
    pub(crate) fn gather(&self, op: &'static str) -> bool {
        let mut gathers = self.gathers.lock().expect("counting does not panic");
        let count = gathers.entry(op).or_default();
        *count += 1;
        *count == 1
    }

    pub(crate) fn redistribution(&self) {
        self.redistributions.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn halo(&self) {
        self.halos.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn live(&self, bytes: usize) -> Live {
        let bytes = bytes as u64;
        let live = self.memory.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.memory.peak.fetch_max(live, Ordering::Relaxed);
        Live { bytes, memory: self.memory.clone() }
    }

    pub(crate) fn snapshot(&self, plans: PlanCounts, comm: CommSnapshot) -> Snapshot {
        Snapshot {
            gathers: self.gathers.lock().expect("counting does not panic").iter().map(|(op, n)| (op.to_string(), *n)).collect(),
            redistributions: self.redistributions.load(Ordering::Relaxed),
            halos: self.halos.load(Ordering::Relaxed),
            live_bytes: self.memory.live.load(Ordering::Relaxed),
            peak_bytes: self.memory.peak.load(Ordering::Relaxed),
            copied_bytes: copies::all(),
            plans,
            comm,
        }
    }
}

/// What became of the plans of exchanges, of which a rank keeps 1024. Which it keeps changes no result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlanCounts {
    /// Plans that were built.
    pub built: u64,
    /// Plans that were there.
    pub hits: u64,
    /// Plans that made room for others.
    pub evicted: u64,
}

/// What a rank has counted.
#[derive(Clone, Debug, Serialize)]
pub struct Snapshot {
    /// Gathers of split tensors for want of a rule, by operation.
    pub gathers: BTreeMap<String, u64>,
    /// Changes of layout that moved data between ranks.
    pub redistributions: u64,
    /// Halo exchanges, forward and reverse.
    pub halos: u64,
    /// Bytes of local blocks alive now: views of one buffer count each.
    pub live_bytes: u64,
    /// The most there were at once.
    pub peak_bytes: u64,
    /// Bytes that this process, with all its ranks, has copied to move or rearrange tensors: halos and blocks made with
    /// them, strided views made dense, buffers of messages and sums.
    pub copied_bytes: u64,
    /// Plans of exchanges.
    pub plans: PlanCounts,
    /// Calls, bytes and seconds of communication.
    pub comm: CommSnapshot,
}

impl Snapshot {
    /// All gathers for want of a rule.
    pub fn gathered(&self) -> u64 {
        self.gathers.values().sum()
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "halo exchanges {}, changes of layout {}, gathers for want of a rule {}, copied {:.1} MiB",
            self.halos,
            self.redistributions,
            self.gathered(),
            self.copied_bytes as f64 / f64::from(1 << 20)
        )?;
        for (op, count) in &self.gathers {
            writeln!(f, "  {op} {count}")?;
        }
        writeln!(f, "plans built {}, found {}, evicted {}", self.plans.built, self.plans.hits, self.plans.evicted)?;
        write!(f, "{}", self.comm)
    }
}
