//! Strategies that decide by scraped metrics: AIBrix's own cases, and the fallback of each.

use attache_pool::{Counter, EndpointMetrics, EndpointState, Histogram, Means, Rates};
use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_scheduling::{Candidate, Ranking, Signal};
use attache_types::rng::for_request;
use proptest::prelude::{Strategy as _, any, prop, prop_assert_eq, proptest};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What is known of an endpoint: its requests and its metrics.
type Known = (u32, Option<EndpointMetrics>);

/// A whole ranking with one seed, endpoints counted from 1, and the missing signal.
fn ranked(name: &str, parameters: &Value, pool: &[Known], seed: u64) -> (Vec<u32>, Option<Signal>) {
    first_of(pool.len(), name, parameters, pool, seed)
}

/// The same, with only the first `wanted` endpoints.
fn first_of(wanted: usize, name: &str, parameters: &Value, pool: &[Known], seed: u64) -> (Vec<u32>, Option<Signal>) {
    let strategy = crate::tests::registry().build(name, parameters).unwrap();
    let mut snapshot = snapshot(&(1..).map(|id| (id, 0)).take(pool.len()).collect::<Vec<_>>());
    for (state, (_, metrics)) in snapshot.endpoints.iter_mut().zip(pool) {
        let metrics = metrics.clone().map(|m| Arc::new(EndpointMetrics { scraped_at: NOW, ..m }));
        *state = EndpointState::new(state.endpoint.clone(), metrics);
    }
    let candidate =
        |(state, known): (_, &Known)| Candidate { requests: known.0, ..Candidate::new(state, NOW, STALE_AFTER, 0) };
    let candidates: Vec<_> = snapshot.endpoints.iter().zip(pool).map(candidate).collect();
    let mut ranking = Ranking::new(wanted);
    strategy.rank(&context(&snapshot), &candidates, &mut for_request(seed, 0), &mut ranking);
    let decision = ranking.decide().unwrap();
    (decision.picks.iter().map(|e| e.id.0).collect(), decision.lacking)
}

/// The endpoints that win over many draws.
fn winners(name: &str, parameters: &Value, pool: &[Known]) -> BTreeSet<u32> {
    (0..100).map(|seed| first_of(1, name, parameters, pool, seed).0[0]).collect()
}

fn page() -> EndpointMetrics {
    EndpointMetrics::default()
}

fn idle(metrics: impl IntoIterator<Item = EndpointMetrics>) -> Vec<Known> {
    metrics.into_iter().map(|m| (0, Some(m))).collect()
}

fn throughput(prompt: f64, generation: f64) -> EndpointMetrics {
    let rates = Rates { prompt_tokens: Some(prompt), generation_tokens: Some(generation), ..Rates::default() };
    EndpointMetrics { rates, ..page() }
}

fn busy(ratio: f64) -> EndpointMetrics {
    EndpointMetrics { gpu_busy: Some(ratio), ..page() }
}

fn cache(gpu: f32, cpu: Option<f32>) -> EndpointMetrics {
    EndpointMetrics { kv_usage: gpu, cpu_cache_usage: cpu, ..page() }
}

fn utilization(used: f64) -> EndpointMetrics {
    EndpointMetrics { engine_utilization: Some(used), ..page() }
}

fn drain(rate: Option<f64>, kv_usage: f32) -> EndpointMetrics {
    EndpointMetrics { kv_usage, rates: Rates { finished: rate, ..Rates::default() }, ..page() }
}

/// A server that reports its times and had no request in the last minute.
fn unmeasured() -> EndpointMetrics {
    let mut metrics = page();
    metrics.counters.set(Counter::Count(Histogram::Decode), 0.0);
    metrics
}

/// Mean prompt and response in tokens; mean prefill and decode in seconds; 5 s of queue.
fn latency(prompt: f64, generation: f64, prefill: f64, decode: f64) -> EndpointMetrics {
    let means = Means {
        queue_seconds: Some(5.0),
        prefill_seconds: Some(prefill),
        decode_seconds: Some(decode),
        prompt_tokens: Some(prompt),
        generation_tokens: Some(generation),
    };
    EndpointMetrics { rates: Rates { means, ..Rates::default() }, ..unmeasured() }
}

/// Metrics of a server's whole life: seconds of prefill and decode, and requests; `lately` are its recent metrics.
fn lifetime(prefill: f64, decode: f64, requests: f64, lately: EndpointMetrics) -> EndpointMetrics {
    let mut metrics = lately;
    for (histogram, sum) in [(Histogram::Prefill, prefill), (Histogram::Decode, decode)] {
        metrics.counters.set(Counter::Sum(histogram), sum);
        metrics.counters.set(Counter::Count(histogram), requests);
    }
    metrics
}

/// Source, strategy, parameters, pool, possible winners.
type Row = (&'static str, &'static str, Value, Vec<Known>, &'static [u32]);

fn check(rows: &[Row]) {
    for (source, name, parameters, pool, expected) in rows {
        assert_eq!(winners(name, parameters, pool), expected.iter().copied().collect(), "{source}, {name}: {pool:?}");
    }
}

#[test]
fn least_request_matches_aibrix() {
    let counts = |counts: &[Option<u32>]| counts.iter().map(|n| (n.unwrap_or(0), n.map(|_| page()))).collect();
    check(&[
        ("aibrix 10.1", "least-request", Value::Null, counts(&[Some(1), Some(2), Some(3), Some(9)]), &[1]),
        ("aibrix 10.1", "least-request", Value::Null, counts(&[Some(1), Some(5), Some(1)]), &[1, 3]),
        ("aibrix 10.1, missing is 0", "least-request", Value::Null, counts(&[Some(1), None, Some(5)]), &[2]),
        ("aibrix 10.1, all missing", "least-request", Value::Null, counts(&[None, None]), &[1, 2]),
    ]);
}

#[test]
fn one_metric_decides() {
    let none = || (0, Some(page()));
    let null = || Value::Null;
    check(&[
        (
            "aibrix 10.2",
            "throughput",
            null(),
            idle([throughput(1.0, 2.0), throughput(2.0, 1.0), throughput(3.0, 3.0), throughput(4.0, 4.0)]),
            &[1],
        ),
        (
            "aibrix 10.2, both 6",
            "throughput",
            null(),
            idle([throughput(1.0, 4.0), throughput(5.0, 5.0), throughput(2.0, 2.0)]),
            &[1, 3],
        ),
        ("aibrix 10.2, only p1", "throughput", null(), vec![(9, Some(throughput(9.0, 9.0))), none(), none()], &[1]),
        ("aibrix 10.2, none", "throughput", null(), vec![none(), none(), none()], &[1, 2, 3]),
        ("aibrix 10.3", "least-busy-time", null(), idle([busy(0.1), busy(0.5), busy(0.8), busy(0.9)]), &[1]),
        ("aibrix 10.3, NaN is dropped", "least-busy-time", null(), vec![none(), (0, Some(busy(0.5)))], &[2]),
        ("aibrix 10.3", "least-busy-time", null(), idle([busy(0.0), busy(0.3)]), &[1]),
        (
            "aibrix 10.3",
            "least-kv-cache",
            null(),
            idle([cache(0.2, Some(0.3)), cache(0.1, Some(0.5)), cache(0.6, Some(0.6)), cache(0.6, Some(0.8))]),
            &[1],
        ),
        (
            "aibrix 10.3",
            "least-kv-cache",
            null(),
            idle([cache(0.2, Some(0.3)), cache(0.5, Some(0.5)), cache(0.3, Some(0.2))]),
            &[1, 3],
        ),
        (
            "aibrix 2, no host cache is an empty one",
            "least-kv-cache",
            null(),
            idle([cache(0.2, Some(0.3)), cache(0.4, None)]),
            &[2],
        ),
        (
            "aibrix 10.3",
            "least-gpu-cache",
            null(),
            idle([0.1, 0.2, 0.3, 0.4].map(|gpu| cache(gpu, Some(1.0 - gpu)))),
            &[1],
        ),
        ("aibrix 10.3", "least-gpu-cache", null(), idle([0.1, 0.5, 0.1].map(|gpu| cache(gpu, None))), &[1, 3]),
        ("aibrix 10.3", "least-utilization", null(), idle([0.25, 0.5, 0.25].map(utilization)), &[1, 3]),
    ]);
}

#[test]
fn least_latency_weighs_the_measurements() {
    let four = |third: EndpointMetrics| {
        idle([
            latency(10.0, 100.0, 10.0, 10.0),
            latency(20.0, 200.0, 21.0, 21.0),
            third,
            latency(40.0, 400.0, 41.0, 41.0),
        ])
    };
    let null = || Value::Null;
    check(&[
        ("aibrix 10.3", "least-latency", null(), four(latency(30.0, 300.0, 31.0, 31.0)), &[1]),
        ("aibrix 10.3", "least-latency", null(), four(latency(30.0, 300.0, 30.0, 30.0)), &[1, 3]),
        (
            "aibrix 10.3, no prompt length",
            "least-latency",
            null(),
            idle([latency(0.0, 100.0, 10.0, 10.0), latency(0.0, 100.0, 20.0, 10.0)]),
            &[1],
        ),
        (
            "aibrix 10.3, no answer length",
            "least-latency",
            null(),
            idle([latency(10.0, 0.0, 10.0, 10.0), latency(10.0, 0.0, 10.0, 20.0)]),
            &[1],
        ),
        (
            "an idle one is tried",
            "least-latency",
            null(),
            vec![(3, Some(latency(10.0, 100.0, 1.0, 1.0))), (0, Some(unmeasured()))],
            &[2],
        ),
        (
            "by one request",
            "least-latency",
            null(),
            vec![
                (3, Some(latency(10.0, 100.0, 1.0, 1.0))),
                (1, Some(unmeasured())),
                (9, Some(latency(10.0, 100.0, 3.0, 1.0))),
            ],
            &[1],
        ),
    ]);
}

/// AIBrix's means cover a server's life, and its queue time is always 0.
#[test]
fn least_latency_uses_the_last_minute_or_with_compat_the_whole_life() {
    // The first was fast for days and is slow now, with a long queue.
    let was_fast = lifetime(1_000.0, 1_000.0, 1_000.0, latency(10.0, 100.0, 9.0, 9.0));
    let was_slow = lifetime(4_000.0, 4_000.0, 1_000.0, latency(10.0, 100.0, 2.0, 2.0));
    let never = unmeasured();
    check(&[
        ("aibrix 13", "least-latency", Value::Null, idle([was_fast.clone(), was_slow.clone()]), &[2]),
        ("aibrix 2.1", "least-latency", json!({"compat": true}), idle([was_fast.clone(), was_slow.clone()]), &[1]),
        (
            "aibrix 2.1, no request is 0 s",
            "least-latency",
            json!({"compat": true}),
            vec![(0, Some(was_fast)), (50, Some(never)), (0, Some(was_slow))],
            &[2],
        ),
    ]);
}

#[test]
fn load_balance_divides_by_the_drain_rate() {
    let null = || Value::Null;
    let with = |requests, rate, kv| (requests, Some(drain(rate, kv)));
    check(&[
        ("aibrix 2.5", "load-balance", null(), vec![with(4, Some(2.0), 0.0), with(3, Some(1.0), 0.0)], &[1]),
        (
            "aibrix 2.5, ties by cache",
            "load-balance",
            null(),
            vec![with(4, Some(2.0), 0.5), with(2, Some(1.0), 0.2), with(2, Some(1.0), 0.2)],
            &[2, 3],
        ),
        (
            "aibrix 2.5, unknown is uniform",
            "load-balance",
            null(),
            vec![with(4, Some(1.0), 0.0), with(4, Some(3.0), 0.0), with(3, None, 0.0)],
            &[2],
        ),
        (
            "nothing ended is unknown",
            "load-balance",
            null(),
            vec![with(4, Some(1.0), 0.0), with(1, Some(0.0), 0.0)],
            &[2],
        ),
        ("aibrix 2.5, the gate", "load-balance", null(), vec![with(9, Some(99.0), 0.0), with(0, Some(0.1), 0.0)], &[2]),
        (
            "aibrix 10.4, 8 is not above 8",
            "load-balance",
            null(),
            vec![with(9, Some(99.0), 0.0), with(1, Some(0.1), 0.0)],
            &[1],
        ),
        (
            "aibrix 10.4, only the fewest stay",
            "load-balance",
            null(),
            vec![with(16, Some(99.0), 0.0), with(2, Some(1.0), 0.0), with(8, Some(99.0), 0.0), with(2, Some(2.0), 0.0)],
            &[4],
        ),
        (
            "a wider gate",
            "load-balance",
            json!({"imbalance": 9}),
            vec![with(9, Some(99.0), 0.0), with(1, Some(0.1), 0.0)],
            &[1],
        ),
    ]);
}

/// Each strategy with metrics that contain its figure, and metrics that do not.
fn by_figure() -> Vec<(&'static str, EndpointMetrics, Option<EndpointMetrics>)> {
    let bare = Some(page());
    vec![
        ("throughput", throughput(1.0, 1.0), bare.clone()),
        ("least-busy-time", busy(0.5), bare.clone()),
        // Metrics without KV cache usage are rejected, so an endpoint without it has no metrics.
        ("least-kv-cache", cache(0.5, None), None),
        ("least-gpu-cache", cache(0.5, None), None),
        ("least-latency", latency(10.0, 100.0, 1.0, 1.0), bare.clone()),
        ("least-utilization", utilization(0.5), bare),
    ]
}

#[test]
fn without_its_metric_a_strategy_takes_the_fewest_requests_and_reports_it() {
    for (name, _, without) in by_figure().into_iter().chain([("load-balance", page(), Some(page()))]) {
        for seed in 0..20 {
            let pool: Vec<Known> = [5, 1, 9, 3].map(|requests| (requests, without.clone())).into();
            assert_eq!(ranked(name, &Value::Null, &pool, seed), (vec![2, 4, 1, 3], Some(Signal::Metrics)), "{name}");
        }
    }
}

/// AIBrix picks at random among all ready endpoints if none reports the metric.
#[test]
fn random_fallback_picks_any_endpoint_without_metrics() {
    let random = json!({"fallback": "random"});
    for (name, with, without) in by_figure() {
        let pool: Vec<Known> = [5, 1, 9, 3].map(|requests| (requests, without.clone())).into();
        assert_eq!(winners(name, &random, &pool), [1, 2, 3, 4].into(), "aibrix 2, {name}");
        let pool = [(5, without.clone()), (90, Some(with)), (3, without)];
        assert_eq!(winners(name, &random, &pool), [2].into(), "aibrix 2, {name}: a figure decides");
    }
}

#[test]
fn endpoints_without_the_metric_come_last() {
    for (name, with, without) in by_figure() {
        for seed in 0..20 {
            let pool = [(5, without.clone()), (90, Some(with.clone())), (3, without.clone())];
            assert_eq!(ranked(name, &Value::Null, &pool, seed), (vec![2, 3, 1], None), "{name}");
        }
    }
}

#[test]
fn stale_metric_counts_as_missing() {
    for (name, with, _) in by_figure() {
        let mut snapshot = snapshot(&[(1, 0), (2, 0)]);
        for state in &mut snapshot.endpoints {
            *state = EndpointState::new(state.endpoint.clone(), Some(Arc::new(with.clone())));
        }
        let candidates: Vec<_> = snapshot.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
        let strategy = crate::tests::registry().build(name, &Value::Null).unwrap();
        let mut ranking = Ranking::new(1);
        strategy.rank(&context(&snapshot), &candidates, &mut for_request(1, 0), &mut ranking);
        assert_eq!(ranking.decide().unwrap().lacking, Some(Signal::Metrics), "{name}");
    }
}

/// All metrics at once, different for each endpoint.
fn full_page(i: u32) -> EndpointMetrics {
    let x = f64::from(i);
    let mut metrics = latency(10.0 + x, 100.0 + x, 1.0 + x * x, 2.0 + x);
    metrics.kv_usage = i as f32 / 100.0;
    metrics.gpu_busy = Some(x);
    metrics.engine_utilization = Some(x);
    metrics.rates.prompt_tokens = Some(x);
    metrics.rates.generation_tokens = Some(x);
    metrics.rates.finished = Some(1.0 / (1.0 + x));
    metrics
}

proptest! {
    #[test]
    fn order_of_candidates_has_no_effect(
        pool in prop::collection::btree_map(0u32..100, any::<bool>(), 1..20).prop_map(Vec::from_iter).prop_shuffle(),
        seed in any::<u64>(),
    ) {
        // Requests differ, so no draw has an effect.
        let known = |(requests, page): (u32, bool)| (requests, page.then(|| full_page(requests)));
        let pool: Vec<Known> = pool.into_iter().map(known).collect();
        let mirrored: Vec<Known> = pool.iter().rev().cloned().collect();
        let last = pool.len() as u32 + 1;
        for name in by_figure().iter().map(|(name, ..)| *name).chain(["load-balance", "least-request"]) {
            let (straight, lacking) = ranked(name, &Value::Null, &pool, seed);
            let (turned, also) = ranked(name, &Value::Null, &mirrored, seed);
            prop_assert_eq!(&straight, &turned.iter().map(|id| last - id).collect::<Vec<_>>(), "{}", name);
            prop_assert_eq!(lacking, also, "{}", name);
            for wanted in 1..pool.len() {
                let (few, _) = first_of(wanted, name, &Value::Null, &pool, seed);
                prop_assert_eq!(&straight[..wanted], &few[..], "{}", name);
            }
        }
    }
}

#[test]
fn parameters_are_checked() {
    for (name, bad, word) in [
        ("least-latency", json!({"compat": 1}), "`true` or `false`"),
        ("least-latency", json!({"lifetime": true}), "lifetime"),
        ("throughput", json!({"fallback": "round-robin"}), "round-robin"),
        ("load-balance", json!({"imbalance": -1}), "-1"),
        ("load-balance", json!({"gate": 1}), "gate"),
    ] {
        let error = crate::tests::registry().build(name, &bad).unwrap_err();
        assert!(error.to_string().contains(word), "{name} {bad}: {error}");
    }
}
