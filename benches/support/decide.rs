//! One decision and nothing else, or its look-up alone: a pool, an index of a million blocks, a chat of 4 KiB whose head some servers hold.

use attache_pool::health::HealthPolicy;
use attache_pool::ledger::Ticket;
use attache_pool::speed::{Reservation, Work};
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
use attache_prefix::TenantId;
use attache_prefix::cache::{BlockUnit, CacheConfig, Found, PrefixCache, PromptInFlight};
use attache_prefix::key::BlockKey;
use attache_prefix::learning::PrefixUpdate;
use attache_scheduling::scheduler::Explain;
use attache_scheduling::{Choices, PickContext, RequestFacts, Scheduler};
use attache_types::clock::{Clock, Timestamp};
use attache_types::ids::EndpointId;
use attache_types::rng::for_request;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// Blocks in the index.
const BLOCKS: usize = 1_000_000;
/// Blocks of the chat: 64 bytes each.
const PROMPT: usize = 64;
/// Of them, blocks that a tenth of the servers hold.
const HEAD: usize = 24;
/// Decisions in a batch; batches are compared.
const DECISIONS: u64 = 500;
const BATCHES: usize = 21;
/// Answers of each server that were seen.
const ANSWERS: u32 = 12;

/// A pool that has been in use, and knows how fast its servers are.
pub(crate) struct Pool {
    snapshot: PoolSnapshot,
    cache: PrefixCache,
    chat: Vec<BlockKey>,
    now: Timestamp,
    _running: Vec<Ticket>,
    _pending: Vec<Reservation>,
    coming: Vec<PromptInFlight>,
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB)
}

fn prompt(seed: u64) -> Vec<BlockKey> {
    (0..PROMPT as u64).map(|i| BlockKey(mix(seed << 20 | i | 1 << 60))).collect()
}

/// A request whose whole prompt, as long as the chat, is to be computed.
fn begin(endpoint: &Arc<Endpoint>, at: Timestamp) -> Reservation {
    let work = Work { prompt_tokens: 1_024, uncached_tokens: 1_024, adapter_cold: false };
    Reservation::begin(endpoint.clone(), None, work, true, at)
}

/// Shows the picker answers of a server, the last of them within the last minute; of three servers one takes twice as long as the others.
fn answer(endpoint: &Arc<Endpoint>, now: Timestamp) {
    let i = endpoint.id.0;
    let slower = 1 + u32::from(i.is_multiple_of(3));
    let last = now.0 - mix(u64::from(i) + 13) % 60_000_000_000;
    for n in 0..ANSWERS {
        let sent = Timestamp(last - u64::from(ANSWERS - n) * 10_000_000_000);
        let mut request = begin(endpoint, sent);
        let first = sent.after(Duration::from_millis((60 * slower).into()));
        request.first_token(true, first);
        request.ended(Some(200), first.after(Duration::from_millis((2_000 * slower).into())));
    }
}

/// The median time of a call.
fn median(mut call: impl FnMut(u64, u64)) -> Duration {
    let clock = Clock::start();
    let mut batches: Vec<Duration> = (0..BATCHES)
        .map(|batch| {
            let before = clock.now();
            (0..DECISIONS).for_each(|i| call(batch as u64, i));
            clock.now().since(before) / DECISIONS as u32
        })
        .collect();
    batches.sort_unstable();
    batches[BATCHES / 2]
}

impl Pool {
    /// `count` servers with some load each.
    pub(crate) fn new(count: u32) -> Self {
        Self::with(count, false)
    }

    /// `count` servers without load, none of which holds anything of the chat. They are equal, except that some are slower.
    pub(crate) fn idle(count: u32) -> Self {
        Self::with(count, true)
    }

    fn with(count: u32, idle: bool) -> Self {
        let most = |load: u64| if idle { 1 } else { load };
        let now = Timestamp(1_000_000_000_000);
        let pool = Arc::default();
        let mut running = Vec::new();
        let states: Vec<EndpointState> = (0..count)
            .map(|i| {
                let [_, _, high, low] = (i + 1).to_be_bytes();
                let spec = EndpointSpec::at(([10, 0, high, low], 8000).into());
                let endpoint = Arc::new(Endpoint::in_pool(EndpointId(i), spec, &pool));
                running.extend((0..mix(i.into()) % most(5)).map(|_| Ticket::book(endpoint.clone(), 700)));
                let metrics = EndpointMetrics {
                    scraped_at: now,
                    waiting: (mix(u64::from(i) + 7) % most(4)) as u32,
                    running: (mix(u64::from(i) + 9) % most(20)) as u32,
                    kv_usage: (mix(u64::from(i) + 11) % most(100)) as f32 / 100.0,
                    block_size: Some(16),
                    num_blocks: Some(30_000),
                    ..EndpointMetrics::default()
                };
                EndpointState::new(endpoint, Some(Arc::new(metrics)))
            })
            .collect();
        states.iter().for_each(|state| answer(&state.endpoint, now));
        let pending =
            if idle { Vec::new() } else { states.iter().step_by(4).map(|state| begin(&state.endpoint, now)).collect() };
        let snapshot = PoolSnapshot::new(1, true, states);
        let cache = PrefixCache::new(&CacheConfig {
            claim_every_block: false,
            unit: BlockUnit::Bytes(64),
            max_bytes: 1 << 30,
            tenant_share: 1.0,
            claim_life: Duration::from_secs(30),
            seed: 1,
        });
        cache.reconcile(&snapshot);
        for i in 0..(BLOCKS / PROMPT) as u64 {
            cache.record(EndpointId((mix(i) % u64::from(count)) as u32), &prompt(i + 1), TenantId(0), now);
        }
        let chat = prompt(0);
        for i in (0..count).step_by(10).filter(|_| !idle) {
            cache.record(EndpointId(i), &chat[..HEAD], TenantId(0), now);
        }
        Self { snapshot, cache, chat, now, _running: running, _pending: pending, coming: Vec::new() }
    }

    /// To every server a prompt is on its way that begins as the chat does.
    pub(crate) fn claim(&mut self) {
        self.coming.extend(self.snapshot.endpoints.iter().map(|state| {
            let id = state.endpoint.id;
            let mut other = prompt(u64::from(id.0) + 1);
            other[..HEAD].copy_from_slice(&self.chat[..HEAD]);
            self.cache.claim(id, &PrefixUpdate { keys: Arc::new(other), ..PrefixUpdate::default() }, self.now)
        }));
    }

    fn looked_up(&self) -> Found {
        self.cache.lookup(&mut &self.chat[..], self.now)
    }

    /// The median time of one look-up, as a decision makes it.
    pub(crate) fn look_up(&self) -> Duration {
        median(|_, _| drop(std::hint::black_box(self.looked_up())))
    }

    /// The median time of one decision.
    pub(crate) fn decide(&self, strategy: &str, parameters: &Value) -> Duration {
        let built = attache::plugins::registry().build(strategy, parameters).expect(strategy);
        let scheduler = Scheduler::new(Choices::only(strategy, built), HealthPolicy::default(), 1);
        let strategy = &*scheduler.choices.default.strategy;
        median(|batch, i| {
            let looked = strategy.reads().prefix.then(|| self.looked_up());
            let cx = PickContext {
                request: RequestFacts { model: "m", prompt_tokens: 1_024, ..RequestFacts::default() },
                prefix: looked.as_ref(),
                ..PickContext::new(&self.snapshot, self.now, Duration::from_secs(2))
            };
            let mut rng = for_request(batch, i);
            let decision = scheduler.decide(strategy, &cx, Explain::No, &mut rng).expect("a decision");
            std::hint::black_box(decision);
        })
    }
}
