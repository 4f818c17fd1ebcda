//! Approximate mode against engines, in virtual time: what the picker thinks a server has cached, and what the server then reports.

use crate::world::{BLOCK, ENGINES, NUM_BLOCKS, Sums, World, keys, text, trace};
use attache::clock::Timestamp;
use attache::ids::EndpointId;
use attache::sim::content::mix;

/// Twice as fast as it was recorded: requests wait 2 to 3 s in the mean and none is preempted. At 2.5 the engines run out of blocks.
const SPEED: f64 = 2.0;

#[test]
fn on_the_conversation_trace_the_estimate_is_what_engines_report_and_routing_by_it_pays() {
    let trace = trace(SPEED);
    let mut world = World::by_prefix(&[NUM_BLOCKS; ENGINES]);
    world.play(&trace);
    let total = world.total();
    assert_eq!(total.requests, trace.len() as u64);
    assert!(world.evictions() > 1_000_000, "pressure: {}", world.evictions());
    assert!(total.error().abs() <= 0.05, "{:.4} over all: {total:?}", total.error());
    for (server, sums) in world.sums.iter().enumerate() {
        assert!(sums.error().abs() <= 0.1, "{:.4} of server {server}: {sums:?}", sums.error());
    }
    let mut random = World::new("random", serde_json::Value::Null, &[NUM_BLOCKS; ENGINES]);
    random.play(&trace);
    let by_chance = random.total();
    assert!(by_chance.error().abs() <= 0.1, "{:.4} at random: {by_chance:?}", by_chance.error());
    let (hit, chance) = (total.hit_ratio(), by_chance.hit_ratio());
    assert!(hit > 2.0 * chance, "hit ratio {hit:.3}, at random {chance:.3}");
}

#[test]
fn a_turn_finds_the_answer_of_the_turn_before() {
    let mut world = World::by_prefix(&[NUM_BLOCKS; 3]);
    let mut conversation = vec![text(1, 1_000)];
    for turn in 0..5 {
        let (sums, answer) = world.ask(&conversation, 333);
        // Full blocks of the last turn's prompt and answer; of an answer the last token is said and not computed.
        let tokens: u32 = conversation.iter().map(|piece| piece.tokens).sum();
        let expected = if turn == 0 { 0 } else { u64::from((tokens - 99 - 1) / 16 * 16) };
        assert_eq!(sums.reported, expected, "turn {turn}");
        assert!(sums.foretold.abs_diff(expected) <= u64::from(BLOCK), "turn {turn}: {sums:?}");
        conversation.extend([answer, text(10 + turn, 99)]);
    }
}

#[test]
fn a_new_process_is_thought_to_hold_nothing() {
    let mut world = World::by_prefix(&[NUM_BLOCKS; 3]);
    let trace = trace(SPEED);
    let (before, after) = trace.split_at(400);
    before.iter().for_each(|request| {
        world.arrive_traced(request);
    });
    let restart = after[0].at;
    world.restart(1, restart);
    // Until a page tells of the new process, it is thought to hold what the old one held.
    world.advance(world.next_scrape);
    let snapshot = world.sums[1];
    for request in before.iter().rev().take(50) {
        let (keys, _) = keys(&request.prompt);
        let found = world.cache.lookup(&mut &keys[..], world.next_scrape);
        assert_eq!(found.held(EndpointId(1)).any, 0);
    }
    for request in after.iter().filter(|r| r.at > world.next_scrape).take(400).collect::<Vec<_>>() {
        world.arrive_traced(request);
    }
    world.finish();
    let since = world.sums[1] - snapshot;
    assert!(since.requests > 50 && since.reported > 0, "it serves again: {since:?}");
    assert!(since.error().abs() <= 0.1, "{:.4}: {since:?}", since.error());
}

#[test]
fn an_engine_with_half_the_room_it_tells_of_is_found_out() {
    let mut world = World::by_prefix(&[2_000]);
    world.says = vec![4_000];
    world.scrape(Timestamp(1));
    // 64 documents of 50 blocks: room for all in what it tells, for 40 of them in what it has. A few are asked for often.
    let mut sums = Vec::new();
    for phase in 0..8 {
        let before = world.total();
        for i in 0..500 {
            let random = mix(phase * 1_000 + i);
            let document = (random % 64).min(random >> 32 & 63) as u32;
            let own = text(1_000 + (phase * 1_000 + i) as u32, 8);
            world.ask(&[text(document, 50 * BLOCK), own], 4);
        }
        sums.push(world.total() - before);
    }
    let errors: Vec<f64> = sums.iter().map(Sums::error).collect();
    assert!(errors[0] > 0.05, "at first it is believed: {errors:.3?}");
    assert!(errors[4..].iter().all(|error| error.abs() <= 0.05), "{errors:.3?}");
}
