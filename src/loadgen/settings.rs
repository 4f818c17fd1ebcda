//! Settings of a run, its totals, and its errors. Read by [`super::play`].

use attache_workload::TraceError;
use std::collections::BTreeMap;
use std::time::Duration;

/// 1,024 requests in flight: Envoy's default limit, and the usual limit of open files of a process.
pub const DEFAULT_MAX_IN_FLIGHT: usize = 1_024;
/// 300 s for one request: the longest responses of the traces take less on a loaded pool.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
/// 30 s for requests in flight when a run is stopped. Most responses end within it, and an operator at
/// a terminal waits no longer.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// 64 MiB of responses are remembered: about 15,000 of 1,000 tokens, more than the open conversations of a run have.
pub const DEFAULT_MAX_REMEMBERED_BYTES: usize = 64 << 20;
/// A request that is sent 10 ms after it was due counts as late: ten times the resolution of the timers.
pub const LATE_AFTER: Duration = Duration::from_millis(10);
/// Response headers that name the server, in order of preference: Gateway API inference gateways, llm-d's simulator,
/// `attache sim`.
pub const DEFAULT_SERVED_HEADERS: &[&str] =
    &["x-gateway-destination-endpoint-served", "x-gateway-destination-endpoint", "x-inference-pod", "x-sim-server"];

/// API that the requests use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LiveApi {
    /// `/v1/chat/completions`: one message for neighbouring parts with one role. The chat template adds tokens
    /// to those of the workload.
    #[default]
    Chat,
    /// `/v1/completions`: one text, of exactly the workload's tokens for a simulated server.
    Completions,
}

/// Settings of a run: target, API, limits and headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveConfig {
    /// URL of the gateway: `http://HOST:PORT`, with or without the path that precedes `/v1`.
    pub target: String,
    /// API that the requests use.
    pub api: LiveApi,
    /// Model of requests without an adapter; the first of `/v1/models` when `None`.
    pub model: Option<String>,
    /// Responses are event streams. Without streaming, the time to the first token is unknown.
    pub stream: bool,
    /// Largest number of requests in flight, at least 1. Further requests are sent late, never dropped.
    pub max_in_flight: usize,
    /// Timeout of a request, from sending to the end of its response.
    pub timeout: Duration,
    /// Headers of every request, as names and values.
    pub headers: Vec<(String, String)>,
    /// Seed of the texts. Runs with other seeds find none of their prefixes cached.
    pub seed: u64,
    /// Request header that names the tenant, in addition to `user`; none when `None`.
    pub tenant_header: Option<String>,
    /// Objectives of the gateway by their priority. Requests of other priorities are sent without one.
    pub objectives: BTreeMap<i32, String>,
    /// Response header that names the server; one of [`DEFAULT_SERVED_HEADERS`] when `None`.
    pub served_header: Option<String>,
    /// Time that requests in flight may take after the run is stopped.
    pub grace: Duration,
    /// Memory for responses that later turns quote, bytes.
    pub max_remembered_bytes: usize,
}

impl LiveConfig {
    /// The defaults, for a gateway at `target`.
    #[must_use]
    pub fn new(target: impl Into<String>) -> Self {
        Self {
            target: target.into(),
            api: LiveApi::default(),
            model: None,
            stream: true,
            max_in_flight: DEFAULT_MAX_IN_FLIGHT,
            timeout: DEFAULT_TIMEOUT,
            headers: Vec::new(),
            seed: 0,
            tenant_header: None,
            objectives: BTreeMap::new(),
            served_header: None,
            grace: DEFAULT_GRACE,
            max_remembered_bytes: DEFAULT_MAX_REMEMBERED_BYTES,
        }
    }
}

/// Why a run could not begin, or ended early.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// A setting is wrong; the text says which.
    #[error("{0}")]
    Setting(String),
    /// The HTTP client could not be created.
    #[error("can't set up the HTTP client: {0}")]
    Client(String),
    /// No model is set, and the gateway's list has none.
    #[error("no model is set, and {url} lists none: {why}")]
    Model {
        /// URL of the model list.
        url: String,
        /// Why the list has no usable model.
        why: String,
    },
    /// The workload can't be read. Requests in flight have ended, and the observer has received them.
    #[error(transparent)]
    Workload(#[from] TraceError),
}

/// Totals of a run, beside what its observer received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveOutcome {
    /// Model of the requests without an adapter.
    pub model: String,
    /// Requests sent so far, whatever their outcome.
    pub sent: u64,
    /// Requests with a whole response.
    pub answered: u64,
    /// Requests that were rejected: a status other than 200, or no connection.
    pub refused: u64,
    /// Requests whose response broke off.
    pub lost: u64,
    /// Requests cancelled because the run was stopped. The observer does not receive them.
    pub cut: u64,
    /// Rejected and lost requests by reason.
    pub failures: BTreeMap<String, u64>,
    /// Names of servers from response headers; `Served::endpoint` is a position in this list.
    pub endpoints: Vec<String>,
    /// Requests that were sent more than [`LATE_AFTER`] after they were due.
    pub late: u64,
    /// Longest delay of a request.
    pub latest: Duration,
    /// Requests with a priority other than 0 and no objective: the gateway does not receive their priority.
    pub unranked: u64,
    /// Requests that waited for a slot under `max_in_flight`.
    pub held: u64,
    /// Largest number of requests in flight.
    pub most_in_flight: usize,
    /// Responses that were dropped from memory. Turns that quote them contain a text that no server has generated.
    pub forgotten: u64,
    /// Time from the start to the end of the last response.
    pub elapsed: Duration,
    /// True when the run was stopped before the end of the workload.
    pub stopped: bool,
}
