//! The exchange of a request whose decision waits: for tokens, or for whoever counts what its tenant has had. Nothing
//! else comes in until then.
//!
//! ```text
//! Collecting ─end of body─▶ (not decided yet) ─it has run─▶ (decide, with the body as it stood)
//! ```

use super::*;
use attache_picker::warming::Made;

/// Where the request stood when its decision was put off.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stood {
    /// At its headers, with which it ends or not.
    Headers(bool),
    /// At its body.
    Body(Close),
}

impl Stood {
    /// Whether more of its body may come.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Stood::Headers(false) | Stood::Body(Close::Cut))
    }
}

/// What must run, and how it goes on then.
#[derive(Debug, Default)]
pub(super) struct Waits {
    warming: Option<Warming>,
    stood: Option<Stood>,
    /// Where the outcome of the prompt's background work is, until the request is decided.
    pub(super) made: Option<Made>,
}

impl Waits {
    /// Whether the decision is put off.
    pub(super) fn is_waiting(&self) -> bool {
        self.stood.is_some()
    }
}

impl Exchange {
    /// What must run before the request can be decided on; [`Event::Warmed`] says that it has. Until then nothing else
    /// may come in.
    pub fn warming(&mut self) -> Option<Warming> {
        self.waits.warming.take()
    }

    pub(super) fn wait(&mut self, warming: Warming, stood: Stood) {
        let made = warming.made().or(self.waits.made.take());
        self.waits = Waits { warming: Some(warming), stood: Some(stood), made };
    }

    pub(super) fn on_warmed(&mut self, now: Timestamp, out: &mut Actions) {
        if self.request != RequestSide::Collecting {
            return;
        }
        match self.waits.stood.take() {
            Some(Stood::Headers(end_of_stream)) => self.decide_at_headers(end_of_stream, now, out),
            Some(Stood::Body(close)) => self.decide_on_body(close, now, out),
            None => {}
        }
    }
}
