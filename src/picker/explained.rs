//! Explanations of decisions: as a log line, and in the form that `/explain` and explained recordings share.

use attache_pool::{Endpoint, EndpointState, PoolSnapshot, ledger};
use attache_prefix::cache::Found;
use attache_request::agent::AgentIdentity;
use attache_scheduling::Decision;
use attache_types::error::RequestError;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// The explanation of a decision.
#[derive(Debug, Serialize)]
pub struct DecisionExplanation {
    /// The request's `x-request-id`; missing if it has none.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub request_id: String,
    /// Name of the pool.
    pub pool: String,
    /// Model name sent to the model server; empty if unknown.
    pub model: String,
    /// Whether the body was parsed. Other requests go to the endpoint with the fewest requests.
    pub understood: bool,
    /// Name of the strategy.
    pub strategy: String,
    /// The profile that selected the strategy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Priority of the request.
    pub priority: i32,
    /// The agent that sent the request, if the request names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentIdentity>,
    /// How long the request was queued, milliseconds.
    pub waited_ms: f64,
    /// Length of the prompt by which the strategy decides, tokens.
    pub prompt_tokens: u32,
    /// All endpoints of the pool at that time.
    pub endpoints: Vec<EndpointExplanation>,
    /// What is chosen.
    pub choice: StrategyChoice,
}

/// An endpoint at the time of a decision.
#[derive(Debug, Serialize)]
pub struct EndpointExplanation {
    /// `ip:port`.
    pub address: String,
    /// Prompt tokens that it is expected to have cached in GPU memory.
    pub gpu_tokens: u32,
    /// Prompt tokens that it is expected to have cached in any tier.
    pub cached_tokens: u32,
    /// Requests in flight.
    pub requests: u32,
    /// Why it is no candidate; missing if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub excluded: Option<&'static str>,
}

impl EndpointExplanation {
    /// All endpoints of a pool, for a prompt of `prompt_tokens` tokens with the lookup `found`.
    #[must_use]
    pub fn all(
        snapshot: &PoolSnapshot,
        found: Option<&Found>,
        prompt_tokens: u32,
        excluded: impl Fn(&EndpointState) -> Option<&'static str>,
    ) -> Vec<Self> {
        let endpoint = |state: &EndpointState| {
            let depth = found.map(|found| found.depth(state.id())).unwrap_or_default();
            let tokens = |blocks| found.map_or(0, |found| found.tokens(blocks).min(prompt_tokens));
            Self {
                address: state.endpoint.authority.to_string(),
                gpu_tokens: tokens(depth.gpu),
                cached_tokens: tokens(depth.any),
                requests: ledger::requests(&state.endpoint, state.metrics()),
                excluded: excluded(state),
            }
        };
        snapshot.endpoints.iter().map(endpoint).collect()
    }
}

/// The choice of a strategy.
#[derive(Debug, Default, Serialize)]
pub struct StrategyChoice {
    /// The endpoints (`ip:port`), best first; empty if the request is rejected.
    pub picks: Vec<String>,
    /// The servers that prefill the prompt of a split request, best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefill: Vec<String>,
    /// The servers that encode its images and audio.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub encode: Vec<String>,
    /// The best endpoint that is not among `picks`, if the strategy gives scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner_up: Option<String>,
    /// The pair that was compared with the whole request, with the costs that decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pair: Option<Value>,
    /// Why the first endpoint is chosen, or why the request is rejected.
    pub reason: String,
    /// Score of each part of the strategy for each endpoint.
    pub parts: Value,
}

impl StrategyChoice {
    /// The choice in `decision`.
    #[must_use]
    pub fn of(decision: &Decision) -> Self {
        let authorities =
            |endpoints: &[Arc<Endpoint>]| endpoints.iter().map(|endpoint| endpoint.authority.to_string()).collect();
        Self {
            picks: authorities(&decision.picks),
            prefill: decision.split.as_ref().map(|split| authorities(&split.prefill)).unwrap_or_default(),
            encode: authorities(&decision.encode),
            runner_up: decision.runner_up.as_ref().map(|endpoint| endpoint.authority.to_string()),
            pair: decision.compared.as_ref().map(|pair| pair.to_json()),
            reason: decision.reason.to_owned(),
            parts: decision.parts_json(),
        }
    }

    /// The rejection of a request with this error.
    #[must_use]
    pub fn rejected(error: &RequestError) -> Self {
        let reason = format!("{}: {}", error.reason.code(), error.message);
        Self { reason, parts: json!([]), ..Self::default() }
    }
}

/// A decision with its explanation.
#[derive(Debug)]
pub struct Explained<'a> {
    /// The request's `x-request-id`; empty if it has none.
    pub request_id: &'a str,
    /// Name of the request's pool.
    pub pool: &'a str,
    /// Name of the strategy, as in configurations.
    pub strategy: &'a str,
    /// Model name sent to the model server.
    pub model: &'a str,
    /// Length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// The agent that sent the request, if the request names it.
    pub agent: Option<&'a AgentIdentity>,
    /// The decision with the scores.
    pub decision: &'a Decision,
}

impl Explained<'_> {
    /// Writes the log line.
    pub fn emit(&self) {
        let picks: Vec<&str> = self.decision.picks.iter().map(|e| &*e.authority).collect();
        tracing::info!(
            request_id = Some(self.request_id).filter(|id| !id.is_empty()),
            pool = self.pool,
            strategy = self.strategy,
            model = self.model,
            prompt_tokens = self.prompt_tokens,
            program = self.agent.map(|agent| &*agent.program),
            chain = self.agent.map(|agent| &*agent.chain),
            parent_chain = self.agent.and_then(|agent| agent.parent.as_deref()),
            agent_kind = self.agent.map(|agent| agent.kind.label()),
            agent_source = self.agent.map(|agent| agent.source.label()),
            named_by = self.agent.map(|agent| agent.field),
            picks = picks.join(","),
            prefill = self.decision.split.as_ref().and_then(|s| s.prefill.first()).map(|e| &*e.authority),
            reason = self.decision.reason,
            runner_up = self.decision.second.as_ref().map(|second| &*second.endpoint.authority),
            margin = self.decision.second.as_ref().map(|second| second.margin),
            parts = %self.decision.parts_json(),
            "decision"
        );
    }
}
