//! Messages of others in the same NATS, and a NATS server that wants a password.

use super::*;
use crate::support::body::Random;
use crate::support::process::scratch;

/// The number of a field of `attache.sync.v1`, and its value as protobuf encodes it: a length-delimited one, a fixed64
/// or a varint.
pub(crate) fn field(number: u8, wire_type: u8, value: &[u8]) -> Vec<u8> {
    [&[number << 3 | wire_type], value].concat()
}

pub(crate) fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A message of version 1 with this body: field number and content.
pub(crate) fn message(sender: u64, body: u8, content: &[u8]) -> Vec<u8> {
    let body = field(body, 2, &[varint(content.len() as u64), content.to_vec()].concat());
    [field(1, 0, &varint(1)), field(2, 1, &sender.to_le_bytes()), body].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_messages_are_counted_and_requests_are_served() {
    let directory = scratch("nats-config");
    let large = directory.path().join("nats.conf");
    std::fs::write(&large, "max_payload: 8MB\n").expect("a file");
    let nats = NatsProcess::with_arguments(&["--config", &large.display().to_string()]).await;
    let echo = Echo::start().await;
    let pair = Pair::start(&pool("{name: least-request}", &[echo.address]), &nats.url()).await;
    pair.until_peers().await;
    let sender = attache_sync::sender_of("stranger", 0xaa);
    let stranger = format!("attache.sync.v2.all.stranger.{sender:016x}");
    let stranger = stranger.as_str();
    let other = format!("attache.sync.v2.all.other.{sender:016x}");
    let mut random = Random::new(7);
    let noise: Vec<u8> = (0..4096).map(|_| random.below(256) as u8).collect();
    // Bytes that are no message; a sender that the subject does not name; one of another name; a subject without a
    // sender; too large.
    let invalid: [(&str, Vec<u8>); 7] = [
        (stranger, noise),
        (stranger, Vec::new()),
        (stranger, b"{\"version\": 1}".to_vec()),
        (stranger, message(0xbb, 5, &[])),
        (&other, message(sender, 5, &[])),
        ("attache.sync.v2.all.stranger.unknown", message(sender, 5, &[])),
        (stranger, message(sender, 5, &field(1, 2, &[varint(1 << 20), vec![b'x'; 1 << 20]].concat()))),
    ];
    for (subject, bytes) in &invalid {
        nats.publish(subject, bytes).await;
    }
    for picker in &pair.pickers {
        picker.until_metric("attache_sync_invalid_messages_total", invalid.len() as f64).await;
        assert_eq!(peers(picker).await.len(), 1, "a sender of invalid messages is no peer");
    }
    // Valid messages with senseless numbers: a column at the last number, a batch and a heartbeat with it.
    let largest = varint(u64::MAX);
    let column = [field(1, 0, &largest), field(3, 0, &varint(1))].concat();
    let heartbeat = [field(1, 2, b"\x08stranger"), field(2, 0, &largest)].concat();
    for (body, content) in [(7, column), (4, field(1, 0, &largest)), (5, heartbeat)] {
        nats.publish(stranger, &message(sender, body, &content)).await;
    }
    for picker in &pair.pickers {
        eventually("the stranger's name", async || {
            peers(picker).await.iter().any(|peer| peer["name"] == "stranger").then_some(())
        })
        .await;
    }
    let held = open(pair.to[0], LONG_SSE).await;
    pair.until_both(&[1]).await;
    for to in pair.to {
        assert_served(to).await;
    }
    drop(held);
    pair.until_both(&[0]).await;
    pair.assert_settled().await;
}

const PASSWORD: &str = "s3cret/of@picker";

async fn with_password() -> NatsProcess {
    NatsProcess::with_arguments(&["--user", "picker", "--pass", PASSWORD]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn user_and_password_of_the_url_are_used() {
    let (nats, echo) = (with_password().await, Echo::start().await);
    let url = nats.url_for("picker", "s3cret%2Fof%40picker");
    let pair = Pair::start(&pool("{name: least-request}", &[echo.address]), &url).await;
    pair.until_peers().await;
    let held = open(pair.to[0], LONG_SSE).await;
    pair.until_both(&[1]).await;
    assert_served(pair.to[1]).await;
    drop(held);
    pair.until_both(&[0]).await;
    pair.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_nats_password_is_logged_without_the_password() {
    let (nats, echo) = (with_password().await, Echo::start().await);
    let url = nats.url_for("picker", "another-s3cret");
    let config = pool("{name: least-request}", &[echo.address]);
    let arguments = ["--config-text", &config, "--sync-nats-url", &url, "--log-level", "debug,async_nats=debug"];
    let picker = AttacheProcess::with_arguments(&arguments.map(str::to_owned)).await;
    let line = eventually("a line about it", async || {
        lines_about_nats(&picker.process).into_iter().find(|line| line.contains("NATS can't be used"))
    })
    .await;
    assert!(line.contains("WARN") && line.contains("authorization violation"), "{line}");
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    for _ in 0..10 {
        assert_served(envoy.listener("inference")).await;
    }
    assert_eq!(picker.metric("attache_sync_connected").await, 0.0);
    let metrics = client::get(picker.metrics, "/metrics").await.expect("metrics").body;
    for text in [picker.process.stderr(), picker.process.stdout(), String::from_utf8_lossy(&metrics).into_owned()] {
        assert!(!text.contains("another-s3cret"), "{text}");
    }
    picker.assert_settled().await;
}
