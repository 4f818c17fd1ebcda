//! A pool's snapshot as JSON.

use crate::clock::Timestamp;
use crate::pool::{EndpointMetrics, EndpointState, ledger};
use crate::telemetry::pools::{PoolView, Standing};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) fn pool(view: &PoolView, now: Timestamp) -> Value {
    let snapshot = view.store.load_full();
    json!({
        "name": &*view.name,
        "strategy": view.strategy,
        "generation": snapshot.generation,
        "synced": snapshot.synced,
        "endpoints": snapshot.endpoints.iter().map(|state| endpoint(state, view, now)).collect::<Vec<_>>(),
    })
}

fn endpoint(state: &EndpointState, view: &PoolView, now: Timestamp) -> Value {
    let (endpoint, metrics) = (&state.endpoint, state.metrics.as_deref());
    let spec = &endpoint.spec;
    let status = Standing::of(state, &view.health, now);
    json!({
        "id": endpoint.id.0,
        "name": &*spec.name,
        "address": &*endpoint.authority,
        "engine": spec.engine,
        "labels": spec.labels.iter().map(|(k, v)| (k.to_string(), json!(&**v))).collect::<serde_json::Map<_, _>>(),
        "status": status,
        "in_flight": endpoint.ledger.in_flight(),
        "prefill_tokens": endpoint.ledger.prefill_tokens(),
        "routed": endpoint.ledger.routed(),
        "requests": ledger::requests(endpoint, metrics.filter(|m| now.since(m.scraped_at) <= view.stale_after)),
        "metrics": metrics.map(|m| page(m, view, now)),
    })
}

fn page(m: &EndpointMetrics, view: &PoolView, now: Timestamp) -> Value {
    let age = now.since(m.scraped_at);
    json!({
        "age_ms": u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        "stale": age > view.stale_after,
        "waiting": m.waiting,
        "running": m.running,
        "kv_usage": m.kv_usage,
        "block_size": m.block_size,
        "num_blocks": m.num_blocks,
        "prefix_hit_ratio": match (m.prefix_hits, m.prefix_queries) {
            (Some(hits), Some(queries)) if queries > 0.0 => Some(hits / queries),
            _ => None,
        },
        "lora": m.lora.as_ref().map(|l| {
            let names = |list: &[Arc<str>]| list.iter().map(|n| n.to_string()).collect::<Vec<_>>();
            json!({"max": l.max, "running": names(&l.running), "waiting": names(&l.waiting)})
        }),
    })
}
