//! The exchange of a split request. Attaché calls the prefill worker itself, before the decode worker gets the request
//! or at the same time, depending on the connector.
//!
//! ```text
//! Collecting ─end of body─▶ (decide) ─▶ Prefilling ─prefill ended─▶ Ended      prefill first
//!                                   └─▶ Ended, while the prefill still runs    both at once
//! ```

use super::{Actions, BodyEnd, Exchange, RequestSide, ResponseSide};
use crate::mode::BodyMode;
use crate::reply;
use attache_disagg::attempts::Attempt;
use attache_disagg::connector::trtllm::LEAST_SHARED_ID;
use attache_disagg::policy::{Direct, Mode};
use attache_disagg::{Failure, LegApi, is_for_sidecars};
use attache_picker::body::Body;
use attache_picker::decide::Plan;
use attache_picker::event::{End, RequestEvent, SplitOutcome};
use attache_picker::head::{ENCODERS, PREFILLER};
use attache_picker::split::{CachedBy, LegCall, LegProgress, LegResult, PrefillLeg, PrefillOutcome, SplitRequest};
use attache_pool::Endpoint;
use attache_quota::Had;
use attache_scheduling::split::not_alone;
use attache_scheduling::{Decision, Dispatch};
use attache_telemetry::trace::{PrefillSpan, RequestSpan};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use envoy_types::pb::envoy::config::core::v3::HeaderValueOption;
use envoy_types::pb::envoy::service::ext_proc::v3::HttpBody;
use rand::RngExt;
use std::sync::Arc;
use std::time::Duration;

/// 2^63 - 1: largest id by which both workers identify a request. SGLang and TensorRT-LLM read it as a signed integer.
const MAX_ROOM: u64 = i64::MAX as u64;

/// 5 s for the decode worker to end a response whose prefill failed after its headers had passed. SGLang's scheduler
/// checks aborts in each step, so a longer wait has no use.
const ABORT_PATIENCE: Duration = Duration::from_secs(5);

/// `error.type` of a prefill leg that Attaché gave up, because its request ended.
const ABANDONED: &str = "abandoned";
/// `error.type` of a prefill leg that was never sent: the connector can't split the request.
const UNSPLIT: &str = "not_splittable";

/// The state of a split request.
#[derive(Debug, Default)]
pub(super) struct Splitting {
    leg: Option<Box<PrefillLeg>>,
    /// The request to dispatch when the prefill leg ends; `None` if it was dispatched already.
    held: Option<(Box<Plan>, Body)>,
    /// Calls whose results are not awaited.
    detached: Vec<LegCall>,
    /// The prefill failed after the response headers passed. At this time Attaché resets the response, unless its body
    /// begins or ends before.
    cut: Option<(Timestamp, Failure)>,
    /// The gateway shows no more of the response, but the decode worker may still wait for the prefill.
    pub(super) is_unshown: bool,
    /// The span of the prefill leg, if the request is sampled.
    span: Option<PrefillSpan>,
}

impl Splitting {
    /// Whether calls are to be made.
    pub(super) fn has_calls(&self) -> bool {
        !self.detached.is_empty() || self.leg.is_some()
    }

    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.leg.as_ref().map(|leg| leg.deadline()).or(self.cut.map(|(at, _)| at))
    }

    /// The decode worker that responds. After retries of the gateway it may not be the planned one.
    pub(super) fn answered_by(&mut self, server: &Arc<Endpoint>) {
        if let Some(leg) = &mut self.leg {
            leg.answered_by(server);
        }
    }

    /// A chunk of the response arrived.
    pub(super) fn response_chunk(&mut self, message: &HttpBody) {
        if message.end_of_stream || !message.body.is_empty() {
            self.cut = None;
        }
    }

    /// The prefill leg has ended. `server`: the prefill worker; `failure`: why there is no prompt.
    fn end_trace(&mut self, server: Option<&Endpoint>, failure: Option<&'static str>, now: Timestamp) {
        if let Some(span) = self.span.take() {
            span.end(server, failure, now);
        }
    }

    /// The request has ended before its prefill leg.
    pub(super) fn abandon_trace(&mut self, now: Timestamp) {
        self.end_trace(None, Some(ABANDONED), now);
    }

    /// Adds a call whose result is not awaited.
    pub(super) fn add_detached(&mut self, call: Option<LegCall>) {
        self.detached.extend(call);
    }
}

impl Exchange {
    /// The calls to make to workers now. The caller sends [`Event::LegResult`](super::Event::LegResult) for each call
    /// that has an attempt.
    pub fn leg_calls(&mut self) -> Vec<LegCall> {
        let mut calls = self.split.leg.as_mut().map(|leg| leg.take_calls()).unwrap_or_default();
        calls.append(&mut self.split.detached);
        calls
    }

    /// Whether the result of this attempt is still awaited.
    #[must_use]
    pub fn awaits(&self, attempt: Attempt) -> bool {
        self.split.leg.as_ref().is_some_and(|leg| leg.awaits(attempt))
    }

    /// The prefill leg to watch after the gateway has closed the stream. Set in body modes that show no response body.
    pub fn take_unwatched(&mut self) -> Option<Box<PrefillLeg>> {
        if self.split.is_unshown { self.split.leg.take() } else { None }
    }

    /// Starts the prefill of `plan` on another worker, or leaves that to the sidecar of the decode worker.
    pub(super) fn begin_split(
        &mut self,
        mut plan: Box<Plan>,
        body: Body,
        close: BodyEnd,
        now: Timestamp,
        out: &mut Actions,
    ) {
        let mode = plan.runtime.pool.disagg.clone();
        let Some(Mode::Direct(direct)) = mode.as_deref() else {
            let mut scratch = Vec::new();
            let api = LegApi::from_path(self.head.path());
            if !api.is_some_and(|api| is_for_sidecars(api, body.contiguous(&mut scratch))) {
                return self.go_on_whole(plan, body, close, now, out);
            }
            let prefill = plan.prefill.as_ref().map(|booking| (booking.endpoint().clone(), booking.expected()));
            if let Some((server, before)) = &prefill {
                plan.dispatch(Dispatch::Arrives(server, *before), now);
            }
            plan.prefill_outcome = Some(PrefillOutcome {
                prefill: prefill.map(|(server, _)| server),
                cached_by: CachedBy::Sidecar,
                ..PrefillOutcome::default()
            });
            return self.go_on(plan, body, close, now, out);
        };
        let span = self.span.as_ref().and_then(|span| span.prefill(now));
        let leg = self.begin_leg(&mut plan, &body, direct, span.as_ref(), now);
        // The connector may find that it can't split this request after all.
        let Some((leg, decode)) = leg.and_then(|leg| leg.with_decode_leg()) else {
            let prefill = plan.decision.split.as_ref().and_then(|split| split.prefill.first());
            Splitting { span, ..Splitting::default() }.end_trace(None, Some(UNSPLIT), now);
            if !direct.connector_of(prefill.map(|server| &**server)).serves_whole() {
                count_refused(&plan);
                drop(plan);
                return self.refuse(&not_alone(), now, out);
            }
            return self.go_on_whole(plan, body, close, now, out);
        };
        plan.request_id = leg.new_request_id();
        let Some(decode) = decode else {
            self.request = RequestSide::Prefilling;
            self.split = Splitting { leg: Some(leg), held: Some((plan, body)), span, ..Splitting::default() };
            return;
        };
        plan.new_body = Some(decode);
        let prefill = leg.server(0).cloned();
        if let Some(server) = &prefill {
            plan.dispatch(Dispatch::Arrives(server, leg.expected()), now);
        }
        plan.prefill_outcome = Some(PrefillOutcome { prefill, ..PrefillOutcome::default() });
        (self.split.leg, self.split.span) = (Some(leg), span);
        self.go_on(plan, body, close, now, out);
    }

    /// The request can't be split after all: the decode worker prefills its prompt.
    fn go_on_whole(&mut self, mut plan: Box<Plan>, body: Body, close: BodyEnd, now: Timestamp, out: &mut Actions) {
        plan.prefill = None;
        plan.decision.split = None;
        plan.dispatch(Dispatch::Whole, now);
        self.go_on(plan, body, close, now, out);
    }

    fn begin_leg(
        &self,
        plan: &mut Plan,
        body: &Body,
        direct: &Direct,
        span: Option<&PrefillSpan>,
        now: Timestamp,
    ) -> Option<Box<PrefillLeg>> {
        let room = self.processor.picker.next_rng().random_range(LEAST_SHARED_ID..MAX_ROOM);
        let mut scratch = Vec::new();
        let renamed = plan.new_body.take();
        let bytes = renamed.as_deref().unwrap_or_else(|| body.contiguous(&mut scratch));
        let whole = || self.span.as_ref().and_then(RequestSpan::header);
        let trace = span.map(PrefillSpan::traceparent).or_else(whole);
        let within = (!self.modes().request.may_wait()).then(|| direct.within_message_timeout());
        let direct = within.as_ref().filter(|direct| !direct.is_together()).unwrap_or(direct);
        let request = SplitRequest { head: &self.head, body: bytes, trace };
        let leg = PrefillLeg::begin(plan, direct, request, room, &self.processor.picker.buffered, now);
        plan.new_body = renamed;
        leg.map(Box::new)
    }

    pub(super) fn on_leg_result(&mut self, attempt: Attempt, result: &LegResult, now: Timestamp, out: &mut Actions) {
        let Some(leg) = &mut self.split.leg else { return };
        let progress = leg.on_leg_result(attempt, result, now, &self.processor.picker);
        self.after_prefill(progress, now, out);
    }

    pub(super) fn on_split_deadline(&mut self, now: Timestamp, out: &mut Actions) {
        if let Some(leg) = &mut self.split.leg {
            let progress = leg.on_deadline(now, &self.processor.picker);
            self.after_prefill(progress, now, out);
        } else if let Some((_, failure)) = self.split.cut.take_if(|(at, _)| *at <= now) {
            // Envoy resets a response whose headers it has sent, whatever `failure_mode_allow` says.
            self.cut_short(failure, now, out);
        }
    }

    fn after_prefill(&mut self, progress: LegProgress, now: Timestamp, out: &mut Actions) {
        match &progress {
            LegProgress::Waiting => {}
            LegProgress::Proceed(_, outcome) => {
                self.split.end_trace(outcome.prefill.as_deref(), outcome.failure.map(Failure::code), now);
            }
            LegProgress::Refused(failure) => self.split.end_trace(None, Some(failure.code()), now),
        }
        let ended = match progress {
            LegProgress::Waiting => return,
            LegProgress::Proceed(new_body, prefill_outcome) => match self.split.held.take() {
                Some((mut plan, body)) => {
                    self.split.leg = None;
                    let (subset, prefill) = (self.subset.as_ref(), prefill_outcome.prefill.as_deref());
                    let replaced = plan.replace_target(&self.head, subset, prefill, now, &self.processor.picker);
                    if let Err(error) = replaced {
                        count_refused(&plan);
                        return self.refuse(&error, now, out);
                    }
                    if let (Some(took), true) = (prefill_outcome.took, prefill_outcome.prefill.is_some()) {
                        plan.runtime.observer.event(RequestEvent::Prefilled(took));
                    }
                    plan.new_body = new_body.or(plan.new_body.take());
                    let how = prefill_outcome.prefill.as_deref();
                    plan.dispatch(how.map_or(Dispatch::Whole, |server| Dispatch::Arrives(server, 0.0)), now);
                    plan.prefill_outcome = Some(prefill_outcome);
                    self.go_on(plan, body, BodyEnd::Whole, now, out);
                    return self.report_capacity(now);
                }
                // Both workers got the request at once, so it was dispatched already.
                None => None,
            },
            LegProgress::Refused(failure) => Some(failure),
        };
        // A response body that has begun proves that the prefill succeeded, whatever the call reported.
        let Some(failure) = ended.filter(|_| !self.response_has_begun()) else {
            self.split.leg = None;
            return self.report_capacity(now);
        };
        self.abandon_split(now);
        if self.response == ResponseSide::Streaming {
            self.split.cut = Some((now.after(ABORT_PATIENCE), failure));
        }
        if self.response == ResponseSide::Awaited {
            self.cut_short(failure, now, out);
        }
    }

    fn cut_short(&mut self, failure: Failure, now: Timestamp, out: &mut Actions) {
        self.refuse_in_flight(End::Aborted, &prefill_error(failure), now, out);
    }

    /// The prefill worker has finished its part, so the queue may dequeue other requests before the response ends.
    fn report_capacity(&self, now: Timestamp) {
        if let Some(admitted) = self.in_flight.as_ref().and_then(|in_flight| in_flight.admitted()) {
            admitted.freed(now);
        }
    }

    /// Whether a chunk of the response body has arrived. Always false in modes that show no response body.
    fn response_has_begun(&self) -> bool {
        let watched = self.modes().response != BodyMode::None;
        match &self.in_flight {
            Some(in_flight) => in_flight.has_begun(),
            None => self.response == ResponseSide::Ended && watched,
        }
    }

    /// The client disconnected during the prefill. Its quotas are charged the full reservation, and another request may
    /// probe the decode worker.
    pub(super) fn lose_held(&mut self) {
        let Some((plan, _)) = &mut self.split.held else { return };
        lose_probe(plan);
        plan.permits.drain(..).for_each(|permit| permit.settle(Had::AS_BOOKED));
    }

    /// Abandons the prefill leg, because the request ends before its response.
    pub(super) fn abandon_split(&mut self, now: Timestamp) {
        self.split.abandon_trace(now);
        let (leg, held) = (self.split.leg.take(), self.split.held.take());
        // The booking on the prefill worker ends first: the end of the plan makes the queue look for capacity. If the
        // decode worker has the request, it waits for a prefill that will not complete.
        self.split.add_detached(leg.and_then(|leg| leg.abort()));
        if let Some((plan, _)) = held {
            count_refused(&plan);
        }
    }
}

/// Counts a split request that is not dispatched. Another request may probe its decode worker.
fn count_refused(plan: &Plan) {
    plan.runtime.observer.event(RequestEvent::Split(SplitOutcome::Refused));
    lose_probe(plan);
}

fn lose_probe(plan: &Plan) {
    let first = plan.decision.picks.first().filter(|_| plan.decision.probe);
    if let (Some(first), Some(booked)) = (first, &plan.booked) {
        booked.tape().probe_lost(first);
    }
}

/// The error response for a request whose prefill failed.
fn prefill_error(failure: Failure) -> RequestError {
    match failure {
        // A client error: the decode worker would reject the request too, but it is still waiting for the prefill.
        Failure::Status(status) if failure.is_nobodys() => {
            let message = format!("the prefill worker rejected the request with status {status}");
            RequestError::new(Reason::PrefillDeclined, message)
        }
        _ => {
            let message = format!("no prefill worker computed the prompt ({})", failure.code());
            RequestError::new(Reason::PrefillFailed, message)
        }
    }
}

/// Sets the headers that name the prefill worker and the encode workers to llm-d's sidecar.
pub(super) fn sidecar_headers(sent: &Decision, set: &mut Vec<HeaderValueOption>, remove: &mut Vec<String>) {
    let encoders: Vec<&str> = sent.encode.iter().map(|e| &*e.authority).collect();
    let prefiller = sent.split.as_ref().and_then(|split| split.prefill.first()).map(|p| p.authority.to_string());
    let encoders = (!encoders.is_empty()).then(|| encoders.join(","));
    for (name, value) in [(PREFILLER, prefiller), (ENCODERS, encoders)] {
        if let Some(value) = value {
            remove.retain(|removed| removed != name);
            set.push(reply::set(name, value));
        }
    }
}
