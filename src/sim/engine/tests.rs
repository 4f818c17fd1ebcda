use super::*;
use crate::content::Piece;
use crate::tokenizer::answer_token;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

mod equal;
mod handoff;
mod kv_events;
mod plain;

fn job(id: u64, prompt: Vec<u32>, max_tokens: u32) -> Job {
    Job {
        id: JobId(id),
        prompt: JobPrompt::Tokens(prompt),
        max_tokens,
        stops_after: None,
        lora: None,
        cache_salt: None,
        answer_seed: id,
        handoff: Handoff::default(),
    }
}

/// `n` tokens that only `prompt` has.
fn tokens(prompt: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| prompt * 100_000 + i).collect()
}

fn small(num_blocks: u32) -> EngineConfig {
    EngineConfig { block_size: 4, num_blocks, max_num_seqs: 8, max_num_batched_tokens: 16, ..EngineConfig::default() }
}

fn run_dry(engine: &mut Engine) -> Vec<EngineEvent> {
    let mut events = vec![];
    let mut guard = 0;
    while let Some(at) = engine.next_event_at() {
        engine.advance(at, &mut events);
        guard += 1;
        assert!(guard < 100_000, "the engine does not come to an end");
    }
    events
}

fn report(events: &[EngineEvent], id: u64) -> JobReport {
    let ends: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            EngineEvent::Finished { job, report, .. } if *job == JobId(id) => Some(*report),
            _ => None,
        })
        .collect();
    assert_eq!(ends.len(), 1, "job {id} ends once");
    ends[0]
}

#[test]
fn one_request_takes_the_time_that_the_formula_says() {
    let mut engine = Engine::new(EngineConfig { max_num_batched_tokens: 10, ..EngineConfig::default() });
    engine.submit(Timestamp(1_000), job(1, tokens(1, 16), 3)).unwrap();
    let events = run_dry(&mut engine);
    let model = LatencyModel::default();
    // Two chunks of prefill, then two decodes over 16 and 17 cached tokens.
    let first = StepWork { prefill_tokens: 10, prefill_pairs: 55, ..StepWork::default() };
    let second = StepWork { prefill_tokens: 6, prefill_pairs: 60 + 21, ..StepWork::default() };
    let decode = |context_tokens| StepWork { decode_sequences: 1, context_tokens, ..StepWork::default() };
    let t1 = Timestamp(1_000).after(model.step(first)).after(model.step(second));
    let t2 = t1.after(model.step(decode(16)));
    let t3 = t2.after(model.step(decode(17)));
    let job = JobId(1);
    assert_eq!(
        events[..3],
        [
            EngineEvent::FirstToken { job, at: t1 },
            EngineEvent::Token { job, at: t2 },
            EngineEvent::Token { job, at: t3 }
        ]
    );
    let end = report(&events, 1);
    assert_eq!((end.reason, end.generated_tokens, end.cached_tokens), (FinishReason::Length, 3, 0));
    assert_eq!(engine.stats().steps, 4);
}

#[test]
fn arrivals_during_a_step_wait_for_its_end_even_when_the_caller_is_late() {
    let mut engine = Engine::new(EngineConfig::default());
    engine.submit(Timestamp(0), job(1, tokens(1, 16), 2)).unwrap();
    let mut events = vec![];
    engine.advance(Timestamp(0), &mut events);
    let end_of_first = engine.next_event_at().unwrap();
    let arrival = end_of_first.after(Duration::from_nanos(1));
    // The caller did not come at the end of the first step; the second must not contain the job
    // that came after its start.
    engine.submit(arrival, job(2, tokens(2, 16), 1)).unwrap();
    engine.advance(end_of_first, &mut events);
    assert_eq!(engine.load().waiting, 1);
    assert_eq!(engine.load().running, 1);
    run_dry(&mut engine);
}

#[test]
fn a_repeated_prompt_hits_all_but_its_last_token() {
    for (length, expected) in [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (15, 12), (16, 12), (17, 16)] {
        let mut engine = Engine::new(small(64));
        engine.submit(Timestamp(0), job(1, tokens(1, length), 1)).unwrap();
        assert_eq!(report(&run_dry(&mut engine), 1).cached_tokens, 0);
        engine.submit(Timestamp(u64::MAX / 2), job(2, tokens(1, length), 1)).unwrap();
        assert_eq!(report(&run_dry(&mut engine), 2).cached_tokens, expected, "prompt of {length}");
    }
}

#[test]
fn adapters_and_salts_share_nothing() {
    let mut engine = Engine::new(small(64));
    let lora = |id: u64, name: &str| Job { lora: Some(name.into()), ..job(id, tokens(1, 9), 1) };
    let salt = |id: u64, name: &str| Job { cache_salt: Some(name.into()), ..job(id, tokens(1, 9), 1) };
    let jobs = [job(1, tokens(1, 9), 1), lora(2, "a"), lora(3, "b"), salt(4, "a"), lora(5, "a"), salt(6, "a")];
    let expected = [0, 0, 0, 0, 8, 8];
    for (job, expected) in jobs.into_iter().zip(expected) {
        let id = job.id.0;
        engine.submit(Timestamp(id << 40), job).unwrap();
        assert_eq!(report(&run_dry(&mut engine), id).cached_tokens, expected, "job {id}");
    }
}

#[test]
fn generated_tokens_are_cached_except_the_last() {
    let mut engine = Engine::new(small(64));
    engine.submit(Timestamp(0), job(1, tokens(1, 4), 9)).unwrap();
    run_dry(&mut engine);
    let mut next = tokens(1, 4);
    next.extend((0..9).map(|i| answer_token(1, i)));
    // 13 known tokens of which 12 are computed: three blocks. The fourth block would need the last token.
    next.extend(tokens(2, 7));
    engine.submit(Timestamp(1 << 40), job(2, next, 1)).unwrap();
    assert_eq!(report(&run_dry(&mut engine), 2).cached_tokens, 12);
}

#[test]
fn pieces_hit_like_the_tokens_that_they_stand_for() {
    let mut engine = Engine::new(small(64));
    let trace = |id: u64, pieces: &[(u64, u32)]| Job {
        prompt: JobPrompt::Pieces(pieces.iter().map(|(name, tokens)| Piece::new(*name, *tokens)).collect()),
        ..job(id, vec![], 1)
    };
    let mut cached = |id: u64, pieces: &[(u64, u32)]| {
        engine.submit(Timestamp(id << 40), trace(id, pieces)).unwrap();
        report(&run_dry(&mut engine), id).cached_tokens
    };
    assert_eq!(cached(1, &[(10, 4), (11, 4), (12, 2)]), 0);
    assert_eq!(cached(2, &[(10, 4), (11, 4), (99, 3)]), 8);
    assert_eq!(cached(3, &[(11, 4), (10, 4), (12, 3)]), 0);
    assert_eq!(cached(4, &[(10, 4), (11, 3), (12, 4)]), 4, "another cut inside the block");
}

#[test]
fn an_answer_comes_back_as_a_piece_of_its_name() {
    let mut engine = Engine::new(small(64));
    let turn = |id: u64, pieces: Vec<Piece>| Job {
        prompt: JobPrompt::Pieces(pieces),
        answer_seed: 700 + id,
        ..job(id, vec![], 10)
    };
    let mut history = vec![Piece::new(1, 6)];
    for id in 1..6 {
        engine.submit(Timestamp(id << 40), turn(id, history.clone())).unwrap();
        // Of each earlier turn 6 tokens of prompt and 10 of answer; of the last answer all but one
        // token, which was not computed.
        let computed = (16 * (id as u32 - 1)).saturating_sub(1);
        assert_eq!(report(&run_dry(&mut engine), id).cached_tokens, computed / 4 * 4, "turn {id}");
        history.extend([Piece::new(700 + id, 10), Piece::new(1_000 + id, 6)]);
    }
}

#[test]
fn the_last_admitted_is_preempted_and_still_finishes() {
    // 6 blocks of 4: two requests of 8 + 8 tokens need 8 blocks.
    let mut engine = Engine::new(small(6));
    engine.submit(Timestamp(0), job(1, tokens(1, 8), 8)).unwrap();
    engine.submit(Timestamp(0), job(2, tokens(2, 8), 8)).unwrap();
    let events = run_dry(&mut engine);
    assert!(events.iter().any(|event| matches!(event, EngineEvent::Preempted { job: JobId(2), .. })));
    assert!(!events.iter().any(|event| matches!(event, EngineEvent::Preempted { job: JobId(1), .. })));
    let (one, two) = (report(&events, 1), report(&events, 2));
    assert_eq!((one.generated_tokens, one.preemptions), (8, 0));
    assert_eq!(two.generated_tokens, 8);
    assert!(two.preemptions > 0);
    assert_eq!(engine.stats().generation_tokens, 16, "no token is said twice");
    assert_eq!(engine.kv.used(), 0);
}

#[test]
fn prompts_that_can_never_run_are_refused() {
    let mut engine = Engine::new(EngineConfig { max_num_queued: Some(1), ..small(4) });
    assert_eq!(engine.submit(Timestamp(0), job(1, vec![], 1)), Err(Refused::Empty));
    assert_eq!(engine.submit(Timestamp(0), job(1, tokens(1, 16), 1)), Err(Refused::TooLong { tokens: 16, limit: 16 }));
    assert_eq!(engine.submit(Timestamp(0), job(1, tokens(1, 15), 100)), Ok(()));
    assert_eq!(engine.submit(Timestamp(0), job(2, tokens(1, 3), 1)), Err(Refused::QueueFull { waiting: 1, limit: 1 }));
    let end = report(&run_dry(&mut engine), 1);
    assert_eq!((end.generated_tokens, end.reason), (1, FinishReason::Length), "the limit is cut to what fits");
    assert_eq!((engine.stats().submitted, engine.stats().rejected_queue_full), (1, 1));
}

#[test]
fn prefill_only_jobs_say_nothing() {
    let mut engine = Engine::new(small(4));
    engine.submit(Timestamp(0), job(1, tokens(1, 16), 0)).unwrap();
    let events = run_dry(&mut engine);
    assert_eq!(events.len(), 1);
    assert_eq!(report(&events, 1).generated_tokens, 0);
}

#[test]
fn a_batch_holds_as_many_adapters_as_it_may_and_others_pass() {
    let mut engine = Engine::new(EngineConfig { max_loras: 1, ..small(64) });
    let lora = |id: u64, name: &str| Job { lora: Some(name.into()), ..job(id, tokens(id as u32, 4), 2) };
    for job in [lora(1, "a"), lora(2, "b"), lora(3, "a"), job(4, tokens(4, 4), 2)] {
        engine.submit(Timestamp(0), job).unwrap();
    }
    engine.advance(Timestamp(0), &mut vec![]);
    assert_eq!(engine.load(), Load { running: 3, waiting: 1, deferred: 1, kv_usage: 3.0 / 64.0 });
    assert_eq!(engine.loras(), (vec!["a".into()], vec!["b".into()]));
    let events = run_dry(&mut engine);
    assert_eq!(report(&events, 2).generated_tokens, 2);
}

#[test]
fn a_cancelled_job_ends_once_and_frees_its_blocks() {
    let mut engine = Engine::new(small(64));
    let mut events = vec![];
    engine.submit(Timestamp(0), job(1, tokens(1, 8), 100)).unwrap();
    engine.advance(Timestamp(0), &mut events);
    assert!(engine.kv.used() > 0);
    assert!(engine.cancel(Timestamp(5), JobId(1), &mut events));
    assert!(!engine.cancel(Timestamp(5), JobId(1), &mut events));
    assert_eq!(engine.kv.used(), 0);
    events.extend(run_dry(&mut engine));
    assert_eq!(report(&events, 1).reason, FinishReason::Abort);
}

#[derive(Clone, Debug)]
struct Plan {
    gap: u64,
    prompt: u32,
    length: u32,
    max_tokens: u32,
    lora: Option<u8>,
    /// Cancelled this long after its arrival.
    cancel_after: Option<u64>,
    handoff: Handoff,
    /// Its blocks are asked for so long after its arrival: given back, or kept longer.
    touch: Option<(u64, bool)>,
}

fn handoffs() -> impl Strategy<Value = Handoff> {
    (prop::option::weighted(0.3, 0..400_000_000u64), prop_oneof![3 => Just(0), 2 => 0..70u32])
        .prop_map(|(hold, received)| Handoff { hold: hold.map(Duration::from_nanos), received })
}

fn plans() -> impl Strategy<Value = Vec<Plan>> {
    let plan = (
        0..40_000_000u64,
        0..4u32,
        1..60u32,
        0..30u32,
        prop::option::weighted(0.3, 0..3u8),
        prop::option::weighted(0.2, 0..60_000_000u64),
        handoffs(),
        prop::option::weighted(0.5, (0..400_000_000u64, any::<bool>())),
    )
        .prop_map(|(gap, prompt, length, max_tokens, lora, cancel_after, handoff, touch)| Plan {
            gap,
            prompt,
            length,
            max_tokens,
            lora,
            cancel_after,
            handoff,
            touch,
        });
    prop::collection::vec(plan, 1..40)
}

/// Runs the plans, checking what must hold after every event; returns the log.
fn play(config: &EngineConfig, plans: &[Plan]) -> (Vec<EngineEvent>, usize) {
    let mut engine = Engine::new(config.clone());
    let mut events = vec![];
    let mut actions: Vec<(u64, usize, bool)> = vec![];
    let mut arrival = 0;
    for (index, plan) in plans.iter().enumerate() {
        arrival += plan.gap;
        actions.push((arrival, index, false));
        actions.extend(plan.cancel_after.map(|after| (arrival + after, index, true)));
    }
    actions.sort_unstable();
    let mut accepted = 0;
    for (at, index, cancel) in actions {
        while let Some(next) = engine.next_event_at().filter(|next| next.0 <= at) {
            engine.advance(next, &mut events);
            check(&engine);
        }
        if cancel {
            engine.cancel(Timestamp(at), JobId(index as u64), &mut events);
        } else {
            let plan = &plans[index];
            let job = Job {
                lora: plan.lora.map(|n| n.to_string().into()),
                handoff: plan.handoff,
                ..job(index as u64, tokens(plan.prompt, plan.length), plan.max_tokens)
            };
            accepted += usize::from(engine.submit(Timestamp(at), job).is_ok());
        }
        check(&engine);
    }
    events.extend(run_dry(&mut engine));
    check(&engine);
    assert_eq!(engine.kv.used(), 0, "blocks are left over");
    (events, accepted)
}

fn check(engine: &Engine) {
    let batch = &engine.batch;
    assert!(batch.len() <= engine.config.max_num_seqs as usize);
    assert!(batch.seats().is_sorted() && batch.seats().ends_with(&batch.reading));
    let reads: u32 = batch.reading.iter().map(|seat| engine.sequences[seat.slot].scheduled).sum();
    assert!(batch.decoding().len() as u32 + reads <= engine.config.max_num_batched_tokens);
    let (running, _) = engine.loras();
    assert!(running.len() <= engine.config.max_loras as usize);
    assert_eq!(running.len(), engine.adapters.0.len());
    let mut context = 0;
    for seat in batch.seats() {
        let sequence = &engine.sequences[seat.slot];
        let steps = sequence.since.map_or(0, |since| (batch.step - since) as u32);
        let computed = sequence.computed + steps;
        context += if sequence.since.is_some() { u64::from(computed) } else { 0 };
        let scheduled = if sequence.since.is_some() { 1 } else { sequence.scheduled };
        assert!(computed + scheduled <= sequence.table.len() as u32 * engine.config.block_size);
        assert!(computed <= sequence.known_tokens() + steps);
        assert_eq!(sequence.since.is_none(), batch.reading.contains(seat));
    }
    assert_eq!(context, batch.context);
    assert!(engine.waiting.iter().all(|slot| engine.sequences[*slot].table.is_empty()));
    // Whoever has blocks is in the batch, outside it with what it received, or at its end with a lease: nothing leaks.
    let held: HashSet<_> = batch
        .seats()
        .iter()
        .map(|seat| seat.slot)
        .chain(engine.transfers.slots())
        .flat_map(|slot| engine.sequences[slot].table.iter().copied())
        .chain(engine.pins.tables().flatten().copied())
        .collect();
    assert_eq!(held.len(), engine.kv.used() as usize);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn every_job_ends_exactly_once_and_runs_repeat(
        blocks in 16..64u32,
        seqs in 1..6u32,
        budget in 1..24u32,
        plans in plans(),
    ) {
        let config = EngineConfig {
            block_size: 4,
            num_blocks: blocks,
            max_num_seqs: seqs,
            max_num_batched_tokens: budget,
            max_loras: 2,
            ..EngineConfig::default()
        };
        let (events, accepted) = play(&config, &plans);
        let mut said: HashMap<JobId, u32> = HashMap::new();
        let mut ended: HashMap<JobId, JobReport> = HashMap::new();
        let mut received = HashSet::new();
        let mut clock = Timestamp(0);
        for event in &events {
            let (job, at) = match event {
                EngineEvent::FirstToken { job, at } => {
                    prop_assert_eq!(said.insert(*job, 1), None);
                    (job, at)
                }
                EngineEvent::Token { job, at } => {
                    let count = said.get_mut(job);
                    prop_assert!(count.is_some(), "a token before the first");
                    *count.unwrap() += 1;
                    (job, at)
                }
                EngineEvent::Preempted { job, at } => (job, at),
                EngineEvent::Received { job, at } => {
                    prop_assert!(plans[job.0 as usize].handoff.received > 0 && received.insert(*job), "received twice");
                    (job, at)
                }
                EngineEvent::Finished { job, at, report } => {
                    prop_assert!(ended.insert(*job, *report).is_none(), "ended twice");
                    prop_assert_eq!(report.generated_tokens, said.get(job).copied().unwrap_or(0));
                    prop_assert!(report.cached_tokens < report.prompt_tokens);
                    (job, at)
                }
            };
            if !matches!(event, EngineEvent::Finished { .. }) {
                prop_assert!(!ended.contains_key(job), "something after the end");
            }
            prop_assert!(*at >= clock, "time goes back");
            clock = *at;
        }
        prop_assert_eq!(ended.len(), accepted);
        for (job, report) in &ended {
            let plan = &plans[job.0 as usize];
            prop_assert!(report.received_tokens <= plan.handoff.received);
            if report.reason != FinishReason::Abort {
                prop_assert_eq!(received.contains(job), plan.handoff.received > 0);
                let room = config.max_request_tokens() - plan.length;
                prop_assert_eq!(report.generated_tokens, plan.max_tokens.min(room));
            }
        }
        prop_assert_eq!(play(&config, &plans).0, events, "the same plans gave another run");
    }
}

proptest! {
    /// In a cache that never evicts, what is cached of a prompt is its longest head of whole blocks that an earlier
    /// request has computed, prompt or answer, less what holds the last token.
    #[test]
    fn a_hit_is_what_the_history_says(
        prompts in prop::collection::vec((prop::collection::vec(0..2u32, 1..40), 1..12u32, prop::option::of(0..20usize)), 1..12)
    ) {
        let mut engine = Engine::new(EngineConfig { num_blocks: 1_000, ..small(1_000) });
        let mut computed: Vec<Vec<u32>> = vec![];
        for (id, (own, max_tokens, continues)) in prompts.into_iter().enumerate() {
            // Some prompts go on where an earlier conversation stopped.
            let mut prompt = continues.and_then(|i| computed.get(i).cloned()).unwrap_or_default();
            prompt.extend(own);
            let shared = |old: &Vec<u32>| {
                let equal = old.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
                (equal / 4).min((prompt.len() - 1) / 4) * 4
            };
            let expected = computed.iter().map(shared).max().unwrap_or(0);
            engine.submit(Timestamp((id as u64) << 40), job(id as u64, prompt.clone(), max_tokens)).unwrap();
            let end = report(&run_dry(&mut engine), id as u64);
            prop_assert_eq!(end.cached_tokens as usize, expected);
            prompt.extend((0..max_tokens - 1).map(|i| answer_token(id as u64, i)));
            computed.push(prompt);
        }
    }
}
