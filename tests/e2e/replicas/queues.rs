//! Queues of two pickers before one pool that is full.

use super::*;
use http::HeaderValue;

/// Three requests at a time, whichever picker sends them.
fn configuration(echo: &Echo) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{tenant: {{header: x-tenant}}}}\npools:\n- name: default\n  \
         endpoints: [{{address: \"{}\", engine: none}}]\n  flowControl:\n    enabled: true\n    detector: \
         {{name: concurrency-detector, parameters: {{maxConcurrency: 3}}}}\n",
        echo.address
    )
}

/// Opens a response stream of a tenant with a prompt of about `bytes` bytes, and returns after its first event.
async fn open_as(to: SocketAddr, tenant: &'static str, bytes: usize) -> Open {
    let mut request = client::request("POST", to, Http::H1, LONG_SSE, Payload::sized(chat(bytes, true, 1)));
    request.headers_mut().insert("x-tenant", HeaderValue::from_static(tenant));
    let mut open = client::open(to, Http::H1, request).await.expect("a response");
    assert_eq!(open.response.status(), 200);
    assert!(open.next().await.expect("a first event").is_some());
    open
}

#[tokio::test(flavor = "multi_thread")]
async fn queue_yields_to_the_tenant_that_no_picker_has_served() {
    let (nats, echo) = (NatsProcess::start().await, Echo::start().await);
    let pair = Pair::start(&configuration(&echo), &nats.url()).await;
    pair.until_peers().await;
    let [a, b] = pair.to;
    let held = [open_as(a, "other", 300).await, open_as(b, "other", 300).await];
    let served = open_as(b, "heavy", 20_000).await;
    pair.until_both(&[3]).await;
    // The heavy tenant comes first. By the first picker's own requests, both tenants are equal.
    let queued = tokio::spawn(open_as(a, "heavy", 300));
    pair.pickers[0].until_metric("attache_queued_requests", 1.0).await;
    let light = tokio::spawn(open_as(a, "light", 300));
    pair.pickers[0].until_metric("attache_queued_requests", 2.0).await;
    // The other picker's request ends, which frees capacity for one.
    drop(served);
    let light = light.await.expect("the light tenant's response");
    assert!(!queued.is_finished(), "the heavy tenant is still queued");
    pair.pickers[0].until_metric("attache_queued_requests", 1.0).await;
    drop(held);
    drop((light, queued.await.expect("the heavy tenant's response")));
    pair.until_both(&[0]).await;
    pair.assert_settled().await;
}
