//! What a run leaves for programs to read.

use std::path::Path;
use std::time::Duration;

use burn_spatial::stats::Snapshot;
use burn_spatial_io::whole_file;
use serde::Serialize;

use super::Error;
use super::ranks::{Rank, on_first};

/// How long steps took.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How many.
    pub steps: usize,
    /// Time in epochs, reading included, checkpoints not.
    pub in_steps: Duration,
    /// Time of the whole training.
    pub whole: Duration,
}

#[derive(Serialize)]
struct Metrics<'a, R> {
    grid: String,
    ranks: usize,
    #[serde(flatten)]
    results: &'a R,
    steps: usize,
    seconds: f64,
    seconds_per_step: f64,
    /// An entry a rank, where the system tells.
    peak_memory_mib: Vec<Option<f64>>,
    /// An entry a rank.
    communication: Vec<serde_json::Value>,
    losses: &'a [f32],
}

#[derive(Serialize)]
struct OfRank {
    peak_memory_mib: Option<f64>,
    communication: Snapshot,
}

/// The most memory this process had, from Linux's /proc. Thread ranks share it.
fn peak_memory_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok().map(|kib| kib / 1024.0)
}

/// Writes `metrics.json` into `folder`: `results` beside what every program tells. Collective: rank 0 writes what all
/// ranks counted.
///
/// # Errors
/// [`Error::Io`].
pub fn write(rank: &Rank, folder: &Path, results: &impl Serialize, losses: &[f32], timing: Timing) -> Result<(), Error> {
    let own = OfRank { peak_memory_mib: peak_memory_mib(), communication: rank.device.stats() };
    let own = serde_json::to_vec(&own).map_err(|e| Error::First(e.to_string()))?;
    let all = rank.world().gather(0, &own)?;
    on_first(rank.world(), || {
        let of_ranks = all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<Vec<serde_json::Value>, _>>();
        let of_ranks = of_ranks.map_err(|e| Error::First(e.to_string()))?;
        let metrics = Metrics {
            grid: rank.mesh.grid().to_string(),
            ranks: rank.mesh.grid().ranks(),
            results,
            steps: timing.steps,
            seconds: timing.whole.as_secs_f64(),
            seconds_per_step: timing.in_steps.as_secs_f64() / timing.steps.max(1) as f64,
            peak_memory_mib: of_ranks.iter().map(|r| r["peak_memory_mib"].as_f64()).collect(),
            communication: of_ranks.iter().map(|r| r["communication"].clone()).collect(),
            losses,
        };
        let text = serde_json::to_vec_pretty(&metrics).map_err(|e| Error::First(e.to_string()))?;
        let path = folder.join("metrics.json");
        whole_file(&path, |partial| std::fs::write(partial, &text).map_err(Error::io(partial)), Error::io(&path))
    })
}
