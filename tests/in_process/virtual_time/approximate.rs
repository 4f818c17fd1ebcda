//! Approximate mode against engines, in virtual time: what the picker thinks a server has cached, and what the server
//! then reports.

use super::play::{BLOCK, ENGINES, NUM_BLOCKS, OneByOne, Pool, SCRAPE, SEED, Sums, conversations, request, text};
use attache::clock::Timestamp;
use attache::replay::world::{FleetChange, TimedChange};
use attache::report::served::Served;
use attache::sim::content::mix;
use attache::workload::synthetic;

/// Twice as fast as it was recorded: requests wait 2 to 3 s in the mean and none is preempted. At 2.5 the engines run
/// out of blocks.
const SPEED: f64 = 2.0;
/// Looks up what is cached where, and does not care.
const AT_RANDOM: &str = r#"pipeline={"scorers":[{"type":"prefix-cache-scorer"}],"picker":{"type":"random-picker"}}"#;
/// All requests of the trace.
const ALL: u64 = 2_000;

#[test]
fn on_the_conversation_trace_the_estimate_is_what_engines_report_and_routing_by_it_pays() {
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
fn a_turn_finds_the_answer_of_the_turn_before() {
    let one = "multi-turn:clients=1,conversations=1,turns=5,requests=5,dynamic=901,input=99,output=333,think=0.1";
    let mut conversation = synthetic::build(one, SEED).expect("a workload");
    let played = Pool::of_sizes(&[NUM_BLOCKS; 3]).play("pipeline", &mut *conversation);
    assert_eq!(played.served.len(), 5);
    for (turn, served) in played.served.iter().enumerate() {
        // Full blocks of the last turn's prompt and answer; of an answer the last token is said and not computed.
        let expected = if turn == 0 { 0 } else { (served.prompt_tokens - 99 - 1) / 16 * 16 };
        assert_eq!(served.prompt_tokens, 1_000 + turn as u32 * (333 + 99));
        assert_eq!(served.cached_tokens, expected, "turn {turn}");
        assert!(served.foretold_tokens.abs_diff(expected) <= BLOCK, "turn {turn}: {served:?}");
    }
}

#[test]
fn a_new_process_is_thought_to_hold_nothing() {
    // 50 documents, all of which fit, twice; between the two rounds the process is a new one.
    let documents = |round: u64| (0..50).map(move |i| (round * 50 + i, text(i as u32, 1_000)));
    let ask = |(number, document)| request(number, Timestamp(0), &[document], 4);
    let requests: Vec<_> = documents(0).chain(documents(1)).map(ask).collect();
    let mut pool = Pool::of_sizes(&[NUM_BLOCKS]);
    let before = pool.play("pipeline", &mut OneByOne::new(requests.clone()));
    let again = Sums::of(&before.served[50..]);
    assert!(again.foretold > 49_000 && again.reported > 49_000, "as long as it is the old one: {again:?}");
    // As the last answer of the first round has come; a page tells of it before the next request.
    let last = &before.served[49];
    pool.changes = vec![TimedChange { at: last.at.after(last.total), change: FleetChange::Restart(0) }];
    let after = Sums::of(&pool.play("pipeline", &mut OneByOne::new(requests)).served[50..]);
    assert_eq!((after.requests, after.foretold, after.reported), (50, 0, 0));
}

#[test]
fn a_new_process_serves_again_as_foretold() {
    let mut workload = conversations(SPEED, 401);
    let at = std::iter::from_fn(|| workload.next().expect("the trace")).last().expect("requests").at;
    let mut pool = Pool::of_sizes(&[NUM_BLOCKS; 3]);
    pool.changes = vec![TimedChange { at, change: FleetChange::Restart(1) }];
    let played = pool.play("pipeline", &mut *conversations(SPEED, 800));
    // Until a page tells of the new process, it is thought to hold what the old one held.
    let told = |s: &&Served| s.endpoint == Some(1) && s.at > at.after(SCRAPE);
    let since = Sums::of(played.served.iter().filter(told));
    assert!(since.requests > 50 && since.reported > 0, "it serves again: {since:?}");
    // After a restart the estimate may be cautious, but it does not expect what is not there.
    assert!((-0.3..=0.1).contains(&since.error()), "{:.4}: {since:?}", since.error());
}

#[test]
fn an_engine_with_half_the_room_it_tells_of_is_found_out() {
    let pool = Pool { reported_blocks: Some(4_000), ..Pool::of_sizes(&[2_000]) };
    // 64 documents of 50 blocks: room for all in what it tells, for 40 of them in what it has. A few are asked for
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
