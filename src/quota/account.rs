//! Usage of one tenant or one model.

use super::{Bound, Limits, Wall, Windows};
use std::sync::Arc;
use std::time::Duration;

/// Requests and tokens of one minute or one day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// Number of requests that the quota admitted.
    pub requests: u64,
    /// Their tokens: actual ones, or reserved ones while the requests run.
    pub tokens: u64,
}

impl Use {
    fn change(&mut self, requests: i64, tokens: i64) {
        self.requests = self.requests.saturating_add_signed(requests);
        self.tokens = self.tokens.saturating_add_signed(tokens);
    }
}

/// The quota that a request needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Name of the tenant or model.
    pub name: Arc<str>,
    /// Limits of the tenant or model.
    pub limits: Limits,
    /// Whether the limits name this tenant or model explicitly, instead of being a default.
    pub is_named: bool,
    /// Length of the prompt in tokens.
    pub prompt: u64,
    /// Tokens reserved for the response until its actual number is known, and the minimum charged if that is never
    /// reported: the maximum that it may have, or fewer where that would block other requests.
    pub answer: u64,
}

impl Claim {
    /// Returns the tokens of prompt and response together.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.prompt.saturating_add(self.answer)
    }
}

/// A reservation for a request, with the time windows in which it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The time windows in which it counts.
    pub windows: Windows,
    /// Tokens of its prompt, as claimed.
    pub prompt: u64,
    /// Tokens of its response, as claimed.
    pub answer: u64,
    /// Tokens reserved in its minute.
    pub of_minute: u64,
    /// Tokens reserved in its day.
    pub of_day: u64,
    /// Usage of its tenant in the minute, including this request.
    pub used: Use,
}

/// The reason for which a request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The limit that is used up.
    pub bound: Bound,
    /// Value of the limit that is used up, in requests or tokens.
    pub limit: u64,
    /// Time after which a retry may succeed.
    pub retry_after: Duration,
}

/// Actual usage of an admitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Had {
    /// It never reached a server, or it was ended for a reason that is not the client's.
    Nothing,
    /// It was served with this number of tokens.
    Tokens(u64),
    /// It was served without a complete report: it used at least these tokens. A larger reservation stands.
    AtLeast {
        /// Tokens of the prompt, at least.
        prompt: u64,
        /// Tokens of the response, at least.
        answer: u64,
    },
}

impl Had {
    /// It was served, and its tokens are unknown.
    pub const AS_BOOKED: Had = Had::AtLeast { prompt: 0, answer: 0 };
}

/// Changes at a request's end, in the second, the minute and the day in which it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Change of the second's requests.
    pub second_requests: i64,
    /// Change of the minute's requests.
    pub minute_requests: i64,
    /// Change of the minute's tokens.
    pub minute_tokens: i64,
    /// Change of the day's requests.
    pub day_requests: i64,
    /// Change of the day's tokens.
    pub day_tokens: i64,
}

impl Taken {
    /// Returns the reservation of `claim` in `windows`; `used` is the tenant's usage of the minute after it.
    #[must_use]
    pub fn by(claim: &Claim, windows: Windows, used: Use) -> Self {
        let booked = |bound| claim.limits.booked(bound, claim.tokens());
        let (of_minute, of_day) = (booked(Bound::TokensPerMinute), booked(Bound::TokensPerDay));
        let Claim { prompt, answer, .. } = *claim;
        Self { windows, prompt, answer, of_minute, of_day, used }
    }

    /// Returns the changes at the request's end, which is in the windows `at`. Returned quota goes to the window
    /// from which it was reserved, and is lost if that is over. Usage beyond the reservation is charged to the
    /// window in which it becomes known.
    #[must_use]
    pub fn change(&self, had: Had, at: Windows) -> Change {
        let (requests, cost) = match had {
            Had::Nothing => (-1, 0),
            Had::Tokens(tokens) => (0, tokens),
            Had::AtLeast { prompt, answer } => (0, self.prompt.max(prompt).saturating_add(self.answer.max(answer))),
        };
        let signed = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
        let beyond = signed(cost.saturating_sub(self.prompt.saturating_add(self.answer)));
        let tokens = |booked: u64| if beyond > 0 { beyond } else { -signed(booked.saturating_sub(cost)) };
        let within = |same: bool, change: i64| if same || change > 0 { change } else { 0 };
        let (minute, day) = (self.windows.minute == at.minute, self.windows.day == at.day);
        Change {
            second_requests: within(self.windows.second == at.second, requests),
            minute_requests: within(minute, requests),
            minute_tokens: within(minute, tokens(self.of_minute)),
            day_requests: within(day, requests),
            day_tokens: within(day, tokens(self.of_day)),
        }
    }
}

/// Unit of usage shares: thousandths of a limit.
const ALL_OF_IT: u64 = 1_000;

/// The account of one tenant or model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Account {
    /// The current time windows; the fields below are the usage in them.
    windows: Windows,
    second: Use,
    minute: Use,
    day: Use,
    running: u64,
    /// The limits at the last reservation.
    limits: Limits,
    is_named: bool,
}

impl Account {
    /// Starts the windows of `at`. They never go back by one: after a clock was set back slightly, usage counts in the
    /// window that was reached. If the clock was set back further, it was wrong before, and its usage is discarded.
    fn roll(&mut self, at: Wall) {
        let now = at.windows();
        let windows = [
            (&mut self.windows.second, &mut self.second, now.second),
            (&mut self.windows.minute, &mut self.minute, now.minute),
            (&mut self.windows.day, &mut self.day, now.day),
        ];
        for (reached, used, now) in windows {
            if *reached != now && *reached != now + 1 {
                (*reached, *used) = (now, Use::default());
            }
        }
    }

    fn used(&self, bound: Bound) -> u64 {
        match bound {
            Bound::RequestsPerDay => self.day.requests,
            Bound::TokensPerDay => self.day.tokens,
            Bound::RequestsPerMinute => self.minute.requests,
            Bound::TokensPerMinute => self.minute.tokens,
            Bound::RequestsPerSecond => self.second.requests,
            Bound::Concurrency => self.running,
        }
    }

    /// Reserves `claim` if no limit is exceeded. A request larger than a whole limit needs, and gets, all of it.
    pub(super) fn take(&mut self, claim: &Claim, at: Wall) -> Result<Taken, Refused> {
        self.roll(at);
        (self.limits, self.is_named) = (claim.limits, claim.is_named);
        for bound in Bound::ALL {
            let Some(limit) = claim.limits.of(bound) else { continue };
            let wanted = if bound.counts_tokens() { claim.limits.booked(bound, claim.tokens()) } else { 1 };
            let used = self.used(bound);
            if used >= limit || used.saturating_add(wanted) > limit {
                return Err(Refused { bound, limit, retry_after: bound.retry_after(at) });
            }
        }
        let taken = Taken::by(claim, self.windows, Use::default());
        let booked = [(&mut self.second, 0), (&mut self.minute, taken.of_minute), (&mut self.day, taken.of_day)];
        for (used, tokens) in booked {
            used.requests += 1;
            used.tokens = used.tokens.saturating_add(tokens);
        }
        self.running += 1;
        Ok(Taken { used: self.minute, ..taken })
    }

    /// Records the end of a request with a reservation.
    pub(super) fn end(&mut self, taken: &Taken, had: Had, at: Wall) {
        self.roll(at);
        let change = taken.change(had, self.windows);
        self.second.change(change.second_requests, 0);
        self.minute.change(change.minute_requests, change.minute_tokens);
        self.day.change(change.day_requests, change.day_tokens);
        self.running = self.running.saturating_sub(1);
    }

    /// Whether none of its requests is running.
    pub(super) fn is_idle(&self) -> bool {
        self.running == 0
    }

    /// Whether the limits name it explicitly.
    pub(super) fn is_named(&self) -> bool {
        self.is_named
    }

    /// Sort key for eviction at `at`, smallest first: the largest used share of its limits in thousandths, then the
    /// minute of its last request.
    pub(super) fn weight(&self, at: Wall) -> (u64, u64) {
        let mut now = *self;
        now.roll(at);
        let share = |bound| now.used(bound).saturating_mul(ALL_OF_IT).checked_div(now.limits.of(bound)?);
        let most = Bound::ALL.into_iter().filter_map(share).max();
        (most.unwrap_or(0).min(ALL_OF_IT), self.windows.minute)
    }

    /// Whether none of its usage counts any more at `at`.
    pub(super) fn is_over(&self, at: Wall) -> bool {
        let day = at.windows().day;
        self.is_idle() && self.windows.day != day && self.windows.day != day + 1
    }
}

/// A request's place among those that run, in a store that several replicas share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its number among the requests of this process.
    pub request: u64,
    /// Where it counts, in the order of [`Bound::ALL`].
    pub counted: [bool; Bound::ALL.len()],
}
