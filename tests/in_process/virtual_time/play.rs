//! Runs of one pool of simulated engines in virtual time. Results depend only on the requests and the seed, so equal
//! runs are equal.
//!
//! `data/conversation-2000.jsonl` is the start of the conversation trace published with Mooncake (FAST'25,
//! `kvcache-ai/Mooncake`, Apache-2.0). Each line is a request, and `hash_ids` name the prompt's 512-token blocks. An id
//! implies all blocks before it.

use attache_pool::Endpoint;
use attache_pool::health::HealthPolicy;
use attache_prefix::cache::{BlockUnit, CacheConfig};
use attache_prefix::claims::DEFAULT_CLAIM_LIFE;
use attache_replay::front::{FrontConfig, simulated_prefix};
use attache_replay::world::{SignalSettings, TimedChange, World, WorldConfig, spec};
use attache_report::Observer;
use attache_report::served::{Ending, Sample, Served};
use attache_scheduling::{Choices, Scheduler};
use attache_sim::content::Piece;
use attache_sim::engine::EngineConfig;
use attache_sim::latency::{DEFAULT_STEP_BASE, DEFAULT_WEIGHT_READ, LatencyModel};
use attache_types::clock::{Clock, Timestamp};
use attache_workload::pace::{Limited, Scaled};
use attache_workload::trace;
use attache_workload::{PromptPart, Request, Speaker, TraceError, Workload};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const BLOCK: u32 = 16;
/// Cache blocks of an 8B model on an 80 GB GPU.
pub(crate) const NUM_BLOCKS: u32 = 27_000;
pub(crate) const ENGINES: usize = 8;
/// Scrape interval.
pub(crate) const SCRAPE: Duration = Duration::from_millis(100);
pub(crate) const SEED: u64 = 11;

/// The first requests of the trace, sped up by `speed`.
pub(crate) fn conversations(speed: f64, requests: u64) -> Box<dyn Workload> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conversation-2000.jsonl");
    let trace = trace::open(&path, &trace::Options::default()).expect("the trace");
    Box::new(Limited::new(Box::new(Scaled::new(trace, speed).expect("a speed")), Some(requests), None))
}

/// Text that occurs nowhere else, also not in the trace.
pub(crate) fn text(seed: u32, length: u32) -> Piece {
    Piece::new(1 << 40 | u64::from(seed), length)
}

/// A request whose response no prompt repeats.
pub(crate) fn request(number: u64, at: Timestamp, prompt: &[Piece], answer: u32) -> Request {
    let part = |piece: &Piece| PromptPart::text(Speaker::User, *piece);
    Request {
        number,
        at,
        prompt: prompt.iter().map(part).collect(),
        answer: Piece::new(!number, answer),
        adapter: None,
        session: None,
        tenant: None,
        priority: 0,
        headers: Vec::new(),
        turn: None,
    }
}

/// An open workload: requests arrive at their own times.
pub(crate) struct Open(std::vec::IntoIter<Request>);

impl Open {
    pub(crate) fn new(requests: Vec<Request>) -> Self {
        Self(requests.into_iter())
    }
}

impl Workload for Open {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        Ok(self.0.next())
    }
}

/// Sends each request one scrape interval after the response to the previous one, so only one is in flight.
pub(crate) struct OneByOne {
    requests: std::vec::IntoIter<Request>,
    begun: bool,
}

impl OneByOne {
    pub(crate) fn new(requests: Vec<Request>) -> Self {
        Self { requests: requests.into_iter(), begun: false }
    }
}

impl Workload for OneByOne {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        let is_first = !std::mem::replace(&mut self.begun, true);
        Ok(if is_first { self.requests.next() } else { None })
    }

    fn ended(&mut self, _: u64, now: Timestamp) -> Vec<Request> {
        self.requests.next().map(|request| Request { at: now.after(SCRAPE), ..request }).into_iter().collect()
    }
}

/// A pool of engines.
pub(crate) struct Pool {
    pub(crate) engines: Vec<EngineConfig>,
    pub(crate) changes: Vec<TimedChange>,
    /// The number of blocks that the engines' metrics report.
    pub(crate) reported_blocks: Option<u32>,
}

/// Results of a run.
pub(crate) struct Played {
    /// Every request, by its number.
    pub(crate) served: Vec<Served>,
    /// The picker's endpoints after the run.
    pub(crate) endpoints: Vec<Arc<Endpoint>>,
    /// Blocks that the picker estimated as evicted.
    pub(crate) evictions: u64,
}

#[derive(Default)]
struct Seen(Vec<Served>);

impl Observer for Seen {
    fn served(&mut self, served: &Served) {
        self.0.push(*served);
    }

    fn sampled(&mut self, _: Timestamp, _: &[Sample]) {}
}

impl Pool {
    /// Engines of these cache sizes and equal speed.
    pub(crate) fn of_sizes(sizes: &[u32]) -> Self {
        // Compute time adds to the weight-read time instead of overlapping it, so the prefill speed can be learned
        // exactly.
        let latency = LatencyModel {
            step_base: DEFAULT_STEP_BASE + DEFAULT_WEIGHT_READ,
            weight_read: Duration::ZERO,
            ..LatencyModel::default()
        };
        let engine = |n: &u32| EngineConfig {
            num_blocks: *n,
            max_model_len: 131_072,
            latency: latency.clone(),
            ..EngineConfig::default()
        };
        Self { engines: sizes.iter().map(engine).collect(), changes: Vec::new(), reported_blocks: None }
    }

    /// Engines of these speeds and equal cache size.
    pub(crate) fn of_speeds(speeds: &[f64]) -> Self {
        let mut pool = Self::of_sizes(&vec![NUM_BLOCKS; speeds.len()]);
        pool.engines.iter_mut().zip(speeds).for_each(|(engine, speed)| engine.latency.speed = *speed);
        pool
    }

    /// Runs `workload` on the pool. A policy is a name, or `name={…}` with parameters.
    pub(crate) fn play(&self, policy: &str, workload: &mut dyn Workload) -> Played {
        let (name, parameters) = policy.split_once('=').unwrap_or((policy, "null"));
        let parameters: Value = serde_json::from_str(parameters).expect("JSON");
        let strategy = attache::plugins::registry().build(name, &parameters).expect("a strategy");
        let scheduler = Scheduler::new(Choices::only("test", strategy), HealthPolicy::default(), 1);
        let cache = CacheConfig {
            claim_every_block: false,
            unit: BlockUnit::Tokens(BLOCK),
            max_bytes: 64 << 20,
            tenant_share: 1.0,
            claim_life: DEFAULT_CLAIM_LIFE,
            seed: SEED,
        };
        let prefix = simulated_prefix(&cache, None, Clock::start());
        let config = WorldConfig {
            pickers: vec![FrontConfig::new(scheduler, prefix, Duration::from_secs(2), SEED)],
            bus: None,
            servers: self.engines.iter().cloned().enumerate().map(|(i, engine)| (spec(i), engine)).collect(),
            ranks: 1,
            signals: SignalSettings {
                metrics_every: SCRAPE,
                metrics_delay: Duration::ZERO,
                reported_blocks: self.reported_blocks,
                discovery_delay: SCRAPE,
                kv_events: None,
            },
            changes: self.changes.clone(),
            seed: SEED,
        };
        let mut seen = Seen::default();
        let mut world = World::new(config, workload, &mut seen).unwrap();
        let outcome = world.run().expect("a workload without mistakes");
        let endpoints = world.snapshot().endpoints.iter().map(|state| state.endpoint.clone()).collect();
        let evictions = world.cache().index().stats().evicted_for_capacity;
        seen.0.sort_by_key(|served| served.number);
        assert_eq!(seen.0.len() as u64, outcome.requests, "every request has one end");
        Played { served: seen.0, endpoints, evictions }
    }
}

/// Estimated and reported cached tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    pub(crate) requests: u64,
    pub(crate) prompt: u64,
    pub(crate) foretold: u64,
    pub(crate) reported: u64,
}

impl Sums {
    /// Sums over completed requests.
    pub(crate) fn of<'a>(served: impl IntoIterator<Item = &'a Served>) -> Self {
        let mut sums = Self::default();
        for served in served.into_iter().filter(|s| s.ending == Ending::Answered) {
            sums.requests += 1;
            sums.prompt += u64::from(served.prompt_tokens);
            sums.foretold += u64::from(served.expected_cached_tokens);
            sums.reported += u64::from(served.cached_tokens);
        }
        sums
    }

    pub(crate) fn error(&self) -> f64 {
        self.foretold as f64 / self.reported as f64 - 1.0
    }

    pub(crate) fn hit_ratio(&self) -> f64 {
        self.reported as f64 / self.prompt as f64
    }
}
