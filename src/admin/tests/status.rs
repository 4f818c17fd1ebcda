use super::*;
use crate::rates::Tally;
use attache_types::error::Reason;
use serde_json::{Value, json};

async fn status(state: &AdminState) -> Value {
    let (status, text) = ask(state, LOCAL, ("GET", "/api/status"), &[], axum::body::Body::empty()).await;
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[tokio::test]
async fn status_has_configuration_certificates_and_connections() {
    let (mut state, _) = state();
    let now = state.clock.now();
    let unix = state.clock.wall(now).duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    state.parts.certificates =
        Arc::new(move || vec![CertificateStatus { name: "client CA", expires_at: unix - 100, refused: 2 }]);
    let before = status(&state).await;
    assert_eq!(before["configuration"], json!({"seconds_since_reload": null, "refusal": null}));
    state.parts.metrics.reloads.record(Err("line 3: pools: missing".to_owned()), now);
    state.parts.metrics.redis.connected.set(1);
    state.parts.nats = Some(Arc::new(|| LinkStatus { connected: false, dropped: 7 }));

    let after = status(&state).await;
    assert_eq!(after["configuration"], json!({"seconds_since_reload": 0, "refusal": "line 3: pools: missing"}));
    assert_eq!(after["redis"], json!({"connected": true, "failures": {}}));
    assert_eq!(after["nats"], json!({"connected": false, "dropped_messages": 7}));
    assert_eq!(after["peers"], json!({"shares_state": false, "snapshot": null, "peers": []}));
    let certificate = &after["certificates"][0];
    assert_eq!((&certificate["name"], &certificate["refused_replacements"]), (&json!("client CA"), &json!(2)));
    let left = certificate["expires_in_seconds"].as_i64().unwrap();
    assert!((-130..=-100).contains(&left), "an expired certificate: {left}");

    state.parts.uses_redis = Arc::new(|| false);
    state.parts.nats = None;
    let off = status(&state).await;
    assert_eq!((&off["redis"], &off["nats"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn rates_are_those_of_the_last_minute() {
    let (mut state, _) = state();
    let metrics = state.parts.metrics.clone();
    let now = Timestamp(state.clock.now().0 + 100_000_000_000);
    let read = |seconds_ago: u64| {
        let at = Timestamp(now.0 - seconds_ago * 1_000_000_000);
        state.history.read(&(state.pools)(), Tally::of(&metrics, at));
    };
    let model = metrics.by_name.model("llama", now);
    metrics.rejection(None, Reason::InvalidJson);
    (0..900).for_each(|_| model.routed());
    (0..14).for_each(|reading| read(95 - 5 * reading));
    (0..60).for_each(|_| model.routed());
    (0..30).for_each(|_| metrics.rejection(Some("default"), Reason::QueueFull));

    // The oldest reading that is kept is 90 seconds old.
    let rates = state.history.with_rates(|rates| rates.to_json(&Tally::of(&metrics, now)));
    assert_eq!(
        (&rates["models"][0]["requests"], &rates["models"][0]["requests_per_second"]),
        (&json!(960), &json!(0.667))
    );
    let rejections = json!([
        {"pool": null, "reason": "invalid_json", "requests": 1, "requests_per_second": 0.0},
        {"pool": "default", "reason": "queue_full", "requests": 30, "requests_per_second": 0.333},
    ]);
    assert_eq!(rates["rejections"], rejections);
    assert_eq!((&rates["tenants"], &rates["degraded"]), (&json!([]), &json!([])));

    // Before the first reading there are no rates.
    state.history = Arc::default();
    let all = status(&state).await;
    assert_eq!(all["models"][0]["requests_per_second"], Value::Null, "{all}");
}
