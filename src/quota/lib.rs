//! Quotas of tenants and models: requests per second, requests and tokens per minute and per day, concurrent requests.
//!
//! ```text
//! take        before the decision: all limits are checked, and the request counts in all of them or in none. The
//!             response of a tenant is reserved at its maximum length, that of a model at a typical length at most,
//!             and in no window beyond the limit
//! settle      when the response has ended: its actual tokens replace the reserved ones
//! give back   when the request never reached a server: the reservation is removed
//! ```
//!
//! Seconds, minutes and days are those of the wall clock (UTC), as in AIBrix. [`Book`] is the memory of one process. A
//! store that several processes share does the same steps with the same values ([`Taken`], [`Change`]). No I/O: the
//! time is an argument.
//!
//! **Owns** limits, their settings and windows, reservations in them, and AIBrix's user records.
//! **Called by** `picker::quotas`, by `replay` and by the Redis store.
//! **Must not** do I/O, or name a tenant in a metric.
//!
//! Read first: `lib.rs`, `book.rs`, `account.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod account;
mod book;
mod record;
mod settings;

pub use account::{Change, Claim, Had, Place, Refused, Taken, Use};
pub use book::{Book, DEFAULT_MAX_TENANTS};
pub use record::UserRecord;
pub use settings::{CountIn, OnStoreFailure, OnUnknownUser, TenantSettings, UnknownPaths, UserRecordSettings};

use std::time::Duration;

/// What a quota applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The tenant that sends the requests.
    Tenant,
    /// The model of the requests, for all tenants together.
    Model,
}

/// Length of a minute window in seconds.
const MINUTE: u64 = 60;
/// Length of a day window in seconds.
const DAY: u64 = 86_400;

/// A wall-clock time since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wall(pub Duration);

impl Wall {
    /// Returns the second, minute and day of this time.
    #[must_use]
    pub fn windows(self) -> Windows {
        let second = self.0.as_secs();
        Windows { second, minute: second / MINUTE, day: second / DAY }
    }

    /// Returns the time until the next window of `seconds` begins, rounded up to whole seconds, so that
    /// no retry is too early.
    fn turns(self, seconds: u64) -> Duration {
        Duration::from_secs(seconds - self.0.as_secs() % seconds)
    }
}

/// The time windows of a moment, each by its number since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Windows {
    /// Seconds since the Unix epoch.
    pub second: u64,
    /// Minutes since the Unix epoch.
    pub minute: u64,
    /// Days since the Unix epoch.
    pub day: u64,
}

attache_types::labels! {
    /// What a limit counts, and over which time.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Bound {
        /// Requests in a day of the wall clock.
        RequestsPerDay => "requests_per_day",
        /// Tokens of prompts and responses per day.
        TokensPerDay => "tokens_per_day",
        /// Requests in a minute of the wall clock.
        RequestsPerMinute => "requests_per_minute",
        /// Tokens of prompts and responses per minute.
        TokensPerMinute => "tokens_per_minute",
        /// Requests in a second of the wall clock.
        RequestsPerSecond => "requests_per_second",
        /// Requests that run at the same time.
        Concurrency => "concurrency",
    }
}

impl Bound {
    /// Whether the limit counts tokens instead of requests.
    #[must_use]
    pub(crate) fn counts_tokens(self) -> bool {
        matches!(self, Bound::TokensPerDay | Bound::TokensPerMinute)
    }

    /// Returns when a rejected request may be retried. For concurrency, whose release is unpredictable, 1 s.
    #[must_use]
    pub fn retry_after(self, at: Wall) -> Duration {
        match self {
            Bound::RequestsPerDay | Bound::TokensPerDay => at.turns(DAY),
            Bound::RequestsPerMinute | Bound::TokensPerMinute => at.turns(MINUTE),
            Bound::RequestsPerSecond | Bound::Concurrency => Duration::from_secs(1),
        }
    }
}

/// The limits of one tenant or model; `None` where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most requests in a second of the wall clock.
    pub requests_per_second: Option<u64>,
    /// Most requests in a minute of the wall clock.
    pub requests_per_minute: Option<u64>,
    /// Most tokens of prompts and responses in a minute of the wall clock.
    pub tokens_per_minute: Option<u64>,
    /// Most requests that run at the same time.
    pub concurrency: Option<u64>,
    /// Most requests in a day of the wall clock.
    pub requests_per_day: Option<u64>,
    /// Most tokens of prompts and responses in a day of the wall clock.
    pub tokens_per_day: Option<u64>,
}

impl Limits {
    /// Returns one of the limits.
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

    /// Returns how many of `tokens` are reserved in the window of `bound`: at most the whole limit.
    #[must_use]
    pub fn booked(&self, bound: Bound, tokens: u64) -> u64 {
        self.of(bound).map_or(tokens, |limit| tokens.min(limit))
    }

    /// Whether no limit is set.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests;
