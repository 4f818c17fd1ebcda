//! Messages that Envoy does not send: invalid messages and abused HTTP/2 on the picker's port. Each gets its status,
//! and other streams are unaffected.

use crate::support::attache::AttacheProcess;
use crate::support::echo::Echo;
use crate::support::grpc::{Connection, PROCESS, Stream, frame, message, request_body, request_headers};
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Event;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpHeaders, HttpTrailers, ImmediateResponse, ProcessingRequest};
use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};
use prost::Message;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A header in a message.
type Header<'a> = (&'a str, &'a [u8]);
/// Description, path, headers of the gRPC call, bytes, and expected status.
type BrokenCall<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], Vec<u8>, &'a str);

const CHAT: &[Header<'_>] = &[(":path", b"/v1/chat/completions"), (":method", b"POST")];
const BODY: &[u8] = br#"{"model":"sim-8b","messages":[{"role":"user","content":"hello"}]}"#;

/// Checks that a valid stream is served.
async fn assert_served(connection: &Connection) {
    let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
    stream.send(&request_headers(CHAT, false)).expect("sending headers");
    stream.send(&request_body(BODY, true)).expect("sending the body");
    let answer = stream.answer().await.expect("an answer").expect("a message");
    assert!(matches!(answer.response, Some(Response::RequestHeaders(_))), "{answer:?}");
}

async fn refusal(stream: &mut Stream) -> ImmediateResponse {
    match stream.answer().await.expect("an answer").expect("a message").response {
        Some(Response::ImmediateResponse(refusal)) => refusal,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

fn reason(refusal: &ImmediateResponse) -> (i32, String) {
    let headers = refusal.headers.as_ref().map(|headers| &headers.set_headers[..]).unwrap_or_default();
    let mut reasons =
        headers.iter().filter_map(|option| option.header.as_ref()).filter(|h| h.key == "x-attache-reason");
    let reason = reasons.next().map(|header| String::from_utf8_lossy(&header.raw_value).into_owned());
    (refusal.status.as_ref().map_or(0, |status| status.code), reason.unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_message_gets_its_status_and_the_connection_stays() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let good = request_headers(CHAT, false).encode_to_vec();
    let too_long = [&[0][..], &(300_u32 << 20).to_be_bytes()].concat();
    let (invalid_argument, failed_precondition, resource_exhausted, unimplemented) = ("3", "9", "8", "12");
    let gzip: &[(&str, &str)] = &[("grpc-encoding", "gzip")];
    let cases: [BrokenCall<'_>; 8] = [
        ("no protobuf", PROCESS, &[], frame(0, b"\xff\xff\xff\xff").into(), invalid_argument),
        ("half a message", PROCESS, &[], frame(0, &good[..good.len() / 2]).into(), invalid_argument),
        ("compressed, without a word how", PROCESS, &[], frame(1, &good).into(), invalid_argument),
        ("compressed as it was not agreed", PROCESS, gzip, frame(1, &good).into(), unimplemented),
        ("a flag that is none", PROCESS, &[], frame(7, &good).into(), invalid_argument),
        ("over the largest message", PROCESS, &[], too_long, resource_exhausted),
        ("another service", "/envoy.service.auth.v3.Authorization/Check", &[], frame(0, &good).into(), unimplemented),
        ("an empty message", PROCESS, &[], frame(0, b"").into(), failed_precondition),
    ];
    for (what, path, headers, bytes, expected) in cases {
        let mut stream = connection.stream(path, headers).await.expect("a stream");
        stream.send_raw(bytes).expect("sending it");
        assert_eq!(stream.status().await.unwrap_or_else(|e| panic!("{what}: {e}")), expected, "{what}");
        assert_served(&connection).await;
    }
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_out_of_order_are_rejected() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let headers = || request_headers(CHAT, false);
    let response = || message(Event::ResponseHeaders(HttpHeaders::default()));
    let cases: [(&str, Vec<ProcessingRequest>); 4] = [
        ("body before headers", vec![request_body(BODY, true)]),
        ("trailers before headers", vec![message(Event::RequestTrailers(HttpTrailers::default()))]),
        ("headers twice", vec![headers(), headers()]),
        ("response headers twice", vec![headers(), request_body(BODY, true), response(), response()]),
    ];
    for (what, messages) in cases {
        let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
        for message in &messages {
            stream.send(message).expect("sending it");
        }
        assert_eq!(stream.status().await.unwrap_or_else(|e| panic!("{what}: {e}")), "9", "{what}");
    }
    assert_served(&connection).await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_headers_get_431_and_invalid_ones_are_not_echoed() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let long = vec![b'a'; 1 << 20];
    let names: Vec<String> = (0..10_000).map(|number| format!("x-header-{number}")).collect();
    let many: Vec<Header<'_>> = names.iter().map(|name| (name.as_str(), &b"value"[..])).collect();
    let too_large: [(&str, Vec<Header<'_>>); 2] =
        [("a value of 1 MiB", vec![("x-request-id", &long[..])]), ("10,000 headers", many)];
    for (what, more) in too_large {
        let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
        stream.send(&request_headers(&[CHAT, &more[..]].concat(), false)).expect("sending headers");
        let refusal = refusal(&mut stream).await;
        assert_eq!(reason(&refusal), (431, "headers_too_large".to_owned()), "{what}");
    }
    let odd: [Header<'_>; 6] = [
        ("x-request-id", b"a\r\nx-evil: 1"),
        ("x-request-id", "\u{1f600}".as_bytes()),
        ("content-type", b"\xff\xfe"),
        ("content-length", b"-1"),
        ("traceparent", b"00-\r\n-01"),
        ("x-gateway-model-name-rewrite", b"m\r\nx-evil: 1"),
    ];
    for (name, value) in odd {
        let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
        stream.send(&request_headers(&[CHAT, &[(name, value)]].concat(), false)).expect("sending headers");
        stream.send(&request_body(BODY, true)).expect("sending the body");
        let answer = stream.answer().await.expect("an answer").expect("a message");
        assert!(matches!(answer.response, Some(Response::RequestHeaders(_))), "{name}: {answer:?}");
        let bytes = answer.encode_to_vec();
        assert!(!bytes.windows(6).any(|window| window == b"x-evil"), "{name} comes back: {answer:?}");
    }
    picker.assert_settled().await;
}

/// Request ids appear in records that people read.
#[tokio::test(flavor = "multi_thread")]
async fn request_ids_are_sanitized_before_they_are_shown() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let long = vec![b'a'; 50_000];
    let cases: [(&[&[u8]], &str); 6] = [
        (&[], ""),
        (&[b"first", b"second"], "first"),
        (&["\u{1f600}id\u{1f600}".as_bytes()], "id"),
        (&[b"a b\r\nc\x1b[31m"], "abc[31m"),
        (&[b"\xff\xfe"], ""),
        (&[&long], &"a".repeat(128)),
    ];
    for (ids, _) in cases {
        let ids: Vec<Header<'_>> = ids.iter().map(|id| ("x-request-id", *id)).collect();
        let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
        stream.send(&request_headers(&[CHAT, &ids[..]].concat(), false)).expect("sending headers");
        stream.send(&request_body(BODY, true)).expect("sending the body");
        stream.answer().await.expect("an answer").expect("a message");
        drop(stream);
        // One after another, so that the records have the order of the cases.
        picker.assert_settled().await;
    }
    let page = crate::support::client::get(picker.metrics, "/decisions").await.expect("the decisions").json();
    let shown: Vec<&str> =
        page.as_array().into_iter().flatten().filter_map(|record| record["request_id"].as_str()).rev().collect();
    assert_eq!(shown, cases.map(|(_, shown)| shown));
}

/// With h2's default limit of resets, this alone would close the connection and every stream on it.
#[tokio::test(flavor = "multi_thread")]
async fn thousand_resets_do_not_affect_other_streams() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let (wild, calm) = (Connection::open(picker.grpc).await, Connection::open(picker.grpc).await);
    let (wild, calm) = (wild.expect("a connection"), calm.expect("a connection"));
    let mut open = wild.stream(PROCESS, &[]).await.expect("a stream");
    open.send(&request_headers(CHAT, false)).expect("sending headers");
    for _ in 0..1_000 {
        drop(wild.stream(PROCESS, &[]).await.expect("a stream"));
    }
    assert_served(&calm).await;
    assert_served(&wild).await;
    open.send(&request_body(BODY, true)).expect("sending the body");
    assert!(open.answer().await.expect("the stream that was open all the time").is_some());
    drop(open);
    picker.assert_settled().await;
}

/// A peer that never reads costs only its windows. The picker does not process its streams and serves those of others.
#[tokio::test(flavor = "multi_thread")]
async fn peer_without_window_does_not_affect_others() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let stuck = Connection::without_window(picker.grpc).await.expect("a connection");
    let mut waiting = Vec::new();
    for _ in 0..100 {
        let mut stream = stuck.stream(PROCESS, &[]).await.expect("a stream");
        stream.send(&request_headers(CHAT, false)).expect("sending headers");
        stream.send(&request_body(BODY, true)).expect("sending the body");
        waiting.push(stream);
        assert_served(&connection).await;
    }
    picker.until_metric("attache_streams_opened_total", 200.0).await;
    drop((waiting, stuck));
    picker.assert_settled().await;
}

/// Envoy's timeouts do not run while the picker holds a body, so the picker has its own.
#[tokio::test(flavor = "multi_thread")]
async fn idle_streams_are_ended() {
    let echo = Echo::start().await;
    let config = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nlimits: {{idleTimeout: 200ms, requestTimeout: 300ms}}\npools:\n\
         - name: default\n  endpoints: [\"{}\"]\n",
        echo.address
    );
    let picker = AttacheProcess::configured(&config).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let mut silent = connection.stream(PROCESS, &[]).await.expect("a stream");
    assert_eq!(silent.status().await.expect("a status"), "9", "opened, and nothing sent");
    let mut stopped = connection.stream(PROCESS, &[]).await.expect("a stream");
    stopped.send(&request_headers(CHAT, false)).expect("sending headers");
    stopped.send(&request_body(&BODY[..20], false)).expect("sending half a body");
    assert_eq!(reason(&refusal(&mut stopped).await), (408, "request_timeout".to_owned()));
    drop(stopped);
    assert_eq!(picker.metric("attache_limit_hits_total").await, 2.0);
    assert_served(&connection).await;
    picker.assert_settled().await;
}

/// One endpoint within the entries that are read, and one after them.
#[tokio::test(flavor = "multi_thread")]
async fn subset_hint_of_ten_thousand_entries_is_bounded() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let far: Vec<String> = (0..10_000).map(|n| format!("10.0.{}.{}:8000", n / 250, n % 250 + 1)).collect();
    let near = echo.address.to_string();
    for (hint, served) in [(format!("{near},{}", far.join(",")), true), (format!("{},{near}", far.join(",")), false)] {
        let value = Value { kind: Some(Kind::StringValue(hint)) };
        let fields = [("x-gateway-destination-endpoint-subset".to_owned(), value)].into();
        let metadata = Metadata {
            filter_metadata: [("envoy.lb.subset_hint".to_owned(), Struct { fields })].into(),
            ..Metadata::default()
        };
        let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
        let headers = ProcessingRequest { metadata_context: Some(metadata), ..request_headers(CHAT, false) };
        stream.send(&headers).expect("sending headers");
        stream.send(&request_body(BODY, true)).expect("sending the body");
        if served {
            let answer = stream.answer().await.expect("an answer").expect("a message");
            assert!(matches!(answer.response, Some(Response::RequestHeaders(_))), "{answer:?}");
        } else {
            assert_eq!(reason(&refusal(&mut stream).await), (503, "subset_empty".to_owned()));
        }
    }
    assert!(picker.metric("attache_subset_entries_malformed_total").await >= 2.0 * (10_000.0 - 4_096.0));
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn single_byte_messages_and_settings_floods_are_survived() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let mut flood = raw_connection(&picker).await;
    let settings = http2_frame(4, 0, 0, &[]).repeat(10_000);
    // The picker may also close this connection.
    let _ = flood.write_all(&settings).await;
    let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
    for message in [request_headers(CHAT, false), request_body(BODY, true)] {
        for byte in frame(0, &message.encode_to_vec()).chunks(1) {
            stream.send_raw(byte.to_vec()).expect("sending a byte");
        }
    }
    let answer = stream.answer().await.expect("an answer").expect("a message");
    assert!(matches!(answer.response, Some(Response::RequestHeaders(_))), "{answer:?}");
    assert_served(&connection).await;
    drop(stream);
    picker.assert_settled().await;
}

/// The port keeps within its share of file descriptors: open streams continue, and new connections replace silent ones.
#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_fd_limit_do_not_block_clients() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::with_open_files(64, &[echo.address]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let stream = connection.stream(PROCESS, &[]).await.expect("a stream");
    assert_served(&connection).await;
    let mut held = Vec::new();
    for _ in 0..100 {
        held.push(TcpStream::connect(picker.grpc).await.expect("a place in the kernel's queue"));
    }
    assert_served(&connection).await;
    let later = Connection::open(picker.grpc).await.expect("a connection");
    assert_served(&later).await;
    assert!(picker.metric("attache_listener_connections_closed_total").await > 50.0);
    assert!(!picker.process.stderr().contains("can't accept connections"));
    drop(stream);
    picker.assert_settled().await;
}

/// An endless header block: the connection is closed before it uses much memory.
#[tokio::test(flavor = "multi_thread")]
async fn continuation_flood_ends_only_its_own_connection() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let mut flood = raw_connection(&picker).await;
    flood.write_all(&http2_frame(1, 0, 1, b"\x83\x86")).await.expect("sending the first piece");
    let closed = tokio::time::timeout(Duration::from_secs(20), async {
        let (mut reader, mut writer) = flood.split();
        let mut got = [0; 4096];
        let piece = http2_frame(9, 0, 1, &[&b"\x00\x01x\x7f\x81\x7f"[..], &[b'a'; 256]].concat());
        let write = async { while writer.write_all(&piece).await.is_ok() {} };
        let read = async { while reader.read(&mut got).await.is_ok_and(|count| count > 0) {} };
        tokio::select! { () = write => {}, () = read => {} }
    });
    closed.await.expect("a connection that is closed");
    assert_served(&connection).await;
    picker.assert_settled().await;
}

/// Opens a connection and sends the preface and empty settings.
async fn raw_connection(picker: &AttacheProcess) -> TcpStream {
    let mut socket = TcpStream::connect(picker.grpc).await.expect("a connection");
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("sending the preface");
    socket.write_all(&http2_frame(4, 0, 0, &[])).await.expect("sending settings");
    socket
}

fn http2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short payload").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A request without `:path` whose stream is half-closed after the body, as NGINX Gateway Fabric sends it.
async fn half_closed(connection: &Connection) -> Stream {
    let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
    stream.send(&request_headers(&[("host", b"llm.test")], false)).expect("sending headers");
    stream.send(&request_body(BODY, true)).expect("sending the body");
    stream.half_close().expect("the end of the messages");
    stream
}

async fn assert_picked(stream: &mut Stream) {
    let head = stream.answer().await.expect("an answer").expect("a message");
    assert!(matches!(head.response, Some(Response::RequestHeaders(_))), "{head:?}");
    let body = stream.answer().await.expect("an answer").expect("a message");
    assert!(matches!(body.response, Some(Response::RequestBody(_))), "{body:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn queued_request_survives_half_close_but_not_reset() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  \
         endpoints: [{{address: \"{}\", engine: none}}]\n  flowControl: {{enabled: true, ttl: 60s, \
         detector: {{name: concurrency-detector, parameters: {{maxConcurrency: 1}}}}}}\n",
        echo.address
    ))
    .await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let queued = async |count: u32| picker.until_metric("attache_queued_requests", count.into()).await;
    // It takes the only slot and keeps it: its response has not started.
    let mut first = connection.stream(PROCESS, &[]).await.expect("a stream");
    first.send(&request_headers(CHAT, false)).expect("sending headers");
    first.send(&request_body(BODY, true)).expect("sending the body");
    assert_picked(&mut first).await;

    let mut waits = half_closed(&connection).await;
    queued(1).await;
    // Envoy resets streams of disconnected clients. Other gateways close their connection.
    let reset = half_closed(&connection).await;
    queued(2).await;
    drop(reset);
    queued(1).await;
    let other = Connection::open(picker.grpc).await.expect("a connection");
    let cut = half_closed(&other).await;
    queued(2).await;
    drop(other);
    queued(1).await;
    drop(cut);

    drop(first);
    assert_picked(&mut waits).await;
    assert_eq!(waits.status().await.expect("a status"), "0");
    queued(0).await;
    // The queue is empty, so this request is picked at once.
    let mut last = half_closed(&connection).await;
    assert_picked(&mut last).await;
    assert_eq!(last.status().await.expect("a status"), "0");
    let decisions = crate::support::client::get(picker.metrics, "/decisions").await.expect("the decisions").json();
    let text = decisions.to_string();
    assert!(text.contains("chat_completions") && text.contains("sim-8b"), "{text}");
    assert_eq!(text.matches("\"unwatched\"").count(), 2, "{text}");
    picker.assert_settled().await;
}
