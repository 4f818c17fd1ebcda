//! Metrics of an endpoint, by the names that configurations use.

use crate::Candidate;
use crate::plugin::ParamError;
use attache_types::spelling::closest;

/// One metric of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointMetric {
    /// Requests that Attaché has routed there and that have not ended; with `sync`, those of all pickers.
    ActiveRequests,
    /// Uncached prompt tokens of those among them that have no first response byte.
    ActiveTokens,
    /// Running requests, as the server reports.
    Running,
    /// Waiting requests, as the server reports.
    Waiting,
    /// KV cache usage, 0..=1, as the server reports.
    KvUsage,
    /// Size of the KV cache in blocks, as the server reports.
    KvBlocks,
    /// Share of the time in which the server's GPUs compute, 0..=1: `gpu_busy_time_ratio` of its metrics.
    GpuUtilization,
}

/// All names: llm-d's name first, then the name of the vLLM metric.
const NAMES: &[(&str, EndpointMetric)] = &[
    ("active-requests", EndpointMetric::ActiveRequests),
    ("active-tokens", EndpointMetric::ActiveTokens),
    ("running-requests", EndpointMetric::Running),
    ("num_requests_running", EndpointMetric::Running),
    ("waiting-queue", EndpointMetric::Waiting),
    ("num_requests_waiting", EndpointMetric::Waiting),
    ("kv-cache-utilization", EndpointMetric::KvUsage),
    ("kv_cache_usage_perc", EndpointMetric::KvUsage),
    ("num_gpu_blocks", EndpointMetric::KvBlocks),
    ("GPUUtilization", EndpointMetric::GpuUtilization),
    ("gpu_busy_time_ratio", EndpointMetric::GpuUtilization),
];

impl EndpointMetric {
    /// The metric that the parameter `parameter` names. vLLM's prefix is allowed, and a producer after a `/`.
    ///
    /// # Errors
    /// The name is unknown; the error lists the known names.
    pub fn named(parameter: &str, name: &str) -> Result<Self, ParamError> {
        let plain = name.split_once('/').map_or(name, |(plain, _)| plain);
        let plain = plain.strip_prefix("vllm:").unwrap_or(plain);
        let found = NAMES.iter().find(|(known, _)| *known == plain).map(|(_, figure)| *figure);
        found.ok_or_else(|| {
            let known = || NAMES.iter().map(|(name, _)| *name);
            let list = known().collect::<Vec<_>>().join(", ");
            let meant = closest(plain, known()).map(|m| format!("; did you mean `{m}`?")).unwrap_or_default();
            ParamError::value(parameter, format!("`{name}`"), &format!("known figures: {list}{meant}"))
        })
    }

    /// Current value; `None` if the server has not reported it or its metrics are stale.
    #[must_use]
    pub fn of(self, candidate: &Candidate<'_>) -> Option<f64> {
        let ledger = &candidate.state.live().ledger;
        match self {
            EndpointMetric::ActiveRequests => Some(f64::from(ledger.in_flight())),
            EndpointMetric::ActiveTokens => Some(ledger.prefill_tokens() as f64),
            EndpointMetric::Running => candidate.metrics().map(|m| f64::from(m.running)),
            EndpointMetric::Waiting => candidate.metrics().map(|m| f64::from(m.waiting)),
            EndpointMetric::KvUsage => candidate.metrics().map(|m| f64::from(m.kv_usage)),
            EndpointMetric::KvBlocks => candidate.metrics().and_then(|m| m.num_blocks).map(f64::from),
            EndpointMetric::GpuUtilization => candidate.metrics().and_then(|m| m.gpu_busy),
        }
    }
}
