//! Topology: how near endpoints are to each other, by labels or by a header with the peer's location.

use crate::PickContext;
use attache_pool::Endpoint;
use attache_pool::place::{DEFAULT_HOST_LABEL, DEFAULT_RACK_LABEL, DEFAULT_REGION_LABEL, DEFAULT_ZONE_LABEL, Place};
use attache_types::parameters;

/// Reads `host=node12,rack=r7,zone=a,region=eu`, as prefill schedulers add it to responses; `None` if no level is
/// known.
fn parse(text: &str) -> Option<Place> {
    let (mut host, mut rack, mut zone, mut region) = ("", "", "", "");
    for (key, value) in text.split(',').filter_map(|pair| pair.split_once('=')) {
        let name = match key.trim() {
            "host" | "hostname" => &mut host,
            "rack" => &mut rack,
            "zone" => &mut zone,
            "region" => &mut region,
            _ => continue,
        };
        *name = value.trim();
    }
    Some(Place::named([host, rack, zone, region])).filter(|place| place.is_known())
}

parameters! {
    /// Names of the labels with an endpoint's location.
    pub struct Labels {
        /// Label with the host.
        "hostname" => hostname: String { default: DEFAULT_HOST_LABEL.to_owned(); },
        /// Label with the rack.
        "rack" => rack: String { default: DEFAULT_RACK_LABEL.to_owned(); },
        /// Label with the zone.
        "zone" => zone: String { default: DEFAULT_ZONE_LABEL.to_owned(); },
        /// Label with the region.
        "region" => region: String { default: DEFAULT_REGION_LABEL.to_owned(); },
    }
}

impl Labels {
    /// Location of an endpoint.
    #[must_use]
    pub fn place(&self, endpoint: &Endpoint) -> Place {
        let label = |name: &str| endpoint.spec.labels.get(name).map_or("", |value| &**value);
        Place::named([label(&self.hostname), label(&self.rack), label(&self.zone), label(&self.region)])
    }
}

/// Location of the endpoint that was picked for an earlier step of this request. Either this replica picked it for
/// another stage, or the request header `header` gives it.
#[must_use]
pub fn peer(cx: &PickContext<'_>, labels: &Labels, header: Option<&str>) -> Option<Place> {
    if let Some(peer) = cx.request.headers.peer() {
        return Some(labels.place(peer));
    }
    parse(cx.request.headers.get(header?)?)
}
