//! Sources of endpoints beside the static list: DNS names, a file, and the pods of a cluster.

use super::{At, Duration, Engine, Fields, MetricsSection, Node, Opt, Read, Sink, word};

sections! {
    /// Selects Kubernetes pods as endpoints, or InferencePools as pools.
    Kubernetes {
        "pool" => pool: String,
        "poolSelector" => pool_selector: String,
        "namespace" => namespace: String,
        "group" => group: String,
        "selector" => selector: String,
        "targetPorts" => target_ports: Vec<At<u16>>,
        "engine" => engine: Engine = word,
        "metrics" => metrics: MetricsSection,
    }
}

/// A file that lists endpoints.
#[derive(Debug)]
pub struct EndpointsFile {
    /// `path`
    pub path: At<String>,
    /// `watch`
    pub watch: Opt<bool>,
    /// `engine`
    pub engine: Opt<Engine>,
    /// `metrics`
    pub metrics: Opt<MetricsSection>,
}

impl Read for EndpointsFile {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        let mut f = Fields::of(node, path, sink)?;
        let (file, watch) = (f.required("path", sink), f.get("watch", sink));
        let (engine, metrics) = (word(&mut f, "engine", sink), f.get("metrics", sink));
        f.finish(sink);
        Some(Self { path: file?, watch, engine, metrics })
    }
}

/// A DNS name whose addresses are endpoints.
#[derive(Debug)]
pub struct Dns {
    /// `host`
    pub host: At<String>,
    /// `port`
    pub port: At<u16>,
    /// `refresh`
    pub refresh: Opt<Duration>,
    /// `engine`
    pub engine: Opt<Engine>,
    /// `metrics`
    pub metrics: Opt<MetricsSection>,
}

impl Read for Dns {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        let mut f = Fields::of(node, path, sink)?;
        let (host, port) = (f.required("host", sink), f.required("port", sink));
        let (refresh, engine, metrics) = (f.get("refresh", sink), word(&mut f, "engine", sink), f.get("metrics", sink));
        f.finish(sink);
        Some(Self { host: host?, port: port?, refresh, engine, metrics })
    }
}
