//! Which prefill server computes a prompt, when one after the other may fail: tries, a second one beside a slow one, and when to give up.
//! No I/O and no clock; the exchange asks, and does what it is told.
//!
//! ```text
//! failed (refused, broken off, 429, 5xx, an answer of no use)  the next server, else give up
//! too slow (`timeout`)                                         give up: the time for another one has been used
//! slow (`hedge_after`), when asked for                         the next server as well; the first answer wins
//! any other status                                             give up: what is wrong with the request, its own server says best
//! ```
//!
//! Giving up is no error by itself: the answer's own server can compute the prompt.

use attache_pool::health::Outcome;
use attache_pool::{Endpoint, Picks};
use attache_types::clock::Timestamp;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;

/// What ended one try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection came about.
    Refused,
    /// The connection broke before the answer was whole.
    Broken,
    /// It answered with this status.
    Status(u16),
    /// Its answer has nothing for the decode server to go on from.
    Unusable,
    /// The answer ended with the token that it made: there is nothing to go on with.
    Ended,
    /// No answer came in time.
    Late,
}

impl Failure {
    /// In a header and as a label.
    #[must_use]
    pub fn code(self) -> &'static str {
        match self {
            Failure::Refused => "prefill_refused",
            Failure::Broken => "prefill_broken",
            Failure::Status(429) => "prefill_busy",
            Failure::Status(500..=599) => "prefill_failed",
            Failure::Status(_) => "prefill_declined",
            Failure::Unusable => "prefill_unusable",
            Failure::Ended => "prefill_ended",
            Failure::Late => "prefill_late",
        }
    }

    /// All codes.
    pub const CODES: [&'static str; 8] = [
        "prefill_refused",
        "prefill_broken",
        "prefill_busy",
        "prefill_failed",
        "prefill_declined",
        "prefill_unusable",
        "prefill_ended",
        "prefill_late",
    ];

    /// The outcome for the health of the server that was asked; `None` when it says nothing.
    #[must_use]
    pub fn outcome(self) -> Option<Outcome> {
        match self {
            Failure::Refused => Some(Outcome::ConnectFailure),
            Failure::Broken | Failure::Late => Some(Outcome::Failure),
            Failure::Status(status) => Outcome::of_status(status),
            // It answered, if with nothing that is of use here.
            Failure::Unusable | Failure::Ended => Some(Outcome::Success),
        }
    }

    /// Whether no server has failed: the request is not to a server's taste, or there is nothing left to be done for it.
    #[must_use]
    pub fn is_nobodys(self) -> bool {
        match self {
            Failure::Status(status) => (400..500).contains(&status) && !matches!(status, 408 | 429),
            Failure::Ended => true,
            Failure::Refused | Failure::Broken | Failure::Unusable | Failure::Late => false,
        }
    }

    fn another_may_do_better(self) -> bool {
        match self {
            Failure::Refused | Failure::Broken | Failure::Unusable => true,
            Failure::Status(status) => status == 429 || status >= 500,
            Failure::Ended | Failure::Late => false,
        }
    }
}

/// One try's number within its request.
pub type Attempt = usize;

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing, for now.
    Wait,
    /// Ask the server of this try.
    Send(Attempt),
    /// Nobody computes the prompt for another.
    GiveUp(Failure),
}

/// Bounds of the tries of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Longest wait for an answer, over all tries together.
    pub timeout: Duration,
    /// A try that has no answer by then gets company.
    pub hedge_after: Option<Duration>,
}

/// The tries of one request.
#[derive(Debug)]
pub struct Attempts {
    bounds: Bounds,
    servers: Picks,
    /// When each of those that were asked was.
    asked: SmallVec<[Timestamp; 4]>,
    /// Those that may still answer.
    open: SmallVec<[Attempt; 4]>,
    first: Timestamp,
}

impl Attempts {
    /// The first of `servers` is asked `now`: its try is number 0.
    #[must_use]
    pub fn begin(servers: Picks, bounds: Bounds, now: Timestamp) -> Self {
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

    /// The server of a try.
    #[must_use]
    pub fn server(&self, attempt: Attempt) -> Option<&Arc<Endpoint>> {
        self.servers.get(attempt).filter(|_| attempt < self.asked.len())
    }

    /// Whether a try may still answer.
    #[must_use]
    pub fn awaits(&self, attempt: Attempt) -> bool {
        self.open.contains(&attempt)
    }

    /// Tries so far.
    #[must_use]
    pub fn tried(&self) -> usize {
        self.asked.len()
    }

    /// Tries that may still answer and have had time for it: as long as it takes to ask another server as well.
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

    /// When nobody is waited for any longer.
    #[must_use]
    pub fn end(&self) -> Timestamp {
        self.first.after(self.bounds.timeout)
    }

    fn hedge_at(&self) -> Option<Timestamp> {
        let latest = self.asked.last().filter(|_| self.asked.len() < self.servers.len() && !self.open.is_empty())?;
        self.bounds.hedge_after.map(|after| latest.after(after))
    }

    /// A try has failed; its server is not asked again.
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

    /// The moment of [`Attempts::deadline`] has come.
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

    /// A try has answered: the others are not awaited any longer.
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

    fn bounds(hedge: Option<u64>) -> Bounds {
        Bounds { timeout: Duration::from_secs(30), hedge_after: hedge.map(Duration::from_secs) }
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
        // One of three fails: the others may still answer.
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
        // Without company all the time there is.
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
        /// However servers fail, each is asked once at most, and the tries come to an end by the timeout.
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
