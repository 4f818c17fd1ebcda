//! Forms that hide their model from the picker, in order to pass a limit, and forms that are costly to read.

use super::honest::Honest;
use super::tokenization::cpu;
use crate::forms::{FORM, file_first, send, send_as};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::sha256;
use crate::support::client::Http;
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::gateway::{Gateway, Way};
use bytes::Bytes;
use std::net::SocketAddr;
use std::time::Duration;

const PATH: &str = "/v1/audio/transcriptions";
/// Allowed requests for the model `m` per minute.
const ALLOWED: usize = 3;

/// A picker that limits requests for `m`. Honest clients use another model.
fn configuration(echo: &Echo) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nlimits:\n  models: {{overrides: {{m: {{requestsPerDay: {ALLOWED}}}}}}}\n\
         pools:\n- name: default\n  endpoints: [{{address: \"{}\", engine: none}}]\n",
        echo.address
    )
}

/// A form of these parts: their headers and values.
fn form(parts: &[(&str, &str)]) -> String {
    let mut form = String::new();
    for (headers, value) in parts {
        form += &format!("--b\r\n{headers}\r\n\r\n{value}\r\n");
    }
    form + "--b--\r\n"
}

/// Forms in which some servers find the model `m`, and others another one or none.
fn confusing() -> Vec<String> {
    let (model, file) =
        ("Content-Disposition: form-data; name=\"model\"", "Content-Disposition: form-data; name=f; filename=a");
    let sound = "s".repeat(100_000);
    let hidden = form(&[(model, "m")]);
    let hidden = hidden.trim_end();
    vec![
        form(&[(model, "free"), (file, &sound), (model, "m")]),
        form(&[(model, "free"), (model, "m")]),
        form(&[(file, &sound), ("Content-Disposition: form-data; name*=utf-8''model", "m")]),
        form(&[(model, "free"), ("Content-Disposition: form-data; name=\"mo\\del\"", "m")]),
        form(&[(file, &sound), ("Content-Disposition: form-data;\r\n name=\"model\"", "m")]),
        form(&[("Content-Transfer-Encoding: base64\r\nContent-Disposition: form-data; name=\"model\"", "bQ==")]),
        // A delimiter with white space behind it, a header without a carriage return, a form that is cut.
        form(&[(model, "free"), (file, &sound)]).replace("--b--", "--b \r\n") + hidden,
        form(&[(file, &sound)]).replace("filename=a\r\n", "filename=a\n") + hidden,
        format!("--b\r\n{file}\r\n\r\n{sound}\r\n--b\r\n{model}\r\n\r\nm"),
        // An empty part that ends where it begins.
        format!("--b\r\n{file}\r\n\r\n--b\r\n{model}\r\n\r\nfree\r\n--b\r\n{model}\r\n\r\nm\r\n--b--\r\n"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn forms_that_servers_read_differently_pass_no_limit_of_a_model() {
    for way in Way::BOTH {
        let echo = Echo::start().await;
        let picker = Gateway::alone(way, &configuration(&echo), &[echo.address]).await;
        let to = picker.clients();
        for form in confusing() {
            for (http, most) in [(Http::H1, 4_000), (Http::H2, 40_000)] {
                let reply = send(to, http, PATH, form.clone().into(), most).await;
                let begin = &form[..form.len().min(300)];
                assert_eq!(
                    (reply.status.as_u16(), reply.header("x-attache-reason")),
                    (400, "invalid_model"),
                    "{begin}"
                );
            }
        }
        // Requests that a server saw the start of.
        let cut = echo.requests();
        // As many parts as fit before the model.
        let parts = "--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n\r\n".repeat(20_000);
        let endless = [parts.as_bytes(), file_first(1_000, "m").as_ref()].concat();
        let mut reasons = Vec::new();
        for _ in 0..ALLOWED + 2 {
            let reply = send(to, Http::H2, PATH, endless.clone().into(), 40_000).await;
            reasons.push((reply.status.as_u16(), reply.header("x-attache-reason").to_owned()));
        }
        assert_eq!(reasons[..ALLOWED], [(); ALLOWED].map(|()| (200, String::new())));
        assert_eq!(reasons[ALLOWED..], [(); 2].map(|()| (429, "requests_per_day_exceeded".to_owned())));
        assert_eq!(echo.requests() - cut, ALLOWED);
        picker.assert_settled().await;
    }
}

/// CPU time of the picker for this attack: bodies in chunks of a few bytes.
async fn cost_of_tiny_chunks(
    to: SocketAddr,
    picker: &AttacheProcess,
    content_type: &'static str,
    body: &Bytes,
) -> Duration {
    let before = cpu(picker);
    let mut attack = tokio::task::JoinSet::new();
    for number in 0..12 {
        let (http, body) = (if number % 2 == 0 { Http::H1 } else { Http::H2 }, body.clone());
        attack.spawn(async move { send_as(content_type, to, http, PATH, body, 8).await });
    }
    for reply in attack.join_all().await {
        assert_eq!(reply.status, 200, "{content_type}: {}", String::from_utf8_lossy(&reply.body));
        assert_eq!(reply.header("x-echo-sha256"), sha256(body), "{content_type}");
    }
    cpu(picker) - before
}

#[tokio::test(flavor = "multi_thread")]
async fn forms_in_tiny_chunks_cost_what_other_bodies_cost() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo)).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    // Every byte of this file begins a delimiter that no boundary completes.
    let file = file_first(40_000, "free").to_vec();
    let near = Bytes::from(String::from_utf8_lossy(&file).replace("ssssssss", "\r\n--\r\n-\r"));
    let other = Bytes::from(vec![b' '; near.len()]);
    let (report, (usual, forms)) = Honest::new(to)
        .during(async {
            let usual = cost_of_tiny_chunks(to, &picker, "text/plain", &other).await;
            (usual, cost_of_tiny_chunks(to, &picker, FORM, &near).await)
        })
        .await;
    assert!(report.failures.is_empty(), "honest requests failed: {:?}", report.failures);
    // Reading a form again with each chunk would take seconds.
    let allowed = usual * 2 + Duration::from_millis(100);
    assert!(forms <= allowed, "forms cost {forms:?}, other bodies {usual:?}");
    picker.assert_settled().await;
}
