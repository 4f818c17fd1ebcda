//! The gRPC service. Each request is one stream that tonic polls, without a task or a channel of its own. The stream
//! passes Envoy's messages to the [`Exchange`] and owns the timer.
//!
//! A stream ends only when Envoy closes it, or with an error. If Attaché closed it before the response is complete,
//! the client would get a truncated response with status 200. Some gateways half-close the stream after the request
//! and wait for the decision, such as NGINX Gateway Fabric. Such a stream lives until the request is answered.

use super::exchange::{Actions, Event, Exchange, GatewayCall, ProtocolError};
use super::opening::First;
use super::prefiller::PendingCall;
use super::processor::Processor;
use super::uploads::{Evicted, Upload};
use super::warmer::Running;
use super::wire::{Inbound, Incoming};
use attache_disagg::attempts::Attempt;
use attache_flow::Refusal;
use attache_picker::event::{Limit, NameEvent};
use attache_picker::queues::QueueSignal;
use attache_picker::split::{LegProgress, PrefillLeg};
use attache_types::clock::{Clock, Timestamp};
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use futures_core::Stream;
use smallvec::SmallVec;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Sleep, timeout_at};
use tonic::{Code, Status};

/// Replies to one message: one for headers, one for a body. A larger buffer would miss the allocator's fast path.
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
        let held = self.processor.picker.buffered.nothing();
        Pump {
            inbound: Inbound::new(first, exchange.max_message_bytes(), held),
            exchange,
            upload: None,
            unfinished_since: None,
            out: Actions::with_capacity(USUAL_ANSWERS),
            processor: self.processor.clone(),
            clock: self.clock,
            timer: None,
            warming: None,
            leg_calls: SmallVec::new(),
            waiting: None,
            eviction: None,
            failed: false,
        }
    }
}

/// One stream. When tonic polls it and no reply is ready, it polls Envoy's messages.
#[derive(Debug)]
pub struct Pump {
    inbound: Inbound,
    exchange: Exchange,
    /// Set while the rest of a body or of a message is awaited.
    upload: Option<Upload>,
    /// When the awaited rest was first noticed.
    unfinished_since: Option<Timestamp>,
    out: Actions,
    processor: Arc<Processor>,
    clock: Clock,
    timer: Option<(Timestamp, Pin<Box<Sleep>>)>,
    warming: Option<Running>,
    /// Calls to prefill workers whose results are awaited.
    leg_calls: SmallVec<[(Attempt, PendingCall); 1]>,
    /// Becomes ready when the queued request leaves the queue.
    waiting: Option<QueueSignal>,
    /// Becomes ready when the request in flight is preempted.
    eviction: Option<QueueSignal<Refusal>>,
    failed: bool,
}

impl Pump {
    fn feed(&mut self, event: Event) -> Result<(), ProtocolError> {
        let now = self.clock.now();
        let routed_before = self.exchange.is_routed();
        let (exchange, out) = (&mut self.exchange, &mut self.out);
        let result = catch_unwind(AssertUnwindSafe(|| exchange.on(event, now, out))).unwrap_or_else(|_| {
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

    /// Starts the calls of the exchange, abandons those whose results it no longer awaits, and returns one result.
    fn poll_leg_calls(&mut self, cx: &mut Context<'_>) -> Option<Event> {
        for call in self.exchange.leg_calls() {
            match call.attempt {
                Some(attempt) => self.leg_calls.push((attempt, self.processor.prefiller.start(call))),
                None => self.processor.prefiller.send_detached(call),
            }
        }
        if self.leg_calls.is_empty() {
            return None;
        }
        let exchange = &self.exchange;
        self.leg_calls.retain(|(attempt, _)| exchange.awaits(*attempt));
        let result = self.leg_calls.iter_mut().enumerate().find_map(|(at, (attempt, pending))| {
            match Pin::new(pending).poll(cx) {
                Poll::Ready(result) => Some((at, *attempt, result)),
                Poll::Pending => None,
            }
        });
        result.map(|(at, attempt, result)| {
            self.leg_calls.remove(at);
            Event::LegResult(attempt, result)
        })
    }

    /// Returns how the queued request left the queue, once it has.
    fn poll_dequeue(&mut self, cx: &mut Context<'_>) -> Option<Event> {
        if self.waiting.is_none() {
            self.waiting = self.exchange.waiting();
        }
        let Poll::Ready(turn) = Pin::new(self.waiting.as_mut()?).poll(cx) else { return None };
        self.waiting = None;
        Some(Event::Dequeued(turn))
    }

    /// Returns the preemption of the request, once a more important request causes one.
    fn poll_eviction(&mut self, cx: &mut Context<'_>) -> Option<Event> {
        if self.eviction.is_none() {
            self.eviction = self.exchange.eviction();
        }
        let Poll::Ready(refusal) = Pin::new(self.eviction.as_mut()?).poll(cx) else { return None };
        self.eviction = None;
        refusal.map(Event::Evicted)
    }

    /// Whether the stream continues after its last message, because the gateway half-closed it and awaits the decision.
    fn outlives_its_inbound(&mut self) -> bool {
        self.inbound.is_half_closed() && self.exchange.half_closed(self.clock.now())
    }

    /// Accounts for the memory of an unfinished body or message. Returns an event when the upload must end.
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

    /// Ready at the deadline of the exchange.
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

/// The stream was closed or reset.
impl Drop for Pump {
    fn drop(&mut self) {
        // The gateway may close the stream at the response headers, before the stream is polled again for these calls.
        for call in self.exchange.leg_calls().into_iter().filter(|call| call.attempt.is_none()) {
            self.processor.prefiller.send_detached(call);
        }
        if let Some((leg, (attempt, pending))) = self.exchange.take_unwatched().zip(self.leg_calls.pop()) {
            let watch = watch_unshown(leg, attempt, pending, self.processor.clone(), self.clock);
            self.processor.prefiller.spawn(watch);
        }
        self.exchange.gone(self.clock.now());
    }
}

/// Waits for a prefill whose response the gateway does not show, and aborts the decode leg if the prefill fails.
async fn watch_unshown(
    mut leg: Box<PrefillLeg>,
    attempt: Attempt,
    pending: PendingCall,
    processor: Arc<Processor>,
    clock: Clock,
) {
    let progress = match timeout_at(clock.instant(leg.deadline()), pending).await {
        Ok(result) => leg.on_leg_result(attempt, &result, clock.now(), &processor.picker),
        Err(_) => leg.on_deadline(clock.now(), &processor.picker),
    };
    if let (LegProgress::Refused(_), Some(abort)) = (progress, leg.abort()) {
        processor.prefiller.send_detached(abort);
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
            let result = this.poll_dequeue(cx).or_else(|| this.poll_eviction(cx)).or_else(|| this.poll_leg_calls(cx));
            let event = match result {
                Some(result) => result,
                None => match Pin::new(&mut this.inbound).poll_next(cx) {
                    Poll::Ready(Some(Ok(Incoming::Message(message)))) => {
                        this.unfinished_since = None;
                        Event::Message(message)
                    }
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
