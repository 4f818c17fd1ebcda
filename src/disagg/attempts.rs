//! Retry and hedging of the prefill of one request: which prefill worker is called next, and when to give up. No I/O
//! and no clock; the exchange calls it and acts on the result.
//!
//! ```text
//! failed (refused, broken off, 429, 5xx, unusable response)    next worker, else give up
//! too slow (`timeout`)                                         give up: no time is left for another worker
//! slow (`hedge_after`), if enabled                             next worker as well; the first response wins
//! any other status                                             give up: the decode worker reports the client's mistake
//! ```
//!
//! Giving up is not an error by itself: the decode worker can prefill the prompt too.

use attache_pool::health::HealthOutcome;
use attache_pool::{Endpoint, Picks};
use attache_types::clock::Timestamp;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;

attache_types::labels! {
    /// How a call to a prefill worker failed, by code: [`Failure`] without the status of the response.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum FailedCall {
        Refused => "prefill_refused",
        Broken => "prefill_broken",
        Busy => "prefill_busy",
        Failed => "prefill_failed",
        Declined => "prefill_declined",
        Unusable => "prefill_unusable",
        Ended => "prefill_ended",
        Late => "prefill_late",
    }
}

/// How one attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection could be established.
    Refused,
    /// The connection broke before the response was complete.
    Broken,
    /// The worker responded with this status.
    Status(u16),
    /// The response lacks what the decode worker needs to continue.
    Unusable,
    /// The response ended with its first token: there is nothing to continue.
    Ended,
    /// No response arrived in time.
    Late,
    /// No worker was there to call.
    Absent,
}

impl Failure {
    /// Code for a response header and a metric label.
    #[must_use]
    pub fn code(self) -> &'static str {
        let call = match self {
            Failure::Refused => FailedCall::Refused,
            Failure::Broken => FailedCall::Broken,
            Failure::Status(429) => FailedCall::Busy,
            Failure::Status(500..=599) => FailedCall::Failed,
            Failure::Status(_) => FailedCall::Declined,
            Failure::Unusable => FailedCall::Unusable,
            Failure::Ended => FailedCall::Ended,
            Failure::Late => FailedCall::Late,
            // No call was made.
            Failure::Absent => return "no_prefill_endpoint",
        };
        call.label()
    }

    /// The effect on the health of the worker that was called; `None` if it has none.
    #[must_use]
    pub fn outcome(self) -> Option<HealthOutcome> {
        match self {
            Failure::Refused => Some(HealthOutcome::ConnectFailure),
            Failure::Broken | Failure::Late => Some(HealthOutcome::Failure),
            Failure::Status(status) => HealthOutcome::of_status(status),
            // The worker responded, though the response is of no use here.
            Failure::Unusable | Failure::Ended => Some(HealthOutcome::Success),
            Failure::Absent => None,
        }
    }

    /// Whether the failure is not the worker's fault: the request is invalid for it, or already complete.
    #[must_use]
    pub fn is_nobodys(self) -> bool {
        match self {
            Failure::Status(status) => (400..500).contains(&status) && !matches!(status, 408 | 429),
            Failure::Ended => true,
            Failure::Refused | Failure::Broken | Failure::Unusable | Failure::Late | Failure::Absent => false,
        }
    }

    fn another_may_do_better(self) -> bool {
        match self {
            Failure::Refused | Failure::Broken | Failure::Unusable => true,
            Failure::Status(status) => status == 429 || status >= 500,
            Failure::Ended | Failure::Late | Failure::Absent => false,
        }
    }
}

/// Number of an attempt within its request.
pub type Attempt = usize;

/// The next action for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Wait for the next result or deadline.
    Wait,
    /// Call the worker of this attempt.
    Send(Attempt),
    /// Give up: no prefill worker prefills the prompt.
    GiveUp(Failure),
}

/// Time limits for the attempts of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptLimits {
    /// Longest wait for a response, over all attempts together.
    pub timeout: Duration,
    /// Time without a response after which a second worker is called too.
    pub hedge_after: Option<Duration>,
}

/// The attempts of one request.
#[derive(Debug)]
pub struct Attempts {
    bounds: AttemptLimits,
    servers: Picks,
    /// Start time of each attempt so far.
    asked: SmallVec<[Timestamp; 4]>,
    /// Attempts whose response is outstanding.
    open: SmallVec<[Attempt; 4]>,
    first: Timestamp,
}

impl Attempts {
    /// Starts with attempt 0, a call to the first of `servers` at `now`.
    #[must_use]
    pub fn begin(servers: Picks, bounds: AttemptLimits, now: Timestamp) -> Self {
        let mut attempts = Self { bounds, servers, asked: SmallVec::new(), open: SmallVec::new(), first: now };
        attempts.next(now);
        attempts
    }

    fn next(&mut self, now: Timestamp) -> Option<Attempt> {
        let attempt = self.asked.len();
        self.servers.get(attempt)?;
        self.asked.push(now);
        self.open.push(attempt);
        Some(attempt)
    }

    /// The worker of an attempt.
    #[must_use]
    pub fn server(&self, attempt: Attempt) -> Option<&Arc<Endpoint>> {
        self.servers.get(attempt).filter(|_| attempt < self.asked.len())
    }

    /// Whether the response of an attempt is outstanding.
    #[must_use]
    pub fn awaits(&self, attempt: Attempt) -> bool {
        self.open.contains(&attempt)
    }

    /// Number of attempts so far.
    #[must_use]
    pub fn tried(&self) -> usize {
        self.asked.len()
    }

    /// Number of outstanding attempts that have had the time after which another worker is called.
    pub fn overdue(&self, now: Timestamp) -> impl Iterator<Item = Attempt> {
        let patience = self.bounds.hedge_after.unwrap_or(self.bounds.timeout);
        let had_time = move |attempt: &&Attempt| self.asked.get(**attempt).is_some_and(|at| at.after(patience) <= now);
        self.open.iter().filter(had_time).copied()
    }

    /// When [`Attempts::on_deadline`] is due.
    #[must_use]
    pub fn deadline(&self) -> Timestamp {
        self.hedge_at().map_or(self.end(), |at| at.min(self.end()))
    }

    /// When all outstanding attempts are given up.
    #[must_use]
    pub fn end(&self) -> Timestamp {
        self.first.after(self.bounds.timeout)
    }

    fn hedge_at(&self) -> Option<Timestamp> {
        let latest = self.asked.last().filter(|_| self.asked.len() < self.servers.len() && !self.open.is_empty())?;
        self.bounds.hedge_after.map(|after| latest.after(after))
    }

    /// Records that an attempt has failed; its worker is not called again.
    pub fn failed(&mut self, attempt: Attempt, failure: Failure, now: Timestamp) -> Next {
        let before = self.open.len();
        self.open.retain(|open| *open != attempt);
        if self.open.len() == before {
            return Next::Wait;
        }
        let again = failure.another_may_do_better() && now < self.end();
        match if again { self.next(now) } else { None } {
            Some(next) => Next::Send(next),
            None if !self.open.is_empty() && failure.another_may_do_better() => Next::Wait,
            None => {
                self.open.clear();
                Next::GiveUp(failure)
            }
        }
    }

    /// Handles the moment of [`Attempts::deadline`].
    pub fn on_deadline(&mut self, now: Timestamp) -> Next {
        if now >= self.end() {
            self.open.clear();
            return Next::GiveUp(Failure::Late);
        }
        match self.hedge_at().filter(|at| *at <= now).and_then(|_| self.next(now)) {
            Some(next) => Next::Send(next),
            None => Next::Wait,
        }
    }

    /// Records that an attempt succeeded: the others are given up.
    pub fn answered(&mut self) {
        self.open.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_pool::EndpointSpec;
    use attache_types::ids::EndpointId;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    fn servers(count: u32) -> Picks {
        let one = |id: u32| {
            let port = 8_000 + u16::try_from(id).unwrap();
            Arc::new(Endpoint::new(EndpointId(id), EndpointSpec::at(([127, 0, 0, 1], port).into())))
        };
        (0..count).map(one).collect()
    }

    fn bounds(hedge: Option<u64>) -> AttemptLimits {
        AttemptLimits { timeout: Duration::from_secs(30), hedge_after: hedge.map(Duration::from_secs) }
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * SECOND)
    }

    #[test]
    fn failures_that_another_server_may_not_have_are_tried_there() {
        for failure in
            [Failure::Refused, Failure::Broken, Failure::Unusable, Failure::Status(503), Failure::Status(429)]
        {
            let mut tries = Attempts::begin(servers(2), bounds(None), at(0));
            assert_eq!(tries.failed(0, failure, at(1)), Next::Send(1), "{failure:?}");
            assert_eq!(tries.failed(1, failure, at(2)), Next::GiveUp(failure), "{failure:?}");
        }
        for failure in [Failure::Status(400), Failure::Status(404), Failure::Late] {
            let mut tries = Attempts::begin(servers(2), bounds(None), at(0));
            assert_eq!(tries.failed(0, failure, at(1)), Next::GiveUp(failure), "{failure:?}");
        }
    }

    #[test]
    fn a_slow_server_gets_company_once_each_and_the_end_is_the_end() {
        let mut tries = Attempts::begin(servers(3), bounds(Some(2)), at(0));
        assert_eq!(tries.deadline(), at(2));
        assert_eq!(tries.on_deadline(at(2)), Next::Send(1));
        assert_eq!(tries.deadline(), at(4));
        assert_eq!(tries.on_deadline(at(3)), Next::Wait);
        assert_eq!(tries.on_deadline(at(4)), Next::Send(2));
        assert_eq!(tries.deadline(), at(30));
        assert!(tries.awaits(0) && tries.awaits(1) && tries.awaits(2));
        // One of three fails: the others may still respond.
        assert_eq!(tries.failed(1, Failure::Broken, at(5)), Next::Wait);
        assert_eq!(tries.failed(1, Failure::Broken, at(6)), Next::Wait);
        assert_eq!(tries.on_deadline(at(30)), Next::GiveUp(Failure::Late));
        assert!(!tries.awaits(0) && !tries.awaits(2));
    }

    #[test]
    fn who_was_asked_a_moment_ago_has_had_no_time() {
        let overdue = |tries: &Attempts, now| tries.overdue(at(now)).collect::<Vec<_>>();
        let mut tries = Attempts::begin(servers(3), bounds(Some(2)), at(0));
        assert!(overdue(&tries, 1).is_empty());
        tries.on_deadline(at(2));
        assert_eq!((overdue(&tries, 2), overdue(&tries, 3)), (vec![0], vec![0]));
        tries.failed(0, Failure::Broken, at(3));
        assert_eq!((overdue(&tries, 3), overdue(&tries, 4)), (vec![], vec![1]));
        assert_eq!(overdue(&tries, 5), [1, 2]);
        // Without hedging, the attempt has all the time.
        let mut tries = Attempts::begin(servers(2), bounds(None), at(0));
        assert_eq!((overdue(&tries, 29), overdue(&tries, 30)), (vec![], vec![0]));
        tries.failed(0, Failure::Broken, at(29));
        assert!(overdue(&tries, 30).is_empty());
    }

    #[test]
    fn without_hedging_only_the_end_is_waited_for() {
        let mut tries = Attempts::begin(servers(2), bounds(None), at(0));
        assert_eq!(tries.deadline(), at(30));
        assert_eq!(tries.on_deadline(at(29)), Next::Wait);
        assert_eq!(tries.on_deadline(at(30)), Next::GiveUp(Failure::Late));
    }

    #[test]
    fn a_server_that_fails_after_the_end_has_no_successor() {
        let mut tries = Attempts::begin(servers(2), bounds(None), at(0));
        assert_eq!(tries.failed(0, Failure::Broken, at(30)), Next::GiveUp(Failure::Broken));
    }

    proptest! {
        /// However workers fail, each is called once at most, and the attempts end by the timeout.
        #[test]
        fn every_course_ends(
            count in 1u32..5,
            hedge in proptest::option::of(1u64..40),
            steps in proptest::collection::vec((0usize..5, 0u8..7, 0u64..8), 0..30),
        ) {
            let failures = [
                Failure::Refused, Failure::Broken, Failure::Unusable, Failure::Late,
                Failure::Status(500), Failure::Status(429), Failure::Status(400),
            ];
            let mut tries = Attempts::begin(servers(count), bounds(hedge), at(0));
            let (mut now, mut sent, mut over) = (0, vec![0], false);
            for (attempt, failure, wait) in steps {
                now += wait;
                let next = if tries.deadline() <= at(now) {
                    tries.on_deadline(at(now))
                } else {
                    tries.failed(attempt, failures[usize::from(failure)], at(now))
                };
                match next {
                    Next::Send(attempt) => {
                        prop_assert!(!over && now < 30 && !sent.contains(&attempt));
                        prop_assert!(tries.server(attempt).is_some());
                        sent.push(attempt);
                    }
                    Next::GiveUp(_) => {
                        over = true;
                        prop_assert!(sent.iter().all(|a| !tries.awaits(*a)));
                        break;
                    }
                    Next::Wait => prop_assert!(sent.iter().any(|a| tries.awaits(*a)), "somebody is waited for"),
                }
            }
            if !over {
                prop_assert_eq!(tries.on_deadline(at(30)), Next::GiveUp(Failure::Late));
            }
        }
    }
}
