//! Makes one recorded decision again, and books it. Called by [`super::player`]. Pure.

use super::player::{LivePool, PoolState};
use attache_picker::placement::{BookingRequest, Bookings, LookedUp, PromptBlocks};
use attache_pool::Endpoint;
use attache_pool::place::Place;
use attache_prefix::cache::Found;
use attache_protocol::Prompt;
use attache_record::{Decided, Looked};
use attache_scheduling::choice::Chosen;
use attache_scheduling::digest::{Digest, Digests};
use attache_scheduling::plugin::{HeaderSource, Headers};
use attache_scheduling::scheduler::{self, Explain, Subset};
use attache_scheduling::{Decision, Dispatch, PickContext, Ranking, RequestFacts, Strategy};
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use rand::SeedableRng;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a strategy recorded about a request, with the strategy and the model.
pub(super) type Trail = (Arc<dyn Strategy>, String, Box<Digest>);

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
#[derive(Default)]
pub(super) struct PlayedDecision {
    /// Endpoints in order of preference; empty when the request was rejected.
    pub(super) picks: Vec<Arc<Endpoint>>,
    /// The prefill servers of a split request, best first.
    pub(super) prefill: Vec<Arc<Endpoint>>,
    /// The encode servers of its images and audio.
    pub(super) encode: Vec<Arc<Endpoint>>,
    pub(super) reason: String,
    /// Prompt tokens that the first pick is expected to have cached.
    pub(super) matched: u32,
    /// Tokens of the prompt; 0 if it was not looked up.
    pub(super) prompt_tokens: u32,
    pub(super) bookings: Option<Bookings>,
    pub(super) trail: Option<Trail>,
}

impl PlayedDecision {
    fn rejected(reason: String) -> Self {
        Self { reason, ..Self::default() }
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
    let lookup = |l: &Looked| {
        let mut found = pool.cache.lookup(&mut &l.keys[..], d.at).of_own_keys(l.own_keys);
        if let Some(kept) = &l.carried {
            let place = state.known.get(&kept.keeper).map_or_else(Place::default, |keeper| keeper.place);
            found.carry(kept.tokens, place, kept.by.clone().into());
        }
        found
    };
    let found: Option<Found> = d.prompt.as_ref().map(lookup);
    let prompt_tokens = found.as_ref().filter(|_| reads.prefix).map_or(d.estimated, |f| f.prompt_tokens(&prompt));
    let cx = PickContext {
        request: RequestFacts { prompt_tokens, ..facts },
        filter: chosen.filter.as_ref(),
        prefix: found.as_ref().filter(|_| reads.prefix),
        policy: d.policy,
        splittable: d.splittable,
        generates: d.generates,
        encodable: d.encodable,
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

/// Makes the decision again and books it, as the live picker did.
pub(super) fn decide(
    pool: &LivePool,
    state: &PoolState,
    d: &Decided,
    missing: &mut BTreeSet<String>,
) -> PlayedDecision {
    let played = prepare(pool, state, d, missing, |prepared| {
        let decision = choose(pool, state, d, prepared)?;
        Ok(book(pool, state, d, prepared, decision))
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

/// The decision of the strategy. Preset picks, which no strategy chose, are those of the recording.
fn choose(
    pool: &LivePool,
    state: &PoolState,
    d: &Decided,
    Prepared { chosen, cx, .. }: &Prepared<'_>,
) -> Result<Decision, RequestError> {
    if d.preset {
        let mut ranking = Ranking::new(d.picks.len());
        d.picks.iter().filter_map(|id| state.known.get(id)).for_each(|endpoint| ranking.push(endpoint));
        let gone = || RequestError::new(Reason::NoReadyEndpoint, "the recorded endpoint is not in the recording");
        return ranking.decide().ok_or_else(gone);
    }
    let least_loaded = scheduler::least_loaded();
    let strategy = if d.readable { &*chosen.choice.strategy } else { &*least_loaded };
    let subset = subset(d);
    let mut rng = PickRng::seed_from_u64(d.rng);
    pool.scheduler.decide(strategy, cx, subset.as_ref(), Explain::No, &mut rng)
}

/// The gateway's subset hint.
pub(super) fn subset(d: &Decided) -> Option<Subset> {
    d.subset.as_ref().map(|entries| {
        let mut subset = Subset::default();
        entries.iter().for_each(|entry| _ = subset.add(entry));
        subset
    })
}

/// Books a decision on its servers, as the live picker does.
fn book(
    pool: &LivePool,
    state: &PoolState,
    d: &Decided,
    Prepared { chosen, cx, found, prompt }: &Prepared<'_>,
    decision: Decision,
) -> PlayedDecision {
    let strategy = &chosen.choice.strategy;
    let reason = if d.preset { d.reason.clone() } else { decision.reason.to_owned() };
    let Some(first) = decision.picks.first() else { return PlayedDecision::rejected(reason) };
    let looked = found.zip(d.prompt.as_ref()).map(|(found, looked)| {
        let (skips_cache, tenant) = (looked.skips_cache, looked.tenant.clone());
        (LookedUp { cache: &pool.cache, found, prompt, skips_cache, tenant }, looked)
    });
    let prompt_tokens = looked.as_ref().map(|(looked, _)| looked.prompt_tokens());
    let updates = looked.and_then(|(up, looked)| {
        let all = !looked.cold && up.needs_all_blocks(&decision);
        up.updates(&decision, PromptBlocks { keys: looked.keys.clone(), all, complete: !looked.cut })
    });
    let matched = updates.as_ref().map_or(0, |updates| updates.cached_tokens);
    let request = BookingRequest {
        model: &d.model,
        prompt_tokens: prompt_tokens.unwrap_or(d.estimated),
        understood: d.readable,
        streams: d.streams,
        share: strategy.share(cx, first),
        updates,
    };
    let mut bookings = Bookings::of(&decision, request, &state.snapshot, pool.stale_after, d.at);
    // The recording does not say when a prefill ends that only the replay has, so its request counts as a whole one.
    if let Some(Bookings { first, prefill, .. }) = bookings.as_mut().filter(|_| d.prefill.is_empty())
        && prefill.take().is_some()
    {
        first.dispatch(Dispatch::Whole, &state.snapshot, pool.stale_after, d.at);
    }
    PlayedDecision {
        picks: decision.picks.to_vec(),
        prefill: decision.split.map(|split| split.prefill.to_vec()).unwrap_or_default(),
        encode: decision.encode,
        reason,
        matched,
        prompt_tokens: prompt_tokens.unwrap_or(0),
        bookings,
        trail: decision.trail.map(|trail| (strategy.clone(), d.model.to_string(), trail)),
    }
}
