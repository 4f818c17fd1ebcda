//! Whether a request can still be served in the time that it asks for, before it waits or is sent anywhere.
//!
//! ```text
//! asks for nothing, or nothing is known of the pool's speed    it goes on as any other
//! a server has it in time, and there is room                   it goes on
//! a server has it in time after the queue before the pool      it waits, and no longer than its deadline allows
//! else                                                         429 `deadline_unmet`, `retry-after` the wait after which it is served in time
//! ```
//!
//! A client says its deadline itself, trusted or not: a deadline lets nobody by, it only has the request refused that names it. The orders of
//! a queue that read deadlines believe those of known tenants, or of all where clients' headers are trusted. Time counts from the request's headers. Which server gets the request stays
//! the strategy's choice; `predicted-latency` ranks by the same seconds.

use super::active::{ActiveConfig, PoolRuntime};
use super::decide::{RequestView, Step};
use super::lookup::{PromptLookup, Prepared};
use super::picker::Picker;
use super::prefix::PromptRef;
use super::queues::{self, Queues};
use super::warming::Warming;
use crate::event::{DeadlineOutcome, RequestEvent};
use attache_scheduling::facts::deadline::outlook;
use attache_scheduling::facts::prediction::Targets;
use attache_scheduling::selector::LabelSelector;
use attache_scheduling::{PickContext, RequestFacts, Strategy};
use attache_types::error::{Reason, RequestError};
use std::time::Duration;

/// What is known of the request.
pub(super) struct DeadlineCheck<'a> {
    pub(super) picker: &'a Picker,
    pub(super) config: &'a ActiveConfig,
    pub(super) runtime: &'a PoolRuntime,
    pub(super) queues: Option<&'a Queues>,
    /// Whose it is.
    pub(super) flow: Option<&'a str>,
    pub(super) strategy: &'a dyn Strategy,
    pub(super) filter: Option<&'a LabelSelector<'a>>,
    pub(super) prepared: Option<&'a Prepared<'a>>,
    pub(super) asked: PromptRef<'a>,
}

/// A request that is served in time if it has its turn in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitBudget {
    /// How long it may wait for its turn.
    pub within: Duration,
}

/// Why a request does not go on now.
pub(super) enum NotAdmitted {
    /// Its prompt has to be read elsewhere first.
    Warm(Warming),
    /// It would be late.
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
    /// How long the request may wait; `None` when it asks for nothing, can't be `read`, or nothing is known of the pool's speed.
    ///
    /// # Errors
    /// What holds it.
    pub(super) fn due(&self, q: &RequestView<'_>, facts: &RequestFacts<'_>, read: bool) -> Result<Option<WaitBudget>, NotAdmitted> {
        if !self.runtime.pool.deadline_admission || !read {
            return Ok(None);
        }
        let Some(bounds) = Targets::of(facts).bounds() else { return Ok(None) };
        let passed = q.now.since(q.opened).as_secs_f64();
        let snapshot = self.runtime.pool.store.load();
        let look = |p| PromptLookup::find(self.picker, self.config, p, q, self.asked, &snapshot, false);
        let looked = self.prepared.map(look).transpose().map_err(NotAdmitted::Warm)?.flatten();
        let prompt_tokens = looked.as_ref().map_or(facts.prompt_tokens, PromptLookup::prompt_tokens);
        let cx = PickContext {
            request: RequestFacts { prompt_tokens, ..*facts },
            filter: self.filter,
            prefix: looked.as_ref().map(|l| &l.found),
            ..PickContext::new(&snapshot, q.now, self.runtime.pool.stale_after)
        };
        let candidates = self.runtime.pool.scheduler.eligible(&cx, q.subset, self.strategy.roles(&cx));
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
        Err(NotAdmitted::Late(late("no server is predicted to serve this request in the time that it asks for", after)))
    }

    /// Seconds that the request may wait for its turn: what is left of its own deadline, else what the strategy knows.
    pub(super) fn spare(&self, q: &RequestView<'_>, facts: &RequestFacts<'_>, due: Option<WaitBudget>) -> Option<f64> {
        due.map(|due| due.within.as_secs_f64()).or_else(|| {
            let snapshot = self.runtime.pool.store.load();
            let request = RequestFacts { waited: q.now.since(q.opened), ..*facts };
            self.strategy
                .spare(&PickContext { request, ..PickContext::new(&snapshot, q.now, self.runtime.pool.stale_after) })
        })
    }

    /// Counts what was made of the request.
    pub(super) fn judged(&self, judged: Option<DeadlineOutcome>) {
        if let Some(judged) = judged {
            self.runtime.observer.event(RequestEvent::Deadline(judged));
        }
    }
}

/// What was made of a request that is due, now that it has asked for its turn; `None` where no turns are taken.
pub(super) fn judged(turn: Option<&Result<queues::EnqueueResult, RequestError>>) -> Option<DeadlineOutcome> {
    match turn {
        None | Some(Ok(queues::EnqueueResult::Admitted(_))) => Some(DeadlineOutcome::Fits),
        Some(Ok(queues::EnqueueResult::Queued(_))) => Some(DeadlineOutcome::Waits),
        Some(Err(error)) => (error.reason == Reason::DeadlineUnmet).then_some(DeadlineOutcome::Queue),
    }
}

/// Refused at once.
pub(super) fn late(why: &'static str, after: Duration) -> RequestError {
    refused(Reason::DeadlineUnmet, why, after)
}

/// Refused after a wait that took as long as the deadline allows.
pub(super) fn passed(after: Duration) -> RequestError {
    refused(Reason::DeadlinePassed, "the request was dequeued too late for its deadline", after)
}

fn refused(reason: Reason, why: &'static str, after: Duration) -> RequestError {
    // Whole seconds are told: what has begun counts.
    let seconds = after.as_secs().saturating_add(u64::from(after.subsec_nanos() > 0));
    RequestError { retry_after: Some(Duration::from_secs(seconds.max(1))), ..RequestError::new(reason, why) }
}
