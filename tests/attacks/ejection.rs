//! Clients that cause error responses in order to eject healthy servers.

use super::honest::Honest;
use crate::faults::refusing;
use crate::shipped::by_header;
use crate::support::attache::{AdminPages, AttacheProcess};
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::gateway::{Gateway, Way};
use bytes::Bytes;
use http::HeaderValue;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::Instant;

/// Duration of the attack, longer than `health.errorPeriod`.
const ATTACK: Duration = Duration::from_secs(6);
/// Pause between two requests of one attacker.
const PACE: Duration = Duration::from_millis(40);
/// The request of each attacker.
const ATTACKS: [(Http, &str); 9] = [
    (Http::H1, "/v1/embeddings?status=501"),
    (Http::H1, "/v1/chat/completions?status=500"),
    (Http::H2, "/v1/chat/completions?status=505&kind=sse"),
    (Http::H2, "/v1/messages?status=500"),
    (Http::H1, "/v1/completions?status=503&size=3000"),
    (Http::H1, "/v1/embeddings?status=500"),
    (Http::H2, "/v1/responses?status=504"),
    (Http::H1, "/v1/chat/completions?reset=1"),
    (Http::H1, "/v1/images/generations?status=502"),
];

/// A request body that is valid in all of these APIs.
const BODY: &[u8] =
    br#"{"model":"m","messages":[{"role":"user","content":"a"}],"prompt":"a","input":"a","max_tokens":5}"#;

fn configuration(servers: &[SocketAddr], health: &str) -> String {
    let servers: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {{name: random}}\n  health: {{{health}}}\n  \
         endpoints: [{}]\n",
        servers.join(", ")
    )
}

/// Sends requests until the attack is over. With `forged`, each has another credential.
async fn attack(to: SocketAddr, (http, target): (Http, &'static str), forged: bool) -> usize {
    let (begun, mut sent) = (Instant::now(), 0);
    while begun.elapsed() < ATTACK {
        let mut request = client::request("POST", to, http, target, Payload::sized(Bytes::from_static(BODY)));
        if forged {
            let credential = HeaderValue::from_str(&format!("Bearer {sent}")).expect("a header value");
            request.headers_mut().insert("authorization", credential);
        }
        let status = client::send(to, http, request).await.expect("a response").status;
        assert!(status.is_server_error(), "{target}: {status}");
        sent += 1;
        tokio::time::sleep(PACE).await;
    }
    sent
}

/// Sends requests one after another until `count` servers are ejected. Returns how many requests failed.
async fn until_ejected(to: SocketAddr, picker: &AdminPages, count: f64) -> usize {
    let mut failed = 0;
    for _ in 0..500 {
        let reply = client::post(to, "/v1/chat/completions", chat(300, false, 1)).await.expect("a response");
        failed += usize::from(reply.status != 200);
        if picker.metric("attache_ejections_total").await >= count {
            return failed;
        }
    }
    panic!("{count} servers were not ejected by 500 requests, of which {failed} failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn error_responses_caused_by_clients_eject_no_healthy_server() {
    let [a, b, c] = [Echo::start().await, Echo::start().await, Echo::start().await];
    // One server is down. If all others were ejected, Attaché would ignore ejection and send requests to it.
    let servers = [a.address, b.address, c.address, refusing().await];
    for way in Way::BOTH {
        let text = configuration(&servers, "ejection: 60s, slowStart: 0s");
        let picker = Gateway::alone(way, &text, &servers).await;
        let to = picker.clients();
        // Two failed connections eject. Inside Envoy, the next server of the list gets these requests.
        let failed = if way == Way::Inside { 0 } else { 2 };
        assert_eq!(until_ejected(to, &picker, 1.0).await, failed, "{way:?}");
        let honest = Honest::new(to);
        let quiet = honest.quiet().await;
        let (report, sent) = honest
            .during(async {
                let mut attackers = tokio::task::JoinSet::new();
                for (number, what) in ATTACKS.into_iter().enumerate() {
                    attackers.spawn(attack(to, what, number % 2 == 0));
                }
                attackers.join_all().await.into_iter().sum::<usize>()
            })
            .await;
        assert!(sent > 200, "{sent} requests are no attack");
        assert_eq!(picker.metric("attache_ejections_total").await, 1.0, "no server but the one that is down");
        report.assert_unharmed(&quiet);
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_fail_every_request_are_ejected_up_to_the_limit() {
    // Their responses claim that Envoy's circuit breaker is the cause, which would hide that they fail.
    let failing = [Echo::failing().await, Echo::failing().await, Echo::failing().await];
    let well = Echo::start().await;
    let servers = [failing[0].address, failing[1].address, failing[2].address, well.address];
    let picker = AttacheProcess::configured(&configuration(&servers, "ejection: 60s, errorPeriod: 300ms")).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    until_ejected(to, &picker, 2.0).await;
    for _ in 0..200 {
        client::post(to, "/v1/chat/completions", chat(300, false, 1)).await.expect("a response");
        if picker.metric("attache_ejections_capped_total").await > 0.0 {
            break;
        }
    }
    assert!(picker.metric("attache_ejections_capped_total").await > 0.0, "the third is not ejected");
    assert_eq!(picker.metric("attache_ejections_total").await, 2.0);
    let before = well.requests();
    let reply = client::post(to, "/v1/chat/completions", chat(300, false, 1)).await.expect("a response");
    assert!(reply.status == 503 || well.requests() > before, "two servers are left");
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_servers_are_ejected_beyond_the_limit() {
    let well = Echo::start().await;
    let servers = [refusing().await, refusing().await, refusing().await, well.address];
    for file in ["original-dst.yaml", "buffered.yaml"] {
        let picker = AttacheProcess::configured(&configuration(&servers, "ejection: 60s")).await;
        let envoy = EnvoyProcess::alone(&by_header(file, &picker)).await;
        let to = envoy.listener("inference");
        assert_eq!(until_ejected(to, &picker, 3.0).await, 6, "{file}: two requests for each that is down");
        for _ in 0..20 {
            let reply = client::post(to, "/v1/chat/completions", chat(300, false, 1)).await.expect("a response");
            assert_eq!(reply.status, 200, "{file}");
        }
        picker.assert_settled().await;
    }
}
