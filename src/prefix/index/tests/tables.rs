//! The writer's hash map without memory for another page.

use crate::index::arena::{Arena, Space};
use crate::index::children::spread;
use crate::index::table::{NoRoom, WordTable};

/// Memory of one chunk, of which a table gets seven pages.
const BYTES: usize = 20 << 10;

/// Inserts keys, each as its own value, until memory is exhausted. Returns the first refused key.
fn fill(table: &mut WordTable, arena: &Arena, space: &mut Space, from: u64) -> u64 {
    let refused = |key: &u64| table.set(arena, space, spread(*key), *key) == Err(NoRoom);
    (from..).find(refused).unwrap_or(from)
}

#[test]
fn kept_entries_stay_without_memory_for_a_split() {
    let arena = Arena::new(BYTES);
    let (mut space, mut table) = (Space::new(&arena), WordTable::new(1 << 10, 5));
    let mut held = std::collections::BTreeSet::new();
    let mut next = 1;
    for round in 0..200 {
        let end = fill(&mut table, &arena, &mut space, next);
        held.extend(next..end);
        next = end + 1;
        // Removes one entry of some pages, then most entries of most pages.
        let is_chosen = |key: &u64, of: u64| spread(key ^ round).is_multiple_of(of);
        held.retain(|key| if round % 10 == 9 { is_chosen(key, 8) } else { !is_chosen(key, 300) });
        let mut entry = Some(0);
        while let Some(at) = entry {
            entry = table.retain_page(&arena, &mut space, at, |value| held.contains(&value));
        }
        let lost: Vec<u64> = held.iter().copied().filter(|key| table.get(&arena, spread(*key)) != Some(*key)).collect();
        assert_eq!((lost, table.len()), (vec![], held.len()), "round {round}");
    }
}
