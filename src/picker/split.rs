//! A request whose prompt another server computes, between the decision and the decode server: which prefill server is asked, with which
//! body, and what comes of it. Pure; [`super::prefiller`] does the asking.

use super::body::{Buffered, Held};
use super::conversation::Fetch;
use super::decide::Plan;
use super::head::Head;
use super::hints::RANK_HEADER;
use super::picker::Picker;
use crate::event::Event;
use attache_disagg::attempts::Attempt;
use attache_disagg::{Direct, Failure, Fallback, Leg, LegApi, Next};
use attache_pool::Endpoint;
use attache_pool::health::{Availability, ClientSlot, Observation, Outcome as Health, Verdict};
use attache_pool::ranks::RankBooking;
use attache_protocol::{Api, Usage};
use attache_scheduling::prefilling::Prefilling;
use attache_scheduling::{Dispatch, Pool};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

mod release;

pub use release::{Fate, Kept, Release, Untaken};

/// Headers of the client that the prefill server gets as well; everything else is between the client and who answers it.
const FORWARDED: &[&str] = &["authorization", "x-api-key", "anthropic-version", "openai-organization", "tracestate"];
const TRACEPARENT: &str = "traceparent";

/// Something to be asked of a server, beside the request itself.
#[derive(Debug)]
pub struct Ask {
    /// Which try of the request it is; `None` when nobody waits for the answer.
    pub attempt: Option<Attempt>,
    /// The whole URL.
    pub url: String,
    /// Headers besides the body's own.
    pub headers: Vec<(&'static str, String)>,
    /// JSON.
    pub body: Bytes,
    /// Longest wait, also when nobody else sets an end to it.
    pub timeout: Duration,
    /// Whether the server's certificate is believed unseen.
    pub insecure_skip_verify: bool,
    /// What frees the memory that an answer pins when it comes and nobody waits for it any longer.
    pub release: Option<Arc<Release>>,
}

/// What became of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// An answer.
    Reply {
        /// Its status.
        status: u16,
        /// Its body.
        body: Bytes,
    },
    /// None.
    Failed(Failure),
}

/// What of a request its legs depend on.
#[derive(Clone, Debug)]
struct Facts {
    api: LegApi,
    /// What its outcomes are observed under.
    kind: (Api, ClientSlot),
    request_id: Box<str>,
    room: u64,
}

impl Facts {
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

/// How a request's prompt came to be computed, for the client, the record and the metrics.
#[derive(Debug, Default)]
pub struct Course {
    /// The server that computed the prompt.
    pub prefill: Option<Arc<Endpoint>>,
    /// Why no other server did, when one should have.
    pub failure: Option<Failure>,
    /// How long it took, over all tries.
    pub took: Option<Duration>,
    /// Tokens that the prefill server was told to fetch from the decode server of the turn before.
    pub carried: Option<u32>,
    /// What that server keeps until the answer's server has fetched it.
    pub kept: Option<Box<Kept>>,
}

/// Tells clients and people how the two servers shared a request, on the answer.
pub const COURSE_HEADER: &str = "x-attache-disaggregation";
/// The server that computed the prompt, on the answer where `exchange.prefillEndpointHeader` is on: it is an internal address.
pub const PREFILL_HEADER: &str = "x-attache-prefill-endpoint";

impl Course {
    /// The answer comes; `retried` says whether another try was before it. Who was asked then may have fetched the prompt, which is left to its lease.
    pub fn answered(&mut self, retried: Option<bool>) {
        match retried {
            Some(true) => self.kept = None,
            Some(false) => self.kept.iter_mut().for_each(|kept| kept.is_first_try()),
            None => {}
        }
    }

    /// Headers of the answer; `names_prefill` adds [`PREFILL_HEADER`].
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
        std::iter::once((COURSE_HEADER, how)).chain(server)
    }
}

/// A request whose prompt is being computed.
#[derive(Debug)]
pub struct Stage {
    pool: Arc<Pool>,
    decode: Arc<Endpoint>,
    direct: Direct,
    facts: Facts,
    /// The body that both legs are made from.
    base: Bytes,
    /// What frees the answer of each try.
    releases: Vec<Option<Arc<Release>>>,
    /// The body, and a leg made from it.
    _held: Held,
    buffered: Arc<Buffered>,
    headers: Vec<(&'static str, String)>,
    names_request: bool,
    prefilling: Prefilling,
    began: Timestamp,
    asks: Vec<Ask>,
    /// What the decode server of the turn before keeps, and which try fetches it: no other may.
    carried: Option<(Attempt, Fetch)>,
    /// The rank that the first try asks for.
    rank: Option<RankBooking>,
}

/// What a stage has come to.
#[derive(Debug)]
pub enum Came {
    /// Nothing yet.
    Waiting,
    /// The request goes on to its decode server, with this body (as it came, when `None`).
    On(Option<Vec<u8>>, Course),
    /// It can't be served, or the servers don't take it.
    Refused(Failure),
}

/// A request that is to be split.
#[derive(Debug)]
pub struct Asked<'a> {
    /// Its headers.
    pub head: &'a Head,
    /// The body that a server would be sent.
    pub body: &'a [u8],
    /// The `traceparent` that servers are given in place of the client's.
    pub trace: Option<String>,
}

impl Stage {
    /// Begins to have the prompt of `plan` computed; `None` when the connector can't split this request after all.
    #[must_use]
    pub fn begin(
        plan: &mut Plan,
        direct: &Direct,
        Asked { head, body, trace }: Asked<'_>,
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
        let kind = (Api::from_path(head.path()).0, plan.client);
        let facts = Facts { api, kind, request_id: request_id.into(), room };
        let direct = &direct.with_connector_of(split.prefill.first()?);
        // A decode server that waits for one prefill server can't be told of another.
        let tries = if direct.is_together() { 1 } else { split.prefill.len() };
        let servers = split.prefill.iter().take(tries).cloned().collect();
        let prefilling = Prefilling::begin(servers, plan.prefill.take(), split.probe, direct.bounds, now);
        let first = split.prefill.first()?;
        if plan.conversation.as_ref().is_some_and(|conversation| conversation.has_carry(first.id)) {
            // What is kept of the turn before can be fetched once: nobody takes it for a request that can't be split.
            direct.connector.prefill_body(&facts.leg(direct, first, &base)).ok()?;
        }
        let carried = plan.conversation.as_mut().and_then(|conversation| conversation.take(first.id, now));
        let mut stage = Self {
            pool: plan.runtime.pool.clone(),
            decode,
            direct: direct.clone(),
            facts,
            _held: buffered.hold(2 * base.len() as u64),
            base,
            releases: Vec::new(),
            buffered: buffered.clone(),
            headers,
            names_request,
            prefilling,
            began: now,
            asks: Vec::new(),
            carried: carried.map(|fetch| (0, fetch)),
            rank: plan.hints.prefill_rank.take(),
        };
        stage.ask(0)?;
        Some(stage)
    }

    /// The stage and, where both servers are asked at once, the decode leg; `None` when that has no body.
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

    /// The request id that both legs carry, when the client gave none.
    #[must_use]
    pub fn new_request_id(&self) -> Option<Box<str>> {
        self.names_request.then(|| self.facts.request_id.clone())
    }

    /// The server of a try.
    #[must_use]
    pub fn server(&self, attempt: Attempt) -> Option<&Arc<Endpoint>> {
        self.prefilling.server(attempt)
    }

    /// Seconds until the prompt is computed, as predicted.
    #[must_use]
    pub fn expected(&self) -> f64 {
        self.prefilling.expected()
    }

    /// Puts the question of a try into the queue; `None` when it has no body.
    fn ask(&mut self, attempt: Attempt) -> Option<()> {
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
        self.asks.push(Ask {
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

    /// What the server of a try keeps for whoever goes on from its reply.
    fn kept(&self, attempt: Attempt, reply: &Bytes) -> Option<Box<Kept>> {
        let release = self.releases.get(attempt)?.clone()?;
        release.pins(reply).then(|| Box::new(Kept::new(release, reply.clone(), &self.buffered)))
    }

    fn carried_by(&self, attempt: Attempt) -> Option<&Fetch> {
        self.carried.as_ref().filter(|(by, _)| *by == attempt).map(|(_, fetch)| fetch)
    }

    /// What is to be asked now.
    pub fn take_asks(&mut self) -> Vec<Ask> {
        std::mem::take(&mut self.asks)
    }

    /// Whether somebody waits for the answer to a try.
    #[must_use]
    pub fn awaits(&self, attempt: Attempt) -> bool {
        self.prefilling.awaits(attempt)
    }

    /// When [`Stage::on_deadline`] is due.
    #[must_use]
    pub fn deadline(&self) -> Timestamp {
        self.prefilling.deadline()
    }

    /// The decode server is this one.
    pub fn answered_by(&mut self, server: &Arc<Endpoint>) {
        self.decode.clone_from(server);
    }

    /// What ends the decode leg when the prefill leg has failed, where closing the connection doesn't.
    #[must_use]
    pub fn abort(&self) -> Option<Ask> {
        let server = self.prefilling.server(0)?;
        let leg = self.facts.leg(&self.direct, server, &self.base);
        let abort = self.direct.connector.abort_request(&leg)?;
        Some(Ask {
            attempt: None,
            url: self.direct.url(&self.decode, abort.path),
            headers: self.headers.clone(),
            body: abort.body.into(),
            timeout: self.direct.bounds.timeout,
            insecure_skip_verify: self.direct.insecure_skip_verify,
            release: None,
        })
    }

    /// The moment of [`Stage::deadline`] has come.
    pub fn on_deadline(&mut self, now: Timestamp, picker: &Picker) -> Came {
        if now >= self.prefilling.end() {
            self.count_late(None, now, picker);
        }
        let (pool, decode) = (&self.pool, &self.decode);
        let judge = Judge { pool, kind: self.facts.kind, now, picker };
        let next = match self.direct.is_together() {
            false => self.prefilling.late(now, |server, outcome| _ = judge.record(server, outcome)),
            // Which of the two has kept the other waiting nobody says. The one that does so does it with every other, so it is the first to be
            // ejected; when the answer's server is, the prompt's has done nothing.
            true => self.prefilling.late(now, |server, outcome| {
                if decode.health.availability(now, pool.scheduler.health()) == Availability::Ejected {
                    server.health.probe_lost();
                } else if !judge.record(decode, outcome) {
                    judge.record(server, outcome);
                }
            }),
        };
        self.follow(next, now)
    }

    /// A question has been answered, or has not.
    pub fn on_told(&mut self, attempt: Attempt, told: &Told, now: Timestamp, picker: &Picker) -> Came {
        let Some(server) = self.prefilling.server(attempt).filter(|_| self.awaits(attempt)) else {
            return Came::Waiting;
        };
        let failure = match told {
            Told::Reply { status: 200..=299, body } => match self.read(server, body) {
                Ok((decode, mut usage)) => {
                    let prefill = Some(server.clone());
                    let carried = self.carried_by(attempt).map(|carried| carried.tokens);
                    if carried.is_some() {
                        // What it got from elsewhere says nothing of its own cache.
                        usage.cached_tokens = None;
                    }
                    self.count_late(Some(attempt), now, picker);
                    let judge = Judge { pool: &self.pool, kind: self.facts.kind, now, picker };
                    self.prefilling.computed(attempt, &usage, now, |server, outcome| _ = judge.record(server, outcome));
                    picker.observer.event(Event::PrefillLeg(Ok(())));
                    let took = Some(now.since(self.began));
                    let kept = self.kept(attempt, body);
                    return Came::On(decode, Course { prefill, failure: None, took, carried, kept });
                }
                Err(failure) => failure,
            },
            Told::Reply { status, .. } => Failure::Status(*status),
            // As long as there is for all tries: who has kept whom waiting is judged at its end.
            Told::Failed(Failure::Late) => return self.on_deadline(now, picker),
            Told::Failed(failure) => *failure,
        };
        picker.observer.event(Event::PrefillLeg(Err(failure)));
        // Its leg is needed no more.
        self.releases.get_mut(attempt).and_then(Option::take);
        let judge = Judge { pool: &self.pool, kind: self.facts.kind, now, picker };
        let next = self.prefilling.failed(attempt, failure, now, |server, outcome| _ = judge.record(server, outcome));
        // Only who was not reached has fetched nothing for certain.
        if let (Failure::Refused, Next::Send(after)) = (failure, &next)
            && let Some((by, fetch)) = self.carried.as_mut().filter(|(by, _)| *by == attempt)
            && self.prefilling.server(*after).is_some_and(|server| fetch.servers.contains(&server.id))
        {
            *by = *after;
        }
        self.follow(next, now)
    }

    /// The decode leg that follows from a reply, and what the reply told.
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

    fn follow(&mut self, next: Next, now: Timestamp) -> Came {
        match next {
            Next::Wait => Came::Waiting,
            // The bodies of all tries are made alike: what worked for the first works for this one.
            Next::Send(attempt) if self.ask(attempt).is_some() => Came::Waiting,
            Next::Send(_) => self.give_up(Failure::Unusable, now),
            Next::GiveUp(failure) => self.give_up(failure, now),
        }
    }

    /// Counts the questions but `answered` that have had time and have no answer.
    fn count_late(&self, answered: Option<Attempt>, now: Timestamp, picker: &Picker) {
        let late = Event::PrefillLeg(Err(Failure::Late));
        self.prefilling.overdue(answered, now).for_each(|_| picker.observer.event(late));
    }

    fn give_up(&mut self, failure: Failure, now: Timestamp) -> Came {
        self.prefilling.give_up();
        let fails = self.direct.fallback == Fallback::Fail && !failure.is_nobodys();
        if fails || self.direct.is_together() {
            return Came::Refused(failure);
        }
        Came::On(None, Course { failure: Some(failure), took: Some(now.since(self.began)), ..Course::default() })
    }
}

/// Records the outcomes of one request's prompt for the health of servers of `pool`.
#[derive(Clone, Copy)]
struct Judge<'a> {
    pool: &'a Pool,
    kind: (Api, ClientSlot),
    now: Timestamp,
    picker: &'a Picker,
}

impl Judge<'_> {
    /// True when this ejects the server.
    fn record(self, server: &Endpoint, outcome: Health) -> bool {
        let Self { pool, kind: (api, client), now, picker } = self;
        let policy = pool.scheduler.health();
        let may_eject = || pool.store.load().may_eject(server, now, policy);
        let verdict = server.health.observe(Observation { outcome, api, client }, now, policy, may_eject);
        picker.observer.event(Event::Health(verdict));
        if verdict == Verdict::Ejected {
            tracing::warn!(pool = %pool.name, endpoint = %server.authority, ?outcome, "prefill worker ejected");
        }
        verdict == Verdict::Ejected
    }
}

impl Plan {
    /// The request, which was to be split, goes to its first pick.
    pub fn dispatch(&mut self, how: Dispatch<'_>, now: Timestamp) {
        if let Some(booked) = &mut self.booked {
            let snapshot = self.runtime.pool.store.load();
            booked.dispatch(how, &snapshot, self.runtime.pool.stale_after, now);
        }
    }

    /// The request is served by `to` and not by `from`, which was picked: so is what the strategy noted of it.
    pub fn noted_elsewhere(&self, from: EndpointId, to: EndpointId, now: Timestamp) {
        if let Some(trail) = &self.decision.trail {
            self.strategy.moved(&self.target, trail, from, to, now);
        }
    }
}
