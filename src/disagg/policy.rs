//! How a pool splits requests between prefill and decode workers: who sends the prefill leg, by which
//! connector, with which time limits.

use super::attempts::AttemptLimits;
use super::connector::{Connector, Sequence, neuron_nixl, sglang, shfs, trtllm};
use attache_pool::ports::{BOOTSTRAP_PORT_LABEL, port};
use attache_pool::{Endpoint, Engine, PoolSnapshot, Roles};
use std::sync::Arc;
use std::time::Duration;

/// 30 s for a prefill over all its attempts, as in AIBrix; vLLM keeps prefilled blocks for 30 s as well.
pub const DEFAULT_PREFILL_TIMEOUT: Duration = Duration::from_secs(30);
/// AIBrix's label with the engine of a server.
pub const ENGINE_LABEL: &str = "model.aibrix.ai/engine";
/// AIBrix's label for vLLM's KV transfer: `shfs`, or `nixl` for Neuron's.
pub(crate) const KV_CONNECTOR_LABEL: &str = "model.aibrix.ai/kv-connector-type";
/// AIBrix's label that groups the prefill and decode workers of one set.
pub(crate) const ROLESET_LABEL: &str = "roleset-name";
/// Label of a DisaggregatedSet's pods with their revision: a worker may be unable to read the
/// KV cache of another revision.
pub(crate) const REVISION_LABEL: &str = "disaggregatedset.x-k8s.io/revision";

/// Name in configurations for the connector that the prefill worker's labels select.
pub const BY_LABEL: &str = "by-label";

/// The default labels that group workers.
#[must_use]
pub fn default_together() -> Vec<Arc<str>> {
    [ROLESET_LABEL, REVISION_LABEL].map(Into::into).to_vec()
}

/// 480 s: vLLM's `decoder_kv_blocks_ttl`, for which a decode server keeps a conversation's blocks
/// for the next turn's prefill.
pub const DEFAULT_DECODER_BLOCKS_TTL: Duration = Duration::from_secs(480);

/// Which component sends the prefill leg of a request.
#[derive(Clone, Debug)]
pub enum Mode {
    /// Attaché, inside the exchange; the decode worker needs no sidecar.
    Direct(Direct),
    /// llm-d's sidecar of the decode worker, which gets the prefill worker in a header.
    Header {
        /// If set, the header also names an endpoint that has at least this many prompt tokens more
        /// cached than the prefill worker.
        source_tokens: Option<u32>,
    },
}

impl Mode {
    /// Whether `prefill` and the decode worker, which waits for it, are called at the same time.
    #[must_use]
    pub fn meets(&self, prefill: &Endpoint) -> bool {
        matches!(self, Self::Direct(direct) if direct.connector_of(Some(prefill)).sequence() == Sequence::Together)
    }
}

/// Settings of the prefill leg that Attaché sends.
#[derive(Clone, Debug)]
pub struct Direct {
    /// The connector; with `by_label` that of vLLM workers without a label.
    pub connector: &'static dyn Connector,
    /// Whether the labels of the prefill worker select the connector, as in AIBrix.
    pub by_label: bool,
    /// Time limits of the prefill.
    pub bounds: AttemptLimits,
    /// The gateway's message timeout, which runs during the prefill unless bodies are FULL_DUPLEX_STREAMED. Without
    /// it, no prompt is prefilled first in other body modes.
    pub message_timeout: Option<Duration>,
    /// How a request is handled if no prefill worker prefilled its prompt.
    pub fallback: Fallback,
    /// Scheme towards model servers, `http` or `https`.
    pub scheme: Arc<str>,
    /// Prefix of API paths on model servers, usually empty. Not taken from the client's path,
    /// which the gateway may rewrite.
    pub path_prefix: Arc<str>,
    /// Whether certificates of model servers are accepted without verification.
    pub insecure_skip_verify: bool,
    /// SGLang's bootstrap port for workers without a label.
    pub bootstrap_port: u16,
    /// How long decode workers keep a conversation's blocks for the prefill of the next turn; zero
    /// if they are not used.
    pub decoder_blocks_ttl: Duration,
}

impl Direct {
    /// The connector of requests that `prefill` prefills.
    #[must_use]
    pub fn connector_of(&self, prefill: Option<&Endpoint>) -> &'static dyn Connector {
        let Some(prefill) = prefill.filter(|_| self.by_label) else { return self.connector };
        let label = |name: &str| prefill.spec.labels.get(name).map(|value| &**value);
        match (label(ENGINE_LABEL), prefill.spec.engine) {
            (Some("sglang"), _) | (None, Engine::Sglang) => sglang::CONNECTOR.connector,
            (Some("trtllm"), _) | (None, Engine::TrtllmServe | Engine::Triton) => trtllm::CONNECTOR.connector,
            _ => match label(KV_CONNECTOR_LABEL) {
                Some("shfs") => shfs::CONNECTOR.connector,
                Some("nixl") => neuron_nixl::CONNECTOR.connector,
                _ => self.connector,
            },
        }
    }

    /// The same policy with the connector of `prefill`.
    #[must_use]
    pub fn with_connector_of(&self, prefill: &Endpoint) -> Self {
        Self { connector: self.connector_of(Some(prefill)), ..self.clone() }
    }

    /// The same policy with a prefill that ends before the gateway's message timeout.
    #[must_use]
    pub fn within_message_timeout(&self) -> Self {
        // A tenth is left for the reply, so that a late prefill leads to the fallback and not to a timeout.
        let most = self.message_timeout.map_or(Duration::ZERO, |timeout| timeout.mul_f64(0.9));
        Self { bounds: AttemptLimits { timeout: self.bounds.timeout.min(most), ..self.bounds }, ..self.clone() }
    }

    /// Whether a prefill worker of the pool and the decode worker are called at the same time. As in AIBrix, the
    /// first prefill worker represents all.
    #[must_use]
    pub fn is_together_in(&self, pool: &PoolSnapshot) -> bool {
        let first = || pool.endpoints.iter().find(|state| state.serves(Roles::PREFILL));
        let first = if self.by_label { first() } else { None };
        self.connector_of(first.map(|state| &*state.endpoint)).sequence() == Sequence::Together
    }

    /// Whether both workers are called at the same time.
    #[must_use]
    pub fn is_together(&self) -> bool {
        self.connector.sequence() == Sequence::Together
    }

    /// The URL of `path` on `endpoint`.
    #[must_use]
    pub fn url(&self, endpoint: &Endpoint, path: &str) -> String {
        format!("{}://{}{}{path}", self.scheme, endpoint.authority, self.path_prefix)
    }

    /// The bootstrap port of `endpoint`.
    #[must_use]
    pub fn bootstrap_port_of(&self, endpoint: &Endpoint) -> u16 {
        let label = endpoint.spec.labels.get(BOOTSTRAP_PORT_LABEL);
        label.and_then(|text| port(text)).unwrap_or(self.bootstrap_port)
    }
}

/// How Attaché handles a request if no prefill worker prefilled its prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fallback {
    /// The decode worker prefills the prompt as well.
    #[default]
    Local,
    /// Attaché rejects it with status 503.
    Fail,
}
