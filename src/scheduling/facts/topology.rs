//! Who is near whom: the host, rack, zone and region of an endpoint, read from its labels, compared with those of a peer.

use crate::pool::Endpoint;
use crate::scheduling::PickContext;
use serde::Deserialize;

/// Kubernetes' label for a node's name.
pub const DEFAULT_HOST_LABEL: &str = "kubernetes.io/hostname";
/// The label by which clouds and batch schedulers mark racks, by convention.
pub const DEFAULT_RACK_LABEL: &str = "topology.kubernetes.io/rack";
/// Kubernetes' label for a zone.
pub const DEFAULT_ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// Kubernetes' label for a region.
pub const DEFAULT_REGION_LABEL: &str = "topology.kubernetes.io/region";

/// The tightest place that two endpoints share. Later is nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Nearness {
    /// The same region.
    Region,
    /// The same zone, and so the same region.
    Zone,
    /// The same rack.
    Rack,
    /// The same host.
    Host,
}

/// Where something stands; an empty name says nothing and matches nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Topology<'a> {
    host: &'a str,
    rack: &'a str,
    zone: &'a str,
    region: &'a str,
}

impl<'a> Topology<'a> {
    /// Reads `host=node12,rack=r7,zone=a,region=eu`, as prefill pickers stamp it on answers; `None` when nothing in it is known.
    #[must_use]
    pub fn parse(text: &'a str) -> Option<Self> {
        let mut topology = Self::default();
        for (key, value) in text.split(',').filter_map(|pair| pair.split_once('=')) {
            let place = match key.trim() {
                "host" | "hostname" => &mut topology.host,
                "rack" => &mut topology.rack,
                "zone" => &mut topology.zone,
                "region" => &mut topology.region,
                _ => continue,
            };
            *place = value.trim();
        }
        (topology != Self::default()).then_some(topology)
    }

    /// The tightest place that both share.
    #[must_use]
    pub fn nearness(self, other: Topology<'_>) -> Option<Nearness> {
        let same = |a: &str, b: &str| !a.is_empty() && a == b;
        let pairs = [
            (Nearness::Host, self.host, other.host),
            (Nearness::Rack, self.rack, other.rack),
            (Nearness::Zone, self.zone, other.zone),
            (Nearness::Region, self.region, other.region),
        ];
        pairs.into_iter().find(|(_, a, b)| same(a, b)).map(|(nearness, ..)| nearness)
    }
}

/// The names of the labels that say where an endpoint stands.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Labels {
    hostname: Box<str>,
    rack: Box<str>,
    zone: Box<str>,
    region: Box<str>,
}

impl Default for Labels {
    fn default() -> Self {
        Self {
            hostname: DEFAULT_HOST_LABEL.into(),
            rack: DEFAULT_RACK_LABEL.into(),
            zone: DEFAULT_ZONE_LABEL.into(),
            region: DEFAULT_REGION_LABEL.into(),
        }
    }
}

impl Labels {
    /// Where an endpoint stands.
    #[must_use]
    pub fn topology<'a>(&self, endpoint: &'a Endpoint) -> Topology<'a> {
        let label = |name: &str| endpoint.spec.labels.get(name).map_or("", |value| &**value);
        Topology {
            host: label(&self.hostname),
            rack: label(&self.rack),
            zone: label(&self.zone),
            region: label(&self.region),
        }
    }
}

/// Where the endpoint stands that was picked for this request in an earlier step: here, for its other stage, or elsewhere, as the request's header
/// `header` says.
#[must_use]
pub fn peer<'a>(cx: &PickContext<'a>, labels: &Labels, header: Option<&str>) -> Option<Topology<'a>> {
    if let Some(peer) = cx.request.headers.peer() {
        return Some(labels.topology(peer));
    }
    Topology::parse(cx.request.headers.get(header?)?)
}
