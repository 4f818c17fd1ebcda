//! Location of a server by host, rack, zone and region labels, and the topology level that two servers share.

use attache_types::keywords;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Kubernetes' label for a node's name.
pub const DEFAULT_HOST_LABEL: &str = "kubernetes.io/hostname";
/// The label for a rack that clouds and batch schedulers use by convention.
pub const DEFAULT_RACK_LABEL: &str = "topology.kubernetes.io/rack";
/// Kubernetes' label for a zone.
pub const DEFAULT_ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// Kubernetes' label for a region.
pub const DEFAULT_REGION_LABEL: &str = "topology.kubernetes.io/region";

/// The narrowest topology level that two servers share. Later variants are nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// Both servers are in the same region.
    Region,
    /// Both servers are in the same zone, and so in the same region.
    Zone,
    /// Both servers are in the same rack.
    Rack,
    /// Both servers are on the same host.
    Host,
}

keywords! {
    Nearness: "host" => Host, "rack" => Rack, "zone" => Zone, "region" => Region;
}

impl Nearness {
    /// All levels, the nearest first.
    pub const ALL: [Self; 4] = [Self::Host, Self::Rack, Self::Zone, Self::Region];
}

/// Location of a server. Names are stored as hashes, since a decision only compares them, many times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Hashes of the names in the order of [`Nearness::ALL`]; 0 is an unknown name, which matches nothing.
    names: [u64; 4],
}

impl Place {
    /// A location from its names in the order of [`Nearness::ALL`]; an empty name is unknown.
    #[must_use]
    pub fn named(names: [&str; 4]) -> Self {
        Self { names: names.map(|name| if name.is_empty() { 0 } else { xxh3_64(name.as_bytes()) }) }
    }

    /// The location of an endpoint with these labels.
    #[must_use]
    pub fn of_labels(labels: &BTreeMap<Arc<str>, Arc<str>>) -> Self {
        let label = |name: &str| labels.get(name).map_or("", |value| &**value);
        Self::named([DEFAULT_HOST_LABEL, DEFAULT_RACK_LABEL, DEFAULT_ZONE_LABEL, DEFAULT_REGION_LABEL].map(label))
    }

    /// Whether any level of the location is known.
    #[must_use]
    pub fn is_known(self) -> bool {
        self != Self::default()
    }

    /// Returns the narrowest level that both share. Equal names in different wider locations do not match, since every
    /// zone may have a rack `r1`.
    #[must_use]
    pub fn nearness(self, other: Place) -> Option<Nearness> {
        let levels = Nearness::ALL.into_iter().zip(self.names.into_iter().zip(other.names)).rev();
        let known = levels.filter(|(_, (a, b))| *a != 0 && *b != 0);
        known.take_while(|(_, (a, b))| a == b).last().map(|(nearness, _)| nearness)
    }
}

/// The locations of several servers.
#[derive(Debug, Default)]
pub struct Places {
    /// Hashes of the names by level, as in [`Place`]; sorted.
    names: [SmallVec<[u64; 16]>; 4],
}

impl FromIterator<Place> for Places {
    fn from_iter<I: IntoIterator<Item = Place>>(places: I) -> Self {
        let mut all = Self::default();
        for place in places {
            for (names, name) in all.names.iter_mut().zip(place.names) {
                names.extend(Some(name).filter(|name| *name != 0));
            }
        }
        for names in &mut all.names {
            names.sort_unstable();
            names.dedup();
        }
        all
    }
}

impl Places {
    /// Returns the levels that any of the servers may share with `place`, the nearest first. It does not look at each
    /// server, and so does not check that wider names match too.
    pub fn nearnesses(&self, place: Place) -> impl Iterator<Item = Nearness> {
        let levels = Nearness::ALL.into_iter().zip(self.names.iter().zip(place.names));
        levels.filter(|(_, (names, name))| names.binary_search(name).is_ok()).map(|(nearness, _)| nearness)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowest_shared_level_counts() {
        let place = |labels: &[(&str, &str)]| {
            Place::of_labels(&labels.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect())
        };
        let a = place(&[(DEFAULT_HOST_LABEL, "h1"), (DEFAULT_RACK_LABEL, "r1"), (DEFAULT_ZONE_LABEL, "z1")]);
        for (labels, near) in [
            (&[(DEFAULT_HOST_LABEL, "h1")][..], Some(Nearness::Host)),
            (&[(DEFAULT_HOST_LABEL, "h2"), (DEFAULT_RACK_LABEL, "r1")], Some(Nearness::Rack)),
            (&[(DEFAULT_RACK_LABEL, "r2"), (DEFAULT_ZONE_LABEL, "z1")], Some(Nearness::Zone)),
            (&[(DEFAULT_ZONE_LABEL, "z2"), (DEFAULT_REGION_LABEL, "z1")], None),
            (&[(DEFAULT_RACK_LABEL, "r1"), (DEFAULT_ZONE_LABEL, "z1")], Some(Nearness::Rack)),
            (&[(DEFAULT_RACK_LABEL, "r1"), (DEFAULT_ZONE_LABEL, "z2")], None),
            (&[(DEFAULT_HOST_LABEL, "h1"), (DEFAULT_RACK_LABEL, "r1"), (DEFAULT_ZONE_LABEL, "z2")], None),
            (
                &[(DEFAULT_HOST_LABEL, "h1"), (DEFAULT_RACK_LABEL, "r2"), (DEFAULT_ZONE_LABEL, "z1")],
                Some(Nearness::Zone),
            ),
            (&[(DEFAULT_HOST_LABEL, "")], None),
            (&[], None),
        ] {
            assert_eq!((a.nearness(place(labels)), place(labels).nearness(a)), (near, near), "{labels:?}");
        }
    }

    #[test]
    fn location_without_names_is_unknown() {
        assert!(Place::named(["", "", "z1", ""]).is_known() && !Place::named([""; 4]).is_known());
    }

    #[test]
    fn nearest_possible_levels_of_several_servers() {
        let all: Places =
            [["h1", "r1", "z1", ""], ["h2", "r2", "z1", ""], [""; 4]].map(Place::named).into_iter().collect();
        let near = |names| all.nearnesses(Place::named(names)).collect::<Vec<_>>();
        assert_eq!(near(["h3", "r2", "z1", "g1"]), [Nearness::Rack, Nearness::Zone]);
        assert_eq!(near(["", "", "z2", ""]), []);
        assert_eq!(near([""; 4]), [], "its location is unknown");
    }
}
