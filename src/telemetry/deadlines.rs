//! Metrics of requests with a deadline for their first token or for all tokens.

use attache_request::event::DeadlineOutcome;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Label {
    pool: String,
    outcome: &'static str,
}

/// Deadline metrics of all pools.
#[derive(Debug, Default)]
pub(super) struct DeadlineFamily(Family<Label, Counter>);

impl DeadlineFamily {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let family = Self::default();
        let help = "requests with a deadline, of pools with `deadlineAdmission`: `fits`, `waits` in the queue, \
                    `unknown` because nothing is learned; rejected are `late` (no server meets it), `queue` (too \
                    long), `passed` (dequeued too late)";
        registry.register("deadlines", help, family.0.clone());
        family
    }

    pub(super) fn pool(&self, name: &str) -> DeadlineMetrics {
        let counter = |judged: DeadlineOutcome| {
            self.0.get_or_create_owned(&Label { pool: name.to_owned(), outcome: judged.label() })
        };
        DeadlineMetrics(DeadlineOutcome::ALL.map(counter))
    }

    pub(super) fn forget(&self, pool: &str) {
        for judged in DeadlineOutcome::ALL {
            self.0.remove(&Label { pool: pool.to_owned(), outcome: judged.label() });
        }
    }
}

/// Deadline metrics of one pool.
#[derive(Debug)]
pub struct DeadlineMetrics([Counter; 6]);

impl DeadlineMetrics {
    /// Number of requests with this verdict.
    #[must_use]
    pub fn counts(&self) -> [(&'static str, u64); 6] {
        let mut counts = DeadlineOutcome::ALL.map(|judged| (judged.label(), 0));
        counts.iter_mut().zip(&self.0).for_each(|((_, count), counter)| *count = counter.get());
        counts
    }

    /// Counts a verdict.
    pub fn judged(&self, judged: DeadlineOutcome) {
        if let Some(counter) = DeadlineOutcome::ALL.iter().position(|j| *j == judged).and_then(|i| self.0.get(i)) {
            counter.inc();
        }
    }
}
