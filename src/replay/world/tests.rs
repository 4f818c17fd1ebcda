#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

use super::*;
use crate::front::{FrontConfig, simulated_prefix};
use crate::registry;
use attache_disagg::policy::Direct;
use attache_disagg::{Mode, connector};
use attache_flow::PoolFlow;
use attache_picker::prefix::PoolPrefix;
use attache_pool::health::HealthPolicy;
use attache_pool::{Endpoint, EndpointState};
use attache_prefix::cache::{BlockUnit, CacheConfig};
use attache_scheduling::{Choices, Decider, Pool, Scheduler, SplitPolicy};
use attache_sim::engine::EngineConfig;
use attache_sync::MemoryBusSettings;
use attache_types::clock::Clock;
use attache_workload::trace;
use std::io::Cursor;

mod sessions;

/// A fleet and its picker.
pub(super) struct Fleet {
    pub(super) strategy: &'static str,
    /// Role label of each server.
    pub(super) roles: Vec<Option<&'static str>>,
    pub(super) ranks: u16,
    pub(super) choose_rank: bool,
    pub(super) isolate_tenants: bool,
    pub(super) kv_events: Option<KvEventSettings>,
    pub(super) changes: Vec<TimedChange>,
    pub(super) disaggregation: Option<Mode>,
    pub(super) flow: Option<PoolFlow>,
    pub(super) pickers: u16,
    pub(super) bus: Option<MemoryBusSettings>,
}

impl Default for Fleet {
    /// One server with one rank.
    fn default() -> Self {
        Self {
            strategy: "least-request",
            roles: vec![None],
            ranks: 1,
            choose_rank: false,
            isolate_tenants: false,
            kv_events: None,
            changes: Vec::new(),
            disaggregation: None,
            flow: None,
            pickers: 1,
            bus: None,
        }
    }
}

impl Fleet {
    /// The simulation before its first request.
    pub(super) fn world<'w>(self, workload: &'w mut dyn Workload, observer: &'w mut dyn Observer) -> World<'w> {
        let server = |(i, role): (usize, &Option<&str>)| {
            (with_role(spec(i), role.map(Arc::from).as_ref()), EngineConfig::default())
        };
        let config = WorldConfig {
            pickers: (0..self.pickers).map(|_| self.picker()).collect(),
            bus: self.bus,
            servers: self.roles.iter().enumerate().map(server).collect(),
            ranks: self.ranks,
            signals: SignalSettings {
                metrics_every: Duration::from_secs(1),
                metrics_delay: Duration::ZERO,
                reported_blocks: None,
                discovery_delay: Duration::ZERO,
                kv_events: self.kv_events,
            },
            changes: self.changes,
            seed: 1,
        };
        World::new(config, workload, observer).unwrap()
    }

    fn picker(&self) -> FrontConfig {
        let strategy = registry().build(self.strategy, &serde_json::Value::Null).unwrap();
        let split = self.disaggregation.is_some();
        let split =
            split.then(|| SplitPolicy { decider: Decider::Always, together: Vec::new(), whole: true, required: false });
        let scheduler = Scheduler::new(Choices::only(self.strategy, strategy), HealthPolicy::default(), 1);
        let cache = CacheConfig {
            claim_every_block: false,
            unit: BlockUnit::Tokens(16),
            max_bytes: 1 << 20,
            tenant_share: 1.0,
            claim_life: Duration::from_secs(30),
            seed: 1,
        };
        let tenant_header = self.isolate_tenants.then(|| "x-tenant".to_owned());
        let prefix = simulated_prefix(&cache, tenant_header, Clock::start());
        let prefix = PoolPrefix { choose_rank: self.choose_rank, isolate_tenants: self.isolate_tenants, ..prefix };
        let front = FrontConfig::new(scheduler.splitting(split), prefix, Duration::from_secs(3), 1);
        let pool = Pool { disagg: self.disaggregation.clone().map(Arc::new), ..front.pool };
        FrontConfig { pool, flow: self.flow.clone(), ..front }
    }
}

/// Requests that have ended.
#[derive(Default)]
pub(super) struct Ended(pub(super) Vec<Served>);

impl Observer for Ended {
    fn served(&mut self, served: &Served) {
        self.0.push(*served);
    }

    fn sampled(&mut self, _: Timestamp, _: &[Sample]) {}
}

/// A trace with these rows.
pub(super) fn rows(rows: &[&str]) -> Box<dyn Workload> {
    let text = [&["{\"format\":\"attache.trace.v1\"}"], rows].concat().join("\n");
    trace::read(Cursor::new(text.into_bytes()), &trace::Options::default()).unwrap()
}

pub(super) fn seconds(seconds: f64) -> Timestamp {
    Timestamp((seconds * 1e9) as u64)
}

/// Plays all arrivals and events before `end`.
pub(super) fn play_until(world: &mut World<'_>, end: Timestamp) {
    if world.coming.is_none() {
        world.coming = world.workload.next().unwrap();
    }
    let next = |world: &World<'_>| world.coming.iter().map(|request| request.at).chain(world.queue.next_at()).min();
    while next(world).is_some_and(|at| at < end) && world.step().unwrap() {}
}

/// Handles all events before `end`, also those after the last response.
fn pass(world: &mut World<'_>, end: Timestamp) {
    while world.queue.next_at().is_some_and(|at| at < end) {
        let (at, due) = world.queue.pop().unwrap();
        world.happen(at, due);
    }
}

/// An endpoint of the last snapshot.
pub(super) fn endpoint(world: &World<'_>, i: usize) -> Arc<Endpoint> {
    world.snapshot().endpoints[i].endpoint.clone()
}

/// Four requests with different prompts, whose responses take some seconds.
const FOUR: [&str; 4] = [
    r#"{"at":0.1,"parts":[["user","a",64]],"answer":["aa",500]}"#,
    r#"{"at":0.2,"parts":[["user","b",64]],"answer":["bb",500]}"#,
    r#"{"at":0.3,"parts":[["user","c",64]],"answer":["cc",500]}"#,
    r#"{"at":0.4,"parts":[["user","d",64]],"answer":["dd",500]}"#,
];

#[test]
fn rank_bookings_last_until_the_responses_end() {
    let (mut workload, mut observer) = (rows(&FOUR), Ended::default());
    let fleet = Fleet { ranks: 2, choose_rank: true, ..Fleet::default() };
    let world = &mut fleet.world(&mut *workload, &mut observer);
    play_until(world, seconds(0.5));
    assert_eq!(endpoint(world, 0).ranks.under_way(), [2, 2]);
    let running = |world: &World<'_>| world.servers[0].engines.iter().map(|e| e.load().running).collect::<Vec<_>>();
    assert_eq!(running(world), [2, 2], "each engine has the requests of its rank");
    play_until(world, seconds(1.5));
    let state = &world.snapshot().endpoints[0];
    let metrics = EndpointState::metrics(state).unwrap();
    assert_eq!((&metrics.ranks[..], &metrics.ranks_at_scrape[..], metrics.running), (&[2, 2][..], &[2, 2][..], 4));
    assert_eq!(metrics.num_blocks, Some(2 * EngineConfig::default().num_blocks));
    play_until(world, seconds(60.0));
    assert_eq!((running(world), endpoint(world, 0).ranks.under_way()), (vec![0, 0], vec![]));
}

#[test]
fn ranks_without_choose_rank_are_chosen_by_the_server() {
    let (mut workload, mut observer) = (rows(&FOUR), Ended::default());
    let world = &mut Fleet { ranks: 2, ..Fleet::default() }.world(&mut *workload, &mut observer);
    play_until(world, seconds(0.5));
    assert_eq!(endpoint(world, 0).ranks.under_way(), [0; 0], "the picker books no rank");
    assert!(world.servers[0].engines.iter().all(|engine| engine.load().running == 2));
}

#[test]
fn chosen_rank_holds_the_prefix_that_kv_events_report() {
    // The second request occupies the rank with the prefix of the third.
    let requests = [
        r#"{"at":1.0,"parts":[["user","a",640]],"answer":["aa",1]}"#,
        r#"{"at":2.0,"parts":[["user","b",640]],"answer":["bb",500]}"#,
        r#"{"at":3.0,"parts":[["user","a",640]],"answer":["cc",1]}"#,
    ];
    let cached = |choose_rank| {
        let (mut workload, mut observer) = (rows(&requests), Ended::default());
        let kv_events = Some(KvEventSettings { delay: Duration::from_millis(10), loss: 0.0 });
        let fleet = Fleet { strategy: "predicted-latency", ranks: 2, choose_rank, kv_events, ..Fleet::default() };
        fleet.world(&mut *workload, &mut observer).run().unwrap();
        observer.0.iter().find(|served| served.number == 2).unwrap().cached_tokens
    };
    assert_eq!((cached(true), cached(false)), (624, 0));
}

#[test]
fn isolated_tenants_share_no_cached_blocks_and_the_picker_expects_none() {
    let requests = [
        r#"{"at":1.0,"parts":[["user","a",640]],"answer":["aa",1],"tenant":"gold"}"#,
        r#"{"at":2.0,"parts":[["user","a",640]],"answer":["bb",1],"tenant":"silver"}"#,
        r#"{"at":3.0,"parts":[["user","a",640]],"answer":["cc",1],"tenant":"gold"}"#,
    ];
    for (isolate_tenants, hits) in [(false, [false, true, true]), (true, [false, false, true])] {
        let (mut workload, mut observer) = (rows(&requests), Ended::default());
        let fleet = Fleet { strategy: "predicted-latency", isolate_tenants, ..Fleet::default() };
        fleet.world(&mut *workload, &mut observer).run().unwrap();
        observer.0.sort_by_key(|served| served.number);
        let found = |tokens: fn(&Served) -> u32| observer.0.iter().map(|served| tokens(served) > 0).collect::<Vec<_>>();
        assert_eq!(found(|served| served.cached_tokens), hits, "of the server, {isolate_tenants}");
        assert_eq!(found(|served| served.expected_cached_tokens), hits, "of the picker, {isolate_tenants}");
    }
}

#[test]
fn prefill_rank_is_released_when_the_prefill_ends() {
    let direct = Direct {
        connector: connector::named("nixl").unwrap().connector,
        by_label: false,
        bounds: crate::legs::Patience::default().bounds,
        message_timeout: None,
        fallback: Default::default(),
        scheme: "http".into(),
        path_prefix: "".into(),
        insecure_skip_verify: false,
        bootstrap_port: 8998,
        decoder_blocks_ttl: Duration::ZERO,
    };
    let fleet = Fleet {
        roles: vec![Some("prefill"), Some("decode")],
        ranks: 2,
        choose_rank: true,
        disaggregation: Some(Mode::Direct(direct)),
        ..Fleet::default()
    };
    let long = r#"{"at":0.1,"parts":[["user","a",8000]],"answer":["aa",500]}"#;
    let (mut workload, mut observer) = (rows(&[long]), Ended::default());
    let world = &mut fleet.world(&mut *workload, &mut observer);
    let ranks = |world: &World<'_>| [0, 1].map(|i| endpoint(world, i).ranks.under_way());
    play_until(world, seconds(0.2));
    assert_eq!(ranks(world), [vec![1, 0], vec![1, 0]], "both servers have a rank during the prefill");
    play_until(world, seconds(2.0));
    assert_eq!(ranks(world), [vec![], vec![1, 0]], "the response is not complete");
    play_until(world, seconds(60.0));
    assert!(ranks(world).iter().all(Vec::is_empty));
}

/// Requests in flight to each of four servers, as the first of four pickers counts them after [`FOUR`].
fn load_of_first_picker(bus: Option<MemoryBusSettings>) -> Vec<u32> {
    let (mut workload, mut observer) = (rows(&FOUR), Ended::default());
    let world =
        &mut Fleet { roles: vec![None; 4], pickers: 4, bus, ..Fleet::default() }.world(&mut *workload, &mut observer);
    play_until(world, seconds(0.5));
    let load = (0..4).map(|i| endpoint(world, i).ledger.in_flight()).collect();
    let ended = world.run().unwrap().ended;
    // The ends of the last responses are still on the bus.
    pass(world, ended.after(Duration::from_secs(2)));
    assert!((0..4).all(|i| endpoint(world, i).ledger.in_flight() == 0));
    assert_eq!(bus.is_some(), world.bus().bytes > 0);
    load
}

#[test]
fn pickers_on_a_bus_count_the_requests_of_each_other() {
    let delay = Duration::from_millis(5);
    let shared = load_of_first_picker(Some(MemoryBusSettings { delay, ..MemoryBusSettings::default() }));
    assert_eq!(shared, [1, 1, 1, 1]);
    assert_eq!(load_of_first_picker(None).iter().sum::<u32>(), 1, "its own request only");
}

#[test]
fn bus_that_loses_messages_is_repaired_before_the_responses_end() {
    let bus = MemoryBusSettings { delay: Duration::from_millis(5), loss: 0.3, seed: 3, ..MemoryBusSettings::default() };
    let (mut workload, mut observer) = (rows(&FOUR), Ended::default());
    let fleet = Fleet { roles: vec![None; 4], pickers: 4, bus: Some(bus), ..Fleet::default() };
    let world = &mut fleet.world(&mut *workload, &mut observer);
    play_until(world, seconds(2.0));
    assert_eq!((0..4).map(|i| endpoint(world, i).ledger.in_flight()).sum::<u32>(), 4);
    let ended = world.run().unwrap().ended;
    // The ends of the last responses are still on the bus.
    pass(world, ended.after(Duration::from_secs(2)));
    assert!((0..4).all(|i| endpoint(world, i).ledger.in_flight() == 0));
}

/// Scrapes and samples would go on for a hundred years between two rows.
#[test]
fn requests_far_apart_are_an_error_that_names_the_gap() {
    let row = |at: u64| format!(r#"{{"at":{at},"parts":[["user","a",8]],"answer":["aa",1]}}"#);
    let day = 86_400;
    for (at, wanted) in [(36_525 * day, Some("36525.0 days")), (8 * day, Some("8.0 days")), (1, None)] {
        let (first, second) = (row(0), row(at));
        let mut workload = rows(&[&first, &second]);
        let mut ended = Ended::default();
        let outcome = Fleet::default().world(&mut *workload, &mut ended).run();
        match wanted {
            Some(gap) => assert!(outcome.unwrap_err().to_string().contains(gap)),
            None => assert_eq!(outcome.unwrap().requests, 2),
        }
    }
}
