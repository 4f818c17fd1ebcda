//! What a pool's servers hold of a prompt: the index, the claims of what is on its way, and how well both foretell what servers report.
//!
//! Asked by the decision, told by what came of it: a claim when the endpoint is named, a record when its answer begins, a correction
//! when the answer's usage tells how much was really cached.

mod capacity;
mod found;

pub use found::Found;

use super::average::Average;
use super::block_size::BlockSize;
use super::by_endpoint::ByEndpoint;
use super::carried::{Carried, DEFAULT_MAX_CARRIED, DEFAULT_MAX_CARRIED_BYTES};
use super::claims::{Claim, Claims};
use super::index::{HolderId, IndexConfig, PrefixIndex, TenantId};
use super::key::{BlockKey, BlockKeys, KeySpace};
use super::learning::Lesson;
use super::residents::{Resident, Residents};
use ahash::{AHashMap, AHashSet};
use arc_swap::ArcSwap;
use attache_pool::PoolSnapshot;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use capacity::{Capacity, LEAST_CAPACITY, Reserved};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// 256 MiB: about eight million blocks, those of 300 servers with 27,000 each.
pub const DEFAULT_MAX_BYTES: u64 = 256 << 20;
/// A quarter: what four tenants have stays where a flood of another one fills the rest. Who is alone has all.
pub const DEFAULT_TENANT_SHARE: f32 = 0.25;
/// 2 min, LocalAI's half-life of a cached block's weight.
pub const DEFAULT_HALF_LIFE: Duration = Duration::from_secs(120);
/// 4 bytes of text to a token until answers have told better.
pub const DEFAULT_BYTES_PER_TOKEN: f64 = 4.0;
/// 4 bytes of text stand for a token in the size of a block of text.
pub const CHARACTERS_PER_TOKEN: u32 = 4;
/// Shorter texts say nothing about bytes per token: what the template adds outweighs them.
const LEAST_MEASURED_BYTES: u64 = 256;
/// Prompts of fewer blocks say nothing about tokens per block: where the last one ends is not known.
const LEAST_MEASURED_BLOCKS: usize = 8;
/// A token that was foretold and not there takes two off the room for guesses: dozens of wrong prompts settle it, one does not upset it.
const CAPACITY_GAIN: f64 = 2.0;
/// One answer moves it by a tenth at most.
const CAPACITY_STEP: f64 = 0.1;

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockUnit {
    /// This many token ids.
    Tokens(u32),
    /// This many bytes of text.
    Bytes(u32),
}

/// How a pool's cache knowledge is kept.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct CacheConfig {
    /// What a block holds.
    pub unit: BlockUnit,
    /// Bytes of the index.
    pub max_bytes: u64,
    /// Part of what engines' own words leave of it that one tenant's guesses keep where all of it is used up.
    pub tenant_share: f32,
    /// How long a claim counts.
    pub claim_life: Duration,
    /// Of all hashes.
    pub seed: u64,
}

/// Totals since the start.
#[derive(Debug, Default)]
pub struct CacheStats {
    /// Prompts looked up.
    pub lookups: AtomicU64,
    /// Tokens of these prompts.
    pub prompt_tokens: AtomicU64,
    /// Tokens that the picked endpoint was thought to hold.
    pub matched_tokens: AtomicU64,
    /// Of the answers that told how much was cached: tokens that were thought to be.
    pub foretold_tokens: AtomicU64,
    /// And those that were.
    pub reported_tokens: AtomicU64,
}

/// What a pool's servers hold.
#[derive(Debug)]
pub struct PrefixCache {
    index: Arc<PrefixIndex>,
    space: KeySpace,
    guesses: ArcSwap<Guesses>,
    residents: Arc<Residents>,
    claims: Claims,
    carried: Carried,
    /// Blocks hold text.
    is_text: bool,
    block_size: Arc<BlockSize>,
    bytes_per_token: Average,
    /// Tokens of the engine in a block whose keys are of our own making, as a multiple of those that its size stands for.
    own_tokens: Average,
    servers: Mutex<AHashMap<EndpointId, Server>>,
    stats: CacheStats,
}

/// Who believed blocks belong to, and how many there may be.
#[derive(Clone, Debug)]
struct Guess {
    holder: HolderId,
    capacity: Arc<Capacity>,
}

type Guesses = ByEndpoint<Guess>;

/// What guesses about one server rest on.
#[derive(Debug)]
struct Server {
    guess: Guess,
    /// Tokens that its cache has room for; 0 when it has not said.
    room: u64,
    /// Part of them that guesses may fill, learned from what answers report.
    trust: f64,
}

/// A prompt on its way to an endpoint; it is over on Drop.
#[derive(Debug)]
pub struct Coming {
    claim: Claim,
    room: Option<Reserved>,
}

impl PrefixCache {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(config: &CacheConfig) -> Self {
        let (is_text, block_size) = match config.unit {
            BlockUnit::Tokens(n) => (false, n),
            BlockUnit::Bytes(n) => (true, n / CHARACTERS_PER_TOKEN),
        };
        let index = PrefixIndex::new(IndexConfig {
            budget_bytes: usize::try_from(config.max_bytes).unwrap_or(usize::MAX),
            tenant_share: config.tenant_share,
            half_life: DEFAULT_HALF_LIFE,
            seed: config.seed,
        });
        Self {
            index: Arc::new(index),
            space: KeySpace::new(config.seed),
            guesses: ArcSwap::default(),
            residents: Arc::default(),
            claims: Claims::new(config.claim_life, config.seed),
            carried: Carried::new(DEFAULT_MAX_CARRIED, DEFAULT_MAX_CARRIED_BYTES, config.seed),
            is_text,
            block_size: Arc::new(BlockSize::given(block_size)),
            bytes_per_token: Average::new(DEFAULT_BYTES_PER_TOKEN),
            own_tokens: Average::new(1.0),
            servers: Mutex::default(),
            stats: CacheStats::default(),
        }
    }

    /// The same with blocks as large as the engines': those of the configuration until they have told.
    #[must_use]
    pub fn of_engines_blocks(self) -> Self {
        Self { block_size: Arc::new(BlockSize::of_engines(self.block_size.get())), ..self }
    }

    /// The same with no more than so many blocks in the index.
    #[must_use]
    pub fn with_max_blocks(self, blocks: Option<u64>) -> Self {
        self.index.set_max_blocks(blocks);
        self
    }

    /// The index, for the feed of KV events.
    #[must_use]
    pub fn index(&self) -> &Arc<PrefixIndex> {
        &self.index
    }

    /// Which of its caches belong to whom, for the feed of KV events.
    #[must_use]
    pub fn residents(&self) -> &Arc<Residents> {
        &self.residents
    }

    /// How keys are made.
    #[must_use]
    pub fn space(&self) -> KeySpace {
        self.space
    }

    /// Tokens in a block, for what makes keys and for the feed of KV events.
    #[must_use]
    pub fn block_size(&self) -> &Arc<BlockSize> {
        &self.block_size
    }

    /// What a block holds.
    #[must_use]
    pub fn unit(&self) -> BlockUnit {
        let tokens = self.block_size.get();
        if self.is_text { BlockUnit::Bytes(tokens * CHARACTERS_PER_TOKEN) } else { BlockUnit::Tokens(tokens) }
    }

    /// Totals.
    #[must_use]
    pub fn stats(&self) -> &CacheStats {
        &self.stats
    }

    /// Beginnings of prompts that are on their way or in use.
    #[must_use]
    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    /// What decode servers keep of conversations for other servers.
    #[must_use]
    pub fn carried(&self) -> &Carried {
        &self.carried
    }

    /// Tokens of the engine in a block of its own text: what answers have taught where blocks hold text.
    #[must_use]
    pub fn tokens_per_block(&self) -> f64 {
        match self.unit() {
            BlockUnit::Tokens(n) => f64::from(n),
            BlockUnit::Bytes(_) => self.own_block_tokens(),
        }
    }

    /// Tokens of the engine in a block whose keys are of our own making.
    fn own_block_tokens(&self) -> f64 {
        nominal(self.unit()) * self.own_tokens.get()
    }

    /// Blocks that `endpoint` has taken in, as its engine tells or as was learned, each counted half as much after every
    /// [`DEFAULT_HALF_LIFE`]. O(1).
    #[must_use]
    pub fn weight(&self, endpoint: EndpointId, now: Timestamp) -> f64 {
        let (guesses, residents) = (self.guesses.load(), self.residents.load());
        let told =
            residents.get(&endpoint).iter().flat_map(|r| &r.caches).map(|c| self.index.weight(c.holder, now)).sum();
        guesses.get(&endpoint).map_or(0.0, |guess| self.index.weight(guess.holder, now)).max(told)
    }

    /// Finds out who holds how much of a prompt. Makes no more keys than can matter.
    pub fn lookup<K: BlockKeys>(&self, keys: &mut K, now: Timestamp) -> Found {
        let (guesses, residents) = (self.guesses.load(), self.residents.load());
        Found {
            guesses,
            residents,
            matches: self.index.find(keys),
            claimed: self.claims.lookup(keys, now),
            carried: None,
            tokens_per_block: nominal(self.unit()),
            own_block_tokens: self.own_block_tokens(),
            bytes_per_token: self.bytes_per_token.get(),
            own_keys: false,
        }
    }

    /// A prompt of so many tokens goes to an endpoint that is thought to hold so many of them.
    pub fn decided(&self, prompt_tokens: u32, matched_tokens: u32) {
        self.stats.lookups.fetch_add(1, Relaxed);
        self.stats.prompt_tokens.fetch_add(u64::from(prompt_tokens), Relaxed);
        self.stats.matched_tokens.fetch_add(u64::from(matched_tokens), Relaxed);
    }

    /// A prompt is on its way to `endpoint`, where it will use what is held of it and take room for what is not: what is held counts as used from
    /// now on, so that it is not what gives way to the others that wait there.
    #[must_use]
    pub fn claim(&self, endpoint: EndpointId, lesson: &Lesson, now: Timestamp) -> Coming {
        let claim = self.claims.claim(endpoint, &lesson.keys, now);
        let guesses = self.guesses.load();
        let room = guesses.get(&endpoint).and_then(|guess| {
            let held = lesson.keys.get(..lesson.held as usize).filter(|held| !held.is_empty());
            held.into_iter()
                .for_each(|held| self.index.record(guess.holder, held, tenant_id(lesson.tenant.as_deref()), now));
            (lesson.fresh > 0).then(|| {
                let reserved = guess.capacity.clone().reserve(lesson.fresh);
                self.tell_capacity(guess);
                reserved
            })
        });
        Coming { claim, room }
    }

    /// Whether what `endpoint` holds is learned from what is routed there; else its engine tells.
    #[must_use]
    pub fn learns(&self, endpoint: EndpointId) -> bool {
        !self.residents.load().get(&endpoint).is_some_and(Resident::is_exact)
    }

    /// `endpoint` has computed these blocks: the prompt's, when its answer has begun; with the answer's, when it has ended.
    pub fn record(&self, endpoint: EndpointId, keys: &[BlockKey], tenant: Option<&str>, now: Timestamp) {
        let guesses = self.guesses.load();
        if let Some(guess) = guesses.get(&endpoint) {
            // The index first gets back the room that was kept for them.
            self.tell_capacity(guess);
            self.index.record(guess.holder, keys, tenant_id(tenant), now);
        }
    }

    /// Tokens of a prompt that `endpoint` is believed to hold now, without what is on its way.
    #[must_use]
    pub fn believed(&self, endpoint: EndpointId, keys: &[BlockKey], own_keys: bool) -> u32 {
        let guesses = self.guesses.load();
        let Some(guess) = guesses.get(&endpoint) else { return 0 };
        let blocks = self.index.find(&mut &*keys).depth(guess.holder).any;
        (f64::from(blocks) * if own_keys { self.own_block_tokens() } else { nominal(self.unit()) }) as u32
    }

    /// An answer told what its prompt cost, of which so much was foretold at the decision, and believed still when it began. `bytes` of the prompt's text are 0 when something else is in it.
    pub fn correct(
        &self,
        endpoint: EndpointId,
        [foretold, believed]: [u64; 2],
        prompt: Option<u64>,
        cached: Option<u64>,
        bytes: u64,
    ) {
        // What is thought of the prompt's length now, and of what is held of it with the same error.
        let estimated = bytes as f64 / self.bytes_per_token.get();
        if let (Some(tokens @ 1..), LEAST_MEASURED_BYTES..) = (prompt, bytes) {
            self.bytes_per_token.learn((bytes as f64 / tokens as f64).clamp(0.5, 16.0));
        }
        let Some(cached) = cached else { return };
        let (foretold, believed) = (self.usable(foretold, prompt), self.usable(believed, prompt));
        self.stats.foretold_tokens.fetch_add(foretold, Relaxed);
        self.stats.reported_tokens.fetch_add(cached, Relaxed);
        if self.learns(endpoint) {
            // A prompt whose tokens are longer than others' is not a server that has evicted something.
            let error = match (self.unit(), prompt) {
                (BlockUnit::Bytes(_), Some(prompt)) if estimated > 0.0 => (prompt as f64 / estimated).min(1.0),
                _ => 1.0,
            };
            self.learn_capacity(endpoint, believed as f64 * error, cached as f64);
        }
    }

    /// An answer told how many tokens a prompt has that is of so many full blocks, whose keys are of our own making.
    pub fn measured(&self, blocks: usize, prompt_tokens: u64) {
        if blocks >= LEAST_MEASURED_BLOCKS {
            // On average the prompt ends in the middle of a block.
            let tokens = prompt_tokens as f64 / (blocks as f64 + 0.5);
            self.own_tokens.learn((tokens / nominal(self.unit())).clamp(1.0 / 8.0, 8.0));
        }
    }

    /// What of `held` tokens saves work: engines compute the last token of every prompt themselves, and with it its whole block.
    fn usable(&self, held: u64, prompt: Option<u64>) -> u64 {
        match (self.unit(), prompt) {
            (BlockUnit::Tokens(n @ 1..), Some(prompt)) => {
                held.min(prompt.saturating_sub(1) / u64::from(n) * u64::from(n))
            }
            (_, Some(prompt)) => held.min(prompt.saturating_sub(1)),
            (_, None) => held,
        }
    }

    /// A server that held less than believed has evicted what we thought it kept: guesses get less room. One that held more gives it back.
    /// The room follows the error in tokens, so a server that has half the room it says is found out by its long prompts, however many
    /// short ones it answers as foretold.
    fn learn_capacity(&self, endpoint: EndpointId, believed: f64, cached: f64) {
        let slack = 0.05 * believed + 2.0 * self.tokens_per_block();
        let error = cached - believed;
        if error.abs() <= slack {
            return;
        }
        let mut servers = self.servers.lock();
        if let Some(server) = servers.get_mut(&endpoint).filter(|s| s.room > 0) {
            let step = (CAPACITY_GAIN * error / server.room as f64).clamp(-CAPACITY_STEP, CAPACITY_STEP);
            server.trust = (server.trust + step).clamp(LEAST_CAPACITY, 1.0);
            self.measure(server);
        }
    }

    fn measure(&self, server: &Server) {
        if server.room == 0 {
            return;
        }
        let blocks = server.room as f64 * server.trust / self.tokens_per_block();
        server.guess.capacity.set(blocks.clamp(1.0, f64::from(u32::MAX)) as u32);
        self.tell_capacity(&server.guess);
    }

    fn tell_capacity(&self, guess: &Guess) {
        if let Some(blocks) = guess.capacity.news() {
            self.index.set_capacity(guess.holder, blocks);
        }
    }

    /// Brings the caches in line with the pool: endpoints come and go, restart with an empty cache, and say how much they have room for.
    pub fn reconcile(&self, snapshot: &PoolSnapshot) {
        let mut servers = self.servers.lock();
        let mut come = false;
        for state in &snapshot.endpoints {
            let known = servers.contains_key(&state.endpoint.id);
            let server = servers.entry(state.endpoint.id).or_insert_with(|| {
                come = true;
                let guess = Guess { holder: self.index.add_holder(), capacity: Arc::default() };
                Server { guess, room: 0, trust: 1.0 }
            });
            if known && snapshot.lost.contains(&state.endpoint.id) {
                self.index.clear(server.guess.holder);
                server.trust = 1.0;
            }
            let Some(metrics) = state.metrics() else { continue };
            // Servers name the adapters that they are busy with; what they have named once stays an adapter when it rests.
            let adapters = metrics.lora.iter().flat_map(|lora| lora.running.iter().chain(&lora.waiting));
            adapters.for_each(|name| self.residents.learn_adapter(name));
            if let (Some(size), Some(blocks)) = (metrics.block_size, metrics.num_blocks) {
                server.room = u64::from(size) * u64::from(blocks);
                self.measure(server);
            }
        }
        if !snapshot.lost.is_empty() {
            self.carried.forget(|endpoint| snapshot.lost.contains(&endpoint));
        }
        let mut gone: SmallVec<[EndpointId; 8]> = SmallVec::new();
        // Each endpoint has its server by now: with as many of both, nobody has gone.
        if servers.len() > snapshot.endpoints.len() {
            let there: AHashSet<EndpointId> = snapshot.endpoints.iter().map(|s| s.endpoint.id).collect();
            gone.extend(servers.keys().copied().filter(|id| !there.contains(id)));
        }
        for server in gone.iter().filter_map(|id| servers.remove(id)) {
            self.index.remove_holder(server.guess.holder);
        }
        if !gone.is_empty() {
            self.carried.forget(|endpoint| gone.contains(&endpoint));
        }
        if come || !gone.is_empty() {
            let guesses = servers.iter().map(|(id, server)| (*id, server.guess.clone())).collect();
            self.guesses.store(Arc::new(guesses));
        }
    }
}

impl Coming {
    /// The endpoint has computed it: what it takes is no longer ahead, as [`PrefixCache::record`] will tell, and it stays as long as the answer takes.
    pub fn arrived(&mut self) {
        self.claim.arrived();
        self.room = None;
    }
}

/// Tokens in a block before anything was measured; where keys are those of engines, always.
fn nominal(unit: BlockUnit) -> f64 {
    match unit {
        BlockUnit::Tokens(n) => f64::from(n),
        BlockUnit::Bytes(n) => f64::from(n) / f64::from(CHARACTERS_PER_TOKEN),
    }
}

/// Tenants are told apart by 32 bits of a hash: two that meet share a share.
fn tenant_id(tenant: Option<&str>) -> TenantId {
    TenantId(tenant.map_or(0, |t| xxhash_rust::xxh3::xxh3_64(t.as_bytes()) as u32 | 1))
}

#[cfg(test)]
mod tests;
