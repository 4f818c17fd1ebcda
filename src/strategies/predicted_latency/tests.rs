//! Search of pairs, and floors of costs.

use super::*;
use attache_pool::Roles;
use attache_pool::ledger::Ticket;
use attache_pool::place::{DEFAULT_HOST_LABEL, DEFAULT_ZONE_LABEL};
use attache_pool::speed::{PoolSpeed, Reservation, Work};
use attache_pool::{EndpointMetrics, EndpointSpec, EndpointState, LoraState, PoolSnapshot};
use attache_scheduling::objective::{Objective, Slo};
use attache_scheduling::testing::{TestServer, among, load};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng::for_request;
use proptest::prelude::{
    Just, any, prop, prop_assert, prop_assert_eq, prop_assume, prop_compose, prop_oneof, proptest,
};
use std::cell::Cell;
use std::time::Duration;

#[test]
fn pair_search_without_better_server_ends_at_first() {
    const HELPERS: usize = 8;
    for (case, host, zones) in [
        ("no labels", false, None),
        ("one zone", false, Some(["a", "a"])),
        ("other hosts of one zone", true, Some(["a", "a"])),
        ("another zone", true, Some(["a", "b"])),
        ("no zone of the decode server", true, Some(["a", ""])),
    ] {
        let server = |role: &str, number: usize| {
            let server = load(0, 0.0).label("llm-d.ai/role", role);
            let zone = zones.map(|[prefill, decode]| if role == "prefill" { prefill } else { decode });
            let server = zone.into_iter().fold(server, |s: TestServer, zone| s.label(DEFAULT_ZONE_LABEL, zone));
            if host { server.label(DEFAULT_HOST_LABEL, &format!("h{number}")) } else { server }
        };
        let servers = (0..HELPERS).map(|number| server("prefill", number)).chain([server("decode", HELPERS)]);
        let trial = among(servers.collect()).long(4_000);
        let cx = trial.context();
        for (state, near) in trial.pool.endpoints.iter().flat_map(|s| [(s, Some(Nearness::Zone)), (s, None)]) {
            // Slower than the assumed transfer time without a shared host.
            let transfers = state.endpoint.speed.pool().transfer();
            (0..50).for_each(|_| transfers.observe(4_000, near, 0.5, cx.now));
        }
        let (helpers, decoders) = (trial.there_for(Roles::PREFILL), trial.there_for(Roles::DECODE));
        let prices = Prices::learned(&cx, [&helpers[..], &decoders[..]], Serving::OneOrTwoServers);
        let cheap: Vec<(f64, &Arc<Endpoint>)> = helpers.iter().map(|c| (0.1, &c.state.endpoint)).collect();
        let places = cheap.iter().map(|(_, p)| p.place).collect();
        let decoder = &decoders[0];
        let inbound = InboundTransfer::to(&decoder.state.endpoint, cost::lacked(&cx, decoder), &prices, &places);
        let looked = Cell::new(0);
        let found = inbound.best(&cheap, 0.2, None, |_| {
            looked.set(looked.get() + 1);
            true
        });
        assert!(found.is_some_and(|PairCost(cost, _)| cost > 0.4), "{case}: slow transfer");
        assert_eq!(looked.get(), 1, "{case}");
    }
}

const NOW: Timestamp = Timestamp(1_000_000_000_000);
const STALE_AFTER: Duration = Duration::from_secs(2);

/// An endpoint as a decision finds it.
#[derive(Clone, Debug)]
struct Server {
    /// Reported metrics: waiting, running, KV usage, KV blocks, age in seconds; `None` without metrics.
    metrics: Option<(u32, u32, f32, u32, u64)>,
    /// Prompt tokens of requests in flight whose first token is awaited.
    awaited: Vec<u32>,
    /// Other requests in flight.
    decoding: usize,
    /// Seconds to the first token and to the end of earlier responses, the last of them so many seconds ago.
    answered: Option<(f64, f64, u64)>,
    /// Prompt tokens that it has cached.
    cached: u32,
    has_adapter: bool,
    role: Option<&'static str>,
}

prop_compose! {
    fn server()(
        metrics in prop::option::weighted(
            0.9,
            (0..9u32, 0..30u32, 0.0..=1.0f32, prop_oneof![Just(0), 200..9_000u32], 0..4u64),
        ),
        awaited in prop::collection::vec(1..20_000u32, 0..3),
        decoding in 0..6usize,
        answered in prop::option::weighted(0.7, (0.01..3.0f64, 0.1..9.0f64, 0..200u64)),
        cached in prop_oneof![3 => Just(0), 1 => 1..12_000u32],
        has_adapter: bool,
        role in prop_oneof![4 => Just(None), 1 => Just(Some("prefill")), 1 => Just(Some("prefill-decode"))],
    ) -> Server {
        Server { metrics, awaited, decoding, answered, cached, has_adapter, role }
    }
}

/// A pool of these servers, and what keeps their requests in flight.
struct Pool {
    snapshot: PoolSnapshot,
    _tickets: Vec<Ticket>,
    _awaited: Vec<Reservation>,
}

impl Pool {
    fn of(servers: &[Server]) -> Self {
        let speed: Arc<PoolSpeed> = Arc::default();
        let (mut tickets, mut awaited) = (Vec::new(), Vec::new());
        let begin = |endpoint: &Arc<Endpoint>, tokens: u32, at: Timestamp| {
            let work = Work { prompt_tokens: tokens, uncached_tokens: tokens, adapter_cold: false };
            Reservation::begin(endpoint.clone(), None, work, true, at)
        };
        let mut states = Vec::new();
        for (id, server) in (0u32..).zip(servers) {
            let mut spec = EndpointSpec::at(([10, 0, 0, 1], 8000 + id as u16).into());
            spec.labels.extend(server.role.map(|role| ("llm-d.ai/role".into(), role.into())));
            let endpoint = Arc::new(Endpoint::in_pool(EndpointId(id), spec, &speed));
            if let Some((first, whole, ago)) = server.answered {
                for n in 0..15u64 {
                    let sent = Timestamp(NOW.0 - (ago + 15 - n + 10) * 1_000_000_000);
                    let mut request = begin(&endpoint, 2_000, sent);
                    request.first_token(true, sent.after(Duration::from_secs_f64(first)));
                    request.ended(Some(100), sent.after(Duration::from_secs_f64(first + whole)));
                }
            }
            let metrics = server.metrics.map(|(waiting, running, kv_usage, blocks, age)| {
                let running_adapters = if server.has_adapter { vec!["A".into()] } else { Vec::new() };
                Arc::new(EndpointMetrics {
                    scraped_at: Timestamp(NOW.0 - age * 1_000_000_000),
                    waiting,
                    running,
                    kv_usage,
                    block_size: Some(16),
                    num_blocks: Some(blocks).filter(|blocks| *blocks > 0),
                    lora: Some(LoraState { max: 2, running: running_adapters, waiting: Vec::new() }),
                    ..EndpointMetrics::default()
                })
            });
            tickets.extend((0..server.decoding).map(|_| Ticket::book(endpoint.clone(), 100)));
            for tokens in &server.awaited {
                tickets.push(Ticket::book(endpoint.clone(), *tokens));
                awaited.push(begin(&endpoint, *tokens, Timestamp(NOW.0 - 500_000_000)));
            }
            states.push(EndpointState::new(endpoint, metrics));
        }
        Self { snapshot: PoolSnapshot::new(1, true, states), _tickets: tickets, _awaited: awaited }
    }
}

prop_compose! {
    fn parameters()(
        work_price in prop::option::of(0.0..5.0f64),
        token_weight in prop::option::of(0.0..2.0f64),
    ) -> PredictedLatency {
        PredictedLatency { work_price, token_weight }
    }
}

prop_compose! {
    fn objectives()(
        (ttft, tpot, has_slo) in (0.0..3.0f64, 0.0..3.0f64, any::<bool>()),
        (first, next) in (prop::option::of(1..5_000u64), prop::option::of(1..5_000u64)),
    ) -> Objective {
        let target = |ms: Option<u64>| ms.map(Duration::from_millis);
        let slo = has_slo.then(|| Slo { ttft: target(first), tpot: target(next), share: 0.9 });
        Objective { ttft, tpot, slo }
    }
}

proptest! {
    /// Predictions for a few endpoints pick the same ones as predictions for all.
    #[test]
    fn floors_change_neither_picks_nor_random_numbers(
        servers in prop::collection::vec(server(), 1..40),
        strategy in parameters(),
        objective in objectives(),
        (prompt_tokens, splittable, wanted, seed) in (1..16_000u32, any::<bool>(), 1..4usize, any::<u64>()),
    ) {
        let pool = Pool::of(&servers);
        let mut cx = PickContext { splittable, objective, ..PickContext::new(&pool.snapshot, NOW, STALE_AFTER) };
        (cx.request.prompt_tokens, cx.request.model) = (prompt_tokens, "A");
        let candidate = |(state, server): (_, &Server)| {
            let mut candidate = Candidate::new(state, NOW, STALE_AFTER, 0);
            candidate.cached.any = server.cached.min(prompt_tokens);
            candidate.cached.in_use = candidate.cached.any / 2;
            candidate
        };
        let decoding = |(state, _): &(&EndpointState, &Server)| state.roles().has(Roles::DECODE);
        let all = pool.snapshot.endpoints.iter().zip(&servers);
        let candidates: Vec<Candidate<'_>> = all.filter(decoding).map(candidate).collect();
        prop_assume!(!candidates.is_empty());
        let prices = strategy.prices(&cx, [&candidates], Serving::of(&cx));
        let floor = CostFloor::of(&cx, &prices).unwrap();
        for candidate in &candidates {
            let (low, whole) = (floor.floor(&cx, candidate), cost::whole(&cx, candidate, &prices));
            prop_assert!(low <= whole, "{low} is no floor of {whole}");
        }
        let (mut with, mut without) = (Ranking::new(wanted), Ranking::new(wanted));
        let (mut rng, mut same) = (for_request(seed, 0), for_request(seed, 0));
        strategy.rank(&cx, &candidates, &mut rng, &mut with);
        rank_by_scores(&strategy, &cx, &candidates, &mut same, &mut without);
        let ids = |decision: attache_scheduling::Decision| decision.picks.iter().map(|p| p.id).collect::<Vec<_>>();
        let picks = |ranking: Ranking| ranking.decide().map(ids);
        prop_assert_eq!(picks(with), picks(without));
        prop_assert_eq!(rng.random::<u64>(), same.random::<u64>());
    }
}
