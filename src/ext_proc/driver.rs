//! An exchange and everything that it waits for: background work, its queue, calls to prefill workers, its deadline.
//!
//! Each host of exchanges owns one driver for each request: a gRPC stream ([`service`](super::service)), or a filter
//! inside Envoy. The host delivers messages and polls. It differs in where messages come from and where replies go.

use super::exchange::{Actions, Event, Exchange, ProtocolError};
use super::prefiller::PendingCall;
use super::processor::Processor;
use super::uploads::{Evicted, Upload};
use super::warmer::Running;
use attache_disagg::attempts::Attempt;
use attache_flow::Refusal;
use attache_picker::event::NameEvent;
use attache_picker::queues::QueueSignal;
use attache_picker::split::{LegProgress, PrefillLeg};
use attache_types::clock::{Clock, Timestamp};
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::time::{Sleep, timeout_at};

/// Replies to one message: one for headers, one for a body. A larger buffer would miss the allocator's fast path.
const USUAL_ANSWERS: usize = 2;

/// Why an exchange can't continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The host's messages are invalid.
    Protocol(ProtocolError),
    /// Attaché's own code panicked. The host decides whether the request fails: see [`Driver::fail`].
    Panicked,
}

/// One exchange, and the work and the timer that it waits for.
#[derive(Debug)]
pub struct Driver {
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
    /// Messages that were delivered during background work.
    backlog: VecDeque<Event>,
}

impl Driver {
    /// A driver of this exchange.
    #[must_use]
    pub fn new(exchange: Exchange, processor: &Arc<Processor>, clock: Clock) -> Self {
        Self {
            exchange,
            upload: None,
            unfinished_since: None,
            out: Actions::with_capacity(USUAL_ANSWERS),
            processor: processor.clone(),
            clock,
            timer: None,
            warming: None,
            leg_calls: SmallVec::new(),
            waiting: None,
            eviction: None,
            backlog: VecDeque::new(),
        }
    }

    /// The exchange.
    #[must_use]
    pub fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    /// The next reply to the gateway.
    pub fn next_reply(&mut self) -> Option<ProcessingResponse> {
        self.out.pop_front()
    }

    /// Handles one event. `unfinished`: bytes of a message that has not arrived as a whole.
    ///
    /// # Errors
    /// If the exchange can't continue.
    pub fn feed(&mut self, event: Event, unfinished: u64) -> Result<(), Failure> {
        if matches!(event, Event::Message(_) | Event::MessageWith(_)) {
            self.unfinished_since = None;
        }
        let now = self.clock.now();
        let routed_before = self.exchange.is_routed();
        let (exchange, out) = (&mut self.exchange, &mut self.out);
        let result = catch_unwind(AssertUnwindSafe(|| exchange.on(event, now, out)));
        let Ok(result) = result else {
            self.out.clear();
            return Err(Failure::Panicked);
        };
        self.settle_upload(unfinished, now);
        if !routed_before && self.exchange.is_routed() {
            let took = self.clock.now().since(now);
            self.processor.metrics.decided_in(took);
            self.exchange.model_counts().into_iter().for_each(|counts| counts.event(NameEvent::Decided(took)));
        }
        result.map_err(Failure::Protocol)
    }

    /// Ends the exchange after [`Failure::Panicked`]. A request without a decision gets an error response, unless the
    /// exchange [falls back](Exchange::falls_back).
    ///
    /// # Errors
    /// If the gateway has the destination or a response already.
    pub fn fail(&mut self, unfinished: u64) -> Result<(), ProtocolError> {
        let now = self.clock.now();
        let result = self.exchange.fail(now, &mut self.out);
        self.settle_upload(unfinished, now);
        result
    }

    fn settle_upload(&mut self, unfinished: u64, now: Timestamp) {
        if self.upload.is_some() && self.exchange.upload(unfinished, now).is_none() {
            self.upload = None;
        }
    }

    /// Handles a message at once, or after the background work that the decision waits for.
    ///
    /// # Errors
    /// If the exchange can't continue.
    pub fn deliver(&mut self, message: Event) -> Result<(), Failure> {
        if self.exchange.is_deferred() {
            self.backlog.push_back(message);
            return Ok(());
        }
        self.feed(message, 0)
    }

    /// Whether anything but a message can change the exchange, so that it must be polled.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.exchange.is_deferred()
            || self.exchange.deadline().is_some()
            || self.exchange.expects_results()
            || self.waiting.is_some()
            || self.eviction.is_some()
            || !self.leg_calls.is_empty()
    }

    /// Handles everything that is ready. The task of `cx` is woken when more is.
    ///
    /// # Errors
    /// If the exchange can't continue.
    pub fn advance(&mut self, cx: &mut Context<'_>) -> Result<(), Failure> {
        loop {
            let event = match self.poll_warming(cx) {
                Some(Poll::Pending) => return Ok(()),
                Some(Poll::Ready(warmed)) => warmed,
                None => match self.backlog.pop_front() {
                    Some(message) => message,
                    None => match self.poll_results(cx).or_else(|| self.poll_upload(cx, 0)) {
                        Some(event) => event,
                        None if self.poll_deadline(cx).is_ready() => Event::Deadline,
                        None => return Ok(()),
                    },
                },
            };
            self.feed(event, 0)?;
        }
    }

    /// Starts and polls the work that the decision waits for. `None` if there is none. While it is pending, the
    /// exchange gets no other event.
    pub fn poll_warming(&mut self, cx: &mut Context<'_>) -> Option<Poll<Event>> {
        if self.warming.is_none() {
            self.warming = self.exchange.warming().map(|warming| self.processor.warmer.start(warming));
        }
        let polled = Pin::new(self.warming.as_mut()?).poll(cx);
        if polled.is_ready() {
            self.warming = None;
        }
        Some(polled.map(|()| Event::Warmed))
    }

    /// One result of the queue or of a call.
    pub fn poll_results(&mut self, cx: &mut Context<'_>) -> Option<Event> {
        self.poll_dequeue(cx).or_else(|| self.poll_eviction(cx)).or_else(|| self.poll_leg_calls(cx))
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

    /// Whether the exchange continues after the last message, because the gateway half-closed the stream and awaits the
    /// decision.
    pub fn half_closed(&mut self) -> bool {
        self.exchange.half_closed(self.clock.now())
    }

    /// Accounts for the memory of an unfinished body or message. Returns an event when the upload must end.
    pub fn poll_upload(&mut self, cx: &Context<'_>, unfinished: u64) -> Option<Event> {
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
        Some(Event::UploadEvicted(why))
    }

    /// Ready at the deadline of the exchange.
    pub fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<()> {
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

/// The request is over: its stream was closed or reset.
impl Drop for Driver {
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
