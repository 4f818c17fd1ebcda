//! Observes the response of a request in flight: headers, chunks, end, disconnect. Chunks pass at once; only a model
//! name that is cut by a chunk boundary is held back.
//!
//! [`InFlight`] calls one struct for each concern, in an order that recordings and queues depend on:
//!
//! | concern | struct |
//! |---|---|
//! | health of endpoints, probes | `WorkerHealth` in `health.rs` |
//! | ledger, reservations, ranks, admission | `OpenBookings` in `bookings.rs` |
//! | blocks that a prefill worker keeps | `PinnedBlocks` in `prefill.rs` |
//! | token counts, response id, errors in the stream | `Scanner` in `scanner.rs` |
//! | model name | `ModelName` in `model_name.rs` |
//! | blocks for the prefix cache and the next turn | `ResponseLearning` in `learning.rs` |
//! | quotas of tenant and model | `Charges` in `charges.rs` |
//! | headers of the response | `AddedHeaders` in `headers.rs`, the route receipt in `receipt.rs` |
//! | log messages about responses that can't be read | [`ResponseWarnings`] in `warnings.rs` |
//! | metrics, trace, decision log | `RequestReports` in `reports.rs` |

use super::active::PoolRuntime;
use super::decide::Plan;
use super::identity::Turn;
use super::picker::Picker;
use super::queues::AdmittedRequest;
use super::split::{LegCall, NotAccepted};
use super::tenant::Tenant;
use crate::event::{Degraded, End, Event, NameObserver, RequestTrace};
use crate::settings::{ExchangeSettings, UsageCount};
use attache_pool::Endpoint;
use attache_protocol::Api;
use attache_record::Booked;
use attache_request::agent::AgentIdentity;
use attache_types::clock::Timestamp;
use bookings::OpenBookings;
use charges::Charges;
use headers::AddedHeaders;
use health::WorkerHealth;
use learning::ResponseLearning;
use model_name::ModelName;
use prefill::PinnedBlocks;
use receipt::RouteReceipt;
use reports::RequestReports;
use scanner::Scanner;
use std::sync::Arc;

mod bookings;
mod charges;
mod fields;
mod headers;
mod health;
mod learning;
mod model_name;
mod prefill;
mod receipt;
mod reports;
mod scanner;
mod warnings;

pub use fields::{EarlierAttempt, HeaderChanges, Origin, ResponseHead};
pub use warnings::ResponseWarnings;

/// A decided request, as its stream knows it.
#[derive(Debug)]
pub struct OpenedRequest<'a> {
    /// The request's API.
    pub api: Api,
    /// The time at which the request's headers arrived.
    pub opened: Timestamp,
    /// The request's id for the decision log.
    pub request_id: String,
    /// The tenant for which the request is counted.
    pub tenant: &'a Tenant,
    /// The trace, if the request is sampled. It ends together with the request.
    pub span: Option<Box<dyn RequestTrace>>,
    /// Settings of the headers that are added to the response.
    pub settings: &'a ExchangeSettings,
}

/// A request in flight, from the decision to the end of its response. Dropping it releases its bookings.
#[derive(Debug)]
pub struct InFlight {
    runtime: Arc<PoolRuntime>,
    api: Api,
    status: u16,
    /// Where the response comes from.
    origin: Origin,
    /// The response is an event stream.
    sse: bool,
    /// The response is read, so a compressed one is a degraded mode.
    reads: bool,
    /// Both workers got the request at once, so the one that responds may wait for its prompt.
    meets: bool,
    health: WorkerHealth,
    blocks: PinnedBlocks,
    scanner: Scanner,
    model: ModelName,
    learning: ResponseLearning,
    added_headers: AddedHeaders,
    reports: RequestReports,
    charges: Charges,
    /// The request as one of its program's, and whether it is the last one of its session.
    turn: Option<(Turn, bool)>,
    /// Dropped last: the request that the queue dequeues then must see everything else released.
    bookings: OpenBookings,
}

impl InFlight {
    /// Observes the response to the request of `plan`, with its booking `booked`. Counts the request for its model and
    /// its tenant.
    #[must_use]
    pub fn begin(plan: Plan, booked: Booked, request: OpenedRequest<'_>, now: Timestamp, picker: &Picker) -> Self {
        let (api, settings) = (request.api, request.settings);
        let receipt = settings.route_header.then(|| RouteReceipt::of(&plan, booked.endpoint()));
        let begin = |agent: &AgentIdentity| (picker.programs.begin(agent, booked.endpoint()), plan.ends_session);
        let turn = plan.agent.as_deref().map(begin);
        let shared = plan.prefill_outcome.as_ref().is_some_and(|prefill_outcome| prefill_outcome.prefill.is_some());
        Self {
            runtime: plan.runtime.clone(),
            api,
            status: 0,
            origin: Origin::Server,
            sse: false,
            reads: plan.reads_response(api),
            meets: plan.meets(),
            health: WorkerHealth::new(&plan, &booked, api),
            scanner: Scanner::new(plan.ceiling, plan.choices),
            model: ModelName::new(&plan, api),
            reports: RequestReports::begin(&plan, &booked, request, now, &*picker.observer),
            added_headers: AddedHeaders::new(plan.strategy.clone(), plan.profile, receipt, settings),
            blocks: PinnedBlocks { outcome: plan.prefill_outcome, release: None },
            learning: ResponseLearning::new(api, plan.tail, plan.conversation.filter(|_| shared)),
            charges: Charges(plan.permits),
            turn,
            bookings: OpenBookings {
                response: booked,
                prefill: plan.prefill,
                hints: plan.hints,
                strategy: plan.strategy,
                model: plan.target,
                trail: plan.decision.trail,
                admitted: plan.admitted,
            },
        }
    }

    /// The observer of its model; `None` if the model is unknown.
    #[must_use]
    pub fn model_counts(&self) -> Option<&dyn NameObserver> {
        self.reports.model_counts()
    }

    /// The admission by the queue, in pools with a queue.
    #[must_use]
    pub fn admitted(&self) -> Option<&AdmittedRequest> {
        self.bookings.admitted.as_ref()
    }

    /// Whether a more important request may preempt this one.
    #[must_use]
    pub fn is_preemptible(&self) -> bool {
        self.admitted().is_some_and(AdmittedRequest::is_preemptible)
    }

    /// Whether a chunk of the response body has arrived.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.reports.has_begun()
    }

    /// The endpoint that responds, as far as it is known.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        self.bookings.endpoint()
    }

    /// Whether the response has a 2xx status.
    #[must_use]
    pub fn is_good(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The call to make because of this response, if any. Its result is not awaited.
    pub fn take_detached(&mut self) -> Option<LegCall> {
        self.blocks.release.take()
    }

    /// A token count that the model server has reported; `None` if it has reported none.
    #[must_use]
    pub fn used(&self, count: UsageCount) -> Option<u64> {
        count.of(self.blocks.token_counts(self.scanner.usage()?))
    }

    /// Handles the response headers: records the outcome in the endpoint's health, and returns the header changes.
    pub fn headers(&mut self, head: &ResponseHead<'_>, now: Timestamp, picker: &Picker) -> HeaderChanges {
        self.bookings.responds(now);
        (self.status, self.sse, self.origin) = (head.status, head.sse, head.origin);
        self.reports.status(head.status);
        self.blocks.answered(head.retried);
        self.health.attempted(head, now, &*picker.observer);
        self.follow(head, now, picker);
        self.health.judge(head, self.meets && head.shows_body, now, &*picker.observer);
        self.release(head.untaken(), now, picker);
        if head.shows_body && head.encoded && self.reads {
            picker.observer.event(Event::Degraded(Degraded::EncodedResponse));
            picker.warnings.encoded(&self.runtime.pool.name, self.bookings.endpoint(), now);
        }
        let drops_length = head.shows_body && !head.encoded && self.begin_body(head);
        let set = self.added_headers.of(head, self.bookings.endpoint(), &self.charges, &self.blocks);
        HeaderChanges { set, drops_length }
    }

    /// Envoy may have retried on another endpoint. The bookings move there.
    fn follow(&mut self, head: &ResponseHead<'_>, now: Timestamp, picker: &Picker) {
        let Some(served) = head.served.filter(|a| *a != self.bookings.endpoint().spec.address) else { return };
        // An earlier endpoint may have fetched the blocks.
        self.blocks.leave();
        let snapshot = self.runtime.pool.store.load();
        if let Some(state) = snapshot.position(served).and_then(|p| snapshot.get(p)) {
            self.health.retried(head, &state.endpoint, now, &*picker.observer);
            self.bookings.move_to(&state.endpoint, now);
        }
    }

    /// If the decode worker did not accept the request, releases the blocks that the prefill worker keeps.
    fn release(&mut self, untaken: Option<NotAccepted>, now: Timestamp, picker: &Picker) {
        self.blocks.release(untaken, self.bookings.endpoint(), &self.runtime.pool, now, &*picker.observer);
    }

    /// Prepares to read the response body; true if the body's length may change.
    fn begin_body(&mut self, head: &ResponseHead<'_>) -> bool {
        self.scanner.begin(self.api, head);
        if head.is_good() && self.api.generates() {
            self.learning.begin(head.format(), self.bookings.response.learns_answer());
        }
        self.model.begin()
    }

    /// Observes a chunk of the response body; `end`: it is the last one. Returns the replacing bytes if the model
    /// name must be replaced.
    pub fn chunk(&mut self, bytes: &[u8], end: bool, now: Timestamp, picker: &Picker) -> Option<Vec<u8>> {
        if !self.has_begun() && !bytes.is_empty() {
            self.first_byte(now, picker);
        }
        self.model.report(self.status, bytes, &self.runtime.pool.rules, now);
        self.learning.push(bytes);
        self.scanner.push(bytes);
        // Not only at the end: a client may continue or cancel a response that is still running.
        if let Some(id) = self.scanner.take_response_id() {
            let (pool, endpoint) = (&self.runtime.pool.name, self.bookings.endpoint());
            let response = picker.responses.learn(pool, id, endpoint.id);
            if let Some(agent) = self.reports.agent() {
                picker.programs.stored(agent, id);
            }
            if let Some(replica) = &picker.replica {
                replica.stored(pool, &endpoint.spec, response, now);
            }
        }
        self.bookings.generated(self.scanner.tokens(), now);
        // A worker may reject a streaming request with status 200 and an error as first event. Other errors may occur
        // after it has fetched the blocks.
        if self.has_begun() {
            let error = self.scanner.error_status().and_then(NotAccepted::of);
            self.release(error.filter(|why| *why == NotAccepted::Away), now, picker);
            self.blocks.leave();
        }
        self.model.replace(bytes, end)
    }

    /// The first byte of the response body has arrived.
    fn first_byte(&mut self, now: Timestamp, picker: &Picker) {
        let good = self.is_good();
        if good && self.meets {
            self.health.succeeded(now, &*picker.observer);
        }
        // A response that is not streamed arrives complete, so its first byte says nothing about the first token.
        self.bookings.first_byte(good, self.sse || !self.api.generates(), now);
        self.reports.first_byte(self.sse, now);
        self.bookings.free_capacity(now);
    }

    /// The bytes that were held back, if the response ends with trailers.
    pub fn leftover(&mut self) -> Option<Vec<u8>> {
        self.model.replace(&[], true).filter(|bytes| !bytes.is_empty())
    }

    /// The end as operators see it: a response of the gateway in place of the endpoint is no complete one.
    fn reported(&self, end: End) -> End {
        match (end, self.origin) {
            (End::Complete | End::Unwatched, Origin::Unreachable) => End::ConnectFailure,
            (End::Complete | End::Unwatched, Origin::Gateway) => End::Gateway,
            _ => end,
        }
    }

    /// Attaché ends the request. Its client gets this HTTP status, unless the response has begun.
    pub fn refused(mut self, end: End, status: u16, now: Timestamp, picker: &Picker) {
        self.reports.refused(status);
        self.end(end, now, picker);
    }

    /// The response ended, as far as the gateway shows it: releases all bookings and counts the request.
    pub fn end(mut self, end: End, now: Timestamp, picker: &Picker) {
        let (complete, observer) = (end == End::Complete, &*picker.observer);
        let usage = self.blocks.token_counts(self.scanner.usage().unwrap_or_default());
        self.reports.ended(self.reported(end), usage, now);
        if complete {
            self.learning.record_turn(usage.prompt_tokens, self.bookings.endpoint().id, now, observer);
        }
        self.health.lose_probes();
        let learning = &mut self.learning;
        self.bookings.response.end(complete, &usage, |keys| complete && learning.extend(keys, observer), now);
        self.health.lose_prefill_probe();
        self.bookings.end_prefill(complete, &usage, now);
        self.reports.used(usage);
        if complete && (200..300).contains(&self.status) {
            self.charges.answered(&self.bookings.model);
        }
        self.charges.settle(&usage, self.scanner.tokens(), self.status, end);
        let served = self.bookings.end_admission(complete, &usage, now);
        if let Some((replica, served)) = picker.replica.as_ref().zip(served) {
            replica.served(&self.runtime.pool.name, served, now);
        }
        let ends_session = self.turn.take().is_some_and(|(_, is_final)| is_final);
        if let Some(agent) = self.reports.agent().filter(|_| ends_session) {
            picker.end_agent(agent, now);
        }
        self.scanner.report(observer);
        if let Some(reason) = self.scanner.unread_count() {
            picker.warnings.unread_count(&self.runtime.pool.name, self.bookings.endpoint(), reason, now);
        }
        self.reports.finish(self.bookings.endpoint(), self.blocks.outcome.as_ref(), observer);
    }
}

#[cfg(test)]
mod tests;
