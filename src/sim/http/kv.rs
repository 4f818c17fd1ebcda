//! The cache from outside: where its events can be had, what it holds, and how it is emptied.

use super::body::{SimBody, json_response};
use super::error::ApiError;
use super::{Server, hex};
use crate::sim::kv_events::{HashForm, Restart};
use http::{Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::oneshot;

/// As vLLM: one source for each data-parallel rank, of which there is one.
pub(super) fn sources(server: &Server) -> Response<SimBody> {
    /// vLLM's defaults; nothing here depends on them.
    const HIGH_WATER_MARK: u32 = 100_000;
    let body = match &server.kv {
        None => json!({}),
        Some(link) => json!({"0": {
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": link.source.endpoint,
            "replay_endpoint": link.source.replay_endpoint, "buffer_steps": link.source.buffer_steps,
            "hwm": HIGH_WATER_MARK, "max_queue_size": HIGH_WATER_MARK, "topic": link.source.topic,
        }}),
    };
    json_response(StatusCode::OK, &body)
}

pub(super) fn reset_prefix_cache(server: &Server) -> Response<SimBody> {
    json_response(StatusCode::OK, &json!({"success": server.host.reset_prefix_cache()}))
}

/// The page table. At rest it is what the events have told.
pub(super) fn blocks(server: &Server) -> Result<Response<SimBody>, ApiError> {
    let (Some(table), Some(config)) = (server.host.page_table(), &server.config.kv_events) else {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "this server publishes no KV events, and names no blocks"));
    };
    let blocks: Vec<Value> = table
        .blocks
        .iter()
        .map(|(digest, copies)| {
            let hash = match config.hash {
                HashForm::Int => Value::from(digest.event_hash().0),
                HashForm::Bytes => Value::from(hex(digest.as_bytes())),
            };
            json!({"hash": hash, "copies": copies})
        })
        .collect();
    Ok(json_response(StatusCode::OK, &json!({"next_sequence": table.next_sequence, "blocks": blocks})))
}

/// Answers when the server has begun anew.
pub(super) async fn restart(server: &Server) -> Response<SimBody> {
    let process = server.host.restart();
    server.pd.peers.restarted(&server.pd.own);
    if let (Some(process), Some(link)) = (process, &server.kv) {
        let (done, restarted) = oneshot::channel();
        // A publisher that is gone has nothing to restart: the fleet is about to end.
        if link.restarts.send(Restart { process, done }).is_ok() {
            let _ = restarted.await;
        }
    }
    json_response(StatusCode::OK, &json!({}))
}
