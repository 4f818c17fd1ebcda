//! Admitters over small pools.

use super::*;
use crate::registry::{ADMITTERS, find};
use attache_pool::ledger::Ticket;
use attache_pool::speed::{Reservation, Work};
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
use attache_scheduling::RequestFacts;
use attache_scheduling::plugin::Headers;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng::for_request;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const NOW: Timestamp = Timestamp(100_000_000_000);
const STALE_AFTER: Duration = Duration::from_secs(2);

/// Endpoints by scraped queue depth, KV cache usage and requests in flight from this process.
fn pool(servers: &[(u32, f32, usize)]) -> (PoolSnapshot, Vec<Ticket>) {
    let mut tickets = Vec::new();
    let states = (0u32..).zip(servers).map(|(id, (waiting, kv_usage, ours))| {
        let endpoint = Arc::new(Endpoint::new(
            EndpointId(id),
            EndpointSpec::at(([127, 0, 0, 1], 8000 + u16::try_from(id).unwrap()).into()),
        ));
        tickets.extend((0..*ours).map(|_| Ticket::book(endpoint.clone(), 10)));
        let at_scrape = u32::try_from(*ours).unwrap();
        let metrics = EndpointMetrics {
            scraped_at: NOW,
            waiting: *waiting,
            kv_usage: *kv_usage,
            in_flight_at_scrape: at_scrape,
            ..EndpointMetrics::default()
        };
        EndpointState::new(endpoint, Some(Arc::new(metrics)))
    });
    let states: Vec<_> = states.collect();
    (PoolSnapshot::new(1, true, states), tickets)
}

fn admits(
    admitter: &dyn Admitter,
    snapshot: &PoolSnapshot,
    priority: i32,
    headers: &BTreeMap<String, String>,
    draw: u64,
) -> bool {
    let request =
        RequestFacts { priority, prompt_tokens: 10, headers: Headers::of(headers), ..RequestFacts::default() };
    let cx = PickContext { request, ..PickContext::new(snapshot, NOW, STALE_AFTER) };
    let candidates: Vec<_> = snapshot.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    admitter.admits(&cx, &candidates, &mut for_request(11, draw))
}

/// Records a prefill of about one second at this endpoint.
fn record_slow_prefill(endpoint: &Arc<Endpoint>) {
    for i in 0..50u64 {
        let begun = Timestamp(NOW.0 - 90_000_000_000 + i * 1_000_000_000);
        let work = Work { prompt_tokens: 10, uncached_tokens: 10, adapter_cold: false };
        let mut reservation = Reservation::begin(endpoint.clone(), None, work, true, begun);
        reservation.first_token(true, begun.after(Duration::from_secs(1)));
    }
}

fn build(name: &str, parameters: &Value) -> Box<dyn Admitter> {
    (find(ADMITTERS, name).unwrap().build)(parameters).unwrap()
}

#[test]
fn probabilistic_sheds_more_at_higher_saturation() {
    let admitter = build("probabilistic-admitter", &Value::Null);
    let none = BTreeMap::new();
    let shed = |kv: f32, priority| {
        let (snapshot, _tickets) = pool(&[(0, kv * 0.8, 1)]);
        (0..2_000).filter(|draw| !admits(&*admitter, &snapshot, priority, &none, *draw)).count() as f64 / 2_000.0
    };
    for (saturation, expected) in [(0.05, 0.0), (0.15, 0.023), (0.2, 0.096), (0.3, 0.729), (0.35, 1.0), (1.0, 1.0)] {
        let got = shed(saturation, -1);
        assert!((got - expected).abs() < 0.03, "llm-d {saturation}: {got}, not {expected}");
    }
    // One of eight endpoints has a long queue.
    let (hot, _tickets) = pool(&[
        (50, 0.1, 9),
        (0, 0.0, 0),
        (0, 0.0, 0),
        (0, 0.0, 0),
        (0, 0.0, 0),
        (0, 0.0, 0),
        (0, 0.0, 0),
        (0, 0.0, 0),
    ]);
    let admitted = |admitter: &dyn Admitter| (0..500).filter(|draw| admits(admitter, &hot, -1, &none, *draw)).count();
    assert!(admitted(&*admitter) > 450, "seven are idle");
    assert_eq!(admitted(&*build("probabilistic-admitter", &json!({"compat": true}))), 0, "llm-d");
    assert!(shed(1.0, 0) == 0.0 && shed(1.0, 5) == 0.0, "only what is sheddable");
    assert!(admits(&*admitter, &pool(&[]).0, -1, &none, 1), "llm-d: no pods");
    for parameters in [json!({"power": 0.0}), json!({"k": -1.0}), json!({"queueDepthThreshold": 0})] {
        assert!((probabilistic::PLUGIN.build)(&parameters).is_err(), "{parameters}");
    }
}

#[test]
fn latency_slo_sheds_requests_no_endpoint_serves_in_time() {
    let admitter = build("latency-slo-admitter", &Value::Null);
    let asks = |ms: &str| BTreeMap::from([("x-slo-ttft-ms".to_owned(), ms.to_owned())]);
    // Three busy endpoints with learned prefill times of about a second.
    let (snapshot, _tickets) = pool(&[(0, 0.5, 2), (0, 0.5, 2)]);
    assert!(admits(&*admitter, &snapshot, -1, &asks("1"), 1), "nothing is known of the pool's speed");
    snapshot.endpoints.iter().for_each(|state| record_slow_prefill(&state.endpoint));
    assert!(!admits(&*admitter, &snapshot, -1, &asks("20"), 1));
    assert!(admits(&*admitter, &snapshot, -1, &asks("60000"), 1), "it can be met");
    assert!(admits(&*admitter, &snapshot, 0, &asks("20"), 1), "only what is sheddable");
    assert!(admits(&*admitter, &snapshot, -1, &BTreeMap::new(), 1), "nothing is asked for");
    assert!(admits(&*admitter, &snapshot, -1, &asks("soon"), 1), "nothing that can be read");
    for open in [(0, 0.5, 0), (0, 0.01, 3)] {
        let (mut with_one, tickets) = pool(&[(0, 0.5, 2), open]);
        // The busy one is slow as before, the other idle or cold.
        with_one.endpoints[0] = snapshot.endpoints[0].clone();
        assert!(admits(&*admitter, &with_one, -1, &asks("20"), 1), "{open:?} {}", tickets.len());
    }
}

#[test]
fn latency_slo_ignores_ejected_endpoint() {
    use crate::registry::{CEILINGS, DETECTORS};
    use crate::saturation::View;
    use crate::settings::{PoolFlow, Queueing, Settings};
    use attache_pool::health::{DEFAULT_CONSECUTIVE_CONNECT_FAILURES, HealthOutcome, HealthPolicy};
    let health = HealthPolicy::default();
    // The first is idle, the second is busy and slow.
    let (snapshot, _tickets) = pool(&[(0, 0.5, 0), (0, 0.5, 2)]);
    record_slow_prefill(&snapshot.endpoints[1].endpoint);
    let flow = PoolFlow {
        settings: Settings::default(),
        queueing: Some(Queueing::Saturated((DETECTORS[0].build)(&Value::Null).unwrap().into())),
        shedding: None,
        ceiling: (CEILINGS[0], Value::Null),
        admitters: vec![build("latency-slo-admitter", &Value::Null).into()],
        said: Value::Null,
    };
    let headers = BTreeMap::from([("x-slo-ttft-ms".to_owned(), "20".to_owned())]);
    let facts =
        RequestFacts { priority: -1, prompt_tokens: 10, headers: Headers::of(&headers), ..RequestFacts::default() };
    let view = View { pool: &snapshot, health: &health, split: None, stale_after: STALE_AFTER, now: NOW };
    let admitted = || flow.admits(&facts, &view, &mut for_request(1, 1));
    let eject = |at: usize| {
        let endpoint = &snapshot.endpoints[at].endpoint;
        (0..DEFAULT_CONSECUTIVE_CONNECT_FAILURES).for_each(|_| {
            endpoint.health.record(HealthOutcome::ConnectFailure, NOW, &health);
        });
    };
    assert!(admitted(), "the first would serve it at once");
    eject(0);
    assert!(!admitted(), "it is dead now, and as idle as before");
    eject(1);
    assert!(admitted(), "all are ejected, so none is, and one is idle");
}
