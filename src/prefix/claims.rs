//! What was just routed and has not answered yet: a burst of equal prompts must land together before anybody has cached the first.
//!
//! A claim says "this prompt is on its way to that endpoint" at the depths 1, 2, 4, 8, … blocks and at its whole length, so it costs
//! O(log blocks) however long the prompt is. It goes with its guard: when the first answer has come and the index knows better, or
//! when the request has failed. A claim that got old (its prefill hangs) says nothing any more.

use super::key::{BlockKey, BlockKeys};
use crate::clock::Timestamp;
use crate::ids::EndpointId;
use ahash::RandomState;
use dashmap::DashMap;
use smallvec::SmallVec;
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
}

/// How deep the claims of each endpoint go, in blocks.
pub type ClaimedDepths = SmallVec<[(EndpointId, u32); 4]>;

impl Claims {
    /// None yet; each lives for `life`. Equal seeds give equal tables.
    #[must_use]
    pub fn new(life: Duration, seed: u64) -> Self {
        let hasher = RandomState::with_seeds(seed, seed.rotate_left(17), !seed, seed ^ 0xC1A1_4D5E);
        Self { table: Arc::new(DashMap::with_hasher(hasher)), life, seed }
    }

    /// Says that a prompt with these first blocks is on its way to `endpoint`.
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
                None => here.push(Claimed { endpoint, requests: 1, latest: now }),
            }
        }
        Claim { table: self.table.clone(), endpoint, points }
    }

    /// How deep the living claims on the beginning of this prompt go. Asks for no more keys than there are claims for.
    pub fn lookup<K: BlockKeys>(&self, keys: &mut K, now: Timestamp, out: &mut ClaimedDepths) {
        out.clear();
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
                // A shorter prompt's claim at its whole length is no reason to stop at the next power of two, but the one before is.
                if !self.add(chain, depth, now, out) && depth.is_power_of_two() {
                    return;
                }
            }
            if last_look {
                return;
            }
            want *= 2;
        }
    }

    fn add(&self, point: u64, depth: usize, now: Timestamp, out: &mut ClaimedDepths) -> bool {
        let Some(here) = self.table.get(&point) else { return false };
        let depth = u32::try_from(depth).unwrap_or(u32::MAX);
        for claimed in here.iter().filter(|c| now.since(c.latest) <= self.life) {
            match out.iter_mut().find(|(e, _)| *e == claimed.endpoint) {
                Some((_, deepest)) => *deepest = depth,
                None => out.push((claimed.endpoint, depth)),
            }
        }
        true
    }

    /// Points in the table; 0 when nothing is on its way.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether nothing is on its way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        for point in &self.points {
            self.table.remove_if_mut(point, |_, here| {
                if let Some(c) = here.iter_mut().find(|c| c.endpoint == self.endpoint) {
                    c.requests -= 1;
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

    const NOW: Timestamp = Timestamp(1_000_000_000);
    const A: EndpointId = EndpointId(1);
    const B: EndpointId = EndpointId(2);

    fn prompt(length: u64, salt: u64) -> Vec<BlockKey> {
        (0..length).map(|i| BlockKey(xxhash_rust::xxh3::xxh3_64_with_seed(&i.to_le_bytes(), salt))).collect()
    }

    fn found(claims: &Claims, keys: &[BlockKey], now: Timestamp) -> Vec<(EndpointId, u32)> {
        let mut out = ClaimedDepths::new();
        claims.lookup(&mut &*keys, now, &mut out);
        out.into_vec()
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
        let mut out = ClaimedDepths::new();
        let cold = prompt(1_000, 1);
        let mut keys = Counted(&cold, 0);
        claims.lookup(&mut keys, NOW, &mut out);
        assert_eq!(keys.1, FIRST_LOOK, "the first point is nobody's");
        let _other = claims.claim(A, &prompt(1_000, 2), NOW);
        claims.lookup(&mut keys, NOW, &mut out);
        assert_eq!(keys.1, FIRST_LOOK);
    }
}
