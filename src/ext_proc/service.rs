//! The gRPC service. Each request is one stream that tonic polls, without a task or a channel of its own. The stream
//! passes Envoy's messages to the [`Driver`], which owns the exchange and its timer.
//!
//! A stream ends only when Envoy closes it, or with an error. If Attaché closed it before the response is complete,
//! the client would get a truncated response with status 200. Some gateways half-close the stream after the request
//! and wait for the decision, such as NGINX Gateway Fabric. Such a stream lives until the request is answered.

use super::driver::{Driver, Failure};
use super::exchange::{Event, Exchange, GatewayCall, ProtocolError};
use super::opening::First;
use super::processor::Processor;
use super::wire::{Inbound, Incoming};
use attache_picker::event::Limit;
use attache_types::clock::Clock;
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use futures_core::Stream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tonic::{Code, Status};

/// The ext-proc service.
#[derive(Clone, Debug)]
pub struct Service {
    processor: Arc<Processor>,
    clock: Clock,
}

impl Service {
    /// A service of `processor`.
    #[must_use]
    pub fn new(processor: Arc<Processor>, clock: Clock) -> Self {
        Self { processor, clock }
    }

    /// Time from the opening of a stream to the first bytes of a message.
    pub(super) fn idle_timeout(&self) -> Duration {
        self.processor.picker.config().limits.idle_timeout
    }

    /// Counts a stream that sent nothing within the idle timeout.
    pub(super) fn end_silent(&self) -> Status {
        self.processor.metrics.limits.count(Limit::IdleTimeout);
        self.processor.metrics.protocol_errors.inc();
        Status::failed_precondition("stream opened and nothing sent within the idle timeout")
    }

    /// Counts a stream that is one too many.
    pub(super) fn refuse_stream(&self) -> Status {
        self.processor.metrics.limits.count(Limit::Streams);
        Status::resource_exhausted("too many streams are open (`limits.maxStreams`)")
    }

    /// Serves a stream of the gateway's `call` from its first bytes.
    pub(super) fn open(&self, first: First, call: GatewayCall) -> Pump {
        let exchange = Exchange::new(self.processor.clone(), self.clock.now()).of_call(call);
        let driver = Driver::new(exchange, &self.processor, self.clock);
        let held = self.processor.picker.buffered.nothing();
        Pump {
            inbound: Inbound::new(first, driver.exchange().max_message_bytes(), held),
            driver,
            processor: self.processor.clone(),
            failed: false,
        }
    }
}

/// One stream. When tonic polls it and no reply is ready, it polls Envoy's messages.
#[derive(Debug)]
pub struct Pump {
    inbound: Inbound,
    driver: Driver,
    processor: Arc<Processor>,
    failed: bool,
}

impl Pump {
    fn feed(&mut self, event: Event) -> Result<(), ProtocolError> {
        match self.driver.feed(event, self.inbound.unfinished()) {
            Ok(()) => Ok(()),
            Err(Failure::Protocol(error)) => Err(error),
            Err(Failure::Panicked) => self.driver.fail(self.inbound.unfinished()),
        }
    }

    fn fail(&mut self, error: &ProtocolError, code: Code) -> Status {
        self.processor.metrics.protocol_errors.inc();
        tracing::debug!(%error, "stream ended with an error");
        self.failed = true;
        Status::new(code, error.0)
    }

    /// Whether the stream continues after its last message, because the gateway half-closed it and awaits the decision.
    fn outlives_its_inbound(&mut self) -> bool {
        self.inbound.is_half_closed() && self.driver.half_closed()
    }

    /// Accounts for the memory of an unfinished body or message. Returns an event when the upload must end.
    fn poll_upload(&mut self, cx: &Context<'_>) -> Option<Event> {
        let evicted = self.driver.poll_upload(cx, self.inbound.unfinished())?;
        self.inbound.abandon();
        Some(evicted)
    }
}

impl Stream for Pump {
    type Item = Result<ProcessingResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(answer) = this.driver.next_reply() {
                return Poll::Ready(Some(Ok(answer)));
            }
            if this.failed {
                return Poll::Ready(None);
            }
            match this.driver.poll_warming(cx) {
                Some(Poll::Pending) => {
                    this.inbound.absorb(cx);
                    return Poll::Pending;
                }
                Some(Poll::Ready(warmed)) => {
                    if let Err(error) = this.feed(warmed) {
                        return Poll::Ready(Some(Err(this.fail(&error, Code::FailedPrecondition))));
                    }
                    continue;
                }
                None => {}
            }
            let event = match this.driver.poll_results(cx) {
                Some(result) => result,
                None => match Pin::new(&mut this.inbound).poll_next(cx) {
                    Poll::Ready(Some(Ok(Incoming::Message(message)))) => Event::Message(message),
                    Poll::Ready(Some(Ok(Incoming::TooLarge(bytes)))) => Event::TooLarge(bytes),
                    // Only an invalid message ends with a status. A close or a reset is the normal end of a stream.
                    Poll::Ready(Some(Err(status))) => {
                        this.processor.metrics.protocol_errors.inc();
                        this.failed = true;
                        return Poll::Ready(Some(Err(status)));
                    }
                    Poll::Ready(None) if !this.outlives_its_inbound() => return Poll::Ready(None),
                    Poll::Ready(None) | Poll::Pending => match this.poll_upload(cx) {
                        Some(evicted) => evicted,
                        None => {
                            ready!(this.driver.poll_deadline(cx));
                            Event::Deadline
                        }
                    },
                },
            };
            let code = match event {
                Event::TooLarge(_) | Event::UploadEvicted(_) => Code::ResourceExhausted,
                _ => Code::FailedPrecondition,
            };
            if let Err(error) = this.feed(event) {
                return Poll::Ready(Some(Err(this.fail(&error, code))));
            }
        }
    }
}
