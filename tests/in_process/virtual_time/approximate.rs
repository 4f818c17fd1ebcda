//! Approximate prefix mode in virtual time: the picker's estimate of cached tokens compared with the engine's report.

use super::play::{BLOCK, ENGINES, NUM_BLOCKS, OneByOne, Pool, SCRAPE, SEED, Sums, conversations, request, text};
use attache_replay::world::{FleetChange, TimedChange};
use attache_report::served::Served;
use attache_sim::content::mix;
use attache_types::clock::Timestamp;
use attache_workload::synthetic;

/// Twice the recorded speed: requests wait 2 to 3 s on average and none is preempted. At 2.5, the engines run out of
/// blocks.
const SPEED: f64 = 2.0;
/// Estimates cached prefixes and picks at random.
const AT_RANDOM: &str = r#"pipeline={"scorers":[{"type":"prefix-cache-scorer"}],"picker":{"type":"random-picker"}}"#;
/// All requests of the trace.
const ALL: u64 = 2_000;

#[test]
fn cache_estimates_match_engines_and_double_the_hit_ratio() {
    let pool = Pool::of_sizes(&[NUM_BLOCKS; ENGINES]);
    let played = pool.play("pipeline", &mut *conversations(SPEED, ALL));
    let total = Sums::of(&played.served);
    assert_eq!(total.requests, ALL);
    assert!(played.evictions > 1_000_000, "pressure: {}", played.evictions);
    assert!(total.error().abs() <= 0.05, "{:.4} over all: {total:?}", total.error());
    for server in 0..ENGINES as u32 {
        let sums = Sums::of(played.served.iter().filter(|s| s.endpoint == Some(server)));
        assert!(sums.error().abs() <= 0.1, "{:.4} of server {server}: {sums:?}", sums.error());
    }
    let by_chance = Sums::of(&pool.play(AT_RANDOM, &mut *conversations(SPEED, ALL)).served);
    assert!(by_chance.error().abs() <= 0.1, "{:.4} at random: {by_chance:?}", by_chance.error());
    let (hit, chance) = (total.hit_ratio(), by_chance.hit_ratio());
    assert!(hit > 2.0 * chance, "hit ratio {hit:.3}, at random {chance:.3}");
}

#[test]
fn next_turn_hits_the_blocks_of_the_last_response() {
    let one = "multi-turn:clients=1,conversations=1,turns=5,requests=5,dynamic=901,input=99,output=333,think=0.1";
    let mut conversation = synthetic::build(one, SEED).expect("a workload");
    let played = Pool::of_sizes(&[NUM_BLOCKS; 3]).play("pipeline", &mut *conversation);
    assert_eq!(played.served.len(), 5);
    for (turn, served) in played.served.iter().enumerate() {
        // Full blocks of the last turn's prompt and response. The last token of a response is not computed.
        let expected = if turn == 0 { 0 } else { (served.prompt_tokens - 99 - 1) / 16 * 16 };
        assert_eq!(served.prompt_tokens, 1_000 + turn as u32 * (333 + 99));
        assert_eq!(served.cached_tokens, expected, "turn {turn}");
        assert!(served.expected_cached_tokens.abs_diff(expected) <= BLOCK, "turn {turn}: {served:?}");
    }
}

#[test]
fn restarted_engine_is_estimated_as_empty() {
    // 50 documents that all fit into the cache, requested twice. The process restarts between the two rounds.
    let documents = |round: u64| (0..50).map(move |i| (round * 50 + i, text(i as u32, 1_000)));
    let ask = |(number, document)| request(number, Timestamp(0), &[document], 4);
    let requests: Vec<_> = documents(0).chain(documents(1)).map(ask).collect();
    let mut pool = Pool::of_sizes(&[NUM_BLOCKS]);
    let before = pool.play("pipeline", &mut OneByOne::new(requests.clone()));
    let again = Sums::of(&before.served[50..]);
    assert!(again.foretold > 49_000 && again.reported > 49_000, "as long as it is the old one: {again:?}");
    // The restart follows the last response of the first round. A scrape detects it before the next request.
    let last = &before.served[49];
    pool.changes = vec![TimedChange { at: last.at.after(last.total), change: FleetChange::Restart(0) }];
    let after = Sums::of(&pool.play("pipeline", &mut OneByOne::new(requests)).served[50..]);
    assert_eq!((after.requests, after.foretold, after.reported), (50, 0, 0));
}

#[test]
fn estimates_stay_accurate_after_a_restart() {
    let mut workload = conversations(SPEED, 401);
    let at = std::iter::from_fn(|| workload.next().expect("the trace")).last().expect("requests").at;
    let mut pool = Pool::of_sizes(&[NUM_BLOCKS; 3]);
    pool.changes = vec![TimedChange { at, change: FleetChange::Restart(1) }];
    let played = pool.play("pipeline", &mut *conversations(SPEED, 800));
    // Until a scrape detects the new process, the estimate is that of the old process.
    let told = |s: &&Served| s.endpoint == Some(1) && s.at > at.after(SCRAPE);
    let since = Sums::of(played.served.iter().filter(told));
    assert!(since.requests > 50 && since.reported > 0, "it serves again: {since:?}");
    // After a restart the estimate may be too low, but not too high.
    assert!((-0.3..=0.1).contains(&since.error()), "{:.4}: {since:?}", since.error());
}

#[test]
fn overstated_cache_size_is_detected() {
    let pool = Pool { reported_blocks: Some(4_000), ..Pool::of_sizes(&[2_000]) };
    // 64 documents of 50 blocks: the reported size fits all, and the real size 40. A few documents are requested
    // often.
    let ask = |i: u64| {
        let random = mix(i / 500 * 1_000 + i % 500);
        let document = (random % 64).min(random >> 32 & 63) as u32;
        request(i, Timestamp(0), &[text(document, 50 * BLOCK), text(1_000 + i as u32, 8)], 4)
    };
    let played = pool.play("pipeline", &mut OneByOne::new((0..4_000).map(ask).collect()));
    let errors: Vec<f64> = played.served.chunks(500).map(|phase| Sums::of(phase).error()).collect();
    assert!(errors[0] > 0.05, "at first it is believed: {errors:.3?}");
    assert!(errors[4..].iter().all(|error| error.abs() <= 0.05), "{errors:.3?}");
}
