//! What a request says about prefill and decode on different servers, and what that means for its job and its answer.
//!
//! Called by every handler that generates. The register of the fleet and the parameters on the wire are in `sim::pd`.

use super::error::ApiError;
use super::stream::StreamUsage;
use super::{Generation, Server};
use crate::engine::{FinishReason, Handoff, JobId, JobReport};
use crate::fault_board::FaultBoard;
use crate::kv::{BlockHash, content_hash};
use crate::pd::{
    BlockClaim, Connector, ExpiryClock, KeptBlocks, KvTransferParams, LoadError, LoadFailure, PdConfig, Peer,
    PeerCounts, Peers, ServerRole,
};
use crate::tokenizer::answer_token;
use attache_types::clock::{Clock, Timestamp};
use http::StatusCode;
use memchr::memmem;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The fields of all connectors.
const FIELDS: [&[u8]; 3] = [b"\"kv_transfer_params\"", b"\"bootstrap_room\"", b"\"disaggregated_params\""];

/// The parameters of one request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Legs {
    kv_transfer_params: Option<KvTransferParams>,
    bootstrap_room: Option<u64>,
    rid: Option<String>,
    disaggregated_params: Option<DisaggregatedParams>,
}

/// Transfer parameters in TensorRT-LLM's request format.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct DisaggregatedParams {
    request_type: String,
    ctx_request_id: Option<u64>,
    disagg_request_id: Option<u64>,
}

impl Legs {
    /// Reads a request's body once more, but only where it has such fields.
    pub(super) fn of(body: &[u8]) -> Result<Self, ApiError> {
        if FIELDS.iter().all(|field| memmem::find(body, field).is_none()) {
            return Ok(Self::default());
        }
        serde_json::from_slice(body).map_err(|error| ApiError::json(&error))
    }
}

/// A server's part in the split.
#[derive(Debug)]
pub(crate) struct Pd {
    pub(crate) config: PdConfig,
    pub(crate) role: ServerRole,
    pub(crate) peers: Arc<Peers>,
    /// This server, as the others see it.
    pub(crate) own: Arc<Peer>,
    pub(crate) counts: Arc<PeerCounts>,
    /// Held by each prefill leg that hangs.
    pub(crate) hanging: Arc<()>,
    pub(crate) faults: Arc<FaultBoard>,
    pub(crate) clock: Clock,
}

/// Which part of its work a request asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LegKind {
    #[default]
    Whole,
    /// NIXL's prefill, which names its blocks.
    Prefill,
    /// NIXL's decode leg, with the blocks of its prefill.
    Decode,
    /// SGLang's prefill, which leaves its blocks in a room.
    Room(u64),
    /// TensorRT-LLM's context request, the prefill leg.
    Context { id: u64, disagg_request_id: Option<u64> },
    /// With a storage that all servers share.
    Stored,
}

/// What a request's job is to do besides its work.
#[derive(Debug, Default)]
pub(super) struct Leg {
    kind: LegKind,
    pub(super) handoff: Handoff,
    pub(super) claim: Option<BlockClaim>,
    /// Cached tokens of the prefill, which the usage shows in place of those of the decode.
    cached: Option<u64>,
}

/// The end of an answer.
#[derive(Debug)]
pub(super) struct Totals {
    pub(super) usage: StreamUsage,
    /// Null except for prefill legs and kept conversations.
    pub(super) kv_transfer_params: Value,
    /// TensorRT-LLM's, for the first choice.
    pub(super) disaggregated_params: Option<Value>,
}

/// What is needed to make the end of an answer.
#[derive(Debug)]
pub(super) struct LegReply {
    pd: Arc<Pd>,
    kind: LegKind,
    cached: Option<u64>,
    request_id: String,
    prompt: Vec<u32>,
    seed: u64,
    lora: Option<Arc<str>>,
    /// What the first block of the prompt chains to, and the tokens in a block.
    root: BlockHash,
    block_size: u32,
    job: JobId,
}

/// What vLLM says when it can't load the keys and values of a request.
pub(super) fn load_failed() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal server error")
}

impl Server {
    /// The role of a request's job between prefill and decode servers. Waits where a real server would: for the other
    /// leg, or for the timeout of a missing one.
    pub(super) async fn leg(&self, generation: &Generation) -> Result<Leg, ApiError> {
        let legs = &generation.legs;
        let leg = match self.pd.config.connector {
            Connector::Nixl => self.nixl(legs.kv_transfer_params.clone(), generation).await?,
            Connector::Sglang => self.sglang(legs, generation).await?,
            Connector::Trtllm => self.trtllm(legs.disaggregated_params.clone(), generation).await?,
            Connector::SharedStorage => self.shared_storage(generation),
            Connector::None => Leg::default(),
        };
        if leg.kind == LegKind::Whole && leg.claim.is_none() {
            PeerCounts::add(&self.pd.counts.whole);
        }
        Ok(leg)
    }

    async fn nixl(&self, params: Option<KvTransferParams>, generation: &Generation) -> Result<Leg, ApiError> {
        let Some(params) = params else { return Ok(Leg::default()) };
        let (pd, config) = (&self.pd, &self.pd.config);
        let prefill = params.do_remote_decode == Some(true);
        if !prefill && params.do_remote_prefill != Some(true) {
            return Ok(Leg::default());
        }
        let mut leg = Leg::default();
        if prefill {
            leg.kind = LegKind::Prefill;
            leg.handoff.hold = Some(config.lease);
            self.begin_prefill().await;
            if !config.bidirectional {
                return Ok(leg);
            }
        } else {
            leg.kind = LegKind::Decode;
            leg.handoff.hold = config.bidirectional.then_some(config.decoder_ttl);
            leg.cached = params.remote_prefill_cached_tokens;
            PeerCounts::add(&pd.counts.decodes);
        }
        let Some(remote) = params.remote() else {
            if !prefill {
                tracing::warn!("kv_transfer_params lack a field that locates the blocks; computing the prompt");
                PeerCounts::add(&pd.counts.local_recomputes);
                leg.cached = None;
            }
            return Ok(leg);
        };
        let prompt = generation.prompts.first().map(Vec::as_slice).unwrap_or_default();
        let lora = generation.model.lora.as_deref();
        match pd.peers.claim(&pd.counts, config.load_failure, &remote, prompt, lora, prefill) {
            Ok(claim) => {
                if prefill {
                    PeerCounts::add(&pd.counts.pulls);
                }
                let there = remote.num_tokens.unwrap_or(u32::MAX).min(claim.tokens());
                leg.handoff.received = there;
                leg.claim = Some(claim);
            }
            Err(error) => {
                self.load_failed(error).await?;
                leg.cached = None;
            }
        }
        Ok(leg)
    }

    /// Whether a stream's status is sent before its prompt is there: by SGLang's decode servers.
    pub(super) fn answers_early(&self) -> bool {
        self.pd.config.connector == Connector::Sglang && self.pd.role == ServerRole::Decode
    }

    /// Counts the error. The request goes on where the policy allows it.
    async fn load_failed(&self, error: LoadError) -> Result<(), ApiError> {
        let (counts, config) = (&self.pd.counts, &self.pd.config);
        tracing::warn!(?error, "KV blocks of a prompt can't be fetched");
        counts.fail(error);
        if !config.load_failure_delay.is_zero() {
            tokio::time::sleep(config.load_failure_delay).await;
        }
        match config.load_failure {
            LoadFailure::Fail => Err(load_failed()),
            LoadFailure::Recompute => {
                PeerCounts::add(&counts.local_recomputes);
                Ok(())
            }
        }
    }

    /// Counts a prefill leg, and waits as long as prefills hang.
    async fn begin_prefill(&self) {
        PeerCounts::add(&self.pd.counts.prefills);
        let _hangs = self.pd.hanging.clone();
        let mut faults = self.faults.watch();
        // The board lives as long as the server.
        let _ = faults.wait_for(|faults| !faults.prefill.hang).await;
    }

    async fn sglang(&self, legs: &Legs, generation: &Generation) -> Result<Leg, ApiError> {
        let role = self.pd.role;
        if role == ServerRole::Both || generation.limits.max_tokens == Some(0) {
            return Ok(Leg::default());
        }
        let room = legs.bootstrap_room.ok_or_else(|| {
            ApiError::bad_request(
                "Disaggregated request received without bootstrap room id. Please make sure the router adds \
                 bootstrap_room.",
            )
        })?;
        if role == ServerRole::Prefill {
            self.begin_prefill().await;
            let handoff = Handoff { hold: Some(self.pd.config.bootstrap_timeout), received: 0 };
            return Ok(Leg { kind: LegKind::Room(room), handoff, ..Leg::default() });
        }
        PeerCounts::add(&self.pd.counts.decodes);
        let aborted = legs.rid.as_deref().map(|rid| self.aborts.register(rid));
        let aborted = async {
            match &aborted {
                Some(aborted) => aborted.cancelled().await,
                None => std::future::pending().await,
            }
        };
        let (peer, kept) = tokio::select! {
            found = self.pd.peers.enter_room(room) => found,
            () = aborted => return Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "Abort in waiting queue")),
            () = tokio::time::sleep(self.pd.config.bootstrap_timeout) => {
                self.pd.counts.fail(LoadError::NoBootstrap);
                return Err(ApiError::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    format!("Decode handshake failed for request rank=0 bootstrap_room={room}: timed out"),
                ));
            }
        };
        self.take_over(peer, kept, format!("room-{room}"), generation).await
    }

    async fn trtllm(&self, params: Option<DisaggregatedParams>, generation: &Generation) -> Result<Leg, ApiError> {
        let Some(params) = params else { return Ok(Leg::default()) };
        match params.request_type.as_str() {
            "context_only" => {
                self.begin_prefill().await;
                // The ids of these servers fit into what JSON readers with floats can tell apart.
                let id = params.disagg_request_id.unwrap_or_else(|| self.unique() >> 12);
                let kind = LegKind::Context { id, disagg_request_id: params.disagg_request_id };
                let handoff = Handoff { hold: Some(self.pd.config.lease), received: 0 };
                Ok(Leg { kind, handoff, ..Leg::default() })
            }
            "generation_only" => {
                PeerCounts::add(&self.pd.counts.decodes);
                let id = params.ctx_request_id.or(params.disagg_request_id);
                let found = id.and_then(|id| self.pd.peers.take_context(id));
                match found {
                    Some((peer, kept)) => self.take_over(peer, kept, String::new(), generation).await,
                    None => {
                        self.load_failed(LoadError::UnknownRequest).await?;
                        Ok(Leg { kind: LegKind::Decode, ..Leg::default() })
                    }
                }
            }
            "" | "context_and_generation" => Ok(Leg::default()),
            other => Err(ApiError::bad_request(format!(
                "disaggregated_params.request_type is {other}, allowed are context_only, generation_only and \
                 context_and_generation"
            ))),
        }
    }

    /// The decode leg of what another server has ready.
    async fn take_over(
        &self,
        peer: Arc<Peer>,
        kept: KeptBlocks,
        request_id: String,
        generation: &Generation,
    ) -> Result<Leg, ApiError> {
        let prompt = generation.prompts.first().map(Vec::as_slice).unwrap_or_default();
        let there = kept.tokens.len();
        if peer.host.pinned(kept.job).is_none() {
            self.load_failed(LoadError::LeaseExpired).await?;
            return Ok(Leg { kind: LegKind::Decode, ..Leg::default() });
        }
        let claim = BlockClaim::new(peer, kept, request_id, self.pd.counts.clone(), self.pd.config.load_failure);
        match claim.checked(prompt, generation.model.lora.as_deref(), there, false) {
            Ok(claim) => {
                let handoff = Handoff { hold: None, received: claim.tokens() };
                Ok(Leg { kind: LegKind::Decode, handoff, claim: Some(claim), cached: None })
            }
            Err(error) => {
                self.load_failed(error).await?;
                Ok(Leg { kind: LegKind::Decode, ..Leg::default() })
            }
        }
    }

    /// What the storage has of a prompt, in whole blocks and short of its last token.
    fn shared_storage(&self, generation: &Generation) -> Leg {
        let prompt = generation.prompts.first().map(Vec::as_slice).unwrap_or_default();
        let root =
            BlockHash::root(&self.engine.model, generation.model.lora.as_deref(), generation.cache_salt.as_deref());
        let block_size = self.engine.block_size;
        let stored = self.pd.peers.stored.read();
        let most = prompt.len().saturating_sub(1) / block_size.max(1) as usize;
        let blocks = chain(root, prompt, block_size).take(most).take_while(|hash| stored.contains(hash)).count();
        let received = u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(block_size);
        Leg { kind: LegKind::Stored, handoff: Handoff { hold: None, received }, ..Leg::default() }
    }

    /// The reply's part of a leg whose first job has this number.
    pub(super) fn reply(&self, leg: &Leg, generation: &Generation, seed: u64, job: JobId) -> LegReply {
        let lora = generation.model.lora.clone();
        LegReply {
            pd: self.pd.clone(),
            kind: leg.kind,
            cached: leg.cached,
            // As vLLM: the answer's id with eight random digits.
            request_id: format!("{}-{:08x}", generation.request_id, self.unique() >> 32),
            prompt: if leg.kind == LegKind::Whole {
                Vec::new()
            } else {
                generation.prompts.first().cloned().unwrap_or_default()
            },
            seed,
            root: BlockHash::root(&self.engine.model, lora.as_deref(), generation.cache_salt.as_deref()),
            block_size: self.engine.block_size,
            lora,
            job,
        }
    }
}

/// The names of a prompt's whole blocks.
fn chain(root: BlockHash, prompt: &[u32], block_size: u32) -> impl Iterator<Item = BlockHash> {
    prompt.chunks_exact(block_size.max(1) as usize).scan(root, |parent, block| {
        *parent = parent.then(content_hash(block));
        Some(*parent)
    })
}

impl LegReply {
    /// The end of a response whose jobs, `choices` for each prompt, have these reports.
    pub(super) fn totals(&self, reports: &[JobReport], choices: usize, streams: bool) -> Totals {
        let mut usage = StreamUsage::of(reports, choices, self.block_size);
        if let Some(cached) = self.cached {
            usage.cached = cached;
        }
        let mut totals = Totals { usage, kv_transfer_params: Value::Null, disaggregated_params: None };
        // Of a request that was cut off nothing is kept.
        let Some(report) = reports.first().filter(|report| report.reason != FinishReason::Abort) else { return totals };
        let faults = self.pd.faults.current().prefill;
        match self.kind {
            LegKind::Whole => {}
            // A stream does not tell, and its blocks stay until the lease ends.
            LegKind::Prefill if streams || faults.no_params => {}
            LegKind::Prefill => {
                if let Some((remote, _)) = self.pd.own.keep(&self.request_id, self.kept(report)) {
                    let cached = report.cached_tokens + report.received_tokens;
                    totals.kv_transfer_params = remote.for_decode((report.generated_tokens == 1).then_some(cached));
                }
            }
            LegKind::Decode if self.pd.config.bidirectional => {
                if let Some((remote, left)) = self.pd.own.keep(&self.request_id, self.kept(report)) {
                    totals.kv_transfer_params = remote.for_prefill((self.pd.time() + left).as_secs_f64());
                }
            }
            LegKind::Decode => {}
            LegKind::Room(_) if faults.no_params => {}
            LegKind::Room(room) => {
                self.pd.peers.put_into_room(room, self.pd.own.clone(), self.kept(report));
            }
            LegKind::Context { .. } if faults.no_params => {}
            LegKind::Context { id, disagg_request_id } => {
                self.pd.peers.put_context(id, self.pd.own.clone(), self.kept(report));
                totals.disaggregated_params = Some(json!({
                    "request_type": "context_only", "ctx_request_id": id, "disagg_request_id": disagg_request_id,
                    "first_gen_tokens": [answer_token(self.seed, 0)], "opaque_state": self.pd.own.engine_id(),
                    "draft_tokens": null,
                }));
            }
            LegKind::Stored => {
                self.pd.peers.stored.write().extend(chain(self.root, &self.prompt, self.block_size));
            }
        }
        let prefilled = matches!(self.kind, LegKind::Prefill | LegKind::Room(_) | LegKind::Context { .. });
        if prefilled && faults.die_after_reply {
            self.pd.die();
        }
        totals
    }

    /// What is in the blocks of the first job: all but its last token.
    fn kept(&self, report: &JobReport) -> KeptBlocks {
        let answer = (0..report.generated_tokens.saturating_sub(1)).map(|index| answer_token(self.seed, index));
        let tokens = self.prompt.iter().copied().chain(answer).collect();
        KeptBlocks { job: self.job, tokens, lora: self.lora.clone() }
    }

    /// TensorRT-LLM's servers give a context request's prompt back in tokens.
    pub(super) fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// SGLang's prefill answers when the other leg has everything, or never came.
    pub(super) async fn read_by_other(&self) {
        if let LegKind::Room(_) = self.kind {
            while let Some(pinned) = self.pd.own.host.pinned(self.job) {
                tokio::select! {
                    () = self.pd.own.released() => {}
                    () = tokio::time::sleep(pinned.left) => {}
                }
            }
        }
    }
}

impl Pd {
    /// Whether the server has to do with others: by its role, its settings, or what it was asked.
    pub(super) fn is_in_use(&self) -> bool {
        let asked = |(name, count)| name != "whole" && count > 0;
        let nixl = self.config.connector == Connector::Nixl;
        nixl && (self.role != ServerRole::Both
            || self.config.bidirectional
            || self.counts.legs().into_iter().any(asked))
    }

    /// The time by the clock in which the server gives expiry times.
    fn time(&self) -> Duration {
        let now = self.clock.now();
        match self.config.expiry_clock {
            ExpiryClock::Monotonic => now.since(Timestamp(0)),
            ExpiryClock::Unix => self.clock.wall(now).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
        }
    }

    /// Simulates a crash: no blocks are kept, open connections break, and the new process has another id.
    fn die(&self) {
        let mut faults = self.faults.current();
        faults.refuse = true;
        faults.prefill.die_after_reply = false;
        self.faults.replace(faults);
        self.own.host.restart();
        self.peers.restarted(&self.own);
    }

    /// What `/sim/pd` shows.
    pub(super) fn page(&self) -> Value {
        let snapshot = self.own.host.snapshot();
        let (requests, blocks) = snapshot.pins;
        let mut page = json!({
            "role": self.role.name(),
            "connector": self.config.connector.name(),
            "engine_id": self.own.engine_id(),
            "pinned": {"requests": requests, "blocks": blocks},
            "hanging": Arc::strong_count(&self.hanging) - 1,
            "leases_expired": snapshot.stats.leases_expired,
            "received_tokens": snapshot.stats.received_tokens,
            "failed_loads": self.counts.failed().collect::<std::collections::BTreeMap<_, _>>(),
        });
        for (name, count) in self.counts.legs() {
            page[name] = Value::from(count);
        }
        page
    }
}
