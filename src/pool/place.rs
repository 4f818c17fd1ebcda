//! Where a server stands, and how near two of them are: the host, rack, zone and region that its labels name.

use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Kubernetes' label for a node's name.
pub const DEFAULT_HOST_LABEL: &str = "kubernetes.io/hostname";
/// The label by which clouds and batch schedulers mark racks, by convention.
pub const DEFAULT_RACK_LABEL: &str = "topology.kubernetes.io/rack";
/// Kubernetes' label for a zone.
pub const DEFAULT_ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// Kubernetes' label for a region.
pub const DEFAULT_REGION_LABEL: &str = "topology.kubernetes.io/region";

/// The tightest place that two servers share. Later is nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
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

impl Nearness {
    /// All, the nearest first.
    pub const ALL: [Self; 4] = [Self::Host, Self::Rack, Self::Zone, Self::Region];
}

/// Where something stands. Names are kept as hashes: places are only compared, many times for a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// As [`Nearness::ALL`]; 0 is a name that nobody has told, which matches nothing.
    names: [u64; 4],
}

impl Place {
    /// A place by its names, those of [`Nearness::ALL`]; an empty one says nothing.
    #[must_use]
    pub fn named(names: [&str; 4]) -> Self {
        Self { names: names.map(|name| if name.is_empty() { 0 } else { xxh3_64(name.as_bytes()) }) }
    }

    /// Where an endpoint with these labels stands.
    #[must_use]
    pub fn of_labels(labels: &BTreeMap<Arc<str>, Arc<str>>) -> Self {
        let label = |name: &str| labels.get(name).map_or("", |value| &**value);
        Self::named([DEFAULT_HOST_LABEL, DEFAULT_RACK_LABEL, DEFAULT_ZONE_LABEL, DEFAULT_REGION_LABEL].map(label))
    }

    /// Whether anything is known of it.
    #[must_use]
    pub fn is_known(self) -> bool {
        self != Self::default()
    }

    /// The tightest place that both share. Names that lie in different wider places are different things, though they read alike: every zone
    /// may have a rack `r1`.
    #[must_use]
    pub fn nearness(self, other: Place) -> Option<Nearness> {
        let levels = Nearness::ALL.into_iter().zip(self.names.into_iter().zip(other.names)).rev();
        let told = levels.filter(|(_, (a, b))| *a != 0 && *b != 0);
        told.take_while(|(_, (a, b))| a == b).last().map(|(nearness, _)| nearness)
    }
}

/// The places of several servers.
#[derive(Debug, Default)]
pub struct Places {
    /// As in [`Place`]; in order.
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
    /// How near any of them may be to `place`, the nearest first. Costs no look at each of them, and so does not say that wider names are alike.
    pub fn nearnesses(&self, place: Place) -> impl Iterator<Item = Nearness> {
        let levels = Nearness::ALL.into_iter().zip(self.names.iter().zip(place.names));
        levels.filter(|(_, (names, name))| names.binary_search(name).is_ok()).map(|(nearness, _)| nearness)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_place_that_two_share_counts() {
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
    fn a_place_without_names_is_not_known() {
        assert!(Place::named(["", "", "z1", ""]).is_known() && !Place::named([""; 4]).is_known());
    }

    #[test]
    fn how_near_any_of_several_may_be() {
        let all: Places =
            [["h1", "r1", "z1", ""], ["h2", "r2", "z1", ""], [""; 4]].map(Place::named).into_iter().collect();
        let near = |names| all.nearnesses(Place::named(names)).collect::<Vec<_>>();
        assert_eq!(near(["h3", "r2", "z1", "g1"]), [Nearness::Rack, Nearness::Zone]);
        assert_eq!(near(["", "", "z2", ""]), []);
        assert_eq!(near([""; 4]), [], "nothing is known of it");
    }
}
