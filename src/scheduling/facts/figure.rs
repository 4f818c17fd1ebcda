//! Numbers about an endpoint, under the names that configurations use for them.

use crate::Candidate;
use crate::plugin::ParamError;
use attache_types::spelling::closest;

/// One number about an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Requests that this picker has sent and that have not ended.
    ActiveRequests,
    /// Prompt tokens that this picker has sent and whose answer has not begun.
    ActiveTokens,
    /// Requests in the batch, as the server reports.
    Running,
    /// Requests that wait for a slot, as the server reports.
    Waiting,
    /// KV cache in use, 0..=1, as the server reports.
    KvUsage,
    /// Blocks that the KV cache has room for, as the server reports.
    KvBlocks,
    /// Part of the time in which the server's GPUs compute, 0..=1: `gpu_busy_time_ratio` of its metrics page.
    GpuUtilization,
}

/// Every name of every figure: llm-d's word first, then the name of the vLLM metric that says it.
const NAMES: &[(&str, Figure)] = &[
    ("active-requests", Figure::ActiveRequests),
    ("active-tokens", Figure::ActiveTokens),
    ("running-requests", Figure::Running),
    ("num_requests_running", Figure::Running),
    ("waiting-queue", Figure::Waiting),
    ("num_requests_waiting", Figure::Waiting),
    ("kv-cache-utilization", Figure::KvUsage),
    ("kv_cache_usage_perc", Figure::KvUsage),
    ("num_gpu_blocks", Figure::KvBlocks),
    ("GPUUtilization", Figure::GpuUtilization),
    ("gpu_busy_time_ratio", Figure::GpuUtilization),
];

impl Figure {
    /// The figure that the parameter `parameter` calls `name`. A metric's name may have vLLM's prefix, and any name its producer behind a `/`.
    ///
    /// # Errors
    /// There is none of that name; the error lists those that there are.
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

    /// Its value; `None` when the server has not reported it lately.
    #[must_use]
    pub fn of(self, candidate: &Candidate<'_>) -> Option<f64> {
        let ledger = &candidate.state.live().ledger;
        match self {
            Figure::ActiveRequests => Some(f64::from(ledger.in_flight())),
            Figure::ActiveTokens => Some(ledger.prefill_tokens() as f64),
            Figure::Running => candidate.metrics().map(|m| f64::from(m.running)),
            Figure::Waiting => candidate.metrics().map(|m| f64::from(m.waiting)),
            Figure::KvUsage => candidate.metrics().map(|m| f64::from(m.kv_usage)),
            Figure::KvBlocks => candidate.metrics().and_then(|m| m.num_blocks).map(f64::from),
            Figure::GpuUtilization => candidate.metrics().and_then(|m| m.gpu_busy),
        }
    }
}
