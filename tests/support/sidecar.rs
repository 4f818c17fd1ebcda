//! llm-d's sidecar of a decode worker, with the parts of `nixlv2` that tests need. It calls the prefill worker in
//! `x-prefiller-host-port`, and sends the request with the transfer parameters to its own server. Like the original it
//! does not retry: a prefill worker's rejection is the response, and an unreachable one gives a 502. It forwards
//! complete responses.

use super::body::Payload;
use super::client::{self, Http, Reply};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Runs until it is dropped, which closes its connections.
pub(crate) struct Sidecar {
    pub(crate) address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Sidecar {
    /// A sidecar of `decoder`.
    pub(crate) async fn start(decoder: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let task = tokio::spawn(async move {
            // Dropped with this task, and the connections with it.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(async move {
                    let service = hyper::service::service_fn(move |request| answer(request, decoder));
                    // An error here is a client that disconnected.
                    let _ = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self { address, task }
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(request: Request<Incoming>, decoder: SocketAddr) -> Result<Response<Payload>, Infallible> {
    let (head, body) = request.into_parts();
    let target = head.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
    let named = head.headers.get("x-prefiller-host-port").and_then(|value| value.to_str().ok());
    let prefiller: Option<SocketAddr> = named.and_then(|list| list.split(',').next()?.trim().parse().ok());
    let Ok(body) = body.collect().await.map(http_body_util::Collected::to_bytes) else {
        return Ok(failed(StatusCode::BAD_REQUEST));
    };
    let body = match prefiller {
        None => body,
        Some(prefiller) => match prefill(prefiller, &target, &body).await {
            Ok(body) => body,
            Err(answer) => return Ok(answer),
        },
    };
    let reply = ask(decoder, &head.method, &target, body).await;
    Ok(reply.map_or_else(|| failed(StatusCode::BAD_GATEWAY), passed_on))
}

/// The body of the decode request. The error is the client's response if the prefill failed.
async fn prefill(prefiller: SocketAddr, target: &str, body: &Bytes) -> Result<Bytes, Response<Payload>> {
    let Ok(Value::Object(request)) = serde_json::from_slice(body) else { return Ok(body.clone()) };
    let mut leg = request.clone();
    leg.remove("stream_options");
    for (key, value) in [
        ("stream", json!(false)),
        ("max_tokens", json!(1)),
        ("max_completion_tokens", json!(1)),
        ("kv_transfer_params", json!({"do_remote_decode": true, "do_remote_prefill": false})),
    ] {
        leg.insert(key.to_owned(), value);
    }
    let reply = ask(prefiller, &Method::POST, target, Value::Object(leg).to_string().into()).await;
    let reply = reply.ok_or_else(|| failed(StatusCode::BAD_GATEWAY))?;
    if !reply.status.is_success() {
        return Err(passed_on(reply));
    }
    let mut decode = request;
    decode.insert("kv_transfer_params".to_owned(), reply.json()["kv_transfer_params"].clone());
    Ok(Value::Object(decode).to_string().into())
}

async fn ask(to: SocketAddr, method: &Method, target: &str, body: Bytes) -> Option<Reply> {
    let request = client::request(method.as_str(), to, Http::H1, target, Payload::sized(body));
    client::send(to, Http::H1, request).await.ok()
}

fn passed_on(reply: Reply) -> Response<Payload> {
    let mut response = Response::new(Payload::sized(reply.body.into()));
    *response.status_mut() = reply.status;
    let content_type = reply.headers.get(header::CONTENT_TYPE).cloned();
    response.headers_mut().extend(content_type.map(|value| (header::CONTENT_TYPE, value)));
    response
}

fn failed(status: StatusCode) -> Response<Payload> {
    let mut response = Response::new(Payload::sized(Bytes::new()));
    *response.status_mut() = status;
    response
}
