//! Cost of a request on an endpoint, in seconds: its own time and the delay that it causes for other requests.
//!
//! ```text
//! whole     first token + others + response
//! others    own prefill · (decoding + waiting) + price · (own prefill + room) / 2    if one server serves requests
//!           price · (own prefill + room)                                   if two servers may share the request
//! prefill   first token + price · (own prefill + room)
//! decode    first token after the transfer + price · room + response
//! transfer  time to transfer the tokens that the decode server lacks
//! response  weight · tokens of a mean response · time per token
//! price     (wait + (own prefill + room) / 2) · requests per second and server / (1 - busy),
//!           over the servers with the same roles
//! room      share of the cache · seconds in use · cache usage ^ (√(2 · (n + 1)) - 1), if n such requests fit at once
//! ```
//!
//! # Objective
//!
//! Without an [`Objective`], both of its weights are 1.
//!
//! * The weight `ttft` multiplies first tokens, transfers and the price.
//! * The weight `tpot` multiplies the response and the delay of requests that decode.
//! * Targets add the price of the risk to miss them ([`Prices::risk`]). For a pair, the prefill server is judged by the
//!   first token with the usual transfer time, and the decode server by further tokens.
//!
//! # Delay of present requests
//!
//! While a server computes the prompt, requests that decode there receive no tokens, so each of them ends that much
//! later. Waiting requests will decode by then. This is LMetric's product of work and requests (arXiv 2603.15202), in
//! seconds and as a sum. It applies where one server serves a request from the first token to the last. If two servers
//! may share the request, `whole` is compared with the cost of a pair, which has no such term.
//!
//! # Response
//!
//! A response counts a tenth, or a fiftieth if two servers may share the request. The predicted time per token is that
//! of the present batch. Most of a response comes in later batches, since later decisions send requests elsewhere. At
//! full weight, requests would wait seconds for a server whose tokens come a few milliseconds sooner.
//!
//! # Price of work
//!
//! A second of work delays every request that arrives before the server is idle again. The price is their mean number.
//! It is 0 in an idle pool. In an overloaded pool, requests go where they cause the least work.
//!
//! The price is the increase of the value of an M/G/1 queue, λ·u² / 2·(1 - ρ) with u seconds of work in it. Source:
//! Hyytiä, Penttinen and Aalto, Size- and state-aware dispatching problem with queue-specific job sizes, EJOR 2012.
//!
//! `busy` is the higher of two shares: recently sent work per second, and cache usage. Requests that wait for blocks
//! wait behind work as well.
//!
//! # Price of cache capacity
//!
//! A request occupies cache capacity from the start of its prefill to the end of its response. Blocks that other
//! requests use already are free, so requests that share a prefix go to one server. In a full cache, occupied capacity
//! delays others as work does: `room` is that time as seconds of work.
//!
//! A cache is modelled as a queue with n servers, as many as such requests fit in it at once. The power of the mean
//! cache usage turns the price's 1 / (1 - busy) into the wait of that queue. The wait is negligible until caches are
//! nearly full. Source: Sakasegawa, An approximation formula L_q ≃ α·ρ^β / (1 - ρ), Annals of the Institute of
//! Statistical Mathematics 1977.
//!
//! Blocks that a prompt displaces from the cache have no price, nor has the next turn of a session that leaves its
//! server. Prices of both were tried on recorded sessions of coding agents: of a displaced token by the chance that it
//! returns, and of a move by the prefill that the session needs once more. With 100 sessions, whose contexts overflow
//! a little, first tokens came 1 to 12 % sooner. With 140 sessions, the change was at most 1 %. With 60 sessions, whose
//! contexts fit, it was between 5 % sooner and 4 % later. Holding long prompts back (`flow::saturation::recompute`)
//! shortens whole requests by 20 % with 100 and 140 sessions, so the cost has neither price. Figures:
//! `benches/agents.md`.
//!
//! Stale cache metrics count. A server that does not report its cache size counts as one of mean size. If no server
//! reports a size, `room` is 0.
//!
//! Called by `predicted-latency`, by `facts::deadline`, and by the pool's decider between whole and split requests.

use crate::objective::miss;
use crate::{Candidate, Objective, PickContext};
use attache_pool::Roles;
use attache_pool::metrics::Reported;
use attache_pool::place::Nearness;
use attache_pool::speed::{Load, Prediction, SpeedModel, Transfers, Work};
pub use floor::CostFloor;

mod floor;

/// Upper bound of `busy`. Sent work is an estimate, and at 1 the queue would be infinite.
const MAX_BUSY: f64 = 0.97;
/// Weight of a second of decode, relative to a second before the first token, if two servers may share a request. From
/// 0.02 to 0.1, all workloads of `attache replay` have similar latencies. With 0, bursts of one prompt wait about an
/// eighth longer, and requests with a hot prefix 6 %. With 0.1, first tokens of 4 + 4 servers come a third later.
const SHARED_TOKEN_WEIGHT: f64 = 0.02;
/// Weight of a second of decode, relative to a second before the first token, if one server serves a request. With
/// 0.05, bursts of one prompt in a quiet pool end 2 to 4 % later. With 0.3, first tokens take up to 1.7 times as long
/// as with the best strategy, in pools of unequal servers with many adapters.
const TOKEN_WEIGHT: f64 = 0.1;
/// Weight of the price of work if one server serves a request. The price assumes a constant arrival rate at each
/// server, but decisions send many of the expected requests elsewhere. With 1, requests end 1 % later.
const EXPECTED_WEIGHT: f64 = 0.5;
/// Occupied capacity costs nothing when it costs less than this fraction of its cost in a full cache.
const NEGLIGIBLE: f64 = 1e-6;

/// How many servers may serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// One, from the first token to the last.
    OneServer,
    /// One, or a prefill worker and a decode worker.
    OneOrTwoServers,
}

impl Serving {
    /// How the request of `cx` may be served: by two servers if it may be split and the pool has prefill workers.
    #[must_use]
    pub fn of(cx: &PickContext<'_>) -> Self {
        if cx.splittable && cx.snapshot.has_prefill_workers() { Self::OneOrTwoServers } else { Self::OneServer }
    }

    /// Weight of a second of decode, relative to a second before the first token.
    fn token_weight(self) -> f64 {
        match self {
            Self::OneServer => TOKEN_WEIGHT,
            Self::OneOrTwoServers => SHARED_TOKEN_WEIGHT,
        }
    }
}

/// Prices of one decision: the pool's state, read once for all endpoints.
#[derive(Clone, Copy, Debug)]
pub struct Prices {
    /// Requests that arrive while a server finishes one second of queued work, by [`Roles::kind`].
    arrivals: [f64; Roles::KINDS],
    /// The configured price of work.
    fixed_price: Option<f64>,
    serving: Serving,
    /// Scarcity of cache capacity, by [`Roles::kind`].
    scarcity: [Scarcity; Roles::KINDS],
    /// Mean response length, tokens.
    answer: f64,
    /// Weight of a second of decode.
    token_weight: f64,
    /// Learned transfer times.
    transfers: Transfers,
    /// The pool's part of all predictions; `None` without candidates.
    model: Option<SpeedModel>,
    /// The pool's latency objective.
    objective: Objective,
}

/// Sums over the caches that servers have reported.
#[derive(Clone, Copy, Debug, Default)]
struct Caches {
    reporting: usize,
    in_use: f64,
    with_size: usize,
    tokens: f64,
}

impl Caches {
    fn add(&mut self, reported: &Reported) {
        self.reporting += 1;
        self.in_use += f64::from(reported.kv_usage.max(0.0));
        self.with_size += usize::from(reported.cache_tokens > 0);
        self.tokens += f64::from(reported.cache_tokens);
    }

    /// Mean usage, 0..=1; 0 without reports.
    fn in_use(&self) -> f64 {
        self.in_use / self.reporting.max(1) as f64
    }
}

/// Scarcity of cache capacity among servers with the same roles.
#[derive(Clone, Copy, Debug)]
struct Scarcity {
    /// Mean cache size, tokens; 0 if no server reports one.
    tokens: f64,
    /// Logarithm of the mean cache usage.
    ln_in_use: f64,
    /// If more requests than this fit at once, occupied capacity costs less than [`NEGLIGIBLE`] of its cost in a full
    /// cache.
    plenty: f64,
}

impl Scarcity {
    fn of(caches: Caches) -> Self {
        let ln_in_use = caches.in_use().ln().min(0.0);
        // Solves `cost_factor(plenty) = NEGLIGIBLE`.
        let plenty = (1.0 + NEGLIGIBLE.ln() / ln_in_use).powi(2) / 2.0 - 1.0;
        Self { tokens: caches.tokens / caches.with_size.max(1) as f64, ln_in_use, plenty }
    }

    /// Cost of occupied capacity relative to a full cache, 0..=1, if `at_once` requests of this size fit.
    fn cost_factor(self, at_once: f64) -> f64 {
        (self.ln_in_use * ((2.0 * (at_once + 1.0)).sqrt() - 1.0)).exp()
    }
}

impl Prices {
    /// Prices from the learned speeds, load and caches of the pool. The candidates in `fields` may serve the request:
    /// first those for whole requests or decode, then those for prefill.
    #[must_use]
    pub fn learned<const N: usize>(cx: &PickContext<'_>, fields: [&[Candidate<'_>]; N], serving: Serving) -> Self {
        let mut arrivals = [0.0; Roles::KINDS];
        let mut counts = [0usize; Roles::KINDS];
        let mut caches = [Caches::default(); Roles::KINDS];
        let mut speed = None;
        for (position, field) in fields.iter().enumerate() {
            for candidate in *field {
                let roles = candidate.state.roles();
                // A server with both roles is in both fields.
                if (position == 0 || !roles.has(Roles::DECODE))
                    && let (Some(count), Some(caches)) = (counts.get_mut(roles.kind()), caches.get_mut(roles.kind()))
                {
                    *count += 1;
                    // Stale metrics count: a server that is slow to report them has not become empty.
                    candidate.state.reported().into_iter().for_each(|reported| caches.add(reported));
                }
                speed = Some(&candidate.state.live().speed);
            }
        }
        let pool = speed.map(|s| s.pool());
        // Expected requests are shared by all servers with the same roles, even if this request may use only some.
        let mut all = counts;
        if counts.iter().sum::<usize>() < cx.snapshot.endpoints.len() {
            all = [0; Roles::KINDS];
            for state in cx.snapshot.endpoints.iter().filter(|state| state.roles() != Roles::NONE) {
                all.get_mut(state.roles().kind()).into_iter().for_each(|count| *count += 1);
            }
        }
        for (kind, (((arrivals, count), all), caches)) in
            arrivals.iter_mut().zip(counts).zip(all).zip(caches).enumerate()
        {
            if let Some(pool) = pool.filter(|_| count > 0) {
                let (demand, all) = (pool.demand(kind, cx.now), all.max(count) as f64);
                let busy = (demand.seconds / all).max(caches.in_use()).clamp(0.0, MAX_BUSY);
                *arrivals = demand.requests / all / (1.0 - busy);
            }
        }
        let answer = pool.map_or(0.0, |pool| pool.answer_tokens());
        let transfers = pool.map(|pool| pool.transfer().expected(cx.now)).unwrap_or_default();
        let (scarcity, objective) = (caches.map(Scarcity::of), cx.objective);
        let token_weight = serving.token_weight();
        let model = pool.map(|pool| pool.model(cx.now));
        Self { arrivals, fixed_price: None, serving, scarcity, answer, token_weight, transfers, model, objective }
    }

    /// Sets a configured price of work, or the learned one for `None`.
    #[must_use]
    pub fn at(self, price: Option<f64>) -> Self {
        Self { fixed_price: price, ..self }
    }

    /// Sets a configured weight of a second of decode, or keeps the default for `None`.
    #[must_use]
    pub fn weighing(self, token_weight: Option<f64>) -> Self {
        Self { token_weight: token_weight.unwrap_or(self.token_weight), ..self }
    }

    /// Delay of other requests for each second of work on `candidate`, in seconds, if the request adds `work` seconds.
    #[must_use]
    pub fn work(&self, candidate: &Candidate<'_>, predicted: &Prediction, work: f64) -> f64 {
        self.fixed_price.unwrap_or_else(|| {
            let arrivals = self.arrivals.get(candidate.state.roles().kind()).copied().unwrap_or_default();
            arrivals * (predicted.first_token - predicted.own_prefill + work / 2.0)
        })
    }

    /// Delay that the request causes for others if `candidate` serves all of it, in seconds.
    ///
    /// Expected requests receive their first token later. Present requests, those in `load`, receive further tokens
    /// later. Present requests count if one server serves requests and no price is configured. `room` is the result
    /// of [`Self::room`].
    #[must_use]
    pub fn others(&self, candidate: &Candidate<'_>, load: &Load, predicted: &Prediction, room: f64) -> f64 {
        let own = predicted.own_prefill;
        let price = self.work(candidate, predicted, own + room);
        if self.fixed_price.is_some() || self.serving == Serving::OneOrTwoServers {
            return self.objective.ttft * price * (own + room);
        }
        self.objective.tpot * own * (load.decoding + load.waiting)
            + self.objective.ttft * EXPECTED_WEIGHT * price * (own + room)
    }

    /// Cost of the capacity that the request occupies in the cache of `candidate`, in seconds of work. The request
    /// occupies it for `seconds` of prefill, and `per_token` seconds for each token of a mean response.
    #[must_use]
    pub fn room(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>, seconds: f64, per_token: f64) -> f64 {
        let Some(scarcity) = self.scarcity.get(candidate.state.roles().kind()) else { return 0.0 };
        let reported = candidate.state.reported();
        let size = reported.map(|reported| f64::from(reported.cache_tokens)).filter(|size| *size > 0.0);
        let all = size.unwrap_or(scarcity.tokens);
        if all <= 0.0 {
            return 0.0;
        }
        // A request occupies a share of the whole server's cache, but must fit into the cache of one engine.
        let of_engine = all / reported.map_or(1.0, |reported| f64::from(reported.engines));
        let own = f64::from(cx.request.prompt_tokens.saturating_sub(candidate.cached.in_use));
        // A response occupies capacity as its tokens are generated: half of it in the mean.
        let answering = self.answer * per_token;
        let with_answer = if answering > 0.0 { own + self.answer / 2.0 } else { own };
        // Most caches have capacity: this skips the square root and the exponential for most of a thousand endpoints.
        if of_engine >= with_answer * scarcity.plenty {
            return 0.0;
        }
        let token_seconds = own * seconds + with_answer * answering;
        token_seconds / all * scarcity.cost_factor(of_engine / with_answer.max(1.0))
    }

    /// Cost of a mean response's tokens for the request itself, in seconds.
    fn answer(&self, predicted: &Prediction) -> f64 {
        self.objective.tpot * self.token_weight * self.answer * predicted.per_token
    }

    /// Cost of a transfer of `tokens` tokens between servers that are as `near` as given, in seconds.
    #[must_use]
    pub fn transfer(&self, tokens: u32, near: Option<Nearness>) -> f64 {
        self.objective.ttft * self.transfers.seconds(tokens, near)
    }

    /// Usual time to transfer the prompt from its prefill server, in seconds.
    fn usual_transfer(&self, cx: &PickContext<'_>) -> f64 {
        self.transfers.seconds(cx.request.prompt_tokens, None)
    }

    /// Price of the risk that the first token on `candidate` misses its target, in seconds. The time that the request
    /// was queued counts.
    fn late_first(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>, first_token: f64) -> f64 {
        let Some((slo, target)) = self.objective.slo.and_then(|slo| Some((slo, slo.ttft?))) else { return 0.0 };
        let [error, _] = candidate.state.live().speed.errors();
        let waited = cx.request.waited.as_secs_f64();
        // The probability follows from the time that is left, the price from the whole target.
        let chance = miss(target.as_secs_f64() - waited, first_token, error);
        self.objective.ttft * slo.price(target.as_secs_f64()) * chance
    }

    /// Price of the risk that further tokens on `candidate` miss their target, in seconds. It includes the tokens of
    /// requests that decode there, since the request's prefill delays them.
    fn late_tokens(&self, candidate: &Candidate<'_>, load: &Load, predicted: &Prediction) -> f64 {
        let Some((slo, target)) = self.objective.slo.and_then(|slo| Some((slo, slo.tpot?))) else { return 0.0 };
        if self.answer <= 0.0 {
            return 0.0;
        }
        let [_, error] = candidate.state.live().speed.errors();
        let target = target.as_secs_f64();
        let chance = |per_token: f64| miss(target, per_token, error);
        let own = chance(predicted.per_token);
        let of_others = chance(predicted.per_token + predicted.own_prefill / self.answer) - own;
        self.objective.tpot * slo.price(target * self.answer) * (own + load.decoding * of_others)
    }

    /// Price of the risk that targets are missed on `candidate`, in seconds; 0 without targets.
    #[must_use]
    pub fn risk(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>, load: &Load, predicted: &Prediction) -> f64 {
        self.late_first(cx, candidate, predicted.first_token) + self.late_tokens(candidate, load, predicted)
    }
}

/// The load ahead of the request on a candidate, and the prediction for the request there.
#[must_use]
pub fn forecast(cx: &PickContext<'_>, candidate: &Candidate<'_>) -> (Load, Prediction) {
    let live = candidate.state.live();
    live.speed.forecast(&live.ledger, candidate.reported(), candidate.work(cx), cx.now)
}

/// As [`forecast`], for `work` instead of the whole request.
#[inline]
fn forecast_work(cx: &PickContext<'_>, candidate: &Candidate<'_>, prices: &Prices, work: Work) -> (Load, Prediction) {
    let live = candidate.state.live();
    match &prices.model {
        Some(model) => live.speed.forecast_by(model, &live.ledger, candidate.reported(), work),
        None => live.speed.forecast(&live.ledger, candidate.reported(), work, cx.now),
    }
}

/// Cost of the request if `candidate` serves all of it, in seconds.
#[must_use]
pub fn whole(cx: &PickContext<'_>, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    let (load, predicted) = forecast_work(cx, candidate, prices, candidate.work(cx));
    let room = prices.room(cx, candidate, predicted.own_prefill, predicted.per_token);
    let first = prices.objective.ttft * predicted.first_token;
    first
        + prices.others(candidate, &load, &predicted, room)
        + prices.answer(&predicted)
        + prices.risk(cx, candidate, &load, &predicted)
}

/// Cost of the prompt if `candidate` computes it for another server, in seconds. Earlier turns that another decode
/// server keeps are transferred from there, and the cost contains that transfer.
#[must_use]
pub fn prefill(cx: &PickContext<'_>, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    let (carried, keeper) = cx.prefix.map(|found| found.carried(candidate.id)).unwrap_or_default();
    let carried = carried.saturating_sub(candidate.cached.any);
    let (_, predicted) = forecast_work(cx, candidate, prices, candidate.work_with(cx, carried));
    // The decode server generates the response and has the capacity for it.
    let predicted = Prediction { per_token: 0.0, ..predicted };
    let near = candidate.state.endpoint.place.nearness(keeper);
    let late = prices.late_first(cx, candidate, predicted.first_token + prices.usual_transfer(cx));
    prices.transfer(carried, near) + first_token_cost(cx, predicted, candidate, prices) + late
}

/// Time to the first token, plus the delay that work and occupied capacity cause for others, in seconds.
fn first_token_cost(cx: &PickContext<'_>, predicted: Prediction, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    let work = predicted.own_prefill + prices.room(cx, candidate, predicted.own_prefill, predicted.per_token);
    prices.objective.ttft * (predicted.first_token + work * prices.work(candidate, &predicted, work))
}

/// Cost of the response if `candidate` decodes a prompt that another server has computed, in seconds, without the
/// transfer.
#[must_use]
pub fn decode(cx: &PickContext<'_>, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    let (load, predicted) = forecast_work(cx, candidate, prices, candidate.work(cx).received());
    first_token_cost(cx, predicted, candidate, prices)
        + prices.answer(&predicted)
        + prices.late_tokens(candidate, &load, &predicted)
}

/// Prompt tokens that `decoder` lacks, the argument of [`Prices::transfer`].
#[must_use]
pub fn lacked(cx: &PickContext<'_>, decoder: &Candidate<'_>) -> u32 {
    decoder.work(cx).uncached_tokens
}

#[cfg(test)]
mod tests;
