//! How a pool's requests are split between prefill and decode servers: who sends the prefill's part, in whose words, with which bounds.

use super::attempts::Bounds;
use super::connector::{Connector, Sequence, neuron_nixl, sglang, shfs, trtllm};
use attache_pool::{Endpoint, Engine, PoolSnapshot, Roles};
use std::sync::Arc;
use std::time::Duration;

/// 30 s for a prefill over all its tries, as AIBrix; vLLM keeps what was computed for 30 s as well.
pub const DEFAULT_PREFILL_TIMEOUT: Duration = Duration::from_secs(30);
/// AIBrix's annotation for that port, which counts as a label.
pub const BOOTSTRAP_PORT_LABEL: &str = "model.aibrix.ai/sglang-bootstrap-port";
/// AIBrix's label of a server's engine.
pub const ENGINE_LABEL: &str = "model.aibrix.ai/engine";
/// AIBrix's label of how vLLM's servers move a KV cache: `shfs`, or `nixl` for Neuron's.
pub const KV_CONNECTOR_LABEL: &str = "model.aibrix.ai/kv-connector-type";
/// AIBrix's label that keeps the prefill and decode servers of one set together.
pub const ROLESET_LABEL: &str = "roleset-name";
/// The label of a DisaggregatedSet's pods that tells its revisions apart: what one of them has computed another may not be able to read.
pub const REVISION_LABEL: &str = "disaggregatedset.x-k8s.io/revision";

/// What configurations call the connector that the prefill server's labels name.
pub const BY_LABEL: &str = "by-label";

/// The labels that keep servers together where nothing is said.
#[must_use]
pub fn default_together() -> Vec<Arc<str>> {
    [ROLESET_LABEL, REVISION_LABEL].map(Into::into).to_vec()
}

/// 480 s: vLLM's `decoder_kv_blocks_ttl`, for which a decode server keeps a conversation's blocks for the next turn's prefill.
pub const DEFAULT_DECODER_BLOCKS_TTL: Duration = Duration::from_secs(480);

/// Who sends the prefill's part of a request.
#[derive(Clone, Debug)]
pub enum Mode {
    /// The picker itself, inside the exchange; the decode server needs no sidecar.
    Direct(Direct),
    /// llm-d's sidecar in front of the decode server: it is told the prefill server in a header.
    Header {
        /// With it the sidecar is also told who holds at least so many tokens of the prompt more than the server that computes it.
        source_tokens: Option<u32>,
    },
}

impl Mode {
    /// Whether `prefill` is asked at the same time as the server that answers, which waits for it.
    #[must_use]
    pub fn meets(&self, prefill: &Endpoint) -> bool {
        matches!(self, Self::Direct(direct) if direct.connector_of(Some(prefill)).sequence() == Sequence::Together)
    }
}

/// The picker's own way.
#[derive(Clone, Debug)]
pub struct Direct {
    /// The servers' words; with `by_label` those of vLLM's servers without a label.
    pub connector: &'static dyn Connector,
    /// The labels of the prefill server name the connector, as in AIBrix.
    pub by_label: bool,
    /// Bounds of the prefill.
    pub bounds: Bounds,
    /// What becomes of a request whose prompt no prefill server has computed.
    pub fallback: Fallback,
    /// `http` or `https`, towards servers.
    pub scheme: Arc<str>,
    /// What stands before an API's own path on servers; empty for most. Not what the client wrote there, which the gateway may rewrite.
    pub path_prefix: Arc<str>,
    /// Whether their certificates are believed unseen.
    pub insecure_skip_verify: bool,
    /// SGLang's port, where no label says another.
    pub bootstrap_port: u16,
    /// How long decode servers keep a conversation's blocks for the next turn's prefill; zero when nobody should ask for them.
    pub decoder_blocks_ttl: Duration,
}

impl Direct {
    /// The connector of requests whose prompts `prefill` computes.
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

    /// The same with the connector of `prefill`.
    #[must_use]
    pub fn with_connector_of(&self, prefill: &Endpoint) -> Self {
        Self { connector: self.connector_of(Some(prefill)), ..self.clone() }
    }

    /// Whether a prefill server of the pool is asked at the same time as the server that answers. As in AIBrix the first one stands for all.
    #[must_use]
    pub fn is_together_in(&self, pool: &PoolSnapshot) -> bool {
        let first = || pool.endpoints.iter().find(|state| state.serves(Roles::PREFILL));
        let first = if self.by_label { first() } else { None };
        self.connector_of(first.map(|state| &*state.endpoint)).sequence() == Sequence::Together
    }

    /// Whether both servers are asked at once.
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
        label.and_then(|port| port.parse().ok()).unwrap_or(self.bootstrap_port)
    }
}

/// What becomes of a request whose prompt no prefill server has computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fallback {
    /// The decode server computes it as well.
    #[default]
    Local,
    /// 503.
    Fail,
}
