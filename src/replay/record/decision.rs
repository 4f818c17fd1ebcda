//! A recorded request as the picker takes it, and its decision, made again. Called by [`super::player`] and
//! [`super::explain`]. Pure.

use super::pools::{LivePool, PoolState};
use attache_picker::RequestReads;
use attache_picker::decide::{self, CallFacts, Plan, PrefillTime, RequestView, Seen, Step};
use attache_picker::head::{Head, Header};
use attache_picker::known::{KnownBlocks, KnownKeys, KnownRequest, RecordedFacts};
use attache_picker::quotas::Allowance;
use attache_picker::tenant::Tenant;
use attache_protocol::{Api, Prompt, Request};
use attache_record::headers::TENANT;
use attache_record::{Decided, Looked};
use attache_scheduling::Dispatch;
use attache_scheduling::Subset;
use attache_scheduling::digest::Digests;
use attache_scheduling::plugin::HeaderSource;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use rand::SeedableRng;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The headers of a recorded request: those that the recorded strategy read.
#[derive(Debug)]
struct RecordedHeaders<'a>(&'a BTreeMap<String, Option<String>>);

impl HeaderSource for RecordedHeaders<'_> {
    fn header(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.as_deref()
    }

    fn tenant(&self) -> Option<&str> {
        self.header(TENANT)
    }
}

/// The block keys of a recorded prompt.
#[derive(Debug)]
struct RecordedKeys<'a> {
    looked: Option<&'a Looked>,
    /// Keys were needed that were not recorded.
    missed: AtomicBool,
}

impl KnownKeys for RecordedKeys<'_> {
    fn blocks(&self, _: &str) -> Option<KnownBlocks<'_>> {
        let Some(looked) = self.looked else {
            self.missed.store(true, Relaxed);
            return None;
        };
        let Looked { keys, own_keys, cold, cut, tokens, .. } = looked;
        Some(KnownBlocks { keys, own_keys: *own_keys, cold: *cold, cut: *cut, tokens: *tokens })
    }
}

/// Takes the steps of `run` with a recorded request as the picker takes it. `missing` receives the inputs that the
/// configuration needs and the recording lacks.
pub(super) fn with_request<R>(
    pool: &LivePool,
    state: &PoolState,
    d: &Decided,
    missing: &mut BTreeSet<String>,
    run: impl FnOnce(&RequestView<'_>, &RequestReads<'_>) -> R,
) -> R {
    let headers = RecordedHeaders(&d.headers);
    let reads = RequestReads::recorded(&headers, Digests::replayed(d.digests.clone()));
    let keys = RecordedKeys { looked: d.prompt.as_ref(), missed: AtomicBool::new(false) };
    let (head, subset) = (head(state, d), subset(d));
    let view = RequestView {
        head: &head,
        pool: None,
        called: "",
        api: Api::ChatCompletions,
        response_id: None,
        subset: subset.as_ref(),
        body: Seen::Known(&known(d, &pool.pool.name, &keys)),
        now: d.at,
        opened: Timestamp(d.at.0.saturating_sub(u64::try_from(d.waited.as_nanos()).unwrap_or(u64::MAX))),
        last: true,
        made: None,
        may_wait: false,
        opens: false,
        has_turn: true,
        prefill_time: PrefillTime::Unbounded,
        trace: None,
    };
    pool.picker.policies.configure([(d.model.clone(), d.policy)].into());
    let result = run(&view, &reads);
    let unknown = reads.header_names().into_iter().filter(|name| !d.headers.contains_key(name));
    missing.extend(unknown.map(|name| format!("the header `{name}` of some requests")));
    missing.extend(reads.missed_digests().iter().map(|name| format!("the digest `{name}` of some prompts")));
    if keys.missed.into_inner() {
        missing.insert("the keys of some prompts".to_owned());
    }
    result
}

/// The headers that name the model, the tenant, and the endpoints of a decision that no strategy made.
fn head(state: &PoolState, d: &Decided) -> Head {
    let header = |name: &str, value: String| Header { name: name.to_owned(), value: value.into_bytes() };
    let mut headers =
        vec![header("x-request-id", d.id.clone()), header("x-gateway-model-name-rewrite", d.model.to_string())];
    if d.preset {
        let picks: Vec<String> = d.picks.iter().map(|id| state.authority(*id)).collect();
        headers.push(header("test-epp-endpoint-selection", picks.join(",")));
    }
    let mut head = Head::read(headers);
    let tenant = d.prompt.as_ref().and_then(|looked| looked.tenant.as_deref());
    head.belongs_to(tenant.map_or(Tenant::Unconfigured, |tenant| Tenant::Named(tenant.into())));
    head
}

/// The request without a body. The text of its prompt is not recorded, only the sizes.
fn known<'a>(d: &'a Decided, pool: &'a str, keys: &'a RecordedKeys<'a>) -> KnownRequest<'a> {
    let looked = d.prompt.as_ref();
    let prompt = looked.map_or_else(Prompt::default, |looked| Prompt {
        text_bytes: looked.text_bytes,
        token_ids: looked.token_ids,
        media_tokens: looked.media_tokens,
        count: looked.count,
        ..Prompt::default()
    });
    let skips_cache = looked.is_some_and(|looked| looked.skips_cache);
    let request = Request { prompt, max_tokens: d.max_tokens, skips_cache, ..Request::default() };
    let Decided { splittable, generates, encodable, streams, .. } = *d;
    KnownRequest {
        pool,
        request: d.readable.then_some(request),
        text: None,
        bytes: 0,
        prompt_tokens: d.estimated,
        priority: d.priority,
        answer_tokens: 0,
        keys,
        recorded: Some(RecordedFacts {
            call: CallFacts { splittable, generates, encodable, streams },
            looked_up: looked.is_some(),
            carried: looked.and_then(|looked| looked.carried.as_ref()),
        }),
    }
}

/// The random numbers of a recorded decision.
pub(super) fn rng(d: &Decided) -> PickRng {
    PickRng::seed_from_u64(d.rng)
}

/// Most random draws with which [`differs_by_chance`] decides again. A tie of two is missed once in 4,096 times.
const DRAWS: u64 = 12;

/// The first endpoint of the decision with the random numbers of `seed`, which is not booked; `None` if the request is
/// rejected.
fn first_pick(pool: &LivePool, state: &PoolState, d: &Decided, seed: u64) -> Option<String> {
    let mut missing = BTreeSet::new();
    let explained = with_request(pool, state, d, &mut missing, |q, reads| {
        let config = pool.picker.config();
        decide::explain_known(&pool.picker, &config, q, reads, &PickRng::seed_from_u64(seed), None)
    });
    let choice = explained.ok()?.0.choice;
    // A split request is decided by its pair.
    Some(choice.picks.into_iter().take(1).chain(choice.prefill.into_iter().take(1)).collect::<Vec<_>>().join("+"))
}

/// Whether the decision about `d`, which is not booked yet, differs from the recorded one and depends on its random
/// numbers: other ones give another endpoint.
pub(super) fn differs_by_chance(pool: &LivePool, state: &PoolState, d: &Decided) -> bool {
    let recorded = d.picks.first().into_iter().chain(d.prefill.first()).map(|id| state.authority(*id));
    let recorded = recorded.collect::<Vec<_>>().join("+");
    let first = first_pick(pool, state, d, d.rng);
    first.as_ref().is_some_and(|first| *first != recorded)
        && (1..=DRAWS).any(|draw| first_pick(pool, state, d, d.rng.wrapping_add(draw)) != first)
}

/// Makes the decision again and books it.
///
/// # Errors
/// The rejection of the request.
pub(super) fn decide(
    pool: &LivePool,
    state: &PoolState,
    d: &Decided,
    missing: &mut BTreeSet<String>,
) -> Result<Box<Plan>, RequestError> {
    let step = with_request(pool, state, d, missing, |q, reads| {
        let config = pool.picker.config();
        decide::decide_noting(&pool.picker, &config, q, Some(reads), &mut Allowance::default(), &mut rng(d))
    })?;
    let Step::Decided(mut plan) = step else {
        return Err(RequestError::new(Reason::Internal, "a recorded request waits for nothing"));
    };
    // The recording does not say when a prefill ends that only the replay has, so its request counts as a whole one.
    if d.prefill.is_empty() && plan.prefill.take().is_some() {
        plan.dispatch(Dispatch::Whole, d.at);
    }
    Ok(plan)
}

/// The gateway's subset hint.
fn subset(d: &Decided) -> Option<Subset> {
    d.subset.as_ref().map(|entries| {
        let mut subset = Subset::default();
        entries.iter().for_each(|entry| _ = subset.add(entry));
        subset
    })
}
