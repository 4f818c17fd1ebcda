//! A pool of simulated engines and the picker in front of it, in virtual time: no HTTP, no clock. Nothing but the requests and the seed
//! decides, so equal runs are equal.
//!
//! `data/conversation-2000.jsonl` is the beginning of the conversation trace published with Mooncake (FAST'25, `kvcache-ai/Mooncake`,
//! Apache-2.0): one request a line, `hash_ids` name the prompt's 512-token blocks, and an id implies all before it.

use attache::clock::Timestamp;
use attache::ids::EndpointId;
use attache::pool::health::HealthPolicy;
use attache::pool::ledger::Ticket;
use attache::pool::speed::{Reservation, Work};
use attache::pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
use attache::prefix::cache::{BlockUnit, CacheConfig, Coming, PrefixCache};
use attache::prefix::claims::DEFAULT_CLAIM_LIFE;
use attache::prefix::key::BlockKey;
use attache::rng;
use attache::scheduling::scheduler::Explain;
use attache::scheduling::{Choices, PickContext, RequestFacts, Scheduler, registry};
use attache::sim::content::{Contents, Piece};
use attache::sim::engine::{Engine, EngineConfig, EngineEvent, FinishReason, Job, JobId, JobPrompt, JobReport};
use std::collections::BTreeMap;
use std::ops::{Add, Sub};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const BLOCK: u32 = 16;
/// Tokens in a block of the trace.
const TRACE_BLOCK: u32 = 512;
/// The cache of an 8B model on an 80 GB card.
pub(crate) const NUM_BLOCKS: u32 = 27_000;
pub(crate) const ENGINES: usize = 8;
/// How often metrics pages are read.
const SCRAPE: Duration = Duration::from_millis(100);
pub(crate) const SEED: u64 = 11;

/// A request of the trace.
#[derive(Clone, Debug)]
pub(crate) struct Traced {
    pub(crate) at: Timestamp,
    pub(crate) prompt: Vec<Piece>,
    pub(crate) answer: u32,
}

/// The trace, `speed` times as fast as it was recorded.
pub(crate) fn trace(speed: f64) -> Vec<Traced> {
    let text = include_str!("../data/conversation-2000.jsonl");
    let request = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let number = |name: &str| line[name].as_u64().expect("a number");
        let mut rest = number("input_length") as u32;
        let piece = |id: &serde_json::Value| {
            let tokens = rest.min(TRACE_BLOCK);
            rest -= tokens;
            Piece::new(id.as_u64().expect("an id"), tokens)
        };
        Traced {
            at: Timestamp((number("timestamp") as f64 * 1e6 / speed) as u64 + 1),
            prompt: line["hash_ids"].as_array().expect("ids").iter().map(piece).collect(),
            answer: number("output_length") as u32,
        }
    };
    text.lines().map(request).collect()
}

/// The keys of a prompt's full blocks, and what is to be added to them.
pub(crate) fn keys(prompt: &[Piece]) -> (Vec<BlockKey>, Contents) {
    let (mut keys, mut contents) = (Vec::new(), Contents::new(BLOCK));
    prompt.iter().for_each(|piece| contents.push(*piece, |content| keys.push(BlockKey(content))));
    (keys, contents)
}

/// The answer to a job: text that no prompt begins with.
fn answer_name(job: JobId) -> u64 {
    !job.0
}

pub(crate) fn engine_config(num_blocks: u32) -> EngineConfig {
    EngineConfig { num_blocks, max_model_len: 131_072, every_token: false, ..EngineConfig::default() }
}

/// A request that has not ended.
struct Running {
    server: usize,
    /// The prompt's full blocks.
    keys: Vec<BlockKey>,
    /// The tokens behind them.
    tail: Contents,
    foretold: u64,
    claim: Option<Coming>,
    ticket: Ticket,
    reservation: Reservation,
    arrived: Timestamp,
    first_token: Option<Timestamp>,
}

/// What requests got, seconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Latencies {
    /// To the first token.
    pub(crate) first_token: Vec<f64>,
    /// Between two tokens, in the mean of each answer.
    pub(crate) per_token: Vec<f64>,
}

impl Latencies {
    /// The mean.
    pub(crate) fn mean(values: &[f64]) -> f64 {
        values.iter().sum::<f64>() / values.len() as f64
    }

    /// The value that `part` of them don't exceed.
    pub(crate) fn quantile(values: &[f64], part: f64) -> f64 {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() - 1) as f64 * part) as usize]
    }
}

/// What was thought to be cached and what was, tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    pub(crate) requests: u64,
    pub(crate) prompt: u64,
    pub(crate) foretold: u64,
    pub(crate) reported: u64,
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
    pub(crate) fn error(&self) -> f64 {
        self.foretold as f64 / self.reported as f64 - 1.0
    }

    pub(crate) fn hit_ratio(&self) -> f64 {
        self.reported as f64 / self.prompt as f64
    }
}

/// A pool of engines and the picker in front of it.
pub(crate) struct World {
    engines: Vec<Engine>,
    /// What the engines' pages say of their size.
    pub(crate) says: Vec<u32>,
    started: Vec<f64>,
    endpoints: Vec<Arc<Endpoint>>,
    pub(crate) cache: PrefixCache,
    scheduler: Scheduler,
    snapshot: PoolSnapshot,
    pub(crate) next_scrape: Timestamp,
    running: BTreeMap<JobId, Running>,
    next_job: u64,
    pub(crate) sums: Vec<Sums>,
    pub(crate) latencies: Latencies,
}

impl World {
    /// Engines of these sizes, all equally fast.
    pub(crate) fn new(strategy: &str, parameters: serde_json::Value, sizes: &[u32]) -> Self {
        let configs: Vec<_> = sizes.iter().map(|n| engine_config(*n)).collect();
        Self::of(strategy, parameters, &configs)
    }

    /// These engines.
    pub(crate) fn of(strategy: &str, parameters: serde_json::Value, configs: &[EngineConfig]) -> Self {
        let sizes: Vec<u32> = configs.iter().map(|c| c.num_blocks).collect();
        let strategy = registry::strategy(strategy).expect("a strategy");
        let strategy = (strategy.build)(&parameters).expect("parameters");
        let spec = |i| EndpointSpec::at(([10, 0, 0, i as u8], 8000).into());
        let pool = Arc::default();
        let endpoint = |i| Arc::new(Endpoint::in_pool(EndpointId(i as u32), spec(i), &pool));
        let mut world = Self {
            engines: configs.iter().map(|c| Engine::new(c.clone())).collect(),
            says: sizes.to_vec(),
            started: vec![1.0; sizes.len()],
            endpoints: (0..sizes.len()).map(endpoint).collect(),
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
            latencies: Latencies::default(),
        };
        world.scrape(Timestamp(0));
        world
    }

    /// The pipeline as it is by default.
    pub(crate) fn by_prefix(sizes: &[u32]) -> Self {
        Self::new("pipeline", serde_json::Value::Null, sizes)
    }

    pub(crate) fn scrape(&mut self, now: Timestamp) {
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
    pub(crate) fn advance(&mut self, now: Timestamp) {
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
    pub(crate) fn finish(&mut self) {
        while !self.running.is_empty() {
            self.advance(self.next_scrape);
        }
    }

    /// A request comes. Returns the server that it went to.
    pub(crate) fn arrive(&mut self, now: Timestamp, prompt: Vec<Piece>, answer: u32) -> usize {
        self.advance(now);
        let (keys, tail) = keys(&prompt);
        let prompt = JobPrompt::Pieces(prompt);
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
        let cached = found.tokens(found.depth(picked.id).any).min(tokens);
        self.cache.decided(tokens, cached);
        let work = Work { prompt_tokens: tokens, uncached_tokens: tokens - cached, adapter_cold: false };
        let fresh = self.snapshot.endpoints[server].metrics.as_deref();
        let running = Running {
            server,
            reservation: Reservation::begin(picked.clone(), fresh, work, true, now),
            arrived: now,
            first_token: None,
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
            answer_seed: answer_name(id),
        };
        self.engines[server].submit(now, job).expect("room for the job");
        server
    }

    pub(crate) fn take(&mut self, event: EngineEvent) {
        match event {
            EngineEvent::FirstToken { job, at } => {
                let running = self.running.get_mut(&job).expect("a job that runs");
                running.ticket.first_byte();
                running.reservation.first_token(true, at);
                running.first_token = Some(at);
                self.latencies.first_token.push(at.since(running.arrived).as_secs_f64());
                running.claim.as_mut().expect("a claim").arrived();
                self.cache.record(EndpointId(running.server as u32), &running.keys, None, at);
                running.claim = None;
            }
            EngineEvent::Finished { job, at, report } => self.end(job, at, report),
            EngineEvent::Token { .. } | EngineEvent::Preempted { .. } => {}
        }
    }

    pub(crate) fn end(&mut self, job: JobId, at: Timestamp, report: JobReport) {
        let mut running = self.running.remove(&job).expect("a job that runs");
        if report.reason == FinishReason::Abort {
            return;
        }
        running.reservation.ended(Some(u64::from(report.generated_tokens)), at);
        if let (Some(first), 2..) = (running.first_token, report.generated_tokens) {
            let seconds = at.since(first).as_secs_f64();
            self.latencies.per_token.push(seconds / f64::from(report.generated_tokens - 1));
        }
        let server = EndpointId(running.server as u32);
        let cached = u64::from(report.cached_tokens);
        self.cache.correct(server, running.foretold, Some(u64::from(report.prompt_tokens)), Some(cached), 0);
        let answer = Piece::new(answer_name(job), report.generated_tokens);
        running.tail.push(answer, |content| running.keys.push(BlockKey(content)));
        self.cache.record(server, &running.keys, None, at);
        let sums = &mut self.sums[running.server];
        sums.requests += 1;
        sums.prompt += u64::from(report.prompt_tokens);
        sums.foretold += running.foretold;
        sums.reported += cached;
    }

    pub(crate) fn arrive_traced(&mut self, request: &Traced) -> usize {
        self.arrive(request.at, request.prompt.clone(), request.answer)
    }

    /// One prompt with nothing else going on. Returns what that adds to the sums, and the answer.
    pub(crate) fn ask(&mut self, prompt: &[Piece], answer: u32) -> (Sums, Piece) {
        let (before, job) = (self.total(), JobId(self.next_job));
        self.arrive(self.next_scrape, prompt.to_vec(), answer);
        self.finish();
        (self.total() - before, Piece::new(answer_name(job), answer))
    }

    /// A new process takes a server's place: it has nothing, and what was asked of it fails.
    pub(crate) fn restart(&mut self, server: usize, now: Timestamp) {
        self.advance(now);
        let mut events = Vec::new();
        self.engines[server].restart(now, &mut events);
        events.into_iter().for_each(|event| self.take(event));
        self.started[server] += 1.0;
    }

    pub(crate) fn endpoints(&self) -> &[Arc<Endpoint>] {
        &self.endpoints
    }

    pub(crate) fn total(&self) -> Sums {
        self.sums.iter().fold(Sums::default(), |a, b| a + *b)
    }

    pub(crate) fn play(&mut self, trace: &[Traced]) {
        for request in trace {
            self.arrive_traced(request);
        }
        self.finish();
    }

    pub(crate) fn evictions(&self) -> u64 {
        self.cache.index().stats().evicted_for_capacity
    }
}

/// Text that stands nowhere else, neither in the trace.
pub(crate) fn text(seed: u32, length: u32) -> Piece {
    Piece::new(1 << 40 | u64::from(seed), length)
}
