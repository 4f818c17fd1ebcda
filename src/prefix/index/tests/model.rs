//! A simple model of the index, one map per holder, for comparison with the real one.

use crate::index::{Blocks, Depth, StoredBlock, Tier, UnknownParent};
use crate::key::{BlockKey, EngineHash};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const ROOT: u64 = 0;
const GUESS: usize = 3;

fn place(parent: u64, key: BlockKey) -> u64 {
    xxh3_64_with_seed(&key.0.to_le_bytes(), parent)
}

#[derive(Debug)]
struct Held {
    /// By tier, the estimated blocks last: block position to number of copies.
    places: [HashMap<u64, u32>; 4],
    names: HashMap<EngineHash, u64>,
    /// Last use and depth of estimated blocks.
    used: HashMap<u64, (u64, u32)>,
    capacity: u32,
}

impl Default for Held {
    fn default() -> Self {
        Self { places: Default::default(), names: HashMap::new(), used: HashMap::new(), capacity: u32::MAX }
    }
}

#[derive(Debug, Default)]
pub(super) struct Model {
    holders: BTreeMap<usize, Held>,
    uses: u64,
}

impl Model {
    pub(super) fn add(&mut self, holder: usize) {
        self.holders.insert(holder, Held::default());
    }

    pub(super) fn clear(&mut self, holder: usize) {
        if let Some(held) = self.holders.get_mut(&holder) {
            *held = Held { capacity: held.capacity, ..Held::default() };
        }
    }

    fn places(&self, holder: usize, name: EngineHash) -> BTreeSet<u64> {
        if let Some(own) = self.holders[&holder].names.get(&name) {
            return BTreeSet::from([*own]);
        }
        self.holders.values().filter_map(|h| h.names.get(&name)).copied().collect()
    }

    /// Whether the holder has reported a name.
    pub(super) fn knows(&self, holder: usize, name: EngineHash) -> bool {
        self.holders[&holder].names.contains_key(&name)
    }

    pub(super) fn store(
        &mut self,
        holder: usize,
        tier: Tier,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
    ) -> Result<(), UnknownParent> {
        let mut at = match parent {
            None => ROOT,
            Some(p) => self.places(holder, p).pop_first().ok_or(UnknownParent)?,
        };
        let held = self.holders.get_mut(&holder).unwrap();
        for block in blocks {
            at = place(at, block.key);
            held.names.insert(block.hash, at);
            *held.places[tier as usize].entry(at).or_default() += 1;
        }
        Ok(())
    }

    pub(super) fn copy(&mut self, holder: usize, tier: Tier, names: &[EngineHash]) -> usize {
        let held = self.holders.get_mut(&holder).unwrap();
        let known: Vec<u64> = names.iter().map_while(|name| held.names.get(name).copied()).collect();
        for at in &known {
            *held.places[tier as usize].entry(*at).or_default() += 1;
        }
        known.len()
    }

    pub(super) fn remove(&mut self, holder: usize, tier: Tier, hashes: &[EngineHash]) {
        let held = self.holders.get_mut(&holder).unwrap();
        for hash in hashes {
            let Some(at) = held.names.get(hash).copied() else { continue };
            if let Some(copies) = held.places[tier as usize].get_mut(&at) {
                *copies -= 1;
                if *copies == 0 {
                    held.places[tier as usize].remove(&at);
                }
            }
            if held.places.iter().take(GUESS).all(|p| !p.contains_key(&at)) {
                held.names.remove(hash);
            }
        }
    }

    pub(super) fn record(&mut self, holder: usize, keys: &[BlockKey]) {
        self.uses += 1;
        let held = self.holders.get_mut(&holder).unwrap();
        let mut at = ROOT;
        for (depth, key) in keys.iter().enumerate() {
            at = place(at, *key);
            held.places[GUESS].insert(at, 1);
            held.used.insert(at, (self.uses, depth as u32));
        }
        held.evict();
    }

    pub(super) fn set_capacity(&mut self, holder: usize, blocks: u32) {
        let held = self.holders.get_mut(&holder).unwrap();
        held.capacity = blocks;
        held.evict();
    }

    pub(super) fn depth(&self, holder: usize, keys: &[BlockKey]) -> Depth {
        let held = &self.holders[&holder];
        let mut depth = Depth::default();
        let mut alive = [true; 3];
        let mut at = ROOT;
        for key in keys {
            at = place(at, *key);
            let has = |tiers: &[usize]| tiers.iter().any(|t| held.places[*t].contains_key(&at));
            for (level, tiers) in [[0, GUESS].as_slice(), &[0, GUESS, 1], &[0, GUESS, 1, 2]].iter().enumerate() {
                alive[level] &= has(tiers);
            }
            depth.gpu += u32::from(alive[0]);
            depth.cpu += u32::from(alive[1]);
            depth.any += u32::from(alive[2]);
            if !alive[2] {
                break;
            }
        }
        depth
    }

    pub(super) fn held(&self, holder: usize, tier: Tier) -> BTreeSet<EngineHash> {
        let held = &self.holders[&holder];
        let on_tier = &held.places[tier as usize];
        held.names.iter().filter(|(_, at)| on_tier.contains_key(at)).map(|(n, _)| *n).collect()
    }

    pub(super) fn blocks(&self, holder: usize) -> Blocks {
        let [gpu, cpu, disk, guessed] = std::array::from_fn(|t| self.holders[&holder].places[t].len() as u32);
        Blocks { gpu, cpu, disk, guessed }
    }

    /// Number of distinct blocks with a holder.
    pub(super) fn distinct(&self) -> usize {
        let all = self.holders.values().flat_map(|h| h.places.iter().flat_map(HashMap::keys));
        all.collect::<BTreeSet<_>>().len()
    }
}

impl Held {
    /// Evicts the least recently used blocks first; of equally old ones, the deepest.
    fn evict(&mut self) {
        while self.places[GUESS].len() > self.capacity as usize {
            let oldest = self.used.iter().min_by_key(|(_, (used, depth))| (*used, std::cmp::Reverse(*depth)));
            let at = *oldest.unwrap().0;
            self.used.remove(&at);
            self.places[GUESS].remove(&at);
        }
    }
}
