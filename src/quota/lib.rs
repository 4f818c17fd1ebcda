//! What tenants, and models, may have: requests a second, requests and tokens a minute and a day, requests at once.
//!
//! ```text
//! take     before the decision: all bounds are looked at, and either all are booked or none; a tenant's answer is booked at the length that it
//!          may have, a model's at a usual one at most, in no window at more than its bound
//! settle   when the answer has ended: what it really cost takes the place of what was booked
//! give back   the request never reached a server: nothing was had
//! ```
//!
//! Seconds, minutes and days are those of the wall clock (UTC), as AIBrix counts them. [`Book`] is the memory of one process; a store that several
//! share does the same steps by the same figures ([`Taken`], [`Change`]). Pure: the wall clock's time is an argument.
//!
//! **Owns** limits, their settings and windows, what is booked in them, and AIBrix's user records.
//! **Called by** `picker::quotas` and by the Redis store.
//! **Must not** do I/O, or name a tenant in a metric.
//!
//! Read first: `lib.rs`, `book.rs`, `account.rs`.

mod account;
mod book;
mod record;
mod settings;

pub use account::{Change, Claim, Had, Place, Refused, Taken, Use};
pub use book::{Book, DEFAULT_MAX_TENANTS};
pub use record::{DEFAULT_RECORD_RPM, DEFAULT_TOKENS_PER_REQUEST, UserRecord};
pub use settings::{CountIn, OnStoreFailure, OnUnknownUser, TenantSettings, UnknownPaths, UserRecordSettings};

use std::time::Duration;

/// Whom limits are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// Who sends requests.
    Tenant,
    /// What they are for, whoever sends them.
    Model,
}

/// Seconds of a minute.
const MINUTE: u64 = 60;
/// Seconds of a day.
const DAY: u64 = 86_400;

/// A time of the wall clock, since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wall(pub Duration);

impl Wall {
    /// Which second, minute and day it is.
    #[must_use]
    pub fn windows(self) -> Windows {
        let second = self.0.as_secs();
        Windows { second, minute: second / MINUTE, day: second / DAY }
    }

    /// Until a window of `seconds` turns: whole seconds, rounded up, so that nobody comes back a moment too early.
    fn turns(self, seconds: u64) -> Duration {
        Duration::from_secs(seconds - self.0.as_secs() % seconds)
    }
}

/// The windows that a moment is in, each by its number since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Windows {
    /// Which second.
    pub second: u64,
    /// Which minute.
    pub minute: u64,
    /// Which day.
    pub day: u64,
}

/// What is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bound {
    /// Requests of a day.
    RequestsPerDay,
    /// Tokens of a day, prompts and answers.
    TokensPerDay,
    /// Requests of a minute.
    RequestsPerMinute,
    /// Tokens of a minute, prompts and answers.
    TokensPerMinute,
    /// Requests of a second.
    RequestsPerSecond,
    /// Requests under way at once.
    Concurrency,
}

impl Bound {
    /// All of them, those first that keep a client waiting longest: that is the one that it is told of.
    pub const ALL: [Bound; 6] = [
        Bound::RequestsPerDay,
        Bound::TokensPerDay,
        Bound::RequestsPerMinute,
        Bound::TokensPerMinute,
        Bound::RequestsPerSecond,
        Bound::Concurrency,
    ];

    /// The label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Bound::RequestsPerDay => "requests_per_day",
            Bound::TokensPerDay => "tokens_per_day",
            Bound::RequestsPerMinute => "requests_per_minute",
            Bound::TokensPerMinute => "tokens_per_minute",
            Bound::RequestsPerSecond => "requests_per_second",
            Bound::Concurrency => "concurrency",
        }
    }

    /// Whether tokens count, not requests.
    #[must_use]
    pub fn counts_tokens(self) -> bool {
        matches!(self, Bound::TokensPerDay | Bound::TokensPerMinute)
    }

    /// When a request that it keeps out may come again. When a place gets free nobody knows: 1 s.
    #[must_use]
    pub fn retry_after(self, at: Wall) -> Duration {
        match self {
            Bound::RequestsPerDay | Bound::TokensPerDay => at.turns(DAY),
            Bound::RequestsPerMinute | Bound::TokensPerMinute => at.turns(MINUTE),
            Bound::RequestsPerSecond | Bound::Concurrency => Duration::from_secs(1),
        }
    }
}

/// The bounds of one tenant or model; `None` where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests of a second.
    pub requests_per_second: Option<u64>,
    /// Requests of a minute.
    pub requests_per_minute: Option<u64>,
    /// Tokens of a minute.
    pub tokens_per_minute: Option<u64>,
    /// Requests under way at once.
    pub concurrency: Option<u64>,
    /// Requests of a day.
    pub requests_per_day: Option<u64>,
    /// Tokens of a day.
    pub tokens_per_day: Option<u64>,
}

impl Limits {
    /// One of them.
    #[must_use]
    pub fn of(&self, bound: Bound) -> Option<u64> {
        match bound {
            Bound::RequestsPerDay => self.requests_per_day,
            Bound::TokensPerDay => self.tokens_per_day,
            Bound::RequestsPerMinute => self.requests_per_minute,
            Bound::TokensPerMinute => self.tokens_per_minute,
            Bound::RequestsPerSecond => self.requests_per_second,
            Bound::Concurrency => self.concurrency,
        }
    }

    /// What is booked of `tokens` where `bound` counts them: no more than all of it.
    #[must_use]
    pub fn booked(&self, bound: Bound, tokens: u64) -> u64 {
        self.of(bound).map_or(tokens, |limit| tokens.min(limit))
    }

    /// Whether there is none at all.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests;
