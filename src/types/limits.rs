//! All limits on a client's use of Attaché's resources. Each has a counter of the
//! requests that exceeded it (`attache_limit_hits_total{limit="…"}`).

use std::time::Duration;

/// Default limit of a request body, 16 MiB: two images in base64 and a prompt of 100,000 tokens fit, and a few
/// requests cannot fill the memory.
pub const DEFAULT_MAX_BODY_BYTES: u64 = 16 << 20;
/// Default limit of all request bodies together, 1 GiB, which the memory request in the charts allows.
pub const DEFAULT_MAX_BUFFERED_BYTES: u64 = 1 << 30;
/// Default limit of JSON nesting, 128 levels, as in serde_json; real tool schemas have fewer than 20.
pub(crate) const DEFAULT_MAX_JSON_DEPTH: u32 = 128;
/// Default limit of values and keys in one body, 500,000: a prompt of 100,000 token ids fits, an object with
/// a million keys does not.
pub(crate) const DEFAULT_MAX_JSON_VALUES: u32 = 500_000;
/// Default limit of messages, 10,000: ten times the longest agent conversation seen.
pub(crate) const DEFAULT_MAX_MESSAGES: u32 = 10_000;
/// Default limit of prompts in one batch, 2,048, which is OpenAI's limit for embeddings.
pub(crate) const DEFAULT_MAX_PROMPTS: u32 = 2_048;
/// Default limit of a model name, 256 bytes: longer than any real name, and short enough for metric labels.
pub(crate) const DEFAULT_MAX_MODEL_BYTES: u32 = 256;
/// Default limit of `cache_salt`, 1,024 bytes, as in vLLM.
pub(crate) const DEFAULT_MAX_CACHE_SALT_BYTES: u32 = 1_024;
/// Default limit of request headers, 58 KiB. Envoy's default is 60 KiB, together with those that Attaché adds; beyond it
/// Envoy responds 500.
pub(crate) const DEFAULT_MAX_HEADER_BYTES: u32 = 58 << 10;
/// Default number of request headers, 96. Envoy's default is 100, together with [`ADDED_HEADERS`].
const DEFAULT_MAX_HEADERS: u32 = 96;
/// Number of headers that Attaché may add to a request beside those that it received.
pub const ADDED_HEADERS: usize = 4;
/// Number of response headers that Envoy allows by default, together with those that Attaché adds.
pub const MAX_RESPONSE_HEADERS: usize = 100;
/// Default length of a form that is held until its `model` part arrives, 32 MiB: OpenAI's API takes audio files of 25 MB,
/// and its own examples send the file first.
pub(crate) const DEFAULT_MAX_MULTIPART_SNIFF_BYTES: u32 = 32 << 20;
/// Default minimum rate of an upload, 4 KiB per second from the first byte of a body to the last. Even slow modems are
/// faster, and an upload that holds memory must progress.
pub(crate) const DEFAULT_MIN_UPLOAD_RATE: u64 = 4 << 10;
/// Default time in which an upload may be slower than the minimum, 10 s.
pub(crate) const DEFAULT_UPLOAD_GRACE: Duration = Duration::from_secs(10);
/// Default time from the headers to the last byte of a request, 60 s: it ends stuck uploads and allows
/// long prompts on slow links.
pub const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Default limit of open ext-proc streams, 65,536: one gateway may have three quarters of them, and the shipped Envoy
/// configurations send at most 40,000 requests at once. A stream takes some kilobytes.
const DEFAULT_MAX_STREAMS: u32 = 65_536;
/// Default limit of open streams on one connection, 4,096. Envoy opens another connection beyond it, and the shipped
/// configurations do so beyond 1,024. Gateways with one connection need more than Envoy's default of 1,024 requests.
const DEFAULT_MAX_STREAMS_PER_CONNECTION: u32 = 4_096;
/// Default time from the opening of a stream to Envoy's first message, 30 s.
pub const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Limits on one request, and on all requests together.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Largest request body in bytes.
    pub max_body_bytes: u64,
    /// Total of all request bodies in memory, in bytes.
    pub max_buffered_bytes: u64,
    /// Memory for the incomplete uploads of one tenant, or of one client connection if the tenant is unknown, in bytes.
    pub max_upload_bytes_per_client: u64,
    /// Minimum rate of an upload after its first byte, in bytes per second.
    pub min_upload_rate: u64,
    /// How long an upload may be slower than the minimum rate.
    #[serde(serialize_with = "crate::units::duration_text")]
    pub upload_grace: Duration,
    /// Deepest nesting of a JSON body, including unknown members.
    pub max_json_depth: u32,
    /// Number of values and keys in a JSON body.
    pub max_json_values: u32,
    /// Number of messages in a conversation.
    pub max_messages: u32,
    /// Number of prompts in a batch.
    pub max_prompts: u32,
    /// Length of a model name in bytes.
    pub max_model_bytes: u32,
    /// Length of a cache salt in bytes.
    pub max_cache_salt_bytes: u32,
    /// Total of all request headers in bytes.
    pub max_header_bytes: u32,
    /// Number of request headers, pseudo-headers included.
    pub max_headers: u32,
    /// How many bytes of a form are held until its `model` part arrives, if a rule depends on the model.
    pub max_multipart_sniff_bytes: u32,
    /// Time from the request's headers to its last byte.
    #[serde(serialize_with = "crate::units::duration_text")]
    pub request_timeout: Duration,
    /// Time from the opening of a stream to its first message.
    #[serde(serialize_with = "crate::units::duration_text")]
    pub idle_timeout: Duration,
    /// Open streams of all gateways.
    pub max_streams: u32,
    /// Open streams of one connection of a gateway.
    pub max_streams_per_connection: u32,
}

/// Returns the default memory for the uploads of one tenant or connection: half of the total, and at least one body.
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
            max_headers: DEFAULT_MAX_HEADERS,
            max_multipart_sniff_bytes: DEFAULT_MAX_MULTIPART_SNIFF_BYTES,
            request_timeout: DEFAULT_REQUEST_TIMEOUT,
            idle_timeout: DEFAULT_IDLE_TIMEOUT,
            max_streams: DEFAULT_MAX_STREAMS,
            max_streams_per_connection: DEFAULT_MAX_STREAMS_PER_CONNECTION,
        }
    }
}
