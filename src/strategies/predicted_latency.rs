//! `predicted-latency`: the endpoint where the request costs the least time, its own and that of other requests.
//!
//! ```text
//! cost  = first token + own prefill · (decoding + waiting) + price · (own prefill + room) / 2 + response
//! price = (wait + (own prefill + room) / 2) · rate / (1 - busy)
//! ```
//!
//! | term | meaning |
//! |---|---|
//! | `first token` | predicted time to the request's first token: queued prefill, uncached prompt tokens, batch |
//! | `own prefill` | the part of it in which the endpoint computes this prompt; requests that decode there stall meanwhile |
//! | `room` | cost of the cache capacity that the request occupies; counts when caches are nearly full |
//! | `response` | a tenth of the time of a mean response there |
//! | `price` | requests that are expected before the endpoint is idle again; `rate` of them arrive per second and server |
//!
//! Times are in seconds, predicted by [`attache_pool::speed`] from observed responses, so nothing is calibrated.
//! [`attache_scheduling::facts::cost`] has the formulas and their reasons.
//!
//! * In an idle pool the price is 0, and only the request's own time counts. In a full pool a request goes where it
//!   causes the least work.
//! * A response takes longer in a larger batch. Requests with a popular prefix therefore leave the server that holds it
//!   once its batch is large, and another server caches the prefix too.
//! * Attaché counts a request at the decision, so a burst spreads at once.
//! * Among many endpoints, only those whose lower bound ([`CostFloor`]) may be low enough are predicted.
//! * If two servers may share the request, one server is compared with pairs. Others then count by the price alone.
//!
//! When not: with response mode NONE Attaché sees no responses and learns nothing. The assumed speeds then decide.
//! Source: ours. It has the same goal as llm-d's `predicted-latency-producer` (a sidecar with gradient-boosted trees)
//! and Mooncake's KVCache-centric scheduling (Qin et al., FAST'25).

use attache_pool::Endpoint;
use attache_pool::place::{Nearness, Place, Places};
use attache_pool::speed::{Load, Prediction};
use attache_scheduling::facts::cost::{self, CostFloor, Prices, Serving};
use attache_scheduling::floors::rank_by_floors;
use attache_scheduling::plugin::{Better, params, rank_by_scores, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::split::{Decider, MAX_TRIES, Pair, PairCandidates, PairCosts};
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use rand::RngExt;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "predicted-latency",
    summary: "Picks the endpoint where the request is predicted to cost least time, its own and that of \
              those already there.",
    source: "ours; llm-d `predicted-latency-producer`, Mooncake (FAST'25)",
    parameters: section::<PredictedLatency>,
    build: |value, _| params::<PredictedLatency>(value).map(|p| Box::new(p) as Box<dyn Strategy>),
};

parameters! {
    /// The strategy and its parameters.
    struct PredictedLatency {
        /// Delay of other requests for each second of work that a request adds.
        "workPrice" => work_price: Option<f64> {
            absent: "learned from the load"; range: 0.0..=1_000.0; unit: "seconds";
        },
        /// Weight of a second of decode, relative to a second before the first token.
        "tokenWeight" => token_weight: Option<f64> {
            absent: "`0.1`, or `0.02` if two servers may serve the request"; range: 0.0..=10.0; unit: "weight";
        },
    }
}

/// Cost of a pair in seconds, and the topology level that its servers share.
#[derive(Clone, Copy)]
struct PairCost(f64, Option<Nearness>);

impl PairCost {
    fn is_better_than(self, other: Self) -> bool {
        self.0 < other.0 || self.0 == other.0 && self.1 > other.1
    }
}

/// Transfers to one decode server from any of the prefill servers.
struct InboundTransfer<'a> {
    place: Place,
    /// Prompt tokens that the decode server lacks.
    tokens: u32,
    prices: &'a Prices,
    /// Lower bound of the transfer cost, seconds.
    min_cost: f64,
    /// Nearest topology level that a prefill server may share with the decode server.
    nearest: Option<Nearness>,
}

impl<'a> InboundTransfer<'a> {
    /// Transfers from prefill servers at `places` to `decoder`, which lacks `tokens` tokens.
    fn to(decoder: &Endpoint, tokens: u32, prices: &'a Prices, places: &Places) -> Self {
        let place = decoder.place;
        let (mut min_cost, mut nearest) = (prices.transfer(tokens, None), None);
        // Reversed, so that the last level is the nearest.
        for near in places.nearnesses(place).collect::<SmallVec<[Nearness; 4]>>().into_iter().rev() {
            min_cost = min_cost.min(prices.transfer(tokens, Some(near)));
            nearest = Some(near);
        }
        Self { place, tokens, prices, min_cost, nearest }
    }

    /// Cost of the pair with `prefill`, where the prompt costs `prompt`. The response costs `answer` on the decode
    /// server.
    fn pair_cost(&self, prompt: f64, prefill: &Endpoint, answer: f64) -> PairCost {
        let near = prefill.place.nearness(self.place);
        PairCost(prompt + (answer + self.prices.transfer(self.tokens, near)), near)
    }

    /// The best pair with a server of `cheap` that `fits`, if it is better than `best`. `cheap` is sorted by cost, the
    /// cheapest first; the search ends where no later server can be better.
    fn best(
        &self,
        cheap: &[(f64, &Arc<Endpoint>)],
        answer: f64,
        mut best: Option<PairCost>,
        fits: impl Fn(&Endpoint) -> bool,
    ) -> Option<PairCost> {
        let mut found = None;
        for (prompt, p) in cheap {
            let bound = PairCost(prompt + (answer + self.min_cost), self.nearest);
            if best.is_some_and(|best| !bound.is_better_than(best)) {
                break;
            }
            let pair_cost = self.pair_cost(*prompt, p, answer);
            if fits(p) && best.is_none_or(|best| pair_cost.is_better_than(best)) {
                (best, found) = (Some(pair_cost), Some(pair_cost));
            }
        }
        found
    }
}

impl PredictedLatency {
    /// Prices for a request that the candidates in `fields` may serve, with the configured parameters.
    fn prices<const N: usize>(&self, cx: &PickContext<'_>, fields: [&[Candidate<'_>]; N], serving: Serving) -> Prices {
        Prices::learned(cx, fields, serving).at(self.work_price).weighing(self.token_weight)
    }
}

impl Strategy for PredictedLatency {
    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        let prices = self.prices(cx, [candidates], Serving::of(cx));
        for (cost, candidate) in out.iter_mut().zip(candidates) {
            *cost = cost::whole(cx, candidate, &prices);
        }
        Some(Better::Lower)
    }

    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let prices = self.prices(cx, [candidates], Serving::of(cx));
        match CostFloor::of(cx, &prices).filter(|_| !ranking.is_explained()) {
            Some(floor) => {
                let score = |candidate| cost::whole(cx, candidate, &prices);
                rank_by_floors(candidates, |candidate| floor.floor(cx, candidate), score, rng, ranking);
            }
            None => rank_by_scores(self, cx, candidates, rng, ranking),
        }
        ranking.because("least predicted cost");
        ranking.scores_are_seconds();
        if ranking.is_explained() {
            let about = |c| {
                let (load, predicted) = cost::forecast(cx, c);
                let room = prices.room(cx, c, predicted.own_prefill, predicted.per_token);
                (load, predicted, room, prices.others(c, &load, &predicted, room))
            };
            let about: Vec<(Load, Prediction, f64, f64)> = candidates.iter().map(about).collect();
            let figure = |of: fn(&(Load, Prediction, f64, f64)) -> f64| {
                let about = &about;
                move |i: usize| about.get(i).map_or(f64::NAN, of)
            };
            ranking.note("first token, s", 0.0, candidates, figure(|(_, p, ..)| p.first_token));
            ranking.note("delay of others, s", 0.0, candidates, figure(|(.., others)| *others));
            ranking.note("own prefill, s", 0.0, candidates, figure(|(_, p, ..)| p.own_prefill));
            ranking.note("eviction, s", 0.0, candidates, figure(|(_, _, room, _)| *room));
            ranking.note("a token, s", 0.0, candidates, figure(|(_, p, ..)| p.per_token));
            ranking.note("decoding", 0.0, candidates, figure(|(load, ..)| load.decoding));
            if cx.objective.slo.is_some() {
                let risk = |(c, (load, predicted, ..)): (_, &(Load, Prediction, f64, f64))| {
                    prices.risk(cx, c, load, predicted)
                };
                let risks: Vec<f64> = candidates.iter().zip(&about).map(risk).collect();
                ranking.note("risk to miss targets, s", 0.0, candidates, |i| risks.get(i).copied().unwrap_or(f64::NAN));
            }
        }
    }

    /// The cheapest pair; of two with equal cost, the one whose servers are nearer.
    ///
    /// The search visits prefill servers by cost. It usually ends with the first one that may serve the decode server.
    /// It visits a few more if transfer times differ between topology levels, or if labels restrict pairs.
    fn pair(
        &self,
        cx: &PickContext<'_>,
        field: &PairCandidates<'_, '_>,
        rng: &mut PickRng,
        ranking: Ranking,
    ) -> Option<Pair> {
        let prices = self.prices(cx, [field.decode, field.prefill], Serving::OneOrTwoServers);
        let priced = |side: &[Candidate<'_>], cost: fn(&PickContext<'_>, &Candidate<'_>, &Prices) -> f64| {
            side.iter().map(|c| cost(cx, c, &prices)).collect::<SmallVec<[f64; 16]>>()
        };
        let (prefill, decode) = (priced(field.prefill, cost::prefill), priced(field.decode, cost::decode));
        let mut cheap: SmallVec<[(f64, &Arc<Endpoint>); 16]> =
            prefill.iter().copied().zip(field.prefill.iter().map(|c| &c.state.endpoint)).collect();
        cheap.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let places: Places = cheap.iter().map(|(_, p)| p.place).collect();
        // A random start, so that ties do not favour one end of the list.
        let start = rng.random_range(0..field.decode.len());
        let mut cheapest: Option<(PairCost, &Candidate<'_>)> = None;
        for at in (0..field.decode.len()).map(|i| (i + start) % field.decode.len()) {
            let (Some(d), Some(answer)) = (field.decode.get(at), decode.get(at)) else { continue };
            let inbound = InboundTransfer::to(&d.state.endpoint, cost::lacked(cx, d), &prices, &places);
            let fits = |p: &Endpoint| field.go_together(p, &d.state.endpoint);
            if let Some(pair_cost) = inbound.best(&cheap, *answer, cheapest.map(|(best, _)| best), fits) {
                cheapest = Some((pair_cost, d));
            }
        }
        let (PairCost(cost, near), chosen) = cheapest?;
        let decoder = &chosen.state.endpoint;
        let inbound = InboundTransfer::to(decoder, cost::lacked(cx, chosen), &prices, &places);
        let mut partners: SmallVec<[(PairCost, &Arc<Endpoint>); 16]> = cheap
            .iter()
            .filter(|(_, p)| field.go_together(p, decoder))
            .map(|(prompt, p)| (inbound.pair_cost(*prompt, p, 0.0), *p))
            .collect();
        partners.sort_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let picks = partners.iter().take(ranking.wanted().max(MAX_TRIES)).map(|(_, p)| (*p).clone()).collect();
        let mut decoders = smallvec![decoder.clone()];
        let local = field.whole.picks.iter().filter(|e| e.id != decoder.id).cloned();
        decoders.extend(local.take(ranking.wanted() - 1));
        let whole = field.whole.picks.first().and_then(|e| field.decoder(e)).map(|c| cost::whole(cx, c, &prices))?;
        let mut pair = Pair::proposed(picks, decoders, "least predicted cost of both");
        if ranking.is_explained() {
            let mut ranking = ranking;
            ranking.note("prefill for another, s", 0.0, field.prefill, |i| prefill.get(i).copied().unwrap_or(f64::NAN));
            ranking.note("decode for another, s", 0.0, field.decode, |i| decode.get(i).copied().unwrap_or(f64::NAN));
            pair.parts = ranking.into_parts();
            let first = |side: &[Candidate<'_>], costs: &[f64], of: &Endpoint| {
                side.iter().zip(costs).find(|(c, _)| c.id == of.id).map_or(f64::NAN, |(_, cost)| *cost)
            };
            let prompt = pair.prefill.first().map_or(f64::NAN, |p| first(field.prefill, &prefill, p));
            let answer = first(field.decode, &decode, decoder);
            let transfer = cost - prompt - answer;
            pair.costs = Some(PairCosts { prefill: prompt, transfer, decode: answer, whole: Some(whole), unit: "s" });
        }
        if field.policy.decider == Decider::Predicted {
            pair.split = Some(decoder.speed.pool().transfer().decides(whole, cost, near, cx.now, cx.dry_run));
        }
        Some(pair)
    }

    fn reads(&self) -> Reads {
        Reads { objective: true, ..Reads::PREFIX }
    }
}

#[cfg(test)]
mod tests;
