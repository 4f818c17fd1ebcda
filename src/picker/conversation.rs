//! Blocks that decode workers keep between two turns of a conversation. The prefill worker of the next turn fetches
//! them instead of computing them again.
//!
//! A [`Conversation`] looks up what is kept of the previous turn, and records what the response of this turn keeps.
//! That needs the exact tokens of the model server. For the prompt, the client sent token ids, or the pool's
//! tokenizer is `huggingface` or `remote`. For the response, the model server reports token ids (`return_token_ids`),
//! or the text is encoded with `huggingface` and the number of tokens matches. The messages and responses APIs report
//! no token ids.

use super::lookup::PromptLookup;
use super::prefix::PoolPrefix;
use attache_disagg::{Mode, Transfer};
use attache_pool::health::Availability;
use attache_pool::{Endpoint, EndpointState, PoolSnapshot, Roles};
use attache_prefix::carried::{Carry, KeptTurn};
use attache_protocol::answer::AnswerFormat;
use attache_protocol::transfer::Finish;
use attache_protocol::{Api, TransferScanner};
use attache_record::Kept;
use attache_scheduling::Pool;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// One turn of a conversation, served by a prefill and a decode worker.
#[derive(Debug)]
pub struct Conversation {
    prefix: Arc<PoolPrefix>,
    root: u64,
    /// Tokens of the prompt. Empty as long as no decode worker of the pool has reported that it keeps blocks.
    tokens: Vec<u32>,
    /// The kept blocks of the previous turn, and the prefill workers that can fetch them.
    carry: Option<(Carry, Arc<[EndpointId]>)>,
    ttl: Duration,
}

/// Blocks of the previous turn that a prefill worker fetches.
#[derive(Debug)]
pub struct Fetch {
    /// The `kv_transfer_params` for the fetch, JSON.
    pub params: Bytes,
    /// Length of the fetched blocks, tokens.
    pub tokens: u32,
    /// The prefill workers that can fetch them.
    pub servers: Arc<[EndpointId]>,
}

/// The prefill workers that can fetch blocks from `keeper`: those that the pool may pair with it.
fn fetchers(pool: &Pool, snapshot: &PoolSnapshot, keeper: &Endpoint) -> Arc<[EndpointId]> {
    let policy = pool.scheduler.split();
    let can = |state: &&EndpointState| {
        state.endpoint.roles.has(Roles::PREFILL) && policy.is_some_and(|p| p.pairs(&state.endpoint, keeper))
    };
    snapshot.endpoints.iter().filter(can).map(|state| state.endpoint.id).collect()
}

/// How long the pool's decode workers keep blocks for the next prefill; `None` if they do not, or the connector can't
/// fetch them.
fn ttl(pool: &Pool) -> Option<Duration> {
    let Some(Mode::Direct(direct)) = pool.disagg.as_deref() else { return None };
    Some(direct.decoder_blocks_ttl).filter(|ttl| !ttl.is_zero() && direct.connector.carries())
}

/// Whether the pool needs all token ids of each prompt.
pub(super) fn wants_tokens(pool: &Pool, prefix: &PoolPrefix) -> bool {
    ttl(pool).is_some() && prefix.cache.carried().is_wanted()
}

impl Conversation {
    /// The turn of the prompt in `lookup`. Adds the blocks that can be fetched to the lookup's result. `None` if the
    /// pool keeps no blocks or the prompt's exact tokens are unknown.
    pub(super) fn begin(
        pool: &Pool,
        lookup: &mut PromptLookup<'_>,
        tenant: Option<&str>,
        target: &str,
        snapshot: &PoolSnapshot,
        now: Timestamp,
    ) -> Option<Box<Self>> {
        let ttl = ttl(pool)?;
        // A LoRA adapter that no engine has reported yet has the root of its base model, but its own KV blocks.
        let root = xxhash_rust::xxh3::xxh3_64_with_seed(target.as_bytes(), lookup.root());
        // Tenants share no blocks, whatever cache salts they send.
        let root = tenant.map_or(root, |tenant| xxhash_rust::xxh3::xxh3_64_with_seed(tenant.as_bytes(), root));
        let prefix = lookup.prefix().clone();
        let carried = prefix.cache.carried();
        if !lookup.has_engine_tokens() {
            return None;
        }
        let tokens = if carried.is_wanted() { lookup.tokens()? } else { Vec::new() };
        let keeper = |id: EndpointId| snapshot.endpoints.iter().map(|state| &state.endpoint).find(|e| e.id == id);
        let serves = |id: EndpointId| {
            let availability = keeper(id).map(|keeper| keeper.health.availability(now, pool.scheduler.health()));
            matches!(availability, Some(Availability::Open | Availability::SlowStart(_)))
        };
        let carry = carried.find(root, &tokens, now, serves).and_then(|carry| {
            let keeper = keeper(carry.endpoint)?;
            let by = fetchers(pool, snapshot, keeper);
            lookup.found.carry(carry.tokens, keeper.place, by.clone());
            Some((carry, by))
        });
        Some(Box::new(Self { prefix, root, tokens, carry, ttl }))
    }

    /// Whether the prefill worker `by` can fetch blocks of the previous turn.
    #[must_use]
    pub fn has_carry(&self, by: EndpointId) -> bool {
        self.carry.as_ref().is_some_and(|(_, servers)| servers.contains(&by))
    }

    /// The blocks of the previous turn, in the form of a recording.
    pub(super) fn kept(&self) -> Option<Kept> {
        let (carry, by) = self.carry.as_ref()?;
        Some(Kept { tokens: carry.tokens, keeper: carry.endpoint, by: by.to_vec() })
    }

    /// Takes the blocks of the previous turn for the prefill worker `by`. They can be fetched only once, so no other
    /// request gets them.
    pub fn take(&mut self, by: EndpointId, now: Timestamp) -> Option<Fetch> {
        let (carry, servers) = self.carry.take().filter(|(_, servers)| servers.contains(&by))?;
        let params = self.prefix.cache.carried().take(&carry, now)?;
        Some(Fetch { params, tokens: carry.tokens, servers })
    }

    /// The scanner for the response; `None` for APIs without transfer parameters, and for vLLM's generate API, in which
    /// tokens may represent media.
    #[must_use]
    pub fn scanner(&self, api: Api, format: AnswerFormat) -> Option<TransferScanner> {
        TransferScanner::new(api, format)
    }

    /// Whether the text of the response can replace missing token ids.
    #[must_use]
    pub fn reads_text(&self) -> bool {
        !self.tokens.is_empty() && self.prefix.encodes()
    }

    /// The response of `endpoint` has ended: records the blocks that it keeps for the next turn.
    pub fn learn(
        mut self,
        scanner: &TransferScanner,
        text: Option<&str>,
        prompt_tokens: Option<u64>,
        endpoint: EndpointId,
        now: Timestamp,
    ) {
        let Some(params) = scanner.params() else { return };
        let Some(transfer) = Transfer::read(params) else { return };
        let Some(kept) = transfer.kept_for_prefill().and_then(|tokens| usize::try_from(tokens).ok()) else { return };
        self.prefix.cache.carried().want();
        let prompt = self.tokens.len() as u64;
        if prompt == 0
            || prompt_tokens.is_some_and(|tokens| tokens != prompt)
            || !self.add_response(scanner, text, kept)
        {
            return;
        }
        self.tokens.truncate(kept);
        let life = transfer.life(self.ttl, self.prefix.clock.wall(now));
        let turn = KeptTurn { endpoint, root: self.root, tokens: &self.tokens, until: now.after(life) };
        self.prefix.cache.carried().keep(&turn, Bytes::copy_from_slice(params), now);
    }

    /// Adds the tokens of the response to those of the prompt; false if they do not match the `kept` tokens that the
    /// worker reports. A worker keeps all tokens but the last, whose KV entries were never computed. The text
    /// contains that last token only if the response was cut at its length limit.
    fn add_response(&mut self, scanner: &TransferScanner, text: Option<&str>, kept: usize) -> bool {
        let ids = scanner.token_ids();
        if !ids.is_empty() {
            self.tokens.extend_from_slice(ids);
            return self.tokens.len() == kept + 1;
        }
        let encoded = text.is_some_and(|text| self.prefix.encode(text, &mut self.tokens));
        let unread = match scanner.finish() {
            Some(Finish::Length) => 1,
            Some(Finish::Stop) => 0,
            None => return false,
        };
        encoded && self.tokens.len() == kept + unread
    }
}
