//! AstrAI's HTTP API: as `attache sim` implements it, and as a model server behind Attaché.

mod api;
mod behind;
mod checks;
mod quirks;

use super::Row;
use crate::support::client::{self, Reply};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::{Value, json};
use std::net::SocketAddr;

pub(super) const TOPICS: &[(&str, &[Row])] =
    &[("api", api::ROWS), ("checks", checks::ROWS), ("quirks", quirks::ROWS), ("behind", behind::ROWS)];

/// A simulated server with these flags, much faster than a real one.
async fn server(flags: &[&str]) -> (SimProcess, SocketAddr) {
    let sim = SimProcess::start(1, &[&["--model", "astrai", "--speed", "1000"], flags].concat()).await;
    let address = sim.servers[0];
    (sim, address)
}

/// A server that behaves as AstrAI's documentation says.
async fn documented() -> (SimProcess, SocketAddr) {
    server(&["--quirks", "astrai-documented"]).await
}

/// A server that behaves as AstrAI's code does.
async fn actual() -> (SimProcess, SocketAddr) {
    server(&["--quirks", "astrai"]).await
}

async fn post(to: SocketAddr, path: &str, body: Value) -> Reply {
    client::post(to, path, Bytes::from(body.to_string())).await.expect("an answer")
}

async fn chat(to: SocketAddr, more: Value) -> Reply {
    post(to, "/v1/chat/completions", hello(more)).await
}

/// The request of AstrAI's documentation, which has no `model`, with more fields.
fn hello(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4});
    for (name, value) in more.as_object().expect("fields") {
        body[name] = value.clone();
    }
    body
}

/// The data of a stream's events, without `[DONE]`.
fn events(reply: &Reply) -> Vec<Value> {
    let text = String::from_utf8_lossy(&reply.body);
    let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).expect("JSON")).collect()
}

/// Status and error message of a response.
fn error(reply: &Reply) -> (u16, String) {
    (reply.status.as_u16(), reply.json()["error"]["message"].as_str().unwrap_or_default().to_owned())
}
