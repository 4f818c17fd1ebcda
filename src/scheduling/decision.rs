//! What came of a decision.

use super::candidates::Candidate;
use super::digest::Digest;
use super::split::Split;
use ahash::AHashMap;
use attache_pool::Endpoint;
use attache_types::ids::EndpointId;
use smallvec::SmallVec;
use std::sync::Arc;

/// Something that an algorithm decides by and did not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Signal {
    /// A figure that the servers report.
    Metrics,
    /// Who holds how much of the prompt.
    Prefix,
    /// The prompt's text.
    Prompt,
    /// How fast the servers are: no answer has been seen yet.
    Latency,
    /// Who asks: a header that is missing.
    User,
    /// What the servers can do within their objectives: a profile that is missing, or says nothing of one.
    Profile,
}

/// What one part of an algorithm made of every candidate.
#[derive(Clone, Debug)]
pub struct Part {
    /// The part's name: a scorer's type, a filter's, or what the figure is.
    pub name: &'static str,
    /// What its figures were multiplied with in the sum that decided; 0 when they are not in a sum (a filter's 1 and 0, a figure for
    /// people).
    pub weight: f64,
    /// The figure of each candidate; NaN where there was none.
    pub figures: Vec<(Arc<Endpoint>, f64)>,
}

/// Endpoints in the order in which they should be tried, built by a strategy.
#[derive(Debug)]
pub struct Ranking {
    wanted: usize,
    picks: SmallVec<[Arc<Endpoint>; 4]>,
    reason: &'static str,
    lacking: Option<Signal>,
    emptied_by: Option<&'static str>,
    diverted: bool,
    /// What each part said, when somebody wants to know.
    parts: Option<Vec<Part>>,
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
            parts: None,
        }
    }

    /// The same, and every part says what it made of each candidate.
    #[must_use]
    pub fn explained(mut self) -> Self {
        self.parts = Some(Vec::new());
        self
    }

    /// Whether the parts are wanted.
    #[must_use]
    pub fn is_explained(&self) -> bool {
        self.parts.is_some()
    }

    /// Says what a part made of the candidates; `figure` is asked for each position, and only when somebody wants to know.
    pub fn note(
        &mut self,
        name: &'static str,
        weight: f64,
        candidates: &[Candidate<'_>],
        figure: impl Fn(usize) -> f64,
    ) {
        if let Some(parts) = &mut self.parts {
            let figures = candidates.iter().enumerate().map(|(i, c)| (c.state.endpoint.clone(), figure(i))).collect();
            parts.push(Part { name, weight, figures });
        }
    }

    /// What the parts said, when that was wanted.
    #[must_use]
    pub fn into_parts(self) -> Vec<Part> {
        self.parts.unwrap_or_default()
    }

    /// Says that the algorithm had to do without `signal`. The first one stands.
    pub fn lacks(&mut self, signal: Signal) {
        self.lacking.get_or_insert(signal);
    }

    /// Says which part of the algorithm left no endpoint to choose from.
    pub fn emptied(&mut self, part: &'static str) {
        self.emptied_by = Some(part);
    }

    /// Which part of the algorithm left no endpoint to choose from, if one did.
    #[must_use]
    pub fn emptied_by(&self) -> Option<&'static str> {
        self.emptied_by
    }

    /// An empty ranking that wants as many endpoints, and explains itself as much.
    #[must_use]
    pub fn another(&self) -> Self {
        Self { parts: self.parts.as_ref().map(|_| Vec::new()), ..Self::new(self.wanted) }
    }

    /// Takes over what another ranking of the same candidates came to.
    pub fn adopt(&mut self, decision: Decision) {
        decision.picks.iter().for_each(|endpoint| self.push(endpoint));
        self.reason = decision.reason;
        self.lacking = self.lacking.or(decision.lacking);
        if let Some(parts) = &mut self.parts {
            parts.extend(decision.parts.into_iter().flatten());
        }
    }

    /// Says that load alone kept the request from the endpoint that its prompt belongs to.
    pub fn divert(&mut self) {
        self.diverted = true;
    }

    /// How many endpoints are asked for.
    #[must_use]
    pub fn wanted(&self) -> usize {
        self.wanted
    }

    /// Whether as many endpoints as asked for are in.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.picks.len() >= self.wanted
    }

    /// Adds the next best endpoint; ignored when full or when it is in already.
    pub fn push(&mut self, endpoint: &Arc<Endpoint>) {
        if !self.is_full() && !self.picks.iter().any(|p| p.id == endpoint.id) {
            self.picks.push(endpoint.clone());
        }
    }

    /// Adds the endpoints with the lowest keys, lowest first, as many as are wanted; one pass, without sorting the rest.
    pub fn push_lowest<'a, K: Ord>(&mut self, keyed: impl Iterator<Item = (K, &'a Arc<Endpoint>)>) {
        let mut lowest: SmallVec<[(K, &Arc<Endpoint>); 8]> = SmallVec::new();
        for (key, endpoint) in keyed {
            if lowest.len() >= self.wanted {
                if lowest.last().is_some_and(|(highest, _)| *highest <= key) {
                    continue;
                }
                lowest.pop();
            }
            let at = lowest.partition_point(|(k, _)| *k <= key);
            lowest.insert(at, (key, endpoint));
        }
        for (_, endpoint) in lowest {
            self.push(endpoint);
        }
    }

    /// Says in a few words why the first endpoint won, for people.
    pub fn because(&mut self, reason: &'static str) {
        self.reason = reason;
    }

    /// The finished decision; `None` when the strategy named no endpoint.
    #[must_use]
    pub fn decide(self) -> Option<Decision> {
        (!self.picks.is_empty()).then_some(Decision {
            picks: self.picks,
            reason: self.reason,
            lacking: self.lacking,
            diverted: self.diverted,
            parts: self.parts,
            trail: None,
            split: None,
            encode: Vec::new(),
            encode_probe: false,
            probe: false,
            ejection_ignored: false,
        })
    }
}

impl Decision {
    /// The server that computes the prompt.
    #[must_use]
    pub fn computing(&self) -> Option<&Arc<Endpoint>> {
        self.split.as_ref().map_or(&self.picks, |split| &split.prefill).first()
    }

    /// Each endpoint's weighted sum, when the decision was explained. Those without any figure are left out.
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

/// Where a request goes.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The endpoints in order; the first is the primary, the rest are for retries. Never empty.
    pub picks: SmallVec<[Arc<Endpoint>; 4]>,
    /// Why the first one won.
    pub reason: &'static str,
    /// What the algorithm had to do without.
    pub lacking: Option<Signal>,
    /// Load alone kept the request from the endpoint that its prompt belongs to (LocalAI's forced disturb): a pool where that happens often
    /// is too small for its traffic.
    pub diverted: bool,
    /// What each of its parts made of each candidate, when that was asked for.
    pub parts: Option<Vec<Part>>,
    /// What the algorithm noted of the request, for [`Strategy::moved`](super::Strategy::moved); boxed, since most note nothing.
    pub trail: Option<Box<Digest>>,
    /// Another server computes the prompt for the first pick; boxed, since most requests are not split.
    pub split: Option<Box<Split>>,
    /// Who turns images and sounds into embeddings for the server that computes the prompt; empty when that one does so itself, or there are
    /// none.
    pub encode: Vec<Arc<Endpoint>>,
    /// The first of `encode` is half open and this request is its probe: should nobody say what became of it, another may go.
    pub encode_probe: bool,
    /// The first one is half open and this request is its probe: should the request end without an outcome, the endpoint's
    /// [`probe_lost`](attache_pool::health::EndpointHealth::probe_lost) lets another probe go.
    pub probe: bool,
    /// Every endpoint that might have served is ejected, and one was named all the same.
    pub ejection_ignored: bool,
}
