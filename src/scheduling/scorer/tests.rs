//! Each scorer's rows as the reference picker's own unit tests have them, and what holds for all.

use crate::clock::Timestamp;
use crate::ids::EndpointId;
use crate::pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, LoraState, PoolSnapshot};
use crate::scheduling::plugin::Plugin;
use crate::scheduling::{Candidate, PickContext, Ranking, RequestFacts, registry};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

const NOW: Timestamp = Timestamp(1_000_000_000);
const STALE_AFTER: Duration = Duration::from_secs(2);

fn state(i: u32, metrics: Option<EndpointMetrics>) -> EndpointState {
    let address = ([10, 0, 0, u8::try_from(i).unwrap()], 8000).into();
    EndpointState {
        endpoint: Arc::new(Endpoint::new(EndpointId(i), EndpointSpec::at(address))),
        metrics: metrics.map(|m| Arc::new(EndpointMetrics { scraped_at: NOW, ..m })),
    }
}

fn waiting(waiting: u32) -> Option<EndpointMetrics> {
    Some(EndpointMetrics { waiting, ..EndpointMetrics::default() })
}

fn kv(kv_usage: f32) -> Option<EndpointMetrics> {
    Some(EndpointMetrics { kv_usage, ..EndpointMetrics::default() })
}

fn lora(running: &[&str], waiting: &[&str], max: u32) -> Option<EndpointMetrics> {
    let names = |list: &[&str]| list.iter().map(|n| Arc::from(*n)).collect();
    let lora = Some(LoraState { max, running: names(running), waiting: names(waiting) });
    Some(EndpointMetrics { lora, ..EndpointMetrics::default() })
}

fn scores(scorer: &str, states: &[EndpointState]) -> Vec<f32> {
    let Plugin::Scorer(scorer) = (registry::plugin(scorer).unwrap().build)(&serde_json::Value::Null).unwrap() else {
        panic!("{scorer} is no scorer");
    };
    let snapshot = PoolSnapshot::default();
    let request = RequestFacts { model: "A", ..RequestFacts::default() };
    let cx = PickContext { request, ..PickContext::new(&snapshot, NOW, STALE_AFTER) };
    let candidates: Vec<_> = states.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let mut out = vec![f32::NAN; states.len()];
    scorer.score(&cx, &candidates, &mut out);
    out
}

/// Scorer, pages, scores.
type Row = (&'static str, Vec<Option<EndpointMetrics>>, &'static [f32]);

#[test]
fn the_references_rows() {
    let rows: &[Row] = &[
        ("queue-scorer", vec![waiting(10), waiting(5), waiting(0)], &[0.0, 0.5, 1.0]),
        ("queue-scorer", vec![waiting(5), waiting(5)], &[1.0, 1.0]),
        ("queue-scorer", vec![waiting(0), waiting(0)], &[1.0, 1.0]),
        ("queue-scorer", vec![waiting(4), None], &[0.0, 1.0]),
        ("kv-cache-utilization-scorer", vec![kv(0.25), kv(1.0), None], &[0.75, 0.0, 0.0]),
        ("lora-affinity-scorer", vec![lora(&["A"], &[], 2)], &[1.0]),
        ("lora-affinity-scorer", vec![lora(&["B", "C"], &["A"], 2)], &[0.6]),
        ("lora-affinity-scorer", vec![lora(&["B"], &["C"], 2)], &[0.0]),
        ("lora-affinity-scorer", vec![lora(&[], &[], 0), None], &[0.0, 0.0]),
        (
            "lora-affinity-scorer",
            vec![
                lora(&["A"], &[], 5),
                lora(&["1", "2", "3", "4"], &[], 5),
                lora(&["1"], &[], 2),
                lora(&["1"], &["A"], 2),
                lora(&["1", "2"], &[], 2),
            ],
            &[1.0, 0.8, 0.8, 0.6, 0.0],
        ),
    ];
    for (scorer, metrics, expected) in rows {
        let states: Vec<_> = (0u32..).zip(metrics.clone()).map(|(i, m)| state(i, m)).collect();
        assert_eq!(scores(scorer, &states), *expected, "{scorer} {metrics:?}");
    }
}

#[test]
fn the_pipeline_weighs_and_adds_and_fills_the_ranking_in_order() {
    let states = [state(0, waiting(2)), state(1, waiting(0)), state(2, waiting(1))];
    let snapshot = PoolSnapshot::default();
    let cx = PickContext::new(&snapshot, NOW, STALE_AFTER);
    let candidates: Vec<_> = states.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let pipeline = (registry::strategy("pipeline").unwrap().build)(&serde_json::Value::Null).unwrap();
    let mut ranking = Ranking::new(3);
    pipeline.rank(&cx, &candidates, &mut crate::rng::for_request(1, 1), &mut ranking);
    let ids: Vec<u32> = ranking.decide().unwrap().picks.iter().map(|e| e.id.0).collect();
    assert_eq!(ids, [1, 2, 0]);
}

#[test]
fn the_pipelines_parameters_are_checked() {
    let build = registry::strategy("pipeline").unwrap().build;
    for (parameters, says) in [
        (serde_json::json!({"scorers": []}), "at least one"),
        (serde_json::json!({"scorers": [{"type": "queue"}]}), "queue-scorer"),
        (serde_json::json!({"scorers": [{"type": "queue-scorer", "weight": -1}]}), "0 or more"),
        (serde_json::json!({"scorers": [{"type": "queue-scorer", "parameters": {"x": 1}}]}), "x"),
        (serde_json::json!({"scorers": [{"weight": 1}]}), "type"),
    ] {
        let error = build(&parameters).unwrap_err().to_string();
        assert!(error.contains(says), "{parameters}: {error}");
    }
}

fn any_metrics() -> impl Strategy<Value = Option<EndpointMetrics>> {
    let names = || prop::collection::vec(prop_oneof![Just("A"), Just("B"), Just("C")], 0..3);
    let page = (0u32..20, 0f32..1.0, names(), names(), 0u32..4).prop_map(|(waiting, kv_usage, r, w, max)| {
        let lora = lora(&r, &w, max).and_then(|m| m.lora);
        EndpointMetrics { waiting, kv_usage, lora, ..EndpointMetrics::default() }
    });
    prop::option::of(page)
}

proptest! {
    #[test]
    fn scores_lie_in_range_and_follow_their_candidate(
        metrics in prop::collection::vec(any_metrics(), 1..8),
        turn in 0usize..8,
    ) {
        let states: Vec<_> = (0u32..).zip(metrics).map(|(i, m)| state(i, m)).collect();
        let mut turned = states.clone();
        turned.rotate_left(turn % states.len());
        for plugin in registry::PLUGINS.iter().filter(|p| p.kind == "scorer") {
            let mut straight = scores(plugin.name, &states);
            prop_assert!(straight.iter().all(|s| (0.0..=1.0).contains(s)), "{} {straight:?}", plugin.name);
            straight.rotate_left(turn % states.len());
            prop_assert_eq!(&straight, &scores(plugin.name, &turned), "{}", plugin.name);
        }
    }
}
