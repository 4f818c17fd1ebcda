//! Observes the response of a routed request: status, first byte, token usage and end. Chunks pass at once; only a
//! model name that is cut by a chunk boundary is held back.

use super::conversation::Conversation;
use super::decide::Plan;
use super::lookup::guarded;
use super::picker::Picker;
use super::prefix::{PoolPrefix, Tail};
use super::queues::AdmittedRequest;
use super::split::{LegCall, NotAccepted, ReleaseOutcome};
use super::tenant::Tenant;
use crate::event::{DecisionRecord, Degraded, End, Event, Limit, NameEvent, NameObserver, RequestEvent, RequestTrace};
use crate::settings::{ExchangeSettings, UsageCount};
use attache_disagg::Failure;
use attache_pool::Endpoint;
use attache_pool::health::Outcome as Health;
use attache_prefix::key::BlockKey;
use attache_protocol::answer::{AnswerFormat, AnswerText, DEFAULT_MAX_ANSWER_BYTES};
use attache_protocol::{Api, ModelRenamer, TransferScanner, Usage};
use attache_quota::{Had, Subject};
use attache_record::Booked;
use attache_types::clock::Timestamp;
use scanner::Scanner;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

mod fields;
mod health;
mod scanner;

pub use fields::{HeaderChanges, Origin, ResponseHead};

/// 4 KiB: how much of a 404's body is searched for the model name.
const MAX_DENIAL_BYTES: usize = 4 << 10;
/// Value of the conformance suite's response header if the gateway does not report the served endpoint, as in GIE's
/// `lwepp`.
const NO_SERVED_ENDPOINT: &str = "fail: missing envoy lb metadata";

/// A routed request, from the decision to the end of its response. Dropping it releases its bookings.
#[derive(Debug)]
pub struct Routed {
    plan: Plan,
    picked: Arc<Endpoint>,
    booking: Booked,
    /// The incomplete last block of the prompt, which the response continues.
    tail: Option<(Arc<PoolPrefix>, Tail)>,
    /// The request is the half-open probe of the endpoint, and its outcome is not recorded yet.
    probes: bool,
    /// The same for the prefill worker of a sidecar.
    probes_prefill: bool,
    /// The same for the first encode worker.
    probes_encoder: bool,
    api: Api,
    opened: Timestamp,
    request_id: String,
    status: u16,
    sse: bool,
    first_byte: Option<Timestamp>,
    scanner: Option<Scanner>,
    answer: Option<Box<AnswerText>>,
    /// The turn of the conversation, and the scanner for its transfer parameters.
    conversation: Option<(Box<Conversation>, Box<TransferScanner>)>,
    id_learned: bool,
    renamer: Option<ModelRenamer>,
    span: Option<Box<dyn RequestTrace>>,
    conformance: bool,
    /// The response headers name the prefill worker.
    names_prefill: bool,
    /// A call that releases the blocks that the prefill worker keeps.
    detached: Option<LegCall>,
    /// The observers of its model and its tenant.
    counts: SmallVec<[Arc<dyn NameObserver>; 2]>,
}

impl Routed {
    /// Observes the response to the request of `plan`, with its booking `booked`.
    #[must_use]
    pub fn new(mut plan: Plan, booked: Booked, api: Api, opened: Timestamp, request_id: String) -> Self {
        Self {
            picked: booked.endpoint().clone(),
            booking: booked,
            tail: plan.tail.take(),
            probes: plan.decision.probe,
            probes_prefill: plan.prefill.is_some() && plan.decision.split.as_ref().is_some_and(|split| split.probe),
            probes_encoder: plan.decision.encode_probe,
            answer: None,
            conversation: None,
            api,
            opened,
            request_id,
            status: 0,
            sse: false,
            first_byte: None,
            scanner: None,
            id_learned: false,
            renamer: None,
            span: None,
            conformance: false,
            names_prefill: false,
            detached: None,
            counts: SmallVec::new(),
            plan,
        }
    }

    /// Ends `span` together with the request.
    pub fn trace(&mut self, span: Option<Box<dyn RequestTrace>>) {
        self.span = span;
    }

    /// Counts the request for its model and its tenant.
    pub fn count_for(&mut self, tenant: &Tenant, now: Timestamp, picker: &Picker) {
        let observer = &picker.observer;
        if !self.plan.target.is_empty() {
            let model = observer.named(Subject::Model, &self.plan.target, now);
            if self.plan.understood {
                let (cached_tokens, prompt_tokens) = (self.plan.matched_tokens, self.plan.prompt_tokens);
                model.event(NameEvent::Matched { cached_tokens, prompt_tokens });
            }
            if self.plan.decision.diverted {
                model.event(NameEvent::Diverted);
            }
            self.counts.push(model);
        }
        if *tenant != Tenant::Unconfigured {
            self.counts.push(observer.named(Subject::Tenant, tenant.name().unwrap_or_default(), now));
        }
        self.counts.iter().for_each(|counts| counts.event(NameEvent::Routed));
    }

    /// The observer of its model; `None` if the model is unknown.
    #[must_use]
    pub fn model_counts(&self) -> Option<&dyn NameObserver> {
        self.counts.first().filter(|_| !self.plan.target.is_empty()).map(|counts| &**counts)
    }

    /// Enables the response headers that show addresses, as `settings` say: those of the conformance suite, and the
    /// prefill worker's.
    pub fn shows(&mut self, settings: &ExchangeSettings) {
        self.conformance = settings.conformance_headers;
        self.names_prefill = settings.prefill_endpoint_header;
    }

    /// The admission by the queue, in pools with a queue.
    #[must_use]
    pub fn admitted(&self) -> Option<&AdmittedRequest> {
        self.plan.admitted.as_ref()
    }

    /// Whether a more important request may preempt this one.
    #[must_use]
    pub fn is_preemptible(&self) -> bool {
        self.plan.admitted.as_ref().is_some_and(AdmittedRequest::is_preemptible)
    }

    /// Whether a chunk of the response body has arrived.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.first_byte.is_some()
    }

    /// Handles the response headers: records the outcome in the endpoint's health, and returns the header changes.
    pub fn headers(&mut self, head: &ResponseHead<'_>, now: Timestamp, picker: &Picker) -> HeaderChanges {
        if let Some(admitted) = &mut self.plan.admitted {
            admitted.answers(now);
        }
        self.status = head.status;
        self.sse = head.sse;
        self.plan.runtime.observer.event(RequestEvent::Status(head.status));
        self.plan.prefill_outcome.iter_mut().for_each(|prefill_outcome| prefill_outcome.answered(head.retried));
        self.follow(head, now, picker);
        let waits = self.plan.meets() && head.shows_body;
        self.judge(head, waits, now, picker);
        self.release(head.untaken(), now, picker);
        let drops_length = self.watch_body(head);
        HeaderChanges { set: self.new_headers(head), drops_length }
    }

    /// Prepares to scan the response body; true if the body's length may change.
    fn watch_body(&mut self, head: &ResponseHead<'_>) -> bool {
        if !head.shows_body || head.encoded {
            return false;
        }
        self.scanner = Some(Scanner::new(self.api, head, &self.plan));
        if head.is_good() && self.api.generates() {
            self.read_answer(head.format());
        }
        let Some(from) = &self.plan.renamed_from else { return false };
        self.renamer = ModelRenamer::new(&self.plan.target, from);
        true
    }

    /// Headers to add to the response.
    fn new_headers(&self, head: &ResponseHead<'_>) -> Vec<(Cow<'static, str>, String)> {
        let mut set = Vec::new();
        // No session affinity to an endpoint that just failed.
        if head.status < 500 {
            self.plan.strategy.response_headers(self.booking.endpoint(), &mut set);
        }
        if let Some(profile) = &self.plan.profile {
            set.push(("x-aibrix-config-profile".into(), profile.to_string()));
        }
        let named = |(name, value): (&'static str, String)| (Cow::Borrowed(name), value);
        for permit in &self.plan.permits {
            set.extend(permit.headers().map(named));
        }
        if let Some(prefill_outcome) = &self.plan.prefill_outcome {
            set.extend(prefill_outcome.headers(self.names_prefill).map(named));
        }
        if self.conformance {
            let served = head.reported.unwrap_or(NO_SERVED_ENDPOINT);
            set.push(("x-conformance-test-served-endpoint".into(), served.to_owned()));
            set.push(("x-went-into-resp-headers".into(), "true".to_owned()));
        }
        set
    }

    /// The endpoint that responds, as far as it is known.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        self.booking.endpoint()
    }

    /// Whether the response has a 2xx status.
    #[must_use]
    pub fn is_good(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The call to make because of this response, if any. Its result is not awaited.
    pub fn take_detached(&mut self) -> Option<LegCall> {
        self.detached.take()
    }

    /// If the decode worker did not accept the request, releases the blocks that the prefill worker keeps.
    fn release(&mut self, untaken: Option<NotAccepted>, now: Timestamp, picker: &Picker) {
        let Some(why) = untaken else { return };
        let Some(pinned) = self.plan.prefill_outcome.as_mut().and_then(|prefill_outcome| prefill_outcome.pinned.take())
        else {
            return;
        };
        match pinned.release_outcome(why, self.booking.endpoint(), &self.plan.runtime.pool, now) {
            ReleaseOutcome::Release(ask) => self.detached = Some(ask),
            ReleaseOutcome::AttemptUnknown => picker.observer.event(Event::Degraded(Degraded::AttemptsUntold)),
            ReleaseOutcome::LeaseExpires => {}
        }
    }

    /// Prepares to read the text and tokens of the response, if they are recorded for the next turn.
    fn read_answer(&mut self, format: AnswerFormat) {
        let shared =
            self.plan.prefill_outcome.as_ref().is_some_and(|prefill_outcome| prefill_outcome.prefill.is_some());
        let conversation = self.plan.conversation.take().filter(|_| shared);
        self.conversation = conversation.and_then(|conversation| {
            let scanner = conversation.scanner(self.api, format)?;
            Some((conversation, Box::new(scanner)))
        });
        let kept = self.conversation.as_ref().is_some_and(|(conversation, _)| conversation.reads_text());
        if kept || self.tail.is_some() && self.booking.learns_answer() {
            self.answer = AnswerText::new(self.api, format, DEFAULT_MAX_ANSWER_BYTES).map(Box::new);
        }
    }

    /// A token count that the model server has reported; `None` if it has reported none.
    #[must_use]
    pub fn used(&self, count: UsageCount) -> Option<u64> {
        let usage = self.scanner.as_ref().and_then(Scanner::usage)?;
        match count {
            UsageCount::Prompt => usage.prompt_tokens,
            UsageCount::Cached => usage.cached_tokens,
            UsageCount::Completion => usage.completion_tokens,
            UsageCount::Total => {
                Some(usage.prompt_tokens.unwrap_or(0).saturating_add(usage.completion_tokens.unwrap_or(0)))
            }
        }
    }

    /// Observes a chunk of the response body; `end`: it is the last one. Returns the replacing bytes if the model
    /// name must be replaced.
    pub fn chunk(&mut self, bytes: &[u8], end: bool, now: Timestamp, picker: &Picker) -> Option<Vec<u8>> {
        if self.first_byte.is_none() && !bytes.is_empty() {
            self.begin(now, picker);
        }
        self.look_for_target(bytes, now);
        self.read(bytes, now, picker);
        // A worker may reject a streaming request with status 200 and an error as first event. Other errors may occur
        // after it has fetched the blocks.
        if self.first_byte.is_some() {
            let error = self.scanner.as_ref().and_then(Scanner::error_status);
            let busy = error.and_then(NotAccepted::of).filter(|why| *why == NotAccepted::Away);
            self.release(busy, now, picker);
            self.plan.prefill_outcome.iter_mut().for_each(|prefill_outcome| prefill_outcome.pinned = None);
        }
        let renamer = self.renamer.as_mut()?;
        let mut renamed = Vec::new();
        renamer.push(bytes, end, &mut renamed).then_some(renamed)
    }

    /// The first byte of the response body has arrived.
    fn begin(&mut self, now: Timestamp, picker: &Picker) {
        self.first_byte = Some(now);
        // A response that is not streamed arrives complete, so its first byte says nothing about the first token.
        let tells = self.sse || !self.api.generates();
        let good = self.is_good();
        if good && self.plan.meets() {
            self.probes = false;
            self.record(&self.booking.endpoint().clone(), Health::Success, now, picker);
        }
        self.booking.first_byte(good, tells, now);
        // The sidecar has completed the prefill before, but does not report when.
        if let Some(prefill) = &mut self.plan.prefill {
            prefill.first_byte(good, false, now);
        }
        self.plan.runtime.observer.event(RequestEvent::FirstByte(now.since(self.opened)));
        if let Some(span) = &mut self.span {
            span.first_byte(now);
        }
        if let Some(admitted) = &self.plan.admitted {
            admitted.freed(now);
        }
    }

    /// Scans a chunk of the response body: text, token counts, response id.
    fn read(&mut self, bytes: &[u8], now: Timestamp, picker: &Picker) {
        if let Some(answer) = &mut self.answer {
            answer.push(bytes);
        }
        if let Some((_, scanner)) = &mut self.conversation {
            scanner.push(bytes);
        }
        let Some(scanner) = &mut self.scanner else { return };
        scanner.push(bytes);
        // Not only at the end: a client may continue or cancel a response that is still running.
        if !self.id_learned
            && let Some(id) = scanner.response_id()
        {
            self.id_learned = true;
            picker.responses.learn(&self.plan.runtime.pool.name, id, self.booking.endpoint().id);
        }
        if let Some(admitted) = &mut self.plan.admitted {
            admitted.answered(scanner.tokens(), now);
        }
    }

    /// Reports to the pool's rules whether the endpoint serves the target model. A 404 counts only if its body names
    /// the model, because a client can cause other 404s with an unknown path.
    fn look_for_target(&self, body: &[u8], now: Timestamp) {
        let target = self.plan.target.as_bytes();
        // In the Responses API, a 404 may repeat a response id from the request.
        if target.is_empty() || !self.api.generates() || self.api == Api::Responses {
            return;
        }
        let model = self.plan.renamed_from.as_ref().unwrap_or(&self.plan.target);
        let rules = &self.plan.runtime.pool.rules;
        let head = body.get(..MAX_DENIAL_BYTES).unwrap_or(body);
        if self.status == 404 && head.windows(target.len()).any(|bytes| bytes == target) {
            rules.target_missing(model, &self.plan.target, now);
        } else if self.is_good() && !body.is_empty() {
            rules.target_served(model, &self.plan.target, now);
        }
    }

    /// The bytes that were held back, if the response ends with trailers.
    pub fn leftover(&mut self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        self.renamer.as_mut()?.push(&[], true, &mut bytes);
        Some(bytes).filter(|b| !b.is_empty())
    }

    /// The response ended, as far as the gateway shows it: releases all bookings and counts the request.
    pub fn end(mut self, end: End, now: Timestamp, picker: &Picker) {
        let usage = self.scanner.as_ref().and_then(Scanner::usage).unwrap_or_default();
        let after = now.since(self.opened);
        self.plan.runtime.observer.event(RequestEvent::Ended { end, after, usage });
        let complete = end == End::Complete;
        self.release_bookings(complete, &usage, now, picker);
        self.counts.iter().for_each(|counts| counts.event(NameEvent::Used(usage)));
        let output = self.scanner.as_ref().map_or(0, Scanner::tokens);
        for permit in self.plan.permits.drain(..) {
            permit.settle(actual_usage(&usage, output, self.status, end));
        }
        if let Some(admitted) = self.plan.admitted.take() {
            admitted.end(&usage, complete, now);
        }
        if self.scanner.as_ref().is_some_and(Scanner::is_capped) {
            picker.observer.event(Event::Limit(Limit::ReportedTokens));
        }
        if self.scanner.as_ref().and_then(Scanner::error_status).is_some() {
            picker.observer.event(Event::ErrorInStream);
        }
        if let Some(span) = self.span.take() {
            span.end(self.status, usage.completion_tokens, now);
        }
        if picker.observer.keeps_decisions() {
            picker.observer.log(self.decision_record(end, &usage, now));
        }
    }

    /// Releases the bookings on endpoints. If the response is `complete`, records it in the prefix index.
    fn release_bookings(&mut self, complete: bool, usage: &Usage, now: Timestamp, picker: &Picker) {
        let (api, tail, answer) = (self.api, self.tail.take(), self.answer.take());
        let answer = answer.as_ref().filter(|_| complete).and_then(|a| a.finish());
        if let Some((conversation, scanner)) = self.conversation.take().filter(|_| complete) {
            let served = self.booking.endpoint().id;
            guarded(&*picker.observer, || conversation.learn(&scanner, answer, usage.prompt_tokens, served, now));
        }
        let extend = |keys: &mut Vec<BlockKey>| match (tail, answer) {
            (Some((prefix, mut tail)), Some(answer)) => {
                guarded(&*picker.observer, || prefix.extend(&mut tail, api, answer, keys)).unwrap_or(false)
            }
            _ => false,
        };
        if self.probes {
            self.booking.tape().probe_lost(&self.picked);
        }
        if let Some(encoder) = self.plan.decision.encode.first().filter(|_| self.probes_encoder) {
            self.booking.tape().probe_lost(encoder);
        }
        self.booking.end(complete, usage, extend, now);
        if let Some(mut prefill) = self.plan.prefill.take() {
            if self.probes_prefill {
                self.booking.tape().probe_lost(prefill.endpoint());
            }
            prefill.end(complete, &Usage { completion_tokens: None, ..*usage }, |_| false, now);
        }
    }

    /// The request's record for the decision log.
    fn decision_record(&mut self, end: End, usage: &Usage, now: Timestamp) -> DecisionRecord {
        let (served, prefill_outcome) = (self.booking.endpoint(), self.plan.prefill_outcome.as_ref());
        DecisionRecord {
            sequence: 0,
            ended: now,
            request_id: std::mem::take(&mut self.request_id),
            api: self.api.name(),
            pool: self.plan.runtime.pool.name.clone(),
            model: self.plan.target.clone(),
            endpoint: self.picked.authority.clone(),
            served: (served.id != self.picked.id).then(|| served.authority.clone()),
            prefill: prefill_outcome.and_then(|c| c.prefill.as_ref()).map(|e| e.authority.clone()),
            prefill_failure: prefill_outcome.and_then(|c| c.failure).map(Failure::code),
            prefill_ms: prefill_outcome.and_then(|c| c.took).map(milliseconds),
            reason: self.plan.decision.reason,
            estimated_prompt_tokens: self.plan.prompt_tokens,
            estimated_cached_tokens: self.plan.matched_tokens,
            status: self.status,
            ttft_ms: self.first_byte.map(|at| milliseconds(at.since(self.opened))),
            duration_ms: milliseconds(now.since(self.opened)),
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            completion_tokens: usage.completion_tokens,
            end: end.label(),
        }
    }
}

/// The usage to charge to the quotas of tenant and model. About `output` tokens of the response have arrived.
///
/// Counts that the model server reports before the end are lower bounds. If the client disconnects, at least the
/// reservation is charged, because disconnecting would otherwise be free. A request that Attaché ends costs nothing.
fn actual_usage(usage: &Usage, output: u32, status: u16, end: End) -> Had {
    let (prompt, answer) = (usage.prompt_tokens.unwrap_or(0), usage.completion_tokens.unwrap_or(0));
    match end {
        End::Aborted | End::Evicted => Had::Nothing,
        End::Complete if usage.prompt_tokens.or(usage.completion_tokens).is_some() => {
            Had::Tokens(prompt.saturating_add(answer))
        }
        _ if status >= 400 => Had::Tokens(0),
        _ => Had::AtLeast { prompt, answer: answer.max(output.into()) },
    }
}

/// Milliseconds, with microsecond precision.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}
