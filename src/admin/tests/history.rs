use super::*;
use crate::rates::Tally;
use attache_request::event::End;
use attache_types::error::Reason;
use serde_json::{Value, json};

/// A reading of all pools of `state`, so many seconds after the start.
fn read(state: &AdminState, seconds: u64) {
    let at = Timestamp(seconds * 1_000_000_000);
    state.history.read(&(state.pools)(), Tally::of(&state.parts.metrics, at));
}

async fn history(state: &AdminState, query: &str) -> Value {
    let (status, text) =
        ask(state, LOCAL, ("GET", &format!("/api/history{query}")), &[], axum::body::Body::empty()).await;
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[tokio::test]
async fn sample_has_rates_and_percentiles_of_its_five_seconds() {
    let (state, endpoints) = state();
    let pool = state.parts.metrics.pool("default");
    let respond = |count, ms| {
        for _ in 0..count {
            pool.first_byte(Duration::from_millis(ms), None);
            pool.ended(End::Complete, Duration::from_millis(10 * ms), None);
        }
    };
    respond(100, 30_000);
    read(&state, 1);
    assert_eq!(history(&state, "").await["pools"]["default"]["requests"], json!([]), "nothing to compare with");

    respond(20, 80);
    pool.status(503);
    pool.prompt_tokens.inc_by(400);
    pool.cached_tokens.inc_by(100);
    state.parts.metrics.rejection(Some("default"), Reason::QueueFull);
    let ticket = Ticket::book(endpoints[0].clone(), 100);
    read(&state, 6);
    drop(ticket);
    read(&state, 11);
    let all = history(&state, "").await;
    assert_eq!((&all["step_seconds"], &all["sequence"]), (&json!(5), &json!(3)));
    let columns = &all["pools"]["default"];
    for (column, expected) in [
        ("requests", json!([4.0, 0.0])),
        ("errors", json!([0.2, 0.0])),
        ("rejections", json!([0.2, 0.0])),
        ("ttft_p50", json!([75.0, null])),
        ("ttft_p99", json!([99.5, null])),
        ("duration_p50", json!([600.0, null])),
        ("queued", json!([4.0, 4.0])),
        ("in_flight", json!([1.0, 0.0])),
        ("hit_ratio", json!([0.25, null])),
    ] {
        assert_eq!(columns[column], expected, "{column}");
    }
    assert_eq!(history(&state, "?after=2").await["pools"]["default"]["queued"], json!([4.0]));
    assert_eq!(history(&state, "?after=3").await["pools"]["default"]["queued"], json!([]));
    assert_eq!(history(&state, "?after=9").await["sequence"], 3, "a number of an earlier process");
}

#[tokio::test]
async fn coarse_sample_covers_its_minute_and_both_series_are_bounded() {
    let (state, endpoints) = state();
    let pool = state.parts.metrics.pool("default");
    read(&state, 0);
    let ticket = Ticket::book(endpoints[0].clone(), 100);
    (1..=4).for_each(|reading| read(&state, 5 * reading));
    drop(ticket);
    (0..60).for_each(|_| pool.ended(End::Complete, Duration::from_secs(1), None));
    (5..12).for_each(|reading| read(&state, 5 * reading));
    let all = history(&state, "?step=60").await;
    assert_eq!((&all["step_seconds"], &all["sequence"]), (&json!(60), &json!(1)));
    let columns = &all["pools"]["default"];
    // Twelve readings are 55 seconds apart.
    assert_eq!((&columns["requests"], &columns["in_flight"]), (&json!([1.091]), &json!([1.0])));

    (12..5_000).for_each(|reading| read(&state, 5 * reading));
    for (step, sequence) in [(5, 5_000), (60, 416)] {
        let all = history(&state, &format!("?step={step}")).await;
        assert_eq!(all["sequence"], sequence);
        assert_eq!(all["pools"]["default"]["requests"].as_array().map(Vec::len), Some(360), "{step}");
    }
}

#[tokio::test]
async fn deleted_pool_loses_its_history_and_starts_again_from_zero() {
    let (state, _) = state();
    let pool = state.parts.metrics.pool("default");
    (0..50).for_each(|_| pool.ended(End::Complete, Duration::from_secs(1), None));
    read(&state, 0);
    read(&state, 5);
    state.history.read(&[], Tally::of(&state.parts.metrics, Timestamp(10_000_000_000)));
    assert_eq!(history(&state, "").await["pools"], json!({}));
    read(&state, 15);
    read(&state, 20);
    assert_eq!(history(&state, "").await["pools"]["default"]["requests"], json!([0.0]));
}

#[tokio::test]
async fn wrong_step_and_sequence_are_refused_with_the_allowed_values() {
    let (state, _) = state();
    for (query, named) in [("step=7", "`step` is `7`; allowed are 5 and 60"), ("after=-1", "`after` is `-1`")] {
        let target = format!("/api/history?{query}");
        let (status, text) = ask(&state, LOCAL, ("GET", &target), &[], axum::body::Body::empty()).await;
        assert_eq!((status, text.contains(named)), (400, true), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn pools_are_read_every_five_seconds() {
    let (state, _) = state();
    let (history_of, views, clock) = (state.history.clone(), state.pools.clone(), state.clock);
    let metrics = state.parts.metrics.clone();
    let follow = tokio::spawn(async move { history_of.follow(|| Arc::new(views()), |_| (), &metrics, clock).await });
    tokio::time::sleep(Duration::from_secs(21)).await;
    assert_eq!(history(&state, "").await["sequence"], 5);
    follow.abort();
}
