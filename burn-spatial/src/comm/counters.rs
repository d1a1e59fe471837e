//! Calls, bytes and seconds per kind of operation.
//!
//! Conventions, the same for every communicator:
//! - An operation is counted once, when it starts, or when it ends where its lengths are known only then. Seconds
//!   are those spent in waits.
//! - Point to point: a send is one call and its length in bytes sent; a receive adds its length in bytes received
//!   and no call. The calls of all ranks together are therefore the messages.
//! - All-reduce: its buffer length once, as bytes sent, whatever the algorithm moves.
//! - All-gather: the own part sent, those of the others received. Gather: the root receives what the others send.
//! - Broadcast: its length once, as sent on the root and as received elsewhere.
//! - Barrier: calls only.
//! - In a group of one rank a collective is a call of no bytes. [`super::Communicator::split`] is not counted.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::Serialize;

/// What kind of operation is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Kind {
    /// Sends and receives.
    PointToPoint,
    /// Reductions whose result every rank gets.
    AllReduce,
    /// Every rank's bytes on every rank.
    AllGather,
    /// Every rank's bytes on one.
    Gather,
    /// One rank's bytes on every rank.
    Broadcast,
    /// Synchronisation alone.
    Barrier,
}

impl Kind {
    /// All kinds, in the order of the table.
    pub const ALL: [Kind; 6] = [Kind::PointToPoint, Kind::AllReduce, Kind::AllGather, Kind::Gather, Kind::Broadcast, Kind::Barrier];

    /// The name used in tables and errors.
    pub const fn name(self) -> &'static str {
        ["point_to_point", "all_reduce", "all_gather", "gather", "broadcast", "barrier"][self as usize]
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Debug, Default)]
struct Cell {
    calls: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
    nanos: AtomicU64,
}

/// Live counters: one set a rank, shared by all groups split from one world.
#[derive(Debug, Default)]
pub struct CommCounters([Cell; 6]);

impl CommCounters {
    /// Adds one call of `kind`.
    pub(crate) fn call(&self, kind: Kind) {
        self.0[kind as usize].calls.fetch_add(1, Relaxed);
    }

    /// Adds bytes sent and received by operations of `kind`.
    pub(crate) fn bytes(&self, kind: Kind, sent: usize, received: usize) {
        let cell = &self.0[kind as usize];
        cell.sent.fetch_add(sent as u64, Relaxed);
        cell.received.fetch_add(received as u64, Relaxed);
    }

    /// Adds time spent waiting for operations of `kind`.
    pub(crate) fn waited(&self, kind: Kind, time: Duration) {
        self.0[kind as usize].nanos.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    /// The numbers now.
    pub fn snapshot(&self) -> CommSnapshot {
        let read = |kind: Kind| {
            let cell = &self.0[kind as usize];
            KindCounters {
                calls: cell.calls.load(Relaxed),
                sent: cell.sent.load(Relaxed),
                received: cell.received.load(Relaxed),
                seconds: Duration::from_nanos(cell.nanos.load(Relaxed)).as_secs_f64(),
            }
        };
        CommSnapshot {
            point_to_point: read(Kind::PointToPoint),
            all_reduce: read(Kind::AllReduce),
            all_gather: read(Kind::AllGather),
            gather: read(Kind::Gather),
            broadcast: read(Kind::Broadcast),
            barrier: read(Kind::Barrier),
        }
    }
}

/// The numbers of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct KindCounters {
    /// Operations started.
    pub calls: u64,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// Seconds spent in waits.
    pub seconds: f64,
}

impl KindCounters {
    fn zip(self, other: Self, ints: impl Fn(u64, u64) -> u64, floats: impl Fn(f64, f64) -> f64) -> Self {
        KindCounters {
            calls: ints(self.calls, other.calls),
            sent: ints(self.sent, other.sent),
            received: ints(self.received, other.received),
            seconds: floats(self.seconds, other.seconds),
        }
    }
}

/// The numbers of every kind at one moment, or between two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CommSnapshot {
    /// Sends and receives.
    pub point_to_point: KindCounters,
    /// All-reduces.
    pub all_reduce: KindCounters,
    /// All-gathers.
    pub all_gather: KindCounters,
    /// Gathers.
    pub gather: KindCounters,
    /// Broadcasts.
    pub broadcast: KindCounters,
    /// Barriers.
    pub barrier: KindCounters,
}

impl CommSnapshot {
    /// The numbers of `kind`.
    pub fn get(&self, kind: Kind) -> KindCounters {
        match kind {
            Kind::PointToPoint => self.point_to_point,
            Kind::AllReduce => self.all_reduce,
            Kind::AllGather => self.all_gather,
            Kind::Gather => self.gather,
            Kind::Broadcast => self.broadcast,
            Kind::Barrier => self.barrier,
        }
    }

    /// What happened since `earlier`, a snapshot of the same counters.
    pub fn since(&self, earlier: &CommSnapshot) -> CommSnapshot {
        let diff = |kind| self.get(kind).zip(earlier.get(kind), u64::saturating_sub, |a, b| (a - b).max(0.0));
        CommSnapshot {
            point_to_point: diff(Kind::PointToPoint),
            all_reduce: diff(Kind::AllReduce),
            all_gather: diff(Kind::AllGather),
            gather: diff(Kind::Gather),
            broadcast: diff(Kind::Broadcast),
            barrier: diff(Kind::Barrier),
        }
    }

    /// The sum over all kinds.
    pub fn total(&self) -> KindCounters {
        Kind::ALL.iter().fold(KindCounters::default(), |sum, kind| sum.zip(self.get(*kind), |a, b| a + b, |a, b| a + b))
    }
}

impl fmt::Display for CommSnapshot {
    /// A table of the kinds that were used, and their total.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<15} {:>8} {:>16} {:>16} {:>10}", "", "calls", "bytes sent", "bytes received", "waited s")?;
        let line = |f: &mut fmt::Formatter<'_>, name: &str, k: KindCounters| {
            write!(f, "{name:<15} {:>8} {:>16} {:>16} {:>10.3}", k.calls, k.sent, k.received, k.seconds)
        };
        for kind in Kind::ALL {
            let counters = self.get(kind);
            if counters != KindCounters::default() {
                line(f, kind.name(), counters)?;
                writeln!(f)?;
            }
        }
        line(f, "total", self.total())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_totals_and_table() {
        let counters = CommCounters::default();
        counters.call(Kind::PointToPoint);
        counters.bytes(Kind::PointToPoint, 10, 20);
        let earlier = counters.snapshot();
        counters.call(Kind::AllReduce);
        counters.bytes(Kind::AllReduce, 4096, 0);
        counters.waited(Kind::AllReduce, Duration::from_millis(1500));
        let diff = counters.snapshot().since(&earlier);
        assert_eq!(diff.point_to_point, KindCounters::default());
        assert_eq!(diff.all_reduce, KindCounters { calls: 1, sent: 4096, received: 0, seconds: 1.5 });
        assert_eq!(counters.snapshot().total(), KindCounters { calls: 2, sent: 4106, received: 20, seconds: 1.5 });
        let table = diff.to_string();
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["all_reduce", "1", "4096", "0", "1.500"]);
        assert_eq!(lines[2], ["total", "1", "4096", "0", "1.500"]);
        assert_eq!(lines.len(), 3, "unused kinds are left out");
    }
}
