//! `topology-affinity-scorer`: nearness to the endpoint of an earlier step: host 1, rack 0.2, zone 0.05, region 0.02,
//! else 0.
//!
//! The scores follow the cost of a KV cache transfer: NVLink, one switch, several switches, between data centres.
//! `topology-affinity-filter` describes where the peer comes from; without one all score 0. When not: requests have
//! no earlier step. Source: llm-d `topology-affinity-scorer`.

use attache_pool::place::Nearness;
use attache_scheduling::facts::session::header;
use attache_scheduling::facts::topology::{Labels, peer};
use attache_scheduling::plugin::{ParamError, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::parameters;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "topology-affinity-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints near the one that was picked in an earlier step.",
    source: "llm-d `topology-affinity-scorer`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

parameters! {
    struct Params {
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
        Ok(TopologyAffinity { header: name, labels: self.labels })
    }
}

#[derive(Debug)]
struct TopologyAffinity {
    header: Option<Box<str>>,
    labels: Labels,
}

fn worth(nearness: Option<Nearness>) -> f32 {
    match nearness {
        Some(Nearness::Host) => 1.0,
        Some(Nearness::Rack) => 0.2,
        Some(Nearness::Zone) => 0.05,
        Some(Nearness::Region) => 0.02,
        None => 0.0,
    }
}

impl Scorer for TopologyAffinity {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let peer = peer(cx, &self.labels, self.header.as_deref());
        for (score, candidate) in out.iter_mut().zip(candidates) {
            let place = self.labels.place(&candidate.state.endpoint);
            *score = worth(peer.and_then(|peer| place.nearness(peer)));
        }
    }
}
