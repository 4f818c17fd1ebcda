//! What of the limits stands in Redis: what tenants and models have had, and what single tenants may have. Questions
//! run as tasks on the runtime of the connection.

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

/// A Redis, and how the requests of one [`Quotas`] deal with it.
#[derive(Clone, Debug)]
pub struct RedisQuotas {
    /// The Redis.
    pub link: Arc<RedisLink>,
    /// Counts, where the settings say to count there.
    pub store: Option<Arc<RedisStore>>,
    /// Tenants' own limits there; they are looked up where the settings say so.
    pub users: Arc<UserRecords>,
    /// How long a request waits, for all that it asks.
    pub timeout: Duration,
    /// What becomes of it then.
    pub on_failure: OnStoreFailure,
    /// Counters of Redis.
    pub metrics: Arc<Metrics>,
}

/// What a question came to.
#[derive(Debug)]
enum Verdict {
    /// The request goes on, with what is booked for it, where anything is. A permit that nobody takes gives everything
    /// back.
    Granted(Option<Permit>),
    /// Its tenant has had what it may have.
    Refused(Refused),
    /// Its tenant has no record, and needs one.
    Unknown,
}

/// An answer that is on its way.
#[derive(Debug)]
struct Answer {
    claim: Claim,
    on_failure: OnStoreFailure,
    metrics: Arc<Metrics>,
    told: oneshot::Receiver<Result<Verdict, StoreError>>,
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
            // Who had no record then, and needs one, may have one by now.
            (_, None) => Ok(Limited::Unread(self.ask(quotas, claim, true, first, now))),
            (is_fresh, Some(limits)) => {
                if is_fresh != Some(true) {
                    self.read_again(claim.name.clone(), now);
                }
                Ok(Limited::Known(Claim { limits, ..claim }))
            }
        }
    }

    fn take(&self, quotas: &Arc<Quotas>, claim: Claim, first: Timestamp, now: Timestamp) -> Pending {
        self.ask(quotas, claim, false, first, now)
    }

    fn end(&self, name: Arc<str>, place: Place, change: Change, at: Wall) {
        if let Some(store) = &self.store {
            store.end(name, place, change, at);
        }
    }
}

impl RedisQuotas {
    /// Reads a tenant's record beside its requests, which do not wait for that; while Redis gives no answer what was
    /// read before counts.
    fn read_again(&self, tenant: Arc<str>, now: Timestamp) {
        let Some(again) = self.users.again(&tenant) else { return };
        let this = self.clone();
        self.link.runtime().spawn(async move {
            if let Err(error) = this.found(&tenant, now).await {
                tracing::debug!(%error, "record of a tenant can't be read again; the old one stays in effect");
            }
            drop(again);
        });
    }

    /// Asks Redis to book a request, or to say before what its tenant may have, when its record is `unread`. What the
    /// request has waited since `first` is not waited again.
    fn ask(&self, quotas: &Arc<Quotas>, claim: Claim, unread: bool, first: Timestamp, now: Timestamp) -> Pending {
        let (tell, told) = oneshot::channel();
        let (this, quotas, asked) = (self.clone(), quotas.clone(), claim.clone());
        let task =
            self.link.runtime().spawn(async move { drop(tell.send(this.judge(&quotas, asked, unread, now).await)) });
        let call = tokio::time::timeout(self.timeout.saturating_sub(now.since(first)), task).map(drop);
        let answer = Answer { claim, on_failure: self.on_failure, metrics: self.metrics.clone(), told };
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
            // Nowhere to count.
            (Store::Shared, None) => return Ok(Verdict::Granted(None)),
        };
        Ok(taken.map_or_else(Verdict::Refused, |permit| Verdict::Granted(Some(permit))))
    }

    /// What stands in Redis of `tenant`, or stood there when it was read last.
    async fn found(&self, tenant: &Arc<str>, now: Timestamp) -> Result<RecordLookup, LinkError> {
        let (found, outcome) = match self.users.read(tenant, now).await {
            Ok(found @ RecordLookup::Record(_)) => (found, RecordOutcome::Found),
            Ok(found @ RecordLookup::Nothing) => (found, RecordOutcome::Unknown),
            Ok(found @ RecordLookup::Malformed) => (found, RecordOutcome::Malformed),
            Err(error) => (self.users.last(tenant).ok_or(error)?, RecordOutcome::Stale),
        };
        self.metrics.redis.record(outcome);
        Ok(found)
    }
}

/// How long the record of `tenant` counts once it has been read; `None` when it has none, or the settings name the
/// tenant themselves.
fn record_ttl(quotas: &Quotas, tenant: &str) -> Option<Duration> {
    let settings = quotas.settings();
    let records = settings.user_records.filter(|_| !tenant.is_empty() && !settings.overrides.contains_key(tenant))?;
    Some(records.ttl)
}

/// What a tenant may have of whom that was found; `None` when it is refused for that. Who has no record may have what
/// is the `default`.
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

impl SharedAnswer for Answer {
    fn read(mut self: Box<Self>, quotas: &Quotas, now: Timestamp) -> Result<Option<Permit>, RequestError> {
        let failure = match self.told.try_recv() {
            Ok(Ok(Verdict::Granted(permit))) => return Ok(permit),
            Ok(Ok(Verdict::Refused(refused))) => return Err(quotas.refused(&self.claim, refused, now)),
            Ok(Ok(Verdict::Unknown)) => return Err(unknown(&self.claim)),
            Ok(Err(error)) => {
                tracing::debug!(%error, "limits of a tenant can't be read");
                match error {
                    StoreError::Link(LinkError::Away) => StoreFailure::Away,
                    StoreError::Link(LinkError::Busy) => StoreFailure::Busy,
                    StoreError::Link(LinkError::Failed(_)) | StoreError::Odd(_) => StoreFailure::Error,
                }
            }
            Err(_) => StoreFailure::Late,
        };
        self.metrics.redis.store_failure(failure);
        match self.on_failure {
            OnStoreFailure::Allow => Ok(None),
            OnStoreFailure::Refuse => {
                Err(RequestError::new(Reason::LimitsUnknown, "the limits of the tenant can't be read now"))
            }
        }
    }
}
