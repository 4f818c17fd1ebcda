//! Unusual encodings that a server may read differently than the picker: encoded paths, and numbers as strings or
//! fractions. All are counted as the server reads them.

use super::honest::Honest;
use super::usage::{assert_honest_charge, configuration};
use crate::shipped::{by_header, by_list};
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{self, Mode};
use http::HeaderValue;
use std::net::SocketAddr;
use tokio::task::JoinSet;

/// Concurrent requests. Each may generate 4,000 tokens of its tenant's limit of 10,000.
const BURST: usize = 16;

async fn burst(to: SocketAddr, http: Http, target: &str, body: &str, tenant: &str) -> Vec<Reply> {
    let mut clients = JoinSet::new();
    for _ in 0..BURST {
        // The delay is longer than it takes to send all requests.
        let target = format!("{target}?kind=json&size=200&delay_ms=2000");
        let payload = Payload::sized(body.to_owned().into());
        let mut request = client::request("POST", to, http, &target, payload);
        request.headers_mut().insert("x-tenant", HeaderValue::from_str(tenant).expect("a header"));
        clients.spawn(async move { client::send(to, http, request).await.expect("a response") });
    }
    clients.join_all().await
}

fn assert_two_served(replies: &[Reply], name: &str) {
    let served = replies.iter().filter(|reply| reply.status == 200).count();
    let refused = replies.iter().filter(|reply| reply.header("x-attache-reason") == "tokens_per_day_exceeded").count();
    assert_eq!((served, refused), (2, BURST - 2), "{name}");
}

#[tokio::test(flavor = "multi_thread")]
async fn encoded_paths_and_coerced_numbers_are_counted_as_servers_read_them() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, "")).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    // Listeners that do not normalize paths, as some gateways are configured.
    let raw = envoy.beside(&modes::bootstrap(&[Mode::FullDuplex, Mode::Buffered], picker.grpc)).await;
    let honest = Honest::new(envoy.listener("inference")).with("x-tenant", "honest");
    let quiet = honest.quiet().await;
    let chat = |limit: &str| format!(r#"{{"model":"m","messages":[{{"role":"user","content":"x"}}],{limit}}}"#);
    let completion = |limit: &str| format!(r#"{{"model":"m","prompt":"x",{limit}}}"#);
    let (shipped, duplex, buffered) = ("inference", Mode::FullDuplex.name(), Mode::Buffered.name());
    let cases = [
        ("encoded letter, normalized", shipped, "/v1/%63hat/completions", chat("\"max_tokens\":4000")),
        ("encoded letter", &duplex, "/v1/%63hat/completions", chat("\"max_tokens\":4000")),
        ("encoded slash", &duplex, "/v1%2Fchat%2fcompletions", chat("\"max_tokens\":4000")),
        ("encoded messages", &buffered, "/v1/m%65ssages", chat("\"max_tokens\":4000")),
        ("string", shipped, "/v1/chat/completions", chat("\"max_tokens\":\"4000\"")),
        ("fraction of zeros", &buffered, "/v1/completions", completion("\"max_tokens\":4000.0")),
        ("exponent", shipped, "/v1/chat/completions", chat("\"max_completion_tokens\":4e3")),
        ("two limits", shipped, "/v1/chat/completions", chat("\"max_tokens\":4000,\"max_completion_tokens\":1")),
        ("answers as a string", &duplex, "/v1/completions", completion("\"max_tokens\":1000,\"n\":\"4\"")),
        (
            "answers that are not returned",
            shipped,
            "/v1/completions",
            completion("\"max_tokens\":1000,\"best_of\":4.0"),
        ),
    ];
    let (report, ()) = honest
        .during(async {
            for (number, (name, listener, path, body)) in cases.iter().enumerate() {
                let to = if *listener == shipped { envoy.listener(listener) } else { raw.listener(listener) };
                let http = if number % 2 == 0 { Http::H2 } else { Http::H1 };
                assert_two_served(&burst(to, http, path, body, &format!("attacker-{number}")).await, name);
            }
        })
        .await;
    report.assert_unharmed(&quiet);
    picker.assert_settled().await;
    assert_honest_charge(&picker, quiet.latencies.len() + report.latencies.len()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn encoded_slashes_and_invalid_token_counts_are_rejected() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, "")).await;
    let bootstraps = [
        ("original-dst.yaml", by_header("original-dst.yaml", &picker)),
        ("buffered.yaml", by_header("buffered.yaml", &picker)),
        ("fail-open.yaml", by_list("fail-open.yaml", &picker, [echo.address; 4])),
        ("override-host.yaml", by_list("override-host.yaml", &picker, [echo.address; 4])),
    ];
    for (file, bootstrap) in bootstraps {
        let envoy = EnvoyProcess::alone(&bootstrap).await;
        let to = envoy.listener("inference");
        let chat = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":"#;
        let reply = client::post(to, "/v1%2fchat/completions", format!("{chat}7}}").into()).await.expect("a response");
        assert_eq!(reply.status, 400, "{file}: Envoy refuses encoded slashes");
        for count in ["\"many\"", "[4000]", "{}"] {
            let reply = client::post(to, "/v1/chat/completions", format!("{chat}{count}}}").into()).await;
            let reply = reply.expect("a response");
            assert_eq!(
                (reply.status.as_u16(), reply.header("x-attache-reason")),
                (400, "invalid_type"),
                "{file} {count}"
            );
        }
        for path in ["/v1//chat/completions", "/v1/x/../chat/completions", "/v1/./chat/completions"] {
            let reply = client::post(to, path, format!("{chat}7}}").into()).await.expect("a response");
            assert_eq!(reply.status, 200, "{file} {path}");
        }
    }
    assert_eq!(echo.requests(), 12, "rejected requests reach no server");
}
