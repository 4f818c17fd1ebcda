//! The exchange of a request whose decision waits for background work: tokenizing, or a quota in a shared store. Until
//! it has run, the exchange gets no other events.
//!
//! ```text
//! Collecting ─end of body─▶ (background work) ─done─▶ (decide, with the body so far)
//! ```

use super::{Actions, BodyEnd, Exchange, RequestSide};
use attache_picker::warming::{Made, Warming};
use attache_types::clock::Timestamp;

/// The part of the request that had arrived when its decision was deferred.
#[derive(Clone, Copy, Debug)]
pub(super) enum DecisionPoint {
    /// The headers; true if the request ends with them.
    Headers(bool),
    /// The body.
    Body(BodyEnd),
}

impl DecisionPoint {
    /// Whether more of the body may arrive.
    pub(super) fn is_open(self) -> bool {
        matches!(self, DecisionPoint::Headers(false) | DecisionPoint::Body(BodyEnd::Cut))
    }
}

/// The background work of a deferred decision.
#[derive(Debug, Default)]
pub(super) struct TokenWait {
    warming: Option<Warming>,
    point: Option<DecisionPoint>,
    /// Receives the outcome of the background work on the prompt. Kept until the request is decided.
    pub(super) made: Option<Made>,
}

impl TokenWait {
    /// Whether the decision is deferred.
    pub(super) fn is_waiting(&self) -> bool {
        self.point.is_some()
    }
}

impl Exchange {
    /// The work that must run before the decision. Once it has run, the caller sends [`Event::Warmed`](super::Event::Warmed), and no other
    /// event before. Returned once.
    pub fn warming(&mut self) -> Option<Warming> {
        self.waits.warming.take()
    }

    pub(super) fn wait(&mut self, warming: Warming, point: DecisionPoint) {
        let made = warming.made().or(self.waits.made.take());
        self.waits = TokenWait { warming: Some(warming), point: Some(point), made };
    }

    pub(super) fn on_warmed(&mut self, now: Timestamp, out: &mut Actions) {
        if self.request != RequestSide::Collecting {
            return;
        }
        match self.waits.point.take() {
            Some(DecisionPoint::Headers(end_of_stream)) => self.decide_at_headers(end_of_stream, now, out),
            Some(DecisionPoint::Body(close)) => self.decide_on_body(close, now, out),
            None => {}
        }
    }
}
