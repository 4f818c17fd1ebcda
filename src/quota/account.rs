//! What one tenant, or one model, has had.

use super::{Bound, Limits, Wall};
use std::time::Duration;

/// Requests and tokens of one minute or one day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// Requests that were let through.
    pub requests: u64,
    /// Their tokens: what they cost, or what is booked for them while they run.
    pub tokens: u64,
}

impl Use {
    fn change(&mut self, requests: i64, tokens: i64) {
        self.requests = self.requests.saturating_add_signed(requests);
        self.tokens = self.tokens.saturating_add_signed(tokens);
    }
}

/// What was booked for a request, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The second that it counts in.
    pub second: u64,
    /// The minute that it counts in.
    pub minute: u64,
    /// The day that it counts in.
    pub day: u64,
    /// Tokens booked.
    pub tokens: u64,
    /// What its tenant has had of the minute, this request included.
    pub used: Use,
}

/// Why a request is kept out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// What is used up.
    pub bound: Bound,
    /// How much of it there is.
    pub limit: u64,
    /// When it makes sense to try again.
    pub retry_after: Duration,
}

/// What came of a request that was let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Had {
    /// It never reached a server.
    Nothing,
    /// It was served for so many tokens.
    Tokens(u64),
    /// It was served, and nobody told for how many: what was booked stands.
    AsBooked,
}

/// What a request's end changes, in the second, the minute and the day in which it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Requests of the second.
    pub second_requests: i64,
    /// Requests of the minute.
    pub minute_requests: i64,
    /// Tokens of the minute.
    pub minute_tokens: i64,
    /// Requests of the day.
    pub day_requests: i64,
    /// Tokens of the day.
    pub day_tokens: i64,
}

impl Taken {
    /// What the end of the request at `at` changes. What is given back is given back to the window that it was taken from, and lost with it;
    /// what it cost beyond that is charged to the window in which that is known.
    #[must_use]
    pub fn change(&self, had: Had, at: Wall) -> Change {
        let signed = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
        let (requests, tokens) = match had {
            Had::Nothing => (-1, -signed(self.tokens)),
            Had::Tokens(tokens) => (0, signed(tokens).saturating_sub(signed(self.tokens))),
            Had::AsBooked => (0, 0),
        };
        let within = |same: bool, change: i64| if same || change > 0 { change } else { 0 };
        let (minute, day) = (self.minute == at.minute(), self.day == at.day());
        Change {
            second_requests: within(self.second == at.second(), requests),
            minute_requests: within(minute, requests),
            minute_tokens: within(minute, tokens),
            day_requests: within(day, requests),
            day_tokens: within(day, tokens),
        }
    }
}

/// The account of one tenant or model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Account {
    second: (u64, Use),
    minute: (u64, Use),
    day: (u64, Use),
    running: u64,
}

impl Account {
    /// Begins the windows of `at`. They never go back: a clock that was set back counts on in the window that it had reached.
    fn roll(&mut self, at: Wall) {
        let windows = [(&mut self.second, at.second()), (&mut self.minute, at.minute()), (&mut self.day, at.day())];
        for (window, index) in windows {
            if window.0 < index {
                *window = (index, Use::default());
            }
        }
    }

    fn used(&self, bound: Bound) -> u64 {
        match bound {
            Bound::RequestsPerDay => self.day.1.requests,
            Bound::TokensPerDay => self.day.1.tokens,
            Bound::RequestsPerMinute => self.minute.1.requests,
            Bound::TokensPerMinute => self.minute.1.tokens,
            Bound::RequestsPerSecond => self.second.1.requests,
            Bound::Concurrency => self.running,
        }
    }

    /// Books a request of `tokens`, if all bounds leave room for it. One that is larger than a bound as a whole needs all of it.
    pub(super) fn take(&mut self, limits: &Limits, tokens: u64, at: Wall) -> Result<Taken, Refused> {
        self.roll(at);
        for bound in Bound::ALL {
            let Some(limit) = limits.of(bound) else { continue };
            let wanted = if bound.counts_tokens() { tokens.min(limit) } else { 1 };
            let used = self.used(bound);
            if used >= limit || used + wanted > limit {
                return Err(Refused { bound, limit, retry_after: bound.retry_after(at) });
            }
        }
        for window in [&mut self.second, &mut self.minute, &mut self.day] {
            window.1.requests += 1;
            window.1.tokens = window.1.tokens.saturating_add(tokens);
        }
        self.running += 1;
        let (second, minute, day) = (self.second.0, self.minute.0, self.day.0);
        Ok(Taken { second, minute, day, tokens, used: self.minute.1 })
    }

    /// A request that was booked has ended.
    pub(super) fn end(&mut self, taken: &Taken, had: Had, at: Wall) {
        self.roll(at);
        let change = taken.change(had, Wall(at.0.max(Duration::from_secs(self.second.0))));
        self.second.1.change(change.second_requests, 0);
        self.minute.1.change(change.minute_requests, change.minute_tokens);
        self.day.1.change(change.day_requests, change.day_tokens);
        self.running = self.running.saturating_sub(1);
    }

    /// Nothing of it runs.
    pub(super) fn is_idle(&self) -> bool {
        self.running == 0
    }

    /// The last minute in which it was asked for anything.
    pub(super) fn last_minute(&self) -> u64 {
        self.minute.0
    }

    /// Nothing of it counts any more at `at`.
    pub(super) fn is_over(&self, at: Wall) -> bool {
        self.is_idle() && self.day.0 < at.day()
    }
}
