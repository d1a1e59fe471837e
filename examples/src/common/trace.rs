//! Warnings on stderr, and the timeline that `--trace` asks for.

use std::fs::File;
use std::io::IsTerminal;
use std::path::Path;

use burn_spatial::trace::TARGETS;
use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::{Layer, fmt, prelude::*};

use super::{Error, launcher};

/// Starts both. The timeline is complete once the guard is dropped.
///
/// # Errors
/// [`Error::Io`] when the timeline cannot be written.
pub fn start(timeline: Option<&Path>) -> Result<Option<FlushGuard>, Error> {
    let log = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal()).with_filter(LevelFilter::WARN);
    let registry = tracing_subscriber::registry().with(log);
    let Some(folder) = timeline else {
        registry.init();
        return Ok(None);
    };
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    let path = folder.join(format!("trace-{}.json", launcher::rank().unwrap_or(0)));
    let file = File::create(&path).map_err(Error::io(&path))?;
    let (chrome, guard) = ChromeLayerBuilder::new().writer(file).include_args(false).build();
    registry.with(chrome.with_filter(Targets::new().with_targets(TARGETS.map(|target| (target, LevelFilter::DEBUG))))).init();
    Ok(Some(guard))
}
