//! Approximate mode against engines, in virtual time: what the picker thinks a server has cached, and what the server then reports.
//!
//! Simulated engines without HTTP, the real pipeline over the real prefix cache. Nothing but the trace and the seed decides, so equal
//! runs are equal. `data/conversation-2000.jsonl` is the beginning of the conversation trace published with Mooncake (FAST'25,
//! `kvcache-ai/Mooncake`, Apache-2.0): one request a line, `hash_ids` name the prompt's 512-token blocks, and an id implies all before it.

use attache::clock::Timestamp;
use attache::ids::EndpointId;
use attache::pool::health::HealthPolicy;
use attache::pool::ledger::Ticket;
use attache::pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
use attache::prefix::cache::{BlockUnit, CacheConfig, Coming, PrefixCache};
use attache::prefix::claims::DEFAULT_CLAIM_LIFE;
use attache::prefix::key::BlockKey;
use attache::rng;
use attache::scheduling::scheduler::Explain;
use attache::scheduling::{Choices, PickContext, RequestFacts, Scheduler, registry};
use attache::sim::engine::{Engine, EngineConfig, EngineEvent, FinishReason, Job, JobId, JobPrompt, JobReport};
use attache::sim::kv::content_hash;
use attache::sim::tokenizer::answer_token;
use std::collections::BTreeMap;
use std::ops::{Add, Sub};
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u32 = 16;
/// Tokens in a block of the trace.
const TRACE_BLOCK: u32 = 512;
/// The cache of an 8B model on an 80 GB card.
const NUM_BLOCKS: u32 = 27_000;
const ENGINES: usize = 8;
/// How often metrics pages are read.
const SCRAPE: Duration = Duration::from_millis(100);
const SEED: u64 = 11;
/// Twice as fast as it was recorded: requests wait 2 to 3 s in the mean and none is preempted. At 2.5 the engines run out of blocks.
const SPEED: f64 = 2.0;

/// A request of the trace, in blocks of the engines' size.
#[derive(Clone, Debug)]
struct Traced {
    at: Timestamp,
    /// Of all blocks; the last may be partial.
    contents: Vec<u64>,
    tokens: u32,
    answer: u32,
}

/// The trace, [`SPEED`] times as fast as it was recorded.
fn trace() -> Vec<Traced> {
    let text = include_str!("data/conversation-2000.jsonl");
    let request = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let number = |name: &str| line[name].as_u64().expect("a number");
        let tokens = number("input_length") as u32;
        let part = |i: u32| {
            let id = line["hash_ids"][(i * BLOCK / TRACE_BLOCK) as usize].as_u64().expect("an id");
            // Injective, and away from the hashes of answers.
            mix(id << 8 | u64::from(i % (TRACE_BLOCK / BLOCK)))
        };
        Traced {
            at: Timestamp((number("timestamp") as f64 * 1e6 / SPEED) as u64 + 1),
            contents: (0..tokens.div_ceil(BLOCK)).map(part).collect(),
            tokens,
            answer: number("output_length") as u32,
        }
    };
    text.lines().map(request).collect()
}

/// A bijection of 64 bits (the end of splitmix64).
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn engine_config(num_blocks: u32) -> EngineConfig {
    EngineConfig { num_blocks, max_model_len: 131_072, ..EngineConfig::default() }
}

/// A request that has not ended.
struct Running {
    server: usize,
    /// The prompt's full blocks.
    keys: Vec<BlockKey>,
    /// The tokens behind them.
    tail: Vec<u32>,
    foretold: u64,
    claim: Option<Coming>,
    ticket: Ticket,
}

/// What was thought to be cached and what was, tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sums {
    requests: u64,
    prompt: u64,
    foretold: u64,
    reported: u64,
}

impl Add for Sums {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            prompt: self.prompt + other.prompt,
            foretold: self.foretold + other.foretold,
            reported: self.reported + other.reported,
        }
    }
}

impl Sub for Sums {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            requests: self.requests - other.requests,
            prompt: self.prompt - other.prompt,
            foretold: self.foretold - other.foretold,
            reported: self.reported - other.reported,
        }
    }
}

impl Sums {
    fn error(&self) -> f64 {
        self.foretold as f64 / self.reported as f64 - 1.0
    }

    fn hit_ratio(&self) -> f64 {
        self.reported as f64 / self.prompt as f64
    }
}

/// A pool of engines and the picker in front of it.
struct World {
    engines: Vec<Engine>,
    /// What the engines' pages say of their size.
    says: Vec<u32>,
    started: Vec<f64>,
    endpoints: Vec<Arc<Endpoint>>,
    cache: PrefixCache,
    scheduler: Scheduler,
    snapshot: PoolSnapshot,
    next_scrape: Timestamp,
    running: BTreeMap<JobId, Running>,
    next_job: u64,
    sums: Vec<Sums>,
}

impl World {
    fn new(strategy: &str, parameters: serde_json::Value, sizes: &[u32]) -> Self {
        let strategy = registry::strategy(strategy).expect("a strategy");
        let strategy = (strategy.build)(&parameters).expect("parameters");
        let endpoint = |i| EndpointSpec::at(([10, 0, 0, i as u8], 8000).into());
        let mut world = Self {
            engines: sizes.iter().map(|n| Engine::new(engine_config(*n))).collect(),
            says: sizes.to_vec(),
            started: vec![1.0; sizes.len()],
            endpoints: (0..sizes.len()).map(|i| Arc::new(Endpoint::new(EndpointId(i as u32), endpoint(i)))).collect(),
            cache: PrefixCache::new(&CacheConfig {
                unit: BlockUnit::Tokens(BLOCK),
                max_bytes: 64 << 20,
                tenant_share: 1.0,
                claim_life: DEFAULT_CLAIM_LIFE,
                seed: SEED,
            }),
            scheduler: Scheduler::new(Choices::only("test", strategy), HealthPolicy::default(), 1),
            snapshot: PoolSnapshot::default(),
            next_scrape: Timestamp(0),
            running: BTreeMap::new(),
            next_job: 0,
            sums: vec![Sums::default(); sizes.len()],
        };
        world.scrape(Timestamp(0));
        world
    }

    /// The pipeline as it is by default.
    fn by_prefix(sizes: &[u32]) -> Self {
        Self::new("pipeline", serde_json::Value::Null, sizes)
    }

    fn scrape(&mut self, now: Timestamp) {
        let state = |(i, endpoint): (usize, &Arc<Endpoint>)| {
            let load = self.engines[i].load();
            let metrics = EndpointMetrics {
                scraped_at: now,
                waiting: load.waiting as u32,
                running: load.running as u32,
                kv_usage: load.kv_usage as f32,
                block_size: Some(BLOCK),
                num_blocks: Some(self.says[i]),
                process_start: Some(self.started[i]),
                in_flight_at_scrape: endpoint.ledger.in_flight(),
                ..EndpointMetrics::default()
            };
            EndpointState { endpoint: endpoint.clone(), metrics: Some(Arc::new(metrics)) }
        };
        let generation = self.snapshot.generation + 1;
        self.snapshot = PoolSnapshot::new(generation, true, self.endpoints.iter().enumerate().map(state).collect());
        self.cache.reconcile(&self.snapshot);
        self.next_scrape = now.after(SCRAPE);
    }

    /// Lets time pass up to `now`, event by event.
    fn advance(&mut self, now: Timestamp) {
        loop {
            let engines = self.engines.iter().enumerate();
            let first = engines.filter_map(|(i, e)| Some((e.next_event_at()?, i))).min();
            let next = first.map_or(self.next_scrape, |(at, _)| at.min(self.next_scrape));
            if next > now {
                return;
            }
            match first {
                Some((at, i)) if at <= self.next_scrape => {
                    let mut events = Vec::new();
                    self.engines[i].advance(at, &mut events);
                    events.into_iter().for_each(|event| self.take(event));
                }
                _ => self.scrape(self.next_scrape),
            }
        }
    }

    /// Until all requests have ended.
    fn finish(&mut self) {
        while !self.running.is_empty() {
            self.advance(self.next_scrape);
        }
    }

    /// A request comes. Returns the server that it went to.
    fn arrive(&mut self, now: Timestamp, prompt: JobPrompt, keys: Vec<BlockKey>, tail: Vec<u32>, answer: u32) -> usize {
        self.advance(now);
        let tokens = prompt.tokens();
        let found = self.cache.lookup(&mut &keys[..], now);
        let cx = PickContext {
            request: RequestFacts { model: "sim", prompt_tokens: tokens, ..RequestFacts::default() },
            prefix: Some(&found),
            ..PickContext::new(&self.snapshot, now, Duration::from_secs(2))
        };
        let id = JobId(self.next_job);
        self.next_job += 1;
        let strategy = &*self.scheduler.choices.default.strategy;
        let decision = self
            .scheduler
            .decide(strategy, &cx, None, Explain::No, &mut rng::for_request(SEED, id.0))
            .expect("a decision");
        let picked = decision.picks[0].clone();
        let server = picked.id.0 as usize;
        self.cache.decided(tokens, found.tokens(found.depth(picked.id).any).min(tokens));
        let running = Running {
            server,
            foretold: u64::from(found.tokens(found.held(picked.id).any)),
            claim: Some(self.cache.claim(picked.id, &keys, keys.len() as u32 - found.held(picked.id).any, now)),
            ticket: Ticket::book(picked, tokens),
            keys,
            tail,
        };
        self.running.insert(id, running);
        let job = Job {
            id,
            prompt,
            max_tokens: answer.max(1),
            stops_after: None,
            lora: None,
            cache_salt: None,
            answer_seed: id.0,
        };
        self.engines[server].submit(now, job).expect("room for the job");
        server
    }

    fn take(&mut self, event: EngineEvent) {
        match event {
            EngineEvent::FirstToken { job, at } => {
                let running = self.running.get_mut(&job).expect("a job that runs");
                running.ticket.first_byte();
                running.claim.as_mut().expect("a claim").arrived();
                self.cache.record(EndpointId(running.server as u32), &running.keys, None, at);
                running.claim = None;
            }
            EngineEvent::Finished { job, at, report } => self.end(job, at, report),
            EngineEvent::Token { .. } | EngineEvent::Preempted { .. } => {}
        }
    }

    fn end(&mut self, job: JobId, at: Timestamp, report: JobReport) {
        let mut running = self.running.remove(&job).expect("a job that runs");
        if report.reason == FinishReason::Abort {
            return;
        }
        let server = EndpointId(running.server as u32);
        let cached = u64::from(report.cached_tokens);
        self.cache.correct(server, running.foretold, Some(u64::from(report.prompt_tokens)), Some(cached), 0);
        running.tail.extend((0..report.generated_tokens).map(|i| answer_token(job.0, i)));
        running.keys.extend(running.tail.chunks_exact(BLOCK as usize).map(|block| BlockKey(content_hash(block))));
        self.cache.record(server, &running.keys, None, at);
        let sums = &mut self.sums[running.server];
        sums.requests += 1;
        sums.prompt += u64::from(report.prompt_tokens);
        sums.foretold += running.foretold;
        sums.reported += cached;
    }

    fn arrive_traced(&mut self, request: &Traced) -> usize {
        let full = (request.tokens / BLOCK) as usize;
        let keys = request.contents[..full].iter().map(|content| BlockKey(*content)).collect();
        // As the engine has it: stand-ins for the tokens of the partial block.
        let partial = request.contents.get(full).copied().unwrap_or_default();
        let tail = (0..request.tokens % BLOCK).map(|i| answer_token(partial, i)).collect();
        let prompt = JobPrompt::Blocks { contents: request.contents.clone(), tokens: request.tokens };
        self.arrive(request.at, prompt, keys, tail, request.answer)
    }

    /// One prompt of tokens with nothing else going on. Returns what that adds to the sums, and the answer.
    fn ask(&mut self, tokens: &[u32], answer: u32) -> (Sums, Vec<u32>) {
        let (before, job) = (self.total(), self.next_job);
        let blocks = tokens.chunks_exact(BLOCK as usize);
        let tail = blocks.remainder().to_vec();
        let keys = blocks.map(|block| BlockKey(content_hash(block))).collect();
        self.arrive(self.next_scrape, JobPrompt::Tokens(tokens.to_vec()), keys, tail, answer);
        self.finish();
        (self.total() - before, (0..answer).map(|i| answer_token(job, i)).collect())
    }

    /// A new process takes a server's place: it has nothing, and what was asked of it fails.
    fn restart(&mut self, server: usize, now: Timestamp) {
        self.advance(now);
        let mut events = Vec::new();
        self.engines[server].restart(now, &mut events);
        events.into_iter().for_each(|event| self.take(event));
        self.started[server] += 1.0;
    }

    fn total(&self) -> Sums {
        self.sums.iter().fold(Sums::default(), |a, b| a + *b)
    }

    fn play(&mut self, trace: &[Traced]) {
        for request in trace {
            self.arrive_traced(request);
        }
        self.finish();
    }

    fn evictions(&self) -> u64 {
        self.cache.index().stats().evicted_for_capacity
    }
}

/// Tokens that stand nowhere else.
fn text(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| mix(u64::from(seed) << 32 | u64::from(i)) as u32 >> 8).collect()
}

#[test]
fn on_the_conversation_trace_the_estimate_is_what_engines_report_and_routing_by_it_pays() {
    let trace = trace();
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
    let mut conversation = text(1, 1_000);
    for turn in 0..5 {
        let (sums, answer) = world.ask(&conversation, 333);
        // Full blocks of the last turn's prompt and answer; of an answer the last token is said and not computed.
        let expected = if turn == 0 { 0 } else { (conversation.len() as u64 - 99 - 1) / 16 * 16 };
        assert_eq!(sums.reported, expected, "turn {turn}");
        assert!(sums.foretold.abs_diff(expected) <= u64::from(BLOCK), "turn {turn}: {sums:?}");
        conversation.extend(answer);
        conversation.extend(text(10 + turn, 99));
    }
}

#[test]
fn a_new_process_is_thought_to_hold_nothing() {
    let mut world = World::by_prefix(&[NUM_BLOCKS; 3]);
    let trace = trace();
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
        let keys: Vec<_> = request.contents.iter().map(|content| BlockKey(*content)).collect();
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
            let mut prompt = text(document, 50 * BLOCK);
            prompt.extend(text(1_000 + (phase * 1_000 + i) as u32, 8));
            world.ask(&prompt, 4);
        }
        sums.push(world.total() - before);
    }
    let errors: Vec<f64> = sums.iter().map(Sums::error).collect();
    assert!(errors[0] > 0.05, "at first it is believed: {errors:.3?}");
    assert!(errors[4..].iter().all(|error| error.abs() <= 0.05), "{errors:.3?}");
}
