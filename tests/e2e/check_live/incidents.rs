//! Incidents of a running system that `attache check --live` names while they last. Those that take half a minute to be
//! one have unit tests in `src/admin/warnings`.

use super::{Checked, PATIENT, patient_picker, until_scraped, until_warned};
use crate::prefix;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::envoy::{EnvoyProcess, with_mtls};
use crate::support::pki::{Authority, Identity, Secret};
use crate::support::process::{eventually, scratch};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use http::HeaderValue;
use serde_json::json;
use std::net::SocketAddr;
use tokio::task::JoinSet;

fn check(picker: &AttacheProcess, envoy: &EnvoyProcess) -> Checked {
    Checked::run(&["--admin", &picker.metrics.to_string(), "--envoy-admin", &envoy.admin.to_string()])
}

/// A completion of a few tokens, for a tenant.
async fn complete(to: SocketAddr, tenant: &'static str, tokens: u32) -> Reply {
    let body = json!({"model": "sim-8b", "prompt": "Which sea is the largest?", "max_tokens": tokens}).to_string();
    let mut request = client::request("POST", to, Http::H1, "/v1/completions", Payload::sized(Bytes::from(body)));
    request.headers_mut().insert("x-tenant", HeaderValue::from_static(tenant));
    client::send(to, Http::H1, request).await.expect("a response")
}

/// Requests through an Envoy and a picker with these certificates, and what the check finds then. `succeeds` says whether
/// they reach the model server.
async fn checked_with(picker: &Identity, envoy: &Identity, authority: &Authority, succeeds: bool) -> Checked {
    let scratch = scratch("certificates");
    let secret = |name: &str, identity| Secret::new(scratch.path().join(name), identity, &[authority]);
    let (own, of_envoy) = (secret("picker", picker), secret("envoy", envoy));
    let fleet = SimProcess::start(1, &[]).await;
    let directory = own.path().display().to_string();
    let ca = own.ca().display().to_string();
    let arguments =
        ["--secure-serving=true", "--cert-path", &directory, "--client-ca-file", &ca, "--client-name", "envoy"];
    let picker = patient_picker(&fleet.servers, &arguments).await;
    let bootstrap = with_mtls(&by_header("original-dst.yaml", &picker), of_envoy.path(), scratch.path());
    let envoy = EnvoyProcess::start(&bootstrap).await;
    let to = envoy.listener("inference");
    if succeeds {
        assert_eq!(complete(to, "a", 1).await.status, 200);
    } else {
        // Each request is a new attempt to connect.
        eventually("failed handshakes", async || {
            assert_eq!(complete(to, "a", 1).await.status, 500);
            (picker.metric("attache_tls_handshake_failures_total").await >= 10.0).then_some(())
        })
        .await;
        until_warned(&picker, "", "tls_handshakes_fail").await;
    }
    check(&picker, &envoy)
}

const FAILED: [(&str, &str); 2] = [("envoy-stat-streams-failed", "log"), ("envoy-stat-tls-failures", "certificates")];

#[tokio::test(flavor = "multi_thread")]
async fn expired_certificate_is_found_on_the_side_that_has_it() {
    let authority = Authority::new("a");
    // Envoy expects this name of the picker.
    let (picker, envoy) = ("attache", "envoy");
    let checked = checked_with(&authority.expired(picker), &authority.identity(envoy), &authority, false).await;
    let of_picker = [("picker-certificate", "server.tls.directory"), ("picker-tls-handshakes", "--cert-path")];
    checked.assert_faults("expired certificate of the picker", "", &[&FAILED[..], &of_picker].concat());

    let checked = checked_with(&authority.identity(picker), &authority.expired(envoy), &authority, false).await;
    let of_envoy = [("envoy-certificates", "transport_socket"), ("picker-tls-handshakes", "client's certificate")];
    checked.assert_faults("expired certificate of Envoy", "", &[&FAILED[..], &of_envoy].concat());
    assert_eq!(checked.code, 1);

    let checked = checked_with(&authority.ending(picker), &authority.ending(envoy), &authority, true).await;
    let both = [("envoy-certificates", "transport_socket"), ("picker-certificate", "server.tls.directory")];
    checked.assert_faults("certificates that end soon", "", &both);
    assert_eq!(checked.code, 0, "warnings");
}

#[tokio::test(flavor = "multi_thread")]
async fn filter_that_removes_the_destination_is_found_by_its_effect() {
    const ROUTER: &str = "          - name: envoy.filters.http.router\n";
    let lua = "          - name: clean\n            typed_config: {\"@type\": \
               type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua, default_source_code: {inline_string: \
               \"function envoy_on_request(h) h:headers():remove('x-gateway-destination-endpoint') end\"}}\n";
    let fleet = SimProcess::start(1, &[]).await;
    let picker = patient_picker(&fleet.servers, &[]).await;
    let bootstrap = by_header("original-dst.yaml", &picker);
    assert_eq!(bootstrap.matches(ROUTER).count(), 1);
    let envoy = EnvoyProcess::start(&bootstrap.replace(ROUTER, &format!("{lua}{ROUTER}"))).await;
    assert_eq!(complete(envoy.listener("inference"), "a", 1).await.status, 503);
    let wanted = ("envoy-stat-no-server", "x-gateway-destination-endpoint");
    check(&picker, &envoy).assert_faults("a Lua filter", "", &[wanted]);
}

#[tokio::test(flavor = "multi_thread")]
async fn full_queue_and_the_tenant_that_floods_it_are_found() {
    let fleet = SimProcess::start(1, &[]).await;
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{tenant: {{header: x-tenant}}, trustClientHeaders: true}}\n\
         pools:\n- name: chat\n  {PATIENT}\n  endpoints: [\"{}\"]\n  flowControl: {{enabled: true, maxRequests: 2, detector: {{name: \
         concurrency-detector, parameters: {{maxConcurrency: 2}}}}}}\n",
        fleet.servers[0]
    ))
    .await;
    until_scraped(&picker, 1).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    assert_eq!(complete(to, "acme", 1).await.status, 200);
    check(&picker, &envoy).assert_faults("a calm pool", "", &[]);
    let mut flood = JoinSet::new();
    for _ in 0..8 {
        flood.spawn(async move {
            let (mut served, mut rejected) = (0, 0);
            while served < 5 {
                match complete(to, "initech", 4).await.status.as_u16() {
                    200 => served += 1,
                    429 => rejected += 1,
                    other => panic!("status {other}"),
                }
            }
            rejected
        });
    }
    assert!(flood.join_all().await.iter().sum::<u32>() > 0, "the queue was never full");
    until_warned(&picker, "", "tenant_flood").await;
    let wanted = [("picker-queue", "flowControl.maxRequests"), ("picker-tenants", "limits.tenants")];
    let checked = check(&picker, &envoy);
    checked.assert_faults("a flood", "", &wanted);
    let found = checked.faults("picker-tenants")[0]["found"].clone();
    assert!(found.as_str().is_some_and(|found| found.contains("tenant initech has 9")), "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_a_body_are_found_on_both_sides() {
    let fleet = SimProcess::start(1, &[]).await;
    let picker = patient_picker(&fleet.servers, &[]).await;
    let bootstrap = by_header("original-dst.yaml", &picker);
    let mode = "request_body_mode: FULL_DUPLEX_STREAMED";
    assert_eq!(bootstrap.matches(mode).count(), 1);
    let envoy = EnvoyProcess::start(&bootstrap.replace(mode, "request_body_mode: NONE")).await;
    assert_eq!(complete(envoy.listener("inference"), "a", 1).await.status, 200);
    until_warned(&picker, "", "no_body").await;
    let wanted = ["envoy-request-body", "picker-degraded"].map(|id| (id, "FULL_DUPLEX_STREAMED"));
    check(&picker, &envoy).assert_faults("no bodies", "", &wanted);
}

#[tokio::test(flavor = "multi_thread")]
async fn publisher_that_stopped_is_found_while_its_server_computes() {
    let fleet = SimProcess::start(1, prefix::SIM).await;
    let picker = AttacheProcess::configured(&prefix::config(prefix::BY_PREFIX, "tiktoken", &fleet.servers).await).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let pause = Bytes::from(json!({"kv_events": {"pause": true}}).to_string());
    assert!(client::post(fleet.servers[0], "/sim/faults", pause).await.expect("a response").status.is_success());
    let to = envoy.listener("inference");
    // The check listens for a second.
    let traffic = tokio::spawn(async move {
        for number in 0.. {
            let body =
                json!({"model": "sim-8b", "prompt": format!("{number} {}", "word ".repeat(500)), "max_tokens": 1});
            let reply = client::post(to, "/v1/completions", Bytes::from(body.to_string())).await.expect("a response");
            assert_eq!(reply.status, 200);
        }
    });
    let checked = tokio::task::spawn_blocking({
        let (picker, envoy) = (picker.metrics.to_string(), envoy.admin.to_string());
        move || Checked::run(&["--admin", &picker, "--envoy-admin", &envoy])
    });
    let checked = checked.await.expect("a check");
    traffic.abort();
    checked.assert_faults("a publisher that stopped", "server-kv", &[("server-kv-events", "kvEvents.port")]);
}
