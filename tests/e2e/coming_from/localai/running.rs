//! A picker with servers whose metrics the test sets. Requests are sent to the picker directly, without a gateway.

use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::grpc::{Connection, PROCESS, Stream, message, request_body, request_headers};
use crate::support::process::{Process, eventually, scratch};
use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Event;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders};
use serde_json::Value;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const DESTINATION: &str = "x-gateway-destination-endpoint";

/// Part of the KV cache that a restarted server reports. The snapshot with it also names the restart.
const KV_USAGE_AFTER_RESTART: f64 = 1.0 / 128.0;

/// Metrics of an idle vLLM that started at this second.
fn page(started: u32, kv_usage: f64) -> String {
    format!(
        "vllm:num_requests_running{{model_name=\"m\"}} 0\nvllm:num_requests_waiting{{model_name=\"m\"}} 0\n\
         vllm:kv_cache_usage_perc{{model_name=\"m\"}} {kv_usage}\nprocess_start_time_seconds {started}\n"
    )
}

struct Server {
    address: SocketAddr,
    page: Arc<Mutex<String>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let page = Arc::new(Mutex::new(page(1_000, 0.0)));
        let shown = page.clone();
        let task = tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let page = shown.lock().expect("the page").clone();
                tokio::spawn(async move {
                    let mut request = [0; 4_096];
                    let _ = socket.read(&mut request).await;
                    let length = page.len();
                    let head = format!(
                        "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
                    );
                    let _ = socket.write_all((head + &page).as_bytes()).await;
                });
            }
        });
        Self { address, page, task }
    }
}

/// A picker and its servers.
pub(in crate::coming_from) struct Pool {
    servers: Vec<Server>,
    pub(in crate::coming_from) picker: AttacheProcess,
    connection: Connection,
}

/// One request, in flight until it is dropped.
pub(in crate::coming_from) struct PendingRequest {
    stream: Stream,
    /// Index of the picked server.
    pub(in crate::coming_from) server: usize,
}

impl PendingRequest {
    /// Completes the request with a 200 response of the server.
    pub(in crate::coming_from) async fn finish(mut self) -> usize {
        let status = HeaderValue { key: ":status".into(), raw_value: b"200".into(), ..HeaderValue::default() };
        let headers = Some(HeaderMap { headers: vec![status] });
        let event = Event::ResponseHeaders(HttpHeaders { headers, ..HttpHeaders::default() });
        self.stream.send(&message(event)).expect("sending the response's headers");
        let body = HttpBody { body: b"{}".into(), end_of_stream: true, ..HttpBody::default() };
        self.stream.send(&message(Event::ResponseBody(body))).expect("sending the response");
        self.stream.half_close().expect("ending the stream");
        self.stream.status().await.expect("the end of the stream");
        self.server
    }
}

fn text(top: &str, more: &str, servers: &[SocketAddr]) -> String {
    let mut text = format!("apiVersion: attache.dev/v1\nkind: Attache\n{top}pools:\n- name: default\n{more}");
    text.push_str("  scrape: {interval: 50ms, idleInterval: 50ms}\n  endpoints:\n");
    for server in servers {
        let _ = writeln!(text, "  - {{address: \"{server}\"}}");
    }
    text
}

impl Pool {
    /// A pool of idle servers. `more` is added to the pool's section, `top` to the top of the file, and `variables` to
    /// the picker's environment.
    pub(in crate::coming_from) async fn with(count: usize, top: &str, more: &str, variables: &[(&str, &str)]) -> Self {
        let mut servers = Vec::new();
        for _ in 0..count {
            servers.push(Server::start().await);
        }
        let addresses: Vec<_> = servers.iter().map(|server| server.address).collect();
        let picker = AttacheProcess::configured_with(&text(top, more, &addresses), variables).await;
        let connection = Connection::open(picker.grpc).await.expect("a connection");
        eventually("the first scrapes", || async {
            (picker.metric("attache_scrape_pages_total").await >= count as f64).then_some(())
        })
        .await;
        Self { servers, picker, connection }
    }

    /// A request to `/v1/chat/completions`, in flight.
    pub(in crate::coming_from) async fn ask(&self, body: &Value) -> PendingRequest {
        let headers: [(&str, &[u8]); 2] = [(":path", b"/v1/chat/completions"), (":method", b"POST")];
        let mut stream = self.connection.stream(PROCESS, &[]).await.expect("a stream");
        stream.send(&request_headers(&headers, false)).expect("sending headers");
        stream.send(&request_body(body.to_string().as_bytes(), true)).expect("sending the body");
        loop {
            let answer = stream.answer().await.expect("an answer").expect("a message").response;
            let common = match answer {
                Some(Response::RequestHeaders(headers)) => headers.response,
                Some(Response::RequestBody(body)) => body.response,
                other => panic!("not an answer to a request: {other:?}"),
            };
            let set = common.and_then(|c| c.header_mutation).map(|m| m.set_headers).unwrap_or_default();
            let mut headers = set.into_iter().filter_map(|option| option.header);
            if let Some(header) = headers.find(|header| header.key == DESTINATION) {
                let destination = String::from_utf8_lossy(&header.raw_value).into_owned();
                let first = destination.split(',').next().unwrap_or_default();
                let server = self.servers.iter().position(|server| server.address.to_string() == first);
                return PendingRequest { stream, server: server.expect("one of the servers") };
            }
        }
    }

    /// Index of the picked server. The request has ended when this returns.
    pub(in crate::coming_from) async fn pick(&self, body: &Value) -> usize {
        self.ask(body).await.finish().await
    }

    /// Restarts the model server: the next metrics page has a new start time.
    pub(in crate::coming_from) async fn restart(&self, server: usize) {
        *self.servers[server].page.lock().expect("the page") = page(9_000, KV_USAGE_AFTER_RESTART);
        eventually("the restart to be seen", || async {
            let endpoints = self.picker.endpoints().await;
            let is_published =
                endpoints.iter().any(|e| e["metrics"]["kv_usage"].as_f64() == Some(KV_USAGE_AFTER_RESTART));
            (is_published && self.picker.metric("attache_scrape_restarts_total").await >= 1.0).then_some(())
        })
        .await;
    }

    /// A request to the admin port.
    pub(in crate::coming_from) async fn admin(&self, method: &str, path: &str, body: &Value) -> Reply {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let to = self.picker.metrics;
        let request = client::request(method, to, Http::H1, path, Payload::sized(Bytes::from(body)));
        client::send(to, Http::H1, request).await.expect("an answer of the admin port")
    }
}

/// Runs `attache check` on a file with these lines and variables: whether it is valid, and the output.
pub(in crate::coming_from) async fn check(top: &str, more: &str, variables: &[(&str, &str)]) -> (bool, String) {
    let directory = scratch("check");
    let file = directory.path().join("attache.yaml");
    std::fs::write(&file, text(top, more, &["127.0.0.1:1".parse().expect("an address")])).expect("writing a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.envs(variables.iter().copied()).arg("check").arg(file);
    let mut process = Process::spawn("attache", &mut command, directory);
    let status = process.wait().await;
    (status.success(), process.stdout() + &process.stderr())
}

/// The strategy and parameters of a running picker with these flags and variables and no file.
pub(in crate::coming_from) async fn in_force(flags: &[&str], variables: &[(&str, &str)]) -> (String, Value) {
    let server = Echo::start().await;
    let endpoint = ["--endpoint".to_owned(), server.address.to_string()];
    let arguments: Vec<String> = endpoint.into_iter().chain(flags.iter().map(|&flag| flag.to_owned())).collect();
    let picker = AttacheProcess::with_variables(&arguments, variables).await;
    let dump = client::get(picker.metrics, "/config_dump").await.expect("the settings").json();
    let strategy = &dump["pools"][0]["strategy"];
    (strategy["name"].as_str().unwrap_or_default().to_owned(), strategy["parameters"].clone())
}
