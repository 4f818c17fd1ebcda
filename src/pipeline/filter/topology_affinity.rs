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
use attache_scheduling::plugin::{Filter, ParamError, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::parameters;
use attache_types::rng::PickRng;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "topology-affinity-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints near the one that was picked in an earlier step.",
    source: "llm-d `topology-affinity-filter`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Filter(Arc::new(p))),
};

parameters! {
    struct Params {
        /// Topology level that an endpoint must share with the one of the earlier step. `host` is llm-d's default, for
        /// transfers over NVLink.
        "minAffinity" => min_affinity: Nearness { default: Nearness::Host; },
        /// Request header with the location of the endpoint that an earlier step picked. Set it only where clients
        /// cannot send the header.
        "peerTopologyHeader" => peer_topology_header: Option<String> { absent: "none"; },
        /// Names of the labels with an endpoint's location.
        "labels" => labels: Labels,
        ignored {
            /// Without effect: there is one source of topology.
            "topologyProducerName": Value,
        }
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
