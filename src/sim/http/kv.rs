//! The cache from outside: where its events can be had, what it holds, and how it is emptied.

use super::body::{SimBody, json_response};
use super::error::ApiError;
use super::{Call, Server, hex};
use crate::kv_events::{HashForm, KvEventSource, Restart};
use http::{Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::oneshot;

/// As vLLM: one source for each data-parallel rank.
pub(super) fn sources(server: &Server) -> Response<SimBody> {
    /// vLLM's defaults; nothing here depends on them.
    const HIGH_WATER_MARK: u32 = 100_000;
    let told = server.ranks.iter().enumerate().filter_map(|(number, rank)| Some((number, &rank.kv.as_ref()?.source)));
    let source = |(number, source): (usize, &KvEventSource)| {
        let said = json!({
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": source.endpoint,
            "replay_endpoint": source.replay_endpoint, "buffer_steps": source.buffer_steps,
            "hwm": HIGH_WATER_MARK, "max_queue_size": HIGH_WATER_MARK, "topic": source.topic,
        });
        (number.to_string(), said)
    };
    json_response(StatusCode::OK, &told.map(source).collect::<Value>())
}

pub(super) fn reset_prefix_cache(server: &Server) -> Response<SimBody> {
    // All of them, whatever becomes of the first.
    let emptied: Vec<bool> = server.hosts().map(|host| host.reset_prefix_cache()).collect();
    json_response(StatusCode::OK, &json!({"success": emptied.iter().all(|emptied| *emptied)}))
}

/// Page table of the engine that the request names, else of the first. At rest it equals the
/// sum of all published events.
pub(super) fn blocks(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let (Some(table), Some(config)) = (call.host.page_table(), &server.config.kv_events) else {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "this server publishes no KV events, and names no blocks"));
    };
    let blocks: Vec<Value> = table
        .blocks
        .iter()
        .map(|(digest, copies)| {
            let hash = match config.hash {
                HashForm::Int => Value::from(digest.event_hash()),
                HashForm::Bytes => Value::from(hex(digest.as_bytes())),
            };
            json!({"hash": hash, "copies": copies})
        })
        .collect();
    Ok(json_response(StatusCode::OK, &json!({"next_sequence": table.next_sequence, "blocks": blocks})))
}

/// Answers when the server has begun anew.
pub(super) async fn restart(server: &Server) -> Response<SimBody> {
    let processes: Vec<Option<u32>> = server.hosts().map(|host| host.restart()).collect();
    server.pd.peers.restarted(&server.pd.own);
    for (rank, process) in server.ranks.iter().zip(processes) {
        let (Some(process), Some(link)) = (process, &rank.kv) else { continue };
        let (done, restarted) = oneshot::channel();
        // A publisher that is gone has nothing to restart: the fleet is about to end.
        if link.restarts.send(Restart { process, done }).is_ok() {
            let _ = restarted.await;
        }
    }
    json_response(StatusCode::OK, &json!({}))
}
