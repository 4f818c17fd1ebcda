//! `topology-affinity-filter`: endpoints near the endpoint of an earlier step, by their labels.
//!
//! `minAffinity` (`host`, `rack`, `zone`, `region`) is the required nearness; a missing label matches nothing.
//! Without a peer, and if no endpoint is near enough, all stay.
//! The peer is the server of the request's other stage if `disagg-profile-handler` has picked one; else the header
//! `peerTopologyHeader` gives its location. The sender of that header decides, so set it only where clients cannot
//! reach.
//! When not: requests have no earlier step. Source: llm-d `topology-affinity-filter`; the labels are those of its
//! `topology-extractor`.

use super::keep_or_all;
use attache_pool::place::Nearness;
use attache_scheduling::facts::session::header;
use attache_scheduling::facts::topology::{Labels, peer};
use attache_scheduling::plugin::{Filter, ParamError, Plugin, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "topology-affinity-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints near the one that was picked in an earlier step.",
    source: "llm-d `topology-affinity-filter`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Filter(Arc::new(p))),
};

/// Host, llm-d's default: KV blocks move over NVLink there.
pub const DEFAULT_MIN_AFFINITY: Nearness = Nearness::Host;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    min_affinity: Nearness,
    peer_topology_header: Option<String>,
    labels: Labels,
    #[serde(rename = "topologyProducerName")]
    _producer: Option<IgnoredAny>,
}

impl Default for Params {
    fn default() -> Self {
        let (min_affinity, labels) = (DEFAULT_MIN_AFFINITY, Labels::default());
        Self { min_affinity, peer_topology_header: None, labels, _producer: None }
    }
}

impl Params {
    fn build(self) -> Result<TopologyAffinity, ParamError> {
        let name = self.peer_topology_header.map(|name| header("peerTopologyHeader", &name)).transpose()?;
        Ok(TopologyAffinity { least: self.min_affinity, header: name, labels: self.labels })
    }
}

#[derive(Debug)]
struct TopologyAffinity {
    least: Nearness,
    header: Option<Box<str>>,
    labels: Labels,
}

impl Filter for TopologyAffinity {
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        let Some(peer) = peer(cx, &self.labels, self.header.as_deref()) else { return };
        keep_or_all(keep, |i| {
            let nearness = candidates.get(i).and_then(|c| self.labels.place(&c.state.endpoint).nearness(peer));
            nearness >= Some(self.least)
        });
    }
}
