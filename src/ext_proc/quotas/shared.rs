//! What of the limits stands in Redis: what tenants and models have had, and what single tenants may have.

use super::{Begun, Permit, Quotas, Store};
use crate::warmer::Warming;
use attache_quota::{Claim, Limits, OnStoreFailure, OnUnknownUser, Refused};
use attache_redis_store::quota_store::StoreError;
use attache_redis_store::quota_store::users::{Found, UserRecords};
use attache_redis_store::redis_link::{LinkError, RedisLink};
use attache_telemetry::metrics::Metrics;
use attache_telemetry::redis::{RecordOutcome, StoreFailure};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use futures_util::FutureExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// A Redis, and how requests deal with it.
#[derive(Clone, Debug)]
pub struct Shared {
    /// The Redis.
    pub link: Arc<RedisLink>,
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
    /// The request goes on, with what is booked for it, where anything is. A permit that nobody takes gives everything back.
    Granted(Option<Permit>),
    /// Its tenant has had what it may have.
    Refused(Refused),
    /// Its tenant has no record, and needs one.
    Unknown,
}

/// An answer that is on its way.
#[derive(Debug)]
pub(super) struct Answer {
    claim: Claim,
    told: oneshot::Receiver<Result<Verdict, StoreError>>,
}

/// What the claimant may have.
pub(super) enum Limited {
    /// That is in the claim now.
    Known(Claim),
    /// It has to be read first.
    Unread(Begun),
}

impl Quotas {
    /// The records that say what `tenant` may have, and for how long they count, unless the settings name it themselves.
    fn records_of(&self, tenant: &str) -> Option<(&Arc<UserRecords>, Duration)> {
        let settings = self.settings.user_records.filter(|_| !tenant.is_empty())?;
        let shared = self.shared.as_ref().filter(|_| !self.settings.overrides.contains_key(tenant))?;
        Some((&shared.users, settings.ttl))
    }

    /// What a tenant may have of whom that was found; `None` when it is refused for that. Who has no record may have what is the `default`.
    fn by_record(&self, found: Found, default: &Limits) -> Option<Limits> {
        let unknown = self.settings.user_records.map(|settings| settings.unknown).unwrap_or_default();
        match (found, unknown) {
            (Found::Record(record), _) => Some(record.limits(default)),
            (Found::Nothing | Found::Malformed, OnUnknownUser::Default) => Some(*default),
            (Found::Nothing | Found::Malformed, OnUnknownUser::Refuse) => None,
        }
    }

    /// The claim with what the tenant's record says, where such records count.
    pub(super) fn with_record(
        self: &Arc<Self>,
        claim: Claim,
        first: Timestamp,
        now: Timestamp,
    ) -> Result<Limited, RequestError> {
        let Some((users, ttl)) = self.records_of(&claim.name) else { return Ok(Limited::Known(claim)) };
        let known = users.known(&claim.name, ttl, now);
        let limits = known.and_then(|known| self.by_record(known.found, &claim.limits));
        match (known.map(|known| known.is_fresh), limits) {
            (Some(true), None) => Err(unknown(&claim)),
            // Who had no record then, and needs one, may have one by now.
            (_, None) => Ok(Limited::Unread(self.ask(claim, true, first, now))),
            (is_fresh, Some(limits)) => {
                if is_fresh != Some(true) {
                    self.read_again(users, claim.name.clone(), now);
                }
                Ok(Limited::Known(Claim { limits, ..claim }))
            }
        }
    }

    /// Reads a tenant's record beside its requests, which do not wait for that; while Redis gives no answer what was read before counts.
    fn read_again(self: &Arc<Self>, users: &Arc<UserRecords>, tenant: Arc<str>, now: Timestamp) {
        let Some(again) = users.again(&tenant) else { return };
        let (quotas, users) = (self.clone(), users.clone());
        users.link().runtime().clone().spawn(async move {
            if let Err(error) = quotas.found(&users, &tenant, now).await {
                tracing::debug!(%error, "record of a tenant can't be read again; the old one stays in effect");
            }
            drop(again);
        });
    }

    /// Asks Redis to book a request, or to say before what its tenant may have, when its record is `unread`. What the request has waited since
    /// `first` is not waited again.
    pub(super) fn ask(self: &Arc<Self>, claim: Claim, unread: bool, first: Timestamp, now: Timestamp) -> Begun {
        let (tell, told) = oneshot::channel();
        let Some(shared) = &self.shared else { return Begun::Granted(None) };
        let (quotas, asked) = (self.clone(), claim.clone());
        let task = shared.link.runtime().spawn(async move { drop(tell.send(quotas.judge(asked, unread, now).await)) });
        let call = tokio::time::timeout(shared.timeout.saturating_sub(now.since(first)), task).map(drop);
        Begun::Asked(Warming::call(0, call), Answer { claim, told })
    }

    async fn judge(self: Arc<Self>, mut claim: Claim, unread: bool, now: Timestamp) -> Result<Verdict, StoreError> {
        if let Some((users, _)) = self.records_of(&claim.name).filter(|_| unread) {
            let found = self.found(users, &claim.name, now).await?;
            match self.by_record(found, &claim.limits) {
                Some(limits) => claim.limits = limits,
                None => return Ok(Verdict::Unknown),
            }
        }
        if claim.limits.is_unlimited() {
            return Ok(Verdict::Granted(None));
        }
        let taken = match &self.store {
            Store::Memory(book) => self.take(book, &claim),
            Store::Redis(redis) => {
                let answer = redis.take(&claim, self.wall()).await?;
                answer.map(|(taken, place)| Permit {
                    quotas: self.clone(),
                    name: claim.name.clone(),
                    taken,
                    place: Some(place),
                    settled: false,
                })
            }
        };
        Ok(taken.map_or_else(Verdict::Refused, |permit| Verdict::Granted(Some(permit))))
    }

    /// What stands in Redis of `tenant`, or stood there when it was read last.
    async fn found(&self, users: &UserRecords, tenant: &Arc<str>, now: Timestamp) -> Result<Found, LinkError> {
        let (found, outcome) = match users.read(tenant, now).await {
            Ok(found @ Found::Record(_)) => (found, RecordOutcome::Found),
            Ok(found @ Found::Nothing) => (found, RecordOutcome::Unknown),
            Ok(found @ Found::Malformed) => (found, RecordOutcome::Malformed),
            Err(error) => (users.last(tenant).ok_or(error)?, RecordOutcome::Stale),
        };
        if let Some(shared) = &self.shared {
            shared.metrics.redis.record(outcome);
        }
        Ok(found)
    }
}

fn unknown(claim: &Claim) -> RequestError {
    RequestError::new(Reason::UnknownUser, format!("user: {} is not known", claim.name))
}

impl Answer {
    /// The permit, or none when nobody can say and requests then go on.
    pub(super) fn read(mut self, quotas: &Quotas, now: Timestamp) -> Result<Option<Permit>, RequestError> {
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
        if let Some(shared) = &quotas.shared {
            shared.metrics.redis.store_failure(failure);
        }
        match quotas.shared.as_ref().map(|shared| shared.on_failure).unwrap_or_default() {
            OnStoreFailure::Allow => Ok(None),
            OnStoreFailure::Refuse => {
                Err(RequestError::new(Reason::LimitsUnknown, "the limits of the tenant can't be read now"))
            }
        }
    }
}
