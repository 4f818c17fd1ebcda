//! Blocks that stay for other servers, and prompts that come from them.

use super::*;

fn hold(id: u64, prompt: Vec<u32>, lease: Duration) -> Job {
    Job { handoff: Handoff { hold: Some(lease), received: 0 }, ..job(id, prompt, 1) }
}

fn receive(id: u64, prompt: Vec<u32>, received: u32) -> Job {
    Job { handoff: Handoff { hold: None, received }, ..job(id, prompt, 2) }
}

fn ended_at(events: &[EngineEvent], id: u64) -> Timestamp {
    let end = |event: &EngineEvent| match event {
        EngineEvent::Finished { job: JobId(job), at, .. } if *job == id => Some(*at),
        _ => None,
    };
    events.iter().find_map(end).unwrap()
}

/// Advances past the end of the job, but not of its lease.
fn run_to_end_of(engine: &mut Engine, id: u64) -> Timestamp {
    let mut events = vec![];
    while !events.iter().any(|event| matches!(event, EngineEvent::Finished { job: JobId(job), .. } if *job == id)) {
        engine.advance(engine.next_event_at().unwrap(), &mut events);
    }
    ended_at(&events, id)
}

#[test]
fn blocks_stay_until_their_lease_ends_and_a_heartbeat_begins_it_anew() {
    let mut engine = Engine::new(small(16));
    engine.submit(Timestamp(0), hold(1, tokens(1, 9), DEFAULT_LEASE)).unwrap();
    let end = run_to_end_of(&mut engine, 1);
    let pinned = engine.pinned(end, JobId(1)).unwrap();
    assert_eq!((pinned.tokens, pinned.blocks.len(), pinned.until), (9, 3, end.after(DEFAULT_LEASE)));
    assert_eq!((engine.pins(), engine.load().kv_usage), ((1, 3), 3.0 / 16.0));
    assert!(!engine.reset_prefix_cache(), "a request has blocks");
    let later = end.after(DEFAULT_LEASE / 2);
    assert!(engine.heartbeat(later, JobId(1)));
    assert_eq!(engine.next_event_at(), Some(later.after(DEFAULT_LEASE)));
    assert!(engine.pinned(end.after(DEFAULT_LEASE), JobId(1)).is_some());
    assert_eq!(run_dry(&mut engine), vec![]);
    assert_eq!((engine.pins(), engine.load().kv_usage, engine.stats().leases_expired), ((0, 0), 0.0, 1));
    assert!(!engine.heartbeat(later.after(DEFAULT_LEASE), JobId(1)));
    assert!(!engine.release(later.after(DEFAULT_LEASE), JobId(1)));
}

#[test]
fn released_blocks_make_room_at_once_and_no_lease_expires() {
    let mut engine = Engine::new(small(4));
    engine.submit(Timestamp(0), hold(1, tokens(1, 12), DEFAULT_LEASE)).unwrap();
    let end = run_to_end_of(&mut engine, 1);
    engine.submit(end, job(2, tokens(2, 12), 1)).unwrap();
    engine.advance(end, &mut vec![]);
    assert_eq!((engine.load().running, engine.load().waiting), (0, 1), "one block is left");
    assert_eq!(engine.next_event_at(), Some(end.after(DEFAULT_LEASE)), "nothing to do before");
    let later = end.after(Duration::from_millis(5));
    assert!(engine.release(later, JobId(1)));
    assert_eq!(engine.next_event_at(), Some(later));
    let events = run_dry(&mut engine);
    assert!(ended_at(&events, 2) < end.after(DEFAULT_LEASE));
    assert_eq!(engine.stats().leases_expired, 0);
}

#[test]
fn a_lease_that_ends_lets_the_next_one_in() {
    let mut engine = Engine::new(small(4));
    engine.submit(Timestamp(0), hold(1, tokens(1, 12), DEFAULT_LEASE)).unwrap();
    let end = run_to_end_of(&mut engine, 1);
    engine.submit(end, job(2, tokens(2, 12), 1)).unwrap();
    assert!(ended_at(&run_dry(&mut engine), 2) > end.after(DEFAULT_LEASE));
}

#[test]
fn a_cancelled_prefill_keeps_nothing() {
    let mut engine = Engine::new(small(16));
    engine.submit(Timestamp(0), Job { max_tokens: 50, ..hold(1, tokens(1, 9), DEFAULT_LEASE) }).unwrap();
    engine.advance(Timestamp(0), &mut vec![]);
    engine.cancel(Timestamp(1), JobId(1), &mut vec![]);
    run_dry(&mut engine);
    assert_eq!((engine.pins(), engine.kv.used(), engine.stats().leases_expired), ((0, 0), 0, 0));
}

#[test]
fn a_received_prompt_takes_the_transfer_and_one_token_and_is_cached_then() {
    let mut engine = Engine::new(small(64));
    engine.submit(Timestamp(0), receive(1, tokens(1, 40), 40)).unwrap();
    let mut events = vec![];
    engine.advance(Timestamp(0), &mut events);
    assert_eq!(engine.load(), Load { running: 0, waiting: 1, deferred: 1, kv_usage: 10.0 / 64.0 });
    events.extend(run_dry(&mut engine));
    let model = LatencyModel::default();
    let here = Timestamp(0).after(model.transfer(40));
    let last = StepWork { prefill_tokens: 1, prefill_pairs: 40, ..StepWork::default() };
    let job = JobId(1);
    assert_eq!(
        events[..2],
        [EngineEvent::Received { job, at: here }, EngineEvent::FirstToken { job, at: here.after(model.step(last)) }]
    );
    let first = report(&events, 1);
    assert_eq!((first.cached_tokens, first.received_tokens), (0, 40));
    let start = Timestamp(1 << 40);
    engine.submit(start, receive(2, tokens(1, 41), 41)).unwrap();
    let events = run_dry(&mut engine);
    let again = report(&events, 2);
    assert_eq!((again.cached_tokens, again.received_tokens), (40, 1), "only what is not here is fetched");
    assert_eq!(events[0], EngineEvent::Received { job: JobId(2), at: start.after(model.transfer(1)) });
    assert_eq!((engine.stats().received_tokens, engine.stats().transfer.count()), (41, 2));
}

#[test]
fn what_is_cached_is_not_received_and_the_rest_of_a_prompt_is_computed() {
    let mut engine = Engine::new(small(64));
    engine.submit(Timestamp(0), job(1, tokens(1, 21), 1)).unwrap();
    run_dry(&mut engine);
    let start = Timestamp(1 << 40);
    engine.submit(start, receive(2, tokens(1, 21), 20)).unwrap();
    let events = run_dry(&mut engine);
    assert_eq!(events[0], EngineEvent::Received { job: JobId(2), at: start }, "at once, since nothing is missing");
    assert_eq!((report(&events, 2).cached_tokens, report(&events, 2).received_tokens), (20, 0));
    let start = Timestamp(1 << 41);
    engine.submit(start, receive(3, tokens(3, 21), 10)).unwrap();
    let events = run_dry(&mut engine);
    let model = LatencyModel::default();
    let rest = StepWork { prefill_tokens: 11, prefill_pairs: 11 * 10 + 66, ..StepWork::default() };
    let first = start.after(model.transfer(10)).after(model.step(rest));
    assert_eq!(events[1], EngineEvent::FirstToken { job: JobId(3), at: first });
}

#[test]
fn a_transfer_leaves_the_batch_alone() {
    let mut engine = Engine::new(EngineConfig { max_num_seqs: 2, ..small(64) });
    let slow = LatencyModel { transfer_setup: Duration::from_secs(10), ..LatencyModel::default() };
    engine = Engine::new(EngineConfig { latency: slow, ..engine.config().clone() });
    engine.submit(Timestamp(0), receive(1, tokens(1, 12), 12)).unwrap();
    engine.submit(Timestamp(1), receive(2, tokens(2, 12), 12)).unwrap();
    engine.submit(Timestamp(2), job(3, tokens(3, 12), 3)).unwrap();
    engine.submit(Timestamp(2), job(4, tokens(4, 12), 3)).unwrap();
    let events = run_dry(&mut engine);
    assert!(ended_at(&events, 4) < Timestamp(0).after(Duration::from_secs(1)));
    let received = events.iter().filter(|event| matches!(event, EngineEvent::Received { .. })).count();
    assert_eq!((received, engine.kv.used()), (2, 0));
}

#[test]
fn those_who_hold_a_part_of_their_prompt_do_not_wait_for_each_other() {
    // Each has received half of the cache and needs more than that.
    let mut engine = Engine::new(small(8));
    engine.submit(Timestamp(0), receive(1, tokens(1, 28), 16)).unwrap();
    engine.submit(Timestamp(0), receive(2, tokens(2, 28), 16)).unwrap();
    let events = run_dry(&mut engine);
    assert_eq!(report(&events, 1).preemptions, 0);
    assert_eq!(report(&events, 2).preemptions, 1);
    assert_eq!((report(&events, 2).generated_tokens, engine.kv.used()), (2, 0));
}

#[test]
fn a_cancelled_transfer_gives_its_blocks_back() {
    let mut engine = Engine::new(small(4));
    engine.submit(Timestamp(0), receive(1, tokens(1, 15), 15)).unwrap();
    engine.submit(Timestamp(0), job(2, tokens(2, 15), 1)).unwrap();
    let mut events = vec![];
    engine.advance(Timestamp(0), &mut events);
    assert!(engine.cancel(Timestamp(7), JobId(1), &mut events));
    events.extend(run_dry(&mut engine));
    let model = LatencyModel::default();
    let work = StepWork { prefill_tokens: 15, prefill_pairs: 120, ..StepWork::default() };
    assert_eq!(ended_at(&events, 2), Timestamp(7).after(model.step(work)));
    assert!(!events.iter().any(|event| matches!(event, EngineEvent::Received { .. })));
}
