//! `pd`: a prefill server and a decode server of one roleset, chosen by AIBrix's rules.
//!
//! ```text
//! candidates   servers with a partner: prefill and decode servers by the pool's labels (`roleset-name`). With
//!              `promptLengthBucketing`, only those whose length range fits the prompt. If none fits: a combined
//!              server, else no endpoint.
//! combined     if a combined server has pressure < 0.25 while a prefill or decode server has > 1, the combined server
//!              with the lowest pressure serves the whole request
//!              pressure = waiting requests / requests finished per second
//! 1 prefill    requests differ by more than `prefillLoadImbalanceMinSpread`: the one with the fewest, and its partners
//! 2 decode     the first of these that applies:
//!              requests differ by `decodeLoadImbalanceMinSpread`: the fewest
//!              tokens/s differ by more than `decodeThroughputImbalanceMinSpread`: the least
//!              requests / max(finished per second, 0.1), max / min > `decodeScoreRatioThreshold`: the least
//! 3 the pair   lowest prefill / max(prefill, 1) + decode / max(decode, 0.01); scores by the two policies, see
//!              `pd/score.rs`
//! ```
//!
//! Every request for which a pair exists is split, except those for combined servers. The labels
//! `promptLenBucketMinLength` and `promptLenBucketMaxLength` give a server's range of prompt lengths, both inclusive.
//! Lengths are in bytes, four per token, unless `promptLengthUnit: tokens`. A combined server has the label
//! `combined: "true"` and the decode role. AIBrix reads these from an annotation. They apply with bucketing only.
//!
//! Differences from AIBrix, where Attaché has other data:
//! - Requests are those that the server reports plus those sent since; AIBrix counts its own.
//! - The queues of SGLang's prefill bootstrap are not read, so pressure counts waiting requests alone.
//! - Cached and uncached lengths are in tokens, also where AIBrix counts bytes.
//! - A server with missing or stale metrics counts the requests that Attaché sent to it.
//! - An unhealthy server or one without a partner is in no pair. The request is then served without a split; AIBrix
//!   rejects it.
//!
//! AIBrix 0.4 has none of these rules but the mean and deviation of step 3. It picks prefill by cached tokens, else
//! at random, and decode at random, of any roleset.
//! When not: servers differ in speed, or the transfer takes long; `predicted-latency` weighs both. Source: AIBrix
//! `pd` (development head, August 2026).
//!
//! With `compat: true` it decides as release 0.4, over servers with the label `role-name` alone:
//! - Without a prefill or a decode server, the request is rejected with status 503.
//! - The decode server is picked at random.
//! - The prefill server is the one that holds most of the prompt within the mean and deviation of requests, else a
//!   random one.
//! - `disaggregation.fallback` is `fail` unless it is set. Both servers are of one roleset here too.

mod score;

use attache_pool::role::AIBRIX_ROLE_LABEL;
use attache_pool::{Endpoint, Roles};
use attache_scheduling::plugin::{Inert, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::split::{MAX_TRIES, Pair, PairCandidates, PairCosts, Picks};
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::rng::PickRng;
use attache_types::{keywords, parameters};
use rand::RngExt;
use rand::seq::SliceRandom;
use score::{BalanceWeights, DecodeLoads, DecodePolicy, PrefillPolicy};
use serde_json::Value;
use smallvec::{SmallVec, smallvec};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "pd",
    summary: "Splits requests over a prefill and a decode server of one roleset, by AIBrix's imbalance rules and \
              scores.",
    source: "AIBrix `pd`",
    parameters: section::<Params>,
    build: |value, _| params(value).map(|params| Box::new(Pd(params)) as Box<dyn Strategy>),
};

/// A combined server below this pressure, in seconds, can take a whole request, as in AIBrix.
const LOW_PRESSURE: f64 = 0.25;
/// A prefill or decode server above this pressure, in seconds, is avoided, as in AIBrix: waiting requests take longer
/// than a second.
const HIGH_PRESSURE: f64 = 1.0;
/// Lower bound of requests finished per second, so that a stalled server's wait is long but finite.
const LEAST_DRAIN: f64 = 0.1;
/// Lower bound of the greatest prefill score, as in AIBrix.
const LEAST_MAX_PREFILL: f64 = 1.0;
/// Lower bound of the greatest decode score, as in AIBrix.
const LEAST_MAX_DECODE: f64 = 0.01;
/// Bytes per token where lengths are in bytes.
const BYTES_PER_TOKEN: u64 = 4;
/// A value of AIBrix's role label.
const PREFILL: &str = "prefill";
/// A value of AIBrix's role label.
const DECODE: &str = "decode";
/// Label with the shortest prompt that a server takes.
const MIN_LENGTH_LABEL: &str = "promptLenBucketMinLength";
/// Label with the longest prompt that a server takes.
const MAX_LENGTH_LABEL: &str = "promptLenBucketMaxLength";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LengthUnit {
    /// As AIBrix's default tokenizer counts.
    Bytes,
    Tokens,
}

keywords! {
    LengthUnit: "bytes" => Bytes, "tokens" => Tokens;
}

parameters! {
    // The defaults are AIBrix's.
    struct Params {
        /// Score of a prefill server: by cached prompt and requests, by requests alone, or by estimated time
        /// (`conductor`).
        "prefillScorePolicy" => prefill_score_policy: PrefillPolicy { default: PrefillPolicy::PrefixCache; },
        /// Score of a decode server: by requests, throughput and free KV cache, by requests alone, or by time per token
        /// (`conductor`).
        "decodeScorePolicy" => decode_score_policy: DecodePolicy { default: DecodePolicy::LoadBalancing; },
        /// Difference in requests above which the prefill server with the fewest is chosen.
        "prefillLoadImbalanceMinSpread" => prefill_load_imbalance_min_spread: u32 { default: 16; unit: "requests"; },
        /// Difference in requests from which the decode server with the fewest is chosen. Equal servers are never out
        /// of balance.
        "decodeLoadImbalanceMinSpread" => decode_load_imbalance_min_spread: f64 {
            default: 16.0; range: 0.0..; unit: "requests";
        },
        /// Difference in generated tokens per second above which the decode server that generates the fewest is chosen.
        "decodeThroughputImbalanceMinSpread" => decode_throughput_imbalance_min_spread: f64 {
            default: 2048.0; range: 0.0..; unit: "tokens per second";
        },
        /// Ratio of the longest to the shortest time to finish all requests, above which the decode server with the
        /// shortest is chosen.
        "decodeScoreRatioThreshold" => decode_score_ratio_threshold: f64 {
            default: 1.5; range: 0.0..; unit: "factor";
        },
        /// Weight of requests in the decode policy `load_balancing`.
        "decodeLBWeightRunning" => decode_lb_weight_running: f64 { default: 1.0; range: 0.0..; unit: "weight"; },
        /// Weight of throughput in the decode policy `load_balancing`. A server with more throughput scores better.
        "decodeLBWeightThroughput" => decode_lb_weight_throughput: f64 { default: 1.0; range: 0.0..; unit: "weight"; },
        /// Standard deviations by which a prefill server's requests may exceed the mean. 2 is from AIBrix's manifest;
        /// its code has 1.
        "standardDeviationFactor" => standard_deviation_factor: f64 {
            default: 2.0; range: 0.0..; unit: "standard deviations";
        },
        /// Whether a server takes only prompts within its labels `promptLenBucketMinLength` and
        /// `promptLenBucketMaxLength`.
        "promptLengthBucketing" => prompt_length_bucketing: bool { default: false; },
        /// Unit of the lengths in the labels of `promptLengthBucketing`. A token counts as 4 bytes.
        "promptLengthUnit" => prompt_length_unit: LengthUnit { default: LengthUnit::Bytes; },
        /// Whether to decide as AIBrix 0.4: a random decode server, and the prefill server by cached tokens within the
        /// load bound.
        "compat" => compat: bool { default: false; },
    }
}

fn is_on(parameters: &Value, key: &str) -> bool {
    parameters.get(key).is_some_and(|on| on == true)
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[
    Inert {
        plugins: &[PLUGIN.name],
        keys: &[
            "prefillScorePolicy",
            "decodeScorePolicy",
            "prefillLoadImbalanceMinSpread",
            "decodeLoadImbalanceMinSpread",
            "decodeThroughputImbalanceMinSpread",
            "decodeScoreRatioThreshold",
            "decodeLBWeightRunning",
            "decodeLBWeightThroughput",
            "promptLengthBucketing",
            "promptLengthUnit",
        ],
        when: |all| is_on(all, "compat"),
        why: "it needs `compat: false`; AIBrix 0.4 has no such rule",
    },
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["decodeLBWeightRunning", "decodeLBWeightThroughput"],
        when: |all| {
            let policy = all.get("decodeScorePolicy");
            !is_on(all, "compat") && policy.is_some_and(|policy| policy != "load_balancing")
        },
        why: "it needs `decodeScorePolicy: load_balancing`",
    },
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["promptLengthUnit"],
        when: |all| !is_on(all, "compat") && !is_on(all, "promptLengthBucketing"),
        why: "it needs `promptLengthBucketing: true`",
    },
];

#[derive(Debug)]
struct Pd(Params);

/// Whether AIBrix's label gives `endpoint` this role.
fn is_labelled(endpoint: &Endpoint, role: &str) -> bool {
    label(endpoint, AIBRIX_ROLE_LABEL) == Some(role) && endpoint.roles != Roles::NONE
}

/// Candidates of one side of a pair, prefill or decode.
type Side<'a> = SmallVec<[Candidate<'a>; 16]>;

fn label<'e>(endpoint: &'e Endpoint, name: &str) -> Option<&'e str> {
    endpoint.spec.labels.get(name).map(|value| &**value)
}

/// Seconds until the waiting requests are done; `None` if unknown.
fn pressure(candidate: &Candidate<'_>) -> Option<f64> {
    let drain = candidate.metrics()?.rates.finished.filter(|rate| *rate > 0.0)?;
    Some(f64::from(candidate.waiting) / drain)
}

/// The candidate with the lowest figure, ties at random. NaN figures are skipped.
fn least<'s, 'a>(
    side: &'s [Candidate<'a>],
    rng: &mut PickRng,
    figure: impl Fn(usize, &Candidate<'a>) -> f64,
) -> Option<&'s Candidate<'a>> {
    let keyed = side.iter().enumerate().map(|(i, c)| (figure(i, c), rng.random::<u32>(), c));
    let known = keyed.filter(|(figure, ..)| !figure.is_nan());
    known.min_by(|(a, x, _), (b, y, _)| a.total_cmp(b).then(x.cmp(y))).map(|(.., candidate)| candidate)
}

/// The lowest and the highest figure; NaN figures are skipped.
fn span(figures: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let known = figures.filter(|f| !f.is_nan());
    known.fold(None, |span, f| Some(span.map_or((f, f), |(least, most): (f64, f64)| (least.min(f), most.max(f)))))
}

impl Pd {
    /// Whether the server's labels allow a prompt of this length.
    fn fits(&self, cx: &PickContext<'_>, endpoint: &Endpoint) -> bool {
        let length = match self.0.prompt_length_unit {
            LengthUnit::Bytes => u64::from(cx.request.prompt_tokens) * BYTES_PER_TOKEN,
            LengthUnit::Tokens => u64::from(cx.request.prompt_tokens),
        };
        let bound = |name: &str| label(endpoint, name).and_then(|value| value.parse::<u64>().ok());
        let longest = bound(MAX_LENGTH_LABEL).filter(|most| *most > 0).unwrap_or(u64::MAX);
        (bound(MIN_LENGTH_LABEL).unwrap_or(0)..=longest).contains(&length)
    }

    /// The servers of `side` that may be in a pair, by their length labels and without combined servers.
    fn paired<'a>(&self, cx: &PickContext<'_>, side: &[Candidate<'a>]) -> Side<'a> {
        let bucketing = self.0.prompt_length_bucketing;
        let of_pairs = |c: &Candidate<'_>| !(cx.splittable && c.state.endpoint.is_combined());
        let may = |c: &&Candidate<'_>| !bucketing || (of_pairs(c) && self.fits(cx, &c.state.endpoint));
        side.iter().filter(may).copied().collect()
    }

    /// With bucketing, the combined server that serves the whole request in place of a pair. `Err`: no server fits
    /// the prompt's length.
    fn combined<'s, 'a>(
        &self,
        cx: &PickContext<'_>,
        candidates: &'s [Candidate<'a>],
        rng: &mut PickRng,
    ) -> Result<Option<&'s Candidate<'a>>, ()> {
        if !self.0.prompt_length_bucketing || !cx.splittable {
            return Ok(None);
        }
        let is_prefill =
            |c: &Candidate<'_>| c.state.endpoint.roles.has(Roles::PREFILL) && !c.state.endpoint.spec.draining;
        let pool: Side<'_> = cx
            .snapshot
            .endpoints
            .iter()
            .map(|s| Candidate::new(s, cx.now, cx.stale_after, 0))
            .filter(is_prefill)
            .collect();
        let (prefill, decode) = (self.paired(cx, &pool), self.paired(cx, candidates));
        let combined: SmallVec<[usize; 8]> = (0..candidates.len())
            .filter(|i| {
                candidates.get(*i).is_some_and(|c| c.state.endpoint.is_combined() && self.fits(cx, &c.state.endpoint))
            })
            .collect();
        let among = |i: usize| combined.contains(&i);
        if prefill.is_empty() || decode.is_empty() {
            return least(candidates, rng, |i, _| if among(i) { 0.0 } else { f64::NAN }).map(Some).ok_or(());
        }
        let pressed = |c: &Candidate<'_>| pressure(c).is_some_and(|p| p > HIGH_PRESSURE);
        if !prefill.iter().chain(&decode).any(pressed) {
            return Ok(None);
        }
        let idle =
            |i: usize, c: &Candidate<'_>| pressure(c).filter(|p| among(i) && *p < LOW_PRESSURE).unwrap_or(f64::NAN);
        Ok(least(candidates, rng, idle))
    }

    /// A prefill server with far fewer requests than the others, if there is one.
    fn idle_prefill<'s, 'a>(&self, side: &'s [Candidate<'a>], rng: &mut PickRng) -> Option<&'s Candidate<'a>> {
        let most = side.iter().map(|c| c.requests).max()?;
        let fewest = side.iter().map(|c| c.requests).min()?;
        let imbalanced = most - fewest > self.0.prefill_load_imbalance_min_spread;
        imbalanced.then(|| least(side, rng, |_, c| f64::from(c.requests)))?
    }

    /// A decode server with far less load than the others, if there is one, and the rule that found it.
    fn idle_decode<'s, 'a>(
        &self,
        side: &'s [Candidate<'a>],
        loads: &DecodeLoads,
        rng: &mut PickRng,
    ) -> Option<(&'s Candidate<'a>, &'static str)> {
        // A server without metrics may have just started, so it does not count as idle.
        let requests = |i: usize, c: &Candidate<'_>| if c.metrics().is_some() { loads.requests(i) } else { f64::NAN };
        let (fewest, most) = span(side.iter().enumerate().map(|(i, c)| requests(i, c))).unwrap_or_default();
        if most - fewest >= self.0.decode_load_imbalance_min_spread && most > fewest {
            return least(side, rng, requests).map(|c| (c, "far fewer requests"));
        }
        let throughput = |_: usize, c: &Candidate<'_>| score::reported_throughput(c).unwrap_or(f64::NAN);
        let (slowest, fastest) = span(side.iter().map(|c| throughput(0, c))).unwrap_or_default();
        if fastest - slowest > self.0.decode_throughput_imbalance_min_spread {
            return least(side, rng, throughput).map(|c| (c, "far fewer tokens a second"));
        }
        let drain = |c: &Candidate<'_>| c.metrics().and_then(|m| m.rates.finished).filter(|rate| *rate > 0.0);
        if !side.iter().all(|c| drain(c).is_some()) {
            return None;
        }
        let waits = |i: usize, c: &Candidate<'_>| loads.requests(i) / drain(c).unwrap_or_default().max(LEAST_DRAIN);
        let (least_wait, longest) = span(side.iter().enumerate().map(|(i, c)| waits(i, c)))?;
        let slow = least_wait > 0.0 && longest / least_wait > self.0.decode_score_ratio_threshold;
        slow.then(|| least(side, rng, waits).map(|c| (c, "done far sooner with what it has")))?
    }

    /// The decision of release 0.4: a random decode server, provided that there is a prefill server.
    fn rank_exactly(
        &self,
        cx: &PickContext<'_>,
        candidates: &[Candidate<'_>],
        rng: &mut PickRng,
        ranking: &mut Ranking,
    ) {
        let mut prefill = cx.snapshot.endpoints.iter().filter(|state| !state.is_draining());
        if !prefill.any(|state| is_labelled(&state.endpoint, PREFILL)) {
            return ranking.emptied("pd");
        }
        let mut decode: Side<'_> =
            candidates.iter().filter(|c| is_labelled(&c.state.endpoint, DECODE)).copied().collect();
        if decode.is_empty() {
            return ranking.emptied("pd");
        }
        decode.shuffle(rng);
        ranking.because("drawn");
        for candidate in &decode {
            ranking.push(&candidate.state.endpoint);
        }
    }

    /// The pair of release 0.4: the prefill server with the most cached tokens among those within the load bound,
    /// else a random one.
    fn pair_exactly(
        &self,
        field: &PairCandidates<'_, '_>,
        decode: &Candidate<'_>,
        rng: &mut PickRng,
        ranking: &Ranking,
    ) -> Option<Pair> {
        let d = &decode.state.endpoint;
        let fits =
            |c: &&Candidate<'_>| is_labelled(&c.state.endpoint, PREFILL) && field.go_together(&c.state.endpoint, d);
        let mut prefill: Side<'_> = field.prefill.iter().filter(fits).copied().collect();
        prefill.shuffle(rng);
        let bound = score::bound(&prefill, self.0.standard_deviation_factor);
        let may = |c: &Candidate<'_>| c.cached.any > 0 && f64::from(c.requests) <= bound;
        let best = prefill.iter().enumerate().filter(|(_, c)| may(c));
        let best = best.max_by(|(_, a), (_, b)| a.cached.any.cmp(&b.cached.any).then(b.requests.cmp(&a.requests)));
        let at = best.map(|(at, _)| at);
        if let Some(at) = at {
            prefill.swap(0, at);
        }
        let tries: Picks = prefill.iter().take(1).map(|c| c.state.endpoint.clone()).collect();
        if tries.is_empty() {
            return None;
        }
        let decoders: Picks = field.whole.picks.iter().take(ranking.wanted()).cloned().collect();
        let reason = if at.is_some() { "most of the prompt held" } else { "drawn" };
        Some(Pair { split: Some(true), ..Pair::proposed(tries, decoders, reason) })
    }

    fn weights(&self) -> BalanceWeights {
        BalanceWeights { running: self.0.decode_lb_weight_running, throughput: self.0.decode_lb_weight_throughput }
    }

    /// Scores of prefill servers; NaN for those above the load bound.
    fn prefill_scores(&self, cx: &PickContext<'_>, side: &[Candidate<'_>]) -> SmallVec<[f64; 16]> {
        let most = side.iter().map(|c| c.requests).max().unwrap_or(0).max(1);
        let bound = score::bound(side, self.0.standard_deviation_factor);
        let figure = |c: &Candidate<'_>| {
            let requests = f64::from(c.requests);
            if requests > bound { f64::NAN } else { self.0.prefill_score_policy.score(cx, c, f64::from(most)) }
        };
        side.iter().map(figure).collect()
    }
}

/// The servers of each side that have a partner on the other side.
fn complete<'a>(
    field: &PairCandidates<'_, '_>,
    prefill: &[Candidate<'a>],
    decode: &[Candidate<'a>],
) -> (Side<'a>, Side<'a>) {
    let go = |p: &Candidate<'_>, d: &Candidate<'_>| field.go_together(&p.state.endpoint, &d.state.endpoint);
    (
        prefill.iter().filter(|p| decode.iter().any(|d| go(p, d))).copied().collect(),
        decode.iter().filter(|d| prefill.iter().any(|p| go(p, d))).copied().collect(),
    )
}

/// The servers of `side` that can form a pair with `one`, which is on the other side.
fn partners<'a>(field: &PairCandidates<'_, '_>, side: &[Candidate<'a>], one: &Endpoint, is_decode: bool) -> Side<'a> {
    let fits = |c: &&Candidate<'_>| {
        let other = &c.state.endpoint;
        if is_decode { field.go_together(other, one) } else { field.go_together(one, other) }
    };
    side.iter().filter(fits).copied().collect()
}

/// Positions, on both sides, of the pair with the lowest sum of relative scores; ties at random.
fn cheapest(
    field: &PairCandidates<'_, '_>,
    (prefill, prefill_scores): (&[Candidate<'_>], &[f64]),
    (decode, decode_scores): (&[Candidate<'_>], &[f64]),
    rng: &mut PickRng,
) -> Option<(usize, usize)> {
    let most = |scores: &[f64], least: f64| scores.iter().filter(|s| !s.is_nan()).fold(least, |most, s| s.max(most));
    let (most_prefill, most_decode) = (most(prefill_scores, LEAST_MAX_PREFILL), most(decode_scores, LEAST_MAX_DECODE));
    let mut best: Option<((f64, u32), (usize, usize))> = None;
    for (at, (d, own)) in decode.iter().zip(decode_scores).enumerate() {
        for (partner, (p, score)) in prefill.iter().zip(prefill_scores).enumerate() {
            let sum = score / most_prefill + own / most_decode;
            if sum.is_nan() || best.is_some_and(|((least, _), _)| sum > least) {
                continue;
            }
            let key = (sum, rng.random::<u32>());
            let wins = best.is_none_or(|(other, _)| key < other);
            if wins && field.go_together(&p.state.endpoint, &d.state.endpoint) {
                best = Some((key, (partner, at)));
            }
        }
    }
    best.map(|(_, positions)| positions)
}

impl Strategy for Pd {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        if self.0.compat {
            return self.rank_exactly(cx, candidates, rng, ranking);
        }
        if candidates.iter().all(|c| c.metrics().is_none()) {
            ranking.lacks(Signal::Metrics);
        }
        let fitting = self.paired(cx, candidates);
        let combined = match self.combined(cx, candidates, rng) {
            Err(()) => return ranking.emptied("promptLengthBucketing"),
            Ok(combined) => combined,
        };
        let candidates = if fitting.is_empty() { candidates } else { &fitting };
        let loads = DecodeLoads::of(candidates);
        let first = match combined {
            Some(combined) => Some((combined, "a combined server that has time")),
            None => self.idle_decode(candidates, &loads, rng),
        };
        ranking.because(first.map_or("least decode score", |(_, why)| why));
        if let Some((first, _)) = first {
            ranking.push(&first.state.endpoint);
        }
        let scores = self.0.decode_score_policy.scores(candidates, &loads, self.weights());
        ranking.note("decode score", 0.0, candidates, |i| scores.get(i).copied().unwrap_or(f64::NAN));
        let mut order: SmallVec<[(f64, u32, usize); 16]> =
            scores.iter().enumerate().map(|(i, s)| (*s, rng.random(), i)).collect();
        order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for candidate in order.iter().filter_map(|(.., i)| candidates.get(*i)) {
            ranking.push(&candidate.state.endpoint);
        }
    }

    fn pair(
        &self,
        cx: &PickContext<'_>,
        field: &PairCandidates<'_, '_>,
        rng: &mut PickRng,
        ranking: Ranking,
    ) -> Option<Pair> {
        let whole = field.whole.picks.first().and_then(|e| field.decoder(e))?;
        if self.0.compat {
            return self.pair_exactly(field, whole, rng, &ranking);
        }
        if self.0.prompt_length_bucketing && whole.state.endpoint.is_combined() {
            return None;
        }
        let (mut prefill, mut decode) =
            complete(field, &self.paired(cx, field.prefill), &self.paired(cx, field.decode));
        let mut reason = "least sum of prefill and decode score";
        if let Some(idle) = self.idle_prefill(&prefill, rng).copied() {
            decode = partners(field, &decode, &idle.state.endpoint, false);
            prefill = smallvec![idle];
            reason = "a prefill server with far fewer requests";
        }
        // Relative loads compare all decode servers, also when one of them is singled out below.
        let mut loads = DecodeLoads::of(&decode);
        if let Some((idle, why)) = self.idle_decode(&decode, &loads, rng).map(|(c, why)| (*c, why)) {
            let aligned = partners(field, &prefill, &idle.state.endpoint, true);
            if !aligned.is_empty() {
                prefill = aligned;
            }
            loads = loads.only(decode.iter().position(|c| c.state.endpoint.id == idle.state.endpoint.id)?);
            decode = smallvec![idle];
            reason = why;
        }
        let prefill_scores = self.prefill_scores(cx, &prefill);
        let decode_scores = self.0.decode_score_policy.scores(&decode, &loads, self.weights());
        let (partner, at) = cheapest(field, (&prefill, &prefill_scores), (&decode, &decode_scores), rng)?;
        let (p, d) = (&prefill.get(partner)?.state.endpoint, &decode.get(at)?.state.endpoint);

        let mut others: SmallVec<[(f64, &Candidate<'_>); 16]> = prefill_scores.iter().copied().zip(&prefill).collect();
        others.retain(|(_, c)| c.state.endpoint.id != p.id && field.go_together(&c.state.endpoint, d));
        others.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let others = others.into_iter().map(|(_, c)| c.state.endpoint.clone());
        let tries: Picks = std::iter::once(p.clone()).chain(others).take(ranking.wanted().max(MAX_TRIES)).collect();
        let local = field.whole.picks.iter().filter(|e| e.id != d.id).cloned();
        let decoders: Picks = std::iter::once(d.clone()).chain(local).take(ranking.wanted()).collect();
        let mut pair = Pair { split: Some(true), ..Pair::proposed(tries, decoders, reason) };
        if ranking.is_explained() {
            let mut ranking = ranking;
            ranking.note("prefill score", 0.0, &prefill, |i| prefill_scores.get(i).copied().unwrap_or(f64::NAN));
            ranking.note("decode score of a pair", 0.0, &decode, |i| decode_scores.get(i).copied().unwrap_or(f64::NAN));
            pair.parts = ranking.into_parts();
            let costs = prefill_scores.get(partner).copied().zip(decode_scores.get(at).copied());
            pair.costs =
                costs.map(|(prefill, decode)| PairCosts { prefill, transfer: 0.0, decode, whole: None, unit: "score" });
        }
        Some(pair)
    }

    fn wants_pair(&self, _: &PickContext<'_>, decoder: &Candidate<'_>) -> Option<bool> {
        let bucketed = self.0.prompt_length_bucketing && !self.0.compat;
        Some(!(bucketed && decoder.state.endpoint.is_combined()))
    }

    fn reads(&self) -> Reads {
        match self.0.prefill_score_policy {
            PrefillPolicy::LeastRequest if !self.0.compat => Reads::NOTHING,
            _ => Reads::PREFIX,
        }
    }
}

#[cfg(test)]
mod tests;
