//! Prefix cache of one pool: the index, the speculative entries of prompts in flight, and how accurate
//! predictions of cached tokens are.
//!
//! A decision looks prompts up. The booking adds a speculative entry when Attaché picks an endpoint,
//! records the prompt's blocks when the response begins, and corrects the estimates when the response's
//! usage reports the cached tokens.

mod capacity;
mod found;
mod settings;
mod transfer;

pub use found::Found;
pub(crate) use settings::DEFAULT_HALF_LIFE;
pub use settings::{
    BlockUnit, CHARACTERS_PER_TOKEN, CacheConfig, DEFAULT_BYTES_PER_TOKEN, DEFAULT_MAX_BYTES, DEFAULT_TENANT_SHARE,
};

use super::average::Average;
use super::block_size::BlockSize;
use super::by_endpoint::ByEndpoint;
use super::carried::{Carried, DEFAULT_MAX_CARRIED, DEFAULT_MAX_CARRIED_BYTES};
use super::claims::{Claim, Claims};
use super::index::{HolderId, InUse, IndexConfig, PrefixIndex, TenantId};
use super::key::{BlockKey, BlockKeys, KeySpace, Root};
use super::learning::PrefixUpdate;
use super::recomputed::Recomputed;
use super::residents::{Resident, Residents};
use super::unread::UnreadPrompts;
use ahash::{AHashMap, AHashSet};
use arc_swap::ArcSwap;
use attache_pool::{EndpointMetrics, PoolSnapshot};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use capacity::{Capacity, LEAST_CAPACITY, Reserved};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Shorter prompts, in bytes, are not measured: the chat template's own text would outweigh theirs.
const LEAST_MEASURED_BYTES: u64 = 256;
/// Prompts with fewer blocks are not measured, since the length of their last block is unknown.
const LEAST_MEASURED_BLOCKS: usize = 8;
/// A predicted token that was not cached lowers the estimated capacity by two tokens: dozens of wrong prompts correct
/// it, a single one has little effect.
const CAPACITY_GAIN: f64 = 2.0;
/// Largest change of the capacity's estimated part by one response: a tenth.
const CAPACITY_STEP: f64 = 0.1;

/// Counters since the start of the process.
#[derive(Debug, Default)]
pub struct CacheStats {
    /// Number of prompts that were looked up.
    pub lookups: AtomicU64,
    /// Sum of the prompts' lengths, in tokens.
    pub prompt_tokens: AtomicU64,
    /// Sum of the tokens that the picked endpoints were expected to have cached.
    pub matched_tokens: AtomicU64,
    /// Tokens expected to be cached, of responses that reported the number of cached tokens.
    pub foretold_tokens: AtomicU64,
    /// Tokens that these responses reported as cached.
    pub reported_tokens: AtomicU64,
}

/// Prefix cache of one pool.
#[derive(Debug)]
pub struct PrefixCache {
    index: Arc<PrefixIndex>,
    space: KeySpace,
    guesses: ArcSwap<Guesses>,
    residents: Arc<Residents>,
    claims: Claims,
    carried: Carried,
    /// Whether blocks hold text instead of token ids.
    is_text: bool,
    block_size: Arc<BlockSize>,
    bytes_per_token: Average,
    /// Engine tokens in a block that Attaché hashed from its own tokens or text, as a multiple
    /// of the block's nominal size.
    own_tokens: Average,
    servers: Mutex<AHashMap<EndpointId, ServerEstimates>>,
    stats: CacheStats,
    unread: UnreadPrompts,
    recomputed: Arc<Recomputed>,
}

/// Holder of an endpoint's estimated blocks, and how many it may have.
#[derive(Clone, Debug)]
struct Guess {
    holder: HolderId,
    capacity: Arc<Capacity>,
}

type Guesses = ByEndpoint<Guess>;

/// State of the estimates about one server.
#[derive(Debug)]
struct ServerEstimates {
    guess: Guess,
    /// Capacity of the server's KV cache in tokens; 0 while unknown.
    room: u64,
    /// Part of the capacity that estimated blocks may fill, learned from reported cached tokens.
    trust: f64,
    /// Time of the scrape that was last read.
    read: Option<Timestamp>,
    /// Whether its engine reports its blocks, so that the estimates need no share of a full index.
    is_reported: bool,
}

/// Speculative entry of a prompt that is in flight to an endpoint. Drop ends it.
#[derive(Debug)]
pub struct PromptInFlight {
    claim: Claim,
    room: Option<Reserved>,
}

impl PrefixCache {
    /// An empty cache.
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
        let claims = Claims::new(config.claim_life, config.seed);
        Self {
            index: Arc::new(index),
            space: KeySpace::new(config.seed),
            guesses: ArcSwap::default(),
            residents: Arc::default(),
            claims: if config.claim_every_block { claims.at_every_depth() } else { claims },
            carried: Carried::new(DEFAULT_MAX_CARRIED, DEFAULT_MAX_CARRIED_BYTES, config.seed),
            is_text,
            block_size: Arc::new(BlockSize::given(block_size)),
            bytes_per_token: Average::new(DEFAULT_BYTES_PER_TOKEN),
            own_tokens: Average::new(1.0),
            servers: Mutex::default(),
            stats: CacheStats::default(),
            unread: UnreadPrompts::default(),
            recomputed: Arc::default(),
        }
    }

    /// Returns the cache with a block size that follows the engines' reports; the configured size is
    /// used before the first report.
    #[must_use]
    pub fn of_engines_blocks(self) -> Self {
        Self { block_size: Arc::new(BlockSize::of_engines(self.block_size.get())), ..self }
    }

    /// Returns the cache with a limit on the number of blocks in the index; `None` is no limit.
    #[must_use]
    pub fn with_max_blocks(self, blocks: Option<u64>) -> Self {
        self.index.set_max_blocks(blocks);
        self
    }

    /// The index, which KV events update.
    #[must_use]
    pub fn index(&self) -> &Arc<PrefixIndex> {
        &self.index
    }

    /// Which KV caches belong to which endpoint, as the KV event subscriptions publish it.
    #[must_use]
    pub fn residents(&self) -> &Arc<Residents> {
        &self.residents
    }

    /// The key space in which block keys of this pool are hashed.
    #[must_use]
    pub fn space(&self) -> KeySpace {
        self.space
    }

    /// Identifies a tenant by 32 bits of a hash with the cache's seed. Two tenants with the same hash share one share.
    #[must_use]
    pub fn tenant(&self, name: Option<&str>) -> TenantId {
        TenantId(name.map_or(0, |name| self.space.root(&Root { tenant: Some(name), ..Root::default() }) as u32 | 1))
    }

    /// Number of tokens in a block, shared with everything that makes keys and with the KV event subscriptions.
    #[must_use]
    pub fn block_size(&self) -> &Arc<BlockSize> {
        &self.block_size
    }

    /// Returns the content and the current size of a block.
    #[must_use]
    pub fn unit(&self) -> BlockUnit {
        let tokens = self.block_size.get();
        if self.is_text { BlockUnit::Bytes(tokens * CHARACTERS_PER_TOKEN) } else { BlockUnit::Tokens(tokens) }
    }

    /// Returns the counters since the start.
    #[must_use]
    pub fn stats(&self) -> &CacheStats {
        &self.stats
    }

    /// Returns the prompts that could not be looked up.
    #[must_use]
    pub fn unread(&self) -> &UnreadPrompts {
        &self.unread
    }

    /// Speculative entries of prompts that are in flight.
    #[must_use]
    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    /// KV blocks of conversations that decode workers keep for a following request.
    #[must_use]
    pub fn carried(&self) -> &Carried {
        &self.carried
    }

    /// Returns the engine tokens in one block. Where blocks hold text, responses have measured it.
    #[must_use]
    pub fn tokens_per_block(&self) -> f64 {
        match self.unit() {
            BlockUnit::Tokens(n) => f64::from(n),
            BlockUnit::Bytes(_) => self.own_block_tokens(),
        }
    }

    /// Engine tokens in a block that Attaché hashed from its own tokens or text.
    fn own_block_tokens(&self) -> f64 {
        nominal(self.unit()) * self.own_tokens.get()
    }

    /// Returns the number of blocks that `endpoint` has stored, exact or estimated; each counts
    /// half after every `DEFAULT_HALF_LIFE`. O(1).
    #[must_use]
    pub fn weight(&self, endpoint: EndpointId, now: Timestamp) -> f64 {
        let (guesses, residents) = (self.guesses.load(), self.residents.load());
        let reported =
            residents.get(&endpoint).iter().flat_map(|r| &r.caches).map(|c| self.index.weight(c.holder, now)).sum();
        guesses.get(&endpoint).map_or(0.0, |guess| self.index.weight(guess.holder, now)).max(reported)
    }

    /// Looks up how much of a prompt each endpoint holds. Makes only as many keys as the result needs.
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
            counted: None,
        }
    }

    /// Counts a decision: the prompt's tokens, and those that the picked endpoint is expected to have cached.
    pub fn decided(&self, prompt_tokens: u32, matched_tokens: u32) {
        self.stats.lookups.fetch_add(1, Relaxed);
        self.stats.prompt_tokens.fetch_add(u64::from(prompt_tokens), Relaxed);
        self.stats.matched_tokens.fetch_add(u64::from(matched_tokens), Relaxed);
    }

    /// Counts which blocks of a whole prompt its server has computed for the first time.
    pub(crate) fn computed(&self, update: &PrefixUpdate, now: Timestamp) {
        self.recomputed.computed(&update.keys, update.held, update.anywhere, now);
    }

    /// The share of computed blocks that were computed before and that no server holds any more, in recent prompts; 0..1.
    #[must_use]
    pub fn recomputed(&self) -> f64 {
        self.recomputed.share()
    }

    /// Learns that share from KV events.
    #[must_use]
    pub fn recomputed_blocks(&self) -> &Arc<Recomputed> {
        &self.recomputed
    }

    /// Adds a speculative entry for a prompt in flight to `endpoint`, and reserves capacity for the blocks that
    /// it will add. Blocks of the prompt that the endpoint holds count as used now, so that other prompts in
    /// flight do not evict them.
    #[must_use]
    pub fn claim(&self, endpoint: EndpointId, update: &PrefixUpdate, now: Timestamp) -> PromptInFlight {
        let claim = self.claims.claim(endpoint, &update.keys, now);
        self.index.mark_used(&update.keys);
        let guesses = self.guesses.load();
        let room = guesses.get(&endpoint).and_then(|guess| {
            let held = update.keys.get(..update.held as usize).filter(|held| !held.is_empty());
            held.into_iter().for_each(|held| self.index.record(guess.holder, held, update.tenant, now));
            (update.fresh > 0).then(|| {
                let reserved = guess.capacity.clone().reserve(update.fresh);
                self.update_capacity(guess);
                reserved
            })
        });
        PromptInFlight { claim, room }
    }

    /// Whether the blocks of `endpoint` are estimated from routed requests instead of reported by its engine.
    #[must_use]
    pub fn learns(&self, endpoint: EndpointId) -> bool {
        !self.residents.load().get(&endpoint).is_some_and(Resident::is_exact)
    }

    /// Records that `endpoint` has computed these blocks: the prompt's when the response begins, the response's
    /// too when it has ended.
    pub fn record(&self, endpoint: EndpointId, keys: &[BlockKey], tenant: TenantId, now: Timestamp) {
        let guesses = self.guesses.load();
        if let Some(guess) = guesses.get(&endpoint) {
            // The index first gets back the capacity that was reserved for them.
            self.update_capacity(guess);
            self.index.record(guess.holder, keys, tenant, now);
        }
    }

    /// Records a prompt as [`Self::record`], and keeps its blocks until the guard is dropped. `None` if `endpoint` has no
    /// estimates.
    #[must_use]
    pub fn record_in_use(
        &self,
        endpoint: EndpointId,
        keys: &Arc<Vec<BlockKey>>,
        tenant: TenantId,
        now: Timestamp,
    ) -> Option<InUse> {
        let guesses = self.guesses.load();
        let guess = guesses.get(&endpoint)?;
        // The index first gets back the capacity that was reserved for them.
        self.update_capacity(guess);
        Some(self.index.record_in_use(guess.holder, keys, tenant, now))
    }

    /// Returns the tokens of a prompt that `endpoint` is estimated to hold now, without prompts in flight.
    #[must_use]
    pub fn believed(&self, endpoint: EndpointId, keys: &[BlockKey], own_keys: bool) -> u32 {
        let guesses = self.guesses.load();
        let Some(guess) = guesses.get(&endpoint) else { return 0 };
        let blocks = self.index.find(&mut &*keys).depth(guess.holder).any;
        (f64::from(blocks) * if own_keys { self.own_block_tokens() } else { nominal(self.unit()) }) as u32
    }

    /// Corrects the estimates by a response's usage. `foretold` is the number of cached tokens expected at the
    /// decision, `believed` the number expected when the response began. `bytes` is the prompt's length in text, 0 when
    /// it also has other content.
    pub fn correct(
        &self,
        endpoint: EndpointId,
        [foretold, believed]: [u64; 2],
        prompt: Option<u64>,
        cached: Option<u64>,
        bytes: u64,
    ) {
        // Cached tokens are predicted with the same relative error as the prompt's length.
        let estimated = bytes as f64 / self.bytes_per_token.get();
        if let (Some(tokens @ 1..), LEAST_MEASURED_BYTES..) = (prompt, bytes) {
            self.bytes_per_token.learn((bytes as f64 / tokens as f64).clamp(0.5, 16.0));
        }
        let Some(cached) = cached else { return };
        let (foretold, believed) = (self.usable(foretold, prompt), self.usable(believed, prompt));
        self.stats.foretold_tokens.fetch_add(foretold, Relaxed);
        self.stats.reported_tokens.fetch_add(cached, Relaxed);
        if self.learns(endpoint) {
            // Longer tokens than usual explain a lower report; the server need not have evicted anything.
            let error = match (self.unit(), prompt) {
                (BlockUnit::Bytes(_), Some(prompt)) if estimated > 0.0 => (prompt as f64 / estimated).min(1.0),
                _ => 1.0,
            };
            self.learn_capacity(endpoint, believed as f64 * error, cached as f64);
        }
    }

    /// Records the number of tokens that a response reports for a prompt of `blocks` full blocks, whose keys Attaché
    /// made from its own tokens or text.
    pub fn measured(&self, blocks: usize, prompt_tokens: u64) {
        if blocks >= LEAST_MEASURED_BLOCKS {
            // On average the prompt ends in the middle of a block.
            let tokens = prompt_tokens as f64 / (blocks as f64 + 0.5);
            self.own_tokens.learn((tokens / nominal(self.unit())).clamp(1.0 / 8.0, 8.0));
        }
    }

    /// Returns the part of `held` tokens that saves work: engines always compute the last token of a prompt, and
    /// with it its whole block.
    fn usable(&self, held: u64, prompt: Option<u64>) -> u64 {
        match (self.unit(), prompt) {
            (BlockUnit::Tokens(n @ 1..), Some(prompt)) => {
                held.min(prompt.saturating_sub(1) / u64::from(n) * u64::from(n))
            }
            (_, Some(prompt)) => held.min(prompt.saturating_sub(1)),
            (_, None) => held,
        }
    }

    /// Adjusts the server's capacity for estimated blocks. A server that cached less than expected has evicted blocks:
    /// its capacity shrinks. One that cached more gets it back. The change follows the error in tokens, so that errors
    /// in long prompts outweigh many correct short ones.
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

    fn measure(&self, server: &ServerEstimates) {
        if server.room == 0 {
            return;
        }
        let blocks = server.room as f64 * server.trust / self.tokens_per_block();
        server.guess.capacity.set(blocks.clamp(1.0, f64::from(u32::MAX)) as u32);
        self.update_capacity(&server.guess);
    }

    fn update_capacity(&self, guess: &Guess) {
        if let Some(blocks) = guess.capacity.update() {
            self.index.set_capacity(guess.holder, blocks);
        }
    }

    /// Takes the names of the base model and of the busy adapters from a server's metrics.
    fn read_adapters(&self, server: EndpointId, metrics: &EndpointMetrics) {
        let (adapters, now) = (self.residents.adapters(), metrics.scraped_at);
        adapters.reported(server, metrics.model.as_ref(), now);
        let busy = metrics.lora.iter().flat_map(|lora| lora.running.iter().chain(&lora.waiting));
        busy.for_each(|name| adapters.used(server, name, now));
    }

    /// Updates the cache after a change of the pool: adds and removes endpoints, clears those that restarted, and
    /// applies the capacities that their metrics report.
    pub fn reconcile(&self, snapshot: &PoolSnapshot) {
        let (mut servers, residents) = (self.servers.lock(), self.residents.load());
        let mut come = false;
        for state in &snapshot.endpoints {
            let known = servers.contains_key(&state.endpoint.id);
            let server = servers.entry(state.endpoint.id).or_insert_with(|| {
                come = true;
                let guess = Guess { holder: self.index.add_holder(), capacity: Arc::default() };
                ServerEstimates { guess, room: 0, trust: 1.0, read: None, is_reported: false }
            });
            if known && snapshot.lost.contains(&state.endpoint.id) {
                self.index.clear(server.guess.holder);
                server.trust = 1.0;
                self.residents.adapters().forget(state.endpoint.id);
            }
            let is_reported = residents.get(&state.endpoint.id).is_some();
            if std::mem::replace(&mut server.is_reported, is_reported) != is_reported {
                self.index.set_share(server.guess.holder, !is_reported);
            }
            let Some(metrics) = state.metrics() else { continue };
            if server.read.replace(metrics.scraped_at) != Some(metrics.scraped_at) {
                self.read_adapters(state.endpoint.id, metrics);
            }
            if let (Some(size), Some(blocks)) = (metrics.block_size, metrics.num_blocks) {
                server.room = u64::from(size) * u64::from(blocks);
                self.measure(server);
            }
        }
        if !snapshot.lost.is_empty() {
            self.carried.forget(|endpoint| snapshot.lost.contains(&endpoint));
        }
        let mut gone: SmallVec<[EndpointId; 8]> = SmallVec::new();
        // Every endpoint of the snapshot has a server here, so equal counts mean that none has left.
        if servers.len() > snapshot.endpoints.len() {
            let there: AHashSet<EndpointId> = snapshot.endpoints.iter().map(|s| s.endpoint.id).collect();
            gone.extend(servers.keys().copied().filter(|id| !there.contains(id)));
        }
        for server in gone.iter().filter_map(|id| servers.remove(id)) {
            self.index.remove_holder(server.guess.holder);
        }
        if !gone.is_empty() {
            self.carried.forget(|endpoint| gone.contains(&endpoint));
            // Of all that are not there, since the last events of one may have arrived after it was gone.
            self.residents.adapters().retain(|server| servers.contains_key(&server));
        }
        if come || !gone.is_empty() {
            let guesses = servers.iter().map(|(id, server)| (*id, server.guess.clone())).collect();
            self.guesses.store(Arc::new(guesses));
        }
    }
}

impl PromptInFlight {
    /// Marks the prompt as computed: its reserved capacity is released, because [`PrefixCache::record`] counts the
    /// blocks. The speculative entry stays until the response has ended.
    pub fn arrived(&mut self) {
        self.claim.arrived();
        self.room = None;
    }
}

/// Nominal tokens of a block, used before anything was measured. For keys of engine tokens it is exact.
fn nominal(unit: BlockUnit) -> f64 {
    match unit {
        BlockUnit::Tokens(n) => f64::from(n),
        BlockUnit::Bytes(n) => f64::from(n) / f64::from(CHARACTERS_PER_TOKEN),
    }
}

#[cfg(test)]
mod tests;
