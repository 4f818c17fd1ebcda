//! A conversation between two turns, where decode servers keep what they have computed for whoever prefills the next one: what a request
//! finds of the turn before, and what its own answer tells.
//!
//! Only where a prompt's tokens are known as its server knows them: it came in tokens, or the pool's tokenizer is the model's own
//! (`huggingface`) or the servers' (`remote`). The answer's tokens are those that it tells (`return_token_ids`; messages and responses
//! tell none), or its text's as `huggingface` encodes it, if they are as many as the server says it has computed. Called by the decision, by
//! [`super::split`] and by [`super::response`].

use super::lookup::PromptLookup;
use super::prefix::PoolPrefix;
use attache_disagg::{Mode, Transfer};
use attache_pool::health::Availability;
use attache_pool::{Endpoint, EndpointState, PoolSnapshot, Roles};
use attache_prefix::carried::{Carry, KeptTurn};
use attache_protocol::answer::AnswerFormat;
use attache_protocol::transfer::Finish;
use attache_protocol::{Api, TransferScanner};
use attache_scheduling::Pool;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// One turn that is split between two servers.
#[derive(Debug)]
pub struct Conversation {
    prefix: Arc<PoolPrefix>,
    root: u64,
    /// The prompt's; empty as long as no server of the pool has told that it keeps any.
    tokens: Vec<u32>,
    /// What is kept of the turn before, and the prefill servers that can fetch it.
    carry: Option<(Carry, Arc<[EndpointId]>)>,
    ttl: Duration,
}

/// What a prefill server fetches of the turn before.
#[derive(Debug)]
pub struct Fetch {
    /// The words by which it does.
    pub params: Bytes,
    /// The tokens that it gets.
    pub tokens: u32,
    /// Who can.
    pub servers: Arc<[EndpointId]>,
}

/// The prefill servers that can fetch what `keeper` keeps: those that go together with it. A server that is there for both fetches nothing
/// from itself.
fn fetchers(pool: &Pool, snapshot: &PoolSnapshot, keeper: &Endpoint) -> Arc<[EndpointId]> {
    let policy = pool.scheduler.split();
    let can = |state: &&EndpointState| {
        state.endpoint.roles.has(Roles::PREFILL) && policy.is_some_and(|p| p.pairs(&state.endpoint, keeper))
    };
    snapshot.endpoints.iter().filter(can).map(|state| state.endpoint.id).collect()
}

/// How long the pool's decode servers keep blocks for the next prefill; `None` when they don't, or nobody should ask.
fn ttl(pool: &Pool) -> Option<Duration> {
    let Some(Mode::Direct(direct)) = pool.disagg.as_deref() else { return None };
    Some(direct.decoder_blocks_ttl).filter(|ttl| !ttl.is_zero() && direct.connector.carries())
}

/// Whether all tokens of a prompt will be asked for.
pub(super) fn wants_tokens(pool: &Pool, prefix: &PoolPrefix) -> bool {
    ttl(pool).is_some() && prefix.cache.carried().is_wanted()
}

impl Conversation {
    /// What is known of the turn that `looked` has looked up, which notes what can be fetched of it; `None` where nothing can be.
    pub(super) fn begin(
        pool: &Pool,
        looked: &mut PromptLookup<'_>,
        tenant: Option<&str>,
        target: &str,
        snapshot: &PoolSnapshot,
        now: Timestamp,
    ) -> Option<Box<Self>> {
        let ttl = ttl(pool)?;
        // An adapter that no engine has named yet has the base model's root, and keys and values of its own.
        let root = xxhash_rust::xxh3::xxh3_64_with_seed(target.as_bytes(), looked.root());
        // Tenants share nothing, whatever their salts.
        let root = tenant.map_or(root, |tenant| xxhash_rust::xxh3::xxh3_64_with_seed(tenant.as_bytes(), root));
        let prefix = looked.prefix().clone();
        let carried = prefix.cache.carried();
        if !looked.has_engine_tokens() {
            return None;
        }
        let tokens = if carried.is_wanted() { looked.tokens()? } else { Vec::new() };
        let keeper = |id: EndpointId| snapshot.endpoints.iter().map(|state| &state.endpoint).find(|e| e.id == id);
        let serves = |id: EndpointId| {
            let availability = keeper(id).map(|keeper| keeper.health.availability(now, pool.scheduler.health()));
            matches!(availability, Some(Availability::Open | Availability::SlowStart(_)))
        };
        let carry = carried.find(root, &tokens, now, serves).and_then(|carry| {
            let keeper = keeper(carry.endpoint)?;
            let by = fetchers(pool, snapshot, keeper);
            looked.found.carry(carry.tokens, keeper.place, by.clone());
            Some((carry, by))
        });
        Some(Box::new(Self { prefix, root, tokens, carry, ttl }))
    }

    /// Whether anything is kept of the turn before that the prefill server `by` can fetch.
    #[must_use]
    pub fn has_carry(&self, by: EndpointId) -> bool {
        self.carry.as_ref().is_some_and(|(_, servers)| servers.contains(&by))
    }

    /// What the prefill server `by` fetches of the turn before. Nobody else gets it then, since it is good for one fetch.
    pub fn take(&mut self, by: EndpointId, now: Timestamp) -> Option<Fetch> {
        let (carry, servers) = self.carry.take().filter(|(_, servers)| servers.contains(&by))?;
        let params = self.prefix.cache.carried().take(&carry, now)?;
        Some(Fetch { params, tokens: carry.tokens, servers })
    }

    /// What reads the answer; `None` for APIs that tell nothing, and for vLLM's generate API, where tokens may stand for media.
    #[must_use]
    pub fn scanner(&self, api: Api, format: AnswerFormat) -> Option<TransferScanner> {
        TransferScanner::new(api, format)
    }

    /// Whether the answer's text would do where its tokens are not told.
    #[must_use]
    pub fn reads_text(&self) -> bool {
        !self.tokens.is_empty() && self.prefix.encodes()
    }

    /// The answer of `endpoint` has ended: keeps what it told for the next turn.
    pub fn learn(
        mut self,
        told: &TransferScanner,
        text: Option<&str>,
        prompt_tokens: Option<u64>,
        endpoint: EndpointId,
        now: Timestamp,
    ) {
        let Some(params) = told.params() else { return };
        let Some(transfer) = Transfer::read(params) else { return };
        let Some(kept) = transfer.kept_for_prefill().and_then(|tokens| usize::try_from(tokens).ok()) else { return };
        self.prefix.cache.carried().want();
        let prompt = self.tokens.len() as u64;
        if prompt == 0 || prompt_tokens.is_some_and(|tokens| tokens != prompt) || !self.add_answer(told, text, kept) {
            return;
        }
        self.tokens.truncate(kept);
        let life = transfer.life(self.ttl, self.prefix.clock.wall(now));
        let turn = KeptTurn { endpoint, root: self.root, tokens: &self.tokens, until: now.after(life) };
        self.prefix.cache.carried().keep(&turn, Bytes::copy_from_slice(params), now);
    }

    /// Adds the answer's tokens to the prompt's; false when they can't be those of which the server has computed `kept`: all but the last
    /// one, whose keys and values nobody has needed. A text holds that one only when it was cut off.
    fn add_answer(&mut self, told: &TransferScanner, text: Option<&str>, kept: usize) -> bool {
        let ids = told.token_ids();
        if !ids.is_empty() {
            self.tokens.extend_from_slice(ids);
            return self.tokens.len() == kept + 1;
        }
        let encoded = text.is_some_and(|text| self.prefix.encode(text, &mut self.tokens));
        let unread = match told.finish() {
            Some(Finish::Length) => 1,
            Some(Finish::Stop) => 0,
            None => return false,
        };
        encoded && self.tokens.len() == kept + unread
    }
}
