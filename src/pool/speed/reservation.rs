//! A request in flight to an endpoint: it counts from the decision on, and its times are learned.

use super::pending::Prompt;
use super::{EndpointSpeed, FIRST, Work, dot, first_features};
use crate::place::Nearness;
use crate::{Endpoint, EndpointMetrics};
use attache_types::clock::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// Features of the two times at the decision.
#[derive(Clone, Copy, Debug)]
struct Expectation {
    first: [f64; FIRST],
    decoding: f64,
    kilotokens: f64,
    /// Predicted seconds to the first token.
    first_token: f64,
}

/// A request in flight to an endpoint, from the decision to its end.
#[derive(Debug)]
pub struct Reservation {
    endpoint: Arc<Endpoint>,
    work: Work,
    expectation: Expectation,
    began: Timestamp,
    /// Its key in the endpoint's `pending`, while its first token is awaited.
    pending: Option<u64>,
    first_token: Option<Timestamp>,
    /// Set if another server computes the prompt.
    arriving: Option<Arriving>,
}

/// A prompt that another server computes.
#[derive(Clone, Copy, Debug)]
struct Arriving {
    /// Number of tokens to transfer.
    tokens: u32,
    /// Topology level that the other server shares.
    near: Option<Nearness>,
    /// Predicted seconds from the decision to the first token, without the transfer.
    expected: f64,
}

impl Reservation {
    /// Counts `work` on `endpoint` from `now` on. `streams` means that Attaché will observe its first token.
    #[must_use]
    pub fn begin(
        endpoint: Arc<Endpoint>,
        fresh: Option<&EndpointMetrics>,
        work: Work,
        streams: bool,
        now: Timestamp,
    ) -> Self {
        Self::count(endpoint, fresh, work, (streams, true), now)
    }

    /// As [`Reservation::begin`], for a request that is only assumed, so it does not count as demand.
    #[must_use]
    pub fn assume(endpoint: Arc<Endpoint>, fresh: Option<&EndpointMetrics>, work: Work, now: Timestamp) -> Self {
        Self::count(endpoint, fresh, work, (true, false), now)
    }

    /// `streams` and `is_demand` as in the callers.
    fn count(
        endpoint: Arc<Endpoint>,
        fresh: Option<&EndpointMetrics>,
        work: Work,
        (streams, is_demand): (bool, bool),
        now: Timestamp,
    ) -> Self {
        let speed = &endpoint.speed;
        let model = speed.pool.model(now);
        let (c, _) = model.scaled(speed.slower(&model));
        let load = speed.load(&c, &endpoint.ledger, fresh.map(EndpointMetrics::reported).as_ref(), &model);
        let first = first_features(&load, work);
        let (decoding, kilotokens, first_token) = (load.decoding + 1.0, load.kilotokens, dot(&c, &first));
        let expectation = Expectation { first, decoding, kilotokens, first_token };
        if is_demand {
            speed.pool.sent(endpoint.roles, Self::own_prefill(&c, work), now);
        }
        let mut pending = None;
        if streams {
            pending =
                Some(speed.pending.push(Prompt { tokens: work.uncached_tokens, kilopairs: kilopairs(work) }, now));
        } else {
            speed.push_unseen(&c, work.uncached_tokens, now);
        }
        Self { endpoint, work, expectation, began: now, pending, first_token: None, arriving: None }
    }

    /// Counts a request whose prompt arrives from a server that is as `near` as given. `expected` is the predicted
    /// time to the first token in seconds, without the transfer. Any time beyond it is learned as transfer time,
    /// and nothing else is learned.
    #[must_use]
    pub fn arriving(
        endpoint: Arc<Endpoint>,
        fresh: Option<&EndpointMetrics>,
        work: Work,
        (near, expected): (Option<Nearness>, f64),
        streams: bool,
        now: Timestamp,
    ) -> Self {
        let arriving = Arriving { tokens: work.uncached_tokens, near, expected };
        let mut reservation = Self::begin(endpoint, fresh, work.received(), streams, now);
        reservation.arriving = Some(arriving);
        reservation
    }

    /// Returns the predicted seconds from the decision to the first token, as of the decision.
    #[must_use]
    pub fn expected(&self) -> f64 {
        let before = self.arriving.map_or(0.0, |arriving| arriving.expected);
        before.max(self.expectation.first_token)
    }

    /// Records that the first token arrived at `now`. `tells` means that it was observed as it
    /// arrived, in a successful response.
    pub fn first_token(&mut self, tells: bool, now: Timestamp) {
        if let Some((prompt, time)) = self.release(now)
            && tells
        {
            self.first_token = Some(now);
            let (speed, seconds) = (&self.endpoint.speed, now.since(self.began).as_secs_f64());
            match self.arriving {
                None => {
                    speed.computed(prompt, time, now);
                    speed.observe_first(&self.expectation.first, seconds, now);
                }
                Some(Arriving { tokens, near, expected }) => {
                    speed.pool.transfer.observe(tokens, near, seconds - expected, now);
                }
            }
        }
    }

    /// Records that the response ended at `now` after `tokens` tokens.
    pub fn ended(&mut self, tokens: Option<u64>, now: Timestamp) {
        // With few tokens, the time between them is mostly chance.
        tokens.iter().for_each(|tokens| self.endpoint.speed.pool.answered(self.work.prompt_tokens, *tokens, now));
        let (Some(first), Some(tokens @ 8..)) = (self.first_token.take(), tokens) else { return };
        let seconds = now.since(first).as_secs_f64() / (tokens - 1) as f64;
        let features = [1.0, self.expectation.decoding, self.expectation.kilotokens];
        self.endpoint.speed.observe_next(&features, seconds, now);
    }

    /// Moves the request to the endpoint that Envoy used instead.
    pub fn move_to(&mut self, endpoint: Arc<Endpoint>, now: Timestamp) {
        let streams = self.release(now).is_some();
        *self = Self::begin(endpoint, None, self.work, streams, now);
    }

    fn own_prefill(c: &[f64; FIRST], work: Work) -> f64 {
        EndpointSpeed::prefill_seconds(c, f64::from(work.uncached_tokens) / 1e3, work.mega_pairs())
    }

    /// Stops counting the request. Returns its prompt and how long that was the first; `None` when it did not count.
    fn release(&mut self, now: Timestamp) -> Option<(Prompt, Duration)> {
        self.pending.take().and_then(|name| self.endpoint.speed.pending.remove(name, now))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // The time of the disconnect is unknown: the next prompt counts as worked on since it was sent.
        self.release(self.began);
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative; saturates at a prompt of millions of tokens"
)]
fn kilopairs(work: Work) -> u32 {
    (work.mega_pairs() * 1e3) as u32
}
