//! What a request costs on an endpoint, seconds: its own and, by the price of work, that of the others who wait for it.
//!
//! ```text
//! whole    first token there, the uncached prompt included      + others                       + answer
//! others   own prefill · (decoding + waiting)                   + price · (own prefill + room) / 2, where one server serves the request
//! others                                                          price · (own prefill + room), where two servers may share it
//! prefill  first token there                                    + price · (own prefill + room)
//! decode   first token of a prompt that is there                + price · room                 + answer
//! transfer of what is not cached there, from the one to the other
//! answer   weight · tokens of a usual answer · time of a token
//! price    (wait there + (own prefill + room) / 2) · requests a second and server / (1 - busy), of the servers that
//!          are there for the same
//! room     part of the cache that nobody else uses · seconds in use · in use ^ (√(2 · (n + 1)) - 1), of which n have
//!          room at once
//! ```
//!
//! With an [`Objective`] the weight of first tokens multiplies first tokens, transfers and the price, and the weight
//! of further tokens multiplies the answer and the delay of requests that decode. Targets add the price of the risk
//! that they are missed. A pair's first token is judged where its prompt is computed, with the usual time of a
//! transfer, and its further tokens where they are generated. Without an objective both weights are 1.
//!
//! While a server computes the prompt, requests that decode there receive no tokens: each of them ends that much later.
//! Requests that wait there decode by then. This is LMetric's product of work and requests (arXiv 2603.15202), in
//! seconds and as a sum. It counts where one server serves the request from its first token to its last. Where two
//! servers may share it, `whole` is compared with the cost of a pair, which has no such term.
//!
//! The answer counts a tenth. Predicted times of tokens are those of the present batch, and most of a response comes
//! in later ones: decisions send further requests elsewhere meanwhile. In full it would have requests wait seconds
//! for a fast server whose tokens come some milliseconds sooner.
//!
//! A second of work keeps everybody waiting who comes before the server is idle again, and the more stands there
//! already the longer that takes. The price is what those are in the mean: the difference that the request makes to
//! the value of an M/G/1 queue, λ·u² / 2·(1 - ρ) with u seconds of work in it (Hyytiä, Penttinen and Aalto: Size- and
//! state-aware dispatching problem with queue-specific job sizes, EJOR 2012). In a pool that is idle it is nothing;
//! in one that has more to do than it can, requests go where they make least work. Servers are as busy as what was
//! sent to them of late, or as their caches are in use, where that is more: whoever waits for blocks waits behind
//! work as well.
//!
//! Where caches are short of room, to keep others from a part of one for so long is work of the same kind: what the
//! request needs beside the blocks that others use there already, from its prompt's beginning to its answer's end. A
//! cache is a queue with as many servers as such requests have room in it at once; with the last factor, the mean
//! over the caches of those who are there for the same, the price's 1 / (1 - busy) becomes what such a queue waits
//! (Sakasegawa: An approximation formula L_q ≃ α·ρ^β / (1 - ρ), Annals of the Institute of Statistical Mathematics
//! 1977): next to nothing until caches are nearly full. It keeps prompts with one beginning together: where others
//! compute with it, it needs no room of its own. What a server said last counts however old it is, and one that does
//! not say how large its cache is has a usual one; where none says so, there is room.
//!
//! Called by `predicted-latency` and by the pool's decider between whole and split.

use crate::objective::miss;
use crate::{Candidate, Objective, PickContext};
use attache_pool::Roles;
use attache_pool::metrics::Reported;
use attache_pool::place::Nearness;
use attache_pool::speed::{Load, Prediction, SpeedModel, Transfers, Work};

/// Servers are thought to be this busy at most: what was sent to them is an estimate, and more would be as good as a
/// queue without end.
const FULLEST: f64 = 0.97;
/// 0.02, where two servers share requests: a second in which tokens come weighs a fiftieth of one without any. From
/// 0.02 to 0.1 every workload of `attache replay` fares alike; without it bursts of one prompt wait about an eighth
/// longer, and those with a hot prefix 6 %. With 0.1, pairs of 4 + 4 servers compute first tokens a third later.
const SHARED_TOKEN_WEIGHT: f64 = 0.02;
/// 0.1, where one server serves a request. With 0.05, bursts of one prompt in a quiet pool end 2 to 4 % later. With
/// 0.3, first tokens come up to 1.7 times as late as the best strategy's in pools of unequal servers with many
/// adapters.
const TOKEN_WEIGHT: f64 = 0.1;
/// Half: the price of work assumes that requests keep coming to a server whatever it has to do, but decisions send many
/// of them elsewhere. With the whole price, requests end 1 % later.
const COMING_DELAYED: f64 = 0.5;
/// A millionth: where room costs no more than that of what it does in a full cache, it costs nothing.
const NEXT_TO_NOTHING: f64 = 1e-6;

/// How many servers may serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// One, from the first token to the last.
    OneServer,
    /// One, or a prefill worker and a decode worker.
    OneOrTwoServers,
}

impl Serving {
    /// How the request of `cx` may be served: two servers share it where it may be split and the pool has prefill
    /// workers.
    #[must_use]
    pub fn of(cx: &PickContext<'_>) -> Self {
        if cx.splittable && cx.snapshot.has_prefill_workers() { Self::OneOrTwoServers } else { Self::OneServer }
    }

    /// What a second in which tokens come weighs, relative to a second before the first token.
    fn token_weight(self) -> f64 {
        match self {
            Self::OneServer => TOKEN_WEIGHT,
            Self::OneOrTwoServers => SHARED_TOKEN_WEIGHT,
        }
    }
}

/// What a second is worth.
#[derive(Clone, Copy, Debug)]
pub struct Prices {
    /// Requests that come behind each second of waiting before a server is idle again, by [`Roles::kind`].
    behind: [f64; Roles::KINDS],
    /// The price of work that somebody has set.
    set: Option<f64>,
    serving: Serving,
    /// How short room is, by [`Roles::kind`].
    scarcity: [Scarcity; Roles::KINDS],
    /// Tokens of a usual answer.
    answer: f64,
    /// What a second in which one of them comes weighs.
    token_weight: f64,
    /// What transfers take.
    transfers: Transfers,
    /// What all predictions have in common; `None` without candidates.
    model: Option<SpeedModel>,
    /// What operators want.
    objective: Objective,
}

/// What servers have said of their caches.
#[derive(Clone, Copy, Debug, Default)]
struct Caches {
    told: usize,
    in_use: f64,
    sized: usize,
    tokens: f64,
}

impl Caches {
    fn add(&mut self, page: &Reported) {
        self.told += 1;
        self.in_use += f64::from(page.kv_usage.max(0.0));
        self.sized += usize::from(page.cache_tokens > 0);
        self.tokens += f64::from(page.cache_tokens);
    }

    /// The mean part of them that is in use.
    fn in_use(&self) -> f64 {
        self.in_use / self.told.max(1) as f64
    }
}

/// How short room is in caches.
#[derive(Clone, Copy, Debug)]
struct Scarcity {
    /// Tokens that a usual one has room for; 0 when nobody says so.
    tokens: f64,
    /// Part of them that is in use: the logarithm of its mean.
    ln_in_use: f64,
    /// Where so many requests have room at once, it costs less than [`NEXT_TO_NOTHING`] of what it does in a full
    /// cache.
    plenty: f64,
}

impl Scarcity {
    fn of(caches: Caches) -> Self {
        let ln_in_use = caches.in_use().ln().min(0.0);
        // The exponent that makes it so little, as a number of requests.
        let plenty = (1.0 + NEXT_TO_NOTHING.ln() / ln_in_use).powi(2) / 2.0 - 1.0;
        Self { tokens: caches.tokens / caches.sized.max(1) as f64, ln_in_use, plenty }
    }

    /// What room costs of what it does in a full cache, when so many requests have it at once.
    fn of_full(self, at_once: f64) -> f64 {
        (self.ln_in_use * ((2.0 * (at_once + 1.0)).sqrt() - 1.0)).exp()
    }
}

impl Prices {
    /// As learned.
    #[must_use]
    pub fn learned<const N: usize>(cx: &PickContext<'_>, fields: [&[Candidate<'_>]; N], serving: Serving) -> Self {
        let mut behind = [0.0; Roles::KINDS];
        let mut counts = [0usize; Roles::KINDS];
        let mut caches = [Caches::default(); Roles::KINDS];
        let mut speed = None;
        for (position, field) in fields.iter().enumerate() {
            for candidate in *field {
                let roles = candidate.state.roles();
                // A server for both stands in both fields.
                if (position == 0 || !roles.has(Roles::DECODE))
                    && let (Some(count), Some(caches)) = (counts.get_mut(roles.kind()), caches.get_mut(roles.kind()))
                {
                    *count += 1;
                    // However old the page is: a server that takes long to make one has not become empty.
                    candidate.state.reported().into_iter().for_each(|page| caches.add(page));
                }
                speed = Some(&candidate.state.live().speed);
            }
        }
        let pool = speed.map(|s| s.pool());
        // What comes is for all who are there for it, though this request may go to some of them only.
        let mut all = counts;
        if counts.iter().sum::<usize>() < cx.snapshot.endpoints.len() {
            all = [0; Roles::KINDS];
            for state in cx.snapshot.endpoints.iter().filter(|state| state.roles() != Roles::NONE) {
                all.get_mut(state.roles().kind()).into_iter().for_each(|count| *count += 1);
            }
        }
        for (kind, (((behind, count), all), caches)) in behind.iter_mut().zip(counts).zip(all).zip(caches).enumerate() {
            if let Some(pool) = pool.filter(|_| count > 0) {
                let (demand, all) = (pool.demand(kind, cx.now), all.max(count) as f64);
                let busy = (demand.seconds / all).max(caches.in_use()).clamp(0.0, FULLEST);
                *behind = demand.requests / all / (1.0 - busy);
            }
        }
        let answer = pool.map_or(0.0, |pool| pool.answer_tokens());
        let transfers = pool.map(|pool| pool.transfer().expected(cx.now)).unwrap_or_default();
        let (scarcity, objective) = (caches.map(Scarcity::of), cx.objective);
        let token_weight = serving.token_weight();
        let model = pool.map(|pool| pool.model(cx.now));
        Self { behind, set: None, serving, scarcity, answer, token_weight, transfers, model, objective }
    }

    /// With a price of work that somebody has set.
    #[must_use]
    pub fn at(self, price: Option<f64>) -> Self {
        Self { set: price, ..self }
    }

    /// With a weight of tokens that somebody has set.
    #[must_use]
    pub fn weighing(self, token_weight: Option<f64>) -> Self {
        Self { token_weight: token_weight.unwrap_or(self.token_weight), ..self }
    }

    /// What a second of work costs others on `candidate`, seconds, when the request brings `work` seconds of it.
    #[must_use]
    pub fn work(&self, candidate: &Candidate<'_>, predicted: &Prediction, work: f64) -> f64 {
        self.set.unwrap_or_else(|| {
            let behind = self.behind.get(candidate.state.roles().kind()).copied().unwrap_or_default();
            behind * (predicted.first_token - predicted.own_prefill + work / 2.0)
        })
    }

    /// What the request costs others on `candidate` when that serves all of it, seconds. Those that will come receive
    /// their first token later. Those that are there under `load` receive further tokens later, which counts where one
    /// server serves requests and nobody has set a price. `room` is what [`Self::room`] says.
    #[must_use]
    pub fn others(&self, candidate: &Candidate<'_>, load: &Load, predicted: &Prediction, room: f64) -> f64 {
        let own = predicted.own_prefill;
        let price = self.work(candidate, predicted, own + room);
        if self.set.is_some() || self.serving == Serving::OneOrTwoServers {
            return self.objective.ttft * price * (own + room);
        }
        self.objective.tpot * own * (load.decoding + load.waiting)
            + self.objective.ttft * COMING_DELAYED * price * (own + room)
    }

    /// What the room costs that the request takes in the cache of `candidate`, seconds of work: for the `seconds` of
    /// its prompt's computation, and for those of a usual answer's tokens.
    #[must_use]
    pub fn room(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>, seconds: f64, per_token: f64) -> f64 {
        let Some(scarcity) = self.scarcity.get(candidate.state.roles().kind()) else { return 0.0 };
        let page = candidate.state.reported();
        let all = page.map(|page| f64::from(page.cache_tokens)).filter(|all| *all > 0.0).unwrap_or(scarcity.tokens);
        if all <= 0.0 {
            return 0.0;
        }
        // The share is of the whole server, but what fits beside it is a matter of the engine that has it.
        let of_engine = all / page.map_or(1.0, |page| f64::from(page.engines));
        let own = f64::from(cx.request.prompt_tokens.saturating_sub(candidate.cached.in_use));
        // The answer's room comes with its tokens.
        let answering = self.answer * per_token;
        let with_answer = if answering > 0.0 { own + self.answer / 2.0 } else { own };
        // In caches with room this is where it ends, at a thousand endpoints' decisions.
        if of_engine >= with_answer * scarcity.plenty {
            return 0.0;
        }
        let token_seconds = own * seconds + with_answer * answering;
        token_seconds / all * scarcity.of_full(of_engine / with_answer.max(1.0))
    }

    /// What the tokens of a usual answer cost the request, seconds.
    fn answer(&self, predicted: &Prediction) -> f64 {
        self.objective.tpot * self.token_weight * self.answer * predicted.per_token
    }

    /// The cost of bringing `tokens` tokens to a server as `near` as that, seconds.
    #[must_use]
    pub fn transfer(&self, tokens: u32, near: Option<Nearness>) -> f64 {
        self.objective.ttft * self.transfers.seconds(tokens, near)
    }

    /// Seconds in which the prompt usually comes from the server that computed it.
    fn usual_transfer(&self, cx: &PickContext<'_>) -> f64 {
        self.transfers.seconds(cx.request.prompt_tokens, None)
    }

    /// The price of the risk that the first token, predicted for `candidate`, comes after its target, seconds. The
    /// time that the request has waited for its turn counts.
    fn late_first(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>, first_token: f64) -> f64 {
        let Some((slo, target)) = self.objective.slo.and_then(|slo| Some((slo, slo.ttft?))) else { return 0.0 };
        let [error, _] = candidate.state.live().speed.errors();
        let waited = cx.request.waited.as_secs_f64();
        // The risk is that of what is left, and its price that of the whole target.
        let chance = miss(target.as_secs_f64() - waited, first_token, error);
        self.objective.ttft * slo.price(target.as_secs_f64()) * chance
    }

    /// The price of the risk that further tokens on `candidate` come after their target, seconds: those of the
    /// request, and those of the requests that decode there and wait for its prompt.
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

    /// The price of the risk that targets are missed on `candidate`, seconds; 0 without targets.
    #[must_use]
    pub fn risk(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>, load: &Load, predicted: &Prediction) -> f64 {
        self.late_first(cx, candidate, predicted.first_token) + self.late_tokens(candidate, load, predicted)
    }
}

/// What a request can expect of a candidate, and what stands before it there.
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

/// The cost of the request when `candidate` serves all of it.
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

/// The cost of its prompt when `candidate` computes it for another. What it lacks of the turns before comes from the
/// decode server that keeps them, for the price of a transfer from there.
#[must_use]
pub fn prefill(cx: &PickContext<'_>, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    let (carried, keeper) = cx.prefix.map(|found| found.carried(candidate.id)).unwrap_or_default();
    let carried = carried.saturating_sub(candidate.cached.any);
    let (_, predicted) = forecast_work(cx, candidate, prices, candidate.work_with(cx, carried));
    // Its answer, and the room for that, is the other's.
    let predicted = Prediction { per_token: 0.0, ..predicted };
    let near = candidate.state.endpoint.place.nearness(keeper);
    let late = prices.late_first(cx, candidate, predicted.first_token + prices.usual_transfer(cx));
    prices.transfer(carried, near) + worked(cx, predicted, candidate, prices) + late
}

/// The first token, and what others wait for the work.
fn worked(cx: &PickContext<'_>, predicted: Prediction, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    let work = predicted.own_prefill + prices.room(cx, candidate, predicted.own_prefill, predicted.per_token);
    prices.objective.ttft * (predicted.first_token + work * prices.work(candidate, &predicted, work))
}

/// The cost of its answer when `candidate` goes on from what another has computed, without the transfer.
#[must_use]
pub fn decode(cx: &PickContext<'_>, candidate: &Candidate<'_>, prices: &Prices) -> f64 {
    let (load, predicted) = forecast_work(cx, candidate, prices, candidate.work(cx).received());
    worked(cx, predicted, candidate, prices)
        + prices.answer(&predicted)
        + prices.late_tokens(candidate, &load, &predicted)
}

/// What [`Prices::transfer`] has to bring: the tokens that `decoder` lacks of the prompt.
#[must_use]
pub fn lacked(cx: &PickContext<'_>, decoder: &Candidate<'_>) -> u32 {
    decoder.work(cx).uncached_tokens
}

#[cfg(test)]
mod tests;
