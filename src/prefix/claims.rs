//! Speculative entries: prompts that were routed and whose responses have not ended. A burst of equal prompts must go
//! to one endpoint before any of them is cached, and engines do not evict blocks that they use.
//!
//! A claim records that a prompt is in flight to an endpoint. It has entries at the depths 1, 2, 4, 8, … blocks and at
//! the prompt's full length: O(log blocks) memory. With [`Claims::at_every_depth`] it has an entry for each of the first
//! 4,096 blocks, as AIBrix's table. Its guard removes it when the response has ended or the request has
//! failed. A claim is ignored when its response has not begun within its lifetime, as when a prefill hangs.

use super::key::{BlockKey, BlockKeys};
use ahash::RandomState;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use dashmap::DashMap;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;
use std::time::Duration;

/// Default lifetime of a claim, 30 s: longer than the prefill of 100,000 tokens behind a full queue, shorter than
/// the restart of a server.
pub const DEFAULT_CLAIM_LIFE: Duration = Duration::from_secs(30);

/// 4,096 blocks: up to here, claims at every depth have an entry for each block.
const MAX_EVERY_DEPTH: usize = 4_096;

/// Number of keys requested first; doubled as long as claims are found.
const FIRST_LOOK: usize = 16;

#[derive(Clone, Copy, Debug)]
struct Claimed {
    endpoint: EndpointId,
    requests: u32,
    /// Number of claims whose prompt the endpoint has computed; they do not expire.
    arrived: u32,
    latest: Timestamp,
}

type ClaimTable = DashMap<u64, SmallVec<[Claimed; 1]>, RandomState>;

/// All claims of a pool.
#[derive(Debug)]
pub struct Claims {
    table: Arc<ClaimTable>,
    life: Duration,
    seed: u64,
    /// See [`Claims::at_every_depth`].
    every_depth: bool,
}

/// The claim of one request; Drop removes it.
#[derive(Debug)]
pub struct Claim {
    table: Arc<ClaimTable>,
    endpoint: EndpointId,
    points: SmallVec<[u64; 16]>,
    arrived: bool,
}

/// Depth of the claims of each endpoint, in blocks. Its size follows the number of endpoints with claims, not their
/// ids: ids are never reused, so ids of one pool can be far apart.
#[derive(Clone, Debug, Default)]
pub struct ClaimedDepths {
    /// Hash table with linear probing: endpoint id and depth; depth 0 marks a free slot. Its length is a power of two,
    /// and at least half of it is free.
    places: SmallVec<[(u32, u32); 8]>,
    claimants: usize,
    deepest: u32,
}

impl ClaimedDepths {
    /// Returns the depth of an endpoint's claims in blocks; 0 when it has none.
    #[inline]
    #[must_use]
    pub fn get(&self, endpoint: EndpointId) -> u32 {
        self.places.get(self.place(endpoint.0)).map_or(0, |(_, depth)| *depth)
    }

    /// Returns the depth of the deepest claim, in blocks.
    #[must_use]
    pub fn deepest(&self) -> u32 {
        self.deepest
    }

    /// The slot of an id, or the free slot where it would go.
    #[inline]
    fn place(&self, id: u32) -> usize {
        let last = self.places.len().wrapping_sub(1);
        // Fibonacci hashing spreads ids that follow each other.
        let mut at = ((u64::from(id.wrapping_mul(0x9E37_79B9)) * self.places.len() as u64) >> 32) as usize;
        while self.places.get(at).is_some_and(|(there, depth)| *depth > 0 && *there != id) {
            at = (at + 1) & last;
        }
        at
    }

    /// Adds the endpoints that have claims of `depth` blocks and were not added at a greater
    /// depth before; at most `most`.
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
    /// An empty table whose claims live for `life`. Equal seeds give equal tables.
    #[must_use]
    pub fn new(life: Duration, seed: u64) -> Self {
        let hasher = RandomState::with_seeds(seed, seed.rotate_left(17), !seed, seed ^ 0xC1A1_4D5E);
        Self { table: Arc::new(DashMap::with_hasher(hasher)), life, seed, every_depth: false }
    }

    /// The same, whose claims match a prompt to the block.
    #[must_use]
    pub fn at_every_depth(self) -> Self {
        Self { every_depth: true, ..self }
    }

    /// Whether claims of longer prompts have an entry at this depth.
    fn has_entry(&self, depth: usize) -> bool {
        depth.is_power_of_two() || self.every_depth && depth <= MAX_EVERY_DEPTH
    }

    /// Claims these first blocks of a prompt for `endpoint` until the guard is dropped.
    #[must_use]
    pub fn claim(&self, endpoint: EndpointId, keys: &[BlockKey], now: Timestamp) -> Claim {
        let mut points = SmallVec::new();
        let mut chain = self.seed;
        for (depth, key) in (1usize..).zip(keys) {
            chain = step(chain, depth, *key);
            if self.has_entry(depth) || depth == keys.len() {
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

    /// Returns how deep live claims match this prompt. Requests no more keys than claims can match.
    #[must_use]
    pub fn lookup<K: BlockKeys>(&self, keys: &mut K, now: Timestamp) -> ClaimedDepths {
        let mut out = ClaimedDepths::default();
        // The deepest first: an endpoint that has claims there has them at all points before it.
        for (point, depth) in self.points(keys).into_iter().rev() {
            let Some(here) = self.table.get(&point).filter(|here| here.len() > out.claimants) else { continue };
            let living = here.iter().filter(|c| c.arrived > 0 || now.since(c.latest) <= self.life);
            out.add(depth, here.len(), living.map(|c| c.endpoint));
        }
        out
    }

    /// The points of this prompt that have claims, with their depths.
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
                let has_entry = self.has_entry(depth);
                if !has_entry && !whole {
                    continue;
                }
                if self.table.contains_key(&chain) {
                    points.push((chain, u32::try_from(depth).unwrap_or(u32::MAX)));
                } else if has_entry {
                    // A claim at a shorter prompt's full length does not end the search; a depth without one does.
                    return points;
                }
            }
            if last_look {
                return points;
            }
            want *= 2;
        }
    }

    /// Returns the number of claimed points; 0 when no prompt is in flight.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether no prompt is in flight.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }
}

impl Claim {
    /// Marks the prompt as computed: the claim no longer expires.
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

/// Adds the key at `depth` to the hash of a prefix. Keys are hashes already, so this only has to encode their order.
/// The multiplications do not depend on each other.
pub(super) fn step(chain: u64, depth: usize, key: BlockKey) -> u64 {
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
    fn equal_prompt_matches_its_whole_length_until_the_claim_ends() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7);
        let keys = prompt(100, 1);
        let first = claims.claim(A, &keys, NOW);
        let second = claims.claim(A, &keys, NOW);
        let third = claims.claim(B, &keys, NOW);
        assert_eq!(found(&claims, &keys, NOW), [(A, 100), (B, 100)]);
        drop(first);
        drop(third);
        assert_eq!(found(&claims, &keys, NOW), [(A, 100)], "the second request is still in flight");
        drop(second);
        assert_eq!((found(&claims, &keys, NOW), claims.len()), (vec![], 0), "the table is empty");
    }

    #[test]
    fn claims_at_every_depth_match_to_the_block() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7).at_every_depth();
        let keys = prompt(100, 1);
        let claim = claims.claim(A, &keys, NOW);
        for shared in [1, 3, 40, 63, 64, 65, 99, 100] {
            let mut other = keys[..shared].to_vec();
            other.extend(prompt(50, 2));
            assert_eq!(found(&claims, &other, NOW), [(A, shared as u32)]);
            assert_eq!(found(&claims, &keys[..shared], NOW), [(A, shared as u32)]);
        }
        assert_eq!(found(&claims, &prompt(100, 2), NOW), []);
        let long = prompt(3 * MAX_EVERY_DEPTH as u64, 3);
        let beyond = claims.claim(B, &long, NOW);
        assert_eq!(found(&claims, &long[..MAX_EVERY_DEPTH - 1], NOW), [(B, MAX_EVERY_DEPTH as u32 - 1)]);
        assert_eq!(found(&claims, &long, NOW), [(B, long.len() as u32)]);
        drop((claim, beyond));
        assert!(claims.is_empty(), "nothing is left");
    }

    #[test]
    fn common_prefix_matches_at_the_power_of_two_below_it() {
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
    fn expired_claim_is_ignored() {
        let claims = Claims::new(Duration::from_secs(2), 7);
        let keys = prompt(10, 1);
        let _claim = claims.claim(A, &keys, NOW);
        assert_eq!(found(&claims, &keys, NOW.after(Duration::from_secs(2))), [(A, 10)]);
        assert_eq!(found(&claims, &keys, NOW.after(Duration::from_secs(3))), []);
    }

    #[test]
    fn thousand_endpoints_with_one_system_prompt_have_their_own_depths() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7);
        let keys = prompt(600, 1);
        // Ids alternate around a middle, and one is far away.
        let ids = (0..1_000).map(|i| if i % 2 == 0 { 5_000 + i } else { 5_000 - i }).chain([20_000]);
        let shared = |id: u32| 1usize << (id % 10);
        let _held: Vec<_> = ids
            .clone()
            .map(|id| {
                let own: Vec<_> = keys[..shared(id)].iter().copied().chain(prompt(50, u64::from(id) + 2)).collect();
                claims.claim(EndpointId(id), &own, NOW.after(Duration::from_secs(40)))
            })
            .collect();
        // Expired claims of hanging prefills hide none of the live ones.
        let _hung: Vec<_> = (0..500).map(|i| claims.claim(EndpointId(5_000 + 2 * i), &keys, NOW)).collect();
        let found = claims.lookup(&mut keys.as_slice(), NOW.after(Duration::from_secs(40)));
        for id in ids {
            assert_eq!(found.get(EndpointId(id)) as usize, shared(id), "{id}");
        }
        assert_eq!([0, 5_001, 19_999, 20_001].map(|id| found.get(EndpointId(id))), [0; 4]);
        assert_eq!((found.deepest(), found.claimants), (512, 1_001));
    }

    #[test]
    fn endpoints_that_left_take_no_slots() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7);
        let keys = prompt(600, 1);
        // One endpoint that was there from the start, and pools that were replaced again and again.
        let ids: Vec<u32> = (0..8).map(|i| i * 400_000_000).chain([u32::MAX]).collect();
        let _held: Vec<_> = ids.iter().map(|id| claims.claim(EndpointId(*id), &keys, NOW)).collect();
        let found = claims.lookup(&mut keys.as_slice(), NOW);
        assert!(ids.iter().all(|id| found.get(EndpointId(*id)) == 600 && found.get(EndpointId(id ^ 1)) == 0));
        assert!(found.places.len() <= 32, "{} places for {} claimants", found.places.len(), ids.len());
    }

    proptest! {
        /// Endpoints with claims are found, others have depth 0, and the table has at most four slots for each of them.
        #[test]
        fn depth_is_that_of_the_deepest_claim(
            ids in prop::collection::btree_map(
                prop_oneof![0u32..40, (0u32..40).prop_map(|i| i << 26), any::<u32>()],
                1u32..5,
                0..80,
            ),
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
            let deepest = ids.values().max().copied().unwrap_or(0);
            prop_assert_eq!((depths.claimants, depths.deepest()), (ids.len(), deepest));
            prop_assert!(depths.places.len() <= 4 * ids.len());
        }
    }

    /// Keys that count how many of them were requested.
    struct Counted<'a>(&'a [BlockKey], usize);

    impl BlockKeys for Counted<'_> {
        fn upto(&mut self, n: usize) -> &[BlockKey] {
            self.1 = self.1.max(n.min(self.0.len()));
            &self.0[..self.1]
        }
    }

    #[test]
    fn lookup_without_claims_requests_few_keys() {
        let claims = Claims::new(DEFAULT_CLAIM_LIFE, 7);
        let cold = prompt(1_000, 1);
        let mut keys = Counted(&cold, 0);
        assert_eq!(claims.lookup(&mut keys, NOW).deepest(), 0);
        assert_eq!(keys.1, FIRST_LOOK, "the first point has no claim");
        let _other = claims.claim(A, &prompt(1_000, 2), NOW);
        assert_eq!(claims.lookup(&mut keys, NOW).deepest(), 0);
        assert_eq!(keys.1, FIRST_LOOK);
    }
}
