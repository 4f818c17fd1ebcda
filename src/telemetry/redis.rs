//! Metrics of Redis: the connection, quotas, tenant records and SLO profiles.

use super::counts;
use attache_types::labels::Counts;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::Arc;

attache_types::labels! {
    /// Why the quota store did not decide about a request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum StoreFailure {
        /// There was no connection to Redis.
        Away => "away",
        /// Redis did not respond in time.
        Late => "late",
        /// Too many calls were in flight.
        Busy => "busy",
        /// Redis returned an error, or the connection broke.
        Error => "error",
    }
}

attache_types::labels! {
    /// The result of the lookup of a tenant's record.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RecordOutcome {
        /// Redis has a valid record of the tenant.
        Found => "found",
        /// Redis has no record of the tenant.
        Unknown => "unknown",
        /// Redis has an invalid record of the tenant.
        Malformed => "malformed",
        /// Redis did not respond, and the last known record is used.
        Stale => "stale",
    }
}

/// Redis metrics of the whole process.
#[derive(Debug)]
pub struct RedisMetrics {
    /// 1 while Redis is connected, else 0.
    pub connected: Gauge,
    /// Number of valid SLO profiles.
    pub good_profiles: Gauge,
    /// Number of invalid SLO profiles.
    pub malformed_profiles: Gauge,
    /// Number of failed reads of SLO profiles.
    pub failed_profile_looks: Counter,
    /// Number of requests whose end was never stored in Redis.
    pub lost_ends: Counter,
    /// Requests about which the quota store did not decide.
    pub store_failures: Arc<Counts<StoreFailure>>,
    /// Lookups of tenants' records.
    pub records: Arc<Counts<RecordOutcome>>,
}

impl RedisMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let connected = Gauge::default();
        registry.register("redis_connected", "1 while Attaché has a connection to Redis", connected.clone());
        let profiles = Family::<[(&'static str, &'static str); 1], Gauge>::default();
        let help = "SLO profiles in Redis: `good` or `malformed`";
        registry.register("redis_slo_profiles", help, profiles.clone());
        let failed_profile_looks = Counter::default();
        let help = "attempts to read SLO profiles from Redis that failed";
        registry.register("redis_slo_profile_failures", help, failed_profile_looks.clone());
        let help = "requests without a response of Redis about their limits: `away`, `late`, `busy`, `error`";
        let store_failures = counts::register(registry, "limit_store_failures", help, "reason");
        let lost_ends = Counter::default();
        let help = "ended requests that Redis does not know of; it frees their slots after ten minutes";
        registry.register("limit_ends_lost", help, lost_ends.clone());
        let help = "lookups of tenant records in Redis: `found`, `unknown`, `malformed`, `stale` because Redis did not \
                    respond";
        let records = counts::register(registry, "user_records", help, "outcome");
        let profiles_that_are = |state| profiles.get_or_create_owned(&[("state", state)]);
        Self {
            connected,
            good_profiles: profiles_that_are("good"),
            malformed_profiles: profiles_that_are("malformed"),
            failed_profile_looks,
            lost_ends,
            store_failures,
            records,
        }
    }
}
