//! Quotas in Redis: the counters of tenants and models, and the limits of single tenants. Calls to Redis run as tasks
//! on the runtime of its connection.

use attache_picker::quotas::{Limited, Pending, Permit, Quotas, SharedAnswer, SharedQuotas, Store};
use attache_picker::warming::Warming;
use attache_quota::{Change, Claim, Limits, OnStoreFailure, OnUnknownUser, Place, Refused, Wall};
use attache_redis_store::quota_store::users::{RecordLookup, UserRecords};
use attache_redis_store::quota_store::{RedisStore, StoreError};
use attache_redis_store::redis_link::{LinkError, RedisLink};
use attache_telemetry::metrics::Metrics;
use attache_telemetry::redis::{RecordOutcome, StoreFailure};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use futures_util::FutureExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// The Redis store of one [`Quotas`].
#[derive(Clone, Debug)]
pub struct RedisQuotas {
    /// The connection to Redis.
    pub link: Arc<RedisLink>,
    /// The counters, if the settings keep them in Redis.
    pub store: Option<Arc<RedisStore>>,
    /// Records with the limits of single tenants. Used if the settings have `user_records`.
    pub users: Arc<UserRecords>,
    /// How long one request waits for all its calls together.
    pub timeout: Duration,
    /// How a request is handled after a failure or timeout.
    pub on_failure: OnStoreFailure,
    /// Counters of Redis.
    pub metrics: Arc<Metrics>,
}

/// The result of a quota check in Redis.
#[derive(Debug)]
enum Verdict {
    /// The request may proceed, with this reservation if it has limits. Dropping the permit releases it.
    Granted(Option<Permit>),
    /// A limit is exceeded.
    Refused(Refused),
    /// The settings require a record of the tenant, and it has none.
    Unknown,
}

/// The result of a running quota check.
#[derive(Debug)]
struct PendingVerdict {
    claim: Claim,
    on_failure: OnStoreFailure,
    metrics: Arc<Metrics>,
    receiver: oneshot::Receiver<Result<Verdict, StoreError>>,
}

impl SharedQuotas for RedisQuotas {
    fn limits(
        &self,
        quotas: &Arc<Quotas>,
        claim: Claim,
        first: Timestamp,
        now: Timestamp,
    ) -> Result<Limited, RequestError> {
        let Some(ttl) = record_ttl(quotas, &claim.name) else { return Ok(Limited::Known(claim)) };
        let known = self.users.known(&claim.name, ttl, now);
        let limits = known.and_then(|known| by_record(quotas, known.found, &claim.limits));
        match (known.map(|known| known.is_fresh), limits) {
            (Some(true), None) => Err(unknown(&claim)),
            // A stale result without a record does not reject the request: the tenant may have a record since.
            (_, None) => Ok(Limited::Unread(self.request(quotas, claim, true, first, now))),
            (is_fresh, Some(limits)) => {
                if is_fresh != Some(true) {
                    self.read_again(claim.name.clone(), now);
                }
                Ok(Limited::Known(Claim { limits, ..claim }))
            }
        }
    }

    fn take(&self, quotas: &Arc<Quotas>, claim: Claim, first: Timestamp, now: Timestamp) -> Pending {
        self.request(quotas, claim, false, first, now)
    }

    fn end(&self, name: Arc<str>, place: Place, change: Change, at: Wall) {
        if let Some(store) = &self.store {
            store.end(name, place, change, at);
        }
    }
}

impl RedisQuotas {
    /// Refreshes a tenant's record in the background. Until Redis responds, the last known record applies.
    fn read_again(&self, tenant: Arc<str>, now: Timestamp) {
        let Some(again) = self.users.again(&tenant) else { return };
        let this = self.clone();
        self.link.runtime().spawn(async move {
            if let Err(error) = this.found(&tenant, now).await {
                tracing::debug!(%error, "refresh of a tenant's record failed; the last known one stays in effect");
            }
            drop(again);
        });
    }

    /// Starts a quota check: reads the tenant's record first if it is `unread`, then reserves the request. The time
    /// that the request has waited since `first` counts against the timeout.
    fn request(&self, quotas: &Arc<Quotas>, claim: Claim, unread: bool, first: Timestamp, now: Timestamp) -> Pending {
        let (sender, receiver) = oneshot::channel();
        let (this, quotas, claimed) = (self.clone(), quotas.clone(), claim.clone());
        let task = self
            .link
            .runtime()
            .spawn(async move { drop(sender.send(this.judge(&quotas, claimed, unread, now).await)) });
        let call = tokio::time::timeout(self.timeout.saturating_sub(now.since(first)), task).map(drop);
        let answer = PendingVerdict { claim, on_failure: self.on_failure, metrics: self.metrics.clone(), receiver };
        Pending { work: Warming::call(0, Box::pin(call)), answer: Box::new(answer) }
    }

    async fn judge(
        &self,
        quotas: &Arc<Quotas>,
        mut claim: Claim,
        unread: bool,
        now: Timestamp,
    ) -> Result<Verdict, StoreError> {
        if unread && record_ttl(quotas, &claim.name).is_some() {
            let found = self.found(&claim.name, now).await?;
            match by_record(quotas, found, &claim.limits) {
                Some(limits) => claim.limits = limits,
                None => return Ok(Verdict::Unknown),
            }
        }
        if claim.limits.is_unlimited() {
            return Ok(Verdict::Granted(None));
        }
        let taken = match (quotas.store(), &self.store) {
            (Store::Memory(book), _) => quotas.take(book, &claim),
            (Store::Shared, Some(redis)) => {
                let answer = redis.take(&claim, quotas.wall()).await?;
                answer.map(|(taken, place)| Permit::new(quotas, &claim, taken, Some(place)))
            }
            // No store is configured for the counters.
            (Store::Shared, None) => return Ok(Verdict::Granted(None)),
        };
        Ok(taken.map_or_else(Verdict::Refused, |permit| Verdict::Granted(Some(permit))))
    }

    /// The tenant's record in Redis; if Redis fails, the last known one.
    async fn found(&self, tenant: &Arc<str>, now: Timestamp) -> Result<RecordLookup, LinkError> {
        let (found, outcome) = match self.users.read(tenant, now).await {
            Ok(found @ RecordLookup::Record(_)) => (found, RecordOutcome::Found),
            Ok(found @ RecordLookup::Nothing) => (found, RecordOutcome::Unknown),
            Ok(found @ RecordLookup::Malformed) => (found, RecordOutcome::Malformed),
            Err(error) => (self.users.last(tenant).ok_or(error)?, RecordOutcome::Stale),
        };
        self.metrics.redis.records.count(outcome);
        Ok(found)
    }
}

/// How long a record of `tenant` is fresh. `None` if no record applies: the request has no tenant, or the settings have
/// an override for it, or no records are configured.
fn record_ttl(quotas: &Quotas, tenant: &str) -> Option<Duration> {
    let settings = quotas.settings();
    let records = settings.user_records.filter(|_| !tenant.is_empty() && !settings.overrides.contains_key(tenant))?;
    Some(records.ttl)
}

/// The limits of a tenant with this record. Without a valid record, the settings choose between the `default` limits
/// and a rejection (`None`).
fn by_record(quotas: &Quotas, found: RecordLookup, default: &Limits) -> Option<Limits> {
    let unknown = quotas.settings().user_records.map(|settings| settings.unknown).unwrap_or_default();
    match (found, unknown) {
        (RecordLookup::Record(record), _) => Some(record.limits(default)),
        (RecordLookup::Nothing | RecordLookup::Malformed, OnUnknownUser::Default) => Some(*default),
        (RecordLookup::Nothing | RecordLookup::Malformed, OnUnknownUser::Refuse) => None,
    }
}

fn unknown(claim: &Claim) -> RequestError {
    RequestError::new(Reason::UnknownUser, format!("user: {} is not known", claim.name))
}

impl SharedAnswer for PendingVerdict {
    fn read(mut self: Box<Self>, quotas: &Quotas, now: Timestamp) -> Result<Option<Permit>, RequestError> {
        let failure = match self.receiver.try_recv() {
            Ok(Ok(Verdict::Granted(permit))) => return Ok(permit),
            Ok(Ok(Verdict::Refused(refused))) => return Err(quotas.refused(&self.claim, refused, now)),
            Ok(Ok(Verdict::Unknown)) => return Err(unknown(&self.claim)),
            Ok(Err(error)) => {
                tracing::debug!(%error, "quota check in Redis failed");
                match error {
                    StoreError::Link(LinkError::Away) => StoreFailure::Away,
                    StoreError::Link(LinkError::Busy) => StoreFailure::Busy,
                    StoreError::Link(LinkError::Failed(_)) | StoreError::Odd(_) => StoreFailure::Error,
                }
            }
            Err(_) => StoreFailure::Late,
        };
        self.metrics.redis.store_failures.count(failure);
        match self.on_failure {
            OnStoreFailure::Allow => Ok(None),
            OnStoreFailure::Refuse => {
                Err(RequestError::new(Reason::LimitsUnknown, "the limits of the tenant can't be read now"))
            }
        }
    }
}
