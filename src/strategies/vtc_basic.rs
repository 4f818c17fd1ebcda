//! `vtc-basic`: users that were served many tokens recently are steered to the last endpoints; all others use every
//! endpoint.
//!
//! ```text
//! served   = sum over the window of input tokens x 1 + estimated output tokens x 2
//!            estimate = min(1.5 x input, what the request allows)
//! share    = (served - least of all users) / max(greatest - least, minTokens), at most 1
//! position = position of the endpoint in order of ids, 0 (first) to 1 (last)
//! score    = fairnessWeight x max(share - position, 0) + utilizationWeight x requests / maxPodLoad; the lowest wins
//! ```
//!
//! A user is the request's tenant if `exchange.tenant` is set, else the value of the header `user`. Without a user,
//! the fewest requests decide. Beyond 10,000 users, those served least are dropped.
//! The strategy steers requests and does not queue them, so none of VTC's bounds hold. The real cost of a request is
//! not known in time.
//! When not: fairness between users does not matter, or untrusted clients set the header.
//!
//! `compat: true` uses AIBrix's own formula: `|position - served / max(minTokens, (least + greatest) / 2)|` in whole
//! positions. Load is clamped to `maxPodLoad`, and a random 0 to 0.1 is added.
//! A request without a user gets a random endpoint. AIBrix only ever prefers the first three endpoints, whatever the
//! size of the pool; its development head shuffles them, so the choice is random.
//! Source: AIBrix `vtc-basic`; the idea is VTC's (Sheng et al., "Fairness in Serving Large Language Models", OSDI
//! 2024).

use attache_pool::Endpoint;
use attache_scheduling::digest::{Digest, name_hash};
use attache_scheduling::plugin::{Better, Inert, ParamError, UserCharge, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Signal, Strategy};
use attache_types::clock::Timestamp;
use attache_types::declare::above;
use attache_types::rng::PickRng;
use attache_types::{keywords, parameters};
use parking_lot::Mutex;
use rand::RngExt;
use smallvec::{SmallVec, smallvec};
use std::time::Duration;
use tracker::{Tracker, UserUsage};

mod tracker;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "vtc-basic",
    summary: "Steers users that were served many tokens recently to the last endpoints, weighed against load.",
    source: "AIBrix `vtc-basic`",
    parameters: section::<Params>,
    build: |value, _| params::<Params>(value)?.build().map(|s| Box::new(s) as Box<dyn Strategy>),
};

/// Estimated output tokens per input token.
const OUTPUT_RATIO: f64 = 1.5;
/// With `compat`, the upper bound of the random part of a score.
const NOISE: f64 = 0.1;

#[derive(Clone, Copy, Debug)]
enum TimeUnit {
    Minutes,
    Seconds,
    Milliseconds,
}

keywords! {
    TimeUnit: "minutes" => Minutes, "seconds" => Seconds, "milliseconds" => Milliseconds;
}

parameters! {
    // The defaults are AIBrix's.
    struct Params {
        /// Request header with the user. With `exchange.tenant`, the tenant is the user instead.
        "userHeader" => user_header: String { default: "user".to_owned(); },
        /// Unit of `windowSize`.
        "timeUnit" => time_unit: TimeUnit { default: TimeUnit::Minutes; },
        /// Length of the window whose tokens count, in `timeUnit`.
        "windowSize" => window_size: u32 { default: 5; range: 1..; unit: "units of time"; },
        /// Least spread of weighted tokens among users that counts in full. A smaller spread counts in proportion.
        "minTokens" => min_tokens: f64 { default: 1_000.0; range: above(0.0); unit: "tokens"; },
        /// With `compat`: assumed greatest sum of weighted tokens while no user has any.
        "maxTokens" => max_tokens: f64 { default: 8_000.0; range: above(0.0); unit: "tokens"; },
        /// Weight of an input token.
        "inputTokenWeight" => input_token_weight: f64 { default: 1.0; range: 0.0..; unit: "weight"; },
        /// Weight of an output token.
        "outputTokenWeight" => output_token_weight: f64 { default: 2.0; range: 0.0..; unit: "weight"; },
        /// Requests at which the load term is 1. The fairness term is at most 1.
        "maxPodLoad" => max_pod_load: f64 { default: 100.0; range: above(0.0); unit: "requests"; },
        /// Weight of the fairness term, which is 0 to 1 without `compat`.
        "fairnessWeight" => fairness_weight: f64 { default: 1.0; range: 0.0..; unit: "weight"; },
        /// Weight of the load term: requests divided by `maxPodLoad`.
        "utilizationWeight" => utilization_weight: f64 { default: 1.0; range: 0.0..; unit: "weight"; },
        /// Whether to use AIBrix's own formula, with a random part of up to 0.1.
        "compat" => compat: bool { default: false; },
    }
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["maxTokens"],
    when: |all| all.get("compat").is_none_or(|on| on == false),
    why: "it needs `compat: true`; otherwise users are compared with each other",
}];

impl Params {
    fn build(self) -> Result<VtcBasic, ParamError> {
        if self.user_header.parse::<http::HeaderName>().is_err() {
            return Err(ParamError::value(
                "userHeader",
                format!("`{}`", self.user_header),
                "the name of a header is allowed",
            ));
        }
        let unit = match self.time_unit {
            TimeUnit::Minutes => Duration::from_secs(60),
            TimeUnit::Seconds => Duration::from_secs(1),
            TimeUnit::Milliseconds => Duration::from_millis(1),
        };
        let params = Params { user_header: self.user_header.to_ascii_lowercase(), ..self };
        Ok(VtcBasic { tracker: Mutex::new(Tracker::new(unit.saturating_mul(params.window_size))), params })
    }
}

#[derive(Debug)]
struct VtcBasic {
    params: Params,
    tracker: Mutex<Tracker>,
}

impl VtcBasic {
    fn user<'a>(&self, cx: &PickContext<'a>) -> Option<&'a str> {
        cx.request.headers.user(&self.params.user_header).map(str::trim).filter(|user| !user.is_empty())
    }

    /// Estimated cost of the request, in weighted tokens.
    fn cost(&self, cx: &PickContext<'_>) -> u64 {
        let input = f64::from(cx.request.prompt_tokens);
        let guess = (input * OUTPUT_RATIO).ceil();
        let allowed = cx.request.max_tokens.filter(|_| !self.params.compat).map_or(f64::INFINITY, f64::from);
        (input * self.params.input_token_weight + guess.min(allowed) * self.params.output_token_weight).round() as u64
    }

    fn usage(&self, user: &str, now: Timestamp) -> UserUsage {
        self.tracker.lock().usage(name_hash(user), now)
    }

    /// Writes one score per candidate; positions follow the order of ids.
    fn fill(&self, usage: UserUsage, candidates: &[Candidate<'_>], out: &mut [f64]) {
        let mut order: SmallVec<[(u32, usize); 16]> =
            candidates.iter().enumerate().map(|(i, c)| (c.state.endpoint.id.0, i)).collect();
        order.sort_unstable();
        let last = (candidates.len().max(2) - 1) as f64;
        for (position, (_, i)) in order.into_iter().enumerate() {
            if let (Some(candidate), Some(score)) = (candidates.get(i), out.get_mut(i)) {
                *score = if self.params.compat {
                    self.original(usage, position as f64, last, candidate)
                } else {
                    self.score(usage, position as f64 / last, candidate)
                };
            }
        }
    }

    fn score(&self, usage: UserUsage, place: f64, candidate: &Candidate<'_>) -> f64 {
        let p = &self.params;
        let width = usage.greatest.saturating_sub(usage.least) as f64;
        let share = (usage.served.saturating_sub(usage.least) as f64 / width.max(p.min_tokens)).min(1.0);
        let load = f64::from(candidate.requests) / p.max_pod_load;
        p.fairness_weight * (share - place).max(0.0) + p.utilization_weight * load
    }

    fn original(&self, usage: UserUsage, position: f64, last: f64, candidate: &Candidate<'_>) -> f64 {
        let p = &self.params;
        let middle = match usage.users {
            0 => p.min_tokens.midpoint(p.max_tokens),
            _ => (usage.least as f64).midpoint(usage.greatest as f64),
        };
        let wanted = (usage.served as f64 / middle.max(p.min_tokens)).min(last);
        let load = candidate.metrics().map_or(0.0, |m| f64::from(m.running) / p.max_pod_load).clamp(0.0, 1.0);
        p.fairness_weight * (position - wanted).abs() + p.utilization_weight * load
    }
}

impl Strategy for VtcBasic {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let Some(user) = self.user(cx) else {
            ranking.lacks(Signal::User);
            let compat = self.params.compat;
            ranking.because(if compat { "no user is named; random" } else { "no user is named; fewest requests" });
            let requests = |c: &Candidate<'_>| if compat { 0 } else { u64::from(c.requests) };
            let mut key = |c: &Candidate<'_>| (requests(c) << 32) | u64::from(rng.random::<u32>());
            ranking.push_lowest(candidates.iter().map(|c| (key(c), &c.state.endpoint)));
            return;
        };
        let mut scores: SmallVec<[f64; 16]> = smallvec![0.0; candidates.len()];
        self.fill(self.usage(user, cx.now), candidates, &mut scores);
        ranking.note("fairness and load", 1.0, candidates, |i| scores.get(i).copied().unwrap_or(f64::NAN));
        ranking.because("fairest by the tokens of the user");
        if self.params.compat {
            scores.iter_mut().for_each(|s| *s += rng.random::<f64>() * NOISE);
        }
        let mut order: SmallVec<[(f64, u32, usize); 16]> =
            scores.iter().enumerate().map(|(i, s)| (*s, rng.random(), i)).collect();
        order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for candidate in order.iter().filter_map(|(.., i)| candidates.get(*i)).take(ranking.wanted()) {
            ranking.push(&candidate.state.endpoint);
        }
    }

    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        match self.user(cx) {
            Some(user) => self.fill(self.usage(user, cx.now), candidates, out),
            None => out.fill(f64::NAN),
        }
        Some(Better::Lower)
    }

    fn picked(&self, cx: &PickContext<'_>, _: &Endpoint) -> Option<Digest> {
        self.tracker.lock().add(name_hash(self.user(cx)?), self.cost(cx), cx.now);
        None
    }

    fn charge(&self, cx: &PickContext<'_>) -> Option<UserCharge> {
        Some(UserCharge { user: name_hash(self.user(cx)?), tokens: self.cost(cx) })
    }

    fn charged(&self, charge: UserCharge, now: Timestamp) {
        self.tracker.lock().add(charge.user, charge.tokens, now);
    }
}

#[cfg(test)]
mod tests;
