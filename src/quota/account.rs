//! What one tenant, or one model, has had.

use super::{Bound, Limits, Wall, Windows};
use std::sync::Arc;
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

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The tenant's name, or the model's.
    pub name: Arc<str>,
    /// What that may have.
    pub limits: Limits,
    /// Whoever set the limits has named it, and not just everybody.
    pub is_named: bool,
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Tokens that the answer counts for until it is known how many it had, and at least where nobody tells that: all that it may have, or fewer
    /// where that would be at the cost of others.
    pub answer: u64,
}

impl Claim {
    /// Tokens in all.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.prompt.saturating_add(self.answer)
    }
}

/// What was booked for a request, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The windows that it counts in.
    pub windows: Windows,
    /// Tokens of its prompt, as claimed.
    pub prompt: u64,
    /// Tokens of its answer, as claimed.
    pub answer: u64,
    /// Tokens booked in its minute.
    pub of_minute: u64,
    /// Tokens booked in its day.
    pub of_day: u64,
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
    /// It never reached a server, or was ended for no reason of its client's.
    Nothing,
    /// It was served for so many tokens.
    Tokens(u64),
    /// It was served, and nobody told for how many tokens in all: it had these at least. Where more was booked, that stands.
    AtLeast {
        /// Of the prompt.
        prompt: u64,
        /// Of the answer.
        answer: u64,
    },
}

impl Had {
    /// It was served, and nothing is known of its tokens.
    pub const AS_BOOKED: Had = Had::AtLeast { prompt: 0, answer: 0 };
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
    /// What `claim` books in `windows`, after which its tenant has `used` so much of the minute.
    #[must_use]
    pub fn by(claim: &Claim, windows: Windows, used: Use) -> Self {
        let booked = |bound| claim.limits.booked(bound, claim.tokens());
        let (of_minute, of_day) = (booked(Bound::TokensPerMinute), booked(Bound::TokensPerDay));
        let Claim { prompt, answer, .. } = *claim;
        Self { windows, prompt, answer, of_minute, of_day, used }
    }

    /// What the end of the request changes, which comes in the windows `at`. What is given back is given back to the window that it was taken from, and
    /// lost with it; what it cost beyond what it claimed is charged to the window in which that is known.
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

/// Thousandths of what may be had, when all of it is used up.
const ALL_OF_IT: u64 = 1_000;

/// The account of one tenant or model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Account {
    /// The windows that it has reached, and what was had of them.
    windows: Windows,
    second: Use,
    minute: Use,
    day: Use,
    running: u64,
    /// What it might have when it was asked for something last.
    limits: Limits,
    is_named: bool,
}

impl Account {
    /// Begins the windows of `at`. They don't go back by one: a clock that was set back by a moment counts on in the window that it had reached. One
    /// that was set back further was wrong before, and what was counted by it is forgotten.
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

    /// Books what is claimed, if all bounds leave room for it. What is larger than a bound as a whole needs, and gets, all of it.
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

    /// A request that was booked has ended.
    pub(super) fn end(&mut self, taken: &Taken, had: Had, at: Wall) {
        self.roll(at);
        let change = taken.change(had, self.windows);
        self.second.change(change.second_requests, 0);
        self.minute.change(change.minute_requests, change.minute_tokens);
        self.day.change(change.day_requests, change.day_tokens);
        self.running = self.running.saturating_sub(1);
    }

    /// Nothing of it runs.
    pub(super) fn is_idle(&self) -> bool {
        self.running == 0
    }

    /// Whoever set its limits has named it.
    pub(super) fn is_named(&self) -> bool {
        self.is_named
    }

    /// How little would be lost with it at `at`, the least first: thousandths of what it may have that are used up, of the bound of which that is
    /// most, then the last minute in which it was asked for anything.
    pub(super) fn weight(&self, at: Wall) -> (u64, u64) {
        let mut now = *self;
        now.roll(at);
        let share = |bound| now.used(bound).saturating_mul(ALL_OF_IT).checked_div(now.limits.of(bound)?);
        let most = Bound::ALL.into_iter().filter_map(share).max();
        (most.unwrap_or(0).min(ALL_OF_IT), self.windows.minute)
    }

    /// Nothing of it counts any more at `at`.
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
