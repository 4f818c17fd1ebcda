//! What a simulated fleet is built with. Read by `sim::fleet` and `sim::http`, made by `cli::sim` and by tests.

use crate::answer::DEFAULT_OUTPUT_TOKENS;
use crate::engine::EngineConfig;
use crate::faults::Faults;
use crate::kv_events::KvEventsConfig;
use crate::pd::{PdConfig, ServerRole};
use crate::spans::SpanSink;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

/// 4 servers: enough that a good choice and a bad one differ.
pub const DEFAULT_ENDPOINTS: u16 = 4;
/// The first server's port; a fleet takes consecutive ones. vLLM's own default is 8000, which is often taken.
pub const DEFAULT_PORT: u16 = 8001;
/// The name of the model.
pub const DEFAULT_MODEL: &str = "sim-8b";
/// 64 MiB of request body.
pub const DEFAULT_MAX_BODY_BYTES: usize = 64 << 20;

/// 5 s: uvicorn's default, which vLLM, SGLang and TensorRT-LLM keep.
pub const DEFAULT_KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Whose metric names a server uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum MetricsStyle {
    /// vLLM's metric names, at `/metrics`.
    #[default]
    Vllm,
    /// SGLang's metric names, at `/metrics`.
    Sglang,
    /// Metric names of TensorRT-LLM's `trtllm-serve`, at `/prometheus/metrics`.
    Trtllm,
    /// Triton with the TensorRT-LLM backend, at /metrics.
    Triton,
}

/// Whose peculiarities a server has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Quirks {
    /// No deviation from the documented formats.
    #[default]
    None,
    /// AstrAI as it is, not as it is documented: events that end with one newline, a bare usage event, `[DONE]` after
    /// Anthropic's `message_stop`, `{"detail": …}` errors with 422, finish reason `stop` alone, stop texts that stay,
    /// other names in `/stats`.
    Astrai,
    /// AstrAI as it is documented: ranges of parameters are checked, and messages must have a content.
    AstraiDocumented,
}

impl Quirks {
    /// The server is an AstrAI, of either kind.
    #[must_use]
    pub fn is_astrai(self) -> bool {
        self != Self::None
    }
}

/// Configuration of one simulated server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The model's names; answers carry the first. Never empty.
    pub models: Vec<String>,
    /// Configuration of the engine, and of each rank.
    pub engine: EngineConfig,
    /// Engines behind its port, each with a cache of its own: vLLM's data-parallel ranks. At least 1.
    pub ranks: u16,
    /// LoRA adapters loaded at the start.
    pub loras: Vec<String>,
    /// Tokens after which an answer ends by itself.
    pub output_tokens: u32,
    /// Names on the metrics page.
    pub metrics_style: MetricsStyle,
    /// Deviations from the documented formats.
    pub quirks: Quirks,
    /// Answer with the SHA-256 of the request's body in `x-sim-body-sha256`.
    pub echo_body_sha256: bool,
    /// Largest request body, bytes. Longer ones are rejected with status 413.
    pub max_body_bytes: usize,
    /// Publication of KV events; none when `None`.
    pub kv_events: Option<KvEventsConfig>,
    /// Prefill and decode on different servers.
    pub pd: PdConfig,
    /// What goes wrong from the start.
    pub faults: Faults,
    /// Exports a span of each finished request; none when `None`.
    pub spans: Option<Arc<dyn SpanSink>>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            models: vec![DEFAULT_MODEL.to_owned()],
            engine: EngineConfig { model: DEFAULT_MODEL.into(), ..EngineConfig::default() },
            ranks: 1,
            loras: Vec::new(),
            output_tokens: DEFAULT_OUTPUT_TOKENS,
            metrics_style: MetricsStyle::default(),
            quirks: Quirks::default(),
            echo_body_sha256: false,
            max_body_bytes: DEFAULT_MAX_BODY_BYTES,
            kv_events: None,
            pd: PdConfig::default(),
            faults: Faults::default(),
            spans: None,
        }
    }
}

/// A fleet of equal servers.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Number of servers in the fleet.
    pub endpoints: u16,
    /// The address of all of them.
    pub bind: IpAddr,
    /// The first one's port, the others follow; 0 lets the system choose each.
    pub port: u16,
    /// What each is for, in order; those beyond the end are for both.
    pub roles: Vec<ServerRole>,
    /// Time without a request after which a server closes an HTTP/1.1 connection; 0 keeps it open.
    pub keep_alive: Duration,
    /// Configuration that all servers share.
    pub server: ServerConfig,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            endpoints: DEFAULT_ENDPOINTS,
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: DEFAULT_PORT,
            roles: Vec::new(),
            keep_alive: DEFAULT_KEEP_ALIVE,
            server: ServerConfig::default(),
        }
    }
}
