//! Sources of endpoints beside the static list: DNS names, a file, and the pods of a cluster.

use super::MetricsSection;
use super::declare;
use attache_config_schema::diagnostic::At;
use attache_pool::Engine;
use std::time::Duration;

sections! {
    /// Pods that are endpoints: those of an InferencePool, of a selector, or of all InferencePools with a label.
    Kubernetes {
        /// Name of an InferencePool.
        "pool" => pool: String { absent: "none"; },
        /// Selector of InferencePools, such as `tier=gold`; each is a pool.
        "poolSelector" => pool_selector: String { absent: "none"; },
        /// Namespace of the objects.
        "namespace" => namespace: String { absent: "the variable NAMESPACE, else the namespace of Attaché"; },
        /// API group of the InferencePool. `inference.networking.x-k8s.io` is that of v1alpha2.
        "group" => group: String { absent: "`inference.networking.k8s.io`"; },
        /// Selector of pods, such as `app=vllm`.
        "selector" => selector: String { absent: "none"; },
        /// With `selector`: at most eight ports of each pod; each is an endpoint.
        "targetPorts" => target_ports: Vec<At<u16>> { absent: "the label `model.aibrix.ai/port`, else 8000"; unit: "port"; },
        /// Inference engine of pods whose labels name none.
        "engine" => engine: Engine { default: Engine::default(); },
        /// Where the pods' metrics are.
        "metrics" => metrics: MetricsSection,
    }
    /// A file that lists endpoints.
    EndpointsFile {
        /// The file: `endpoints: [{name: a, address: 10.0.0.1, port: "8000", labels: {llm-d.ai/role: decode}}]`.
        "path" => path: String [required],
        /// Whether the file is read again when it changes.
        "watch" => watch: bool { default: true; },
        /// Inference engine of the endpoints.
        "engine" => engine: Engine { default: Engine::default(); },
        /// Where their metrics are.
        "metrics" => metrics: MetricsSection,
    }
    /// A name of hosts whose addresses are endpoints.
    Dns {
        /// The name, such as `vllm.default.svc`.
        "host" => host: String [required],
        /// Port of the endpoints.
        "port" => port: u16 [required] { range: 1..=u16::MAX; unit: "port"; },
        /// Interval of the queries: the pods of a headless service change no faster.
        "refresh" => refresh: Duration { default: Duration::from_secs(5); range: Duration::from_millis(100)..; },
        /// Inference engine of the endpoints.
        "engine" => engine: Engine { default: Engine::default(); },
        /// Where their metrics are.
        "metrics" => metrics: MetricsSection,
    }
}
