//! Telling every token, telling none, and the plain way: one and the same run.

use super::plain::Plain;
use super::*;
use std::collections::BTreeMap;

fn configs() -> impl Strategy<Value = EngineConfig> {
    (1..6u32, 14..64u32, 1..9u32, 1..24u32, 1..4u32, prop::bool::weighted(0.9), prop::option::of(1..20u32)).prop_map(
        |(block_size, num_blocks, max_num_seqs, max_num_batched_tokens, max_loras, prefix_caching, max_num_queued)| {
            EngineConfig {
                block_size,
                num_blocks,
                max_num_seqs,
                max_num_batched_tokens,
                max_loras,
                prefix_caching,
                max_num_queued,
                kv_events: true,
                ..EngineConfig::default()
            }
        },
    )
}

/// What a plan asks for: tokens, or a conversation in pieces that brings back the answers of earlier plans.
fn planned(index: usize, plan: &Plan, in_pieces: bool) -> Job {
    let pieces = || {
        let history = (0..plan.prompt).flat_map(|turn| {
            let answer = Piece::new(1_000 + u64::from(turn), plan.max_tokens % 7 + 1);
            [Piece::new(u64::from(turn), plan.length % 5 + 1), answer]
        });
        history.chain([Piece::new(u64::from(plan.prompt), plan.length)]).collect()
    };
    Job {
        lora: plan.lora.map(|n| n.to_string().into()),
        prompt: if in_pieces {
            JobPrompt::Pieces(pieces())
        } else {
            JobPrompt::Tokens(tokens(plan.prompt, plan.length))
        },
        handoff: plan.handoff,
        stops_after: plan.length.is_multiple_of(4).then_some(plan.length % 11),
        answer_seed: 1_000 + u64::from(plan.prompt),
        ..job(index as u64, vec![], plan.max_tokens)
    }
}

/// What is done with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Act {
    Submit,
    Cancel,
    Release,
    Heartbeat,
    /// Nothing: time goes by.
    Wait,
}

/// The end of time.
const END: (u64, usize, Act) = (u64::MAX / 2, 0, Act::Wait);

/// What is done, in the order of time.
fn actions(plans: &[Plan]) -> Vec<(u64, usize, Act)> {
    let mut actions = vec![];
    let mut arrival = 0;
    for (index, plan) in plans.iter().enumerate() {
        // Every third comes at the same moment as the one before.
        arrival += if plan.gap % 3 == 0 { 0 } else { plan.gap };
        actions.push((arrival, index, Act::Submit));
        actions.extend(plan.cancel_after.map(|after| (arrival + after, index, Act::Cancel)));
        let act = |longer| if longer { Act::Heartbeat } else { Act::Release };
        actions.extend(plan.touch.map(|(after, longer)| (arrival + after, index, act(longer))));
    }
    actions.sort_unstable();
    actions
}

fn without_tokens(events: Vec<EngineEvent>) -> Vec<EngineEvent> {
    events.into_iter().filter(|event| !matches!(event, EngineEvent::Token { .. })).collect()
}

/// The real engine and the plain one, side by side, step by step; the number of preemptions.
fn side_by_side(config: &EngineConfig, plans: &[Plan], in_pieces: bool) -> Result<u64, TestCaseError> {
    let tell = |events| if config.every_token { events } else { without_tokens(events) };
    let (mut engine, mut plain) = (Engine::new(config.clone()), Plain::new(config.clone()));
    for (at, index, act) in actions(plans).into_iter().chain([END]) {
        while let Some(next) = engine.next_event_at().filter(|next| next.0 <= at) {
            prop_assert_eq!(plain.next_event_at(), Some(next));
            let (mut ours, mut theirs) = (vec![], vec![]);
            engine.advance(next, &mut ours);
            plain.step(next, &mut theirs);
            prop_assert_eq!(ours, tell(theirs));
            prop_assert_eq!(engine.load(), plain.load());
            check(&engine);
        }
        let (mut ours, mut theirs) = (vec![], vec![]);
        let (now, id) = (Timestamp(at), JobId(index as u64));
        match act {
            Act::Submit => {
                let job = planned(index, &plans[index], in_pieces);
                prop_assert_eq!(engine.submit(now, job.clone()).is_ok(), plain.submit(now, job));
            }
            Act::Cancel => {
                engine.cancel(now, id, &mut ours);
                plain.cancel(now, id, &mut theirs);
            }
            Act::Release => prop_assert_eq!(engine.release(now, id), plain.let_go(now, id)),
            Act::Heartbeat => {
                let lease = plans[index].handoff.hold.unwrap_or_default();
                prop_assert_eq!(engine.heartbeat(now, id), plain.heartbeat(now, id, lease));
            }
            Act::Wait => {}
        }
        check(&engine);
        for (id, tokens, blocks, until) in plain.pinned() {
            let pinned = engine.pinned(Timestamp(0), id).map(|pin| (pin.tokens, pin.blocks.len(), pin.until));
            prop_assert_eq!(pinned, Some((tokens, blocks, until)));
        }
        prop_assert_eq!(engine.pins().0, plain.pinned().len());
        prop_assert_eq!(ours, theirs);
        prop_assert_eq!(engine.next_event_at(), plain.next_event_at());
        prop_assert_eq!(engine.held_blocks().collect::<BTreeMap<_, _>>(), plain.held());
        prop_assert_eq!(engine.take_kv_batches(), std::mem::take(&mut plain.batches));
    }
    let stats = engine.stats();
    prop_assert_eq!((stats.steps, stats.generation_tokens), (plain.steps, plain.said));
    prop_assert_eq!(stats.ttft.count(), plain.read);
    prop_assert_eq!(stats.leases_expired, plain.expired);
    prop_assert_eq!(engine.kv.used(), 0, "blocks are left over");
    let (ours, theirs) = (&stats.inter_token, &plain.inter_token);
    prop_assert!(ours.cumulative().eq(theirs.cumulative()) && ours.count() == theirs.count());
    prop_assert!((ours.sum() - theirs.sum()).abs() <= 1e-9 * theirs.sum(), "{} and {}", ours.sum(), theirs.sum());
    Ok(stats.preemptions)
}

#[test]
fn preempted_jobs_are_among_them() {
    let plan = |prompt| Plan {
        gap: 1,
        prompt,
        length: 17,
        max_tokens: 30,
        lora: None,
        cancel_after: None,
        handoff: Handoff::default(),
        touch: None,
    };
    let plans: Vec<_> = (0..8).map(|i| plan(i % 4)).collect();
    for (block_size, num_blocks, in_pieces) in [(1, 80, false), (3, 30, true), (4, 20, false), (5, 17, true)] {
        let config = EngineConfig { block_size, kv_events: true, every_token: false, ..small(num_blocks) };
        let preemptions = side_by_side(&config, &plans, in_pieces).expect("equal");
        assert!(preemptions > 3, "{preemptions} with blocks of {block_size}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_step_is_that_of_the_plain_engine(
        config in configs(), plans in plans(), every_token: bool, in_pieces: bool
    ) {
        side_by_side(&EngineConfig { every_token, ..config }, &plans, in_pieces)?;
    }

    #[test]
    fn who_comes_only_when_something_may_happen_misses_nothing(
        config in configs(), plans in plans(), room in 0..200u32, in_pieces: bool
    ) {
        let config = EngineConfig { num_blocks: config.num_blocks + room, every_token: false, ..config };
        let (mut rare, mut often) = (Engine::new(config.clone()), Engine::new(config));
        for (at, index, act) in actions(&plans).into_iter().chain([END]) {
            let (mut ours, mut theirs) = (vec![], vec![]);
            while let Some(next) = often.next_event_at().filter(|next| next.0 <= at) {
                often.advance(next, &mut theirs);
            }
            while let Some(next) = rare.quiet_until().filter(|next| next.0 <= at) {
                let before = ours.len();
                rare.advance(next, &mut ours);
                for event in &ours[before..] {
                    let (EngineEvent::FirstToken { at, .. }
                    | EngineEvent::Token { at, .. }
                    | EngineEvent::Preempted { at, .. }
                    | EngineEvent::Received { at, .. }
                    | EngineEvent::Finished { at, .. }) = event;
                    prop_assert!(*at >= next, "{:?} came before {:?}", event, next);
                }
            }
            let before = ours.len();
            rare.advance(Timestamp(at), &mut ours);
            prop_assert_eq!(before, ours.len(), "something happened before it was foretold");
            prop_assert_eq!(rare.load(), often.load());
            for (engine, events) in [(&mut rare, &mut ours), (&mut often, &mut theirs)] {
                let (now, id) = (Timestamp(at), JobId(index as u64));
                match act {
                    Act::Submit => drop(engine.submit(now, planned(index, &plans[index], in_pieces))),
                    Act::Cancel => drop(engine.cancel(now, id, events)),
                    Act::Release => drop(engine.release(now, id)),
                    Act::Heartbeat => drop(engine.heartbeat(now, id)),
                    Act::Wait => {}
                }
            }
            prop_assert_eq!(ours, theirs);
            prop_assert_eq!(rare.take_kv_batches(), often.take_kv_batches());
            prop_assert_eq!(rare.stats().generation_tokens, often.stats().generation_tokens);
        }
    }
}
