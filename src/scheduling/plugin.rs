//! What a routing algorithm is, and what it gets to see.

use super::candidates::Candidate;
use super::decision::{Decision, Ranking, Signal};
use super::digest::{Digest, Digests};
use super::division::Division;
use super::objective::Objective;
use super::policy::ModelPolicy;
use super::selector::LabelSelector;
use super::split::{self, Field, Media, Pair};
use attache_pool::slo_profile::SloProfiles;
use attache_pool::{Endpoint, PoolSnapshot, Roles};
use attache_prefix::cache::Found;
use attache_protocol::Prompt;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;
use rand::RngExt;
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

pub use attache_types::params::{NoParams, ParamError, Step, params};

/// The headers of a request, wherever they are kept.
pub trait HeaderSource: Debug {
    /// The first value of a header (lower-case name), when it is UTF-8.
    fn header(&self, name: &str) -> Option<&str>;

    /// Who sends the request: its tenant where the operator says how that is found, else what the header `name` says.
    fn user(&self, name: &str) -> Option<&str> {
        self.header(name)
    }

    /// The endpoint that was picked for another stage of the same request; no client can say that.
    fn peer(&self) -> Option<&Endpoint> {
        None
    }
}

impl HeaderSource for BTreeMap<String, String> {
    fn header(&self, name: &str) -> Option<&str> {
        self.get(name).map(String::as_str)
    }
}

/// The headers of a request; none by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Headers<'a>(Option<&'a dyn HeaderSource>);

impl<'a> Headers<'a> {
    /// The headers that `source` holds.
    #[must_use]
    pub fn of(source: &'a dyn HeaderSource) -> Self {
        Self(Some(source))
    }

    /// The first value of a header (lower-case name), when it is UTF-8.
    #[must_use]
    pub fn get(self, name: &str) -> Option<&'a str> {
        self.0?.header(name)
    }

    /// Who sends the request: its tenant where the operator says how that is found, else what the header `name` says.
    #[must_use]
    pub fn user(self, name: &str) -> Option<&'a str> {
        self.0?.user(name)
    }

    /// The endpoint that was picked for another stage of the same request.
    #[must_use]
    pub fn peer(self) -> Option<&'a Endpoint> {
        self.0?.peer()
    }
}

/// The headers of a request of which one stage has its endpoint already.
#[derive(Debug)]
pub struct Beside<'a> {
    /// The request's own.
    pub headers: Headers<'a>,
    /// The other stage's endpoint.
    pub peer: &'a Endpoint,
}

impl HeaderSource for Beside<'_> {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    fn user(&self, name: &str) -> Option<&str> {
        self.headers.user(name)
    }

    fn peer(&self) -> Option<&Endpoint> {
        Some(self.peer)
    }
}

/// The request as a routing algorithm sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestFacts<'a> {
    /// The model (or LoRA adapter) that the server will be asked for, after rewriting; empty when unknown.
    pub model: &'a str,
    /// Estimated prompt length, tokens.
    pub prompt_tokens: u32,
    /// Longest answer asked for, tokens.
    pub max_tokens: Option<u32>,
    /// More is more important; negative may be shed.
    pub priority: i32,
    /// Its headers.
    pub headers: Headers<'a>,
    /// Its prompt; `None` when the body could not be read.
    pub prompt: Option<&'a Prompt<'a>>,
    /// Its body as it came; `None` when it is not at hand, as in replays.
    pub payload: Option<&'a [u8]>,
    /// How long it has waited for its turn.
    pub waited: Duration,
    /// What is made of the prompt's text, where decisions are recorded or replayed.
    pub digests: Option<&'a Digests>,
}

impl RequestFacts<'_> {
    /// What `make` makes of the prompt; `None` when there is no prompt. `name` says what that is, its parameters included, and is asked for
    /// only where decisions are recorded or replayed.
    pub fn digest(&self, name: impl FnOnce() -> String, make: impl FnOnce(&Prompt<'_>) -> Digest) -> Option<Digest> {
        match self.digests {
            None => self.prompt.map(make),
            Some(digests) => digests.get(name(), self.prompt, make),
        }
    }
}

/// All that a decision may depend on.
#[derive(Clone, Copy, Debug)]
pub struct PickContext<'a> {
    /// The moment of the decision.
    pub now: Timestamp,
    /// The request.
    pub request: RequestFacts<'a>,
    /// The pool at this moment.
    pub snapshot: &'a PoolSnapshot,
    /// Metrics older than this say nothing.
    pub stale_after: Duration,
    /// The request lets itself be sent to endpoints with these labels only.
    pub filter: Option<&'a LabelSelector<'a>>,
    /// Who holds how much of the prompt; `None` when nobody has looked.
    pub prefix: Option<&'a Found>,
    /// What operators say about the request's model.
    pub policy: ModelPolicy,
    /// What operators want of the pool's latency.
    pub objective: Objective,
    /// Its prompt and its answer may be computed by two servers.
    pub splittable: bool,
    /// Tokens are generated for it, which a server that waits for what others compute can't do alone.
    pub generates: bool,
    /// Its images and sounds may be turned into embeddings by servers of their own.
    pub encodable: bool,
    /// Somebody asks where the request would go: nothing may be remembered of it.
    pub preview: bool,
}

impl<'a> PickContext<'a> {
    /// A decision at `now` about a request of which nothing is known.
    #[must_use]
    pub fn new(snapshot: &'a PoolSnapshot, now: Timestamp, stale_after: Duration) -> Self {
        let (request, policy, objective) = (RequestFacts::default(), ModelPolicy::default(), Objective::default());
        let (filter, prefix) = (None, None);
        let (splittable, generates, encodable, preview) = (false, false, false, false);
        Self {
            now,
            request,
            snapshot,
            stale_after,
            filter,
            prefix,
            policy,
            objective,
            splittable,
            generates,
            encodable,
            preview,
        }
    }
}

/// What an algorithm reads of a request, so that nothing is prepared that nobody reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// [`Candidate::cached`]: prompts must be turned into blocks and looked up.
    pub prefix: bool,
    /// The texts in [`RequestFacts::prompt`].
    pub prompt: bool,
    /// [`PickContext::objective`]: what operators want decides where the request goes.
    pub objective: bool,
}

impl Reads {
    /// None of it.
    pub const NOTHING: Self = Self { prefix: false, prompt: false, objective: false };
    /// Who holds how much of the prompt.
    pub const PREFIX: Self = Self { prefix: true, ..Self::NOTHING };
    /// The prompt's texts.
    pub const PROMPT: Self = Self { prompt: true, ..Self::NOTHING };

    /// What either reads.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            prefix: self.prefix || other.prefix,
            prompt: self.prompt || other.prompt,
            objective: self.objective || other.objective,
        }
    }
}

/// Which end of a score is the good one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Less is better.
    Lower,
    /// More is better.
    Higher,
}

/// Names (lower case) and values of headers for the client.
pub type AnswerHeaders = Vec<(Cow<'static, str>, String)>;

/// One named way to route. It implements [`Strategy::scores`], when one figure an endpoint decides, or [`Strategy::rank`], or both.
pub trait Strategy: Send + Sync + Debug {
    /// Puts the best candidates first in `ranking`, as many as `ranking` wants, and says why the first won. `candidates` is never
    /// empty and its order carries no meaning. Changes nothing that a later decision would see, unless the figure must be taken at once
    /// (a turn), and never in a [`PickContext::preview`].
    ///
    /// As given here: the best score first, ties at random; behind them, and when nobody has a score, [`Strategy::fallback`].
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        rank_by_scores(self, cx, candidates, rng, ranking);
    }

    /// Writes one figure for each candidate, NaN for those of which it is not known; `out` is as long as `candidates`. `None` when the
    /// algorithm is not of that kind (it draws, or takes turns), and then it can't be a part of a weighted sum.
    fn scores(&self, _: &PickContext<'_>, _: &[Candidate<'_>], _: &mut [f64]) -> Option<Better> {
        None
    }

    /// What decides among endpoints without a score.
    fn fallback(&self) -> FigureFallback {
        FigureFallback::LeastRequest
    }

    /// Chooses who computes the prompt and who makes the answer, should the request be split between two servers; `None` when there is no
    /// pair. `ranking` is empty and says how many are wanted and whether to explain. Changes nothing, as [`Strategy::rank`].
    ///
    /// As given here: the answer where the whole request would go, the prompt where this strategy would send it among the prefill
    /// servers that go together with that.
    fn pair(&self, cx: &PickContext<'_>, field: &Field<'_, '_>, rng: &mut PickRng, ranking: Ranking) -> Option<Pair> {
        split::by_rank(self, cx, field, rng, ranking)
    }

    /// Chooses who turns images and sounds of a request into embeddings, once it is known who computes its prompt and makes its answer; `None`
    /// when nobody else should. `ranking` is empty and wants one for each item. Changes nothing, as [`Strategy::rank`].
    ///
    /// As given here: those with the fewest requests, unless the server that computes the prompt encodes as well.
    fn encoders(
        &self,
        _: &PickContext<'_>,
        media: &Media<'_, '_>,
        rng: &mut PickRng,
        ranking: Ranking,
    ) -> Option<Decision> {
        split::encoders_by_load(media, rng, ranking)
    }

    /// What an endpoint must be there for to be put before it; [`Roles::NONE`] when it sorts out roles by itself.
    fn roles(&self, _: &PickContext<'_>) -> Roles {
        Roles::DECODE
    }

    /// The request goes to `endpoint`: what the algorithm remembers of its decisions, it notes here, and returns what [`Strategy::moved`] needs
    /// of it. Not called for previews.
    fn picked(&self, _: &PickContext<'_>, _: &Endpoint) -> Option<Digest> {
        None
    }

    /// Envoy had a request for `model` served by `to` and not by `from`, which was picked: what the algorithm noted under `trail` moves.
    fn moved(&self, _model: &str, _trail: &Digest, _from: EndpointId, _to: EndpointId, _now: Timestamp) {}

    /// `endpoint` computes the prompt of a request whose answer another makes: as [`Strategy::picked`].
    fn picked_prefill(&self, _: &PickContext<'_>, _: &Endpoint) {}

    /// `endpoint` encodes images, sounds or videos of the request: as [`Strategy::picked`].
    fn picked_encode(&self, _: &PickContext<'_>, _: &Endpoint) {}

    /// The endpoints in `lost` have left, or their model servers have lost their caches: whatever the algorithm remembers of what these
    /// caches hold is dropped here, before the next decision.
    fn forget(&self, _lost: &[EndpointId]) {}

    /// Headers for the client, once it is known who served.
    fn answer_headers(&self, _: &Endpoint, _: &mut AnswerHeaders) {}

    /// What it reads of a request.
    fn reads(&self) -> Reads {
        Reads::NOTHING
    }

    /// The part of `endpoint` that the request takes there until it ends, for [`EndpointLedger::utilization`](attache_pool::ledger::EndpointLedger::utilization);
    /// 0 where it does not know.
    fn share(&self, _: &PickContext<'_>, _: &Endpoint) -> f64 {
        0.0
    }

    /// Seconds that the request may wait from its arrival on and still meet its objective, as far as the algorithm knows one; below 0 when it
    /// misses it as it is.
    fn spare(&self, _: &PickContext<'_>) -> Option<f64> {
        None
    }

    /// Tells `each` of the profiles that it reads, which somebody has to publish.
    fn profiles<'s>(&'s self, _each: &mut dyn FnMut(&'s Arc<SloProfiles>)) {}
}

/// The best score first, ties at random; behind them, and when nobody has a score, [`Strategy::fallback`].
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
    let mut order: SmallVec<[(f64, u32, u32, usize); 16]> = candidates
        .iter()
        .zip(&scores)
        .enumerate()
        // NaN sorts behind every number, whichever way the score counts.
        .map(|(i, (c, s))| (if s.is_nan() { f64::NAN } else { s * sign }, c.requests, rng.random(), i))
        .collect();
    let before = |a: &(f64, u32, u32, usize), b: &(f64, u32, u32, usize)| {
        let scored =
            a.0.is_nan().cmp(&b.0.is_nan()).then_with(|| a.0.partial_cmp(&b.0).unwrap_or(std::cmp::Ordering::Equal));
        // Requests decide among those without a score only: equal scores are equal.
        let by_requests = a.0.is_nan() && b.0.is_nan() && !at_random;
        let unscored = if by_requests { a.1.cmp(&b.1) } else { std::cmp::Ordering::Equal };
        scored.then(unscored).then(a.2.cmp(&b.2))
    };
    if ranking.wanted() < order.len() {
        order.select_nth_unstable_by(ranking.wanted(), before);
        order.truncate(ranking.wanted());
    }
    order.sort_unstable_by(before);
    for (.., i) in order.into_iter().take(ranking.wanted()) {
        if let Some(candidate) = candidates.get(i) {
            ranking.push(&candidate.state.endpoint);
        }
    }
}

/// Narrows the candidates of a `pipeline`.
pub trait Filter: Send + Sync + Debug {
    /// Sets to false in `keep` what may not serve the request; `keep` is as long as `candidates` and comes all true. Keeping nobody is
    /// allowed: then the request can't be served.
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, keep: &mut [bool]);

    /// What it judges by and has of none of these candidates.
    fn lacks(&self, _: &PickContext<'_>, _: &[Candidate<'_>]) -> Option<Signal> {
        None
    }

    /// As [`Strategy::picked`].
    fn picked(&self, _: &PickContext<'_>, _: &Endpoint) {}

    /// As [`Strategy::answer_headers`].
    fn answer_headers(&self, _: &Endpoint, _: &mut AnswerHeaders) {}

    /// As [`Strategy::reads`].
    fn reads(&self) -> Reads {
        Reads::NOTHING
    }
}

/// One part of a `pipeline`'s sum.
pub trait Scorer: Send + Sync + Debug {
    /// Writes a score in 0..=1 for each candidate; `out` is as long as `candidates`.
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]);

    /// What it scores by and has of none of these candidates.
    fn lacks(&self, _: &PickContext<'_>, _: &[Candidate<'_>]) -> Option<Signal> {
        None
    }

    /// As [`Strategy::picked`].
    fn picked(&self, _: &PickContext<'_>, _: &Endpoint) {}

    /// As [`Strategy::forget`].
    fn forget(&self, _lost: &[EndpointId]) {}

    /// As [`Strategy::answer_headers`].
    fn answer_headers(&self, _: &Endpoint, _: &mut AnswerHeaders) {}

    /// As [`Strategy::reads`].
    fn reads(&self) -> Reads {
        Reads::NOTHING
    }
}

/// Chooses by the sums of a `pipeline`.
pub trait Picker: Send + Sync + Debug {
    /// Puts candidates into `ranking`, the first pick first, as many as it wants. `sums` is as long as `candidates`, which are not empty;
    /// it holds no NaN and nothing below 0.
    fn pick(&self, sums: &[f32], candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking);
}

/// Chooses the profile of a `pipeline` that decides about a request.
pub trait ProfileHandler: Send + Sync + Debug {
    /// Which of these profiles (their names, in the order of the file) can come to decide, by position; never none.
    ///
    /// # Errors
    /// What is missing or too much, for the operator.
    fn eligible(&self, profiles: &[&str]) -> Result<Vec<usize>, ParamError>;

    /// The position of the profile for this request among the eligible ones, whose names are given; `None` when there is none for it,
    /// and then the request can't be served.
    fn choose(&self, cx: &PickContext<'_>, eligible: &[&str]) -> Option<usize>;

    /// How requests are split between servers.
    fn division(&self) -> Division {
        Division::ByPool
    }
}

/// Says whether a stage of a request runs on a server of its own.
pub trait StageDecider: Send + Sync + Debug {
    /// Whether it does. `decoder` makes the answer; `None` when it is not picked yet.
    fn runs(&self, cx: &PickContext<'_>, decoder: Option<&Candidate<'_>>) -> bool;

    /// As [`Strategy::reads`].
    fn reads(&self) -> Reads {
        Reads::NOTHING
    }
}

/// A part of a `pipeline`, made. One instance may stand in several profiles.
#[derive(Clone, Debug)]
pub enum Plugin {
    /// Narrows.
    Filter(Arc<dyn Filter>),
    /// Scores.
    Scorer(Arc<dyn Scorer>),
    /// Does both, with one memory: what is common to both traits is asked of the filter alone.
    FilterAndScorer(Arc<dyn Filter>, Arc<dyn Scorer>),
    /// Chooses.
    Picker(Arc<dyn Picker>),
    /// Chooses the profile.
    Handler(Arc<dyn ProfileHandler>),
    /// Says whether a stage runs.
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

    /// As [`Strategy::forget`]. No filter remembers a cache.
    pub fn forget(&self, lost: &[EndpointId]) {
        if let Plugin::Scorer(scorer) | Plugin::FilterAndScorer(_, scorer) = self {
            scorer.forget(lost);
        }
    }

    /// As [`Strategy::answer_headers`].
    pub fn answer_headers(&self, endpoint: &Endpoint, headers: &mut AnswerHeaders) {
        match self {
            Plugin::Filter(filter) | Plugin::FilterAndScorer(filter, _) => filter.answer_headers(endpoint, headers),
            Plugin::Scorer(scorer) => scorer.answer_headers(endpoint, headers),
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

/// What decides among endpoints of which a strategy has no figure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FigureFallback {
    /// The fewest requests.
    #[default]
    LeastRequest,
    /// A draw, as in AIBrix.
    Random,
}

/// The parameters of a strategy that decides by one figure.
#[derive(Clone, Copy, Debug, Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FigureParams {
    /// Decides where no endpoint reports the figure.
    pub fallback: FigureFallback,
}

/// The parameters of a strategy that decides by the number of requests.
#[derive(Clone, Copy, Debug, Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CountParams {
    /// Only what this picker sent counts, as in AIBrix.
    pub compat: bool,
}
