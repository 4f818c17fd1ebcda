//! Quotas of tenants and models: checks the limits of a request, and reserves its usage until its response has ended.
//!
//! [`attache_quota`] counts usage, either in this process or in a store that replicas share ([`SharedQuotas`]). An
//! allowed request holds a [`Permit`]. Dropping the permit releases the reservation; settling it records the actual
//! usage.
//!
//! A shared store takes time. Its calls are background work, like tokenizing: the decision returns the work, and is
//! made again after the work has run. The same holds if the limits of a tenant must first be read from the store.

use super::Picker;
use super::decide::RequestView;
use super::reservations::ReservedRequest;
use super::tenant::Tenant;
use super::warming::Warming;
use crate::event::{Event, NameEvent, Observer, ReservationOutcome};
use ahash::AHashSet;
use attache_protocol::Api;
use attache_quota::{
    Book, Bound, Change, Claim, Had, Limits, Place, Refused, Subject, Taken, TenantSettings, UnknownPaths, Wall,
};
use attache_request::agent::AgentIdentity;
use attache_scheduling::RequestFacts;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

/// Where usage is counted.
#[derive(Clone, Debug)]
pub enum Store {
    /// In this process.
    Memory(Arc<Book>),
    /// In the store of [`Quotas::sharing`], together with other replicas.
    Shared,
}

/// A store outside of the process: counters that replicas share, and limits of single tenants. Each call returns
/// background work, and its result is read after the work has run.
pub trait SharedQuotas: fmt::Debug + Send + Sync {
    /// The claim with the limits from its tenant's record, if records are configured; or a call that must run first.
    /// The time since `first` counts against the timeout of that call.
    ///
    /// # Errors
    /// The tenant has no record, and the settings require one.
    fn limits(
        &self,
        quotas: &Arc<Quotas>,
        claim: Claim,
        first: Timestamp,
        now: Timestamp,
    ) -> Result<Limited, RequestError>;

    /// Reserves `claim`. The time that the request has waited since `first` counts against the timeout.
    fn take(&self, quotas: &Arc<Quotas>, claim: Claim, first: Timestamp, now: Timestamp) -> Pending;

    /// Records that a request with a reservation at `place` ended at `at`; `change` corrects its usage.
    fn end(&self, name: Arc<str>, place: Place, change: Change, at: Wall);
}

/// Limits of one claim.
#[derive(Debug)]
pub enum Limited {
    /// The claim contains the limits.
    Known(Claim),
    /// This call reads the limits and then reserves the claim.
    Unread(Pending),
}

/// A call to a [`SharedQuotas`].
#[derive(Debug)]
pub struct Pending {
    /// Background work that must run first.
    pub work: Warming,
    /// Gives the result after that.
    pub answer: Box<dyn SharedAnswer>,
}

/// The result of a [`Pending`] call.
pub trait SharedAnswer: fmt::Debug + Send {
    /// The reservation of the request. `None` if the request is not limited, or if the store failed and the settings
    /// allow requests then.
    ///
    /// # Errors
    /// The error response for the client.
    fn read(self: Box<Self>, quotas: &Quotas, now: Timestamp) -> Result<Option<Permit>, RequestError>;
}

/// 2^32 - 1 tokens: most tokens that are reserved for the responses of one request, so that counters can't overflow.
const MAX_ANSWER: u64 = u32::MAX as u64;

/// Quotas of all tenants, or of all models.
#[derive(Debug)]
pub struct Quotas {
    subject: Subject,
    settings: TenantSettings,
    store: Store,
    shared: Option<Arc<dyn SharedQuotas>>,
    observer: Arc<dyn Observer>,
    wall: WallClock,
    /// Models that a server has answered for, where a shared store counts those of models.
    served: Mutex<AHashSet<Arc<str>>>,
}

/// Most models that count by their names in a shared store, beside those that the limits name: more than any cluster
/// serves.
const MAX_SERVED_MODELS: usize = 4_096;
/// Counts the requests for all models that no server has answered for. Clients invent names of models, and a name takes
/// some hundred bytes of a shared store for two days.
const UNSERVED_MODELS: &str = "(unserved models)";

/// The wall clock, which determines the windows of limits. Permits read it when they end, also on drop.
struct WallClock(Box<dyn Fn() -> SystemTime + Send + Sync>);

impl fmt::Debug for WallClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WallClock({:?})", (self.0)())
    }
}

impl Quotas {
    /// Quotas of `subject`s by `settings`, counted in `store` by the clock `wall`.
    #[must_use]
    pub fn new(
        subject: Subject,
        settings: TenantSettings,
        store: Store,
        observer: Arc<dyn Observer>,
        wall: impl Fn() -> SystemTime + Send + Sync + 'static,
    ) -> Self {
        let wall = WallClock(Box::new(wall));
        Self { subject, settings, store, shared: None, observer, wall, served: Mutex::default() }
    }

    /// Adds a store outside of the process, which [`Store::Shared`] and records of tenants need.
    #[must_use]
    pub fn sharing(mut self, shared: Arc<dyn SharedQuotas>) -> Self {
        self.shared = Some(shared);
        self
    }

    /// The configuration.
    #[must_use]
    pub fn settings(&self) -> &TenantSettings {
        &self.settings
    }

    /// Whether these are the quotas of tenants or of models.
    #[must_use]
    pub fn subject(&self) -> Subject {
        self.subject
    }

    /// Whether these are quotas of models, and at least one of them is limited.
    #[must_use]
    pub fn limit_models(&self) -> bool {
        let mut limits = self.settings.overrides.values().chain([&self.settings.default]);
        self.subject == Subject::Model && limits.any(|limits| !limits.is_unlimited())
    }

    /// Where usage is counted. Reloads keep it.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The current wall-clock time.
    #[must_use]
    pub fn wall(&self) -> Wall {
        Wall((self.wall.0)().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
    }

    /// What a request for so many responses (`answers`) must reserve. `None` if its method costs nothing, or if its
    /// model is unknown and the quotas are those of models.
    ///
    /// # Errors
    /// Its path belongs to no known API, and the settings reject such paths.
    fn claim(
        &self,
        q: &RequestView<'_>,
        facts: &RequestFacts<'_>,
        answers: u32,
    ) -> Result<Option<Claim>, RequestError> {
        let costs_nothing = matches!(q.head.method(), "GET" | "HEAD" | "OPTIONS") && !q.head.is_upgrade();
        if costs_nothing {
            return Ok(None);
        }
        let name: Arc<str> = match (self.subject, q.head.tenant()) {
            (Subject::Model, _) if facts.model.is_empty() => return Ok(None),
            (Subject::Model, _) if self.counts_by_name(facts.model) => facts.model.into(),
            (Subject::Model, _) => UNSERVED_MODELS.into(),
            (Subject::Tenant, Tenant::Named(name)) => name.clone(),
            (Subject::Tenant, Tenant::Missing | Tenant::Unconfigured) => "".into(),
        };
        let answers = if q.api.generates() { answers } else { 0 };
        let of = |tokens: u32| u64::from(tokens).saturating_mul(answers.into()).min(MAX_ANSWER);
        let usual = self.settings.answer_tokens;
        let asked = match q.api {
            Api::Other => u64::from(self.settings.unknown_path_tokens),
            // Model servers treat a limit of 0 as no limit.
            _ => of(facts.max_tokens.filter(|tokens| *tokens > 0).unwrap_or(usual)),
        };
        let claim = self.settings.claim(self.subject, name, facts.prompt_tokens.into(), asked);
        let rejects_unknown = self.settings.unknown_paths == UnknownPaths::Reject;
        if q.api == Api::Other && rejects_unknown && self.limits_tokens(&claim.limits) {
            let message = "the path belongs to no API whose tokens can be counted, and tokens are limited";
            return Err(RequestError::new(Reason::UnknownPath, message));
        }
        Ok(Some(claim))
    }

    /// Whether the requests of this model count by its name, and not with those of all unserved models.
    fn counts_by_name(&self, model: &str) -> bool {
        matches!(self.store, Store::Memory(_))
            || self.settings.overrides.contains_key(model)
            || self.served.lock().contains(model)
    }

    /// Records that a server has answered for this model. In memory, [`Book`] bounds the number of names.
    pub(super) fn record_served(&self, model: &Arc<str>) {
        if self.subject == Subject::Model && !model.is_empty() && !self.counts_by_name(model) {
            let mut served = self.served.lock();
            if served.len() < MAX_SERVED_MODELS {
                served.insert(model.clone());
            }
        }
    }

    /// Whether tokens are limited, or may be limited by a record of the tenant.
    fn limits_tokens(&self, limits: &Limits) -> bool {
        let bound = limits.tokens_per_minute.or(limits.tokens_per_day);
        bound.is_some() || self.settings.user_records.is_some()
    }

    /// Reserves `claim`, or returns the call that must run first. The request has waited since `first`.
    fn begin(self: &Arc<Self>, claim: Claim, first: Timestamp, now: Timestamp) -> Result<QuotaStart, RequestError> {
        let claim = match &self.shared {
            Some(shared) => match shared.limits(self, claim, first, now)? {
                Limited::Known(claim) => claim,
                Limited::Unread(pending) => return Ok(QuotaStart::Pending(pending)),
            },
            None => claim,
        };
        if claim.limits.is_unlimited() {
            return Ok(QuotaStart::Granted(None));
        }
        match (&self.store, &self.shared) {
            (Store::Memory(book), _) => self
                .take(book, &claim)
                .map(|permit| QuotaStart::Granted(Some(permit)))
                .map_err(|refused| self.refused(&claim, refused, now)),
            (Store::Shared, Some(shared)) => Ok(QuotaStart::Pending(shared.take(self, claim, first, now))),
            // No store is configured.
            (Store::Shared, None) => Ok(QuotaStart::Granted(None)),
        }
    }

    /// Reserves a claim in this process.
    ///
    /// # Errors
    /// The limit that is exceeded.
    pub fn take(self: &Arc<Self>, book: &Book, claim: &Claim) -> Result<Permit, Refused> {
        Ok(Permit::new(self, claim, book.take(claim, self.wall())?, None))
    }

    /// Counts a refused claim, and returns the error response for the client.
    pub fn refused(&self, claim: &Claim, refused: Refused, now: Timestamp) -> RequestError {
        let whose = match self.subject {
            Subject::Tenant => "user",
            Subject::Model => "model",
        };
        let counts = self.observer.named(self.subject, &claim.name, now);
        counts.event(NameEvent::Refused(refused.bound));
        let (reason, what) = match refused.bound {
            Bound::RequestsPerSecond if self.subject == Subject::Model => (Reason::ModelRequestsPerSecond, "RPS"),
            Bound::RequestsPerSecond => (Reason::RequestsPerSecond, "RPS"),
            Bound::RequestsPerMinute => (Reason::RequestsPerMinute, "RPM"),
            Bound::TokensPerMinute => (Reason::TokensPerMinute, "TPM"),
            Bound::RequestsPerDay => (Reason::RequestsPerDay, "requests per day"),
            Bound::TokensPerDay => (Reason::TokensPerDay, "tokens per day"),
            Bound::Concurrency => (Reason::Concurrency, "concurrency"),
        };
        // Requests without a tenant share one account.
        let name = if claim.name.is_empty() { "anonymous" } else { &*claim.name };
        // The same message as AIBrix's.
        let message = format!("{whose}: {name} has exceeded {what}: {}", refused.limit);
        RequestError { retry_after: Some(refused.retry_after), ..RequestError::new(reason, message) }
    }
}

/// The reservation of one request in the quotas of its tenant or of its model.
#[derive(Debug)]
pub struct Permit {
    quotas: Arc<Quotas>,
    name: Arc<str>,
    taken: Taken,
    place: Option<Place>,
    settled: bool,
}

impl Permit {
    /// A permit for the reservation `taken` of `claim`; at `place`, if a shared store counts it.
    #[must_use]
    pub fn new(quotas: &Arc<Quotas>, claim: &Claim, taken: Taken, place: Option<Place>) -> Self {
        Self { quotas: quotas.clone(), name: claim.name.clone(), taken, place, settled: false }
    }

    /// AIBrix's response headers with the tenant's usage in the current minute. None for quotas of models.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, String)> {
        let used = self.taken.used;
        let usage = [("x-update-rpm", used.requests), ("x-update-tpm", used.tokens)].into_iter();
        usage.filter(|_| self.quotas.subject == Subject::Tenant).map(|(name, count)| (name, count.to_string()))
    }

    /// Records that a server has answered the request, which was for this model.
    pub(crate) fn answered(&self, model: &Arc<str>) {
        self.quotas.record_served(model);
    }

    /// The request has ended: records its actual usage.
    pub fn settle(mut self, had: Had) {
        self.end(had);
    }

    fn end(&mut self, had: Had) {
        if std::mem::replace(&mut self.settled, true) {
            return;
        }
        let at = self.quotas.wall();
        match &self.quotas.store {
            Store::Memory(book) => book.end(&self.name, &self.taken, had, at),
            Store::Shared => {
                if let (Some(shared), Some(place)) = (&self.quotas.shared, self.place) {
                    shared.end(self.name.clone(), place, self.taken.change(had, at.windows()), at);
                }
            }
        }
    }
}

/// A permit that was not settled belongs to a request that no model server received, so its usage is zero.
impl Drop for Permit {
    fn drop(&mut self) {
        self.end(Had::Nothing);
    }
}

/// The quotas of tenants and those of models.
const SUBJECTS: usize = 2;

/// What a request has received before its decision: the quota checks for its tenant and its model, and its reservation.
#[derive(Debug, Default)]
pub struct Allowance {
    /// The agent of a request that is queued or rejected, for the record of its rejection.
    pub agent: Option<Box<AgentIdentity>>,
    /// The reservation that the request has taken, until the request is decided.
    pub(super) reserved: Option<Box<ReservedRequest>>,
    states: [State; SUBJECTS],
    /// Time of the first check. All calls of the request share one timeout.
    first: Option<Timestamp>,
}

/// The reservations of one request.
pub type Permits = SmallVec<[Permit; SUBJECTS]>;

#[derive(Debug, Default)]
enum State {
    #[default]
    Unasked,
    /// A call to the shared store is running.
    Pending(Box<dyn SharedAnswer>),
    /// The request is allowed, with this reservation if it is limited.
    Granted(Option<Permit>),
}

/// The immediate result of a claim.
enum QuotaStart {
    /// The request is allowed, with this reservation if it is limited.
    Granted(Option<Permit>),
    /// A call to the shared store must run.
    Pending(Pending),
}

impl Allowance {
    /// Checks all of `quotas` for the request of `q`, which asks for so many responses (`answers`). If it returns work,
    /// the caller runs the work and calls again.
    ///
    /// # Errors
    /// The error response for the client.
    pub fn ask(
        &mut self,
        quotas: &[Arc<Quotas>],
        q: &RequestView<'_>,
        facts: &RequestFacts<'_>,
        answers: u32,
    ) -> Result<Option<Warming>, RequestError> {
        let first = *self.first.get_or_insert(q.now);
        for (state, quotas) in self.states.iter_mut().zip(quotas) {
            let claim = || quotas.claim(q, facts, answers);
            let call = state.ask(quotas, claim, first, q.now)?;
            if call.is_some() {
                return Ok(call);
            }
        }
        Ok(None)
    }

    /// Takes the reservation that the request of `q` names, at the first call.
    pub(super) fn redeem(&mut self, picker: &Picker, q: &RequestView<'_>) {
        // Every attempt asks the limits after this.
        if !q.head.names_reservation() || self.first.is_some() {
            return;
        }
        self.reserved = picker.reservations.take(q.head, q.now);
        if self.reserved.is_none() {
            picker.observer.event(Event::Reservation(ReservationOutcome::Unknown));
        }
    }

    /// The request keeps what its reservation has booked in the limits, and is not checked again.
    pub(super) fn adopt(&mut self) {
        let mut permits = self.reserved.iter_mut().flat_map(|reserved| reserved.permits.drain(..));
        for state in self.states.iter_mut().filter(|state| matches!(state, State::Unasked)) {
            *state = State::Granted(permits.next());
        }
    }

    /// Takes the reservations of the request, which is decided.
    pub fn take(&mut self) -> Permits {
        self.states.iter_mut().filter_map(State::take).collect()
    }
}

impl State {
    fn ask(
        &mut self,
        quotas: &Arc<Quotas>,
        claim: impl FnOnce() -> Result<Option<Claim>, RequestError>,
        first: Timestamp,
        now: Timestamp,
    ) -> Result<Option<Warming>, RequestError> {
        let permit = match std::mem::take(self) {
            State::Granted(permit) => permit,
            State::Pending(answer) => answer.read(quotas, now)?,
            State::Unasked => match claim()?.map(|claim| quotas.begin(claim, first, now)).transpose()? {
                None => None,
                Some(QuotaStart::Granted(permit)) => permit,
                Some(QuotaStart::Pending(Pending { work, answer })) => {
                    *self = State::Pending(answer);
                    return Ok(Some(work));
                }
            },
        };
        *self = State::Granted(permit);
        Ok(None)
    }

    fn take(&mut self) -> Option<Permit> {
        match std::mem::take(self) {
            State::Granted(permit) => permit,
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Unobserved;
    use attache_quota::CountIn;

    fn quotas(store: Store) -> Quotas {
        let limits = Limits { requests_per_day: Some(10), ..Limits::default() };
        let settings = TenantSettings {
            default: limits,
            overrides: [("named".to_owned(), limits)].into(),
            answer_tokens: 1,
            unknown_paths: UnknownPaths::Estimate,
            unknown_path_tokens: 0,
            store: CountIn::Redis,
            user_records: None,
        };
        Quotas::new(Subject::Model, settings, store, Arc::new(Unobserved), || SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn invented_model_names_share_one_count_in_a_shared_store() {
        let quotas = quotas(Store::Shared);
        assert!(quotas.counts_by_name("named") && !quotas.counts_by_name("m"));
        quotas.record_served(&"m".into());
        assert!(quotas.counts_by_name("m") && !quotas.counts_by_name("invented-1"));
        // A server that answers for every name can't make the set grow without end.
        for number in 0..2 * MAX_SERVED_MODELS {
            quotas.record_served(&format!("served-{number}").into());
        }
        assert_eq!(quotas.served.lock().len(), MAX_SERVED_MODELS);
        assert!(quotas.counts_by_name("m"));
    }

    #[test]
    fn model_names_in_memory_are_counted_alone() {
        let quotas = quotas(Store::Memory(Arc::new(Book::new(16))));
        assert!(quotas.counts_by_name("any"));
        quotas.record_served(&"any".into());
        assert!(quotas.served.lock().is_empty(), "the book has a bound of its own");
    }
}
