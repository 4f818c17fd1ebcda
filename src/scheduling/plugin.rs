//! The traits of routing algorithms and the data that they may read.

use super::candidates::Candidate;
use super::decision::{Decision, Ranking, Signal};
use super::digest::{Digest, Digests};
use super::division::Division;
use super::objective::Objective;
use super::policy::ModelPolicy;
use super::selector::LabelSelector;
use super::split::{self, Media, Pair, PairCandidates};
use super::subset::Subset;
use attache_pool::slo_profile::SloProfiles;
use attache_pool::{Endpoint, EndpointSpec, PoolSnapshot, Roles};
use attache_prefix::cache::Found;
use attache_protocol::Prompt;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;
use attache_types::{keywords, parameters};
use rand::RngExt;
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

pub use super::headers::{HeaderSource, Headers, PeerHeaders};
pub use attache_types::params::{Inert, NoParams, ParamError, Step, params, section};

/// Facts about the request that routing algorithms may read.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestFacts<'a> {
    /// Name of the model or LoRA adapter on the server, after rewriting; empty if unknown.
    pub model: &'a str,
    /// Estimated prompt length in tokens.
    pub prompt_tokens: u32,
    /// Maximum response length that the client set, in tokens.
    pub max_tokens: Option<u32>,
    /// Priority: higher is more important; requests with a negative one may be shed.
    pub priority: i32,
    /// Headers of the request.
    pub headers: Headers<'a>,
    /// Parsed prompt; `None` if the body could not be read.
    pub prompt: Option<&'a Prompt<'a>>,
    /// Request body; `None` where it is not available, as in replays.
    pub payload: Option<&'a [u8]>,
    /// Time in the queue so far.
    pub waited: Duration,
    /// Digests of the prompt's text, where decisions are recorded or replayed.
    pub digests: Option<&'a Digests>,
}

impl RequestFacts<'_> {
    /// The digest that `make` computes from the prompt; `None` without a prompt. `name` identifies the digest and its
    /// parameters; it is called only where decisions are recorded or replayed.
    pub fn digest(&self, name: impl FnOnce() -> String, make: impl FnOnce(&Prompt<'_>) -> Digest) -> Option<Digest> {
        match self.digests {
            None => self.prompt.map(make),
            Some(digests) => digests.get(name(), self.prompt, make),
        }
    }
}

/// Everything that a decision may depend on.
#[derive(Clone, Copy, Debug)]
pub struct PickContext<'a> {
    /// Time of the decision.
    pub now: Timestamp,
    /// The request.
    pub request: RequestFacts<'a>,
    /// The pool at that time.
    pub snapshot: &'a PoolSnapshot,
    /// Age at which metrics become stale.
    pub stale_after: Duration,
    /// The endpoints that the gateway allows; `None`: all.
    pub subset: Option<&'a Subset>,
    /// The request may be sent only to endpoints with these labels.
    pub filter: Option<&'a LabelSelector<'a>>,
    /// Cached prefix lengths by endpoint; `None` if the prefix index was not queried.
    pub prefix: Option<&'a Found>,
    /// Routing policy of the request's model.
    pub policy: ModelPolicy,
    /// Latency objectives of the pool.
    pub objective: Objective,
    /// Whether two servers may serve prefill and decode of the request.
    pub splittable: bool,
    /// Whether the request generates tokens, which decode-only servers can do only after another server's prefill.
    pub generates: bool,
    /// Whether encode servers may encode the request's images and sounds.
    pub encodable: bool,
    /// Whether this is a dry run: nothing of it may be recorded.
    pub dry_run: bool,
}

impl<'a> PickContext<'a> {
    /// Context of a decision at `now` about an unknown request.
    #[must_use]
    pub fn new(snapshot: &'a PoolSnapshot, now: Timestamp, stale_after: Duration) -> Self {
        let (request, policy, objective) = (RequestFacts::default(), ModelPolicy::default(), Objective::default());
        let (subset, filter, prefix) = (None, None, None);
        let (splittable, generates, encodable, dry_run) = (false, false, false, false);
        Self {
            now,
            request,
            snapshot,
            stale_after,
            subset,
            filter,
            prefix,
            policy,
            objective,
            splittable,
            generates,
            encodable,
            dry_run,
        }
    }

    /// Whether the gateway's subset and the request's labels allow the endpoint.
    #[must_use]
    pub fn allows(&self, spec: &EndpointSpec) -> bool {
        self.subset.is_none_or(|subset| subset.allows(spec.address))
            && self.filter.is_none_or(|filter| filter.matches(&spec.labels))
    }
}

/// What an algorithm reads of a request, so that nothing else is prepared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// [`Candidate::cached`]: prompts must be hashed into blocks and looked up.
    pub prefix: bool,
    /// Texts in [`RequestFacts::prompt`].
    pub prompt: bool,
    /// [`PickContext::objective`]: the pool's objectives affect the decision.
    pub objective: bool,
}

impl Reads {
    /// Reads nothing of the request.
    pub const NOTHING: Self = Self { prefix: false, prompt: false, objective: false };
    /// Reads cached prefix lengths.
    pub const PREFIX: Self = Self { prefix: true, ..Self::NOTHING };
    /// Reads the prompt's texts.
    pub const PROMPT: Self = Self { prompt: true, ..Self::NOTHING };

    /// What either of the two reads.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            prefix: self.prefix || other.prefix,
            prompt: self.prompt || other.prompt,
            objective: self.objective || other.objective,
        }
    }
}

/// Direction of a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Lower scores are better.
    Lower,
    /// Higher scores are better.
    Higher,
}

/// Names (lower case) and values of response headers.
pub type ResponseHeaders = Vec<(Cow<'static, str>, String)>;

/// What a request costs its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserCharge {
    /// Hash of the user's name, equal on all pickers.
    pub user: u64,
    /// Weighted tokens.
    pub tokens: u64,
}

/// A routing algorithm. It implements [`Strategy::scores`] if one figure per endpoint decides, or [`Strategy::rank`],
/// or both.
pub trait Strategy: Send + Sync + Debug {
    /// Puts the best candidates first into `ranking`, as many as `ranking` wants, and sets the reason. `candidates`
    /// is never empty; its order has no meaning.
    /// Must not change what a later decision sees, except a cursor that must advance at once, and never in a
    /// [`PickContext::dry_run`].
    ///
    /// Default: the best score first, ties at random; then endpoints without a score, by [`Strategy::fallback`].
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        rank_by_scores(self, cx, candidates, rng, ranking);
    }

    /// Writes one score per candidate, NaN if unknown; `out` must be as long as `candidates`. `None` if the algorithm
    /// has no scores, like a random draw or a rotation; it cannot be part of a weighted sum then.
    fn scores(&self, _: &PickContext<'_>, _: &[Candidate<'_>], _: &mut [f64]) -> Option<Better> {
        None
    }

    /// Order of endpoints without a score.
    fn fallback(&self) -> FigureFallback {
        FigureFallback::LeastRequest
    }

    /// Chooses the prefill and the decode server for a request that is split; `None` if there is no pair. `ranking`
    /// is empty; it gives the wanted number and whether to explain. Must not change state, as [`Strategy::rank`].
    ///
    /// Default: decode where the whole request would go; prefill where this strategy would send it among the servers
    /// that may prefill for that one.
    fn pair(
        &self,
        cx: &PickContext<'_>,
        field: &PairCandidates<'_, '_>,
        rng: &mut PickRng,
        ranking: Ranking,
    ) -> Option<Pair> {
        split::by_rank(self, cx, field, rng, ranking)
    }

    /// Whether the strategy has a rule of its own that splits the request if `decoder` serves it, whatever prefill
    /// servers there are; `None` leaves it to the pool's decider. It tells a request that the rule keeps whole from one
    /// without a pair.
    fn wants_pair(&self, _: &PickContext<'_>, _decoder: &Candidate<'_>) -> Option<bool> {
        None
    }

    /// Chooses the servers that encode images and sounds, once prefill and decode servers are known; `None` for none.
    /// `ranking` is empty and wants one server per item. Must not change state, as [`Strategy::rank`].
    ///
    /// Default: those with the fewest requests, unless the prefill server also encodes.
    fn encoders(
        &self,
        _: &PickContext<'_>,
        media: &Media<'_, '_>,
        rng: &mut PickRng,
        ranking: Ranking,
    ) -> Option<Decision> {
        split::encoders_by_load(media, rng, ranking)
    }

    /// Roles that an endpoint must have to be a candidate; [`Roles::NONE`] if the strategy filters by role itself.
    fn roles(&self, _: &PickContext<'_>) -> Roles {
        Roles::DECODE
    }

    /// Records that the request is sent to `endpoint`. Returns the digest that [`Strategy::moved`] needs, if any. Not
    /// called for dry runs.
    fn picked(&self, _: &PickContext<'_>, _: &Endpoint) -> Option<Digest> {
        None
    }

    /// Records a request for `model` that another picker sent to `endpoint`. Its own call of [`Strategy::picked`]
    /// returned `trail`.
    fn observe(&self, _model: &str, _trail: &Digest, _endpoint: EndpointId, _now: Timestamp) {}

    /// What [`Strategy::picked`] charges the user of the request, for other pickers; `None` if it charges no one.
    fn charge(&self, _: &PickContext<'_>) -> Option<UserCharge> {
        None
    }

    /// Charges a user for a request that another picker sent.
    fn charged(&self, _: UserCharge, _now: Timestamp) {}

    /// Moves the record of `trail`: Envoy sent a request for `model` to `to` instead of `from`, which was picked.
    fn moved(&self, _model: &str, _trail: &Digest, _from: EndpointId, _to: EndpointId, _now: Timestamp) {}

    /// Records that `endpoint` prefills the prompt of a split request; as [`Strategy::picked`].
    fn picked_prefill(&self, _: &PickContext<'_>, _: &Endpoint) {}

    /// Records that `endpoint` encodes media of the request; as [`Strategy::picked`].
    fn picked_encode(&self, _: &PickContext<'_>, _: &Endpoint) {}

    /// Drops all records of the caches of the endpoints in `lost`, before the next decision. These endpoints left the
    /// pool, or their model servers lost their caches.
    fn forget(&self, _lost: &[EndpointId]) {}

    /// Drops the endpoint that is recorded for the session `id` of `tenant`: no request of it will follow.
    fn end_session(&self, _tenant: Option<&str>, _id: &str) {}

    /// Adds response headers, once the endpoint that served is known.
    fn response_headers(&self, _: &Endpoint, _: &mut ResponseHeaders) {}

    /// What the algorithm reads of a request.
    fn reads(&self) -> Reads {
        Reads::NOTHING
    }

    /// Share of `endpoint` that the request takes until it ends, for
    /// [`EndpointLedger::utilization`](attache_pool::ledger::EndpointLedger::utilization); 0 if unknown.
    fn share(&self, _: &PickContext<'_>, _: &Endpoint) -> f64 {
        0.0
    }

    /// Seconds after its arrival that the request may wait and still meet its objective; below 0 if it misses it
    /// already. `None` if the algorithm knows no objective.
    fn spare(&self, _: &PickContext<'_>) -> Option<f64> {
        None
    }

    /// Passes each SLO profile store that it reads to `each`, so that its owner can fill it.
    fn profiles<'s>(&'s self, _each: &mut dyn FnMut(&'s Arc<SloProfiles>)) {}
}

/// The best score first, ties at random; then endpoints without a score, by [`Strategy::fallback`].
pub fn rank_by_scores<S: Strategy + ?Sized>(
    strategy: &S,
    cx: &PickContext<'_>,
    candidates: &[Candidate<'_>],
    rng: &mut PickRng,
    ranking: &mut Ranking,
) {
    let mut scores: SmallVec<[f64; 16]> = smallvec![f64::NAN; candidates.len()];
    let better = strategy.scores(cx, candidates, &mut scores);
    ranking.note("score", 1.0, candidates, |i| scores.get(i).copied().unwrap_or(f64::NAN));
    let sign = if better == Some(Better::Higher) { -1.0 } else { 1.0 };
    let known = scores.iter().any(|s| !s.is_nan());
    if !known {
        ranking.lacks(Signal::Metrics);
    }
    let at_random = strategy.fallback() == FigureFallback::Random;
    ranking.because(match better {
        _ if !known && at_random => "no endpoint has a score; random",
        _ if !known => "no endpoint has a score; fewest requests",
        Some(Better::Higher) => "highest score",
        _ => "lowest score",
    });
    let keyed = candidates.iter().zip(&scores).map(|(candidate, score)| {
        // NaN sorts last, in either direction of the score.
        let is_unscored = score.is_nan();
        let score = if is_unscored { 0 } else { ordered(score * sign) };
        // Requests decide only among endpoints without a score.
        let requests = if is_unscored && !at_random { candidate.requests } else { 0 };
        ((is_unscored, score, requests, rng.random::<u32>()), &candidate.state.endpoint)
    });
    ranking.push_lowest_scores(keyed, |(_, first, ..), (is_unscored, second, ..)| {
        (!is_unscored).then(|| score_of(*second) - score_of(*first))
    });
}

/// An integer that compares as `score` does; the two zeros are equal.
pub(crate) fn ordered(score: f64) -> i64 {
    let bits = (score + 0.0).to_bits().cast_signed();
    bits ^ ((bits >> 63).cast_unsigned() >> 1).cast_signed()
}

/// The score that [`ordered`] has made an integer.
pub(crate) fn score_of(ordered: i64) -> f64 {
    f64::from_bits((ordered ^ ((ordered >> 63).cast_unsigned() >> 1).cast_signed()).cast_unsigned())
}

/// A filter of a `pipeline`.
pub trait Filter: Send + Sync + Debug {
    /// Sets `keep` to false for candidates that must not serve the request. `keep` is as long as `candidates` and
    /// initially all true. If a filter keeps none, the request cannot be served.
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, keep: &mut [bool]);

    /// The missing signal, if none of these candidates has what the filter needs.
    fn lacks(&self, _: &PickContext<'_>, _: &[Candidate<'_>]) -> Option<Signal> {
        None
    }

    /// As [`Strategy::picked`].
    fn picked(&self, _: &PickContext<'_>, _: &Endpoint) {}

    /// As [`Strategy::end_session`].
    fn end_session(&self, _tenant: Option<&str>, _id: &str) {}

    /// As [`Strategy::response_headers`].
    fn response_headers(&self, _: &Endpoint, _: &mut ResponseHeaders) {}

    /// As [`Strategy::reads`].
    fn reads(&self) -> Reads {
        Reads::NOTHING
    }
}

/// A scorer of a `pipeline`.
pub trait Scorer: Send + Sync + Debug {
    /// Writes a score in 0..=1 per candidate; `out` must be as long as `candidates`.
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]);

    /// The missing signal, if none of these candidates has what the scorer needs.
    fn lacks(&self, _: &PickContext<'_>, _: &[Candidate<'_>]) -> Option<Signal> {
        None
    }

    /// As [`Strategy::picked`].
    fn picked(&self, _: &PickContext<'_>, _: &Endpoint) {}

    /// As [`Strategy::forget`].
    fn forget(&self, _lost: &[EndpointId]) {}

    /// As [`Strategy::end_session`].
    fn end_session(&self, _tenant: Option<&str>, _id: &str) {}

    /// As [`Strategy::response_headers`].
    fn response_headers(&self, _: &Endpoint, _: &mut ResponseHeaders) {}

    /// As [`Strategy::reads`].
    fn reads(&self) -> Reads {
        Reads::NOTHING
    }
}

/// A picker of a `pipeline`, which orders candidates by their sums.
pub trait Picker: Send + Sync + Debug {
    /// Puts candidates into `ranking`, best first, as many as it wants. `sums` is as long as `candidates`, which is
    /// not empty, and has no NaN and no negative number.
    fn pick(&self, sums: &[f32], candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking);
}

/// Chooses the profile of a `pipeline` for a request.
pub trait ProfileHandler: Send + Sync + Debug {
    /// Positions of the profiles (by name, in the order of the file) that may be chosen; never empty.
    ///
    /// # Errors
    /// A profile is missing or not allowed; the message is for the operator.
    fn eligible(&self, profiles: &[&str]) -> Result<Vec<usize>, ParamError>;

    /// Position of the request's profile among the eligible ones with these names. `None` if there is none for it;
    /// the request cannot be served then.
    fn choose(&self, cx: &PickContext<'_>, eligible: &[&str]) -> Option<usize>;

    /// How requests are split over servers.
    fn division(&self) -> Division {
        Division::ByPool
    }
}

/// Decides whether a stage of a request runs on a server of its own.
pub trait StageDecider: Send + Sync + Debug {
    /// Whether the stage runs. `decoder` is the decode server; `None` if it is not picked yet.
    fn runs(&self, cx: &PickContext<'_>, decoder: Option<&Candidate<'_>>) -> bool;

    /// As [`Strategy::reads`].
    fn reads(&self) -> Reads {
        Reads::NOTHING
    }
}

/// A part of a `pipeline`, built. Several profiles may share one instance.
#[derive(Clone, Debug)]
pub enum Plugin {
    /// A filter.
    Filter(Arc<dyn Filter>),
    /// A scorer.
    Scorer(Arc<dyn Scorer>),
    /// Both, with shared state. Methods of both traits are called on the filter only.
    FilterAndScorer(Arc<dyn Filter>, Arc<dyn Scorer>),
    /// A picker.
    Picker(Arc<dyn Picker>),
    /// A profile handler.
    Handler(Arc<dyn ProfileHandler>),
    /// A decider.
    Decider(Arc<dyn StageDecider>),
}

impl Plugin {
    /// As [`Strategy::picked`].
    pub fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        match self {
            Plugin::Filter(filter) | Plugin::FilterAndScorer(filter, _) => filter.picked(cx, endpoint),
            Plugin::Scorer(scorer) => scorer.picked(cx, endpoint),
            Plugin::Picker(_) | Plugin::Handler(_) | Plugin::Decider(_) => {}
        }
    }

    /// As [`Strategy::forget`]. No filter records the content of caches.
    pub fn forget(&self, lost: &[EndpointId]) {
        if let Plugin::Scorer(scorer) | Plugin::FilterAndScorer(_, scorer) = self {
            scorer.forget(lost);
        }
    }

    /// As [`Strategy::end_session`].
    pub fn end_session(&self, tenant: Option<&str>, id: &str) {
        match self {
            Plugin::Filter(filter) | Plugin::FilterAndScorer(filter, _) => filter.end_session(tenant, id),
            Plugin::Scorer(scorer) => scorer.end_session(tenant, id),
            Plugin::Picker(_) | Plugin::Handler(_) | Plugin::Decider(_) => {}
        }
    }

    /// As [`Strategy::response_headers`].
    pub fn response_headers(&self, endpoint: &Endpoint, headers: &mut ResponseHeaders) {
        match self {
            Plugin::Filter(filter) | Plugin::FilterAndScorer(filter, _) => filter.response_headers(endpoint, headers),
            Plugin::Scorer(scorer) => scorer.response_headers(endpoint, headers),
            Plugin::Picker(_) | Plugin::Handler(_) | Plugin::Decider(_) => {}
        }
    }

    /// As [`Strategy::reads`].
    #[must_use]
    pub fn reads(&self) -> Reads {
        match self {
            Plugin::Filter(filter) | Plugin::FilterAndScorer(filter, _) => filter.reads(),
            Plugin::Scorer(scorer) => scorer.reads(),
            Plugin::Decider(decider) => decider.reads(),
            Plugin::Picker(_) | Plugin::Handler(_) => Reads::NOTHING,
        }
    }
}

/// Order of endpoints for which a strategy has no figure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FigureFallback {
    /// The fewest requests first.
    #[default]
    LeastRequest,
    /// Random order, as in AIBrix.
    Random,
}

keywords! {
    FigureFallback: "least-request" => LeastRequest, "random" => Random;
}

parameters! {
    /// Parameters of a strategy that decides by one metric.
    #[derive(Clone, Copy)]
    pub struct FigureParams {
        /// Order of endpoints if none reports the metric.
        "fallback" => pub fallback: FigureFallback { default: FigureFallback::default(); },
    }
    /// Parameters of a strategy that decides by the number of requests.
    #[derive(Clone, Copy)]
    pub struct CountParams {
        /// Whether only this replica's requests count, as in AIBrix.
        "compat" => pub compat: bool { default: false; },
    }
}
