//! What a request costs on an endpoint, seconds: its own and, by the price of work, that of the others who wait for it.
//!
//! ```text
//! whole    first token there, the uncached prompt included      + price · own prefill + weight · answer
//! prefill  first token there                                    + price · own prefill
//! decode   transfer of what is not cached there + first token
//!          of a prompt that is there                            + weight · answer
//! price    busy / (1 - busy), of the servers that are there for the same
//! ```
//!
//! The price is that of a queue (M/M/1: a second of work is followed by `busy / (1 - busy)` seconds of waiting), with the part of the servers that is
//! busy learned from what was sent to them. Called by `predicted-latency` and by the pool's decider between whole and split.

use crate::pool::speed::{Load, Prediction, Work};
use crate::pool::{Endpoint, Roles};
use crate::scheduling::{Candidate, PickContext};

/// Servers are thought to be nine tenths busy at most: what was sent to them is an estimate, and a price beyond all measure would send
/// every request to whoever holds most of it.
const FULLEST: f64 = 0.9;
/// 0.02: a second in which tokens come weighs a fiftieth of one without any. From 0.02 to 0.1 every workload of `attache replay` fares alike; without it
/// bursts of one prompt wait about an eighth longer, and those with a hot prefix 6 %.
pub const DEFAULT_TOKEN_WEIGHT: f64 = 0.02;

/// What a second is worth.
#[derive(Clone, Copy, Debug)]
pub struct Prices {
    /// Of work, by [`Roles::kind`].
    work: [f64; Roles::KINDS],
    /// Tokens of a usual answer times their weight.
    answer: f64,
}

impl Prices {
    /// As learned.
    #[must_use]
    pub fn learned<const N: usize>(cx: &PickContext<'_>, fields: [&[Candidate<'_>]; N], token_weight: f64) -> Self {
        let mut work = [0.0; Roles::KINDS];
        let mut counts = [0usize; Roles::KINDS];
        let mut speed = None;
        for (position, field) in fields.iter().enumerate() {
            for candidate in *field {
                let roles = candidate.state.endpoint.roles;
                // A server for both stands in both fields.
                if (position == 0 || !roles.has(Roles::DECODE))
                    && let Some(count) = counts.get_mut(roles.kind())
                {
                    *count += 1;
                }
                speed = Some(&candidate.state.endpoint.speed);
            }
        }
        let pool = speed.map(|s| s.pool());
        for (kind, (price, count)) in work.iter_mut().zip(counts).enumerate() {
            let busy = pool.filter(|_| count > 0).map_or(0.0, |pool| pool.busy(kind, cx.now)) / count.max(1) as f64;
            let busy = busy.clamp(0.0, FULLEST);
            *price = busy / (1.0 - busy);
        }
        Self { work, answer: pool.map_or(0.0, |pool| pool.answer_tokens()) * token_weight }
    }

    /// With a price of work that somebody has set.
    #[must_use]
    pub fn at(mut self, price: Option<f64>) -> Self {
        self.work = price.map_or(self.work, |price| [price; Roles::KINDS]);
        self
    }

    /// What a second of work costs others on `endpoint`, seconds.
    #[must_use]
    pub fn work(&self, endpoint: &Endpoint) -> f64 {
        self.work.get(endpoint.roles.kind()).copied().unwrap_or_default()
    }
}

/// What a request can expect of a candidate, and what stands before it there.
#[must_use]
pub fn forecast(cx: &PickContext<'_>, candidate: &Candidate<'_>) -> (Load, Prediction) {
    let endpoint = &candidate.state.endpoint;
    endpoint.speed.forecast(endpoint, candidate.metrics, candidate.work(cx), cx.now)
}

/// The cost of the request when `candidate` serves all of it.
#[must_use]
pub fn whole(cx: &PickContext<'_>, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    let (_, predicted) = forecast(cx, candidate);
    prefilled(predicted, candidate, prices) + predicted.per_token * prices.answer
}

/// The cost of its prompt when `candidate` computes it for another.
#[must_use]
pub fn prefill(cx: &PickContext<'_>, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    prefilled(forecast(cx, candidate).1, candidate, prices)
}

fn prefilled(predicted: Prediction, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    predicted.first_token + predicted.own_prefill * prices.work(&candidate.state.endpoint)
}

/// The cost of its answer when `candidate` goes on from what another has computed.
#[must_use]
pub fn decode(cx: &PickContext<'_>, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    let endpoint = &candidate.state.endpoint;
    let work = candidate.work(cx);
    let received = Work { uncached_tokens: 0, ..work };
    let (_, predicted) = endpoint.speed.forecast(endpoint, candidate.metrics, received, cx.now);
    let transfer = endpoint.speed.pool().transfer().seconds(work.uncached_tokens);
    transfer + predicted.first_token + predicted.per_token * prices.answer
}
