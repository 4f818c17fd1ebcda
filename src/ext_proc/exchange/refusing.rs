//! Requests that no endpoint gets: rejected ones, and those that a gateway with a load balancer of its own is left.

use super::queueing::QueueState;
use super::{Actions, Exchange, RequestSide};
use crate::reply;
use attache_picker::body::Body;
use attache_picker::event::{DecisionRecord, End, FELL_BACK, REJECTED, StreamOutcome};
use attache_picker::quotas::Allowance;
use attache_types::clock::Timestamp;
use attache_types::error::{Fault, Reason, RequestError};
use envoy_types::pb::envoy::service::ext_proc::v3::HeaderMutation;

impl Exchange {
    /// Rejects a request that has been decided. Envoy resets it at the server, and sends the error unless the response
    /// has begun. The decision log gets one record, that of the routed request.
    pub(super) fn refuse_in_flight(&mut self, end: End, error: &RequestError, now: Timestamp, out: &mut Actions) {
        let Some(in_flight) = self.in_flight.take() else { return self.refuse(error, now, out) };
        in_flight.refused(end, error.reason.status(), now, &self.processor.picker);
        self.send_refusal(error, now, out);
    }

    pub(super) fn refuse(&mut self, error: &RequestError, now: Timestamp, out: &mut Actions) {
        let is_undecided = matches!(error.reason, Reason::NoReadyEndpoint | Reason::Internal);
        if is_undecided && self.holds_request() && self.falls_back() {
            return self.pass_undecided(error, now, out);
        }
        self.log_refusal(error, REJECTED, now);
        self.send_refusal(error, now, out);
    }

    fn send_refusal(&mut self, error: &RequestError, now: Timestamp, out: &mut Actions) {
        self.request = RequestSide::Refused;
        self.body = Body::new(&self.processor.picker.buffered);
        self.abandon_split(now);
        // Frees queue capacity now, and not when Envoy closes this stream.
        self.queueing = QueueState::default();
        self.allowance = Allowance::default();
        self.settle(match error.reason.fault() {
            Fault::Client | Fault::Tenant => StreamOutcome::Rejected,
            Fault::Upstream | Fault::Overload => StreamOutcome::Shed,
            Fault::Internal => StreamOutcome::FailedInternal,
        });
        self.processor.metrics.rejection(error.pool.as_deref(), error.reason);
        let (reason, path) = (error.reason.code(), self.head.path());
        tracing::debug!(reason, error = %error.message, path, "request rejected");
        out.push_back(reply::refuse(error, self.api.dialect()));
    }

    /// Adds a request without an endpoint to the decision log, and ends the trace.
    fn log_refusal(&mut self, error: &RequestError, end: &'static str, now: Timestamp) {
        let record = |exchange: &Self| DecisionRecord {
            pool: error.pool.clone().unwrap_or_default(),
            reason: error.reason.code(),
            status: if end == REJECTED { error.reason.status() } else { 0 },
            end,
            ..exchange.unrouted(now)
        };
        self.end_trace(now, record);
        let observer = &self.processor.picker.observer;
        if observer.keeps_decisions() {
            observer.log(record(self));
        }
    }

    /// The record of a request that no endpoint gets.
    pub(super) fn unrouted(&self, now: Timestamp) -> DecisionRecord {
        let by_headers = || self.processor.picker.agent_of_headers(&self.head);
        DecisionRecord {
            ended: now,
            request_id: self.head.request_id(),
            agent: self.allowance.agent.clone().or_else(by_headers),
            api: self.api.name(),
            duration_ms: now.since(self.opened).as_secs_f64() * 1e3,
            ..DecisionRecord::default()
        }
    }

    /// Passes the request on without a destination: the gateway chooses an endpoint. As after a rejection, Attaché
    /// ignores all later messages of this stream.
    fn pass_undecided(&mut self, error: &RequestError, now: Timestamp, out: &mut Actions) {
        let (reason, path) = (error.reason.code(), self.head.path());
        tracing::debug!(reason, error = %error.message, path, "no decision; the gateway chooses an endpoint");
        self.log_refusal(error, FELL_BACK, now);
        let remove_headers = self.config.headers_to_withhold(&self.head);
        let mutation = HeaderMutation { remove_headers, ..Default::default() };
        out.push_back(reply::request_headers(reply::common(mutation)));
        self.request = RequestSide::Refused;
        self.abandon_split(now);
        self.queueing = QueueState::default();
        self.allowance = Allowance::default();
        self.body = Body::new(&self.processor.picker.buffered);
        self.settle(StreamOutcome::FellBack);
    }
}
