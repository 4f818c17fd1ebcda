//! Prefill on one server, decode on another: whether a request is split, and over which pair.
//!
//! [`Scheduler::decide`](super::Scheduler::decide) first finds who would serve the request whole, then asks the strategy for a
//! [`Pair`]; unless the strategy has settled the matter by a rule of its own, the pool's [`Decider`] compares the two. The times are
//! those of [`super::facts::cost`]: learned, nothing is calibrated.
//!
//! ```text
//! whole  = first token on D, the uncached prompt included           + price · (own prefill + room) on D
//! split  = first token on P + transfer of what D lacks + D's queue  + price · (own prefill + room) on P + price · room on D
//! split when split < whole, by more than the transfer's time is uncertain when the last request went the other way
//! ```
//!
//! Pure. Source: the two-stage choice of llm-d's `disagg-profile-handler` and AIBrix's `pd`, made as one.

use super::candidates::Candidate;
use super::decision::{Decision, Part, Ranking};
use super::facts::cost::{self, Prices, Serving};
use super::plugin::{PickContext, Strategy};
use attache_pool::{Endpoint, Roles};
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use rand::RngExt;
use smallvec::SmallVec;
use std::sync::Arc;

pub use attache_pool::Picks;

/// 3 prefill servers are named: when two have failed within one request, the answer's own server computes the prompt.
pub const MAX_TRIES: usize = 3;

/// How a pool splits requests.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitPolicy {
    /// Whether a request is split, when the strategy leaves that open.
    pub decider: Decider,
    /// Labels that servers of prefill and encode must have in common with the decode server, where the latter has them.
    pub together: Vec<Arc<str>>,
    /// Servers that only make answers also serve requests that are not split. Where not, those that are there for both, or combined ones,
    /// serve such requests and stand in no pair.
    pub whole: bool,
}

impl SplitPolicy {
    /// Whether `helper` has the labels that keep servers together, where `decode` has them.
    #[must_use]
    pub fn fits(&self, helper: &Endpoint, decode: &Endpoint) -> bool {
        let (theirs, wanted) = (&helper.spec.labels, &decode.spec.labels);
        let same = |name: &Arc<str>| wanted.get(&**name).is_none_or(|wanted| theirs.get(&**name) == Some(wanted));
        self.together.iter().all(same)
    }

    /// Whether requests that the strategy `name` routes may be split. With [`Decider::Strategy`] it is `pd`, alone or in a sum.
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

    /// Whether `prefill` may compute what `decode` goes on from: another server, with the same labels where that matters.
    #[must_use]
    pub fn pairs(&self, prefill: &Endpoint, decode: &Endpoint) -> bool {
        let takes_part = |endpoint| self.whole || !self.serves_whole(endpoint);
        prefill.id != decode.id && takes_part(prefill) && takes_part(decode) && self.fits(prefill, decode)
    }
}

/// Says whether a request is split.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Decider {
    /// When the first token is predicted to come sooner, what the others wait for it included.
    #[default]
    Predicted,
    /// Whenever there is a pair.
    Always,
    /// Never.
    Never,
    /// Where the strategy says so by a rule of its own, as `pd` does.
    Strategy,
    /// llm-d's `prefix-based-pd-decider`: when the prompt has at least `prompt_tokens`, and the decode server lacks at least
    /// `non_cached_tokens` of them; 0 of the latter never splits.
    PrefixBased {
        /// Tokens that the decode server lacks.
        non_cached_tokens: u32,
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
}

/// What a strategy may choose a pair from.
#[derive(Clone, Copy, Debug)]
pub struct Field<'f, 'a> {
    /// Servers that may compute the prompt; never empty.
    pub prefill: &'f [Candidate<'a>],
    /// Servers that may make the answer; never empty.
    pub decode: &'f [Candidate<'a>],
    /// Who would serve the request whole.
    pub whole: &'f Decision,
    /// The pool's policy.
    pub policy: &'f SplitPolicy,
}

impl<'a> Field<'_, 'a> {
    /// The candidate that is `endpoint`.
    #[must_use]
    pub fn decoder(&self, endpoint: &Endpoint) -> Option<&Candidate<'a>> {
        self.decode.iter().find(|c| c.state.endpoint.id == endpoint.id)
    }

    /// As [`SplitPolicy::pairs`].
    #[must_use]
    pub fn go_together(&self, prefill: &Endpoint, decode: &Endpoint) -> bool {
        self.policy.pairs(prefill, decode)
    }

    /// Those that may compute what `decode` goes on from.
    #[must_use]
    pub fn partners(&self, decode: &Endpoint) -> SmallVec<[Candidate<'a>; 16]> {
        self.prefill.iter().filter(|p| self.go_together(&p.state.endpoint, decode)).copied().collect()
    }
}

/// What a strategy may choose encode servers from.
#[derive(Clone, Copy, Debug)]
pub struct Media<'f, 'a> {
    /// Servers that may turn images and sounds into embeddings; never empty.
    pub encode: &'f [Candidate<'a>],
    /// Servers that may make the answer; never empty.
    pub decode: &'f [Candidate<'a>],
    /// Who computes the request's prompt and makes its answer.
    pub sent: &'f Decision,
}

impl<'a> Media<'_, 'a> {
    /// The candidate that makes the answer.
    #[must_use]
    pub fn decoder(&self) -> Option<&Candidate<'a>> {
        let first = self.sent.picks.first()?;
        self.decode.iter().find(|c| c.id == first.id)
    }
}

/// Two servers, or more of each to fall back on, for one request.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Who computes the prompt.
    pub prefill: Picks,
    /// Who makes the answer.
    pub decode: Picks,
    /// Whether the request is split: `None` leaves it to the pool's decider.
    pub split: Option<bool>,
    /// Why, for people.
    pub reason: &'static str,
    /// What was compared, when somebody wants to know.
    pub parts: Vec<Part>,
}

impl Pair {
    /// A pair of which the pool's decider says whether it is used.
    #[must_use]
    pub fn proposed(prefill: Picks, decode: Picks, reason: &'static str) -> Self {
        Self { prefill, decode, split: None, reason, parts: Vec::new() }
    }
}

/// How a request is split.
#[derive(Clone, Debug)]
pub struct Split {
    /// Who computes the prompt, in the order in which they should be tried. Never empty.
    pub prefill: Picks,
    /// Prompt tokens that the first of `prefill` is thought to hold.
    pub prefill_cached: u32,
    /// The first of `prefill` is half open and this request is its probe: should nobody say what became of it, another may go.
    pub probe: bool,
    /// Why.
    pub reason: &'static str,
}

/// The pair of a strategy that knows nothing of pairs: the answer where it would send the whole request, the prompt where it would send that among
/// the servers which go together with it.
pub fn by_rank<S: Strategy + ?Sized>(
    strategy: &S,
    cx: &PickContext<'_>,
    field: &Field<'_, '_>,
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

/// The encoders of a strategy that knows nothing of them: the servers with the fewest requests, as many as there are items, and none where the
/// server that computes the prompt encodes as well.
pub fn encoders_by_load(media: &Media<'_, '_>, rng: &mut PickRng, mut ranking: Ranking) -> Option<Decision> {
    let computing = media.sent.computing().filter(|computing| !computing.roles.has(Roles::ENCODE))?;
    ranking.because("fewest requests");
    let mut key = |c: &Candidate<'_>| (u64::from(c.requests) << 32) | u64::from(rng.random::<u32>());
    let own = media.sent.picks.first().map(|answering| answering.id);
    let others = media.encode.iter().filter(|c| c.id != computing.id && Some(c.id) != own);
    ranking.push_lowest(others.map(|c| (key(c), &c.state.endpoint)));
    ranking.decide()
}

/// What a request is told that can't be split, of a pool whose servers can't serve it in any other way.
#[must_use]
pub fn not_alone() -> RequestError {
    let message = "the pool's decode servers only answer prompts that a prefill server computes, and this request can't be split; \
                   an endpoint of `role: both` would serve it";
    // The same request would be told the same.
    RequestError { retry_after: None, ..RequestError::new(Reason::NoWholeEndpoint, message) }
}

/// The rule of [`Decider::PrefixBased`].
pub fn lacks_enough(cx: &PickContext<'_>, decoder: &Candidate<'_>, non_cached_tokens: u32, prompt_tokens: u32) -> bool {
    let tokens = cx.request.prompt_tokens;
    let lacking = tokens.saturating_sub(decoder.cached.any);
    non_cached_tokens > 0 && tokens >= prompt_tokens && lacking >= non_cached_tokens
}

/// What `decider` makes of a pair.
#[must_use]
pub fn is_split(cx: &PickContext<'_>, field: &Field<'_, '_>, pair: &Pair, decider: Decider) -> bool {
    let first = |picks: &Picks| picks.first().cloned();
    let (Some(prefill), Some(decode)) = (first(&pair.prefill), first(&pair.decode)) else { return false };
    let Some(decoder) = field.decoder(&decode) else { return false };
    match decider {
        Decider::Always => true,
        Decider::Never | Decider::Strategy => false,
        Decider::PrefixBased { non_cached_tokens, prompt_tokens } => {
            lacks_enough(cx, decoder, non_cached_tokens, prompt_tokens)
        }
        Decider::Predicted => {
            let whole = field.whole.picks.first().and_then(|e| field.decoder(e));
            let partner = field.prefill.iter().find(|c| c.state.endpoint.id == prefill.id);
            let (Some(whole), Some(partner)) = (whole, partner) else { return false };
            let prices = Prices::learned(cx, [field.decode, field.prefill], Serving::OneOrTwoServers);
            let whole = cost::whole(cx, whole, &prices);
            let near = prefill.place.nearness(decode.place);
            let transfer = prices.transfer(cost::lacked(cx, decoder), near);
            let split = cost::prefill(cx, partner, &prices) + transfer + cost::decode(cx, decoder, &prices);
            decode.speed.pool().transfer().decides(whole, split, near, cx.now, cx.preview)
        }
    }
}

#[cfg(test)]
mod tests;
