//! What tenants may have, as the exchange knows it: who may go on, and what is booked until its answer has ended.
//!
//! [`crate::quota`] decides, in this process or, by the same figures, in a Redis that several pickers share. What is let through holds a
//! [`Permit`], which gives everything back when it is dropped and keeps what was had when it is settled. With Redis a decision waits for the
//! answer as it waits for tokens: it comes back as something to run, and is made again when that has run.

use super::decide::Question;
use super::prefix::Warming;
use super::tenant::Tenant;
use crate::clock::{Clock, Timestamp};
use crate::config::settings::TenantSettings;
use crate::error::{Reason, RequestError};
use crate::quota::{Book, Bound, Had, Limits, Refused, Taken, Wall};
use crate::scheduling::RequestFacts;
use crate::telemetry::metrics::Metrics;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

#[cfg(feature = "redis")]
pub use shared::Shared;

/// Where it is counted.
#[derive(Clone, Debug)]
pub enum Store {
    /// In this process.
    Memory(Arc<Book>),
    /// In Redis.
    #[cfg(feature = "redis")]
    Redis(Arc<Shared>),
}

/// What tenants may have, and have had.
#[derive(Debug)]
pub struct Quotas {
    settings: TenantSettings,
    store: Store,
    metrics: Arc<Metrics>,
    clock: Clock,
    /// The last moment that anybody told: a stream that is dropped knows none.
    now: AtomicU64,
}

/// A request as it is counted.
#[derive(Clone, Debug)]
struct Claim {
    tenant: Arc<str>,
    limits: Limits,
    tokens: u64,
}

impl Quotas {
    /// Lets tenants have what `settings` say, counted in `store`.
    #[must_use]
    pub fn new(settings: TenantSettings, store: Store, metrics: Arc<Metrics>, clock: Clock) -> Arc<Self> {
        Arc::new(Self { settings, store, metrics, clock, now: AtomicU64::new(0) })
    }

    /// Where it is counted: kept over reloads.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    fn wall(&self, now: Timestamp) -> Wall {
        self.now.fetch_max(now.0, Relaxed);
        Wall(self.clock.wall(now).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
    }

    /// How the request is counted; `None` when it is not: it asks for nothing that costs, or there is no limit for its tenant.
    fn claim(&self, q: &Question<'_>, facts: &RequestFacts<'_>) -> Option<Claim> {
        let costs_nothing = matches!(q.head.method(), "GET" | "HEAD" | "OPTIONS") && !q.head.is_upgrade();
        let tenant: Arc<str> = match q.head.tenant() {
            Tenant::Named(name) => name.clone(),
            Tenant::Nobody | Tenant::Unasked => "".into(),
        };
        let limits = *self.settings.limits(&tenant);
        if costs_nothing || limits.is_unlimited() {
            return None;
        }
        let answer = if q.api.generates() { facts.max_tokens.unwrap_or(self.settings.answer_tokens) } else { 0 };
        Some(Claim { tenant, limits, tokens: u64::from(facts.prompt_tokens) + u64::from(answer) })
    }

    fn refused(&self, claim: &Claim, refused: Refused, now: Timestamp) -> RequestError {
        self.metrics.by_name.tenant(&claim.tenant, now).refused(refused.bound);
        let (reason, what) = match refused.bound {
            Bound::RequestsPerMinute => (Reason::RequestsPerMinute, "RPM"),
            Bound::TokensPerMinute => (Reason::TokensPerMinute, "TPM"),
            Bound::RequestsPerDay => (Reason::RequestsPerDay, "requests per day"),
            Bound::TokensPerDay => (Reason::TokensPerDay, "tokens per day"),
            Bound::Concurrency => (Reason::Concurrency, "concurrency"),
        };
        // AIBrix's words.
        let message = format!("user: {} has exceeded {what}: {}", claim.tenant, refused.limit);
        RequestError { retry_after: Some(refused.retry_after), ..RequestError::new(reason, message) }
    }
}

/// What a request was let through with, until its answer has ended or it is dropped.
#[derive(Debug)]
pub struct Permit {
    quotas: Arc<Quotas>,
    tenant: Arc<str>,
    taken: Taken,
    #[cfg(feature = "redis")]
    place: Option<crate::quota_store::Place>,
    settled: bool,
}

impl Permit {
    /// What its tenant has had of the minute, as AIBrix tells clients.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, String)> {
        let used = self.taken.used;
        [("x-update-rpm", used.requests), ("x-update-tpm", used.tokens)]
            .into_iter()
            .map(|(name, count)| (name, count.to_string()))
    }

    /// Its answer has ended.
    pub fn settle(mut self, had: Had, now: Timestamp) {
        self.end(had, now);
    }

    fn end(&mut self, had: Had, now: Timestamp) {
        if std::mem::replace(&mut self.settled, true) {
            return;
        }
        let at = self.quotas.wall(now);
        match &self.quotas.store {
            Store::Memory(book) => book.end(&self.tenant, &self.taken, had, at),
            #[cfg(feature = "redis")]
            Store::Redis(shared) => {
                if let Some(place) = self.place {
                    shared.redis.end(self.tenant.clone(), place, self.taken.change(had, at), at);
                }
            }
        }
    }
}

/// It never reached a server.
impl Drop for Permit {
    fn drop(&mut self) {
        self.end(Had::Nothing, Timestamp(self.quotas.now.load(Relaxed)));
    }
}

/// Whether a request may go on, as far as its tenant is concerned.
#[derive(Debug, Default)]
pub struct Allowance {
    state: State,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Unasked,
    /// The store has been asked.
    #[cfg(feature = "redis")]
    Asked(shared::Answer),
    /// It may, with what is booked for it, where anything is.
    Granted(Option<Permit>),
}

impl Allowance {
    /// Asks for the request that `q` is about. What it gives must run, and then be asked again.
    ///
    /// # Errors
    /// The refusal that the client gets.
    pub fn ask(
        &mut self,
        quotas: &Arc<Quotas>,
        q: &Question<'_>,
        facts: &RequestFacts<'_>,
    ) -> Result<Option<Warming>, RequestError> {
        let permit = match std::mem::take(&mut self.state) {
            State::Granted(permit) => permit,
            #[cfg(feature = "redis")]
            State::Asked(answer) => answer.read(quotas, q.now)?,
            State::Unasked => match (quotas.claim(q, facts), &quotas.store) {
                (None, _) => None,
                (Some(claim), Store::Memory(book)) => Some(quotas.take(book, &claim, q.now)?),
                #[cfg(feature = "redis")]
                (Some(claim), Store::Redis(shared)) => {
                    let (call, answer) = shared.ask(quotas, claim, q.now);
                    self.state = State::Asked(answer);
                    return Ok(Some(call));
                }
            },
        };
        self.state = State::Granted(permit);
        Ok(None)
    }

    /// What is booked for the request, which goes on.
    pub fn take(&mut self) -> Option<Permit> {
        match std::mem::take(&mut self.state) {
            State::Granted(permit) => permit,
            _ => None,
        }
    }
}

impl Quotas {
    fn take(self: &Arc<Self>, book: &Book, claim: &Claim, now: Timestamp) -> Result<Permit, RequestError> {
        let taken = book.take(&claim.tenant, &claim.limits, claim.tokens, self.wall(now));
        let taken = taken.map_err(|refused| self.refused(claim, refused, now))?;
        Ok(Permit {
            quotas: self.clone(),
            tenant: claim.tenant.clone(),
            taken,
            #[cfg(feature = "redis")]
            place: None,
            settled: false,
        })
    }
}

#[cfg(feature = "redis")]
mod shared {
    //! Limits that several pickers share.

    use super::*;
    use crate::config::settings::OnStoreFailure;
    use crate::quota_store::{RedisStore, StoreError};
    use crate::telemetry::metrics::StoreFailure;
    use futures_util::FutureExt;
    use std::time::Duration;
    use tokio::sync::oneshot;

    /// A Redis, and how requests deal with it.
    #[derive(Debug)]
    pub struct Shared {
        /// The Redis.
        pub redis: Arc<RedisStore>,
        /// How long a request waits.
        pub timeout: Duration,
        /// What becomes of it then.
        pub on_failure: OnStoreFailure,
    }

    /// What a request's question came to: a permit, or why there is none. A permit that nobody takes gives everything back.
    type Reply = Result<Result<Permit, Refused>, StoreError>;

    /// An answer that is on its way.
    #[derive(Debug)]
    pub(super) struct Answer {
        claim: Claim,
        on_failure: OnStoreFailure,
        told: oneshot::Receiver<Reply>,
    }

    impl Shared {
        pub(super) fn ask(&self, quotas: &Arc<Quotas>, claim: Claim, now: Timestamp) -> (Warming, Answer) {
            let (tell, told) = oneshot::channel();
            let (redis, quotas, at) = (self.redis.clone(), quotas.clone(), quotas.wall(now));
            let asked = claim.clone();
            let task = self.redis.runtime().spawn(async move {
                let reply = redis.take(&asked.tenant, &asked.limits, asked.tokens, at).await;
                let permit = |(taken, place)| Permit {
                    quotas,
                    tenant: asked.tenant.clone(),
                    taken,
                    place: Some(place),
                    settled: false,
                };
                drop(tell.send(reply.map(|answer| answer.map(permit))));
            });
            let call = tokio::time::timeout(self.timeout, task).map(drop);
            (Warming::Call(Box::pin(call)), Answer { claim, on_failure: self.on_failure, told })
        }
    }

    impl Answer {
        /// The permit, or none when nobody can say and requests then go on.
        pub(super) fn read(mut self, quotas: &Quotas, now: Timestamp) -> Result<Option<Permit>, RequestError> {
            let failure = match self.told.try_recv() {
                Ok(Ok(Ok(permit))) => return Ok(Some(permit)),
                Ok(Ok(Err(refused))) => return Err(quotas.refused(&self.claim, refused, now)),
                Ok(Err(error)) => {
                    tracing::debug!(%error, "limits of a tenant are not known");
                    match error {
                        StoreError::Away => StoreFailure::Away,
                        StoreError::Busy => StoreFailure::Busy,
                        StoreError::Failed(_) | StoreError::Odd(_) => StoreFailure::Error,
                    }
                }
                Err(_) => StoreFailure::Late,
            };
            quotas.metrics.store_failure(failure);
            match self.on_failure {
                OnStoreFailure::Allow => Ok(None),
                OnStoreFailure::Refuse => {
                    Err(RequestError::new(Reason::LimitsUnknown, "what the tenant may have can't be looked up now"))
                }
            }
        }
    }
}
