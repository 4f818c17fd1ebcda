//! Every bound on what a client may make the picker do, in one struct. Each has a counter that tells how often it was hit
//! (`attache_limit_hits_total{limit="…"}`).

use std::time::Duration;

/// 16 MiB: two images in base64 and a 100k-token prompt fit; a client can't fill the memory with a few requests.
pub const DEFAULT_MAX_BODY_BYTES: u64 = 16 << 20;
/// 1 GiB of request bodies held at once over all streams: what the default memory request of the charts leaves room for.
pub const DEFAULT_MAX_BUFFERED_BYTES: u64 = 1 << 30;
/// 128 levels: what serde_json itself allows; real tool schemas stay below 20.
pub const DEFAULT_MAX_JSON_DEPTH: u32 = 128;
/// 500,000 values and keys in one body: a 100k-token prompt as token ids fits, a million-key object does not.
pub const DEFAULT_MAX_JSON_VALUES: u32 = 500_000;
/// 10,000 messages: ten times the longest agent conversation seen.
pub const DEFAULT_MAX_MESSAGES: u32 = 10_000;
/// 2,048 prompts in one completions or embeddings batch: OpenAI's own limit for embeddings.
pub const DEFAULT_MAX_PROMPTS: u32 = 2_048;
/// 256 bytes: longer than any model or adapter name, shorter than an attack on labels.
pub const DEFAULT_MAX_MODEL_BYTES: u32 = 256;
/// 1,024 bytes: vLLM's own bound for `cache_salt`.
pub const DEFAULT_MAX_CACHE_SALT_BYTES: u32 = 1_024;
/// 64 KiB of request headers: Envoy's own default is 60 KiB.
pub const DEFAULT_MAX_HEADER_BYTES: u32 = 64 << 10;
/// 64 KiB of a multipart body are searched for the `model` part, then the request is routed without it.
pub const DEFAULT_MAX_MULTIPART_SNIFF_BYTES: u32 = 64 << 10;
/// 4 KiB a second, from the first byte of a body to its last: a telephone line uploads faster, and an upload that
/// holds memory must progress.
pub const DEFAULT_MIN_UPLOAD_RATE: u64 = 4 << 10;
/// 10 s for an upload that has become slower than that to catch up.
pub const DEFAULT_UPLOAD_GRACE: Duration = Duration::from_secs(10);
/// 60 s from the headers to the last byte of the request: slow uploads end, long prompts on slow links don't.
pub const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// 30 s for Envoy to say something on a stream that it opened.
pub const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Bounds on one request and on all of them together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest request body, bytes.
    pub max_body_bytes: u64,
    /// Request bodies held at once over all streams, bytes.
    pub max_buffered_bytes: u64,
    /// Memory that the unfinished uploads of one tenant take, or of one client connection where no tenant is known,
    /// bytes.
    pub max_upload_bytes_per_client: u64,
    /// Slowest upload, bytes a second, once its first byte has come.
    pub min_upload_rate: u64,
    /// How long an upload may be slower than that.
    pub upload_grace: Duration,
    /// Deepest nesting of a JSON body, in a field that is read or not.
    pub max_json_depth: u32,
    /// Values and keys in a JSON body.
    pub max_json_values: u32,
    /// Messages in a conversation.
    pub max_messages: u32,
    /// Prompts in a batch.
    pub max_prompts: u32,
    /// Length of a model name, bytes.
    pub max_model_bytes: u32,
    /// Length of a cache salt, bytes.
    pub max_cache_salt_bytes: u32,
    /// All request headers together, bytes.
    pub max_header_bytes: u32,
    /// How far a multipart body is searched for its `model` part, bytes.
    pub max_multipart_sniff_bytes: u32,
    /// From the request's headers to its last byte.
    pub request_timeout: Duration,
    /// From the opening of a stream to its first message.
    pub idle_timeout: Duration,
}

/// What the uploads of one tenant or connection may take where the configuration does not say: half of what all may,
/// and at least one body.
#[must_use]
pub fn client_share(max_buffered_bytes: u64, max_body_bytes: u64) -> u64 {
    (max_buffered_bytes / 2).max(max_body_bytes)
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body_bytes: DEFAULT_MAX_BODY_BYTES,
            max_buffered_bytes: DEFAULT_MAX_BUFFERED_BYTES,
            max_upload_bytes_per_client: client_share(DEFAULT_MAX_BUFFERED_BYTES, DEFAULT_MAX_BODY_BYTES),
            min_upload_rate: DEFAULT_MIN_UPLOAD_RATE,
            upload_grace: DEFAULT_UPLOAD_GRACE,
            max_json_depth: DEFAULT_MAX_JSON_DEPTH,
            max_json_values: DEFAULT_MAX_JSON_VALUES,
            max_messages: DEFAULT_MAX_MESSAGES,
            max_prompts: DEFAULT_MAX_PROMPTS,
            max_model_bytes: DEFAULT_MAX_MODEL_BYTES,
            max_cache_salt_bytes: DEFAULT_MAX_CACHE_SALT_BYTES,
            max_header_bytes: DEFAULT_MAX_HEADER_BYTES,
            max_multipart_sniff_bytes: DEFAULT_MAX_MULTIPART_SNIFF_BYTES,
            request_timeout: DEFAULT_REQUEST_TIMEOUT,
            idle_timeout: DEFAULT_IDLE_TIMEOUT,
        }
    }
}
