//! The gRPC service: one inline stream a request, no task, no channel. It pumps messages into the [`Exchange`] and owns the timer.
//!
//! It never ends a stream on its own while Envoy is there: a stream that ends well before the answer has gone by loses the rest of the answer,
//! and the client sees a 200. Only Envoy's end, or an error, ends it.

use super::exchange::{Actions, Event, Exchange, ProtocolError};
use super::picker::Picker;
use super::prefiller::Asking;
use super::queues::Waiting;
use super::warmer::Running;
use crate::clock::{Clock, Timestamp};
use crate::disagg::attempts::Attempt;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures_core::Stream;
use smallvec::SmallVec;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::time::Sleep;
use tonic::{Code, Request, Response, Status, Streaming};

/// Largest message that is decoded, 256 MiB: a BUFFERED body comes in one, and one that is over the body limit must be read to be refused with a
/// 413. What Envoy may send at once is bounded by its own buffer limits, far below this.
const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// Answers to one message: the headers' and the body's. Larger rings would miss the allocator's fast path.
const USUAL_ANSWERS: usize = 2;

/// The ext-proc service.
#[derive(Clone, Debug)]
pub struct Service {
    picker: Arc<Picker>,
    clock: Clock,
}

impl Service {
    /// A service that asks `picker`.
    #[must_use]
    pub fn new(picker: Arc<Picker>, clock: Clock) -> Self {
        Self { picker, clock }
    }

    /// The service as tonic takes it. Above tonic's 4 MiB default a buffered body would end the stream, and Envoy would send the request on
    /// without us.
    #[must_use]
    pub fn into_server(self) -> ExternalProcessorServer<Self> {
        ExternalProcessorServer::new(self)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(usize::MAX)
    }
}

#[tonic::async_trait]
impl ExternalProcessor for Service {
    type ProcessStream = Pump;

    async fn process(&self, request: Request<Streaming<ProcessingRequest>>) -> Result<Response<Pump>, Status> {
        let exchange = Exchange::new(self.picker.clone(), self.clock.now());
        Ok(Response::new(Pump {
            inbound: request.into_inner(),
            exchange,
            out: Actions::with_capacity(USUAL_ANSWERS),
            picker: self.picker.clone(),
            clock: self.clock,
            timer: None,
            warming: None,
            asking: SmallVec::new(),
            waiting: None,
            failed: false,
        }))
    }
}

/// One stream: polled by tonic for answers, polls Envoy's messages when it has none to give.
#[derive(Debug)]
pub struct Pump {
    inbound: Streaming<ProcessingRequest>,
    exchange: Exchange,
    out: Actions,
    picker: Arc<Picker>,
    clock: Clock,
    timer: Option<(Timestamp, Pin<Box<Sleep>>)>,
    warming: Option<Running>,
    /// Questions to other servers, of which answers are awaited.
    asking: SmallVec<[(Attempt, Asking); 1]>,
    /// For the request's turn.
    waiting: Option<Waiting>,
    failed: bool,
}

impl Pump {
    fn feed(&mut self, event: Event) -> Result<(), ProtocolError> {
        let now = self.clock.now();
        let routed_before = self.exchange.is_routed();
        let (exchange, out) = (&mut self.exchange, &mut self.out);
        let result = catch_unwind(AssertUnwindSafe(|| exchange.on(event, now, out))).unwrap_or_else(|_| {
            tracing::error!("a request made the picker panic");
            self.out.clear();
            self.exchange.fail(now, &mut self.out)
        });
        if !routed_before && self.exchange.is_routed() {
            self.picker.metrics.decided_in(self.clock.now().since(now));
        }
        result
    }

    fn fail(&mut self, error: &ProtocolError) -> Status {
        self.picker.metrics.protocol_errors.inc();
        tracing::debug!(%error, "stream ended with an error");
        self.failed = true;
        Status::failed_precondition(error.0)
    }

    /// Sends off what the exchange has to ask, gives up what it no longer waits for, and takes in one answer that has come.
    fn poll_asking(&mut self, cx: &mut Context<'_>) -> Option<Event> {
        for ask in self.exchange.asks() {
            match ask.attempt {
                Some(attempt) => self.asking.push((attempt, self.picker.prefiller.start(ask))),
                None => self.picker.prefiller.send_off(ask),
            }
        }
        if self.asking.is_empty() {
            return None;
        }
        let exchange = &self.exchange;
        self.asking.retain(|(attempt, _)| exchange.awaits(*attempt));
        let told =
            self.asking.iter_mut().enumerate().find_map(|(at, (attempt, asking))| match Pin::new(asking).poll(cx) {
                Poll::Ready(told) => Some((at, *attempt, told)),
                Poll::Pending => None,
            });
        told.map(|(at, attempt, told)| {
            self.asking.remove(at);
            Event::Told(attempt, told)
        })
    }

    /// The request's turn, when it has come.
    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Option<Event> {
        if self.waiting.is_none() {
            self.waiting = self.exchange.waiting();
        }
        let Poll::Ready(turn) = Pin::new(self.waiting.as_mut()?).poll(cx) else { return None };
        self.waiting = None;
        turn.map(Event::Turn)
    }

    /// Ready when the exchange's deadline has come.
    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(due) = self.exchange.deadline() else {
            self.timer = None;
            return Poll::Pending;
        };
        let at = self.clock.instant(due);
        let (set_for, timer) = self.timer.get_or_insert_with(|| (due, Box::pin(tokio::time::sleep_until(at))));
        if *set_for != due {
            *set_for = due;
            timer.as_mut().reset(at);
        }
        timer.as_mut().poll(cx)
    }
}

impl Stream for Pump {
    type Item = Result<ProcessingResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(answer) = this.out.pop_front() {
                return Poll::Ready(Some(Ok(answer)));
            }
            if this.failed {
                return Poll::Ready(None);
            }
            if this.warming.is_none() {
                this.warming = this.exchange.warming().map(|warming| this.picker.warmer.start(warming));
            }
            if let Some(running) = &mut this.warming {
                ready!(Pin::new(running).poll(cx));
                this.warming = None;
                if let Err(error) = this.feed(Event::Warmed) {
                    return Poll::Ready(Some(Err(this.fail(&error))));
                }
                continue;
            }
            let told = this.poll_turn(cx).or_else(|| this.poll_asking(cx));
            let event = match told {
                Some(told) => told,
                None => match Pin::new(&mut this.inbound).poll_next(cx) {
                    Poll::Ready(Some(Ok(message))) => Event::Message(Box::new(message)),
                    // A message that can't be decoded gets a status; an end, clean or by reset, is the stream's normal end.
                    Poll::Ready(Some(Err(status))) => {
                        let Some(status) = unreadable(&status) else { return Poll::Ready(None) };
                        this.picker.metrics.protocol_errors.inc();
                        this.failed = true;
                        return Poll::Ready(Some(Err(status)));
                    }
                    Poll::Ready(None) => return Poll::Ready(None),
                    Poll::Pending => {
                        ready!(this.poll_deadline(cx));
                        Event::Deadline
                    }
                },
            };
            if let Err(error) = this.feed(event) {
                return Poll::Ready(Some(Err(this.fail(&error))));
            }
        }
    }
}

/// What to tell the peer about a message that tonic refused; `None` when `status` tells of a peer that left, which has an error of the
/// transport as its source.
fn unreadable(status: &Status) -> Option<Status> {
    if status.source().is_some() {
        return None;
    }
    let code = match status.code() {
        Code::OutOfRange => Code::ResourceExhausted,
        // tonic's word for bytes that are no message, as if that were our fault.
        Code::Internal => Code::InvalidArgument,
        code => code,
    };
    Some(Status::new(code, status.message()))
}
