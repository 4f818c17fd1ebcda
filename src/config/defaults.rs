//! Defaults and limits of settings. Those of requests are in `limits`, those of ejection in `pool::health`.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// All IPv4 addresses; `::` serves IPv6 and, on most systems, IPv4 too.
pub(crate) const DEFAULT_BIND: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
/// Port of ext-proc, as in the reference picker, so that gateways and charts need no change.
pub(crate) const DEFAULT_GRPC_PORT: u16 = 9002;
/// Port of gRPC health, as in the reference picker.
pub(crate) const DEFAULT_GRPC_HEALTH_PORT: u16 = 9003;
/// Port of metrics and admin pages, as in the reference picker.
pub(crate) const DEFAULT_METRICS_PORT: u16 = 9090;
/// 5 s: endpoint removal in Kubernetes is asynchronous, and Envoy needs one health check interval to notice.
pub const DEFAULT_DRAIN_MIN_DELAY: Duration = Duration::from_secs(5);
/// 120 s: below the 130 s that the reference chart allows for the termination of a pod.
pub const DEFAULT_DRAIN_DEADLINE: Duration = Duration::from_secs(120);
/// Logs events that an operator reads daily, nothing per request.
pub(crate) const DEFAULT_LOG_FILTER: &str = "info";
/// 10 % of the requests whose caller has not decided about sampling, as in the reference picker.
pub(crate) const DEFAULT_TRACE_RATIO: f64 = 0.1;
/// 256 decisions: a screenful for `/decisions`, some 100 KB.
pub(crate) const DEFAULT_DECISIONS_KEPT: usize = 256;
/// 4,096: those of 8 endpoints take some 10 MB. Their memory has a limit of its own, so a large pool keeps fewer
/// (`src/telemetry/explanations.rs`).
pub(crate) const DEFAULT_EXPLANATIONS_KEPT: usize = 4_096;
/// 65,536: the memory limit drops most of them before.
pub(crate) const MAX_EXPLANATIONS_KEPT: usize = 65_536;
/// 1 % of a core: most decisions of a quiet pool are explained, and a busy picker does not notice.
pub(crate) const DEFAULT_EXPLAIN_TIME_RATIO: f64 = 0.01;
/// 100,000: a larger number is assumed to be a mistake.
pub(crate) const MAX_DECISIONS_KEPT: usize = 100_000;
/// Needs no tuning on any mix of servers; its first tokens arrive in about half the time of the others
/// (`tests/in_process/virtual_time/policies.rs`).
pub(crate) const DEFAULT_STRATEGY: &str = "predicted-latency";
/// Name of the pool that flags create without a file.
pub(crate) const DEFAULT_POOL: &str = "default";
/// The primary and two fallbacks, in `destination: list`.
pub(crate) const DEFAULT_MAX_DESTINATIONS: usize = 3;
/// 50 ms for an endpoint with requests in flight, as in the reference picker.
pub(crate) const DEFAULT_SCRAPE_INTERVAL: Duration = Duration::from_millis(50);
/// 1 s for an idle endpoint: its metrics do not change, and 100 of them must cost next to nothing.
pub(crate) const DEFAULT_SCRAPE_IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// 500 ms: the ledger describes a server better than metrics that take longer.
pub(crate) const DEFAULT_SCRAPE_TIMEOUT: Duration = Duration::from_millis(500);
/// 4 MiB, forty times the largest metrics response seen.
pub(crate) const DEFAULT_SCRAPE_MAX_BYTES: u64 = 4 << 20;
/// 2 s, as in the reference picker.
pub(crate) const DEFAULT_STALE_AFTER: Duration = Duration::from_secs(2);
/// 5 s: a headless service's pods change no faster than that.
pub(crate) const DEFAULT_DNS_REFRESH: Duration = Duration::from_secs(5);
/// Shortest interval of anything that is repeated: below it a mistyped unit would load the machine.
pub const MIN_INTERVAL: Duration = Duration::from_millis(5);
/// Namespace in which GIE's own example reports the cost of a response.
pub(crate) const DEFAULT_USAGE_NAMESPACE: &str = "envoy.lb";
/// Key of that cost in the dynamic metadata.
pub(crate) const DEFAULT_USAGE_KEY: &str = "x-gateway-inference-request-cost";
/// Weight of a target that names none.
pub const DEFAULT_WEIGHT: u32 = 1;
/// Largest weight, as InferenceModelRewrite allows.
pub const MAX_WEIGHT: u32 = 1_000_000;
/// 16 tokens: vLLM's block on CUDA.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// Largest block, tokens: vLLM's largest is 256; hybrid models use larger ones.
pub(crate) const MAX_BLOCK_SIZE: u32 = 4_096;
/// 400 ms, as in llm-d's picker, which then decides without tokens.
pub(crate) const DEFAULT_REMOTE_TIMEOUT: Duration = Duration::from_millis(400);
/// 5 s, as in AIBrix: the longest prompts tokenize in less.
pub(crate) const DEFAULT_TOKENIZER_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// 30 s, as in AIBrix.
pub(crate) const DEFAULT_TOKENIZER_HEALTH_CHECK_PERIOD: Duration = Duration::from_secs(30);
/// 5 min, as in AIBrix.
pub(crate) const DEFAULT_TOKENIZER_TTL: Duration = Duration::from_secs(300);
/// 100 models, as in AIBrix.
pub(crate) const DEFAULT_TOKENIZER_MAX_MODELS: u32 = 100;
/// 10,000 models: probing more of them keeps servers busy.
pub(crate) const MAX_TOKENIZER_MODELS: u32 = 10_000;
/// vLLM's own port for KV events.
pub(crate) const DEFAULT_KV_EVENTS_PORT: u16 = 5557;
/// Every topic, so that publishers with vLLM's default topic, which is empty, are included.
pub(crate) const DEFAULT_KV_EVENTS_TOPIC: &str = "";
/// Most data-parallel ranks of one endpoint.
pub(crate) const MAX_RANKS: u16 = 64;

/// How pickers share state, for messages about settings of other products that do it in another way.
pub(crate) const BY_SYNC: &str = "pickers share prompts and requests in flight over NATS, by `sync.nats.servers` or \
                                  `--sync-nats-url`";
