//! Bodies in DATA frames of one byte. Envoy sends each to the picker as a message, on the connection that all requests
//! of a worker share.

use super::honest::{Honest, InFlight};
use crate::shipped::by_header;
use crate::support::Error;
use crate::support::attache::AttacheProcess;
use crate::support::body::{chat, sha256};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{Mode, bootstrap};
use bytes::Bytes;
use http::{Request, StatusCode};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpStream;

/// Honest requests in flight during the attack.
const IN_FLIGHT: usize = 20;
/// More frames than the picker's HTTP/2 library buffers by default.
const PICKER_LIMIT: usize = 2_300;
/// More frames than Envoy queues for one connection by default.
const ENVOY_LIMIT: usize = 12_000;

/// An HTTP/2 client that splits bodies into tiny DATA frames.
struct Cutter {
    /// Bytes per frame.
    piece: usize,
    /// Frames per stream.
    frames: usize,
    /// Streams of the connection. Their frames alternate.
    streams: usize,
}

impl Cutter {
    fn new(frames: usize) -> Self {
        Self { piece: 1, frames, streams: 1 }
    }

    /// Sends the requests on one connection. Returns the status of each response and the SHA-256 of the body that the
    /// server received.
    async fn send(&self, to: SocketAddr, target: &str) -> Result<Vec<(StatusCode, String)>, Error> {
        let socket = TcpStream::connect(to).await?;
        // The attacker accepts any number of small frames itself.
        let mut http = h2::client::Builder::new();
        http.data_frame_budget(usize::MAX);
        let (client, connection) = http.handshake(socket).await?;
        let driver = tokio::spawn(connection);
        let mut client = client.ready().await?;
        let body = self.body();
        let (mut responses, mut uploads) = (Vec::new(), Vec::new());
        for _ in 0..self.streams {
            let request = Request::builder().method("POST").uri(format!("http://{to}{target}"));
            let request = request.header("content-type", "application/json").body(())?;
            let (response, upload) = client.send_request(request, false)?;
            responses.push(response);
            uploads.push(upload);
        }
        for (at, piece) in body.chunks(self.piece).enumerate() {
            for upload in &mut uploads {
                upload.send_data(Bytes::copy_from_slice(piece), at + 1 == self.frames)?;
            }
        }
        let mut all = Vec::new();
        for response in responses {
            let response = tokio::time::timeout(Duration::from_secs(60), response).await??;
            let received = response.headers().get("x-echo-sha256").and_then(|v| v.to_str().ok()).unwrap_or("");
            all.push((response.status(), received.to_owned()));
            let mut body = response.into_body();
            while let Some(data) = body.data().await {
                body.flow_control().release_capacity(data?.len())?;
            }
        }
        driver.abort();
        Ok(all)
    }

    fn body(&self) -> Bytes {
        chat(self.piece * self.frames, false, 3)
    }

    /// Runs the attack with concurrent honest requests on one Envoy worker, and checks that it harms none of them.
    async fn assert_harmless(&self, envoy: &EnvoyProcess, picker: &AttacheProcess, listener: &str, target: &str) {
        let to = envoy.listener(listener);
        let honest = Honest::new(to);
        let quiet = honest.quiet().await;
        let waiting = InFlight::start(to, picker, IN_FLIGHT).await;
        let (report, replies) = honest.during(self.send(to, target)).await;
        let replies = replies.expect("responses to the attack");
        waiting.assert_complete().await;
        for (status, received) in replies {
            assert_eq!((status.as_u16(), received), (200, sha256(&self.body())));
        }
        report.assert_unharmed(&quiet);
        picker.assert_settled().await;
    }
}

/// A picker and its server.
async fn served() -> (Echo, AttacheProcess) {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    (echo, picker)
}

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn single_byte_frames_harm_no_request_in_flight() {
    let (_echo, picker) = served().await;
    let envoy = EnvoyProcess::alone_with_workers(&by_header("original-dst.yaml", &picker), 1).await;
    for frames in [PICKER_LIMIT, ENVOY_LIMIT] {
        Cutter::new(frames).assert_harmless(&envoy, &picker, "inference", CHAT).await;
    }
}

/// Some gateways can't set `max_outbound_frames`: Envoy's default is 10,000.
#[tokio::test(flavor = "multi_thread")]
async fn gateway_with_default_frame_limit_keeps_requests_in_flight() {
    let (_echo, picker) = served().await;
    let shipped = by_header("original-dst.yaml", &picker);
    let limit = "max_outbound_frames: 1000000";
    assert!(shipped.contains(limit));
    let bootstrap = shipped.replace(limit, "max_outbound_frames: 10000");
    let envoy = EnvoyProcess::alone_with_workers(&bootstrap, 1).await;
    Cutter::new(PICKER_LIMIT).assert_harmless(&envoy, &picker, "inference", CHAT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn single_byte_frames_of_many_streams_harm_no_request_in_flight() {
    let (_echo, picker) = served().await;
    let envoy = EnvoyProcess::alone_with_workers(&by_header("original-dst.yaml", &picker), 1).await;
    let attack = Cutter { piece: 1, frames: 150, streams: 60 };
    attack.assert_harmless(&envoy, &picker, "inference", CHAT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn single_byte_frames_in_other_body_modes_harm_no_request_in_flight() {
    let (_echo, picker) = served().await;
    let modes = [Mode::Buffered, Mode::StreamedNoWait, Mode::Streamed];
    // HTTP/1.1 servers: Envoy forwards the tiny chunks of STREAMED bodies to the server unchanged.
    let bootstrap = bootstrap(&modes, picker.grpc).replace("use_downstream_protocol_config", "explicit_http_config");
    let bootstrap = bootstrap.replace("          http2_protocol_options: {}\n", "");
    let envoy = EnvoyProcess::alone_with_workers(&bootstrap, 1).await;
    for mode in modes {
        Cutter::new(ENVOY_LIMIT / 2).assert_harmless(&envoy, &picker, &mode.name(), CHAT).await;
    }
}

/// Frames of 255 bytes are the largest that count as small.
#[tokio::test(flavor = "multi_thread")]
async fn responses_in_tiny_frames_harm_no_request_in_flight() {
    let (_echo, picker) = served().await;
    let envoy = EnvoyProcess::alone_with_workers(&bootstrap(&[Mode::FullDuplex], picker.grpc), 1).await;
    for (piece, size) in [(1, PICKER_LIMIT), (255, 255 * PICKER_LIMIT)] {
        let target = format!("{CHAT}?size={size}&piece={piece}");
        let attack = Cutter { piece: 255, frames: 8, streams: 1 };
        attack.assert_harmless(&envoy, &picker, &Mode::FullDuplex.name(), &target).await;
    }
}
