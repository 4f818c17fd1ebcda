//! A picker with AIBrix's environment variables. The test sends requests to it directly, without a gateway.

use crate::support::attache::AttacheProcess;
use crate::support::grpc::{Connection, PROCESS, Stream, message, request_body, request_headers};
use crate::support::process::{Process, eventually, scratch};
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Event;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{CommonResponse, HttpBody, HttpHeaders, ImmediateResponse};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::Command;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// A model server that responds to every request with a metrics page.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Metrics of an idle vLLM.
pub(super) const IDLE: &str = "vllm:num_requests_running{model_name=\"m\"} 0\nvllm:num_requests_waiting{model_name=\"m\"} 0\n\
                    vllm:kv_cache_usage_perc{model_name=\"m\"} 0\n";

impl Server {
    async fn start(page: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let page = page.to_owned();
        let task = tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let page = page.clone();
                tokio::spawn(async move {
                    let mut request = [0; 4_096];
                    let _ = socket.read(&mut request).await;
                    let length = page.len();
                    let head = format!(
                        "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\n\
                         content-length: {length}\r\nconnection: close\r\n\r\n"
                    );
                    let _ = socket.write_all((head + &page).as_bytes()).await;
                });
            }
        });
        Self { address, task }
    }
}

/// A picker with its model servers and AIBrix's environment variables.
pub(super) struct Pool {
    pub(super) servers: Vec<Server>,
    pub(super) picker: AttacheProcess,
    connection: Connection,
}

/// One request, in flight until it is dropped.
pub(super) struct PendingRequest {
    stream: Stream,
    /// Index of the picked server, or the rejection.
    pub(super) answer: Result<usize, Refusal>,
}

/// Status and headers of a rejection, as the client gets them.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: i32,
    pub(super) headers: BTreeMap<String, String>,
}

fn read(options: &[HeaderValueOption]) -> BTreeMap<String, String> {
    let headers = options.iter().filter_map(|option| option.header.as_ref());
    headers.map(|h| (h.key.clone(), String::from_utf8_lossy(&h.raw_value).into_owned())).collect()
}

fn set(common: Option<CommonResponse>) -> BTreeMap<String, String> {
    common.and_then(|c| c.header_mutation).map(|m| read(&m.set_headers)).unwrap_or_default()
}

impl PendingRequest {
    /// The headers that the picker adds to the response after the server responds with 200.
    pub(super) async fn response_headers(&mut self) -> BTreeMap<String, String> {
        let status = HeaderValue { key: ":status".into(), raw_value: b"200".into(), ..HeaderValue::default() };
        let headers = Some(HeaderMap { headers: vec![status] });
        let event = Event::ResponseHeaders(HttpHeaders { headers, ..HttpHeaders::default() });
        self.stream.send(&message(event)).expect("sending the response's headers");
        loop {
            let answer = self.stream.answer().await.expect("an answer").expect("a message");
            if let Some(Response::ResponseHeaders(headers)) = answer.response {
                return set(headers.response);
            }
        }
    }

    /// Completes the request with a 200 response of the server.
    pub(super) async fn finish(mut self) {
        self.response_headers().await;
        let body = HttpBody { body: b"{}".into(), end_of_stream: true, ..HttpBody::default() };
        self.stream.send(&message(Event::ResponseBody(body))).expect("sending the response");
        self.stream.half_close().expect("ending the stream");
        self.stream.status().await.expect("the end of the stream");
    }
}

impl Pool {
    /// A pool of idle servers. `more` is added to the pool's section, and `variables` to the picker's environment.
    pub(super) async fn with(count: usize, more: &str, variables: &[(&str, &str)]) -> Self {
        Self::reporting(&vec![IDLE; count], more, variables).await
    }

    /// Like `with`, with servers that report these metrics pages.
    pub(super) async fn reporting(pages: &[&str], more: &str, variables: &[(&str, &str)]) -> Self {
        let mut servers = Vec::new();
        for page in pages {
            servers.push(Server::start(page).await);
        }
        let mut text = String::from("apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n");
        text.push_str(more);
        text.push_str("  scrape: {interval: 50ms, idleInterval: 50ms}\n  endpoints:\n");
        for (i, server) in servers.iter().enumerate() {
            let _ = writeln!(text, "  - {{address: \"{}\", labels: {{pod: p{}}}}}", server.address, i + 1);
        }
        let picker = AttacheProcess::configured_with(&text, variables).await;
        let connection = Connection::open(picker.grpc).await.expect("a connection");
        let pool = Self { servers, picker, connection };
        // Every endpoint has been scraped, so decisions use these metrics from here on.
        eventually("the first scrapes", || async {
            let endpoints = pool.picker.endpoints().await;
            (endpoints.len() == pages.len() && endpoints.iter().all(|e| e["metrics"].is_object())).then_some(())
        })
        .await;
        pool
    }

    /// Sends a request with this prompt and these headers.
    pub(super) async fn ask(&self, prompt: &str, headers: &[(&str, &str)]) -> PendingRequest {
        let body = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": prompt}]}).to_string();
        self.send(body.as_bytes(), headers).await
    }

    /// Sends a request with this body and these headers.
    pub(super) async fn send(&self, body: &[u8], headers: &[(&str, &str)]) -> PendingRequest {
        let mut all: Vec<(&str, &[u8])> = vec![(":path", b"/v1/chat/completions"), (":method", b"POST")];
        all.extend(headers.iter().map(|(name, value)| (*name, value.as_bytes())));
        let mut stream = self.connection.stream(PROCESS, &[]).await.expect("a stream");
        stream.send(&request_headers(&all, false)).expect("sending headers");
        stream.send(&request_body(body, true)).expect("sending the body");
        loop {
            let answer = stream.answer().await.expect("an answer").expect("a message").response;
            let headers_set = match answer {
                Some(Response::ImmediateResponse(refusal)) => {
                    return PendingRequest { stream, answer: Err(Refusal::of(&refusal)) };
                }
                Some(Response::RequestHeaders(headers)) => set(headers.response),
                Some(Response::RequestBody(body)) => set(body.response),
                other => panic!("not an answer to a request: {other:?}"),
            };
            if let Some(destination) = headers_set.get("x-gateway-destination-endpoint") {
                let first = destination.split(',').next().unwrap_or_default();
                let at = self.servers.iter().position(|server| server.address.to_string() == first);
                let at = at.unwrap_or_else(|| panic!("{destination} is not one of the servers"));
                return PendingRequest { stream, answer: Ok(at) };
            }
        }
    }

    /// Number of the picked server (from 1). The request has ended when this returns.
    pub(super) async fn pick(&self, prompt: &str, headers: &[(&str, &str)]) -> usize {
        let asked = self.ask(prompt, headers).await;
        let picked = asked.answer.as_ref().unwrap_or_else(|refusal| panic!("{headers:?}: {refusal:?}"));
        let picked = picked + 1;
        asked.finish().await;
        picked
    }

    /// Numbers of the servers (from 1) that are picked for `times` requests, one after another.
    pub(super) async fn picks(&self, times: usize, prompt: &str, headers: &[(&str, &str)]) -> BTreeSet<usize> {
        let mut picks = BTreeSet::new();
        for _ in 0..times {
            picks.insert(self.pick(prompt, headers).await);
        }
        picks
    }

    /// Sends a request that must be rejected, and returns the rejection.
    pub(super) async fn refusal(&self, headers: &[(&str, &str)]) -> Refusal {
        self.ask("hello", headers).await.answer.expect_err("a refusal")
    }
}

impl Refusal {
    fn of(refusal: &ImmediateResponse) -> Self {
        let headers = refusal.headers.as_ref().map(|m| read(&m.set_headers)).unwrap_or_default();
        Self { status: refusal.status.as_ref().map_or(0, |status| status.code), headers }
    }
}

/// Standard error of a picker with this pool after its start.
pub(super) async fn started(more: &str, variables: &[(&str, &str)]) -> String {
    Pool::with(1, more, variables).await.picker.process.stderr()
}

/// Standard error of a picker that must fail to start with these variables.
pub(super) async fn refused(more: &str, variables: &[(&str, &str)]) -> String {
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n{more}  endpoints: [{{address: \"127.0.0.1:1\"}}]\n"
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.envs(variables.iter().copied()).args(["run", "--bind", "127.0.0.1", "--secure-serving=false"]);
    command.args(["--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0", "--config-text", &text]);
    let mut process = Process::spawn("attache", &mut command, scratch("attache"));
    let status = process.wait().await;
    assert!(!status.success(), "a start with {variables:?}");
    process.stderr()
}
