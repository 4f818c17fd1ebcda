//! Pods that reach the picker's ports: endless bodies, idle connections, foreign host names, and KV events for other
//! servers.
//!
//! Attackers connect from 127.0.0.6, the address from which Istio's sidecar forwards requests of other machines.

use super::honest::Honest;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, memory};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

const STRANGER: [u8; 4] = [127, 0, 0, 6];
const LOCAL: [u8; 4] = [127, 0, 0, 1];
/// A slower probe has failed: Kubernetes allows 1 s.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// An HTTP/2 client's preface and empty settings.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

async fn connect(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((from, 0).into()).expect("an address of the loopback");
    socket.connect(to).await.expect("a connection")
}

/// A connection that has sent `bytes`, unless the picker closed it earlier.
async fn sent(from: [u8; 4], to: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = connect(from, to).await;
    let _ = stream.write_all(bytes).await;
    stream
}

/// The status of the response.
async fn status(stream: &mut TcpStream) -> u16 {
    let mut line = [0; 12];
    stream.read_exact(&mut line).await.expect("a status line");
    String::from_utf8_lossy(&line[9..]).parse().expect("a status")
}

/// The status of the response to a request with these headers.
async fn ask(from: [u8; 4], to: SocketAddr, request: &str, headers: &str) -> u16 {
    let head = format!("{request} HTTP/1.1\r\n{headers}content-length: 0\r\nconnection: close\r\n\r\n");
    status(&mut sent(from, to, head.as_bytes()).await).await
}

/// Checks that probes and Prometheus scrapes from another machine get a response in time.
async fn assert_probes_answered(picker: &AttacheProcess) {
    for page in ["GET /live", "GET /ready", "GET /metrics"] {
        let host = "host: 10.0.0.7:9090\r\n";
        let answered = tokio::time::timeout(PROBE_TIMEOUT, ask([127, 0, 0, 9], picker.metrics, page, host)).await;
        assert_eq!(answered.ok(), Some(200), "{page}");
    }
}

/// Resident memory of the picker's process, bytes.
fn resident(picker: &AttacheProcess) -> u64 {
    memory(picker.process.id(), "VmRSS")
}

fn open_files(picker: &AttacheProcess) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", picker.process.id())).expect("a running picker").count()
}

/// Sends up to `bytes` zeros, until the picker closes the connection.
async fn flood(stream: &mut TcpStream, bytes: usize) {
    let chunk = vec![b'0'; 64 << 10];
    for _ in 0..bytes / chunk.len() {
        if stream.write_all(&chunk).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_explain_bodies_do_not_exhaust_memory_or_block_probes() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let before = resident(&picker);
    let attack = async {
        // Requests from other machines are rejected by their headers.
        for (target, framing) in [
            ("/explain", "content-length: 60000000"),
            ("/explain", "transfer-encoding: chunked"),
            ("/api/nodes/scheduling", "content-length: 60000000"),
        ] {
            let head = format!("POST {target} HTTP/1.1\r\nhost: 10.0.0.7\r\n{framing}\r\n\r\n");
            let mut stream = sent(STRANGER, picker.metrics, head.as_bytes()).await;
            assert_eq!(status(&mut stream).await, 403, "{target} {framing}");
        }
        let mut floods = tokio::task::JoinSet::new();
        for _ in 0..24 {
            let to = picker.metrics;
            floods.spawn(async move {
                let head = b"POST /explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000000\r\n\r\n";
                flood(&mut sent(STRANGER, to, head).await, 32 << 20).await;
            });
        }
        floods.join_all().await;
        let grown = resident(&picker).saturating_sub(before);
        assert!(grown < 32 << 20, "{} MiB more", grown >> 20);
        // Incomplete requests of local processes.
        let mut held = Vec::new();
        for bytes in [
            "POST /explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000\r\n\r\n{",
            "POST /explain HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n",
            "PUT /api/nodes/scheduling HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{",
            "GET /metrics HTTP/1.1\r\nhost: localhost\r\n",
            "",
        ] {
            for _ in 0..64 {
                held.push(sent(LOCAL, picker.metrics, bytes.as_bytes()).await);
            }
            assert_probes_answered(&picker).await;
        }
    };
    let (report, ()) = honest.during(attack).await;
    report.assert_unharmed(&quiet);
    assert!(picker.metric("attache_admin_requests_refused_total").await >= 4.0);
    picker.assert_settled().await;
}

/// Endpoints of the pools in this test: with as many, a page takes a tenth of a second or more.
const MANY: u16 = 1_500;

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_many_endpoints_do_not_delay_probes_or_health_checks() {
    let echo = Echo::start().await;
    let address = |i: u16| format!("{{address: '127.1.{}.{}:8000', engine: none}}", i / 250, i % 250 + 1);
    let many: Vec<String> = (0..MANY).map(address).collect();
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- {{name: default, endpoints: ['{}']}}\n\
         - {{name: many, match: {{models: [other]}}, endpoints: [{}]}}\n",
        echo.address,
        many.join(", ")
    ))
    .await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", picker.health)).expect("an address");
    let health = HealthClient::new(channel.connect().await.expect("the health port"));
    let attack = async {
        for (from, page) in [(STRANGER, "GET /metrics"), (LOCAL, "GET /endpoints"), (LOCAL, "GET /config_dump")] {
            // As many as the port allows, without the connections of probes. None of them is read.
            let head = format!("{page} HTTP/1.1\r\nhost: localhost\r\n\r\n").repeat(8);
            let mut held = Vec::new();
            for _ in 0..48 {
                held.push(sent(from, picker.metrics, head.as_bytes()).await);
            }
            for _ in 0..20 {
                let live = ask([127, 0, 0, 9], picker.metrics, "GET /live", "host: 10.0.0.7:9090\r\n");
                assert_eq!(tokio::time::timeout(PROBE_TIMEOUT, live).await.ok(), Some(200), "/live during {page}");
                let mut health = health.clone();
                let check = health.check(HealthCheckRequest { service: String::new() });
                let checked = tokio::time::timeout(PROBE_TIMEOUT, check).await;
                let serving = checked.is_ok_and(|response| response.is_ok());
                assert!(serving, "a health check during {page}");
            }
        }
    };
    let (report, ()) = honest.during(attack).await;
    report.assert_unharmed(&quiet);
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_leave_file_descriptors_for_a_new_gateway() {
    const DESCRIPTORS: u32 = 256;
    let echo = Echo::start().await;
    let picker = AttacheProcess::with_open_files(DESCRIPTORS, &[echo.address]).await;
    let bootstrap = by_header("original-dst.yaml", &picker);
    let envoy = EnvoyProcess::alone(&bootstrap).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let attack = async {
        let mut held = Vec::new();
        let silent: &[u8] = b"";
        for (from, to, bytes) in [
            (STRANGER, picker.health, silent),
            (STRANGER, picker.health, HTTP2),
            (LOCAL, picker.health, b"PRI * HT"),
            (STRANGER, picker.metrics, silent),
            (LOCAL, picker.metrics, b"GET /metrics HTTP/1.1\r\n"),
            (STRANGER, picker.grpc, silent),
            (STRANGER, picker.grpc, HTTP2),
            (STRANGER, picker.grpc, b"PRI * HT"),
            (LOCAL, picker.grpc, silent),
        ] {
            for _ in 0..100 {
                held.push(sent(from, to, bytes).await);
            }
            let files = open_files(&picker);
            assert!(files < DESCRIPTORS as usize * 7 / 8, "{files} open files");
            assert_probes_answered(&picker).await;
        }
        held
    };
    let (report, held) = honest.during(attack).await;
    report.assert_unharmed(&quiet);
    let restarted = envoy.beside(&bootstrap).await;
    Honest::new(restarted.listener("inference")).quiet().await;
    drop(held);
    assert!(picker.metric("attache_listener_connections_closed_total").await > 100.0);
    assert!(!picker.process.stderr().contains("can't accept connections"));
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_are_closed_and_honest_ones_stay() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let attack = async {
        let mut silent = Vec::new();
        for to in [picker.grpc, picker.health, picker.metrics] {
            for bytes in [&b""[..], b"P", &HTTP2[..23]] {
                silent.push((to, sent(STRANGER, to, bytes).await));
            }
        }
        for (to, mut stream) in silent {
            let ended = tokio::time::timeout(Duration::from_secs(40), stream.read_to_end(&mut Vec::new())).await;
            assert!(ended.is_ok(), "a silent connection to {to} stays open");
        }
    };
    let (report, ()) = honest.during(attack).await;
    report.assert_unharmed(&quiet);
    assert!(picker.metric("attache_listener_connections_closed_total").await >= 6.0);
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_pages_are_denied_to_other_machines_and_host_names() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &["--admin-hosts", "Attache.LLM.svc"]).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let attack = async {
        let change = "PUT /log-level?filter=trace";
        for request in ["GET /config_dump", "GET /decisions", "GET /endpoints", "GET /", "GET /log-level", change] {
            let mut statuses = Vec::new();
            for (from, headers) in [
                (STRANGER, "host: localhost:9090\r\n"),
                (LOCAL, "host: rebound.example:9090\r\n"),
                (LOCAL, "host: localhost:9090\r\norigin: http://rebound.example\r\n"),
                (LOCAL, "host: localhost:9090\r\nsec-fetch-site: cross-site\r\n"),
                (LOCAL, "host: localhost:9090\r\nhost: rebound.example\r\n"),
            ] {
                statuses.push(ask(from, picker.metrics, request, headers).await);
            }
            assert_eq!(statuses, [403, 421, 403, 403, 421], "{request}");
        }
        let absolute = "PUT http://rebound.example/log-level?filter=trace";
        assert_eq!(ask(LOCAL, picker.metrics, absolute, "host: localhost\r\n").await, 421);
    };
    let (report, ()) = honest.during(attack).await;
    report.assert_unharmed(&quiet);
    for host in ["localhost:19090", "127.0.0.1", "[::1]:9090", "attache.llm.SVC:9090"] {
        let host = format!("host: {host}\r\n");
        assert_eq!(ask(LOCAL, picker.metrics, "GET /config_dump", &host).await, 200, "{host}");
        assert_eq!(ask(LOCAL, picker.metrics, "PUT /log-level?filter=info", &host).await, 200, "{host}");
    }
    assert_probes_answered(&picker).await;
    picker.assert_settled().await;
}

/// The handshake of a ZMTP 3.1 publisher.
fn zmtp_handshake() -> Vec<u8> {
    let mut bytes = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01NULL".to_vec();
    bytes.resize(64, 0);
    bytes.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    bytes
}

/// An empty event batch for the endpoint `pod`.
fn kv_event_frame(pod: SocketAddr) -> Vec<u8> {
    let topic = format!("kv@{pod}@model");
    let length = u8::try_from(topic.len()).expect("a short topic");
    let batch: &[u8] = b"\0\x0c\x93\xcb\0\0\0\0\0\0\0\0\x90\0";
    [&[1, length], topic.as_bytes(), &[1, 8, 0, 0, 0, 0, 0, 0, 0, 0], batch].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_events_from_other_addresses_are_dropped_within_memory_bounds() {
    let echo = Echo::start().await;
    let central = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = central.local_addr().expect("its address");
    drop(central);
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  endpoints: ['{}']\n  \
         prefixCache: {{kvEvents: {{bind: 'tcp://{address}', topic: 'kv@'}}}}\n",
        echo.address
    ))
    .await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let before = resident(&picker);
    let forged = [zmtp_handshake(), kv_event_frame(echo.address)].concat();
    let attack = async {
        // One long frame, and messages whose last frame is missing. The connections follow one another, as honest
        // clients share the CPUs with the attacker.
        let long = [&[2, 0, 0, 0, 0, 0, 0xf0, 0, 0][..], &vec![0; 8 << 20]].concat();
        let parts = [&[3, 0, 0, 0, 0, 0, 0x20, 0, 0][..], &vec![0; 2 << 20]].concat().repeat(4);
        let mut held = Vec::new();
        for (from, message) in [(STRANGER, &long), (LOCAL, &long), (STRANGER, &parts), (LOCAL, &parts)] {
            for _ in 0..10 {
                let mut stream = sent(from, address, &zmtp_handshake()).await;
                for chunk in message.chunks(64 << 10) {
                    tokio::time::sleep(Duration::from_micros(100)).await;
                    // The picker may have closed the connection.
                    let _ = stream.write_all(chunk).await;
                }
                held.push(stream);
            }
        }
        let grown = resident(&picker).saturating_sub(before);
        assert!(grown < 160 << 20, "{} MiB more for {} connections", grown >> 20, held.len());
        let _stranger = sent(STRANGER, address, &forged).await;
        picker.until_metric("attache_kv_event_wrong_senders_total", 1.0).await;
        assert_eq!(picker.metric("attache_kv_event_frames_total").await, 0.0);
    };
    let (report, ()) = honest.during(attack).await;
    report.assert_unharmed(&quiet);
    let _server = sent(LOCAL, address, &forged).await;
    picker.until_metric("attache_kv_event_frames_total", 1.0).await;
    eventually("a warning that names the sender", || async {
        let log = picker.process.stderr();
        let mut lines = log.lines().filter(|line| line.contains("requireSenderAddress"));
        lines.next().filter(|line| line.contains("127.0.0.6")).map(|_| ())
    })
    .await;
    picker.assert_settled().await;
}
