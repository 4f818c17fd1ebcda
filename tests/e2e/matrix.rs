//! Envoy and the picker forward bodies byte for byte: every body mode × size × framing × response kind × HTTP version.

use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat, completion, cut, events, sha256};
use crate::support::client::{self, Http};
use crate::support::echo::{Echo, RESPONSE_SEED};
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{Mode, bootstrap};
use crate::support::noop;
use bytes::Bytes;
use futures_util::StreamExt;
use std::net::SocketAddr;

/// 300 bytes is a short chat. 64 KiB is the size of Envoy's chunks, HTTP/2 windows and the picker's own chunks.
const SIZES: [usize; 8] = [0, 1, 300, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 1 << 20, 10 << 20];

/// Concurrent requests.
pub(crate) const CONCURRENCY: usize = 8;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    mode: Mode,
    size: usize,
    chunked: bool,
    sse: bool,
    http: Http,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for mode in Mode::ALL {
        for size in SIZES.into_iter().filter(|size| *size <= mode.largest_body()) {
            for chunked in [false, true] {
                for sse in [false, true] {
                    cases.extend([Http::H1, Http::H2].map(|http| Case { mode, size, chunked, sse, http }));
                }
            }
        }
    }
    cases
}

/// All cases of one mode, for a picker that is no ext-proc service.
pub(crate) fn inside_cases() -> Vec<Case> {
    cases().into_iter().filter(|case| case.mode == Mode::FullDuplex).collect()
}

/// About 200 events, of 300 bytes to 48 KiB each.
fn event_count(size: usize) -> usize {
    (size / (size / 200).clamp(300, 48 << 10)).max(1)
}

impl Case {
    /// Bodies too short for a chat request go to a path that the picker does not know and must forward unread.
    fn target(&self) -> String {
        let path = if self.size < 100 { "/echo" } else { "/v1/chat/completions" };
        let kind = if self.sse { "sse" } else { "json" };
        let chunked = u8::from(self.chunked);
        let events = event_count(self.size);
        format!("{path}?kind={kind}&size={}&chunked={chunked}&events={events}", self.size)
    }

    fn request_body(&self) -> Bytes {
        chat(self.size, self.sse, 1)
    }

    fn response_body(&self) -> Bytes {
        if !self.sse {
            return completion(self.size, RESPONSE_SEED);
        }
        Vec::from(events(self.size, event_count(self.size), RESPONSE_SEED)).concat().into()
    }

    /// Sends the request and checks the response.
    pub(crate) async fn run(self, to: SocketAddr) -> Result<(), String> {
        let body = self.request_body();
        let payload = if self.chunked {
            Payload::chunked(cut(body.clone(), 32 << 10, self.size as u64))
        } else {
            Payload::sized(body.clone())
        };
        let request = client::request("POST", to, self.http, &self.target(), payload);
        let reply = client::send(to, self.http, request).await.map_err(|error| format!("{self:?}: {error}"))?;
        let expected = self.response_body();
        let differences = [
            (reply.status.as_str().to_owned(), "200".to_owned(), "status"),
            (reply.header("x-echo-length").to_owned(), body.len().to_string(), "request length"),
            (reply.header("x-echo-sha256").to_owned(), sha256(&body), "request digest"),
            (reply.body.len().to_string(), expected.len().to_string(), "response length"),
            (reply.sha256, sha256(&expected), "response digest"),
        ];
        match differences.iter().find(|(got, wanted, _)| got != wanted) {
            Some((got, wanted, what)) => Err(format!("{self:?}: {what}: got {got:?}, expected {wanted:?}")),
            None => Ok(()),
        }
    }
}

async fn run_all(picker: SocketAddr) {
    let envoy = EnvoyProcess::start(&bootstrap(&Mode::ALL, picker)).await;
    let cases = cases();
    let count = cases.len();
    let wrong: Vec<String> = futures_util::stream::iter(cases)
        .map(|case| {
            let to = envoy.listener(&case.mode.name());
            async move { tokio::spawn(case.run(to)).await.expect("a case that does not panic") }
        })
        .buffer_unordered(CONCURRENCY)
        .filter_map(|result| async { result.err() })
        .collect()
        .await;
    assert!(wrong.is_empty(), "{} of {count} wrong:\n{}", wrong.len(), wrong.join("\n"));
    envoy.assert_picker_was_correct().await;
}

/// The control: failures here are not caused by the picker.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_are_unchanged_with_a_no_op_picker() {
    let echo = Echo::start().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let picker = listener.local_addr().expect("an address");
    let server = tokio::spawn(noop::serve(listener, echo.address));
    run_all(picker).await;
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_are_unchanged_with_attache() {
    let (a, b) = (Echo::start().await, Echo::start().await);
    let picker = AttacheProcess::start(&[a.address, b.address], &["--strategy", "least-request"]).await;
    run_all(picker.grpc).await;
    let books = picker.assert_settled().await;
    assert!(a.requests() > 0 && b.requests() > 0, "both servers get requests: {books:?}");
}
