//! Model servers close connections without requests, as uvicorn does. Envoy closes them first, so no request meets a
//! connection that is being closed.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use crate::support::sim::SimProcess;
use bytes::Bytes;
use futures_util::future::join_all;
use std::net::SocketAddr;
use std::time::Duration;

/// Requests sent at once, as many as stay far below the limits of file descriptors.
const BURST: usize = 2_500;
/// Pauses around the 5 s after which the simulator closes connections, in milliseconds.
const PAUSES: [u64; 4] = [0, 4_900, 5_000, 5_100];
const IDLE: &str = "        common_http_protocol_options: {idle_timeout: 4s}\n";

/// Sends requests at once and returns how many were not answered with 200.
async fn burst(to: SocketAddr, count: usize) -> usize {
    let body = Bytes::from_static(br#"{"model":"sim-8b","prompt":"Hello","max_tokens":1}"#);
    let replies = join_all((0..count).map(|_| client::post(to, "/v1/completions", body.clone()))).await;
    replies.iter().filter(|reply| !matches!(reply, Ok(reply) if reply.status == 200)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_close_idle_connections_lose_no_request() {
    // Each response takes a second, so that every burst opens many connections to the servers.
    let sim = SimProcess::start(3, &["--faults", r#"{"first_byte_delay_ms":1000}"#]).await;
    let picker = AttacheProcess::start(&sim.servers, &[]).await;
    let shipped = by_header("original-dst.yaml", &picker);
    let envoy = EnvoyProcess::start(&shipped).await;
    let mut failed = 0;
    for pause in PAUSES {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        failed += burst(envoy.listener("inference"), BURST).await;
    }
    let of_servers = |name: &str| format!("cluster.model-servers.{name}");
    let opened = envoy.stat(&of_servers("upstream_cx_total")).await;
    eventually("idle connections closed", async || {
        (envoy.stat(&of_servers("upstream_cx_active")).await == 0).then_some(())
    })
    .await;
    let closed_by_servers = envoy.stat(&of_servers("upstream_cx_destroy_remote")).await;
    assert_eq!(failed, 0, "requests failed");
    assert!(opened > 100, "only {opened} connections were opened");
    assert_eq!(closed_by_servers, 0, "connections were closed by a server first, of {opened}");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// The test above would pass without Envoy's setting if the simulator kept connections open.
#[tokio::test(flavor = "multi_thread")]
async fn without_an_idle_timeout_of_envoy_servers_close_connections_first() {
    let sim = SimProcess::start(1, &["--keep-alive-timeout", "300ms"]).await;
    let picker = AttacheProcess::start(&sim.servers, &[]).await;
    let shipped = by_header("original-dst.yaml", &picker);
    assert!(shipped.contains(IDLE));
    let envoy = EnvoyProcess::start(&shipped.replace(IDLE, "")).await;
    assert_eq!(burst(envoy.listener("inference"), 1).await, 0);
    eventually("a connection closed by the server", async || {
        (envoy.stat("cluster.model-servers.upstream_cx_destroy_remote").await == 1).then_some(())
    })
    .await;
}
