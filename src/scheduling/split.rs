//! Prefill on one server, decode on another: whether a request is split, and over which pair.
//!
//! [`Scheduler::decide`](super::Scheduler::decide) first finds the endpoint for the whole request, then asks the
//! strategy for a [`Pair`]. Unless the strategy has decided by a rule of its own, the pool's [`Decider`] compares the
//! two. The times are those of [`super::facts::cost`], which are learned.
//!
//! ```text
//! whole  = first token on D, the uncached prompt included   + price · (own prefill + room) on D
//! split  = first token on P + transfer of what D lacks + D's queue
//!          + price · (own prefill + room) on P + price · room on D
//! split when split < whole, by more than the transfer's time is uncertain when the last request went the other way
//! ```
//!
//! Pure. Source: the two-stage choices of llm-d's `disagg-profile-handler` and AIBrix's `pd`, made in one step.

use super::candidates::Candidate;
use super::decision::{Decision, PartFigures, Ranking};
use super::facts::cost::{self, Prices, Serving};
use super::plugin::{PickContext, Strategy};
use attache_pool::{Endpoint, Roles};
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use rand::RngExt;
use serde_json::{Value, json};
use smallvec::SmallVec;
use std::sync::Arc;

pub use attache_pool::Picks;

/// 3 prefill servers are named: if two have failed within one request, the decode server prefills the prompt.
pub const MAX_TRIES: usize = 3;

/// How a pool splits requests.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitPolicy {
    /// What decides whether a request is split if the strategy does not.
    pub decider: Decider,
    /// Labels that prefill and encode servers must share with the decode server, where it has them.
    pub together: Vec<Arc<str>>,
    /// Whether decode servers also serve requests that are not split. If not, servers with both roles and combined
    /// ones serve those requests and are in no pair.
    pub whole: bool,
    /// Whether a request that must be split is rejected if no prefill server is there for it. If not, its decode server
    /// prefills the prompt.
    pub required: bool,
}

/// Why a request without a pair might have been split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unpaired {
    /// The decider compares times, and there was no pair to compare.
    Undecided,
    /// The decider or a rule of the strategy splits the request.
    Wanted,
}

impl SplitPolicy {
    /// How a request is served that `decoder` would decode and for which no prefill server is there; `None` if it is
    /// whole by choice.
    #[must_use]
    pub fn unpaired(&self, strategy: &dyn Strategy, cx: &PickContext<'_>, decoder: &Candidate<'_>) -> Option<Unpaired> {
        let wanted = match (strategy.wants_pair(cx, decoder), self.decider) {
            (Some(wanted), _) => wanted,
            (None, Decider::Always) => true,
            (None, Decider::Never | Decider::Strategy) => false,
            (None, Decider::PrefixBased { non_cached_tokens, prompt_tokens }) => {
                lacks_enough(cx, decoder, non_cached_tokens, prompt_tokens)
            }
            (None, Decider::Predicted) => return Some(Unpaired::Undecided),
        };
        wanted.then_some(Unpaired::Wanted)
    }

    /// Whether `helper` has the same values of the labels in `together` as `decode`, where `decode` has them.
    #[must_use]
    pub fn fits(&self, helper: &Endpoint, decode: &Endpoint) -> bool {
        let (theirs, wanted) = (&helper.spec.labels, &decode.spec.labels);
        let same = |name: &Arc<str>| wanted.get(&**name).is_none_or(|wanted| theirs.get(&**name) == Some(wanted));
        self.together.iter().all(same)
    }

    /// Whether requests that the strategy `name` routes may be split. With [`Decider::Strategy`], only those of `pd`,
    /// alone or in a sum.
    #[must_use]
    pub fn asks(&self, name: &str) -> bool {
        let is_pd = |part: &str| part.split(':').next().is_some_and(|name| name.trim() == "pd");
        self.decider != Decider::Strategy || name.split(',').any(is_pd)
    }

    /// Whether `endpoint` serves requests that are not split.
    #[must_use]
    pub fn serves_whole(&self, endpoint: &Endpoint) -> bool {
        self.whole || endpoint.roles.has(Roles::PREFILL.and(Roles::DECODE)) || endpoint.is_combined()
    }

    /// Whether `prefill` may prefill for `decode`: another server, with the same labels where required.
    #[must_use]
    pub fn pairs(&self, prefill: &Endpoint, decode: &Endpoint) -> bool {
        let takes_part = |endpoint| self.whole || !self.serves_whole(endpoint);
        prefill.id != decode.id && takes_part(prefill) && takes_part(decode) && self.fits(prefill, decode)
    }
}

impl Decider {
    /// What decides, for explanations.
    pub(super) fn about(self) -> &'static str {
        match self {
            Self::Predicted => "the lower predicted cost (decider `predicted`)",
            Self::Always => "the decider `always`",
            Self::Never => "the decider `never`",
            Self::Strategy => "a rule of the strategy",
            Self::PrefixBased { .. } => "the uncached tokens on the decode server (decider `prefix-based`)",
        }
    }
}

/// What decides whether a request is split.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Decider {
    /// Split if the first token is predicted to come sooner, including the delay for other requests.
    #[default]
    Predicted,
    /// Split if there is a pair.
    Always,
    /// Never.
    Never,
    /// Split if a rule of the strategy requires it, as with `pd`.
    Strategy,
    /// llm-d's `prefix-based-pd-decider`: split if the prompt has at least `prompt_tokens` and the decode server
    /// lacks at least `non_cached_tokens` of them. 0 `non_cached_tokens` never splits.
    PrefixBased {
        /// Uncached tokens on the decode server.
        non_cached_tokens: u32,
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
}

/// The servers that a strategy may choose a pair from.
#[derive(Clone, Copy, Debug)]
pub struct PairCandidates<'f, 'a> {
    /// Servers that may prefill the prompt; never empty.
    pub prefill: &'f [Candidate<'a>],
    /// Servers that may decode; never empty.
    pub decode: &'f [Candidate<'a>],
    /// Decision for the whole request.
    pub whole: &'f Decision,
    /// The pool's policy.
    pub policy: &'f SplitPolicy,
}

impl<'a> PairCandidates<'_, 'a> {
    /// The decode candidate for `endpoint`.
    #[must_use]
    pub fn decoder(&self, endpoint: &Endpoint) -> Option<&Candidate<'a>> {
        self.decode.iter().find(|c| c.state.endpoint.id == endpoint.id)
    }

    /// As [`SplitPolicy::pairs`].
    #[must_use]
    pub fn go_together(&self, prefill: &Endpoint, decode: &Endpoint) -> bool {
        self.policy.pairs(prefill, decode)
    }

    /// The prefill servers that may prefill for `decode`.
    #[must_use]
    pub fn partners(&self, decode: &Endpoint) -> SmallVec<[Candidate<'a>; 16]> {
        self.prefill.iter().filter(|p| self.go_together(&p.state.endpoint, decode)).copied().collect()
    }
}

/// The servers that a strategy may choose encode servers from.
#[derive(Clone, Copy, Debug)]
pub struct Media<'f, 'a> {
    /// Servers that may encode images and sounds; never empty.
    pub encode: &'f [Candidate<'a>],
    /// Servers that may decode; never empty.
    pub decode: &'f [Candidate<'a>],
    /// Decision with the request's prefill and decode servers.
    pub sent: &'f Decision,
}

impl<'a> Media<'_, 'a> {
    /// The decode candidate that serves the request.
    #[must_use]
    pub fn decoder(&self) -> Option<&Candidate<'a>> {
        let first = self.sent.picks.first()?;
        self.decode.iter().find(|c| c.id == first.id)
    }
}

/// A prefill and a decode server for one request, with fallbacks for each.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Prefill servers, in the order of attempts.
    pub prefill: Picks,
    /// Decode servers, the first for the request and the others for retries.
    pub decode: Picks,
    /// Whether the request is split: `None` leaves it to the pool's decider.
    pub split: Option<bool>,
    /// Why this pair was chosen, for people.
    pub reason: &'static str,
    /// Figures of the choice, if an explanation is wanted.
    pub parts: Vec<PartFigures>,
    /// What the first servers of the pair cost, if the strategy has chosen it by cost and an explanation is wanted.
    pub costs: Option<PairCosts>,
}

/// What a pair costs, and the whole request: the least cost decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairCosts {
    /// Cost on the prefill server.
    pub prefill: f64,
    /// Cost of the transfer between the two.
    pub transfer: f64,
    /// Cost on the decode server.
    pub decode: f64,
    /// Cost of the whole request on its own endpoint; `None` if it was not compared.
    pub whole: Option<f64>,
    /// Unit of all of them: seconds (`s`), or the scores of the strategy (`score`).
    pub unit: &'static str,
}

impl PairCosts {
    /// Cost of the pair.
    #[must_use]
    pub fn pair(&self) -> f64 {
        self.prefill + self.transfer + self.decode
    }
}

/// A pair beside the whole request, and what decided between them.
#[derive(Clone, Debug)]
pub struct ComparedPair {
    /// The prefill server.
    pub prefill: Arc<Endpoint>,
    /// The decode server.
    pub decode: Arc<Endpoint>,
    /// The endpoint that would serve the whole request.
    pub whole: Arc<Endpoint>,
    /// Whether the request is split over the pair.
    pub is_split: bool,
    /// What decided, for people.
    pub decided_by: &'static str,
    /// The costs, if costs chose the pair or decided.
    pub costs: Option<PairCosts>,
}

impl ComparedPair {
    /// The pair with `costs`, which was compared with the decision `whole`.
    pub(super) fn of(
        pair: &Pair,
        whole: &Decision,
        costs: Option<PairCosts>,
        (is_split, decided_by): (bool, &'static str),
    ) -> Option<Box<Self>> {
        let (prefill, decode) = (pair.prefill.first()?.clone(), pair.decode.first()?.clone());
        Some(Box::new(Self { prefill, decode, whole: whole.picks.first()?.clone(), is_split, decided_by, costs }))
    }

    /// As JSON, with `ip:port` of the endpoints.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let costs = self.costs.map(|costs| {
            let PairCosts { prefill, transfer, decode, whole, unit } = costs;
            json!({
                "unit": unit, "prefill": prefill, "transfer": transfer, "decode": decode, "pair": costs.pair(),
                "whole": whole,
            })
        });
        json!({
            "prefill": &*self.prefill.authority,
            "decode": &*self.decode.authority,
            "whole": &*self.whole.authority,
            "is_split": self.is_split,
            "decided_by": self.decided_by,
            "costs": costs,
        })
    }
}

impl Pair {
    /// A pair that the pool's decider may accept.
    #[must_use]
    pub fn proposed(prefill: Picks, decode: Picks, reason: &'static str) -> Self {
        Self { prefill, decode, split: None, reason, parts: Vec::new(), costs: None }
    }
}

/// How a request is split.
#[derive(Clone, Debug)]
pub struct Split {
    /// Prefill servers, in the order of attempts. Never empty.
    pub prefill: Picks,
    /// Prompt tokens that the first of `prefill` is expected to have cached.
    pub prefill_cached: u32,
    /// The first of `prefill` is half open and this request is its probe. If the probe ends without an outcome,
    /// another request may probe.
    pub probe: bool,
    /// Why this pair was chosen.
    pub reason: &'static str,
}

/// The pair of a strategy without a rule for pairs. Decode: where it would send the whole request. Prefill: where it
/// would send it among the servers that may prefill for that one.
pub fn by_rank<S: Strategy + ?Sized>(
    strategy: &S,
    cx: &PickContext<'_>,
    field: &PairCandidates<'_, '_>,
    rng: &mut PickRng,
    mut ranking: Ranking,
) -> Option<Pair> {
    let decode = field.whole.picks.first()?;
    let partners = field.partners(decode);
    if partners.is_empty() {
        return None;
    }
    strategy.rank(cx, &partners, rng, &mut ranking);
    let prefill = ranking.decide()?;
    let parts = prefill.parts.unwrap_or_default();
    Some(Pair { parts, ..Pair::proposed(prefill.picks, field.whole.picks.clone(), "the strategy's choice of each") })
}

/// The encode servers of a strategy without a rule for them: those with the fewest requests, one per item. `None` if
/// the prefill server also encodes.
pub fn encoders_by_load(media: &Media<'_, '_>, rng: &mut PickRng, mut ranking: Ranking) -> Option<Decision> {
    let computing = media.sent.computing().filter(|computing| !computing.roles.has(Roles::ENCODE))?;
    ranking.because("fewest requests");
    let mut key = |c: &Candidate<'_>| (u64::from(c.requests) << 32) | u64::from(rng.random::<u32>());
    let own = media.sent.picks.first().map(|answering| answering.id);
    let others = media.encode.iter().filter(|c| c.id != computing.id && Some(c.id) != own);
    ranking.push_lowest(others.map(|c| (key(c), &c.state.endpoint)));
    ranking.decide()
}

/// Error for a request that cannot be split, in a pool whose servers cannot serve it otherwise.
#[must_use]
pub fn not_alone() -> RequestError {
    let message = "the pool's decode servers only answer prompts that a prefill server computes, and this request \
                   can't be split; an endpoint of `role: both` would serve it";
    // A retry of the same request would fail in the same way.
    RequestError { retry_after: None, ..RequestError::new(Reason::NoWholeEndpoint, message) }
}

/// The rule of [`Decider::PrefixBased`].
pub fn lacks_enough(cx: &PickContext<'_>, decoder: &Candidate<'_>, non_cached_tokens: u32, prompt_tokens: u32) -> bool {
    let tokens = cx.request.prompt_tokens;
    let lacking = tokens.saturating_sub(decoder.cached.any);
    non_cached_tokens > 0 && tokens >= prompt_tokens && lacking >= non_cached_tokens
}

/// Whether `decider` splits the request over `pair`, and the costs by which it decides.
#[must_use]
pub fn is_split(
    cx: &PickContext<'_>,
    field: &PairCandidates<'_, '_>,
    pair: &Pair,
    decider: Decider,
) -> (bool, Option<PairCosts>) {
    let first = |picks: &Picks| picks.first().cloned();
    let (Some(prefill), Some(decode)) = (first(&pair.prefill), first(&pair.decode)) else { return (false, None) };
    let Some(decoder) = field.decoder(&decode) else { return (false, None) };
    let is_split = match decider {
        Decider::Always => true,
        Decider::Never | Decider::Strategy => false,
        Decider::PrefixBased { non_cached_tokens, prompt_tokens } => {
            lacks_enough(cx, decoder, non_cached_tokens, prompt_tokens)
        }
        Decider::Predicted => {
            let whole = field.whole.picks.first().and_then(|e| field.decoder(e));
            let partner = field.prefill.iter().find(|c| c.state.endpoint.id == prefill.id);
            let (Some(whole), Some(partner)) = (whole, partner) else { return (false, None) };
            let prices = Prices::learned(cx, [field.decode, field.prefill], Serving::OneOrTwoServers);
            let whole = cost::whole(cx, whole, &prices);
            let near = prefill.place.nearness(decode.place);
            let transfer = prices.transfer(cost::lacked(cx, decoder), near);
            let (prefill, decoding) = (cost::prefill(cx, partner, &prices), cost::decode(cx, decoder, &prices));
            let costs = PairCosts { prefill, transfer, decode: decoding, whole: Some(whole), unit: "s" };
            let transfers = decode.speed.pool().transfer();
            return (transfers.decides(whole, costs.pair(), near, cx.now, cx.dry_run), Some(costs));
        }
    };
    (is_split, None)
}

#[cfg(test)]
mod tests;
