//! What is configurable about remote tokenizers.

use std::collections::BTreeMap;
use std::time::Duration;

/// The servers themselves, over plain HTTP, as Envoy reaches them.
pub const DEFAULT_URL: &str = "http://{address}";
/// 400 ms: a decision that waits longer for tokens costs more than a cache hit saves.
pub const DEFAULT_DECISION_TIMEOUT: Duration = Duration::from_millis(400);
/// 5 s: the longest prompts tokenize in less. A call that outlives its decision still fills the cache for the next turn.
pub const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// 30 s without a word from a model's tokenizer, then it is probed.
pub const DEFAULT_PROBE_INTERVAL: Duration = Duration::from_secs(30);
/// 5 min without a request, then a model is forgotten and no longer probed.
pub const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
/// 100 models: clients choose the names, so there must be an end; a pool rarely has more adapters in use.
pub const DEFAULT_MAX_MODELS: usize = 100;
/// 2 attempts: one server may be about to restart, two at once are an outage.
pub const DEFAULT_MAX_ATTEMPTS: u32 = 2;
/// 64 calls at once: a server's front end tokenizes a few at a time, the rest would only queue there.
pub const DEFAULT_MAX_CONCURRENT: usize = 64;
/// 16 MiB: a million tokens with eight bytes each fit twice.
pub const DEFAULT_MAX_ANSWER_BYTES: u64 = 16 << 20;
/// 64 MiB: 16 million tokens, the prompts of some thousand conversations.
pub const DEFAULT_CACHE_BYTES: u64 = 64 << 20;

/// What the servers are asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemoteApi {
    /// `POST /tokenize`: every vLLM has it, for chat and text completions. It doesn't know all that shapes a prompt: a chat with
    /// `documents` has no tokens, and `reasoning_effort` is not seen.
    #[default]
    Tokenize,
    /// `POST {path of the API}/render`: exactly the server's own way from a request to its tokens, messages and responses included. vLLM
    /// wants `--enable-scale-out` for it.
    Render,
}

/// How tokens are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteSettings {
    /// What the servers are asked.
    pub api: RemoteApi,
    /// Where each endpoint is asked: `{address}` stands for its address and port, `{ip}` for its address alone.
    pub url: String,
    /// The URL of a model's own tokenizer, asked in place of the endpoints.
    pub model_urls: BTreeMap<String, String>,
    /// Take any certificate of HTTPS servers.
    pub insecure_skip_verify: bool,
    /// How long a decision waits.
    pub decision_timeout: Duration,
    /// How long a request may take, all its attempts together.
    pub request_timeout: Duration,
    /// After how long without an answer a model's tokenizer is probed.
    pub probe_interval: Duration,
    /// After how long without a request a model is forgotten.
    pub idle_timeout: Duration,
    /// Models at once.
    pub max_models: usize,
    /// Calls that may fail for one prompt, one after the other, at least 1.
    pub max_attempts: u32,
    /// Calls at once.
    pub max_concurrent: usize,
    /// Largest answer that is read, bytes.
    pub max_answer_bytes: u64,
    /// Memory for the tokens of past prompts, bytes; 0 keeps none.
    pub cache_bytes: u64,
}

impl Default for RemoteSettings {
    fn default() -> Self {
        Self {
            api: RemoteApi::default(),
            url: DEFAULT_URL.to_owned(),
            model_urls: BTreeMap::new(),
            insecure_skip_verify: false,
            decision_timeout: DEFAULT_DECISION_TIMEOUT,
            request_timeout: DEFAULT_REQUEST_TIMEOUT,
            probe_interval: DEFAULT_PROBE_INTERVAL,
            idle_timeout: DEFAULT_IDLE_TIMEOUT,
            max_models: DEFAULT_MAX_MODELS,
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            max_concurrent: DEFAULT_MAX_CONCURRENT,
            max_answer_bytes: DEFAULT_MAX_ANSWER_BYTES,
            cache_bytes: DEFAULT_CACHE_BYTES,
        }
    }
}
