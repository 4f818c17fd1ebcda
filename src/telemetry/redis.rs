//! Metrics of Redis: the connection, quotas, tenant records and SLO profiles.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Why the quota store did not decide about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreFailure {
    /// There was no connection to Redis.
    Away,
    /// Redis did not respond in time.
    Late,
    /// Too many calls were in flight.
    Busy,
    /// Redis returned an error, or the connection broke.
    Error,
}

impl StoreFailure {
    const ALL: [Self; 4] = [Self::Away, Self::Late, Self::Busy, Self::Error];

    fn label(self) -> &'static str {
        match self {
            Self::Away => "away",
            Self::Late => "late",
            Self::Busy => "busy",
            Self::Error => "error",
        }
    }
}

/// The result of the lookup of a tenant's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordOutcome {
    /// Redis has a valid record of the tenant.
    Found,
    /// Redis has no record of the tenant.
    Unknown,
    /// Redis has an invalid record of the tenant.
    Malformed,
    /// Redis did not respond, and the last known record is used.
    Stale,
}

impl RecordOutcome {
    const ALL: [Self; 4] = [Self::Found, Self::Unknown, Self::Malformed, Self::Stale];

    fn label(self) -> &'static str {
        match self {
            Self::Found => "found",
            Self::Unknown => "unknown",
            Self::Malformed => "malformed",
            Self::Stale => "stale",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RecordOutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
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
    store_failures: [Counter; 4],
    records: [Counter; 4],
}

impl RedisMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let connected = Gauge::default();
        registry.register("redis_connected", "1 while Attaché has a connection to Redis", connected.clone());
        let profiles = Family::<StateLabel, Gauge>::default();
        let help = "SLO profiles in Redis: `good` or `malformed`";
        registry.register("redis_slo_profiles", help, profiles.clone());
        let failed_profile_looks = Counter::default();
        let help = "attempts to read SLO profiles from Redis that failed";
        registry.register("redis_slo_profile_failures", help, failed_profile_looks.clone());
        let failures = Family::<ReasonLabel, Counter>::default();
        let help = "requests without a response of Redis about their limits: `away`, `late`, `busy`, `error`";
        registry.register("limit_store_failures", help, failures.clone());
        let lost_ends = Counter::default();
        let help = "ended requests that Redis does not know of; it frees their slots after ten minutes";
        registry.register("limit_ends_lost", help, lost_ends.clone());
        let records = Family::<RecordOutcomeLabel, Counter>::default();
        let help = "lookups of tenant records in Redis: `found`, `unknown`, `malformed`, `stale` because Redis did not \
                    respond";
        registry.register("user_records", help, records.clone());
        let state = |state| profiles.get_or_create_owned(&StateLabel { state });
        Self {
            connected,
            good_profiles: state("good"),
            malformed_profiles: state("malformed"),
            failed_profile_looks,
            lost_ends,
            store_failures: StoreFailure::ALL.map(|f| failures.get_or_create_owned(&ReasonLabel { reason: f.label() })),
            records: RecordOutcome::ALL
                .map(|o| records.get_or_create_owned(&RecordOutcomeLabel { outcome: o.label() })),
        }
    }

    /// Counts a request about which the quota store did not decide.
    pub fn store_failure(&self, failure: StoreFailure) {
        let at = StoreFailure::ALL.iter().position(|f| *f == failure);
        if let Some(counter) = at.and_then(|at| self.store_failures.get(at)) {
            counter.inc();
        }
    }

    /// The requests about which the quota store did not decide, by reason; reasons that never occurred are left out.
    #[must_use]
    pub fn failures(&self) -> Vec<(&'static str, u64)> {
        let counts = StoreFailure::ALL.iter().zip(&self.store_failures);
        counts.map(|(failure, counter)| (failure.label(), counter.get())).filter(|(_, count)| *count > 0).collect()
    }

    /// Counts the lookup of a tenant's record.
    pub fn record(&self, outcome: RecordOutcome) {
        let at = RecordOutcome::ALL.iter().position(|o| *o == outcome);
        if let Some(counter) = at.and_then(|at| self.records.get(at)) {
            counter.inc();
        }
    }
}
