//! What the Learner shows: a line an epoch, on one rank.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use burn_train::LearnerSummary;
use burn_train::metric::{MetricDefinition, MetricId, NumericEntry};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining, ProgressType,
    TrainingProgress,
};

/// The mean of each metric over an epoch, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Epoch {
    /// Over the batches that were trained on.
    pub train: BTreeMap<String, f64>,
    /// Over those held out.
    pub valid: BTreeMap<String, f64>,
}

/// The epochs so far, shared with the thread that fills them.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<Vec<Epoch>>>);

impl History {
    /// A copy of the epochs so far.
    pub fn epochs(&self) -> Vec<Epoch> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Sum and count of each metric.
#[derive(Default)]
struct Means(HashMap<MetricId, (f64, usize)>);

impl Means {
    fn add(&mut self, state: MetricState) {
        if let MetricState::Numeric(entry, value) = state {
            let (value, count) = match value {
                NumericEntry::Value(value) => (value, 1),
                NumericEntry::Aggregated { aggregated_value, count } => (aggregated_value, count),
            };
            let sum = self.0.entry(entry.metric_id).or_default();
            *sum = (sum.0 + value * count as f64, sum.1 + count);
        }
    }

    fn take(&mut self, names: &HashMap<MetricId, String>) -> BTreeMap<String, f64> {
        self.0.drain().filter_map(|(id, (sum, count))| Some((names.get(&id)?.clone(), sum / count as f64))).collect()
    }
}

/// A renderer: every rank has one, and that of rank 0 prints.
#[derive(Default)]
pub struct Progress {
    show: bool,
    history: History,
    names: HashMap<MetricId, String>,
    train: Means,
    valid: Means,
}

impl Progress {
    /// Prints if `show`; fills `history`.
    pub fn new(show: bool, history: History) -> Progress {
        Progress { show, history, ..Progress::default() }
    }
}

fn line(means: &BTreeMap<String, f64>) -> String {
    means.iter().map(|(name, value)| format!("{name} {value:.4}")).collect::<Vec<_>>().join(", ")
}

impl MetricsRendererTraining for Progress {
    fn update_train(&mut self, state: MetricState) {
        self.train.add(state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.valid.add(state);
    }

    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn render_valid(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        if item.progress.is_some_and(|batches| batches.items_processed < batches.items_total) {
            return;
        }
        let epoch = Epoch { train: self.train.take(&self.names), valid: self.valid.take(&self.names) };
        if self.show {
            let all = item.global_progress;
            println!("epoch {} of {}: {}; held out: {}", all.items_processed, all.items_total, line(&epoch.train), line(&epoch.valid));
        }
        self.history.0.lock().unwrap_or_else(PoisonError::into_inner).push(epoch);
    }

    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Progress {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Progress {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
    }
}
