//! Policies of models: a change at the admin port of one picker reaches the others, and a picker that starts later.

use super::*;
use serde_json::json;

const POLICIES: &str = "/api/nodes/scheduling";

/// The policy of `org/m` that a picker shows; `None` without one.
async fn shown(picker: &AttacheProcess) -> Option<Value> {
    let reply = client::get(picker.metrics, &format!("{POLICIES}/org/m")).await.expect("a response");
    (reply.status == 200).then(|| reply.json())
}

async fn until_shown(picker: &AttacheProcess, min_prefix_match: Option<f64>) {
    eventually(&format!("a policy with {min_prefix_match:?}"), async || {
        let shown = shown(picker).await.map(|policy| policy["min_prefix_match"].as_f64());
        (shown == min_prefix_match.map(Some)).then_some(())
    })
    .await;
}

async fn send(picker: &AttacheProcess, method: &str, target: &str, body: &Value) -> u16 {
    let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let mut request = client::request(method, picker.metrics, Http::H1, target, Payload::sized(body.into()));
    request.headers_mut().insert("content-type", "application/json".parse().unwrap());
    client::send(picker.metrics, Http::H1, request).await.expect("a response").status.as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn policy_of_a_model_reaches_other_pickers_and_one_that_starts_later() {
    let (nats, echo) = (NatsProcess::start().await, Echo::start().await);
    let config = pool("prefix-affinity", &[echo.address]);
    let (a, b) = (picker(&config, "a", &nats.url()).await, picker(&config, "b", &nats.url()).await);
    until_peer(&a, "b").await;
    assert_eq!(send(&a, "POST", POLICIES, &json!({"model_name": "org/m", "min_prefix_match": 0.75})).await, 200);
    until_shown(&b, Some(0.75)).await;
    let c = picker(&config, "c", &nats.url()).await;
    until_shown(&c, Some(0.75)).await;
    // The last picker changes it, the second one removes it.
    assert_eq!(send(&c, "POST", POLICIES, &json!({"model_name": "org/m", "min_prefix_match": 0.25})).await, 200);
    until_shown(&a, Some(0.25)).await;
    until_shown(&b, Some(0.25)).await;
    assert_eq!(send(&b, "DELETE", &format!("{POLICIES}/org/m"), &Value::Null).await, 204);
    for picker in [&a, &b, &c] {
        until_shown(picker, None).await;
        picker.assert_settled().await;
    }
}
