//! Sums the library's spans by what they are.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use burn_spatial::trace::TARGETS;
use tracing::span::{Attributes, Id};
use tracing::{Metadata, Subscriber};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, prelude::*};

static NANOS: [AtomicU64; TARGETS.len()] = [const { AtomicU64::new(0) }; TARGETS.len()];

/// How often each span was left, and the time in it, spans within it included.
static SPANS: Mutex<BTreeMap<&'static str, (u64, Duration)>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// For each target the spans this thread is in, and when it entered the outermost.
    static INSIDE: [Cell<(u32, Option<Instant>)>; TARGETS.len()] = const { [const { Cell::new((0, None)) }; TARGETS.len()] };
}

fn index(metadata: &Metadata<'_>) -> Option<usize> {
    TARGETS.iter().position(|target| *target == metadata.target())
}

/// What a span adds to, and when it was entered.
struct Target(usize, Instant);

struct Totals;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Totals {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        metadata.is_span() && index(metadata).is_some()
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if let (Some(span), Some(target)) = (context.span(id), index(attributes.metadata())) {
            span.extensions_mut().insert(Target(target, Instant::now()));
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(target) = context.span(id).and_then(|span| span.extensions().get::<Target>().map(|t| t.0)) else { return };
        INSIDE.with(|inside| {
            let (depth, since) = inside[target].get();
            inside[target].set((depth + 1, since.or_else(|| Some(Instant::now()))));
        });
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let Some((target, entered)) = span.extensions().get::<Target>().map(|t| (t.0, t.1)) else { return };
        if let Ok(mut spans) = SPANS.lock() {
            let (count, time) = spans.entry(span.name()).or_default();
            *count += 1;
            *time += entered.elapsed();
        }
        INSIDE.with(|inside| match inside[target].get() {
            (1, Some(since)) => {
                NANOS[target].fetch_add(since.elapsed().as_nanos() as u64, Relaxed);
                inside[target].set((0, None));
            }
            (depth, since) => inside[target].set((depth.saturating_sub(1), since)),
        });
    }
}

/// Starts to count, in the whole process.
pub fn start() {
    tracing_subscriber::registry().with(Totals).init();
}

/// Each span so far: its name, how often it was left, and the seconds in it, spans within it included. They are entered as
/// soon as they are made.
pub fn spans() -> Vec<(&'static str, u64, f64)> {
    SPANS.lock().map(|spans| spans.iter().map(|(name, (count, time))| (*name, *count, time.as_secs_f64())).collect()).unwrap_or_default()
}

/// Forgets the spans so far.
pub fn clear_spans() {
    if let Ok(mut spans) = SPANS.lock() {
        spans.clear();
    }
}

/// Seconds in spans of `target` so far; spans within spans of the same target count once.
///
/// # Panics
/// If it is none of [`TARGETS`].
pub fn seconds(target: &str) -> f64 {
    let index = TARGETS.iter().position(|t| *t == target).expect("one of the library's targets");
    NANOS[index].load(Relaxed) as f64 * 1e-9
}
