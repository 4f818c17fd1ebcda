//! Pods that open HTTP/2 streams to the picker and leave them open, and gateways that need many.

use super::honest::{Honest, InFlight};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::grpc::{Connection, PROCESS, Stream, request_headers};
use crate::support::process::memory;
use std::net::SocketAddr;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

/// A pod's address.
const STRANGER: [u8; 4] = [127, 0, 0, 6];
/// Connections of an attack.
const CONNECTIONS: u32 = 4;
/// Streams on each of them, within the limit of a connection.
const STREAMS: u32 = 1_500;
/// Memory that the streams of an attack may take, bytes. At most 4,096 are open, and those that one read has opened.
const MOST_MEMORY: u64 = 48 << 20;

async fn connect(to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((STRANGER, 0).into()).expect("an address of the loopback");
    socket.connect(to).await.expect("a connection")
}

/// A HEADERS frame that opens stream number `number` to `path` and does not end it.
fn opening(number: u32, path: &str) -> Vec<u8> {
    // HPACK: POST, http, then path and authority as new entries of the dynamic table, or by their positions there.
    let block = match number {
        0 => {
            let literal = |name: u8, text: &str| {
                [&[0x40 | name, u8::try_from(text.len()).expect("a short text")], text.as_bytes()].concat()
            };
            [vec![0x83, 0x86], literal(4, path), literal(1, "picker")].concat()
        }
        _ => vec![0x83, 0x86, 0x80 | 63, 0x80 | 62],
    };
    let length = u8::try_from(block.len()).expect("a short block");
    [&[0, 0, length, 1, 4], &(2 * number + 1).to_be_bytes()[..], &block].concat()
}

/// Opens streams on many connections and sends nothing on them. The picker may close connections meanwhile.
async fn open_silent(to: SocketAddr, path: &str) -> Vec<TcpStream> {
    let mut all = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut connection = connect(to).await;
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        (0..STREAMS).for_each(|number| bytes.extend(opening(number, path)));
        let _ = connection.write_all(&bytes).await;
        all.push(connection);
    }
    all
}

fn resident(picker: &AttacheProcess) -> u64 {
    memory(picker.process.id(), "VmRSS")
}

/// The attack with streams to `path`.
async fn assert_silent_streams_are_bounded(path: &str) {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let before = resident(&picker);
    let attack = async {
        let held = open_silent(picker.grpc, path).await;
        let closed = "attache_listener_connections_closed_total{listener=\"ext-proc\",reason=\"streams\"}";
        crate::support::process::eventually("connections closed", || async {
            (picker.metric(closed).await >= 1.0).then_some(())
        })
        .await;
        // Beside the limit, those of connections that are about to close.
        crate::support::process::eventually("streams within their limit", || async {
            let open = picker.metric("attache_listener_streams{listener=\"ext-proc\"}").await;
            (open <= 4_096.0 + 1_000.0).then_some(())
        })
        .await;
        let grown = resident(&picker).saturating_sub(before);
        assert!(grown < MOST_MEMORY, "{} MiB more for {} streams", grown >> 20, CONNECTIONS * STREAMS);
        held
    };
    let (report, held) = honest.during(attack).await;
    report.assert_unharmed(&quiet);
    drop(held);
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_without_a_message_are_bounded_in_number_and_memory() {
    assert_silent_streams_are_bounded(PROCESS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_watches_on_the_gateway_port_are_bounded_like_silent_streams() {
    assert_silent_streams_are_bounded("/grpc.health.v1.Health/Watch").await;
}

/// Streams with a message count until they end, and one address gets three quarters of them.
#[tokio::test(flavor = "multi_thread")]
async fn streams_of_one_pod_leave_a_quarter_for_gateways() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nlimits: {{maxStreams: 400}}\n\
         pools: [{{name: default, endpoints: ['{}']}}]\n",
        echo.address
    ))
    .await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let attack = async {
        let connection = Connection::over(connect(picker.grpc).await, &h2::client::Builder::new()).await;
        let connection = connection.expect("a connection");
        let (mut held, mut refused): (Vec<Stream>, u32) = (Vec::new(), 0);
        for _ in 0..500 {
            let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
            let head = request_headers(&[(":path", b"/v1/models"), (":method", b"GET")], true);
            // A refused stream may be closed already.
            let _ = stream.send(&head);
            // Streams without a message would close the connection, so one is answered before the next is opened.
            refused += u32::from(!matches!(stream.answer().await, Ok(Some(_))));
            held.push(stream);
        }
        assert_eq!(refused, 200);
        assert_eq!(picker.metric("attache_limit_hits_total{limit=\"streams\"}").await, 200.0);
        (connection, held)
    };
    let (report, held) = honest.during(attack).await;
    report.assert_unharmed(&quiet);
    drop(held);
    picker.assert_settled().await;
}

/// A gateway with more requests than a connection may have streams opens further connections. Envoy assumes its own
/// limit until it has received Attaché's, so its own must not be higher.
#[tokio::test(flavor = "multi_thread")]
async fn gateway_beyond_the_streams_of_a_connection_loses_no_request() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nlimits: {{maxStreamsPerConnection: 8}}\n\
         pools: [{{name: default, endpoints: ['{}']}}]\n",
        echo.address
    ))
    .await;
    let (shipped, own) = (by_header("original-dst.yaml", &picker), "            max_concurrent_streams: ");
    assert_eq!(shipped.matches(&format!("{own}1024\n")).count(), 1);
    let envoy = EnvoyProcess::alone(&shipped.replace(&format!("{own}1024\n"), &format!("{own}8\n"))).await;
    InFlight::start(envoy.listener("inference"), &picker, 40).await.assert_complete().await;
    assert!(picker.metric("attache_listener_connections{listener=\"ext-proc\"}").await >= 5.0);
    picker.assert_settled().await;
}

/// No shipped configuration lets Envoy open more streams on a connection than Attaché allows.
#[test]
fn shipped_gateways_open_fewer_streams_on_a_connection_than_allowed() {
    let allowed = attache_types::limits::Limits::default().max_streams_per_connection;
    for file in ["original-dst.yaml", "buffered.yaml", "override-host.yaml", "fail-open.yaml"] {
        let path = crate::support::process::repository().join("envoy").join(file);
        let text = std::fs::read_to_string(&path).expect("a shipped file");
        let numbers = text.split("max_concurrent_streams: ").skip(1).filter_map(|rest| {
            rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse::<u32>().ok())
        });
        let numbers: Vec<u32> = numbers.collect();
        assert!(numbers.len() >= 2 && numbers.iter().all(|number| *number <= allowed), "{file}: {numbers:?}");
    }
}
