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
use attache_scheduling::plugin::{Better, Inert, ParamError, UserCharge, params};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Signal, Strategy};
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use parking_lot::Mutex;
use rand::RngExt;
use serde::Deserialize;
use smallvec::{SmallVec, smallvec};
use std::time::Duration;
use tracker::{Tracker, UserUsage};

mod tracker;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "vtc-basic",
    summary: "Steers users that were served many tokens recently to the last endpoints, weighed against load.",
    source: "AIBrix `vtc-basic`",
    build: |value, _| params::<Params>(value)?.build().map(|s| Box::new(s) as Box<dyn Strategy>),
};

/// Header with the user.
const DEFAULT_USER_HEADER: &str = "user";
/// 5 units of time.
const DEFAULT_WINDOW_SIZE: u32 = 5;
/// Weighted tokens below which users count as equal.
const DEFAULT_MIN_TOKENS: f64 = 1_000.0;
/// With `compat`, the greatest sum while there is no user.
const DEFAULT_MAX_TOKENS: f64 = 8_000.0;
/// Weight of an input token.
const DEFAULT_INPUT_TOKEN_WEIGHT: f64 = 1.0;
/// Weight of an output token.
const DEFAULT_OUTPUT_TOKEN_WEIGHT: f64 = 2.0;
/// Requests that weigh as much as the full fairness term.
const DEFAULT_MAX_POD_LOAD: f64 = 100.0;
/// Weight of the fairness term, and of the load term.
const DEFAULT_WEIGHT: f64 = 1.0;
/// Estimated output tokens per input token.
const OUTPUT_RATIO: f64 = 1.5;
/// With `compat`, the upper bound of the random part of a score.
const NOISE: f64 = 0.1;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum TimeUnit {
    Minutes,
    Seconds,
    Milliseconds,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    user_header: String,
    time_unit: TimeUnit,
    window_size: u32,
    min_tokens: f64,
    max_tokens: f64,
    input_token_weight: f64,
    output_token_weight: f64,
    max_pod_load: f64,
    fairness_weight: f64,
    utilization_weight: f64,
    compat: bool,
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["maxTokens"],
    when: |all| all.get("compat").is_none_or(|on| on == false),
    why: "it needs `compat: true`; otherwise users are compared with each other",
}];

impl Default for Params {
    fn default() -> Self {
        Self {
            user_header: DEFAULT_USER_HEADER.to_owned(),
            time_unit: TimeUnit::Minutes,
            window_size: DEFAULT_WINDOW_SIZE,
            min_tokens: DEFAULT_MIN_TOKENS,
            max_tokens: DEFAULT_MAX_TOKENS,
            input_token_weight: DEFAULT_INPUT_TOKEN_WEIGHT,
            output_token_weight: DEFAULT_OUTPUT_TOKEN_WEIGHT,
            max_pod_load: DEFAULT_MAX_POD_LOAD,
            fairness_weight: DEFAULT_WEIGHT,
            utilization_weight: DEFAULT_WEIGHT,
            compat: false,
        }
    }
}

impl Params {
    fn build(self) -> Result<VtcBasic, ParamError> {
        let not_negative = [
            ("inputTokenWeight", self.input_token_weight),
            ("outputTokenWeight", self.output_token_weight),
            ("fairnessWeight", self.fairness_weight),
            ("utilizationWeight", self.utilization_weight),
        ];
        let positive =
            [("minTokens", self.min_tokens), ("maxTokens", self.max_tokens), ("maxPodLoad", self.max_pod_load)];
        if let Some((name, value)) = not_negative.iter().find(|(_, v)| !v.is_finite() || *v < 0.0) {
            return Err(ParamError::value(name, value, "0 or more is allowed"));
        }
        if let Some((name, value)) = positive.iter().find(|(_, v)| !v.is_finite() || *v <= 0.0) {
            return Err(ParamError::value(name, value, "more than 0 is allowed"));
        }
        if self.window_size == 0 {
            return Err(ParamError::value("windowSize", 0, "at least 1 is needed"));
        }
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
