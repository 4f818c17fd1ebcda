//! The response side of the exchange: replies to each message of Envoy at once, and observes the response.

use super::{Actions, Exchange, ProtocolError, ResponseSide};
use crate::metadata::{self, Attributes};
use crate::mode::BodyMode;
use crate::reply::{self, Direction};
use attache_picker::InFlight;
use attache_picker::decide::Plan;
use attache_picker::event::{DecisionRecord, End, Limit, RequestEvent, StreamOutcome};
use attache_picker::head::Head;
use attache_picker::in_flight::OpenedRequest;
use attache_picker::settings::ReportUsage;
use attache_telemetry::trace::{RequestSpan, Step as TraceStep};
use attache_types::clock::Timestamp;
use attache_types::limits::MAX_RESPONSE_HEADERS;
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::{HeaderMutation, HttpBody, HttpHeaders, ProcessingResponse};
use envoy_types::pb::google::protobuf::Struct;

impl Exchange {
    /// The request is decided: begins to observe its response.
    pub(super) fn begin_in_flight(&mut self, mut plan: Plan, now: Timestamp) {
        self.settle(if plan.understood { StreamOutcome::Routed } else { StreamOutcome::Skipped });
        if let Some(outcome) = plan.split_outcome() {
            plan.runtime.observer.event(RequestEvent::Split(outcome));
        }
        let Some(booked) = plan.booked.take() else { return };
        self.enter_step(TraceStep::FirstByte, now);
        let span = self.span.take().and_then(RequestSpan::sampled);
        let keep_id = span.is_some() || self.processor.decisions.enabled();
        let request = OpenedRequest {
            api: self.api,
            opened: self.opened,
            request_id: if keep_id { self.head.request_id() } else { String::new() },
            tenant: self.head.tenant(),
            span,
            settings: &self.config.settings,
        };
        let in_flight = InFlight::begin(plan, booked, request, now, &self.processor.picker);
        self.in_flight = Some(Box::new(in_flight));
        self.head = Head::default();
    }

    pub(super) fn on_response_headers(
        &mut self,
        message: HttpHeaders,
        metadata: Option<Metadata>,
        attributes: &Attributes,
        now: Timestamp,
        out: &mut Actions,
    ) -> Result<(), ProtocolError> {
        if self.response != ResponseSide::Awaited {
            return Err(ProtocolError("response headers twice"));
        }
        self.response = ResponseSide::Streaming;
        let mode = self.modes().response;
        let mut mutation = HeaderMutation::default();
        if let Some(in_flight) = &mut self.in_flight {
            let shows_body = mode != BodyMode::None;
            let head = metadata::response_head(message.headers.as_ref(), metadata.as_ref(), attributes, shows_body);
            mutation = reply::mutation(in_flight.headers(&head, now, &self.processor.picker));
            // Headers that Attaché adds only inform. One too many would make Envoy replace the response by 500.
            let received = message.headers.as_ref().map_or(0, |map| map.headers.len());
            if received + mutation.set_headers.len() > MAX_RESPONSE_HEADERS {
                self.processor.metrics.limits.count(Limit::Headers);
                mutation.set_headers.truncate(MAX_RESPONSE_HEADERS.saturating_sub(received));
            }
            self.split.add_detached(in_flight.take_detached());
            self.split.answered_by(in_flight.endpoint());
        }
        out.push_back(reply::response_headers(mutation));
        if message.end_of_stream {
            self.end_response(End::Complete, now);
        } else if mode == BodyMode::None {
            self.split.is_unshown = self.in_flight.as_ref().is_some_and(|in_flight| in_flight.is_good());
            self.end_response(End::Unwatched, now);
        }
        Ok(())
    }

    pub(super) fn on_response_body(
        &mut self,
        message: HttpBody,
        now: Timestamp,
        out: &mut Actions,
    ) -> Result<(), ProtocolError> {
        if self.response == ResponseSide::Awaited {
            return Err(ProtocolError("response body before response headers"));
        }
        let mode = self.modes().response;
        let end = message.end_of_stream;
        self.split.response_chunk(&message);
        out.push_back(match &mut self.in_flight {
            Some(in_flight) => {
                let renamed = in_flight.chunk(&message.body, end, now, &self.processor.picker);
                self.split.add_detached(in_flight.take_detached());
                let report = self.config.settings.report_usage.as_ref().filter(|_| end);
                let dynamic_metadata = report.and_then(|report| cost(in_flight, report));
                let answer = match renamed {
                    Some(bytes) => reply::replace(Direction::Response, mode, bytes, end),
                    None => reply::echo(Direction::Response, mode, message),
                };
                ProcessingResponse { dynamic_metadata, ..answer }
            }
            None => reply::echo(Direction::Response, mode, message),
        });
        if end {
            self.end_response(End::Complete, now);
        }
        Ok(())
    }

    pub(super) fn on_response_trailers(&mut self, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        let mode = self.modes().response;
        if matches!(mode, BodyMode::FullDuplex | BodyMode::Inside)
            && let Some(bytes) = self.in_flight.as_mut().and_then(|in_flight| in_flight.leftover())
        {
            out.push_back(reply::replace(Direction::Response, mode, bytes, false));
        }
        out.push_back(reply::response_trailers());
        self.end_response(End::Complete, now);
        Ok(())
    }

    pub(super) fn end_response(&mut self, end: End, now: Timestamp) {
        self.response = ResponseSide::Ended;
        if let Some(in_flight) = self.in_flight.take() {
            in_flight.end(end, now, &self.processor.picker);
        }
    }

    /// The stream ends. A request that is still in flight counts as one whose client disconnected.
    pub(super) fn leave(&mut self) {
        if let Some(in_flight) = self.in_flight.take() {
            in_flight.end(End::ClientGone, self.last_seen, &self.processor.picker);
        }
        self.lose_held();
        self.split.abandon_trace(self.last_seen);
        let (now, end) = (self.last_seen, End::ClientGone.label());
        self.end_trace(now, |exchange| DecisionRecord { end, ..exchange.unrouted(now) });
    }
}

/// Token usage of the response as dynamic metadata for the gateway, if the model server reported it.
#[expect(clippy::cast_precision_loss, reason = "token counts stay far below 2^53")]
fn cost(in_flight: &InFlight, report: &ReportUsage) -> Option<Struct> {
    Some(metadata::number(&report.namespace, &report.key, in_flight.used(report.count)? as f64))
}
