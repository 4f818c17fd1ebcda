//! A consistent-hash ring over the endpoints of a pool, for strategies that map every prompt to a home endpoint
//! (`chwbl`, `prefix-hash`).
//!
//! Each endpoint has one point per virtual node on the ring. An endpoint that joins takes over keys from others and
//! moves no other key; one that leaves gives away only its own.
//! The ring has all endpoints of the snapshot, so a filter moves only the keys of the endpoints that it removes.

use ahash::AHashMap;
use arc_swap::{ArcSwap, Guard};
use attache_pool::{EndpointState, PoolSnapshot};
use attache_scheduling::candidates::Candidate;
use attache_scheduling::decision::Ranking;
use attache_types::ids::EndpointId;
use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Position of one virtual node on the ring, from the endpoint's name and the node's number.
pub type PointHash = fn(&str, u32) -> u64;

/// The ring of a pool's endpoints, rebuilt when the set of endpoints changes. Readers do not block each other.
#[derive(Debug)]
pub struct SharedRing {
    point: PointHash,
    virtual_nodes: u32,
    current: ArcSwap<Ring>,
    building: Mutex<()>,
}

impl SharedRing {
    /// An empty ring on which every endpoint will have `virtual_nodes` points.
    #[must_use]
    pub fn new(point: PointHash, virtual_nodes: u32) -> Self {
        Self { point, virtual_nodes, current: ArcSwap::default(), building: Mutex::default() }
    }

    /// The ring of the endpoints in `snapshot`.
    pub fn of(&self, snapshot: &PoolSnapshot) -> Guard<Arc<Ring>> {
        let ring = self.current.load();
        if ring.is_of(snapshot) {
            return ring;
        }
        let _one_builder = self.building.lock();
        let before = self.current.load();
        if before.is_of(snapshot) {
            return before;
        }
        let ring = Arc::new(before.moved_to(snapshot, self.point, self.virtual_nodes));
        self.current.store(ring.clone());
        Guard::from_inner(ring)
    }
}

/// The points of all endpoints, in order.
#[derive(Debug, Default)]
pub struct Ring {
    points: Box<[Point]>,
    /// In the order of their ids.
    members: Box<[RingMember]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Point {
    at: u64,
    member: u32,
}

#[derive(Clone, Debug)]
struct RingMember {
    id: EndpointId,
    /// The endpoint's name in discovery.
    name: Arc<str>,
    /// The text that its points are hashed from: its name, plus its address if another endpoint has the same name.
    label: Arc<str>,
}

impl Ring {
    fn is_of(&self, snapshot: &PoolSnapshot) -> bool {
        let same = |(m, s): (&RingMember, &EndpointState)| {
            let name = &s.endpoint.spec.name;
            m.id == s.endpoint.id && (Arc::ptr_eq(&m.name, name) || m.name == *name)
        };
        self.members.len() == snapshot.endpoints.len() && self.members.iter().zip(&snapshot.endpoints).all(same)
    }

    /// The ring of `snapshot`. Points of endpoints that stay are kept; only those of new endpoints are computed.
    fn moved_to(&self, snapshot: &PoolSnapshot, point: PointHash, virtual_nodes: u32) -> Self {
        let members = members(snapshot);
        let old: AHashMap<(EndpointId, &str), usize> =
            self.members.iter().enumerate().map(|(i, m)| ((m.id, &*m.label), i)).collect();
        let mut now_at: Vec<Option<u32>> = vec![None; self.members.len()];
        let mut joined = Vec::new();
        for (at, member) in (0u32..).zip(&members) {
            match old.get(&(member.id, &*member.label)).and_then(|i| now_at.get_mut(*i)) {
                Some(now) => *now = Some(at),
                None => joined.extend((0..virtual_nodes).map(|i| Point { at: point(&member.label, i), member: at })),
            }
        }
        let stays = |p: &Point| {
            let member = now_at.get(p.member as usize).copied().flatten()?;
            Some(Point { at: p.at, member })
        };
        let mut points: Vec<Point> = self.points.iter().filter_map(stays).collect();
        joined.sort_unstable();
        points.append(&mut joined);
        // Both runs are sorted, so the stable sort merges them.
        points.sort();
        Self { points: points.into(), members: members.into() }
    }

    /// Number of distinct points on the ring.
    #[cfg(test)]
    pub(super) fn distinct_points(&self) -> usize {
        self.points.iter().map(|p| p.at).collect::<BTreeSet<_>>().len()
    }

    /// Positions of `candidates` in ring order from `key` on, each once.
    pub fn walk(&self, key: u64, candidates: &[Candidate<'_>]) -> impl Iterator<Item = usize> {
        // Position of each member among the candidates; set to `None` once the walk has returned it.
        let mut places: SmallVec<[Option<u32>; 128]> = smallvec![None; self.members.len()];
        let mut next = 0;
        let mut left = 0usize;
        for (at, candidate) in (0u32..).zip(candidates) {
            let id = candidate.state.endpoint.id;
            // Candidates usually come in the order of their ids, with gaps. Shuffled candidates are found by binary
            // search.
            let here = self.members.get(next).is_some_and(|m| m.id == id);
            let member = if here { Ok(next) } else { self.members.binary_search_by_key(&id, |m| m.id) };
            let Ok(member) = member else { continue };
            next = member + 1;
            if let Some(place) = places.get_mut(member) {
                *place = Some(at);
                left += 1;
            }
        }
        let start = self.points.partition_point(|p| p.at < key);
        let (before, from) = self.points.split_at(start);
        let mut points = from.iter().chain(before);
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let place = points.find_map(|p| places.get_mut(p.member as usize)?.take())?;
            left -= 1;
            Some(place as usize)
        })
    }
}

fn members(snapshot: &PoolSnapshot) -> Vec<RingMember> {
    let mut names = BTreeSet::new();
    let member = |s: &EndpointState| {
        let (name, id) = (s.endpoint.spec.name.clone(), s.endpoint.id);
        let label =
            if names.insert(name.clone()) { name.clone() } else { format!("{name}@{}", s.endpoint.authority).into() };
        RingMember { id, name, label }
    };
    snapshot.endpoints.iter().map(member).collect()
}

/// How an endpoint was found for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingMatch {
    /// The key's first endpoint on the ring has capacity.
    Home,
    /// A later endpoint on the ring has capacity.
    Next,
    /// No endpoint has capacity; the first on the ring is used.
    AllFull,
}

/// Ranks the candidates with capacity in ring order, then the others in ring order.
pub fn rank(
    ring: &Ring,
    key: u64,
    candidates: &[Candidate<'_>],
    ranking: &mut Ranking,
    has_capacity: impl Fn(&Candidate<'_>) -> bool,
) -> RingMatch {
    let fits = |i: &usize| candidates.get(*i).is_some_and(&has_capacity);
    let mut met = ring.walk(key, candidates).peekable();
    let home = met.peek().is_some_and(fits);
    let mut found = RingMatch::AllFull;
    for candidate in met.filter(fits).filter_map(|i| candidates.get(i)) {
        ranking.push(&candidate.state.endpoint);
        found = if home { RingMatch::Home } else { RingMatch::Next };
        if ranking.is_full() {
            return found;
        }
    }
    for candidate in ring.walk(key, candidates).filter_map(|i| candidates.get(i)) {
        ranking.push(&candidate.state.endpoint);
    }
    found
}

/// Sum of the requests of all candidates, and the number of candidates.
#[must_use]
pub fn load(candidates: &[Candidate<'_>]) -> (u64, usize) {
    (candidates.iter().map(|c| u64::from(c.requests)).sum(), candidates.len())
}

#[cfg(test)]
mod tests;
