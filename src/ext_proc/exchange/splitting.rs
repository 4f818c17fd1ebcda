//! The exchange of a request that two servers share: it waits for the prompt to be computed, or watches over that while
//! the answer's server is asked at the same time.
//!
//! ```text
//! Collecting ─end of body─▶ (decide) ─▶ Prefilling ─computed, or given up─▶ Ended      the prefill first
//!                                   └─▶ Ended, and watched until the prefill has ended  both at once
//! ```

use super::*;
use attache_disagg::connector::trtllm::LEAST_SHARED_ID;
use attache_disagg::policy::{Direct, Mode};
use attache_disagg::{Failure, LegApi, is_for_sidecars};
use attache_picker::event::{RequestEvent, SplitOutcome};
use attache_picker::head::{ENCODERS, PREFILLER};
use attache_picker::split::{LegCall, SplitRequest, LegProgress, PrefillOutcome, PrefillLeg};
use attache_pool::Endpoint;
use attache_quota::Had;
use attache_scheduling::plugin::Headers;
use attache_scheduling::split::not_alone;
use attache_scheduling::{Decision, Dispatch, PickContext, RequestFacts};
use envoy_types::pb::envoy::config::core::v3::HeaderValueOption;
use rand::RngExt;

/// Largest number that names a request to both of its servers: what a signed number holds, as SGLang and TensorRT-LLM
/// read it.
const GREATEST_ROOM: u64 = i64::MAX as u64;

/// 5 s for the decode worker to end a response whose prefill failed after its headers had passed. SGLang's scheduler
/// checks aborts in each step, so a longer wait has no use.
const ABORT_PATIENCE: Duration = Duration::from_secs(5);

/// What a split request waits for.
#[derive(Debug, Default)]
pub(super) struct Splitting {
    stage: Option<Box<PrefillLeg>>,
    /// What goes on when the stage has come to an end; `None` when it has gone on already.
    held: Option<(Box<Plan>, Body)>,
    /// Questions that nobody waits for.
    parting: Vec<LegCall>,
    /// When the answer is cut whose prompt has failed like this, unless it begins or ends before.
    cut: Option<(Timestamp, Failure)>,
    /// The gateway shows no more of the answer, whose server may still wait for the prompt.
    pub(super) goes_on: bool,
}

impl Splitting {
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.stage.as_ref().map(|stage| stage.deadline()).or(self.cut.map(|(at, _)| at))
    }

    /// Who answers is known now: after retries another than the one that was named.
    pub(super) fn answered_by(&mut self, server: &Arc<Endpoint>) {
        if let Some(stage) = &mut self.stage {
            stage.answered_by(server);
        }
    }

    /// A part of the answer goes by.
    pub(super) fn answer_comes(&mut self, message: &HttpBody) {
        if message.end_of_stream || !message.body.is_empty() {
            self.cut = None;
        }
    }

    /// Asks what nobody waits for.
    pub(super) fn part(&mut self, ask: Option<LegCall>) {
        self.parting.extend(ask);
    }
}

impl Exchange {
    /// What is to be asked of other servers now. What comes of those with an attempt is told by [`Event::LegResult`].
    pub fn asks(&mut self) -> Vec<LegCall> {
        let mut asks = self.split.stage.as_mut().map(|stage| stage.take_calls()).unwrap_or_default();
        asks.append(&mut self.split.parting);
        asks
    }

    /// Whether the answer to this try still matters.
    #[must_use]
    pub fn awaits(&self, attempt: Attempt) -> bool {
        self.split.stage.as_ref().is_some_and(|stage| stage.awaits(attempt))
    }

    /// The stage that is still to be waited for when the gateway has closed the stream, because it shows no bodies of
    /// answers.
    pub fn take_unwatched(&mut self) -> Option<Box<PrefillLeg>> {
        if self.split.goes_on { self.split.stage.take() } else { None }
    }

    /// Has the prompt of `plan` computed by another server, or has the sidecar do so.
    pub(super) fn begin_split(
        &mut self,
        mut plan: Box<Plan>,
        body: Body,
        close: Close,
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
            plan.prefill_outcome = Some(PrefillOutcome { prefill: prefill.map(|(server, _)| server), ..PrefillOutcome::default() });
            return self.go_on(plan, body, close, now, out);
        };
        let stage = self.stage(&mut plan, &body, direct, now);
        // The connector may find that it can't split this request after all.
        let Some((stage, decode)) = stage.and_then(|stage| stage.with_decode_leg()) else {
            let prefill = plan.decision.split.as_ref().and_then(|split| split.prefill.first());
            if !direct.connector_of(prefill.map(|server| &**server)).serves_whole() {
                give_back(&plan);
                drop(plan);
                return self.refuse(&not_alone(), now, out);
            }
            return self.go_on_whole(plan, body, close, now, out);
        };
        plan.request_id = stage.new_request_id();
        let Some(decode) = decode else {
            self.request = RequestSide::Prefilling;
            self.split = Splitting { stage: Some(stage), held: Some((plan, body)), ..Splitting::default() };
            return;
        };
        plan.new_body = Some(decode);
        let prefill = stage.server(0).cloned();
        if let Some(server) = &prefill {
            plan.dispatch(Dispatch::Arrives(server, stage.expected()), now);
        }
        plan.prefill_outcome = Some(PrefillOutcome { prefill, ..PrefillOutcome::default() });
        self.split.stage = Some(stage);
        self.go_on(plan, body, close, now, out);
    }

    /// The request can't be split after all: the server that was to answer it computes its prompt.
    fn go_on_whole(&mut self, mut plan: Box<Plan>, body: Body, close: Close, now: Timestamp, out: &mut Actions) {
        plan.prefill = None;
        plan.decision.split = None;
        plan.dispatch(Dispatch::Whole, now);
        self.go_on(plan, body, close, now, out);
    }

    fn stage(&self, plan: &mut Plan, body: &Body, direct: &Direct, now: Timestamp) -> Option<Box<PrefillLeg>> {
        let room = self.processor.picker.next_rng().random_range(LEAST_SHARED_ID..GREATEST_ROOM);
        let mut scratch = Vec::new();
        let renamed = plan.new_body.take();
        let bytes = renamed.as_deref().unwrap_or_else(|| body.contiguous(&mut scratch));
        let trace = self.span.as_ref().map(|span| span.traceparent());
        let asked = SplitRequest { head: &self.head, body: bytes, trace };
        let stage = PrefillLeg::begin(plan, direct, asked, room, &self.processor.picker.buffered, now);
        plan.new_body = renamed;
        stage.map(Box::new)
    }

    pub(super) fn on_leg_result(&mut self, attempt: Attempt, told: &LegResult, now: Timestamp, out: &mut Actions) {
        let Some(stage) = &mut self.split.stage else { return };
        let came = stage.on_leg_result(attempt, told, now, &self.processor.picker);
        self.after_prefill(came, now, out);
    }

    pub(super) fn on_split_deadline(&mut self, now: Timestamp, out: &mut Actions) {
        if let Some(stage) = &mut self.split.stage {
            let came = stage.on_deadline(now, &self.processor.picker);
            self.after_prefill(came, now, out);
        } else if let Some((_, failure)) = self.split.cut.take_if(|(at, _)| *at <= now) {
            // An answer whose head has gone on is cut by Envoy, whatever it does when the picker fails.
            self.cut_short(failure, now, out);
        }
    }

    fn after_prefill(&mut self, came: LegProgress, now: Timestamp, out: &mut Actions) {
        let ended = match came {
            LegProgress::Waiting => return,
            LegProgress::Proceed(new_body, prefill_outcome) => match self.split.held.take() {
                Some((mut plan, body)) => {
                    self.split.stage = None;
                    if let Err(error) = self.renew(&mut plan, prefill_outcome.prefill.as_deref(), now) {
                        give_back(&plan);
                        return self.refuse(&error, now, out);
                    }
                    if let (Some(took), true) = (prefill_outcome.took, prefill_outcome.prefill.is_some()) {
                        plan.runtime.observer.event(RequestEvent::Prefilled(took));
                    }
                    plan.new_body = new_body.or(plan.new_body.take());
                    let how = prefill_outcome.prefill.as_deref();
                    plan.dispatch(how.map_or(Dispatch::Whole, |server| Dispatch::Arrives(server, 0.0)), now);
                    plan.prefill_outcome = Some(prefill_outcome);
                    self.go_on(plan, body, Close::Whole, now, out);
                    return self.tell_of_room(now);
                }
                // Both were asked at once: the prefill's part is over.
                None => None,
            },
            LegProgress::Refused(failure) => Some(failure),
        };
        // Of an answer that has begun the prompt was computed, whatever befell its server since.
        let Some(failure) = ended.filter(|_| !self.answer_has_begun()) else {
            self.split.stage = None;
            return self.tell_of_room(now);
        };
        self.abandon_split();
        if self.response == ResponseSide::Streaming {
            self.split.cut = Some((now.after(ABORT_PATIENCE), failure));
        }
        if self.response == ResponseSide::Awaited {
            self.cut_short(failure, now, out);
        }
    }

    fn cut_short(&mut self, failure: Failure, now: Timestamp, out: &mut Actions) {
        if let Some(routed) = self.routed.take() {
            routed.end(End::Aborted, now, &self.processor.picker);
        }
        self.refuse(&not_computed(failure), now, out);
    }

    /// The server that was to answer may have gone, or been ejected, while its prompt was computed: then another one
    /// answers.
    fn renew(&self, plan: &mut Plan, prefill: Option<&Endpoint>, now: Timestamp) -> Result<(), RequestError> {
        let (pool, target) = (plan.runtime.pool.clone(), plan.target.clone());
        let snapshot = pool.store.load_full();
        let headers = Headers::of(&self.head);
        let facts =
            RequestFacts { model: &target, prompt_tokens: plan.prompt_tokens, headers, ..RequestFacts::default() };
        let cx = PickContext { request: facts, ..PickContext::new(&snapshot, now, pool.stale_after) };
        let (subset, rng) = (self.subset.as_ref(), || self.processor.picker.next_rng());
        let first = plan.decision.picks.first().map(|first| first.id);
        let successor = pool.scheduler.renew(&mut plan.decision, &cx, subset, prefill, rng)?;
        if let (Some(server), Some(first)) = (&successor, first) {
            plan.noted_elsewhere(first, server.id, now);
        }
        if let Some((server, booked)) = successor.zip(plan.booked.as_mut()) {
            booked.move_to(&server, now);
            // A rank of the one that has gone.
            plan.hints.rank = None;
        }
        Ok(())
    }

    /// The server that computed the prompt, or was to, has room again: its part of the request is over before the
    /// answer is.
    fn tell_of_room(&self, now: Timestamp) {
        if let Some(admitted) = self.routed.as_ref().and_then(|routed| routed.admitted()) {
            admitted.freed(now);
        }
    }

    /// Whether anything of the answer's body has gone by; never where the gateway does not show it.
    fn answer_has_begun(&self) -> bool {
        let watched = self.modes().response != BodyMode::None;
        match &self.routed {
            Some(routed) => routed.has_begun(),
            None => self.response == ResponseSide::Ended && watched,
        }
    }

    /// The client leaves while its prompt is computed: that is paid for as if the answer had begun, and who was to
    /// answer may be probed by another.
    pub(super) fn lose_held(&mut self) {
        let Some((plan, _)) = &mut self.split.held else { return };
        lose_probe(plan);
        plan.permits.drain(..).for_each(|permit| permit.settle(Had::AS_BOOKED));
    }

    /// The request ends before its answer: nobody waits for the prompt.
    pub(super) fn abandon_split(&mut self) {
        let (stage, held) = (self.split.stage.take(), self.split.held.take());
        if let Some((plan, _)) = held {
            give_back(&plan);
        }
        // The answer's server waits for a prompt that will not come.
        self.split.part(stage.and_then(|stage| stage.abort()));
    }
}

/// A request that was to be split is not sent at all: who answers it may be probed by another.
fn give_back(plan: &Plan) {
    plan.runtime.observer.event(RequestEvent::Split(SplitOutcome::Refused));
    lose_probe(plan);
}

fn lose_probe(plan: &Plan) {
    if let Some(first) = plan.decision.picks.first().filter(|_| plan.decision.probe) {
        first.health.probe_lost();
    }
}

/// What a client is told whose prompt nobody has computed.
fn not_computed(failure: Failure) -> RequestError {
    match failure {
        // The answer's server would say the same, were it not waiting for the prompt.
        Failure::Status(status) if failure.is_nobodys() => {
            let message =
                format!("the server that was to compute the prompt declined the request with status {status}");
            RequestError::new(Reason::PrefillDeclined, message)
        }
        _ => {
            let message = format!("no prefill server computed the prompt ({})", failure.code());
            RequestError::new(Reason::PrefillFailed, message)
        }
    }
}

/// The headers by which llm-d's sidecar knows who computes the prompt, and who encodes what is in it.
pub(super) fn tell_sidecar(sent: &Decision, set: &mut Vec<HeaderValueOption>, remove: &mut Vec<String>) {
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
