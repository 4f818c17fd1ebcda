//! What tenants and models may have, as a request knows it: who may go on, and what is booked until its answer has
//! ended.
//!
//! [`attache_quota`] decides, in this process or, by the same figures, in a store that several replicas share
//! ([`SharedQuotas`]). What is let through holds a [`Permit`], which gives everything back when it is dropped and keeps
//! what was had when it is settled. With such a store a decision waits for the answer as it waits for tokens: it comes
//! back as something to run, and is made again when that has run. So it does where a tenant's own limits stand there
//! and have not been read of late.

use super::decide::RequestView;
use super::tenant::Tenant;
use super::warming::Warming;
use crate::event::{NameEvent, Observer};
use attache_protocol::Api;
use attache_quota::{
    Book, Bound, Change, Claim, Had, Limits, Place, Refused, Subject, Taken, TenantSettings, UnknownPaths, Wall,
};
use attache_scheduling::RequestFacts;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

/// Where it is counted.
#[derive(Clone, Debug)]
pub enum Store {
    /// In this process.
    Memory(Arc<Book>),
    /// In the store of [`Quotas::sharing`], with other replicas.
    Shared,
}

/// A store outside of the process: counters that several replicas share, and limits of single tenants. Asking it takes
/// time, so what it is asked comes back as work, and its answer is read when that has run.
pub trait SharedQuotas: fmt::Debug + Send + Sync {
    /// The claim with the limits of its tenant's own record, where such records count; else what must run first.
    /// Reading the record again shares the wait that began at `first`.
    ///
    /// # Errors
    /// That the tenant has no record and needs one.
    fn limits(
        &self,
        quotas: &Arc<Quotas>,
        claim: Claim,
        first: Timestamp,
        now: Timestamp,
    ) -> Result<Limited, RequestError>;

    /// Asks to book `claim`. What the request has waited since `first` is not waited again.
    fn take(&self, quotas: &Arc<Quotas>, claim: Claim, first: Timestamp, now: Timestamp) -> Pending;

    /// A request that was booked at `place` has ended at `at`: `change` sets right what it had.
    fn end(&self, name: Arc<str>, place: Place, change: Change, at: Wall);
}

/// Limits of one claim.
#[derive(Debug)]
pub enum Limited {
    /// They are in the claim now.
    Known(Claim),
    /// They have to be read first; the request is then booked as well.
    Unread(Pending),
}

/// A question to a [`SharedQuotas`].
#[derive(Debug)]
pub struct Pending {
    /// Must run before the answer is read.
    pub work: Warming,
    /// Where the answer will be.
    pub answer: Box<dyn SharedAnswer>,
}

/// The answer to a [`Pending`] question.
pub trait SharedAnswer: fmt::Debug + Send {
    /// What is booked for the request, where anything is: `None` too when the store did not answer and requests then go
    /// on.
    ///
    /// # Errors
    /// The refusal that the client gets.
    fn read(self: Box<Self>, quotas: &Quotas, now: Timestamp) -> Result<Option<Permit>, RequestError>;
}

/// 2^32 - 1 tokens: no answer has more, however many of what length a request asks for. Counters are far from full with
/// that.
const MAX_ANSWER: u64 = u32::MAX as u64;

/// What tenants may have, and have had; or models.
#[derive(Debug)]
pub struct Quotas {
    subject: Subject,
    settings: TenantSettings,
    store: Store,
    shared: Option<Arc<dyn SharedQuotas>>,
    observer: Arc<dyn Observer>,
    /// How late it is. Windows are those of the wall clock, whatever is done to it.
    wall: fn() -> SystemTime,
}

impl Quotas {
    /// Lets `subject`s have what `settings` say, counted in `store` by a clock that is asked each time.
    #[must_use]
    pub fn new(
        subject: Subject,
        settings: TenantSettings,
        store: Store,
        observer: Arc<dyn Observer>,
        wall: fn() -> SystemTime,
    ) -> Self {
        Self { subject, settings, store, shared: None, observer, wall }
    }

    /// With a store outside of the process, which [`Store::Shared`] and records of tenants need.
    #[must_use]
    pub fn sharing(mut self, shared: Arc<dyn SharedQuotas>) -> Self {
        self.shared = Some(shared);
        self
    }

    /// What the configuration says.
    #[must_use]
    pub fn settings(&self) -> &TenantSettings {
        &self.settings
    }

    /// Whom it is for.
    #[must_use]
    pub fn subject(&self) -> Subject {
        self.subject
    }

    /// Where it is counted: kept over reloads.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The time of the wall clock.
    #[must_use]
    pub fn wall(&self) -> Wall {
        Wall((self.wall)().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
    }

    /// How the request, which asks for so many `answers`, is counted by what the settings say; `None` when it asks for
    /// nothing that costs, or for no model that is known.
    ///
    /// # Errors
    /// Its path is that of no known API, and the settings say to reject it.
    fn claim(&self, q: &RequestView<'_>, facts: &RequestFacts<'_>, answers: u32) -> Result<Option<Claim>, RequestError> {
        let costs_nothing = matches!(q.head.method(), "GET" | "HEAD" | "OPTIONS") && !q.head.is_upgrade();
        if costs_nothing {
            return Ok(None);
        }
        let name: Arc<str> = match (self.subject, q.head.tenant()) {
            (Subject::Model, _) if facts.model.is_empty() => return Ok(None),
            (Subject::Model, _) => facts.model.into(),
            (Subject::Tenant, Tenant::Named(name)) => name.clone(),
            (Subject::Tenant, Tenant::Nobody | Tenant::Unasked) => "".into(),
        };
        let answers = if q.api.generates() { answers } else { 0 };
        let of = |tokens: u32| u64::from(tokens).saturating_mul(answers.into()).min(MAX_ANSWER);
        let usual = self.settings.answer_tokens;
        let asked = match q.api {
            Api::Other => u64::from(self.settings.unknown_path_tokens),
            // Servers take a limit of 0 for none.
            _ => of(facts.max_tokens.filter(|tokens| *tokens > 0).unwrap_or(usual)),
        };
        let limits = *self.settings.limits(&name);
        if q.api == Api::Other && self.settings.unknown_paths == UnknownPaths::Reject && self.limits_tokens(&limits) {
            let message = "the path is that of no API whose tokens can be counted, and tokens are limited";
            return Err(RequestError::new(Reason::UnknownPath, message));
        }
        Ok(Some(Claim {
            limits,
            is_named: self.settings.overrides.contains_key(&*name),
            name,
            prompt: facts.prompt_tokens.into(),
            answer: match self.subject {
                Subject::Tenant => asked,
                // Others must not be kept from a model by what one asks of it and may not wait for. What comes beyond
                // is charged when it has.
                Subject::Model => asked.min(usual.into()),
            },
        }))
    }

    /// Whether tokens are limited, or may be by a record of the tenant.
    fn limits_tokens(&self, limits: &Limits) -> bool {
        let bound = limits.tokens_per_minute.or(limits.tokens_per_day);
        bound.is_some() || self.settings.user_records.is_some()
    }

    /// Books the request, which has waited since `first`, or says what must run first.
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
            // Nowhere to count.
            (Store::Shared, None) => Ok(QuotaStart::Granted(None)),
        }
    }

    /// Books a claim in this process.
    ///
    /// # Errors
    /// Which limit is used up.
    pub fn take(self: &Arc<Self>, book: &Book, claim: &Claim) -> Result<Permit, Refused> {
        Ok(Permit::new(self, claim, book.take(claim, self.wall())?, None))
    }

    /// Counts a claim that is refused; what its client is told.
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
        // AIBrix's words.
        let message = format!("{whose}: {} has exceeded {what}: {}", claim.name, refused.limit);
        RequestError { retry_after: Some(refused.retry_after), ..RequestError::new(reason, message) }
    }
}

/// What a request was let through with, until its answer has ended or it is dropped.
#[derive(Debug)]
pub struct Permit {
    quotas: Arc<Quotas>,
    name: Arc<str>,
    taken: Taken,
    place: Option<Place>,
    settled: bool,
}

impl Permit {
    /// A permit for what `claim` has `taken`, at `place` where a shared store counts it.
    #[must_use]
    pub fn new(quotas: &Arc<Quotas>, claim: &Claim, taken: Taken, place: Option<Place>) -> Self {
        Self { quotas: quotas.clone(), name: claim.name.clone(), taken, place, settled: false }
    }

    /// What its tenant has had of the minute, as AIBrix tells clients; nothing of its model.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, String)> {
        let used = self.taken.used;
        let told = [("x-update-rpm", used.requests), ("x-update-tpm", used.tokens)].into_iter();
        told.filter(|_| self.quotas.subject == Subject::Tenant).map(|(name, count)| (name, count.to_string()))
    }

    /// It has ended, with an answer or without.
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

/// It never reached a server: whoever leaves while one works for it is settled with.
impl Drop for Permit {
    fn drop(&mut self) {
        self.end(Had::Nothing);
    }
}

/// Whom a request needs to be allowed by: its tenant's limits and its model's.
const SUBJECTS: usize = 2;

/// Whether a request may go on, as far as its tenant and its model are concerned.
#[derive(Debug, Default)]
pub struct Allowance {
    states: [State; SUBJECTS],
    /// When it was first asked for: all that is asked shares one wait.
    first: Option<Timestamp>,
}

/// What a request was let through with.
pub type Permits = SmallVec<[Permit; SUBJECTS]>;

#[derive(Debug, Default)]
enum State {
    #[default]
    Unasked,
    /// A shared store has been asked.
    Pending(Box<dyn SharedAnswer>),
    /// It may, with what is booked for it, where anything is.
    Granted(Option<Permit>),
}

/// What comes of a claim at once.
enum QuotaStart {
    /// What is booked for it, where anything is.
    Granted(Option<Permit>),
    /// A shared store is asked: its work must run.
    Pending(Pending),
}

impl Allowance {
    /// Asks all of `quotas` for the request that `q` is about, which asks for so many `answers`. What it gives must
    /// run, and then be asked again.
    ///
    /// # Errors
    /// The refusal that the client gets.
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

    /// What is booked for the request, which goes on.
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
