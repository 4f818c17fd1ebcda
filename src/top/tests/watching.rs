//! Rates, shares, histories and decisions over several readings.

use super::{at, later, page, reading, state};
use crate::model::{Reading, Samples};
use crate::watch::{History, Watch};
use serde_json::{Value, json};

fn decisions(range: std::ops::Range<u64>) -> Value {
    range.rev().map(|sequence| json!({"sequence": sequence, "request_id": format!("r{sequence}")})).collect()
}

fn with_decisions(watch: &mut Watch, page: &Value, seconds: u64) {
    watch.update(Reading::of(&json!({}), page, &Value::Null, &Value::Null), at(seconds));
}

fn kept(watch: &Watch) -> Vec<u64> {
    watch.decisions.iter().filter_map(|ended| ended.decision.sequence).collect()
}

#[test]
fn share_is_the_part_of_the_requests_of_the_pool() {
    let state = state();
    let track = |address: &str| state.shown().track_of("chat", address).unwrap();
    // 0, 20, 40, 60, 80 and 100 requests in two seconds.
    assert_eq!(track("10.0.0.1:8000").share, Some(0.0));
    assert_eq!(track("10.0.0.5:8000").share, Some(80.0 / 300.0));
    assert_eq!(track("10.0.0.5:8000").rate, Some(40.0));
    assert_eq!(state.shown().pool_rate("chat"), Some(150.0));
    assert_eq!(state.shown().track_of("embed", "10.0.1.1:8000").unwrap().share, None, "the pool had no request");
    assert_eq!(state.shown().delta("rejected", "queue_full"), Some(20));
    assert_eq!(state.shown().delta("rejected", "no_endpoint"), Some(0));
}

#[test]
fn counters_of_a_picker_that_started_again_count_from_zero() {
    let mut watch = Watch::default();
    let mut endpoints = page("endpoints.json");
    watch.update(reading(&later(endpoints.clone(), 1_000)), at(0));
    endpoints["pools"][1]["endpoints"][0]["routed"] = 12.into();
    endpoints["rejections"] = json!({"queue_full": 3});
    watch.update(reading(&endpoints), at(1));
    assert_eq!(watch.track_of("chat", "10.0.0.1:8000").unwrap().rate, Some(12.0));
    assert_eq!(watch.delta("rejected", "queue_full"), Some(3));
    endpoints["rejections"]["timeout"] = 5.into();
    watch.update(reading(&endpoints), at(2));
    assert_eq!(watch.delta("rejected", "timeout"), Some(5), "a new reason was counted from 0");
}

#[test]
fn decisions_are_joined_and_gaps_are_counted() {
    let mut watch = Watch::default();
    with_decisions(&mut watch, &decisions(0..4), 0);
    with_decisions(&mut watch, &decisions(2..6), 1);
    assert_eq!(kept(&watch), [5, 4, 3, 2, 1, 0]);
    assert_eq!(watch.missed, 0);
    with_decisions(&mut watch, &decisions(10..12), 2);
    assert_eq!((kept(&watch).len(), watch.missed), (8, 4));
    with_decisions(&mut watch, &decisions(0..2), 3);
    assert_eq!((kept(&watch), watch.missed), (vec![1, 0], 0), "another process counts from 0");
    with_decisions(&mut watch, &decisions(0..5_000), 4);
    assert_eq!((kept(&watch).len(), kept(&watch)[0]), (1_000, 4_999));
    with_decisions(&mut watch, &json!([]), 5);
    assert_eq!(kept(&watch).len(), 0, "a picker that keeps none");
}

#[test]
fn history_covers_all_time_in_bounded_space() {
    let mut endpoints = page("endpoints.json");
    endpoints["pools"][1]["endpoints"].as_array_mut().unwrap().truncate(1);
    let mut watch = Watch::default();
    for second in 0..5_000_u64 {
        endpoints["pools"][1]["endpoints"][0]["in_flight"] = second.into();
        watch.update(Reading::of(&endpoints, &Value::Null, &Value::Null, &Value::Null), at(second));
    }
    let history: &History = &watch.track_of("chat", "10.0.0.1:8000").unwrap().in_flight;
    for width in [1, 7, 50, 200, 1_000] {
        let values = history.resampled(width);
        assert!(values.len() <= width.min(480), "{} values in {width} columns", values.len());
        assert!(values.is_sorted(), "the oldest value is first");
    }
    let values = history.resampled(50);
    assert!(values[0] < 150.0 && values[values.len() - 1] > 4_850.0, "{values:?}");
}

#[test]
fn endpoint_that_is_gone_is_forgotten() {
    let mut watch = Watch::default();
    let mut endpoints = page("endpoints.json");
    watch.update(reading(&endpoints), at(0));
    endpoints["pools"][1]["endpoints"].as_array_mut().unwrap().remove(0);
    watch.update(reading(&endpoints), at(1));
    assert!(watch.track_of("chat", "10.0.0.1:8000").is_none());
}

#[test]
fn samples_of_pools_are_joined() {
    let page = |sequence: u64, requests: &[u32]| {
        json!({"sequence": sequence, "pools": {"chat": {
            "requests": requests, "ttft_p50": requests, "ttft_p95": [null],
        }}})
    };
    let mut watch = Watch::default();
    let mut add = |page: &Value, after| {
        let samples = Samples::of(page, after);
        watch.update(Reading { samples, ..Reading::default() }, at(after));
        let history = watch.pool_history("chat").cloned().unwrap_or_default();
        (Vec::from(history.requests), history.ttft)
    };
    assert_eq!(add(&page(2, &[1, 2]), 0), (vec![1.0, 2.0], [Some(2.0), None]));
    assert_eq!(add(&page(3, &[3]), 2), (vec![1.0, 2.0, 3.0], [Some(3.0), None]));
    assert_eq!(add(&page(3, &[]), 3).0.len(), 3, "nothing new");
    let many: Vec<u32> = (0..900).collect();
    assert_eq!(add(&page(903, &many), 3).0.len(), 360);
    assert_eq!(add(&page(1, &[7]), 0).0, [7.0], "another process");
    assert_eq!(add(&json!({}), 1).0, [7.0], "a page without samples");
}
