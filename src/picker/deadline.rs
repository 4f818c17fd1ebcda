//! Deadline admission: whether a request can still meet its deadline, before it is queued or dispatched.
//!
//! ```text
//! no deadline, or the pool's speed is unknown        handled like any other request
//! an endpoint can meet it, the pool has capacity     dispatched
//! an endpoint can meet it, the pool is full          queued, for as long as the deadline allows
//! otherwise                                          429 `deadline_unmet` with `retry-after`
//! ```
//!
//! `retry-after` is the time after which a new request is predicted to meet the deadline.
//!
//! Any client may set a deadline, trusted or not, because it can only cause the rejection of its own request. Queue
//! orderings that read deadlines use only those of known tenants, unless client headers are trusted. Time counts from
//! the arrival of the request's headers. The strategy still chooses the endpoint; `predicted-latency` ranks endpoints
//! by the same predictions.

use super::active::{ActiveConfig, PoolRuntime};
use super::decide::{RequestView, Step};
use super::lookup::{Prepared, PromptLookup};
use super::prefix::PromptRef;
use super::queues::{self, Queues};
use super::warming::Warming;
use crate::event::{DeadlineOutcome, Observer, RequestEvent};
use attache_scheduling::facts::deadline::outlook;
use attache_scheduling::facts::prediction::Targets;
use attache_scheduling::selector::LabelSelector;
use attache_scheduling::{PickContext, RequestFacts, Strategy};
use attache_types::error::{Reason, RequestError};
use std::time::Duration;

/// The input of the deadline check of one request.
pub(super) struct DeadlineCheck<'a> {
    pub(super) observer: &'a dyn Observer,
    pub(super) config: &'a ActiveConfig,
    pub(super) runtime: &'a PoolRuntime,
    pub(super) queues: Option<&'a Queues>,
    /// Its flow, for fairness in the queue.
    pub(super) flow: Option<&'a str>,
    pub(super) strategy: &'a dyn Strategy,
    pub(super) filter: Option<&'a LabelSelector<'a>>,
    pub(super) prepared: Option<&'a Prepared<'a>>,
    pub(super) prompt_ref: PromptRef<'a>,
}

/// How long a request with a deadline may be queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitBudget {
    /// Longest time in the queue after which the deadline can still be met.
    pub within: Duration,
}

/// Why the check did not admit a request.
pub(super) enum NotAdmitted {
    /// Background work on its prompt must run first.
    Warm(Warming),
    /// It is predicted to miss its deadline.
    Late(RequestError),
}

impl From<NotAdmitted> for Result<Step, RequestError> {
    fn from(held: NotAdmitted) -> Self {
        match held {
            NotAdmitted::Warm(warming) => Ok(Step::Warm(warming, None)),
            NotAdmitted::Late(error) => Err(error),
        }
    }
}

impl DeadlineCheck<'_> {
    /// How long the request may be queued. `None` without a deadline, if the body could not be parsed (`read`), or if
    /// the pool's speed is unknown.
    ///
    /// # Errors
    /// Background work that must run first, or the error response for a request that would miss its deadline.
    pub(super) fn due(
        &self,
        q: &RequestView<'_>,
        facts: &RequestFacts<'_>,
        read: bool,
    ) -> Result<Option<WaitBudget>, NotAdmitted> {
        if !self.runtime.pool.switches.deadline_admission || !read {
            return Ok(None);
        }
        let Some(bounds) = Targets::of(facts).bounds() else { return Ok(None) };
        let passed = q.now.since(q.opened).as_secs_f64();
        let snapshot = self.runtime.pool.store.load();
        let look = |p| PromptLookup::find(self.observer, self.config, p, q, self.prompt_ref, &snapshot, false);
        let lookup = self.prepared.map(look).transpose().map_err(NotAdmitted::Warm)?.flatten();
        let prompt_tokens = lookup.as_ref().map_or(facts.prompt_tokens, PromptLookup::prompt_tokens);
        let cx = PickContext {
            request: RequestFacts { prompt_tokens, ..*facts },
            subset: q.subset,
            filter: self.filter,
            prefix: lookup.as_ref().map(|l| &l.found),
            ..PickContext::new(&snapshot, q.now, self.runtime.pool.stale_after)
        };
        let candidates = self.runtime.pool.scheduler.eligible(&cx, self.strategy.roles(&cx));
        let Some(outlook) = outlook(&cx, &candidates, bounds, passed) else {
            self.judged(Some(DeadlineOutcome::Unknown));
            return Ok(None);
        };
        if outlook.spare >= 0.0 {
            let within = Duration::try_from_secs_f64(outlook.spare).unwrap_or(Duration::MAX);
            return Ok(Some(WaitBudget { within }));
        }
        let queue = self.queues.map_or(Duration::ZERO, |queues| queues.wait(facts, self.flow, q.now));
        let after = queue.saturating_add(Duration::try_from_secs_f64(outlook.fits_in).unwrap_or(Duration::MAX));
        if q.has_turn {
            self.judged(Some(DeadlineOutcome::Passed));
            return Err(NotAdmitted::Late(self::passed(after)));
        }
        self.judged(Some(DeadlineOutcome::Late));
        Err(NotAdmitted::Late(late("no endpoint is predicted to meet the request's deadline", after)))
    }

    /// Seconds that the request may be queued: by its deadline, otherwise by the objective that the strategy knows.
    pub(super) fn spare(&self, q: &RequestView<'_>, facts: &RequestFacts<'_>, due: Option<WaitBudget>) -> Option<f64> {
        due.map(|due| due.within.as_secs_f64()).or_else(|| {
            let snapshot = self.runtime.pool.store.load();
            let request = RequestFacts { waited: q.now.since(q.opened), ..*facts };
            self.strategy
                .spare(&PickContext { request, ..PickContext::new(&snapshot, q.now, self.runtime.pool.stale_after) })
        })
    }

    /// Counts the outcome of the check.
    pub(super) fn judged(&self, judged: Option<DeadlineOutcome>) {
        if let Some(judged) = judged {
            self.runtime.observer.event(RequestEvent::Deadline(judged));
        }
    }
}

/// The outcome for a request with a deadline, by the result of enqueueing it. `queued` is `None` in pools without a
/// queue; the outcome is `None` for requests that are rejected for another reason.
pub(super) fn judged(queued: Option<&Result<queues::EnqueueResult, RequestError>>) -> Option<DeadlineOutcome> {
    match queued {
        None | Some(Ok(queues::EnqueueResult::Admitted(_))) => Some(DeadlineOutcome::Fits),
        Some(Ok(queues::EnqueueResult::Queued(_))) => Some(DeadlineOutcome::Waits),
        Some(Err(error)) => (error.reason == Reason::DeadlineUnmet).then_some(DeadlineOutcome::Queue),
    }
}

/// Error response for a request that is rejected before it is queued.
pub(super) fn late(why: &'static str, after: Duration) -> RequestError {
    refused(Reason::DeadlineUnmet, why, after)
}

/// Error response for a request that was queued for as long as its deadline allows.
pub(super) fn passed(after: Duration) -> RequestError {
    refused(Reason::DeadlinePassed, "the request was dequeued too late for its deadline", after)
}

fn refused(reason: Reason, why: &'static str, after: Duration) -> RequestError {
    // `retry-after` has whole seconds, rounded up.
    let seconds = after.as_secs().saturating_add(u64::from(after.subsec_nanos() > 0));
    RequestError { retry_after: Some(Duration::from_secs(seconds.max(1))), ..RequestError::new(reason, why) }
}
