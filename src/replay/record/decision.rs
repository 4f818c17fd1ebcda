//! Makes one recorded decision again, and books it. Called by [`super::player`]. Pure.

use super::player::{LivePool, PoolState};
use attache_pool::Endpoint;
use attache_prefix::cache::{Found, PrefixCache};
use attache_prefix::learning::PrefixUpdate;
use attache_protocol::Prompt;
use attache_record::{Decided, Looked};
use attache_scheduling::choice::Chosen;
use attache_scheduling::digest::{Digest, Digests};
use attache_scheduling::plugin::{HeaderSource, Headers};
use attache_scheduling::scheduler::{self, Explain, Subset};
use attache_scheduling::{Booking, Order, PickContext, RequestFacts, Strategy};
use attache_types::error::RequestError;
use attache_types::rng::PickRng;
use rand::SeedableRng;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a strategy recorded about a request, with the strategy and the model.
pub(super) type Trail = (Arc<dyn Strategy>, String, Box<Digest>);

/// Endpoints in order of preference, the reason, and what the strategy recorded.
type Picks = (Vec<Arc<Endpoint>>, String, Option<Box<Digest>>);

/// The headers of a recorded request: those that the recorded strategy read.
#[derive(Debug)]
struct RecordedHeaders<'a> {
    known: &'a BTreeMap<String, Option<String>>,
    /// Names of headers that the replay has read and the recording lacks.
    missed: RefCell<BTreeSet<String>>,
}

impl HeaderSource for RecordedHeaders<'_> {
    fn header(&self, name: &str) -> Option<&str> {
        match self.known.get(name) {
            Some(value) => value.as_deref(),
            None => {
                self.missed.borrow_mut().insert(name.to_owned());
                None
            }
        }
    }
}

/// Outcome of one replayed decision.
pub(super) struct PlayedDecision {
    /// Endpoints in order of preference; empty when the request was rejected.
    pub(super) picks: Vec<Arc<Endpoint>>,
    pub(super) reason: String,
    /// Prompt tokens that the first pick is expected to have cached.
    pub(super) matched: u32,
    /// Tokens of the prompt; 0 if it was not looked up.
    pub(super) prompt_tokens: u32,
    pub(super) booking: Option<Booking>,
    pub(super) trail: Option<Trail>,
}

impl PlayedDecision {
    fn rejected(reason: String) -> Self {
        Self { picks: Vec::new(), reason, matched: 0, prompt_tokens: 0, booking: None, trail: None }
    }
}

/// A recorded request whose strategy is chosen.
pub(super) struct Prepared<'a> {
    pub(super) chosen: &'a Chosen<'a>,
    /// The input of the strategy.
    pub(super) cx: PickContext<'a>,
    /// The lookup of the prompt, also if the strategy does not read it; `None` if no lookup was recorded.
    pub(super) found: Option<&'a Found>,
    pub(super) prompt: &'a Prompt<'a>,
}

/// Takes the steps of the live picker up to the strategy, and then those of `rest`. `missing` receives the inputs that
/// the configuration needs and the recording lacks.
///
/// # Errors
/// The rejection of the request.
pub(super) fn prepare<R>(
    pool: &LivePool,
    state: &PoolState,
    d: &Decided,
    missing: &mut BTreeSet<String>,
    rest: impl FnOnce(&Prepared<'_>) -> R,
) -> Result<R, RequestError> {
    let headers = RecordedHeaders { known: &d.headers, missed: RefCell::default() };
    let digests = Digests::replayed(d.digests.clone());
    let prompt = prompt(d.prompt.as_ref());
    let facts = RequestFacts {
        model: &d.model,
        prompt_tokens: d.estimated,
        max_tokens: d.max_tokens,
        priority: d.priority,
        headers: Headers::of(&headers),
        prompt: d.readable.then_some(&prompt),
        payload: None,
        waited: d.waited,
        digests: Some(&digests),
    };
    let chosen = pool.scheduler.choices.choose(&facts)?;
    let reads = chosen.choice.strategy.reads();
    // Every prompt is looked up, because the summary reports cached tokens. Only strategies that read the cache see the
    // result.
    let lookup = |l: &Looked| pool.cache.lookup(&mut &l.keys[..], d.at).of_own_keys(l.own_keys);
    let found: Option<Found> = d.prompt.as_ref().map(lookup);
    let prompt_tokens = found.as_ref().filter(|_| reads.prefix).map_or(d.estimated, |f| f.prompt_tokens(&prompt));
    let cx = PickContext {
        request: RequestFacts { prompt_tokens, ..facts },
        filter: chosen.filter.as_ref(),
        prefix: found.as_ref().filter(|_| reads.prefix),
        policy: d.policy,
        ..PickContext::new(&state.snapshot, d.at, pool.stale_after)
    };
    let result = rest(&Prepared { chosen: &chosen, cx, found: found.as_ref(), prompt: &prompt });
    missing.extend(headers.missed.take().iter().map(|name| format!("the header `{name}` of some requests")));
    if reads.prefix && d.readable && d.prompt.is_none() {
        missing.insert("the keys of some prompts".to_owned());
    }
    if digests.missed() {
        missing.insert(format!("what `{}` makes of a prompt's text", chosen.choice.name));
    }
    Ok(result)
}

/// Makes the decision again and books its first pick, as the live picker did.
pub(super) fn decide(
    pool: &LivePool,
    state: &PoolState,
    d: &Decided,
    missing: &mut BTreeSet<String>,
) -> PlayedDecision {
    let played = prepare(pool, state, d, missing, |prepared| {
        let strategy = &prepared.chosen.choice.strategy;
        let (picks, reason, trail) = picks(pool, state, d, strategy, &prepared.cx)?;
        let trail = trail.map(|trail| (strategy.clone(), d.model.to_string(), trail));
        Ok(book(pool, state, d, prepared, PlayedDecision { picks, trail, ..PlayedDecision::rejected(reason) }))
    });
    let rejected = |error: RequestError| PlayedDecision::rejected(error.reason.code().to_owned());
    played.unwrap_or_else(Err).unwrap_or_else(rejected)
}

/// A prompt with the recorded sizes and no text, which is not recorded.
fn prompt(looked: Option<&Looked>) -> Prompt<'static> {
    let Some(looked) = looked else { return Prompt::default() };
    Prompt {
        text_bytes: looked.text_bytes,
        token_ids: looked.token_ids,
        media_tokens: looked.media_tokens,
        count: looked.count,
        ..Prompt::default()
    }
}

/// The picks of the strategy. Preset picks, which no strategy decided, are those of the recording.
fn picks(
    pool: &LivePool,
    state: &PoolState,
    d: &Decided,
    strategy: &Arc<dyn Strategy>,
    cx: &PickContext<'_>,
) -> Result<Picks, RequestError> {
    if d.preset {
        let picks = d.picks.iter().filter_map(|id| state.known.get(id).cloned()).collect();
        return Ok((picks, d.reason.clone(), None));
    }
    let least_loaded = scheduler::least_loaded();
    let strategy = if d.readable { &**strategy } else { &*least_loaded };
    let subset = subset(d);
    let mut rng = PickRng::seed_from_u64(d.rng);
    let decision = pool.scheduler.decide(strategy, cx, subset.as_ref(), Explain::No, &mut rng)?;
    Ok((decision.picks.to_vec(), decision.reason.to_owned(), decision.trail))
}

/// The gateway's subset hint.
pub(super) fn subset(d: &Decided) -> Option<Subset> {
    d.subset.as_ref().map(|entries| {
        let mut subset = Subset::default();
        entries.iter().for_each(|entry| _ = subset.add(entry));
        subset
    })
}

/// Books a decision on its first pick, as the live picker does. A decision without picks stays as it is.
fn book(
    pool: &LivePool,
    state: &PoolState,
    d: &Decided,
    Prepared { chosen, cx, found, prompt }: &Prepared<'_>,
    decision: PlayedDecision,
) -> PlayedDecision {
    let Some(first) = decision.picks.first() else { return PlayedDecision::rejected(decision.reason) };
    let looked = d.prompt.as_ref();
    let uses_cache = looked.is_some_and(|l| !l.skips_cache);
    let held = found.filter(|_| uses_cache).map_or(0, |f| f.tokens(f.depth(first.id).any));
    let prompt_tokens = found.map_or(d.estimated, |f| f.prompt_tokens(prompt));
    let matched = held.min(prompt_tokens);
    let order = Order {
        model: &d.model,
        prompt_tokens,
        cached_tokens: matched,
        understood: d.readable,
        streams: d.streams,
        arrives: false,
        share: chosen.choice.strategy.share(cx, first),
        prefix_update: found.zip(looked).map(|(found, looked)| prefix_update(pool, first, found, looked)),
    };
    let booking = Booking::new(first.clone(), &state.snapshot, pool.stale_after, order, d.at);
    let prompt_tokens = if looked.is_some() { prompt_tokens } else { 0 };
    PlayedDecision { matched, prompt_tokens, booking: Some(booking), ..decision }
}

/// The update of the prefix cache that follows from a decision for `endpoint`.
fn prefix_update(
    pool: &LivePool,
    endpoint: &Endpoint,
    found: &Found,
    looked: &Looked,
) -> (Arc<PrefixCache>, PrefixUpdate) {
    let whole = !found.is_exact(endpoint.id) && !looked.cold;
    let only_text = looked.media_tokens == 0 && looked.token_ids == 0 && looked.count == 1;
    let update = PrefixUpdate {
        tenant: looked.tenant.clone(),
        text_bytes: if only_text { looked.text_bytes } else { 0 },
        tells_cached: !looked.skips_cache,
        ..found.prefix_update(endpoint.id, looked.keys.clone(), whole)
    };
    (pool.cache.clone(), update)
}
