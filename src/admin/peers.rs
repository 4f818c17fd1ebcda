//! The other pickers that share state with this one: `/api/peers`.

use super::{AdminState, json};
use attache_sync::{Replica, SnapshotState};
use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;

/// Routes that show the peers.
pub(super) fn pages() -> Router<AdminState> {
    Router::new().route("/api/peers", get(list))
}

async fn list(State(state): State<AdminState>) -> Response {
    json(&all(&state))
}

/// The peers, and the import of the prefix index of one of them.
pub(super) fn all(state: &AdminState) -> Value {
    let peers = state.replica.as_ref().map(|replica| replica.peers(state.clock.now())).unwrap_or_default();
    let peer = |peer: &attache_sync::PeerStatus| {
        json!({
            "name": peer.name,
            "process": format!("{:016x}", peer.sender),
            "seconds_since_last_message": peer.silent.as_secs_f64(),
            "requests_in_flight": peer.requests,
            "behind": peer.behind,
        })
    };
    json!({
        "shares_state": state.replica.is_some(),
        "snapshot": state.replica.as_deref().map(snapshot),
        "peers": peers.iter().map(peer).collect::<Vec<Value>>(),
    })
}

/// The import of a peer's prefix index.
fn snapshot(replica: &Replica) -> Value {
    let progress = replica.snapshot();
    let state = match progress.state {
        SnapshotState::Waiting => "waiting",
        SnapshotState::Importing => "importing",
        SnapshotState::Done => "done",
    };
    json!({
        "state": state,
        "process": progress.peer.map(|peer| format!("{peer:016x}")),
        "chunks": progress.chunks,
        "blocks": replica.stats().imported_blocks.load(Relaxed),
    })
}
