//! What observers learn of a request in flight: metrics of its pool, its model and its tenant, its trace, the decision
//! log.

use super::OpenedRequest;
use crate::PoolRuntime;
use crate::decide::Plan;
use crate::event::{
    DecisionRecord, End, Exemplar, NameEvent, NameObserver, Observer, RequestEvent, RequestTrace, RunnerUp,
};
use crate::split::PrefillOutcome;
use crate::tenant::Tenant;
use attache_disagg::Failure;
use attache_pool::Endpoint;
use attache_protocol::Usage;
use attache_quota::Subject;
use attache_record::Booked;
use attache_request::agent::AgentIdentity;
use attache_scheduling::SecondBest;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;

/// Reports one request to observers.
#[derive(Debug)]
pub(super) struct RequestReports {
    runtime: Arc<PoolRuntime>,
    opened: Timestamp,
    picked: EndpointId,
    /// The record for the decision log, as far as it is known.
    record: DecisionRecord,
    span: Option<Box<dyn RequestTrace>>,
    /// The first byte of the response body has arrived.
    begun: bool,
    /// The observers of its model and its tenant.
    counts: SmallVec<[Arc<dyn NameObserver>; 2]>,
}

impl RequestReports {
    /// Counts the request of `plan`, which is `booked`, for its model and its tenant.
    pub(super) fn begin(
        plan: &Plan,
        booked: &Booked,
        request: OpenedRequest<'_>,
        now: Timestamp,
        observer: &dyn Observer,
    ) -> Self {
        let OpenedRequest { api, opened, request_id, tenant, span, .. } = request;
        let picked = booked.endpoint();
        let record = DecisionRecord {
            request_id,
            agent: plan.agent.clone(),
            api: api.name(),
            pool: plan.runtime.pool.name.clone(),
            model: plan.target.clone(),
            endpoint: picked.authority.clone(),
            strategy: plan.strategy_name.clone(),
            reason: plan.decision.reason,
            runner_up: plan.decision.second.as_ref().map(runner_up),
            predicted_ttft_ms: predicted_first_token(booked, now.since(opened)),
            queued_ms: plan.queued.map(milliseconds),
            estimated_prompt_tokens: plan.prompt_tokens,
            estimated_cached_tokens: plan.matched_tokens,
            ..DecisionRecord::default()
        };
        let mut counts = SmallVec::<[Arc<dyn NameObserver>; 2]>::new();
        if !plan.target.is_empty() {
            let model = observer.named(Subject::Model, &plan.target, now);
            if plan.understood {
                let (cached_tokens, prompt_tokens) = (plan.matched_tokens, plan.prompt_tokens);
                model.event(NameEvent::Matched { cached_tokens, prompt_tokens });
            }
            if plan.decision.diverted {
                model.event(NameEvent::Diverted);
            }
            counts.push(model);
        }
        if *tenant != Tenant::Unconfigured {
            counts.push(observer.named(Subject::Tenant, tenant.name().unwrap_or_default(), now));
        }
        counts.iter().for_each(|counts| counts.event(NameEvent::Routed));
        Self { runtime: plan.runtime.clone(), opened, picked: picked.id, record, span, begun: false, counts }
    }

    /// The observer of its model; `None` if the model is unknown.
    pub(super) fn model_counts(&self) -> Option<&dyn NameObserver> {
        self.counts.first().filter(|_| !self.record.model.is_empty()).map(|counts| &**counts)
    }

    /// The agent that sent the request.
    pub(super) fn agent(&self) -> Option<&AgentIdentity> {
        self.record.agent.as_deref()
    }

    /// Whether the first byte of the response body has arrived.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    /// The response began with this HTTP status.
    pub(super) fn status(&mut self, status: u16) {
        self.record.status = status;
        self.runtime.observer.event(RequestEvent::Status(status));
    }

    /// Attaché responds with this HTTP status, unless a response has begun.
    pub(super) fn refused(&mut self, status: u16) {
        if self.record.status == 0 {
            self.record.status = status;
        }
    }

    /// The first byte of the response body has arrived. Only that of a stream (`streams`) is a time to first token: any
    /// other body arrives when the response is complete.
    pub(super) fn first_byte(&mut self, streams: bool, now: Timestamp) {
        self.begun = true;
        if streams {
            let after = now.since(self.opened);
            self.record.ttft_ms = Some(milliseconds(after));
            let exemplar = self.exemplar(now);
            self.runtime.observer.event(RequestEvent::FirstByte { after, exemplar });
        }
        if let Some(span) = &mut self.span {
            span.first_byte(now);
        }
    }

    /// The response has ended; the request's bookings are not released yet.
    pub(super) fn ended(&mut self, end: End, usage: Usage, now: Timestamp) {
        let after = now.since(self.opened);
        let exemplar = self.exemplar(now);
        self.runtime.observer.event(RequestEvent::Ended { end, after, usage, exemplar });
        let Usage { prompt_tokens, cached_tokens, completion_tokens } = usage;
        self.record = DecisionRecord {
            ended: now,
            end: end.label(),
            duration_ms: milliseconds(after),
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            ..std::mem::take(&mut self.record)
        };
    }

    fn exemplar(&self, now: Timestamp) -> Option<Exemplar> {
        self.span.as_ref().map(|span| span.exemplar(now))
    }

    /// The bookings on endpoints are released: counts the tokens that the model server has reported.
    pub(super) fn used(&self, usage: Usage) {
        self.counts.iter().for_each(|counts| counts.event(NameEvent::Used(usage)));
    }

    /// The request, which `served` responded to, is released. Ends the trace, and adds the request to the decision log.
    pub(super) fn finish(self, served: &Endpoint, prefill: Option<&PrefillOutcome>, observer: &dyn Observer) {
        let Self { record, span, picked, .. } = self;
        if span.is_none() && !observer.keeps_decisions() {
            return;
        }
        let record = DecisionRecord {
            served: (served.id != picked).then(|| served.authority.clone()),
            prefill: prefill.and_then(|outcome| outcome.prefill.as_ref()).map(|worker| worker.authority.clone()),
            prefill_failure: prefill.and_then(|outcome| outcome.failure).map(Failure::code),
            prefill_ms: prefill.and_then(|outcome| outcome.took).map(milliseconds),
            ..record
        };
        if let Some(span) = span {
            span.end(&record, served);
        }
        if observer.keeps_decisions() {
            observer.log(record);
        }
    }
}

/// The second best endpoint, in the unit of its score.
fn runner_up(second: &SecondBest) -> RunnerUp {
    let SecondBest { endpoint, margin, in_seconds } = second;
    RunnerUp {
        endpoint: endpoint.authority.clone(),
        margin_ms: in_seconds.then(|| (margin * 1e6).round() / 1e3),
        margin_score: (!in_seconds).then_some(*margin),
    }
}

/// Predicted milliseconds from the request headers to the first token of a request that is booked `after` them. `None`
/// if the pool's speed is not learned, or the request's work is unknown.
fn predicted_first_token(booked: &Booked, after: Duration) -> Option<f64> {
    let expected = Duration::try_from_secs_f64(booked.expected()).ok().filter(|expected| !expected.is_zero())?;
    booked.endpoint().speed.is_learned().then(|| milliseconds(after + expected))
}

/// Milliseconds, with microsecond precision.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}
