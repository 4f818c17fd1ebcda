//! Settings of remote tokenizers, with their defaults and limits.

use std::collections::BTreeMap;
use std::time::Duration;

/// Default URL of tokenizers: the servers themselves over plain HTTP, as Envoy reaches them.
pub(crate) const DEFAULT_URL: &str = "http://{address}";
/// Default time that a decision waits for tokens, 400 ms: a longer wait costs more than a cache hit saves.
pub(crate) const DEFAULT_DECISION_TIMEOUT: Duration = Duration::from_millis(400);
/// Default timeout of a request, 5 s: the longest prompts take less. A call that outlasts its decision still fills the
/// cache for the next turn.
pub(crate) const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Default time without a successful call after which a model's tokenizer is probed, 30 s.
pub(crate) const DEFAULT_PROBE_INTERVAL: Duration = Duration::from_secs(30);
/// Default time without a request after which a model is removed and no longer probed, 5 min.
pub(crate) const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
/// Default limit of models, 100: clients choose the names, and a pool rarely has more adapters in use.
pub(crate) const DEFAULT_MAX_MODELS: usize = 100;
/// Default number of attempts, 2: one server may be restarting, two at once are an outage.
pub(crate) const DEFAULT_MAX_ATTEMPTS: u32 = 2;
/// Default limit of concurrent calls, 64: a server tokenizes a few at a time, and more would only queue there.
pub(crate) const DEFAULT_MAX_CONCURRENT: usize = 64;
/// Default limit of a response, 16 MiB: twice a million tokens with eight bytes each.
pub(crate) const DEFAULT_MAX_ANSWER_BYTES: u64 = 16 << 20;
/// Default memory of the cache, 64 MiB: 16 million tokens, the prompts of some thousand conversations.
pub(crate) const DEFAULT_CACHE_BYTES: u64 = 64 << 20;

/// The API of the tokenizers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemoteApi {
    /// `POST /tokenize`: in every vLLM, for chat and text completions. It does not support everything that affects a
    /// prompt: a chat with `documents` has no tokens, and `reasoning_effort` is ignored.
    #[default]
    Tokenize,
    /// `POST {path of the API}/render`: exactly the server's own conversion of a request to tokens, including messages
    /// and responses. vLLM requires `--enable-scale-out` for it.
    Render,
}

/// How the tokens of prompts are requested from tokenizers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteSettings {
    /// The API of the tokenizers.
    pub api: RemoteApi,
    /// URL of each endpoint's tokenizer: `{address}` stands for its address and port, `{ip}` for its address alone.
    pub url: String,
    /// URL of a model's own tokenizer, which replaces the endpoints.
    pub model_urls: BTreeMap<String, String>,
    /// Whether any certificate of HTTPS servers is accepted.
    pub insecure_skip_verify: bool,
    /// How long a decision waits for tokens.
    pub decision_timeout: Duration,
    /// How long a request may take, including all attempts.
    pub request_timeout: Duration,
    /// Time without a successful call after which a model's tokenizer is probed.
    pub probe_interval: Duration,
    /// Time without a request after which a model is removed.
    pub idle_timeout: Duration,
    /// Most models in use at the same time.
    pub max_models: usize,
    /// Most calls for one prompt, one after the other, at least 1.
    pub max_attempts: u32,
    /// Most calls in flight at the same time, for all models together.
    pub max_concurrent: usize,
    /// Largest response that is read, in bytes.
    pub max_answer_bytes: u64,
    /// Memory for the tokens of past prompts in bytes; 0 disables the cache.
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
