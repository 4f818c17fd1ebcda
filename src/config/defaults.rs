//! What holds when nobody says otherwise. Bounds on requests have theirs in `limits`, ejection in `pool::health`.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// All IPv4 addresses; `::` serves IPv6 and, on most systems, IPv4 too.
pub const DEFAULT_BIND: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
/// ext-proc, as the reference picker has it, so that gateways and charts need no change.
pub const DEFAULT_GRPC_PORT: u16 = 9002;
/// gRPC health, as the reference picker has it.
pub const DEFAULT_GRPC_HEALTH_PORT: u16 = 9003;
/// Metrics and admin pages, as the reference picker has it.
pub const DEFAULT_METRICS_PORT: u16 = 9090;
/// 5 s: endpoint removal in Kubernetes is asynchronous, and Envoy needs one health check interval to look away.
pub const DEFAULT_DRAIN_MIN_DELAY: Duration = Duration::from_secs(5);
/// 120 s: below the 130 s that the reference chart gives a pod to end.
pub const DEFAULT_DRAIN_DEADLINE: Duration = Duration::from_secs(120);
/// What an operator wants to read every day; nothing per request.
pub const DEFAULT_LOG_FILTER: &str = "info";
/// 10 % of the requests whose caller has not decided, as the reference picker has it.
pub const DEFAULT_TRACE_RATIO: f64 = 0.1;
/// 256 decisions: a screenful for `/decisions`, some 100 KB.
pub const DEFAULT_DECISIONS_KEPT: usize = 256;
/// 100,000: more is a mistake, not a wish.
pub const MAX_DECISIONS_KEPT: usize = 100_000;
/// Learns what it needs, on any mix of servers; first tokens come in about half the time of the others (`tests/virtual_time/policies.rs`).
pub const DEFAULT_STRATEGY: &str = "predicted-latency";
/// The name of the pool that flags alone make.
pub const DEFAULT_POOL: &str = "default";
/// The primary and two fallbacks, in `destination: list`.
pub const DEFAULT_MAX_DESTINATIONS: usize = 3;
/// 50 ms for an endpoint with requests on it, as the reference picker has it.
pub const DEFAULT_SCRAPE_INTERVAL: Duration = Duration::from_millis(50);
/// 1 s for an idle endpoint: its numbers do not change, and 100 of them must cost next to nothing.
pub const DEFAULT_SCRAPE_IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// 500 ms: a server that needs longer for a page is better judged by the ledger.
pub const DEFAULT_SCRAPE_TIMEOUT: Duration = Duration::from_millis(500);
/// 4 MiB: forty times the largest page seen.
pub const DEFAULT_SCRAPE_MAX_BYTES: u64 = 4 << 20;
/// 2 s, as the reference picker has it.
pub const DEFAULT_STALE_AFTER: Duration = Duration::from_secs(2);
/// 5 s: a headless service's pods change no faster than that.
pub const DEFAULT_DNS_REFRESH: Duration = Duration::from_secs(5);
/// Shortest interval of anything that is repeated: below it a mistyped unit would load the machine.
pub const MIN_INTERVAL: Duration = Duration::from_millis(5);
/// Where GIE's own example reports what an answer cost.
pub const DEFAULT_USAGE_NAMESPACE: &str = "envoy.lb";
/// The key that goes with it.
pub const DEFAULT_USAGE_KEY: &str = "x-gateway-inference-request-cost";
/// Share of a target that names no weight.
pub const DEFAULT_WEIGHT: u32 = 1;
/// Largest weight, as InferenceModelRewrite allows.
pub const MAX_WEIGHT: u32 = 1_000_000;
/// 16 tokens: vLLM's block on CUDA.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// Largest block, tokens: the largest that vLLM knows is 256; hybrid models go higher.
pub const MAX_BLOCK_SIZE: u32 = 4_096;
/// 400 ms, after which llm-d's picker decides without tokens.
pub const DEFAULT_REMOTE_TIMEOUT: Duration = Duration::from_millis(400);
/// 5 s, as AIBrix has it: the longest prompts tokenize in less.
pub const DEFAULT_TOKENIZER_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// 30 s, as AIBrix has it.
pub const DEFAULT_TOKENIZER_HEALTH_CHECK_PERIOD: Duration = Duration::from_secs(30);
/// 5 min, as AIBrix has it.
pub const DEFAULT_TOKENIZER_TTL: Duration = Duration::from_secs(300);
/// 100 models, as AIBrix has it.
pub const DEFAULT_TOKENIZER_MAX_MODELS: u32 = 100;
/// 10,000 models: probing more of them keeps servers busy.
pub const MAX_TOKENIZER_MODELS: u32 = 10_000;
/// vLLM's own port for KV events.
pub const DEFAULT_KV_EVENTS_PORT: u16 = 5557;
/// Every topic: a publisher whose topic is left at vLLM's default, which is empty, is heard too.
pub const DEFAULT_KV_EVENTS_TOPIC: &str = "";
/// Most data-parallel ranks of one endpoint.
pub const MAX_RANKS: u16 = 64;
