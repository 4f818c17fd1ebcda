//! Records the outcomes of one request in the health of endpoints. Used for the response, and for prefill legs.

use super::event::{Event, Observer};
use attache_pool::Endpoint;
use attache_pool::health::{ClientSlot, Ejection, HealthOutcome, Observation, Verdict};
use attache_protocol::Api;
use attache_record::RequestTape;
use attache_scheduling::Pool;
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// Records the outcomes of one request, whose API and client determine how they count.
#[derive(Debug)]
pub(super) struct HealthReporter {
    pub(super) pool: Arc<Pool>,
    pub(super) tape: RequestTape,
    pub(super) api: Api,
    pub(super) client: ClientSlot,
    /// What the log calls an endpoint that is ejected.
    pub(super) role: &'static str,
}

impl HealthReporter {
    /// Records `outcome`; true if it ejects the endpoint.
    pub(super) fn record(
        &self,
        endpoint: &Endpoint,
        outcome: HealthOutcome,
        now: Timestamp,
        observer: &dyn Observer,
    ) -> bool {
        let Self { pool, tape, role, .. } = self;
        let observation = Observation { outcome, api: self.api, client: self.client };
        let verdict = tape.judge(endpoint, observation, now, pool.scheduler.health(), &pool.store);
        observer.event(Event::Health(verdict));
        if let (Verdict::Ejected, Some(Ejection { returns_in, .. })) =
            (verdict, endpoint.health.ejection(now, pool.scheduler.health()))
        {
            let (pool, endpoint) = (&*pool.name, &*endpoint.authority);
            let (cause, returns_in_s) = (outcome.label(), returns_in.as_secs_f64());
            tracing::warn!(pool, endpoint, cause, returns_in_s, "{role} ejected; a single request probes it then");
        }
        verdict == Verdict::Ejected
    }
}
