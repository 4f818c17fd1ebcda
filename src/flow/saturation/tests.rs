//! Detectors over small pools.

use super::*;
use crate::registry::{DETECTORS, find};
use attache_pool::health::{DEFAULT_CONSECUTIVE_CONNECT_FAILURES, HealthOutcome};
use attache_pool::ledger::Ticket;
use attache_pool::role::{COMBINED_LABEL, ROLE_LABEL};
use attache_pool::speed::{Reservation, Work};
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec};
use attache_scheduling::split::Decider;
use attache_types::ids::EndpointId;
use serde_json::{Value, json};
use std::sync::Arc;

const NOW: Timestamp = Timestamp(100_000_000_000);
const STALE_AFTER: Duration = Duration::from_secs(2);

/// A model server: its scraped metrics with their age, and the requests that were sent to it.
#[derive(Default)]
struct Server {
    page: Option<(u64, EndpointMetrics)>,
    draining: bool,
    ejected: bool,
    role: Option<&'static str>,
    combined: bool,
    /// Prompts without a first token, tokens.
    awaited: Vec<u32>,
    /// Prompts whose responses do not stream, tokens, and the milliseconds since they were sent.
    whole: (Vec<u32>, u64),
    /// Prompts in decode, tokens.
    decoding: Vec<u32>,
    /// Shares of the server that its requests take.
    shares: Vec<f64>,
}

fn page(waiting: u32, running: u32, kv_usage: f32, in_flight_at_scrape: u32) -> EndpointMetrics {
    EndpointMetrics { waiting, running, kv_usage, in_flight_at_scrape, ..EndpointMetrics::default() }
}

fn reports(metrics: EndpointMetrics) -> Server {
    Server { page: Some((0, metrics)), ..Server::default() }
}

fn late(metrics: EndpointMetrics) -> Server {
    Server { page: Some((3_000, metrics)), ..Server::default() }
}

impl Server {
    fn awaits(mut self, prompts: &[u32]) -> Self {
        self.awaited = prompts.to_vec();
        self
    }

    fn answers_whole(mut self, prompts: &[u32], ago: u64) -> Self {
        self.whole = (prompts.to_vec(), ago);
        self
    }

    fn decodes(mut self, prompts: &[u32]) -> Self {
        self.decoding = prompts.to_vec();
        self
    }
}

fn saturation(detector: &str, parameters: &Value, servers: Vec<Server>, pending: Load) -> f64 {
    saturation_for(detector, parameters, servers, pending, 0.0)
}

/// For a request that needs a prefill worker and a decode worker where they exist.
fn saturation_of_pairs(detector: &str, parameters: &Value, servers: Vec<Server>, pending: Load) -> f64 {
    gauge(detector, parameters, servers, None).saturation(pending, Need { way: Way::Pair, ..Need::default() })
}

/// For a request with `work` seconds of prefill.
fn saturation_for(detector: &str, parameters: &Value, servers: Vec<Server>, pending: Load, work: f64) -> f64 {
    gauge(detector, parameters, servers, None).saturation(pending, Need { work, ..Need::default() })
}

fn gauge(detector: &str, parameters: &Value, servers: Vec<Server>, split: Option<&SplitPolicy>) -> Gauge {
    let mut held: (Vec<Ticket>, Vec<Reservation>) = Default::default();
    let states = (0u32..).zip(servers).map(|(id, server)| {
        let port = 8000 + u16::try_from(id).unwrap();
        let combined = server.combined.then_some((COMBINED_LABEL, "true"));
        let labels = server.role.map(|role| (ROLE_LABEL, role)).into_iter().chain(combined);
        let labels = labels.map(|(name, value)| (name.into(), value.into())).collect();
        let spec =
            EndpointSpec { draining: server.draining, labels, ..EndpointSpec::at(([127, 0, 0, 1], port).into()) };
        let endpoint = Arc::new(Endpoint::new(EndpointId(id), spec));
        for _ in 0..if server.ejected { DEFAULT_CONSECUTIVE_CONNECT_FAILURES } else { 0 } {
            endpoint.health.record(HealthOutcome::ConnectFailure, NOW, &HealthPolicy::default());
        }
        let (whole, ago) = server.whole;
        for (prompts, streams, ago) in [(server.awaited, true, 0), (whole, false, ago)] {
            for tokens in prompts {
                let work = Work { prompt_tokens: tokens, uncached_tokens: tokens, adapter_cold: false };
                held.1.push(Reservation::begin(
                    endpoint.clone(),
                    None,
                    work,
                    streams,
                    Timestamp(NOW.0 - ago * 1_000_000),
                ));
                held.0.push(Ticket::book(endpoint.clone(), tokens));
            }
        }
        for tokens in server.decoding {
            let mut ticket = Ticket::book(endpoint.clone(), tokens);
            ticket.first_byte();
            held.0.push(ticket);
        }
        held.0.extend(server.shares.into_iter().map(|share| Ticket::book(endpoint.clone(), 9).sharing(share)));
        let metrics = server.page.map(|(age, metrics)| {
            Arc::new(EndpointMetrics { scraped_at: Timestamp(NOW.0 - age * 1_000_000), ..metrics })
        });
        EndpointState::new(endpoint, metrics)
    });
    let pool = PoolSnapshot::new(1, true, states.collect());
    let detector = (find(DETECTORS, detector).unwrap().build)(parameters).unwrap();
    let health = HealthPolicy::default();
    detector.gauge(&View { pool: &pool, health: &health, split, stale_after: STALE_AFTER, now: NOW })
}

fn near(got: f64, expected: f64, what: &str) {
    assert!((got - expected).abs() < 1e-4, "{what}: {got}, not {expected}");
}

const NONE: Load = Load { requests: 0, tokens: 0 };

#[test]
fn pool_without_endpoints_is_full() {
    for detector in DETECTORS {
        near(saturation(detector.name, &Value::Null, vec![], NONE), 1.0, detector.name);
        let draining = Server { draining: true, ..Server::default() };
        near(saturation(detector.name, &Value::Null, vec![draining], NONE), 1.0, detector.name);
        near(saturation(detector.name, &Value::Null, vec![Server::default()], NONE), 0.0, detector.name);
    }
}

#[test]
fn ejected_endpoint_adds_no_capacity() {
    let full = || Server { awaited: vec![9; 200], ..Server::default() };
    let dead = || Server { ejected: true, ..Server::default() };
    let saturation = |name, servers| saturation(name, &Value::Null, servers, NONE);
    // Without profiles, or where nothing is computed again, these detectors see no load at all.
    let knowing = DETECTORS.iter().map(|d| d.name);
    let knowing = knowing.filter(|name| !["slo-load-detector", "recompute-detector"].contains(name));
    for detector in knowing {
        let alone = saturation(detector, vec![full()]);
        assert!(alone >= 1.0, "{detector}: {alone}");
        near(saturation(detector, vec![full(), dead()]), alone, detector);
        let half_dead = Server { ejected: true, ..full() };
        near(saturation(detector, vec![half_dead, dead()]), alone / 2.0, "all are ejected, so none is");
    }
}

#[test]
fn burst_overruns_neither_stage_of_split_pool() {
    let role = |role, server| Server { role: Some(role), ..server };
    // Four prefills at once, and eight decodes.
    let pool = |prompts: &[u32], answers: &[u32]| {
        let decode = Server::default().decodes(answers);
        let prefill = role("prefill", Server::default().awaits(prompts));
        let idle = role("decode", Server::default());
        vec![prefill, role("decode", decode), idle]
    };
    let parameters = json!({"maxConcurrency": 4});
    let saturation = |prompts: &[u32], answers: &[u32], requests| {
        saturation_of_pairs("concurrency-detector", &parameters, pool(prompts, answers), Load { requests, tokens: 0 })
    };
    near(saturation(&[9], &[9, 9], 0), 0.25, "as full as each other");
    near(saturation(&[], &[9, 9], 0), 0.25, "answers are the fuller stage");
    near(saturation(&[], &[9, 9], 3), 0.75, "three more make it prompts");
    near(saturation(&[], &[9, 9], 4), 1.0, "and no fifth has room");
    near(saturation(&[9, 9], &[9; 7], 1), 0.75, "the other decode server has room");
    let dead = |server| Server { ejected: true, ..server };
    let mut without = pool(&[9; 9], &[9, 9]);
    without.push(dead(role("prefill", Server::default())));
    near(saturation_of_pairs("concurrency-detector", &parameters, without, NONE), 1.0, "one is ejected");
    let alone = vec![dead(role("prefill", Server::default().awaits(&[9; 9]))), role("decode", Server::default())];
    near(saturation_of_pairs("concurrency-detector", &parameters, alone, NONE), 0.0, "nothing is sent there");
}

#[test]
fn split_pool_has_capacity_while_decode_workers_serve_whole() {
    let role = |role, server| Server { role: Some(role), ..server };
    let combined = |server| Server { combined: true, ..role("decode", server) };
    let full = || Server::default().awaits(&[100_000]);
    let idle = Server::default;
    let policy = |whole| SplitPolicy { decider: Decider::Predicted, together: Vec::new(), whole, required: false };
    // Whether it is full for whole requests, for pairs, and for either way.
    for (row, servers, whole, expected) in [
        ("prefill is full", vec![role("prefill", full()), role("decode", idle())], true, [false, true, false]),
        ("decode is full", vec![role("prefill", idle()), role("decode", full())], true, [true, true, true]),
        ("nobody is", vec![role("prefill", idle()), role("decode", idle())], true, [false, false, false]),
        ("no prefill server", vec![role("decode", idle()), role("decode", full())], true, [false, false, false]),
        ("both roles", vec![role("both", full()), role("both", full())], true, [true, true, true]),
        (
            "decode serves no whole request, and the combined server is full",
            vec![role("prefill", idle()), role("decode", idle()), combined(full())],
            false,
            [true, false, false],
        ),
        (
            "pairs are full, and the combined server is not",
            vec![role("prefill", idle()), role("decode", full()), combined(idle())],
            false,
            [false, true, false],
        ),
        ("neither way exists, which the decision tells", vec![role("decode", idle())], false, [false; 3]),
        ("no server for whole requests", vec![role("prefill", full()), role("decode", idle())], false, [true; 3]),
    ] {
        let gauge = gauge("backlog-detector", &Value::Null, servers, Some(&policy(whole)));
        let is_full = |way| gauge.saturation(NONE, Need { way, ..Need::default() }) >= 1.0;
        assert_eq!([Way::Whole, Way::Pair, Way::Either].map(is_full), expected, "{row}");
    }
}

#[test]
fn concurrency() {
    let two = || vec![Server::default().awaits(&[100, 200]).decodes(&[50]), Server::default().awaits(&[100])];
    for (parameters, pending, expected) in [
        (json!({"maxConcurrency": 4}), NONE, 0.5),
        (json!({"maxConcurrency": 4}), Load { requests: 4, tokens: 9_999 }, 1.0),
        (json!({"maxConcurrency": 2}), Load { requests: 1, tokens: 0 }, 1.0),
        (json!({"maxConcurrency": 2, "compat": true}), Load { requests: 1, tokens: 0 }, 1.25),
        (json!({"concurrencyMode": "tokens", "maxTokenConcurrency": 400}), NONE, 0.5),
        (json!({"concurrencyMode": "tokens", "maxTokenConcurrency": 400}), Load { requests: 1, tokens: 400 }, 1.0),
        (
            json!({"concurrencyMode": "hybrid", "maxConcurrency": 4, "maxTokenConcurrency": 400, "headroom": 0.5}),
            Load { requests: 1, tokens: 0 },
            0.625,
        ),
        (Value::Null, NONE, 0.02),
    ] {
        near(saturation("concurrency-detector", &parameters, two(), pending), expected, &parameters.to_string());
    }
}

#[test]
fn slo_load_idle_endpoint_takes_one_until_share_known() {
    let shared = |servers: &[&[f64]], requests| {
        let servers = servers.iter().map(|shares| Server { shares: shares.to_vec(), ..Server::default() }).collect();
        saturation("slo-load-detector", &Value::Null, servers, Load { requests, tokens: 0 })
    };
    for (row, servers, pending, full) in [
        ("an idle server", &[&[][..]][..], 0, false),
        ("one is on its way to it", &[&[]], 1, true),
        ("one runs, and takes all of it", &[&[1.0]], 0, true),
        ("two idle servers, one on its way", &[&[], &[]], 1, false),
        ("two on their way", &[&[], &[]], 2, true),
        ("one is busy, the other is not", &[&[1.0], &[]], 0, false),
        ("and one is on its way there", &[&[1.0], &[]], 1, true),
        ("a quarter each", &[&[0.25, 0.25]], 1, false),
        ("and no fifth", &[&[0.25, 0.25]], 2, true),
        ("a share that nobody knows", &[&[0.0]], 99, false),
    ] {
        let got = shared(servers, pending);
        assert_eq!(got >= 1.0, full, "{row}: {got}");
    }
}

#[test]
fn utilization_corrected_by_requests_since_scrape() {
    let parameters = json!({"queueDepthThreshold": 5, "kvCacheUtilThreshold": 0.9});
    let idle = || reports(page(0, 0, 0.0, 0));
    for (row, servers, expected) in [
        ("GIE: (2,.5)", vec![reports(page(2, 0, 0.5, 0))], 0.5556),
        ("GIE: (10,.1)", vec![reports(page(10, 0, 0.1, 0))], 1.0),
        ("GIE: (1,.95)", vec![reports(page(1, 0, 0.95, 0))], 1.0),
        ("GIE: (1,.1)(0,.2)", vec![reports(page(1, 0, 0.1, 0)), reports(page(0, 0, 0.2, 0))], 0.2111),
        ("GIE: good and (15,.2)", vec![reports(page(1, 0, 0.1, 0)), reports(page(15, 0, 0.2, 0))], 0.6),
        ("nothing reported stalls nothing", vec![Server::default()], 0.0),
        ("a page that is late stalls nothing", vec![late(page(50, 8, 0.99, 0))], 0.0),
        ("what waits for a first token counts then", vec![late(page(0, 0, 0.0, 0)).awaits(&[9, 9, 9])], 0.6),
        ("so do answers that come whole", vec![idle().answers_whole(&[1_000; 5], 0)], 1.0),
        ("until they are thought to be computed", vec![idle().answers_whole(&[1_000; 5], 80)], 0.6),
        ("whatever a page said", vec![late(page(0, 0, 0.0, 0)).answers_whole(&[1_000; 5], 80)], 0.6),
        ("and are done", vec![idle().answers_whole(&[1_000; 5], 200)], 0.0),
        ("four came since, and eight sit", vec![reports(page(1, 8, 0.0, 9)).awaits(&[9; 4]).decodes(&[9; 9])], 1.0),
        ("the queue has gone since", vec![reports(page(4, 8, 0.0, 12)).decodes(&[9; 5])], 0.0),
        ("seats are free, and two are not answered", vec![idle().awaits(&[9, 9]).decodes(&[9; 30])], 0.4),
    ] {
        near(saturation("utilization-detector", &parameters, servers, NONE), expected, row);
    }
    let pending = Load { requests: 5, tokens: 0 };
    near(saturation("utilization-detector", &parameters, vec![idle(), idle()], pending), 0.5, "a burst");
    let short = json!({"metricsStalenessThreshold": "5s"});
    near(saturation("utilization-detector", &short, vec![late(page(5, 0, 0.0, 0))], NONE), 1.0, "its own age");
    for (parameters, says) in [
        (json!({"queueDepthThreshold": 0}), "queueDepthThreshold"),
        (json!({"kvCacheUtilThreshold": 1.5}), "kvCacheUtilThreshold"),
        (json!({"metricsStalenessThreshold": "0s"}), "metricsStalenessThreshold"),
    ] {
        let error = (utilization::PLUGIN.build)(&parameters).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn one_overloaded_endpoint_does_not_fill_the_others() {
    let busy = |of: usize, idle: usize| {
        let full = (0..of).map(|_| reports(page(50, 8, 0.99, 0)).awaits(&[9_000; 58]));
        full.chain((0..idle).map(|_| reports(page(0, 0, 0.0, 0)))).collect::<Vec<_>>()
    };
    let detectors = [
        ("utilization-detector", json!({"queueDepthThreshold": 5})),
        ("concurrency-detector", json!({"maxConcurrency": 4})),
        ("concurrency-detector", json!({"concurrencyMode": "tokens", "maxTokenConcurrency": 1_000})),
        (
            "concurrency-detector",
            json!({"concurrencyMode": "hybrid", "maxConcurrency": 4, "maxTokenConcurrency": 1_000_000}),
        ),
    ];
    for (detector, parameters) in detectors {
        let row = format!("{detector} {parameters}");
        near(saturation(detector, &parameters, busy(1, 7), NONE), 1.0 / 8.0, &row);
        near(saturation(detector, &parameters, busy(7, 1), NONE), 7.0 / 8.0, &row);
        assert!(saturation(detector, &parameters, busy(8, 0), NONE) >= 1.0, "{row}");
        // The rule of GIE and llm-d.
        let mut literal = parameters.clone();
        literal["compat"] = json!(true);
        assert!(saturation(detector, &literal, busy(1, 7), NONE) > 1.0, "{row}");
    }
    // One endpoint is full by requests, the other one by tokens: neither takes one more.
    let both = || vec![Server::default().decodes(&[9; 4]), Server::default().awaits(&[1_000])];
    let hybrid = json!({"concurrencyMode": "hybrid", "maxConcurrency": 4, "maxTokenConcurrency": 1_000});
    near(saturation("concurrency-detector", &hybrid, both(), NONE), 1.0, "full by either");
}

#[test]
fn literal_rules_of_gie_and_llm_d_under_compat() {
    let parameters = json!({"queueDepthThreshold": 5, "kvCacheUtilThreshold": 0.9, "compat": true});
    for (row, servers, expected) in [
        ("(10,.1)", vec![reports(page(10, 0, 0.1, 0))], 2.0),
        ("(1,.95)", vec![reports(page(1, 0, 0.95, 0))], 1.0556),
        ("good and (15,.2)", vec![reports(page(1, 0, 0.1, 0)), reports(page(15, 0, 0.2, 0))], 1.6),
    ] {
        near(saturation("utilization-detector", &parameters, servers, NONE), expected, row);
    }
}

#[test]
fn backlog_has_capacity_while_any_endpoint_has() {
    let parameters = json!({"maxPrefillTime": "40ms", "maxWaiting": 4, "maxKvUsage": 0.8});
    // Before anything is learned, 1,000 tokens take 40 ms, and a million pairs of them 1 ms.
    let idle = || reports(page(0, 0, 0.0, 0));
    for (row, servers, expected) in [
        ("prompts to compute", vec![idle().awaits(&[500])], 20.125 / 40.0),
        ("requests to answer", vec![idle().awaits(&[1, 1, 1])], 0.75),
        ("so do those that are answered as a whole", vec![idle().answers_whole(&[1, 1, 1], 0)], 0.75),
        ("which a page knows of", vec![reports(page(3, 0, 0.0, 0)).answers_whole(&[1, 1, 1], 0)], 0.75),
        ("others' as well", vec![reports(page(3, 0, 0.0, 0))], 0.75),
        ("answers under way don't count", vec![idle().decodes(&[900; 50])], 0.0),
        ("the cache", vec![reports(page(0, 5, 0.4, 5))], 0.5),
        ("a late page says nothing", vec![late(page(30, 5, 0.9, 5))], 0.0),
        ("full is full", vec![idle().awaits(&[100_000]), idle()], 0.5),
        ("all are", vec![idle().awaits(&[100_000]), idle().awaits(&[1; 9])], 1.0),
    ] {
        near(saturation("backlog-detector", &parameters, servers, NONE), expected, row);
    }
    let two = || vec![idle().awaits(&[1_000]), idle()];
    near(
        saturation("backlog-detector", &parameters, two(), Load { requests: 1, tokens: 500 }),
        0.5 + 20.25 / 80.0,
        "tokens",
    );
    near(saturation("backlog-detector", &parameters, two(), Load { requests: 4, tokens: 4 }), 1.0, "requests");
    for (parameter, value) in [
        ("maxPrefillTime", json!("0s")),
        ("maxLongPrefillTime", json!("0s")),
        ("maxLongPrefillTime", json!("51ms")),
        ("maxWaiting", json!(0)),
        ("maxKvUsage", json!(0)),
    ] {
        let error = (backlog::PLUGIN.build)(&json!({parameter: value})).unwrap_err().to_string();
        assert!(error.contains(parameter), "{error}");
    }
}

#[test]
fn backlog_admits_long_prompt_when_endpoint_nearly_done() {
    let parameters = json!({"maxPrefillTime": "40ms", "maxLongPrefillTime": "10ms"});
    let idle = || reports(page(0, 0, 0.0, 0));
    // 5 ms and 20 ms of queued prefill at two endpoints.
    let two = || vec![idle().awaits(&[125]), idle().awaits(&[500])];
    let full = |servers, pending, work| saturation_for("backlog-detector", &parameters, servers, pending, work);
    for (row, work, expected) in [
        ("short", 0.019, (5.0 + 20.0) / 80.0),
        ("long", 0.02, (5.0 / 10.0 + 1.0) / 2.0),
        ("as long as it may be", 30.0, (5.0 / 10.0 + 1.0) / 2.0),
        ("not a number is not long", f64::NAN, (5.0 + 20.0) / 80.0),
    ] {
        let got = full(two(), NONE, work);
        assert!((got - expected).abs() < 0.01, "{row}: {got}, not {expected}");
    }
    let busy = || vec![idle().awaits(&[500]), idle().awaits(&[500])];
    assert!(full(busy(), NONE, 1.0) >= 1.0 && full(busy(), NONE, 0.0) < 1.0);
    let one = Load { requests: 1, tokens: 10 };
    assert!(full(two(), one, 1.0) >= 1.0, "what is on its way takes the endpoint that had room");
    assert!(full(two(), one, 0.0) < 1.0);
    near(full(vec![], NONE, 1.0), 1.0, "nobody serves");
    let huge = Load { requests: 1, tokens: 100_000 };
    near(full(vec![idle(), idle()], huge, 0.0), 0.5, "one prompt fills one endpoint");
    // A `maxPrefillTime` below the default for long prompts limits those too.
    let tight = json!({"maxPrefillTime": "4ms"});
    let got = saturation_for("backlog-detector", &tight, vec![idle().awaits(&[50])], NONE, 1.0);
    assert!((got - 0.5).abs() < 0.01, "2 of 4 ms: {got}");
}
