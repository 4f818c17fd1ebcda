//! Prefix cache, tokenizers, KV events and disaggregation.

use super::declare;
use super::{DeciderKind, DisaggregationMode, Scheme, TokenizerKind};
use crate::defaults::{
    DEFAULT_BLOCK_SIZE, DEFAULT_REMOTE_TIMEOUT, DEFAULT_TOKENIZER_HEALTH_CHECK_PERIOD, DEFAULT_TOKENIZER_MAX_MODELS,
    DEFAULT_TOKENIZER_REQUEST_TIMEOUT, DEFAULT_TOKENIZER_TTL, MAX_BLOCK_SIZE, MAX_RANKS, MAX_TOKENIZER_MODELS,
    MIN_INTERVAL,
};
use crate::settings::TokenizerFallback;
use attache_config_schema::decode::Bytes;
use attache_config_schema::diagnostic::{At, Span};
use attache_disagg::Fallback;
use attache_disagg::connector::sglang::DEFAULT_BOOTSTRAP_PORT;
use attache_disagg::policy::{DEFAULT_DECODER_BLOCKS_TTL, DEFAULT_PREFILL_TIMEOUT};
use attache_prefix::cache::{DEFAULT_MAX_BYTES, DEFAULT_TENANT_SHARE};
use attache_prefix::claims::DEFAULT_CLAIM_LIFE;
use attache_prefix::index::LEAST_SHARE;
use std::time::Duration;

/// The number with the fewest digits that is the same as an `f32`.
fn decimal(share: f32) -> f64 {
    share.to_string().parse().unwrap_or_else(|_| share.into())
}

sections! {
    /// The prefix index, for strategies that read it: tokenizer, block size, memory, KV events.
    PrefixCache {
        /// Turns prompts into tokens: its type, or a mapping.
        "tokenizer" => tokenizer: Tokenizer { absent: "`characters`"; },
        /// Size of a block, as in the servers. 16 is vLLM's on CUDA.
        "blockSize" => block_size: u32 { default: DEFAULT_BLOCK_SIZE; range: 1..=MAX_BLOCK_SIZE; unit: "tokens"; },
        /// Memory of the index.
        "maxBytes" => max_bytes: Bytes {
            default: Bytes(DEFAULT_MAX_BYTES); range: Bytes(1 << 20)..=Bytes(1 << 40); unit: "bytes";
        },
        /// Blocks in the index.
        "maxBlocks" => max_blocks: u64 { absent: "as many as `maxBytes` holds"; range: 1..; unit: "blocks"; },
        /// Without KV events: share of `maxBytes` for one tenant. If memory is full, tenants above it lose blocks first.
        "tenantShare" => tenant_share: f64 {
            default: decimal(DEFAULT_TENANT_SHARE); range: decimal(LEAST_SHARE)..=1.0; unit: "share";
        },
        /// Header with the name of the tenant.
        "tenantHeader" => tenant_header: String { absent: "all requests are one tenant"; },
        /// Without `kvEvents`: whether the servers keep a cache for each tenant.
        "isolateTenants" => isolate_tenants: bool { default: false; },
        /// How long a prompt in flight counts as cached.
        "claimLife" => claim_life: Duration { default: DEFAULT_CLAIM_LIFE; range: MIN_INTERVAL..; },
        /// Text that is left out of keys, never out of bodies; added to the built-in ones.
        "volatile" => volatile: Vec<At<Volatile>> { absent: "none"; },
        /// Whether Attaché chooses the rank that holds most of a prompt, by `x-data-parallel-rank`, and not the server.
        "chooseRank" => choose_rank: bool { default: false; },
        /// The KV events of the servers.
        "kvEvents" => kv_events: KvEvents { absent: "the index learns from routed requests"; },
    }
    /// Text that is left out of block keys.
    Volatile {
        /// Start of the text.
        "prefix" => prefix: String { absent: "required"; },
        /// End of the text.
        "suffix" => suffix: String { absent: "any"; },
    }
    /// How KV events are received.
    KvEvents {
        /// Port of each endpoint's publisher; rank r has this port plus r. 5557 is vLLM's own.
        "port" => port: u16 { default: 5557; range: 1..=u16::MAX; unit: "port"; },
        /// Port at which missed events are asked for; rank r has this port plus r.
        "replayPort" => replay_port: u16 { absent: "missed events are lost"; range: 1..=u16::MAX; unit: "port"; },
        /// Data-parallel ranks of each endpoint.
        "ranks" => ranks: u16 { default: 1; range: 1..=MAX_RANKS; unit: "ranks"; },
        /// Prefix of the topics, such as `kv@`.
        "topic" => topic: String { absent: "every topic"; },
        /// A socket that all servers connect to, such as `tcp://0.0.0.0:5557`, in place of `port`.
        "bind" => bind: String { absent: "Attaché connects to the servers"; },
        /// With `bind`: whether events count only if they come from the address of the endpoint that they name. `false` if
        /// NAT changes addresses.
        "requireSenderAddress" => require_sender_address: bool { default: true; },
    }
    /// A tokenizer: its type, or a mapping.
    Tokenizer = "type" {
        /// `characters`: blocks of text. `huggingface` needs `directory`. `remote` asks the model servers.
        "type" => kind: TokenizerKind [required],
        /// Of `tiktoken`: its encoding.
        "encoding" => encoding: String { absent: "by the name of the model"; },
        /// Of `huggingface`: directory with `tokenizer.json` and, for conversations, the chat template.
        "directory" => directory: String { absent: "required by `huggingface`"; },
        /// Of `remote`: URL of each endpoint. `{address}` stands for its address and port, `{ip}` and `%s` for its address.
        "url" => url: String { absent: "`http://{address}`"; },
        /// Of `remote`: whether vLLM's render API is used in place of `/tokenize`.
        "render" => render: bool { default: false; },
        /// Of `remote`: how long a decision waits for tokens, as in llm-d's picker, which then decides without them.
        "timeout" => timeout: Duration { default: DEFAULT_REMOTE_TIMEOUT; range: MIN_INTERVAL..; },
        /// Of `remote`: longest time for a request, all its attempts together.
        "requestTimeout" => request_timeout: Duration { default: DEFAULT_TOKENIZER_REQUEST_TIMEOUT; range: MIN_INTERVAL..; },
        /// Of `remote`: time without a response after which a model's tokenizer is probed.
        "healthCheckPeriod" => health_check_period: Duration {
            default: DEFAULT_TOKENIZER_HEALTH_CHECK_PERIOD; range: MIN_INTERVAL..;
        },
        /// Of `remote`: time without a request after which a model is forgotten.
        "ttl" => ttl: Duration { default: DEFAULT_TOKENIZER_TTL; range: MIN_INTERVAL..; },
        /// Of `remote`: most models at once.
        "maxModels" => max_models: u32 { default: DEFAULT_TOKENIZER_MAX_MODELS; range: 1..=MAX_TOKENIZER_MODELS; unit: "models"; },
        /// Of `remote`: URLs of tokenizers by model, in place of the endpoints.
        "modelUrls" => model_urls: Vec<(At<String>, At<String>)> { absent: "none"; },
        /// Of `remote`: keys of a prompt for which no tokens are returned.
        "fallback" => fallback: TokenizerFallback { default: TokenizerFallback::default(); },
    }
    /// Prefill and decode on different servers.
    Disaggregation {
        /// `direct`: Attaché sends the prefill. `header`: a sidecar in front of the decode server (llm-d's) sends it.
        "mode" => mode: DisaggregationMode { default: DisaggregationMode::Direct; },
        /// How KV blocks get from server to server: `nixl`, `sglang`, `trtllm`, `shared-storage`, `shfs`, `neuron-nixl`, or
        /// `by-label` for AIBrix's `model.aibrix.ai/engine` of the prefill server.
        "connector" => connector: String { default: "nixl".to_owned(); },
        /// What decides whether a request is split: a word, or a mapping.
        "decider" => decider: Decider { absent: "`predicted`"; },
        /// Labels: servers with different values of one of them are never paired.
        "together" => together: Vec<At<String>> { absent: "`roleset-name` and `disaggregatedset.x-k8s.io/revision`"; },
        /// Longest prefill, over all attempts. vLLM keeps what it computed for 30 s.
        "prefillTimeout" => prefill_timeout: Duration { default: DEFAULT_PREFILL_TIMEOUT; range: MIN_INTERVAL..; },
        /// Envoy's `message_timeout`, for prefills in body modes other than full duplex. They get nine tenths of it.
        "messageTimeout" => message_timeout: Duration { absent: "requests are not split there"; range: MIN_INTERVAL..; },
        /// Time after which a second server is asked for the same prefill.
        "hedgeAfter" => hedge_after: Duration { absent: "never"; range: MIN_INTERVAL..; },
        /// A request whose prefill failed: `local` lets the decode server compute the prompt, `fail` answers 503.
        "fallback" => fallback: Fallback { default: Fallback::default(); },
        /// Scheme by which Attaché calls the servers.
        "scheme" => scheme: Scheme { default: Scheme::Http; },
        /// What stands before `/v1/…` on the servers. The gateway may give clients other paths.
        "pathPrefix" => path_prefix: String { absent: "nothing"; },
        /// Whether certificates of model servers are not checked.
        "insecureSkipVerify" => insecure_skip_verify: bool { default: false; },
        /// With the connector `sglang`: port of the prefill servers' bootstrap server.
        "bootstrapPort" => bootstrap_port: u16 { default: DEFAULT_BOOTSTRAP_PORT; range: 1..=u16::MAX; unit: "port"; },
        /// How long decode servers keep blocks for the next turn: vLLM's `decoder_kv_blocks_ttl`, with
        /// `bidirectional_kv_xfer`. `0s`: they are never fetched.
        "decoderBlocksTtl" => decoder_blocks_ttl: Duration { default: DEFAULT_DECODER_BLOCKS_TTL; },
        /// With `mode: header`: a header names the server that has cached so many tokens more of the prompt, and the sidecar
        /// fetches them.
        "cacheSourceTokens" => cache_source_tokens: u32 { absent: "the header is not sent"; range: 1..; unit: "tokens"; },
    }
    /// What decides whether a request is split: a word, or a mapping.
    Decider = "type" {
        /// `predicted` compares the predicted times of both ways. `strategy` splits where the strategy `pd` does.
        /// `prefix-based` reads the next two keys.
        "type" => kind: DeciderKind [required],
        /// Of `prefix-based`: tokens that the decode server has not cached.
        "nonCachedTokens" => non_cached_tokens: u32 { default: 0; unit: "tokens"; },
        /// Of `prefix-based`: tokens of the prompt.
        "promptTokens" => prompt_tokens: u32 { default: 0; unit: "tokens"; },
    }
}

impl Tokenizer {
    /// A tokenizer of this type without parameters.
    #[must_use]
    pub fn plain(kind: TokenizerKind) -> Self {
        Self { kind: At { value: kind, span: Span::default() }, ..Self::default() }
    }
}

impl Decider {
    /// A decider of this type without parameters.
    #[must_use]
    pub fn plain(kind: At<DeciderKind>) -> Self {
        Self { kind, ..Self::default() }
    }
}
