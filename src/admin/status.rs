//! The state of the process beside its pools: configuration, certificates, Redis, NATS, peers, models, tenants,
//! rejections and degraded modes: `/api/status`.

use super::{AdminState, Source, json, peers};
use crate::rates::Tally;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::sync::LinkStatus;
use attache_types::certificate::Validity;
use attache_types::clock::Timestamp;
use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The route of the status.
pub(super) fn pages() -> Router<AdminState> {
    Router::new().route("/api/status", get(status))
}

/// A certificate in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateStatus {
    /// What it is for.
    pub name: &'static str,
    /// End of its validity, Unix seconds.
    pub expires_at: u64,
    /// Replacements since the start that were refused because they are invalid.
    pub refused: u64,
}

/// The parts of the process that the status reads.
#[derive(Clone)]
pub struct ProcessParts {
    /// Metrics of requests, and the outcome of reloads.
    pub metrics: Arc<Metrics>,
    /// The certificates of the ext-proc port and for NATS.
    pub certificates: Source<Vec<CertificateStatus>>,
    /// Whether the configuration uses Redis.
    pub uses_redis: Source<bool>,
    /// The connection to NATS, if `sync` is configured.
    pub nats: Option<Source<LinkStatus>>,
}

async fn status(State(state): State<AdminState>) -> Response {
    let now = state.clock.now();
    let parts = &state.parts;
    let tally = Tally::of(&parts.metrics, now);
    let mut all = state.history.with_rates(|rates| rates.to_json(&tally));
    let wall = state.clock.wall(now);
    let certificates = (parts.certificates)();
    all.extend(Map::from_iter([
        ("version".to_owned(), json!(env!("CARGO_PKG_VERSION"))),
        ("uptime_seconds".to_owned(), json!(now.since(Timestamp(0)).as_secs())),
        ("ready".to_owned(), json!(state.readiness.is_ready())),
        ("missing".to_owned(), json!(state.readiness.missing())),
        ("configuration".to_owned(), configuration(&parts.metrics, now)),
        ("certificates".to_owned(), certificates.iter().map(|one| certificate(one, wall)).collect()),
        ("redis".to_owned(), if (parts.uses_redis)() { redis(&parts.metrics) } else { Value::Null }),
        ("nats".to_owned(), parts.nats.as_ref().map_or(Value::Null, |link| nats(link()))),
        ("peers".to_owned(), peers::all(&state)),
    ]));
    json(&Value::Object(all))
}

/// When the configuration was last read, and why that one was refused.
fn configuration(metrics: &Metrics, now: Timestamp) -> Value {
    let last = metrics.reloads.last();
    json!({
        "seconds_since_reload": last.as_ref().map(|last| now.since(last.at).as_secs()),
        "refusal": last.and_then(|last| last.refusal),
    })
}

fn certificate(certificate: &CertificateStatus, now: SystemTime) -> Value {
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let left = i128::from(certificate.expires_at) - i128::from(now);
    json!({
        "name": certificate.name,
        "expires_at": certificate.expires_at,
        "expires_in_seconds": i64::try_from(left).unwrap_or(i64::MAX),
        "validity": Validity::of(left as f64),
        "refused_replacements": certificate.refused,
    })
}

fn redis(metrics: &Metrics) -> Value {
    let failures: Map<_, _> = metrics
        .redis
        .store_failures
        .occurred()
        .into_iter()
        .map(|(reason, count)| (reason.to_owned(), json!(count)))
        .collect();
    json!({"connected": metrics.redis.connected.get() > 0, "failures": failures})
}

fn nats(link: LinkStatus) -> Value {
    json!({"connected": link.connected, "dropped_messages": link.dropped})
}
