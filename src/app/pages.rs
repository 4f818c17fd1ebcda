//! The content of the admin pages, and the task that records the history of pools.

use super::instruments::PREFIX;
use super::sync::Sync;
use super::{App, recording};
use attache_admin::guard::Guard;
use attache_admin::history::History;
use attache_admin::pools::PoolView;
use attache_admin::reservations::{ReservationAccess, ReserveRequest};
use attache_admin::sessions::EndSession;
use attache_admin::status::ProcessParts;
use attache_admin::warnings::{LatestWarnings, WarningCollector};
use attache_admin::{AdminState, ExplainRequest, MetricsPage, Refusals};
use attache_ext_proc::{Processor, warmer};
use attache_picker::Picker;
use attache_picker::event::SessionEnd;
use attache_picker::explain::{self, ExplainQuery};
use attache_picker::reservations::{DEFAULT_TIMEOUT, MAX_TIMEOUT, ReservationId};
use attache_picker::reserving;
use attache_telemetry::logs::LogHandle;
use attache_types::clock::{Clock, Timestamp};
use attache_types::error::{Reason, RequestError};
use attache_types::rng;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The parts of the admin pages that no other part of the process has.
pub(super) struct PageParts {
    /// Runtime that renders pages and records the history.
    pub(super) rendering: Handle,
    pub(super) registry: Registry,
    pub(super) guard: Option<Guard>,
    pub(super) refusals: Refusals,
    pub(super) logs: LogHandle,
}

impl PageParts {
    /// The pages of `app`. Starts to record the history of its pools.
    pub(super) fn assemble(self, app: &App) -> AdminState {
        let Self { rendering, mut registry, guard, refusals, logs } = self;
        let clock = app.clock;
        let (views, decisions, dump) = (app.views.clone(), app.processor.decisions.clone(), app.dump.clone());
        let explanations = decisions.clone();
        let kept = {
            let processor = app.processor.clone();
            move || processor.picker.config().settings.explain.kept
        };
        let kept_of_decisions = kept.clone();
        let (to_explain, to_limit, to_end) = (app.processor.clone(), app.processor.clone(), app.processor.clone());
        let metrics = app.telemetry.metrics.clone();
        let (rejections, degraded) = (metrics.clone(), metrics.clone());
        let (history, warnings) = record_history(app, &rendering);
        registry.sub_registry_with_prefix(PREFIX).register_collector(Box::new(WarningCollector(warnings.clone())));
        let (policies, recorder) = (app.processor.picker.policies.clone(), app.processor.picker.recorder.clone());
        AdminState {
            history,
            warnings,
            parts: process_parts(app),
            pages: rendering,
            metrics: Arc::new(MetricsPage::new(registry)),
            readiness: app.readiness.clone(),
            pools: Arc::new(move || views.load().to_vec()),
            decisions: Arc::new(move |limit| decisions.to_json(kept_of_decisions(), clock.now(), limit)),
            config: Arc::new(move || dump.load().to_json()),
            explain: Arc::new(move |asked: ExplainRequest| {
                let processor = to_explain.clone();
                Box::pin(async move { explain(&processor.picker, &asked, clock.now()).await })
            }),
            reservations: reservations(app),
            ending: Arc::new(move |EndSession { session_id, tenant }: EndSession| {
                let ended = to_end.picker.end_session(
                    tenant.as_deref(),
                    session_id.as_deref(),
                    SessionEnd::Admin,
                    clock.now(),
                )?;
                serde_json::to_value(ended).map_err(|e| RequestError::new(Reason::Internal, e.to_string()))
            }),
            explain_recorded: Arc::new(move |id| {
                let (decisions, recorder, kept) = (explanations.clone(), recorder.clone(), kept());
                Box::pin(async move { recording::explain(&decisions, kept, recorder, id).await })
            }),
            max_explained_bytes: Arc::new(move || {
                usize::try_from(to_limit.picker.config().limits.max_body_bytes).unwrap_or(usize::MAX)
            }),
            policies,
            rejections: Arc::new(move || rejections.rejection_counts()),
            pressure: metrics.pressure.clone(),
            degraded: Arc::new(move || degraded.degraded.occurred()),
            replica: app.sync.as_ref().map(|sync| sync.replica().clone()),
            guard,
            hosts: app.settings.server.admin_hosts.clone(),
            refusals,
            logs,
            clock,
        }
    }
}

/// Records the history of the pools of `app` for as long as the runtime `rendering` runs.
fn record_history(app: &App, rendering: &Handle) -> (Arc<History>, Arc<LatestWarnings>) {
    let (history, warnings) = (Arc::<History>::default(), Arc::<LatestWarnings>::default());
    let (recorded, latest) = (history.clone(), warnings.clone());
    let (views, metrics, clock) = (app.views.clone(), app.telemetry.metrics.clone(), app.clock);
    rendering.spawn(async move {
        let update = |views: &[PoolView]| latest.update(views, &metrics, &recorded, clock);
        recorded.follow(|| views.load(), update, &metrics, clock).await;
    });
    (history, warnings)
}

fn process_parts(app: &App) -> ProcessParts {
    let dump = app.dump.clone();
    ProcessParts {
        metrics: app.telemetry.metrics.clone(),
        certificates: app.certificates(),
        uses_redis: Arc::new(move || dump.load().redis.is_some()),
        nats: app.sync.as_ref().map(Sync::link),
    }
}

/// The reservations of `app`.
fn reservations(app: &App) -> ReservationAccess {
    let (clock, to_reserve, to_list) = (app.clock, app.processor.clone(), app.processor.clone());
    let to_release = app.processor.clone();
    ReservationAccess {
        reserve: Arc::new(move |asked: ReserveRequest| {
            let processor = to_reserve.clone();
            Box::pin(async move { reserve(processor, &asked, clock).await })
        }),
        list: Arc::new(move || serde_json::json!(to_list.picker.reservations(clock.now()))),
        release: Arc::new(move |id| {
            let id = ReservationId::read(id);
            id.is_some_and(|id| to_release.picker.release_reservation(id, clock.now()))
        }),
        default_timeout: DEFAULT_TIMEOUT,
        max_timeout: MAX_TIMEOUT,
    }
}

/// Makes a reservation, and ends it after its time-out.
async fn reserve(
    processor: Arc<Processor>,
    asked: &ReserveRequest,
    clock: Clock,
) -> Result<serde_json::Value, RequestError> {
    let internal = |message: String| RequestError::new(Reason::Internal, message);
    let id = rng::system_secret().ok_or_else(|| internal("the system has no random numbers".to_owned()))?;
    let (picker, timeout) = (&processor.picker, asked.timeout);
    let (query, held) = (explain_query(&asked.request, clock.now()), (ReservationId(id), timeout));
    let reserved = reserving::reserve(picker, &picker.config(), query, held, || clock.now(), warmer::run).await?;
    let json = serde_json::to_value(reserved).map_err(|error| internal(error.to_string()));
    tokio::spawn(async move {
        tokio::time::sleep(timeout).await;
        processor.picker.expire_reservations(clock.now());
    });
    json
}

fn explain_query(asked: &ExplainRequest, now: Timestamp) -> ExplainQuery<'_> {
    let ExplainRequest { pool, path, headers, body } = asked;
    ExplainQuery { pool: pool.as_deref(), path, headers, body, now }
}

async fn explain(picker: &Picker, asked: &ExplainRequest, now: Timestamp) -> Result<serde_json::Value, RequestError> {
    let query = explain_query(asked, now);
    let explained = explain::explain(picker, &picker.config(), query, warmer::run).await?;
    serde_json::to_value(explained).map_err(|e| RequestError::new(Reason::Internal, e.to_string()))
}
