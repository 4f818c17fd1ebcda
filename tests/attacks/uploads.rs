//! Uploads that occupy the memory for request bodies: stalled or trickling bodies, and endless messages.

use super::honest::Honest;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat, cut};
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::gateway::{Gateway, Way};
use crate::support::grpc::{Connection, PROCESS, message, request_headers};
use crate::support::process::eventually;
use bytes::{BufMut, Bytes, BytesMut};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Event;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders};
use http::{HeaderValue, Request};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::task::JoinSet;

const CHAT: &str = "/v1/chat/completions";
/// 8 MiB for all bodies, 1 MiB for each.
const LIMITS: &str = "maxBodyBytes: 1MiB, maxBufferedBytes: 8MiB";

fn configuration(echo: &Echo, limits: &str) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{tenant: {{header: x-tenant}}}}\nlimits: {{{limits}}}\n\
         pools:\n- name: default\n  endpoints: [\"{}\"]\n",
        echo.address
    )
}

/// A request that sends `first` bytes of a body of `size` bytes, then a thousandth of the rest every `pause`.
fn slow(
    to: SocketAddr,
    http: Http,
    size: usize,
    first: usize,
    pause: Duration,
    tenant: &'static str,
) -> Request<Payload> {
    let mut body = chat(size, false, 5);
    let mut pieces = VecDeque::from([body.split_to(first)]);
    let part = body.len().div_ceil(1_000).max(1);
    pieces.extend(body.chunks(part).map(|piece| body.slice_ref(piece)));
    let mut request = client::request("POST", to, http, CHAT, Payload::chunked(pieces).with_length().paced(pause));
    request.headers_mut().insert("x-tenant", HeaderValue::from_static(tenant));
    request
}

/// Sends `count` of these requests concurrently, each on its own connection.
fn send_all(
    count: usize,
    to: SocketAddr,
    http: Http,
    request: impl Fn() -> Request<Payload>,
) -> JoinSet<Option<Reply>> {
    let mut all = JoinSet::new();
    for _ in 0..count {
        let request = request();
        all.spawn(async move { client::send(to, http, request).await.ok() });
    }
    all
}

/// Status and reason of the requests that have ended.
fn reasons(all: &mut JoinSet<Option<Reply>>) -> Vec<(u16, String)> {
    let mut reasons = Vec::new();
    while let Some(done) = all.try_join_next() {
        let reply = done.expect("a task");
        reasons.extend(reply.map(|reply| (reply.status.as_u16(), reply.header("x-attache-reason").to_owned())));
    }
    reasons
}

/// The tenant header of clients without a tenant.
const NO_TENANT: &str = "";
const HOUR: Duration = Duration::from_secs(3_600);

#[tokio::test(flavor = "multi_thread")]
async fn stalled_uploads_are_evicted_for_honest_requests() {
    let echo = Echo::start().await;
    for (http, way) in [Http::H1, Http::H2].into_iter().flat_map(|http| Way::BOTH.map(|way| (http, way))) {
        let picker = Gateway::alone(way, &configuration(&echo, LIMITS), &[echo.address]).await;
        let to = picker.clients();
        let honest = Honest::new(to).with("x-tenant", "honest");
        let quiet = honest.quiet().await;
        let mut attack = JoinSet::new();
        let (report, ()) = honest
            .during(async {
                attack = send_all(16, to, http, || slow(to, http, 1_000_000, 900_000, HOUR, NO_TENANT));
                eventually("evicted uploads", || async {
                    (picker.metric("attache_rejections_total").await > 0.0).then_some(())
                })
                .await;
            })
            .await;
        report.assert_unharmed(&quiet);
        let reasons = reasons(&mut attack);
        assert!(!reasons.is_empty(), "{http:?} {way:?}: the uploads that were evicted are answered");
        assert!(reasons.iter().all(|r| *r == (503, "upload_evicted".to_owned())), "{http:?} {way:?}: {reasons:?}");
        let held = picker.metric("attache_buffered_request_bytes").await;
        assert!(held <= f64::from(8 << 20), "{http:?} {way:?}: {held} bytes are held");
        attack.shutdown().await;
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn small_stalled_uploads_are_evicted_for_a_large_honest_one() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, LIMITS)).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let honest = Honest::new(to);
    let quiet = honest.quiet().await;
    let mut attack = send_all(200, to, Http::H1, || slow(to, Http::H1, 60_000, 39_000, HOUR, NO_TENANT));
    eventually("memory that is almost full", || async {
        (picker.metric("attache_buffered_request_bytes").await > 7.0 * f64::from(1 << 20)).then_some(())
    })
    .await;
    // The rate of an upload is measured over at least one second, and no page shows it: the uploads must stall that long.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let (report, replies) = honest
        .during(async {
            let large = || client::request("POST", to, Http::H1, CHAT, Payload::sized(chat(1_000_000, false, 7)));
            send_all(4, to, Http::H1, large).join_all().await
        })
        .await;
    let statuses: Vec<_> = replies.iter().map(|reply| reply.as_ref().map(|r| r.status.as_u16())).collect();
    assert_eq!(statuses, [Some(200); 4]);
    report.assert_unharmed(&quiet);
    let reasons = reasons(&mut attack);
    assert!(reasons.iter().all(|r| *r == (503, "upload_evicted".to_owned())), "{reasons:?}");
    attack.shutdown().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_over_its_share_loses_its_own_uploads_only() {
    let echo = Echo::start().await;
    let limits = format!("{LIMITS}, maxUploadBytesPerClient: 2MiB");
    for way in Way::BOTH {
        let picker = Gateway::alone(way, &configuration(&echo, &limits), &[echo.address]).await;
        let to = picker.clients();
        let honest = Honest::new(to).with("x-tenant", "honest");
        let quiet = honest.quiet().await;
        let mut other = send_all(1, to, Http::H1, || slow(to, Http::H1, 900_000, 800_000, HOUR, "other"));
        let mut attack = JoinSet::new();
        let (report, ()) = honest
            .during(async {
                attack = send_all(8, to, Http::H2, || slow(to, Http::H2, 900_000, 800_000, HOUR, "attacker"));
                eventually("uploads over the share", || async {
                    (picker.metric("attache_rejections_total").await >= 6.0).then_some(())
                })
                .await;
            })
            .await;
        report.assert_unharmed(&quiet);
        let answered = reasons(&mut attack);
        assert!(answered.iter().all(|r| *r == (503, "upload_evicted".to_owned())), "{answered:?}");
        assert_eq!(reasons(&mut other), [], "another tenant's upload stays");
        attack.shutdown().await;
        other.shutdown().await;
        picker.assert_settled().await;
    }
}

/// Streams of one HTTP/2 connection that send a part of their bodies and stop. Returns the status and reason of each
/// response.
async fn stopped_streams(to: SocketAddr, count: usize, bytes: usize) -> JoinSet<Option<(u16, String)>> {
    let socket = tokio::net::TcpStream::connect(to).await.expect("a connection");
    let (client, connection) = h2::client::handshake(socket).await.expect("HTTP/2");
    tokio::spawn(connection);
    let mut all = JoinSet::new();
    let part = chat(2 * bytes, false, 9).slice(..bytes);
    for _ in 0..count {
        let mut client = client.clone().ready().await.expect("a stream");
        let request = Request::builder().method("POST").uri(format!("http://{to}{CHAT}"));
        let request = request.header("content-type", "application/json").body(()).expect("a request");
        let (response, mut upload) = client.send_request(request, false).expect("a stream");
        upload.send_data(part.clone(), false).expect("sending");
        all.spawn(async move {
            let response = response.await.ok()?;
            drop(upload);
            let reason = response.headers().get("x-attache-reason")?.to_str().ok()?;
            Some((response.status().as_u16(), reason.to_owned()))
        });
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_over_its_share_loses_its_own_uploads_only() {
    let echo = Echo::start().await;
    let limits = format!("{LIMITS}, maxUploadBytesPerClient: 2MiB");
    for way in Way::BOTH {
        let picker = Gateway::alone(way, &configuration(&echo, &limits), &[echo.address]).await;
        let to = picker.clients();
        let honest = Honest::new(to);
        let quiet = honest.quiet().await;
        let mut other = send_all(1, to, Http::H1, || slow(to, Http::H1, 900_000, 800_000, HOUR, NO_TENANT));
        let mut attack = JoinSet::new();
        let (report, ()) = honest
            .during(async {
                attack = stopped_streams(to, 8, 800_000).await;
                eventually("uploads over the share", || async {
                    (picker.metric("attache_rejections_total").await >= 6.0).then_some(())
                })
                .await;
            })
            .await;
        report.assert_unharmed(&quiet);
        let mut answered = Vec::new();
        while let Some(answer) = attack.try_join_next() {
            answered.push(answer.expect("a task"));
        }
        assert!(!answered.is_empty());
        assert!(answered.iter().all(|a| *a == Some((503, "upload_evicted".to_owned()))), "{answered:?}");
        assert_eq!(reasons(&mut other), [], "the upload of another connection stays");
        attack.shutdown().await;
        other.shutdown().await;
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn trickling_uploads_are_rejected_and_a_slow_honest_one_completes() {
    let echo = Echo::start().await;
    for way in Way::BOTH {
        let limits = "minUploadRate: 10KiB, uploadGrace: 1s";
        let picker = Gateway::alone(way, &configuration(&echo, limits), &[echo.address]).await;
        let to = picker.clients();
        let trickle = || slow(to, Http::H1, 100_000, 90_000, Duration::from_millis(50), "attacker");
        let (trickling, slower) =
            (send_all(3, to, Http::H1, trickle), slow(to, Http::H1, 60_000, 100, Duration::from_millis(2), NO_TENANT));
        let honest = client::send(to, Http::H1, slower).await.expect("a response");
        assert_eq!(honest.status, 200, "about 25 KiB a second");
        for reply in trickling.join_all().await {
            let reply = reply.expect("a response");
            assert_eq!((reply.status.as_u16(), reply.header("x-attache-reason")), (408, "upload_too_slow"));
        }
        picker.assert_settled().await;
    }
}

/// Resident memory of a process, bytes.
fn resident(id: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{id}/statm")).expect("a running process");
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number of pages");
    pages * 4_096
}

/// The first `sent` bytes of a message that declares a length of `claimed` bytes.
fn unfinished(claimed: usize, sent: usize) -> Bytes {
    let mut bytes = BytesMut::with_capacity(5 + sent);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(claimed).expect("a length"));
    bytes.put_bytes(7, sent);
    bytes.freeze()
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_messages_over_the_body_limit_are_not_buffered() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let before = resident(picker.process.id());
    let (report, ()) = honest
        .during(async {
            for begun in [false, true, false, true] {
                let connection = Connection::open(picker.grpc).await.expect("a connection");
                let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
                if begun {
                    let headers = request_headers(&[(":path", CHAT.as_bytes()), (":method", b"POST")], false);
                    stream.send(&headers).expect("sending");
                }
                stream.send_raw(unfinished(60 << 20, 59 << 20)).expect("sending");
                match begun {
                    // The client of a started request gets a response.
                    true => assert!(stream.answer().await.expect("an answer").is_some()),
                    false => assert_eq!(stream.status().await.expect("a status"), "8"),
                }
            }
        })
        .await;
    report.assert_unharmed(&quiet);
    let grown = resident(picker.process.id()).saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes");
    assert_eq!(picker.metric("attache_buffered_request_bytes").await, 0.0);
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_messages_within_the_body_limit_are_evicted() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, LIMITS)).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let mut streams = Vec::new();
    let (report, ()) = honest
        .during(async {
            for _ in 0..6 {
                let connection = Connection::open(picker.grpc).await.expect("a connection");
                let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
                stream.send_raw(unfinished(3 << 20, (3 << 20) - 1)).expect("sending");
                streams.push((connection, stream));
            }
            eventually("unfinished messages that were given up", || async {
                (picker.metric("attache_protocol_errors_total").await > 0.0).then_some(())
            })
            .await;
        })
        .await;
    report.assert_unharmed(&quiet);
    let held = picker.metric("attache_buffered_request_bytes").await;
    assert!(held > 0.0 && held <= f64::from(8 << 20), "{held} bytes are held");
    drop(streams);
    picker.assert_settled().await;
    assert_eq!(picker.metric("attache_buffered_request_bytes").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn buffered_body_over_the_limit_gets_413_without_buffering() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::alone(&by_header("buffered.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let before = resident(picker.process.id());
    for _ in 0..4 {
        let chunked = Payload::chunked(cut(chat(19 << 20, false, 1), 64 << 10, 1));
        let request = client::request("POST", to, Http::H2, CHAT, chunked);
        let reply = client::send(to, Http::H2, request).await.expect("a response");
        assert_eq!((reply.status.as_u16(), reply.header("x-attache-reason")), (413, "body_too_large"));
    }
    let grown = resident(picker.process.id()).saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes");
    picker.assert_settled().await;
}

/// A pod that reports a response: messages after the response headers have a smaller size limit.
#[tokio::test(flavor = "multi_thread")]
async fn unfinished_response_message_ends_only_its_own_stream() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
    stream.send(&request_headers(&[(":path", CHAT.as_bytes()), (":method", b"POST")], false)).expect("sending");
    let body = HttpBody { body: chat(300, true, 1).to_vec(), end_of_stream: true, ..HttpBody::default() };
    stream.send(&message(Event::RequestBody(body))).expect("sending");
    assert!(stream.answer().await.expect("an answer").is_some());
    stream.send(&message(Event::ResponseHeaders(HttpHeaders::default()))).expect("sending");
    stream.send_raw(unfinished(60 << 20, 1 << 20)).expect("sending");
    assert_eq!(stream.status().await.expect("a status"), "8");
    picker.assert_settled().await;
}
