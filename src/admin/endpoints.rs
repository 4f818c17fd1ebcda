//! JSON of a pool's snapshot for `/endpoints`, and of known KV blocks.

use crate::pools::{EndpointStanding, PoolView};
use crate::warnings::Judgement;
use attache_pool::speed::Slowdown;
use attache_pool::{EndpointMetrics, EndpointState, ledger};
use attache_prefix::index::Tier;
use attache_prefix::residents::Resident;
use attache_prefix::trust::Trust;
use attache_types::clock::Timestamp;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;

pub(super) fn pool(view: &PoolView, latest: &Judgement, now: Timestamp) -> Value {
    let snapshot = view.store.load_full();
    let shown = |state: &EndpointState| endpoint(state, latest.slowdown(&view.name, state.endpoint.id), view, now);
    json!({
        "name": &*view.name,
        "strategy": view.strategy,
        "tokenizer": view.tokenizer,
        "generation": snapshot.generation,
        "synced": snapshot.synced,
        "queued_requests": view.queue.requests.get(),
        "queued_bytes": view.queue.bytes.get(),
        "queues": view.bands.read().into_iter().map(|(priority, requests)| {
            json!({"priority": priority, "requests": requests})
        }).collect::<Vec<_>>(),
        "unread_prompts": view.prefix.unread().kinds(),
        "endpoints": snapshot.endpoints.iter().map(shown).collect::<Vec<_>>(),
    })
}

fn endpoint(state: &EndpointState, slowdown: Option<Slowdown>, view: &PoolView, now: Timestamp) -> Value {
    let (endpoint, metrics) = (&state.endpoint, state.metrics());
    let spec = &endpoint.spec;
    let status = EndpointStanding::of(state, &view.health, now);
    let trust = view.prefix.residents().load().get(&endpoint.id).map(Resident::trust);
    json!({
        "id": endpoint.id.0,
        "name": &*spec.name,
        "address": &*endpoint.authority,
        "engine": spec.engine,
        "roles": endpoint.roles.to_string(),
        "labels": spec.labels.iter().map(|(k, v)| (k.to_string(), json!(&**v))).collect::<serde_json::Map<_, _>>(),
        "status": status,
        "ejection": endpoint.health.ejection(now, &view.health).map(|ejection| json!({
            "cause": ejection.cause.label(),
            "returns_in_ms": u64::try_from(ejection.returns_in.as_millis()).unwrap_or(u64::MAX),
        })),
        "ejections": endpoint.health.ejection_counts().map(|(_, count)| count).sum::<u64>(),
        "scrape_error": view.scrape.failing(endpoint.id).as_deref(),
        "in_flight": endpoint.ledger.in_flight(),
        "prefill_tokens": endpoint.ledger.prefill_tokens(),
        "routed": endpoint.ledger.routed(),
        "awaiting_first_token": endpoint.speed.pending(),
        "requests": ledger::requests(endpoint, metrics.filter(|m| now.since(m.scraped_at) <= view.stale_after)),
        "learned": endpoint.speed.learned(),
        "slowdown": slowdown.map(|own| {
            json!({"first_token": own.first_token, "per_token": own.per_token, "slow": own.is_slow()})
        }),
        "metrics": metrics.map(|m| page(m, view, now)),
        "kv_events": trust.map(Trust::label),
        "kv_event_use": trust.map(|trust| trust.event_use().label()),
    })
}

/// The engine's hashes of the known blocks of the endpoint at `address`, by tier; `None` if no pool has the endpoint.
pub(super) fn kv_blocks(views: &[PoolView], address: SocketAddr) -> Option<Value> {
    views.iter().find_map(|view| {
        let snapshot = view.store.load();
        let state = snapshot.position(address).and_then(|p| snapshot.get(p))?;
        let residents = view.prefix.residents().load();
        let caches = residents.get(&state.endpoint.id).map(|r| r.caches.as_slice()).unwrap_or_default();
        let held = |tier| {
            let mut hashes: Vec<u64> =
                caches.iter().flat_map(|c| view.prefix.index().held(c.holder, tier)).map(|h| h.0).collect();
            hashes.sort_unstable();
            hashes
        };
        Some(json!({
            "endpoint": &*state.endpoint.authority,
            "trust": residents.get(&state.endpoint.id).map(|r| r.trust().label()),
            "gpu": held(Tier::Gpu),
            "cpu": held(Tier::Cpu),
            "disk": held(Tier::Disk),
        }))
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
