//! The result of a decision: ranked endpoints, the reason, and the figures behind them.

use super::candidates::Candidate;
use super::digest::Digest;
use super::split::{ComparedPair, Split, Unpaired};
use ahash::AHashMap;
use attache_pool::Endpoint;
use attache_types::ids::EndpointId;
use serde_json::{Map, Value, json};
use smallvec::SmallVec;
use std::sync::Arc;

attache_types::labels! {
    /// Input that an algorithm needs and did not have for a request; counted as degraded mode.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Signal {
        /// Metrics scraped from the model servers.
        Metrics => "no_metrics",
        /// Cached prefix lengths from the prefix index.
        Prefix => "no_prefix",
        /// The prompt's text.
        Prompt => "no_prompt",
        /// Learned speed of the servers: no response has been observed yet.
        Latency => "no_latency",
        /// The user of the request, from a header.
        User => "no_user",
        /// SLO profile of the servers: it is missing or has no objective.
        Profile => "no_profile",
    }
}

/// Figures of one part of an algorithm for all candidates, for explanations.
#[derive(Clone, Debug)]
pub struct PartFigures {
    /// Name of the part: the type of a scorer or filter, or what the figure is.
    pub name: &'static str,
    /// Weight of the figures in the sum that decided; 0 if they are not in a sum, such as a filter's 1 and 0.
    pub weight: f64,
    /// Figure of each candidate; NaN if it has none.
    pub figures: Vec<(Arc<Endpoint>, f64)>,
}

/// The second best endpoint of a decision, and how much worse it is than the first pick.
#[derive(Clone, Debug)]
pub struct SecondBest {
    /// The endpoint: the first fallback, if the decision has fallbacks.
    pub endpoint: Arc<Endpoint>,
    /// Difference between its score and that of the first pick; finite and not negative.
    pub margin: f64,
    /// Whether the scores are predicted costs in seconds.
    pub in_seconds: bool,
}

/// Endpoints in the order of preference, built by a strategy.
#[derive(Debug)]
pub struct Ranking {
    wanted: usize,
    picks: SmallVec<[Arc<Endpoint>; 4]>,
    reason: &'static str,
    lacking: Option<Signal>,
    emptied_by: Option<&'static str>,
    diverted: bool,
    second: Option<SecondBest>,
    /// Figures of each part, if an explanation is wanted.
    parts: Option<Vec<PartFigures>>,
}

impl Ranking {
    /// An empty ranking of at most `wanted` endpoints (at least one).
    #[must_use]
    pub fn new(wanted: usize) -> Self {
        Self {
            wanted: wanted.max(1),
            picks: SmallVec::new(),
            reason: "",
            lacking: None,
            emptied_by: None,
            diverted: false,
            second: None,
            parts: None,
        }
    }

    /// The same ranking, with an explanation: every part adds its figures.
    #[must_use]
    pub fn explained(mut self) -> Self {
        self.parts = Some(Vec::new());
        self
    }

    /// Whether an explanation is wanted.
    #[must_use]
    pub fn is_explained(&self) -> bool {
        self.parts.is_some()
    }

    /// Adds a part's figures to the explanation. `figure` maps a candidate's position to its figure; it is called
    /// only if an explanation is wanted.
    pub fn note(
        &mut self,
        name: &'static str,
        weight: f64,
        candidates: &[Candidate<'_>],
        figure: impl Fn(usize) -> f64,
    ) {
        if let Some(parts) = &mut self.parts {
            let figures = candidates.iter().enumerate().map(|(i, c)| (c.state.endpoint.clone(), figure(i))).collect();
            parts.push(PartFigures { name, weight, figures });
        }
    }

    /// The explanation; empty if none was wanted.
    #[must_use]
    pub fn into_parts(self) -> Vec<PartFigures> {
        self.parts.unwrap_or_default()
    }

    /// Records that the algorithm decided without `signal`. Only the first signal is kept.
    pub fn lacks(&mut self, signal: Signal) {
        self.lacking.get_or_insert(signal);
    }

    /// Records which part of the algorithm removed all endpoints.
    pub fn emptied(&mut self, part: &'static str) {
        self.emptied_by = Some(part);
    }

    /// The part of the algorithm that removed all endpoints, if one did.
    #[must_use]
    pub fn emptied_by(&self) -> Option<&'static str> {
        self.emptied_by
    }

    /// An empty ranking for as many endpoints, explained if this one is.
    #[must_use]
    pub fn another(&self) -> Self {
        Self { parts: self.parts.as_ref().map(|_| Vec::new()), ..Self::new(self.wanted) }
    }

    /// Takes over the decision of another ranking of the same candidates.
    pub fn adopt(&mut self, decision: Decision) {
        decision.picks.iter().for_each(|endpoint| self.push(endpoint));
        self.reason = decision.reason;
        self.lacking = self.lacking.or(decision.lacking);
        self.second = decision.second;
        if let Some(parts) = &mut self.parts {
            parts.extend(decision.parts.into_iter().flatten());
        }
    }

    /// Records that only load kept the request from the endpoint with the best prefix match.
    pub fn divert(&mut self) {
        self.diverted = true;
    }

    /// Number of endpoints that the caller wants.
    #[must_use]
    pub fn wanted(&self) -> usize {
        self.wanted
    }

    /// Whether the ranking has as many endpoints as the caller wants.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.picks.len() >= self.wanted
    }

    /// Adds the next best endpoint; ignored if the ranking is full or has it already.
    pub fn push(&mut self, endpoint: &Arc<Endpoint>) {
        if !self.is_full() && !self.picks.iter().any(|p| p.id == endpoint.id) {
            self.picks.push(endpoint.clone());
        }
    }

    /// Adds the endpoints with the lowest keys, lowest first, as many as the caller wants. One pass, without sorting
    /// the rest.
    pub fn push_lowest<'a, K: Ord>(&mut self, keyed: impl Iterator<Item = (K, &'a Arc<Endpoint>)>) {
        for (_, endpoint) in lowest(self.wanted, keyed) {
            self.push(endpoint);
        }
    }

    /// As [`Ranking::push_lowest`], with keys that contain scores. `margin` returns the difference between the scores
    /// in the lowest key and in the second lowest; `None` if one of them has none.
    pub fn push_lowest_scores<'a, K: Ord>(
        &mut self,
        keyed: impl Iterator<Item = (K, &'a Arc<Endpoint>)>,
        margin: impl FnOnce(&K, &K) -> Option<f64>,
    ) {
        let lowest = lowest(self.wanted.max(2), keyed);
        // Picks that a draw has made before have no order by score.
        if let ([(first, _), (second, endpoint), ..], true) = (lowest.as_slice(), self.picks.is_empty()) {
            self.precedes(endpoint, margin(first, second));
        }
        for (_, endpoint) in lowest {
            self.push(endpoint);
        }
    }

    /// Records that `endpoint` is the second best, if its score is worse than that of the first pick by the number
    /// `margin`.
    pub fn precedes(&mut self, endpoint: &Arc<Endpoint>, margin: Option<f64>) {
        let second =
            |margin: f64| SecondBest { endpoint: endpoint.clone(), margin: margin.max(0.0), in_seconds: false };
        self.second = margin.filter(|margin| margin.is_finite()).map(second);
    }

    /// Records that scores are predicted costs in seconds.
    pub fn scores_are_seconds(&mut self) {
        self.second.iter_mut().for_each(|second| second.in_seconds = true);
    }

    /// Sets the reason why the first endpoint was picked, in a few words for people.
    pub fn because(&mut self, reason: &'static str) {
        self.reason = reason;
    }

    /// The finished decision; `None` if the ranking has no endpoint.
    #[must_use]
    pub fn decide(self) -> Option<Decision> {
        (!self.picks.is_empty()).then_some(Decision {
            picks: self.picks,
            reason: self.reason,
            lacking: self.lacking,
            diverted: self.diverted,
            parts: self.parts,
            trail: None,
            second: self.second,
            runner_up: None,
            split: None,
            compared: None,
            unpaired: None,
            encode: Vec::new(),
            encode_probe: false,
            probe: false,
            ejection_ignored: false,
        })
    }
}

/// The `count` items with the lowest keys, lowest first.
fn lowest<'a, K: Ord>(
    count: usize,
    keyed: impl Iterator<Item = (K, &'a Arc<Endpoint>)>,
) -> SmallVec<[(K, &'a Arc<Endpoint>); 8]> {
    let mut lowest: SmallVec<[(K, &Arc<Endpoint>); 8]> = SmallVec::new();
    for (key, endpoint) in keyed {
        if lowest.len() >= count {
            if lowest.last().is_some_and(|(highest, _)| *highest <= key) {
                continue;
            }
            lowest.pop();
        }
        let at = lowest.partition_point(|(k, _)| *k <= key);
        lowest.insert(at, (key, endpoint));
    }
    lowest
}

impl Decision {
    /// The server that prefills the prompt.
    #[must_use]
    pub fn computing(&self) -> Option<&Arc<Endpoint>> {
        self.split.as_ref().map_or(&self.picks, |split| &split.prefill).first()
    }

    /// Scores by part and endpoint: `[{"part", "weight", "endpoints": {"ip:port": score}}]`, null for a missing score.
    /// Empty if the decision was not explained.
    #[must_use]
    pub fn parts_json(&self) -> Value {
        let part = |part: &PartFigures| {
            let figures = part.figures.iter().map(|(e, figure)| (e.authority.to_string(), json!(figure)));
            json!({"part": part.name, "weight": part.weight, "endpoints": figures.collect::<Map<_, _>>()})
        };
        self.parts.iter().flatten().map(part).collect()
    }

    /// Weighted sum of each endpoint, if the decision was explained. Endpoints without any figure are omitted.
    #[must_use]
    pub fn scores(&self) -> Vec<(Arc<Endpoint>, f64)> {
        let mut scores: Vec<(Arc<Endpoint>, f64)> = Vec::new();
        let mut places: AHashMap<EndpointId, usize> = AHashMap::new();
        let counted = self.parts.iter().flatten().filter(|part| part.weight != 0.0);
        for (weight, (endpoint, figure)) in counted.flat_map(|p| p.figures.iter().map(|f| (p.weight, f))) {
            if !figure.is_finite() {
                continue;
            }
            let place = *places.entry(endpoint.id).or_insert(scores.len());
            match scores.get_mut(place) {
                Some((_, sum)) => *sum += weight * figure,
                None => scores.push((endpoint.clone(), weight * figure)),
            }
        }
        scores
    }
}

/// Which endpoints serve a request.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Endpoints in the order of preference: the first is the primary, the others are for retries. Never empty.
    pub picks: SmallVec<[Arc<Endpoint>; 4]>,
    /// Why the first endpoint was picked.
    pub reason: &'static str,
    /// The signal that the algorithm decided without.
    pub lacking: Option<Signal>,
    /// Only load kept the request from the endpoint with the best prefix match (LocalAI's forced disturb). Frequent
    /// diversions mean that the pool is too small for its traffic.
    pub diverted: bool,
    /// The explanation, if it was wanted.
    pub parts: Option<Vec<PartFigures>>,
    /// The second best endpoint, if scores decided; `None` for a split request.
    pub second: Option<SecondBest>,
    /// The best endpoint that is not among `picks`, in an explanation with [`Explain::Full`](super::scheduler::Explain).
    pub runner_up: Option<Arc<Endpoint>>,
    /// Digest that [`Strategy::moved`](super::Strategy::moved) needs; boxed, since most strategies have none.
    pub trail: Option<Box<Digest>>,
    /// Set if another server prefills the prompt for the first pick; boxed, since most requests are not split.
    pub split: Option<Box<Split>>,
    /// The pair that was compared with the whole request, whether the request is split or not, in an explanation.
    pub compared: Option<Box<ComparedPair>>,
    /// Set if no prefill server was there for the request, so that its first pick prefills the prompt. `None` if the
    /// request is split, or if it is whole by choice.
    pub unpaired: Option<Unpaired>,
    /// Servers that encode images and sounds for the prefill server; empty if it encodes them itself or there are
    /// none.
    pub encode: Vec<Arc<Endpoint>>,
    /// The first of `encode` is half open and this request is its probe. If the probe ends without an outcome,
    /// another request may probe.
    pub encode_probe: bool,
    /// The first pick is half open and this request is its probe. If the request ends without an outcome,
    /// [`probe_lost`](attache_pool::health::EndpointHealth::probe_lost) lets another request probe.
    pub probe: bool,
    /// Every eligible endpoint is ejected, and one was picked all the same.
    pub ejection_ignored: bool,
}
