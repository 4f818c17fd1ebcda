//! The prefill leg of a split request: which prefill worker gets it, with which body, and how its result continues the
//! request on the decode worker.
//!
//! [`PrefillLeg`] is a state machine without I/O. It returns the [`LegCall`]s to make; `ext_proc::prefiller` makes them
//! and reports each [`LegResult`].

use super::body::{Buffered, Held};
use super::conversation::Fetch;
use super::decide::Plan;
use super::head::Head;
use super::health::HealthReporter;
use super::hints::RANK_HEADER;
use super::picker::Picker;
use super::prefilling::Prefilling;
use crate::event::Event;
use attache_disagg::attempts::Attempt;
use attache_disagg::{Direct, Failure, Fallback, Leg, LegApi, Next};
use attache_pool::Endpoint;
use attache_pool::health::Availability;
use attache_pool::ranks::RankBooking;
use attache_protocol::{Api, Usage};
use attache_scheduling::Subset;
use attache_scheduling::plugin::Headers;
use attache_scheduling::{Dispatch, PickContext, RequestFacts};
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use attache_types::ids::EndpointId;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

mod release;

pub use release::{NotAccepted, PinnedPrefill, Release, ReleaseOutcome};

/// Headers of the client that the prefill worker gets as well: credentials, API version and trace. The others concern
/// the response, which comes from the decode worker.
const FORWARDED: &[&str] = &["authorization", "x-api-key", "anthropic-version", "openai-organization", "tracestate"];
const TRACEPARENT: &str = "traceparent";

/// An HTTP POST that Attaché sends to a worker itself, besides the request that the gateway forwards.
#[derive(Debug)]
pub struct LegCall {
    /// The attempt at the prefill that this is; `None` if the response is not awaited.
    pub attempt: Option<Attempt>,
    /// The absolute URL.
    pub url: String,
    /// Headers besides those of the body.
    pub headers: Vec<(&'static str, String)>,
    /// The JSON body.
    pub body: Bytes,
    /// Time limit of the headers, and again of the body, of the response.
    pub timeout: Duration,
    /// Accept any TLS certificate.
    pub insecure_skip_verify: bool,
    /// Frees the blocks that the response pins, if it arrives when it is no longer awaited.
    pub release: Option<Arc<Release>>,
}

/// The result of a [`LegCall`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LegResult {
    /// The worker responded.
    Reply {
        /// HTTP status.
        status: u16,
        /// The whole body.
        body: Bytes,
    },
    /// There was no complete response.
    Failed(Failure),
}

/// The parts of a request that its legs are made from.
#[derive(Clone, Debug)]
struct LegFacts {
    api: LegApi,
    request_id: Box<str>,
    /// The number by which workers that get the request at once find each other (SGLang: `bootstrap_room`).
    room: u64,
}

impl LegFacts {
    fn leg<'a>(&'a self, direct: &Direct, server: &'a Endpoint, body: &'a [u8]) -> Leg<'a> {
        let host = server.authority.rsplit_once(':').map_or(&*server.authority, |(host, _)| host);
        Leg {
            api: self.api,
            body,
            prefill_host: host.trim_start_matches('[').trim_end_matches(']'),
            prefill_address: server.spec.address,
            bootstrap_port: direct.bootstrap_port_of(server),
            room: self.room,
            request_id: &self.request_id,
            carried: None,
        }
    }
}

/// Which server's report says how many tokens of a split prompt were cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachedBy {
    /// The decode worker's response: its engine knows what the prefill worker had cached.
    #[default]
    Decode,
    /// The decode worker's response, behind a sidecar. Engines that don't know count all but the last token, which they
    /// received; that report is not used.
    Sidecar,
    /// The prefill worker's response had this number; `None` if it reported none.
    Prefill(Option<u64>),
}

/// How the prefill of a request went, for response headers, the decision log and metrics.
#[derive(Debug, Default)]
pub struct PrefillOutcome {
    /// The prefill worker.
    pub prefill: Option<Arc<Endpoint>>,
    /// Why the decode worker prefills the prompt itself although the request was to be split.
    pub failure: Option<Failure>,
    /// Time from the start of the first attempt to the end of the last.
    pub took: Option<Duration>,
    /// Prompt tokens that the prefill worker fetched from the decode worker of the previous turn.
    pub carried: Option<u32>,
    /// The blocks that the prefill worker keeps until the decode worker has fetched them.
    pub pinned: Option<Box<PinnedPrefill>>,
    /// Who reports the cached tokens of the prompt.
    pub cached_by: CachedBy,
}

/// Response header that says how the request was served: `split`, `split; carried=<tokens>` or `local; reason=<code>`.
pub const DISAGGREGATION_HEADER: &str = "x-attache-disaggregation";
/// Response header with the address of the prefill worker. Sent only with `exchange.prefillEndpointHeader`, because the
/// address is internal.
pub const PREFILL_HEADER: &str = "x-attache-prefill-endpoint";

impl PrefillOutcome {
    /// No prefill worker was there.
    #[must_use]
    pub fn absent() -> Self {
        Self { failure: Some(Failure::Absent), ..Self::default() }
    }

    /// The response has begun. `retried`: the gateway tried another decode worker before. That one may have fetched the
    /// blocks, so they are left to their lease.
    pub fn answered(&mut self, retried: Option<bool>) {
        match retried {
            Some(true) => self.pinned = None,
            Some(false) => self.pinned.iter_mut().for_each(|pinned| pinned.mark_first_attempt()),
            None => {}
        }
    }

    /// The decode worker's token counts with the tokens that were cached where the prompt was computed. A decode worker
    /// may count the tokens whose blocks it received as cached.
    #[must_use]
    pub fn token_counts(&self, usage: Usage) -> Usage {
        let all_but_the_last = || usage.prompt_tokens.map(|tokens| tokens.saturating_sub(1));
        let cached_tokens = match self.cached_by {
            _ if self.prefill.is_none() => usage.cached_tokens,
            CachedBy::Decode => usage.cached_tokens,
            CachedBy::Sidecar => usage.cached_tokens.filter(|cached| Some(*cached) != all_but_the_last()),
            CachedBy::Prefill(cached) => cached,
        };
        Usage { cached_tokens, ..usage }
    }

    /// Headers to add to the response; `names_prefill` adds [`PREFILL_HEADER`].
    pub fn headers(&self, names_prefill: bool) -> impl Iterator<Item = (&'static str, String)> + use<> {
        let how = match (self.failure, self.carried) {
            (Some(failure), _) => format!("local; reason={}", failure.code()),
            (None, Some(tokens)) => format!("split; carried={tokens}"),
            (None, None) => "split".to_owned(),
        };
        let server = self
            .prefill
            .as_ref()
            .filter(|_| names_prefill)
            .map(|server| (PREFILL_HEADER, server.authority.to_string()));
        std::iter::once((DISAGGREGATION_HEADER, how)).chain(server)
    }
}

/// The prefill leg of one request, with all its attempts.
#[derive(Debug)]
pub struct PrefillLeg {
    decode: Arc<Endpoint>,
    direct: Direct,
    facts: LegFacts,
    /// The body that both legs are made from.
    base: Bytes,
    /// For each attempt: frees the blocks that its response pins.
    releases: Vec<Option<Arc<Release>>>,
    /// Memory of `base` and of one leg's body.
    _held: Held,
    buffered: Arc<Buffered>,
    headers: Vec<(&'static str, String)>,
    names_request: bool,
    prefilling: Prefilling,
    health: HealthReporter,
    began: Timestamp,
    calls: Vec<LegCall>,
    /// The blocks that the decode worker of the previous turn keeps, and the only attempt that may fetch them.
    carried: Option<(Attempt, Fetch)>,
    /// The data-parallel rank of the first attempt.
    rank: Option<RankBooking>,
}

/// The state of a prefill leg after an event.
#[derive(Debug)]
pub enum LegProgress {
    /// An attempt is running.
    Waiting,
    /// The request is dispatched to its decode worker with this body; `None`: with the client's body.
    Proceed(Option<Vec<u8>>, PrefillOutcome),
    /// The request must be rejected.
    Refused(Failure),
}

/// A request to split.
#[derive(Debug)]
pub struct SplitRequest<'a> {
    /// The request headers.
    pub head: &'a Head,
    /// The body, with the model name of the model server.
    pub body: &'a [u8],
    /// The `traceparent` that workers get instead of the client's.
    pub trace: Option<String>,
}

impl PrefillLeg {
    /// Starts the prefill leg of `plan`; `None` if the connector can't split this request after all.
    #[must_use]
    pub fn begin(
        plan: &mut Plan,
        direct: &Direct,
        SplitRequest { head, body, trace }: SplitRequest<'_>,
        room: u64,
        buffered: &Arc<Buffered>,
        now: Timestamp,
    ) -> Option<Self> {
        let (split, api) = (plan.decision.split.as_ref()?, LegApi::from_path(head.path())?);
        let decode = plan.decision.picks.first()?.clone();
        let base = Bytes::copy_from_slice(body);
        let given = head.request_id();
        let names_request = given.is_empty();
        let request_id = if names_request { format!("attache-{room:016x}") } else { given };
        let mut headers: Vec<(&'static str, String)> =
            FORWARDED.iter().filter_map(|name| Some((*name, head.get(name)?.to_owned()))).collect();
        headers.push(("x-request-id", request_id.clone()));
        headers.extend(trace.or_else(|| Some(head.traceparent()?.to_owned())).map(|trace| (TRACEPARENT, trace)));
        let facts = LegFacts { api, request_id: request_id.into(), room };
        let direct = &direct.with_connector_of(split.prefill.first()?);
        // A decode worker that already waits for one prefill worker can't be redirected to another.
        let tries = if direct.is_together() { 1 } else { split.prefill.len() };
        let servers = split.prefill.iter().take(tries).cloned().collect();
        let prefilling = Prefilling::begin(servers, plan.prefill.take(), split.probe, direct.bounds, now);
        let first = split.prefill.first()?;
        if plan.conversation.as_ref().is_some_and(|conversation| conversation.has_carry(first.id)) {
            // The kept blocks can be fetched only once, so they are not taken for a request that can't be split.
            direct.connector.prefill_body(&facts.leg(direct, first, &base)).ok()?;
        }
        let carried = plan.conversation.as_mut().and_then(|conversation| conversation.take(first.id, now));
        let health = HealthReporter {
            pool: plan.runtime.pool.clone(),
            tape: prefilling.tape().clone(),
            api: Api::from_path(head.path()).0,
            client: plan.client,
            role: "prefill worker",
        };
        let mut leg = Self {
            decode,
            direct: direct.clone(),
            facts,
            _held: buffered.hold(2 * base.len() as u64),
            base,
            releases: Vec::new(),
            buffered: buffered.clone(),
            headers,
            names_request,
            health,
            prefilling,
            began: now,
            calls: Vec::new(),
            carried: carried.map(|fetch| (0, fetch)),
            rank: plan.hints.prefill_rank.take(),
        };
        leg.queue_call(0)?;
        Some(leg)
    }

    /// The prefill leg and, if both workers get the request at once, the body of the decode leg. `None` if the
    /// connector can't make that body.
    #[must_use]
    pub fn with_decode_leg(self: Box<Self>) -> Option<(Box<Self>, Option<Vec<u8>>)> {
        if !self.direct.is_together() {
            return Some((self, None));
        }
        let server = self.prefilling.server(0)?;
        let leg = self.facts.leg(&self.direct, server, &self.base);
        let decode = self.direct.connector.decode_body(&leg, None).ok()?.body.into_owned();
        Some((self, Some(decode)))
    }

    /// The request id of both legs, if the client sent none.
    #[must_use]
    pub fn new_request_id(&self) -> Option<Box<str>> {
        self.names_request.then(|| self.facts.request_id.clone())
    }

    /// The prefill worker of an attempt.
    #[must_use]
    pub fn server(&self, attempt: Attempt) -> Option<&Arc<Endpoint>> {
        self.prefilling.server(attempt)
    }

    /// Predicted time of the prefill, seconds.
    #[must_use]
    pub fn expected(&self) -> f64 {
        self.prefilling.expected()
    }

    /// Adds the call of an attempt to those to make; `None` if the connector can't make its body.
    fn queue_call(&mut self, attempt: Attempt) -> Option<()> {
        let server = self.prefilling.server(attempt)?.clone();
        let carried = self.carried_by(attempt).map(|carried| &*carried.params);
        let leg = Leg { carried, ..self.facts.leg(&self.direct, &server, &self.base) };
        let body = match self.direct.connector.prefill_body(&leg) {
            Ok(body) => Bytes::from(body),
            Err(error) => {
                tracing::debug!(%error, "request can't be split");
                return None;
            }
        };
        let release = (!self.direct.is_together()).then(|| {
            Arc::new(Release {
                direct: self.direct.clone(),
                facts: self.facts.clone(),
                body: body.clone(),
                prefill: server.clone(),
                decode: self.decode.clone(),
                headers: self.headers.clone(),
            })
        });
        self.releases.push(release.clone());
        let rank = self.rank.as_ref().filter(|_| attempt == 0).map(|booking| booking.rank().to_string());
        let headers = self.headers.iter().cloned().chain(rank.map(|rank| (RANK_HEADER, rank))).collect();
        self.calls.push(LegCall {
            attempt: Some(attempt),
            url: self.direct.url(&server, self.facts.api.path()),
            headers,
            body,
            timeout: self.direct.bounds.timeout,
            insecure_skip_verify: self.direct.insecure_skip_verify,
            release,
        });
        Some(())
    }

    /// The blocks that the worker of an attempt keeps for the decode worker, if its response names any.
    fn pinned(&self, attempt: Attempt, reply: &Bytes) -> Option<Box<PinnedPrefill>> {
        let release = self.releases.get(attempt)?.clone()?;
        release.pins(reply).then(|| Box::new(PinnedPrefill::new(release, reply.clone(), &self.buffered)))
    }

    fn carried_by(&self, attempt: Attempt) -> Option<&Fetch> {
        self.carried.as_ref().filter(|(by, _)| *by == attempt).map(|(_, fetch)| fetch)
    }

    /// The calls to make now.
    pub fn take_calls(&mut self) -> Vec<LegCall> {
        std::mem::take(&mut self.calls)
    }

    /// Whether the response to an attempt is still awaited.
    #[must_use]
    pub fn awaits(&self, attempt: Attempt) -> bool {
        self.prefilling.awaits(attempt)
    }

    /// When [`PrefillLeg::on_deadline`] is due.
    #[must_use]
    pub fn deadline(&self) -> Timestamp {
        self.prefilling.deadline()
    }

    /// Another decode worker than the planned one serves the request.
    pub fn answered_by(&mut self, server: &Arc<Endpoint>) {
        self.decode.clone_from(server);
    }

    /// A call that aborts the decode leg when the prefill leg has failed. `None` if closing the connection aborts it.
    #[must_use]
    pub fn abort(&self) -> Option<LegCall> {
        let server = self.prefilling.server(0)?;
        let leg = self.facts.leg(&self.direct, server, &self.base);
        let abort = self.direct.connector.abort_request(&leg)?;
        Some(LegCall {
            attempt: None,
            url: self.direct.url(&self.decode, abort.path),
            headers: self.headers.clone(),
            body: abort.body.into(),
            timeout: self.direct.bounds.timeout,
            insecure_skip_verify: self.direct.insecure_skip_verify,
            release: None,
        })
    }

    /// The time of [`PrefillLeg::deadline`] has come.
    pub fn on_deadline(&mut self, now: Timestamp, picker: &Picker) -> LegProgress {
        if now >= self.prefilling.end() {
            self.count_late(None, now, picker);
        }
        let (health, decode) = (&self.health, &self.decode);
        let record = |server: &Endpoint, outcome| health.record(server, outcome, now, &*picker.observer);
        let next = match self.direct.is_together() {
            false => self.prefilling.late(now, |server, outcome| _ = record(server, outcome)),
            // Each worker waits for the other, and none reports which of the two is stuck. Both count as failed: the
            // stuck one fails with every partner, so it is ejected first. Once the decode worker is ejected, the
            // prefill worker is not blamed.
            true => self.prefilling.late(now, |server, outcome| {
                if decode.health.availability(now, health.pool.scheduler.health()) == Availability::Ejected {
                    health.tape.probe_lost(server);
                } else if !record(decode, outcome) {
                    record(server, outcome);
                }
            }),
        };
        self.follow(next, now)
    }

    /// An attempt has a result.
    pub fn on_leg_result(
        &mut self,
        attempt: Attempt,
        result: &LegResult,
        now: Timestamp,
        picker: &Picker,
    ) -> LegProgress {
        let Some(server) = self.prefilling.server(attempt).filter(|_| self.awaits(attempt)) else {
            return LegProgress::Waiting;
        };
        let health = &self.health;
        let record = |server: &Endpoint, outcome| _ = health.record(server, outcome, now, &*picker.observer);
        let failure = match result {
            LegResult::Reply { status: 200..=299, body } => match self.read(server, body) {
                Ok((decode, mut usage)) => {
                    let prefill = Some(server.clone());
                    let carried = self.carried_by(attempt).map(|carried| carried.tokens);
                    if carried.is_some() {
                        // Blocks that it fetched say nothing about its own cache.
                        usage.cached_tokens = None;
                    }
                    self.count_late(Some(attempt), now, picker);
                    self.prefilling.computed(attempt, &usage, now, record);
                    picker.observer.event(Event::PrefillLeg(Ok(())));
                    let took = Some(now.since(self.began));
                    let pinned = self.pinned(attempt, body);
                    let cached_by = if self.direct.is_together() {
                        CachedBy::Decode
                    } else {
                        CachedBy::Prefill(usage.cached_tokens)
                    };
                    return LegProgress::Proceed(
                        decode,
                        PrefillOutcome { prefill, failure: None, took, carried, pinned, cached_by },
                    );
                }
                Err(failure) => failure,
            },
            LegResult::Reply { status, .. } => Failure::Status(*status),
            // The time limit of a call is that of the whole leg, so the deadline judges it.
            LegResult::Failed(Failure::Late) => return self.on_deadline(now, picker),
            LegResult::Failed(failure) => *failure,
        };
        picker.observer.event(Event::PrefillLeg(Err(failure)));
        // A failed attempt pins no blocks.
        self.releases.get_mut(attempt).and_then(Option::take);
        let next = self.prefilling.failed(attempt, failure, now, record);
        // The kept blocks pass to the next attempt only if this one never reached its worker. Otherwise it may have
        // fetched them already.
        if let (Failure::Refused, Next::Send(after)) = (failure, &next)
            && let Some((by, fetch)) = self.carried.as_mut().filter(|(by, _)| *by == attempt)
            && self.prefilling.server(*after).is_some_and(|server| fetch.servers.contains(&server.id))
        {
            *by = *after;
        }
        self.follow(next, now)
    }

    /// The body of the decode leg that follows from a prefill response, and the token counts of that response.
    fn read(&self, server: &Endpoint, reply: &[u8]) -> Result<(Option<Vec<u8>>, Usage), Failure> {
        if self.direct.is_together() {
            return Ok((None, Usage::default()));
        }
        let leg = self.facts.leg(&self.direct, server, &self.base);
        let decode = self.direct.connector.decode_body(&leg, Some(reply)).map_err(|error| {
            tracing::debug!(prefill = %server.authority, %error, "prefill response can't be used");
            if error.retryable() { Failure::Unusable } else { Failure::Ended }
        })?;
        let prefilled = &decode.prefilled;
        let usage = Usage {
            prompt_tokens: prefilled.prompt_tokens,
            cached_tokens: prefilled.cached_tokens,
            completion_tokens: None,
        };
        Ok((Some(decode.body.into_owned()), usage))
    }

    fn follow(&mut self, next: Next, now: Timestamp) -> LegProgress {
        match next {
            Next::Wait => LegProgress::Waiting,
            // The connector makes the bodies of all attempts alike, so this one rarely fails where the first did not.
            Next::Send(attempt) if self.queue_call(attempt).is_some() => LegProgress::Waiting,
            Next::Send(_) => self.give_up(Failure::Unusable, now),
            Next::GiveUp(failure) => self.give_up(failure, now),
        }
    }

    /// Counts the attempts, except `answered`, whose time is over without a response.
    fn count_late(&self, answered: Option<Attempt>, now: Timestamp, picker: &Picker) {
        let late = Event::PrefillLeg(Err(Failure::Late));
        self.prefilling.overdue(answered, now).for_each(|_| picker.observer.event(late));
    }

    fn give_up(&mut self, failure: Failure, now: Timestamp) -> LegProgress {
        self.prefilling.give_up();
        let fails = self.direct.fallback == Fallback::Fail && !failure.is_nobodys();
        if fails || self.direct.is_together() {
            return LegProgress::Refused(failure);
        }
        LegProgress::Proceed(
            None,
            PrefillOutcome { failure: Some(failure), took: Some(now.since(self.began)), ..PrefillOutcome::default() },
        )
    }
}

impl Plan {
    /// The decision to split is final: the booking of the first pick now counts the request as dispatched.
    pub fn dispatch(&mut self, how: Dispatch<'_>, now: Timestamp) {
        if let Some(booked) = &mut self.booked {
            let snapshot = self.runtime.pool.store.load();
            booked.dispatch(how, &snapshot, self.runtime.pool.stale_after, now);
        }
    }

    /// Chooses another decode worker if the planned one was removed or ejected during the prefill on `prefill`, and
    /// moves the booking there. `head` and `subset` are those of the request.
    ///
    /// # Errors
    /// The error response, if no other worker can continue.
    pub fn replace_target(
        &mut self,
        head: &Head,
        subset: Option<&Subset>,
        prefill: Option<&Endpoint>,
        now: Timestamp,
        picker: &Picker,
    ) -> Result<(), RequestError> {
        let (pool, target) = (self.runtime.pool.clone(), self.target.clone());
        let (snapshot, headers) = (pool.store.load_full(), Headers::of(head));
        let facts = RequestFacts {
            model: &target,
            prompt_tokens: self.prompt_tokens,
            max_tokens: self.max_tokens,
            priority: self.priority,
            headers,
            ..RequestFacts::default()
        };
        let cx = PickContext { request: facts, subset, ..PickContext::new(&snapshot, now, pool.stale_after) };
        let first = self.decision.picks.first().map(|first| first.id);
        let mut booked = self.booked.take();
        let tape = booked.as_ref().map(|booked| booked.tape().clone()).unwrap_or_default();
        let unprobed = |server: &Endpoint| tape.probe_lost(server);
        let rng = || picker.next_rng();
        let successor = pool.scheduler.renew(&mut self.decision, &cx, prefill, unprobed, rng);
        if let (Ok(Some(server)), Some(first), Some(booked)) = (&successor, first, &mut booked) {
            booked.move_to(server, now, || self.noted_elsewhere(first, server.id, now));
            // The rank belongs to the previous worker.
            self.hints.rank = None;
        }
        self.booked = booked;
        successor.map(|_| ())
    }

    /// Endpoint `to` serves the request instead of the picked `from`. The strategy moves what it recorded of the
    /// request.
    pub fn noted_elsewhere(&self, from: EndpointId, to: EndpointId, now: Timestamp) {
        if let Some(trail) = &self.decision.trail {
            self.strategy.moved(&self.target, trail, from, to, now);
        }
    }
}
