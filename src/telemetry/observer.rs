//! The observers of the picker: each event becomes a counter, a histogram sample, a span event or a record.

use super::by_name::NameCounts;
use super::decisions::Decisions;
use super::metrics::{LEG_OK, Metrics, PoolMetrics};
use super::queues::QueueMetrics;
use attache_disagg::Failure;
use attache_pool::health::Verdict;
use attache_quota::Subject;
use attache_request::event::{
    DecisionRecord, Event, KeptExplanation, NameEvent, NameObserver, Observer, PoolObserver, QueueEvent, QueueObserver,
    RequestEvent,
};
use attache_request::settings::ExplainSettings;
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// Metrics and the decision log of one process.
#[derive(Clone, Debug)]
pub struct Telemetry {
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// The last decisions.
    pub decisions: Arc<Decisions>,
}

impl Observer for Telemetry {
    fn event(&self, event: Event) {
        let metrics = &self.metrics;
        match event {
            Event::Degraded(mode) => metrics.degraded.count(mode),
            Event::Limit(limit) => metrics.limits.count(limit),
            Event::Panic => _ = metrics.panics.inc(),
            Event::Health(Verdict::Capped) => _ = metrics.ejections_capped.inc(),
            // Endpoints count their ejections themselves, with the names that their series have.
            Event::Health(Verdict::Kept | Verdict::Ejected) => {}
            Event::ErrorInStream => _ = metrics.errors_in_stream.inc(),
            Event::Reservation(outcome) => metrics.reservations.count(outcome),
            Event::SessionEnd(by) => metrics.session_ends.count(by),
            Event::PrefillLeg(result) => metrics.prefill_leg(result.map_or_else(Failure::code, |()| LEG_OK)),
        }
    }

    fn named(&self, subject: Subject, name: &str, now: Timestamp) -> Arc<dyn NameObserver> {
        match subject {
            Subject::Model => self.metrics.by_name.model(name, now),
            Subject::Tenant => self.metrics.by_name.tenant(name, now),
        }
    }

    fn keeps_decisions(&self) -> bool {
        self.decisions.enabled()
    }

    fn log(&self, record: DecisionRecord) {
        self.decisions.push(record);
    }

    fn begin_explanation(&self, settings: &ExplainSettings, now: Timestamp) -> Option<Timestamp> {
        self.decisions.begin_explanation(settings, now)
    }

    fn explained(&self, settings: &ExplainSettings, began: Timestamp, explanation: KeptExplanation) {
        self.decisions.keep(settings, began, explanation);
    }
}

impl PoolObserver for PoolMetrics {
    fn event(&self, event: RequestEvent<'_>) {
        match event {
            RequestEvent::Split(outcome) => self.splits.count(outcome),
            RequestEvent::Diverted { model, now } => self.diverted(model, now),
            RequestEvent::Prefilled(after) => self.prefilled(after),
            RequestEvent::Deadline(outcome) => self.deadlines.count(outcome),
            RequestEvent::Status(status) => self.status(status),
            RequestEvent::FirstByte { after, exemplar } => self.first_byte(after, exemplar),
            RequestEvent::Ended { end, after, usage, exemplar } => {
                self.ended(end, after, exemplar);
                self.prompt_tokens.inc_by(usage.prompt_tokens.unwrap_or(0));
                self.cached_tokens.inc_by(usage.cached_tokens.unwrap_or(0));
                self.completion_tokens.inc_by(usage.completion_tokens.unwrap_or(0));
            }
        }
    }
}

impl QueueObserver for QueueMetrics {
    fn event(&self, event: QueueEvent) {
        match event {
            QueueEvent::Outcome(outcome) => self.fates.count(outcome),
            QueueEvent::Waited(wait) => self.waited(wait),
            QueueEvent::Holds { requests, bytes } => self.holds(requests, bytes),
            QueueEvent::Deadline(outcome) => self.deadlines.count(outcome),
        }
    }
}

impl NameObserver for NameCounts {
    fn event(&self, event: NameEvent) {
        match event {
            NameEvent::Routed => self.routed(),
            NameEvent::Diverted => self.diverted(),
            NameEvent::Matched { cached_tokens, prompt_tokens } => self.matched(cached_tokens, prompt_tokens),
            NameEvent::Used(usage) => self.had(&usage),
            NameEvent::Refused(bound) => self.refused(bound),
            NameEvent::Decided(duration) => self.decided_in(duration),
        }
    }
}
