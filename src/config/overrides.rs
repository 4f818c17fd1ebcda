//! Values from flags and environment, before they are merged with the file.

use super::aibrix_env::AibrixEnv;
use super::flags::KeyValues;
use super::localai_env::LocalaiEnv;
use super::own_env::OwnEnv;
use super::reference_env::ReferenceEnv;
use attache_pool::Engine;
use std::time::Duration;

/// Values that outrank the file, except for those of AIBrix and LocalAI. `None` means that neither a flag nor
/// the environment sets the value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// Flags that stand for one key of the file each.
    pub keys: KeyValues,
    /// `--secure-serving`
    pub secure_serving: Option<bool>,
    /// `--tracing`
    pub tracing: Option<bool>,
    /// The variable `OTEL_TRACES_SAMPLER_ARG`, which a flag outranks.
    pub sampler_arg: Option<String>,
    /// `--destination-header`
    pub destination_headers: Vec<String>,
    /// `--destination-metadata-key`
    pub destination_metadata_keys: Vec<String>,
    /// `--destination-metadata-namespace`
    pub destination_metadata_namespace: Option<String>,
    /// `--endpoint`, each as the user wrote it.
    pub endpoints: Vec<String>,
    /// Flags about pods.
    pub kubernetes: KubernetesFlags,
    /// Whether only the file is checked (`attache check`): endpoints may then be missing, since flags can name them.
    pub endpoints_follow: bool,
    /// Whether the file is a pool's own, in which limits over all pools have no meaning.
    pub one_pool: bool,
    /// `--strategy`
    pub strategy: Option<String>,
    /// AIBrix's variables, which the file outranks.
    pub aibrix: AibrixEnv,
    /// LocalAI's variables, which the file outranks.
    pub localai: LocalaiEnv,
    /// Variables that begin with `ATTACHE_` and that no flag has.
    pub own: OwnEnv,
    /// Variables of GIE's and llm-d's manifests.
    pub reference: ReferenceEnv,
    /// `--refresh-metrics-interval`
    pub refresh_metrics_interval: Option<Duration>,
    /// `--metrics-staleness-threshold`
    pub metrics_staleness_threshold: Option<Duration>,
}

/// Flags about the pods that are endpoints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KubernetesFlags {
    /// `--pool-name`
    pub pool_name: Option<String>,
    /// `--pool-selector`
    pub pool_selector: Option<String>,
    /// `--pool-namespace`
    pub pool_namespace: Option<String>,
    /// `--pool-group`
    pub pool_group: Option<String>,
    /// `--endpoint-selector`
    pub endpoint_selector: Option<String>,
    /// `--endpoint-target-ports`
    pub endpoint_target_ports: Vec<u16>,
    /// `--engine`
    pub engine: Option<Engine>,
    /// `--model-server-metrics-scheme`
    pub metrics_scheme: Option<String>,
    /// `--model-server-metrics-path`
    pub metrics_path: Option<String>,
    /// `--model-server-metrics-port`
    pub metrics_port: Option<u16>,
    /// `--model-server-metrics-https-insecure-skip-verify`
    pub metrics_insecure_skip_verify: Option<bool>,
}

impl KubernetesFlags {
    /// Whether the flags select any pods.
    #[must_use]
    pub fn any(&self) -> bool {
        self.pool_name.is_some() || self.pool_selector.is_some() || self.endpoint_selector.is_some()
    }
}
