use super::*;
use proptest::prelude::*;

const SECOND: u64 = 1_000_000_000;
const A: EndpointId = EndpointId(1);
const B: EndpointId = EndpointId(2);

fn at(seconds: u64) -> Timestamp {
    Timestamp(seconds * SECOND)
}

fn carried() -> Carried {
    Carried::new(DEFAULT_MAX_CARRIED, DEFAULT_MAX_CARRIED_BYTES, 7)
}

fn ids(count: u32) -> Vec<u32> {
    (0..count).map(|i| i.wrapping_mul(2_654_435_761) % 50_000).collect()
}

fn keep(carried: &Carried, endpoint: EndpointId, root: u64, tokens: &[u32], until: u64, words: &str) {
    let turn = KeptTurn { endpoint, root, tokens, until: at(until) };
    carried.keep(&turn, Bytes::from(words.to_owned()), at(0));
}

fn found(carried: &Carried, root: u64, tokens: &[u32]) -> Option<(EndpointId, u32)> {
    carried.find(root, tokens, at(1), |_| true).map(|carry| (carry.endpoint, carry.tokens))
}

#[test]
fn prompt_that_begins_with_all_tokens_finds_them() {
    for length in [64, 79, 80, 81, 96, 205] {
        let carried = carried();
        let all = ids(300);
        keep(&carried, A, 9, &all[..length], 100, "{}");
        let tokens = u32::try_from(length).unwrap();
        assert_eq!(found(&carried, 9, &all), Some((A, tokens)));
        assert_eq!(found(&carried, 9, &all[..=length]), Some((A, tokens)), "one more token is enough");
        assert_eq!(found(&carried, 9, &all[..length]), None, "nothing would be left to compute");
        assert_eq!(found(&carried, 9, &all[..length - 1]), None, "a shortened history");
        assert_eq!(found(&carried, 8, &all), None, "another salt or adapter");
        for edited in [0, length / 2, length - 1] {
            let mut prompt = all.clone();
            prompt[edited] += 1;
            assert_eq!(found(&carried, 9, &prompt), None, "token {edited} of {length} differs");
        }
    }
}

#[test]
fn longest_entry_is_found_and_each_is_given_once() {
    let carried = carried();
    let all = ids(300);
    keep(&carried, A, 9, &all[..140], 100, "first");
    keep(&carried, B, 9, &all[..142], 100, "second");
    keep(&carried, A, 9, &all[..142], 100, "again");
    let take = |tokens: u32, words: &str| {
        let carry = carried.find(9, &all, at(1), |_| true).unwrap();
        assert_eq!(carry.tokens, tokens);
        assert_eq!(carried.take(&carry, at(1)).as_deref(), Some(words.as_bytes()));
        assert_eq!(carried.take(&carry, at(1)), None, "given once");
    };
    take(142, "again");
    take(142, "second");
    take(140, "first");
    assert_eq!((carried.len(), carried.bytes(), found(&carried, 9, &all)), (0, 0, None));
    assert!(carried.table.lock().by_chain.is_empty(), "the index by hash is empty");
}

#[test]
fn expired_entry_is_neither_found_nor_given() {
    let carried = carried();
    let all = ids(100);
    keep(&carried, A, 9, &all[..70], 10, "{}");
    let carry = carried.find(9, &all, at(9), |_| true).unwrap();
    assert_eq!(carried.find(9, &all, at(10), |_| true), None);
    assert_eq!(carried.take(&carry, at(10)), None);
    keep(&carried, A, 9, &all[..70], 0, "{}");
    assert!(carried.is_empty(), "an entry that has expired on arrival is not kept");
    keep(&carried, A, 9, &all[..LEAST_CARRIED - 1], 100, "{}");
    assert!(carried.is_empty(), "an entry with too few tokens is not kept");
}

#[test]
fn entries_of_servers_that_left_or_do_not_serve_are_not_found() {
    let carried = carried();
    let all = ids(100);
    keep(&carried, A, 9, &all[..80], 100, "a");
    keep(&carried, B, 9, &all[..70], 100, "b");
    let serving = carried.find(9, &all, at(1), |endpoint| endpoint != A);
    assert_eq!(serving.map(|carry| carry.tokens), Some(70));
    carried.forget(|endpoint| endpoint == A);
    assert_eq!((carried.len(), found(&carried, 9, &all)), (1, Some((B, 70))));
}

#[test]
fn oldest_entries_go_when_a_limit_is_exceeded() {
    let all = ids(100);
    let few = Carried::new(2, 1 << 20, 7);
    (70..74u32).for_each(|length| keep(&few, A, 9, &all[..length as usize], 100, "{}"));
    assert_eq!((few.len(), found(&few, 9, &all[..73])), (2, Some((A, 72))));

    let small = Carried::new(100, 3 * (ENTRY_BYTES + 1_000), 7);
    let words = "x".repeat(1_000);
    (70..74u32).for_each(|length| keep(&small, A, 9, &all[..length as usize], 100, &words));
    assert_eq!((small.len(), found(&small, 9, &all[..71])), (3, None));
    keep(&small, A, 9, &all, 100, &"x".repeat(4_000));
    assert_eq!(small.len(), 3, "an entry over the limit evicts no others");
}

#[test]
fn repeated_conversation_keeps_a_few_entries() {
    let carried = carried();
    let all = ids(100);
    (0..1_000).for_each(|_| keep(&carried, A, 9, &all[..90], 100, "{}"));
    assert_eq!((carried.len(), found(&carried, 9, &all)), (MOST_ALIKE, Some((A, 90))));
    assert_eq!(carried.bytes(), MOST_ALIKE * (ENTRY_BYTES + 2));
}

#[test]
fn expired_entries_are_evicted_first() {
    let carried = carried();
    let all = ids(100);
    (1..=50u64).for_each(|number| keep(&carried, A, number, &all, number, "{}"));
    let turn = KeptTurn { endpoint: A, root: 99, tokens: &all, until: at(100) };
    carried.keep(&turn, Bytes::from_static(b"{}"), at(40));
    assert_eq!(carried.len(), 11);
}

proptest! {
    /// Compares with a plain list of turns: the longest matching prefix is found, and all limits hold.
    #[test]
    fn result_equals_a_search_of_all_entries(
        turns in proptest::collection::vec((0u64..2, proptest::collection::vec(0u32..2, 1..40)), 1..30),
        (root, prompt) in (0u64..2, proptest::collection::vec(0u32..2, 1..60)),
        from in 0usize..30,
    ) {
        let carried = Carried::new(20, 1 << 20, 3);
        // All turns share a prefix that is long enough to be kept.
        let whole = |tokens: &[u32]| [&[7; LEAST_CARRIED][..], tokens].concat();
        let turns: Vec<_> = turns.iter().map(|(root, tokens)| (*root, whole(tokens))).collect();
        turns.iter().for_each(|(root, tokens)| keep(&carried, A, *root, tokens, 100, "{}"));
        // Half of the prompts continue one of the turns.
        let prompt = match turns.get(from) {
            Some((_, tokens)) => tokens.iter().chain(&prompt).copied().collect(),
            None => whole(&prompt),
        };
        let links = |tokens: &[u32]| tokens[..tokens.len() / LINK * LINK].to_vec();
        let mut kept: Vec<&(u64, Vec<u32>)> = Vec::new();
        for turn in &turns {
            kept.push(turn);
            let alike = |other: &(u64, Vec<u32>)| other.0 == turn.0 && links(&other.1) == links(&turn.1);
            if kept.iter().filter(|other| alike(other)).count() > MOST_ALIKE {
                let oldest = kept.iter().position(|other| alike(other)).unwrap();
                kept.remove(oldest);
            }
            if kept.len() > 20 {
                kept.remove(0);
            }
        }
        let best = kept
            .into_iter()
            .filter(|(other, tokens)| *other == root && prompt.starts_with(tokens) && prompt.len() > tokens.len())
            .map(|(_, tokens)| tokens.len() as u32)
            .max();
        prop_assert_eq!(found(&carried, root, &prompt).map(|(_, tokens)| tokens), best);
        prop_assert!(carried.len() <= 20);
        prop_assert_eq!(carried.bytes(), carried.len() * (ENTRY_BYTES + 2));
        while let Some(carry) = carried.find(root, &prompt, at(1), |_| true) {
            prop_assert!(carried.take(&carry, at(1)).is_some());
        }
    }
}
