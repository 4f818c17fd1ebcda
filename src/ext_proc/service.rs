//! The gRPC service: one inline stream a request, no task, no channel. It pumps messages into the [`Exchange`] and owns the timer.
//!
//! It never ends a stream on its own while Envoy is there: a stream that ends well before the answer has gone by loses the rest of the answer,
//! and the client sees a 200. Only Envoy's end, or an error, ends it. A gateway may half-close the stream behind the request and wait for the
//! decision (NGINX Gateway Fabric does): such a stream lives until it is answered.

use super::exchange::{Actions, Event, Exchange, ProtocolError};
use super::prefiller::Asking;
use super::processor::Processor;
use super::uploads::{Evicted, Upload};
use super::warmer::Running;
use super::wire::{Inbound, Incoming};
use attache_disagg::attempts::Attempt;
use attache_flow::Refusal;
use attache_picker::event::NameEvent;
use attache_picker::queues::Waiting;
use attache_picker::split::{LegProgress, PrefillLeg};
use attache_serving::connections::InFlight;
use attache_types::clock::{Clock, Timestamp};
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use futures_core::Stream;
use http::uri::Authority;
use smallvec::SmallVec;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::time::{Sleep, timeout_at};
use tonic::{Code, Status};

/// Answers to one message: the headers' and the body's. Larger rings would miss the allocator's fast path.
const USUAL_ANSWERS: usize = 2;

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

    /// A stream that Envoy has just opened, calling by this `:authority`: its answers.
    pub(super) fn open(&self, body: tonic::body::Body, in_flight: Option<InFlight>, called: Option<Authority>) -> Pump {
        let exchange = Exchange::new(self.processor.clone(), self.clock.now()).called_as(called);
        Pump {
            inbound: Inbound::new(
                body,
                exchange.max_message_bytes(),
                self.processor.picker.buffered.nothing(),
                in_flight,
            ),
            exchange,
            upload: None,
            unfinished_since: None,
            out: Actions::with_capacity(USUAL_ANSWERS),
            processor: self.processor.clone(),
            clock: self.clock,
            timer: None,
            warming: None,
            asking: SmallVec::new(),
            waiting: None,
            eviction: None,
            failed: false,
        }
    }
}

/// One stream: polled by tonic for answers, polls Envoy's messages when it has none to give.
#[derive(Debug)]
pub struct Pump {
    inbound: Inbound,
    exchange: Exchange,
    /// While more is awaited of a body or a message.
    upload: Option<Upload>,
    /// When the message began of which more is awaited.
    unfinished_since: Option<Timestamp>,
    out: Actions,
    processor: Arc<Processor>,
    clock: Clock,
    timer: Option<(Timestamp, Pin<Box<Sleep>>)>,
    warming: Option<Running>,
    /// Questions to other servers, of which answers are awaited.
    asking: SmallVec<[(Attempt, Asking); 1]>,
    /// For the request's turn.
    waiting: Option<Waiting>,
    /// For its end before its time.
    eviction: Option<Waiting<Refusal>>,
    failed: bool,
}

impl Pump {
    fn feed(&mut self, event: Event) -> Result<(), ProtocolError> {
        let now = self.clock.now();
        let routed_before = self.exchange.is_routed();
        let (exchange, out) = (&mut self.exchange, &mut self.out);
        let result = catch_unwind(AssertUnwindSafe(|| exchange.on(event, now, out))).unwrap_or_else(|_| {
            tracing::error!("panic while handling a request");
            self.out.clear();
            self.exchange.fail(now, &mut self.out)
        });
        if self.upload.is_some() && self.exchange.upload(self.inbound.unfinished(), now).is_none() {
            self.upload = None;
        }
        if !routed_before && self.exchange.is_routed() {
            let took = self.clock.now().since(now);
            self.processor.metrics.decided_in(took);
            self.exchange.model_counts().into_iter().for_each(|counts| counts.event(NameEvent::Decided(took)));
        }
        result
    }

    fn fail(&mut self, error: &ProtocolError, code: Code) -> Status {
        self.processor.metrics.protocol_errors.inc();
        tracing::debug!(%error, "stream ended with an error");
        self.failed = true;
        Status::new(code, error.0)
    }

    /// Sends off what the exchange has to ask, gives up what it no longer waits for, and takes in one answer that has come.
    fn poll_asking(&mut self, cx: &mut Context<'_>) -> Option<Event> {
        for ask in self.exchange.asks() {
            match ask.attempt {
                Some(attempt) => self.asking.push((attempt, self.processor.prefiller.start(ask))),
                None => self.processor.prefiller.send_off(ask),
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
            Event::LegResult(attempt, told)
        })
    }

    /// The request's turn, when it has come.
    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Option<Event> {
        if self.waiting.is_none() {
            self.waiting = self.exchange.waiting();
        }
        let Poll::Ready(turn) = Pin::new(self.waiting.as_mut()?).poll(cx) else { return None };
        self.waiting = None;
        Some(Event::Turn(turn))
    }

    /// That the request is to end for the sake of another, when it is.
    fn poll_eviction(&mut self, cx: &mut Context<'_>) -> Option<Event> {
        if self.eviction.is_none() {
            self.eviction = self.exchange.eviction();
        }
        let Poll::Ready(refusal) = Pin::new(self.eviction.as_mut()?).poll(cx) else { return None };
        self.eviction = None;
        refusal.map(Event::Evicted)
    }

    /// Whether the stream goes on after its last message: the gateway has half-closed it and waits for the decision.
    fn outlives_its_inbound(&mut self) -> bool {
        self.inbound.is_half_closed() && self.exchange.half_closed(self.clock.now())
    }

    /// Accounts for what the stream holds while more of it is awaited. Gives an event when that is to end.
    fn poll_upload(&mut self, cx: &Context<'_>) -> Option<Event> {
        let unfinished = self.inbound.unfinished();
        let standing = if unfinished > 0 || self.exchange.collects() {
            let begun = *self.unfinished_since.get_or_insert_with(|| self.clock.now());
            self.exchange.upload(unfinished, begun)
        } else {
            None
        };
        let Some(standing) = standing else {
            (self.upload, self.unfinished_since) = (None, None);
            return None;
        };
        let now = self.clock.now();
        let (processor, limits) = (&self.processor, self.exchange.limits());
        let begin = || Upload::begin(&processor.uploads, self.exchange.owner(), now);
        let why = match self.upload.get_or_insert_with(begin).poll(cx, standing, limits, now) {
            Poll::Ready(why) => why,
            Poll::Pending if unfinished == 0 || processor.uploads.make_way(&processor.picker.buffered, limits, now) => {
                return None;
            }
            Poll::Pending => Evicted::Full,
        };
        self.upload = None;
        self.inbound.abandon();
        Some(Event::UploadEvicted(why))
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

/// Envoy has closed the stream, whether that was read or not.
impl Drop for Pump {
    fn drop(&mut self) {
        // With its answer's head the gateway may have closed it before it was polled again.
        for ask in self.exchange.asks().into_iter().filter(|ask| ask.attempt.is_none()) {
            self.processor.prefiller.send_off(ask);
        }
        if let Some((stage, (attempt, asking))) = self.exchange.take_unwatched().zip(self.asking.pop()) {
            let watch = see_through(stage, attempt, asking, self.processor.clone(), self.clock);
            self.processor.prefiller.spawn(watch);
        }
        self.exchange.gone(self.clock.now());
    }
}

/// Waits for a prompt whose answer goes by unseen, so that its server is told when it waits in vain.
async fn see_through(mut stage: Box<PrefillLeg>, attempt: Attempt, asking: Asking, processor: Arc<Processor>, clock: Clock) {
    let came = match timeout_at(clock.instant(stage.deadline()), asking).await {
        Ok(told) => stage.on_leg_result(attempt, &told, clock.now(), &processor.picker),
        Err(_) => stage.on_deadline(clock.now(), &processor.picker),
    };
    if let (LegProgress::Refused(_), Some(abort)) = (came, stage.abort()) {
        processor.prefiller.send_off(abort);
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
                this.warming = this.exchange.warming().map(|warming| this.processor.warmer.start(warming));
            }
            if let Some(running) = &mut this.warming {
                if Pin::new(running).poll(cx).is_pending() {
                    this.inbound.absorb(cx);
                    return Poll::Pending;
                }
                this.warming = None;
                if let Err(error) = this.feed(Event::Warmed) {
                    return Poll::Ready(Some(Err(this.fail(&error, Code::FailedPrecondition))));
                }
                continue;
            }
            let told = this.poll_turn(cx).or_else(|| this.poll_eviction(cx)).or_else(|| this.poll_asking(cx));
            let event = match told {
                Some(told) => told,
                None => match Pin::new(&mut this.inbound).poll_next(cx) {
                    Poll::Ready(Some(Ok(Incoming::Message(message)))) => {
                        this.unfinished_since = None;
                        Event::Message(message)
                    }
                    Poll::Ready(Some(Ok(Incoming::TooLarge(bytes)))) => Event::TooLarge(bytes),
                    // A message that can't be decoded gets a status; an end, clean or by reset, is the stream's normal end.
                    Poll::Ready(Some(Err(status))) => {
                        this.processor.metrics.protocol_errors.inc();
                        this.failed = true;
                        return Poll::Ready(Some(Err(status)));
                    }
                    Poll::Ready(None) if !this.outlives_its_inbound() => return Poll::Ready(None),
                    Poll::Ready(None) | Poll::Pending => match this.poll_upload(cx) {
                        Some(evicted) => evicted,
                        None => {
                            ready!(this.poll_deadline(cx));
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
