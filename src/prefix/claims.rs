//! What was routed and is not answered to its end yet: a burst of equal prompts must land together before anybody has cached the first, and
//! what an engine works with it does not evict.
//!
//! A claim says "this prompt is on its way to that endpoint, or in use there" at the depths 1, 2, 4, 8, … blocks and at its whole length, so it
//! costs O(log blocks) however long the prompt is. It goes with its guard: when the answer has ended, or when the request has failed. A claim whose
//! answer does not begin for long (its prefill hangs) says nothing any more.

use super::key::{BlockKey, BlockKeys};
use ahash::RandomState;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use dashmap::DashMap;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;
use std::time::Duration;

/// 30 s: longer than the prefill of a prompt of 100,000 tokens behind a full queue, shorter than a server takes to come back.
pub const DEFAULT_CLAIM_LIFE: Duration = Duration::from_secs(30);

/// Blocks asked for at first; doubled as long as there are claims.
const FIRST_LOOK: usize = 16;

#[derive(Clone, Copy, Debug)]
struct Claimed {
    endpoint: EndpointId,
    requests: u32,
    /// Those of them that the endpoint works with: they do not get old.
    arrived: u32,
    latest: Timestamp,
}

type Table = DashMap<u64, SmallVec<[Claimed; 1]>, RandomState>;

/// All claims of a pool.
#[derive(Debug)]
pub struct Claims {
    table: Arc<Table>,
    life: Duration,
    seed: u64,
}

/// One request's claim; ends on Drop.
#[derive(Debug)]
pub struct Claim {
    table: Arc<Table>,
    endpoint: EndpointId,
    points: SmallVec<[u64; 16]>,
    arrived: bool,
}

/// How deep the claims of each endpoint go, in blocks. As large as there are claimants, whatever their ids are: these are never given out
/// again, so that in a long life those of one pool lie far apart.
#[derive(Clone, Debug, Default)]
pub struct ClaimedDepths {
    /// Id and depth, at the id's place or in the next free one behind it; 0 deep where there is none. A power of two of them, of which half
    /// are free at least.
    places: SmallVec<[(u32, u32); 8]>,
    claimants: usize,
    deepest: u32,
}

impl ClaimedDepths {
    /// How deep the claims of an endpoint go; 0 when it has none.
    #[inline]
    #[must_use]
    pub fn get(&self, endpoint: EndpointId) -> u32 {
        self.places.get(self.place(endpoint.0)).map_or(0, |(_, depth)| *depth)
    }

    /// How deep the deepest claim goes.
    #[must_use]
    pub fn deepest(&self) -> u32 {
        self.deepest
    }

    /// Where an id is, or would be.
    #[inline]
    fn place(&self, id: u32) -> usize {
        let last = self.places.len().wrapping_sub(1);
        // Fibonacci hashing: ids in a row lie far from each other, and so do those of several rows.
        let mut at = ((u64::from(id.wrapping_mul(0x9E37_79B9)) * self.places.len() as u64) >> 32) as usize;
        while self.places.get(at).is_some_and(|(there, depth)| *depth > 0 && *there != id) {
            at = (at + 1) & last;
        }
        at
    }

    /// Takes in who has claims that are `depth` deep and not deeper than those taken in before, `most` at most.
    fn add(&mut self, depth: u32, most: usize, endpoints: impl Iterator<Item = EndpointId>) {
        for endpoint in endpoints {
            if self.get(endpoint) > 0 {
                continue;
            }
            if 2 * (self.claimants + 1) > self.places.len() {
                let room = (2 * most.max(self.claimants + 1)).next_power_of_two();
                let before = std::mem::replace(&mut self.places, smallvec![(0, 0); room]);
                before.into_iter().filter(|(_, depth)| *depth > 0).for_each(|entry| self.put(entry));
            }
            self.put((endpoint.0, depth));
            self.claimants += 1;
            self.deepest = self.deepest.max(depth);
        }
    }

    fn put(&mut self, entry: (u32, u32)) {
        let at = self.place(entry.0);
        if let Some(place) = self.places.get_mut(at) {
            *place = entry;
        }
    }
}

impl Claims {
    /// None yet; each lives for `life`. Equal seeds give equal tables.
    #[must_use]
    pub fn new(life: Duration, seed: u64) -> Self {
        let hasher = RandomState::with_seeds(seed, seed.rotate_left(17), !seed, seed ^ 0xC1A1_4D5E);
        Self { table: Arc::new(DashMap::with_hasher(hasher)), life, seed }
    }

    /// Says that a prompt with these first blocks is on its way to `endpoint`, until Drop.
    #[must_use]
    pub fn claim(&self, endpoint: EndpointId, keys: &[BlockKey], now: Timestamp) -> Claim {
        let mut points = SmallVec::new();
        let mut chain = self.seed;
        for (depth, key) in (1usize..).zip(keys) {
            chain = step(chain, depth, *key);
            if depth.is_power_of_two() || depth == keys.len() {
                points.push(chain);
            }
        }
        for point in &points {
            let mut here = self.table.entry(*point).or_default();
            match here.iter_mut().find(|c| c.endpoint == endpoint) {
                Some(c) => {
                    c.requests += 1;
                    c.latest = c.latest.max(now);
                }
                None => here.push(Claimed { endpoint, requests: 1, arrived: 0, latest: now }),
            }
        }
        Claim { table: self.table.clone(), endpoint, points, arrived: false }
    }

    /// How deep the living claims on the beginning of this prompt go. Asks for no more keys than there are claims for.
    #[must_use]
    pub fn lookup<K: BlockKeys>(&self, keys: &mut K, now: Timestamp) -> ClaimedDepths {
        let mut out = ClaimedDepths::default();
        // The deepest first: whoever has claims there has them at all points before it.
        for (point, depth) in self.points(keys).into_iter().rev() {
            let Some(here) = self.table.get(&point).filter(|here| here.len() > out.claimants) else { continue };
            let living = here.iter().filter(|c| c.arrived > 0 || now.since(c.latest) <= self.life);
            out.add(depth, here.len(), living.map(|c| c.endpoint));
        }
        out
    }

    /// The points of this prompt that somebody claims, with their depths.
    fn points<K: BlockKeys>(&self, keys: &mut K) -> SmallVec<[(u64, u32); 16]> {
        let mut points = SmallVec::new();
        let mut chain = self.seed;
        let mut depth = 0usize;
        let mut want = FIRST_LOOK;
        loop {
            let made = keys.upto(want);
            let last_look = made.len() < want;
            let total = made.len();
            for key in made.iter().take(want).skip(depth) {
                depth += 1;
                chain = step(chain, depth, *key);
                let whole = last_look && depth == total;
                if !depth.is_power_of_two() && !whole {
                    continue;
                }
                if self.table.contains_key(&chain) {
                    points.push((chain, u32::try_from(depth).unwrap_or(u32::MAX)));
                } else if depth.is_power_of_two() {
                    // A shorter prompt's claim at its whole length is no reason to stop at the next power of two, but the one before is.
                    return points;
                }
            }
            if last_look {
                return points;
            }
            want *= 2;
        }
    }

    /// Points in the table; 0 when nothing is on its way or in use.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether nothing is on its way or in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }
}

impl Claim {
    /// The endpoint works with the prompt: the claim gets old no more.
    pub fn arrived(&mut self) {
        if std::mem::replace(&mut self.arrived, true) {
            return;
        }
        for point in &self.points {
            if let Some(mut here) = self.table.get_mut(point)
                && let Some(c) = here.iter_mut().find(|c| c.endpoint == self.endpoint)
            {
                c.arrived += 1;
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        for point in &self.points {
            self.table.remove_if_mut(point, |_, here| {
                if let Some(c) = here.iter_mut().find(|c| c.endpoint == self.endpoint) {
                    c.requests -= 1;
                    c.arrived -= u32::from(self.arrived);
                }
                here.retain(|c| c.requests > 0);
                here.is_empty()
            });
        }
    }
}

/// Adds one more key, the one at `depth`, to the identity of a beginning. Keys are hashes already; this only has to keep their order, and the
/// sums do not wait for each other's multiplications.
fn step(chain: u64, depth: usize, key: BlockKey) -> u64 {
    chain.wrapping_add((key.0 ^ 0x9E37_79B9_7F4A_7C15).wrapping_mul(2 * depth as u64 + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Timestamp = Timestamp(1_000_000_000);
    const A: EndpointId = EndpointId(1);
    const B: EndpointId = EndpointId(2);

    fn prompt(length: u64, salt: u64) -> Vec<BlockKey> {
        (0..length).map(|i| BlockKey(xxhash_rust::xxh3::xxh3_64_with_seed(&i.to_le_bytes(), salt))).collect()
    }

    fn found(claims: &Claims, keys: &[BlockKey], now: Timestamp) -> Vec<(EndpointId, u32)> {
        let depths = claims.lookup(&mut &*keys, now);
        [A, B].map(|e| (e, depths.get(e))).into_iter().filter(|(_, depth)| *depth > 0).collect()
    }

    #[test]
    fn an_equal_prompt_is_found_at_its_whole_length_until_the_claim_ends() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7);
        let keys = prompt(100, 1);
        let first = claims.claim(A, &keys, NOW);
        let second = claims.claim(A, &keys, NOW);
        let third = claims.claim(B, &keys, NOW);
        assert_eq!(found(&claims, &keys, NOW), [(A, 100), (B, 100)]);
        drop(first);
        drop(third);
        assert_eq!(found(&claims, &keys, NOW), [(A, 100)], "the second request is still on its way");
        drop(second);
        assert_eq!((found(&claims, &keys, NOW), claims.len()), (vec![], 0), "nothing is left behind");
    }

    #[test]
    fn a_common_beginning_is_found_at_the_power_of_two_below_it() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7);
        let keys = prompt(100, 1);
        let _claim = claims.claim(A, &keys, NOW);
        let mut other = keys[..40].to_vec();
        other.extend(prompt(50, 2));
        assert_eq!(found(&claims, &other, NOW), [(A, 32)]);
        assert_eq!(found(&claims, &prompt(100, 2), NOW), []);
        let longer: Vec<_> = keys.iter().copied().chain(prompt(5, 3)).collect();
        assert_eq!(found(&claims, &longer, NOW), [(A, 64)]);
    }

    #[test]
    fn an_old_claim_says_nothing() {
        let claims = Claims::new(Duration::from_secs(2), 7);
        let keys = prompt(10, 1);
        let _claim = claims.claim(A, &keys, NOW);
        assert_eq!(found(&claims, &keys, NOW.after(Duration::from_secs(2))), [(A, 10)]);
        assert_eq!(found(&claims, &keys, NOW.after(Duration::from_secs(3))), []);
    }

    #[test]
    fn a_thousand_endpoints_with_one_system_prompt_each_have_their_own_depth() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7);
        let keys = prompt(600, 1);
        // From the middle outwards, and one of them far off.
        let ids = (0..1_000).map(|i| if i % 2 == 0 { 5_000 + i } else { 5_000 - i }).chain([20_000]);
        let shared = |id: u32| 1usize << (id % 10);
        let _held: Vec<_> = ids
            .clone()
            .map(|id| {
                let own: Vec<_> = keys[..shared(id)].iter().copied().chain(prompt(50, u64::from(id) + 2)).collect();
                claims.claim(EndpointId(id), &own, NOW.after(Duration::from_secs(40)))
            })
            .collect();
        // Those that hang longer than a claim lives hide none.
        let _hung: Vec<_> = (0..500).map(|i| claims.claim(EndpointId(5_000 + 2 * i), &keys, NOW)).collect();
        let found = claims.lookup(&mut keys.as_slice(), NOW.after(Duration::from_secs(40)));
        for id in ids {
            assert_eq!(found.get(EndpointId(id)) as usize, shared(id), "{id}");
        }
        assert_eq!([0, 5_001, 19_999, 20_001].map(|id| found.get(EndpointId(id))), [0; 4]);
        assert_eq!((found.deepest(), found.claimants), (512, 1_001));
    }

    #[test]
    fn endpoints_that_came_and_went_make_no_room_for_themselves() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7);
        let keys = prompt(600, 1);
        // One that has been there for ever, and pools that were replaced again and again since.
        let ids: Vec<u32> = (0..8).map(|i| i * 400_000_000).chain([u32::MAX]).collect();
        let _held: Vec<_> = ids.iter().map(|id| claims.claim(EndpointId(*id), &keys, NOW)).collect();
        let found = claims.lookup(&mut keys.as_slice(), NOW);
        assert!(ids.iter().all(|id| found.get(EndpointId(*id)) == 600 && found.get(EndpointId(id ^ 1)) == 0));
        assert!(found.places.len() <= 32, "{} places for {} claimants", found.places.len(), ids.len());
    }

    proptest! {
        /// Whoever claims is found, whoever else asks has nothing, and no more room is taken than four times as many.
        #[test]
        fn depths_are_those_of_the_deepest_claim(
            ids in prop::collection::btree_map(prop_oneof![0u32..40, (0u32..40).prop_map(|i| i << 26), any::<u32>()], 1u32..5, 0..80),
            others in prop::collection::vec(any::<u32>(), 20),
        ) {
            let mut depths = ClaimedDepths::default();
            for depth in (1..5).rev() {
                let here = || ids.iter().filter(|(_, own)| **own >= depth).map(|(id, _)| EndpointId(*id));
                depths.add(depth, here().count(), here());
            }
            for id in ids.keys().chain(&others) {
                prop_assert_eq!(depths.get(EndpointId(*id)), ids.get(id).copied().unwrap_or(0));
            }
            prop_assert_eq!((depths.claimants, depths.deepest()), (ids.len(), ids.values().max().copied().unwrap_or(0)));
            prop_assert!(depths.places.len() <= 4 * ids.len());
        }
    }

    /// Keys that count how far they were asked for.
    struct Counted<'a>(&'a [BlockKey], usize);

    impl BlockKeys for Counted<'_> {
        fn upto(&mut self, n: usize) -> &[BlockKey] {
            self.1 = self.1.max(n.min(self.0.len()));
            &self.0[..self.1]
        }
    }

    #[test]
    fn a_cold_prompt_is_not_hashed_to_its_end() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7);
        let cold = prompt(1_000, 1);
        let mut keys = Counted(&cold, 0);
        assert_eq!(claims.lookup(&mut keys, NOW).deepest(), 0);
        assert_eq!(keys.1, FIRST_LOOK, "the first point is nobody's");
        let _other = claims.claim(A, &prompt(1_000, 2), NOW);
        assert_eq!(claims.lookup(&mut keys, NOW).deepest(), 0);
        assert_eq!(keys.1, FIRST_LOOK);
    }
}
