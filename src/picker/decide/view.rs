//! The input of a decision: the request as the gateway has sent it so far.

use crate::event::DecisionTrace;
use crate::head::Head;
use crate::known::KnownRequest;
use crate::prefix::made::PromptOutcome;
use attache_protocol::Api;
use attache_scheduling::Subset;
use attache_types::clock::Timestamp;
use std::sync::OnceLock;

/// The part of the request body that the gateway has sent.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// No body, or it arrives after the decision.
    Nothing,
    /// The beginning (`BUFFERED_PARTIAL` cuts long bodies).
    Head(&'a [u8]),
    /// The whole body.
    Whole(&'a [u8]),
    /// None: the request is known without one, from a simulation or a recording.
    Known(&'a KnownRequest<'a>),
}

impl<'a> Seen<'a> {
    pub(crate) fn bytes(self) -> &'a [u8] {
        match self {
            Seen::Nothing | Seen::Known(_) => &[],
            Seen::Head(bytes) | Seen::Whole(bytes) => bytes,
        }
    }

    /// Length, bytes.
    pub(crate) fn len(self) -> u64 {
        match self {
            Seen::Known(known) => known.bytes,
            _ => self.bytes().len() as u64,
        }
    }

    /// Whether nothing of the body is missing.
    pub(crate) fn is_whole(self) -> bool {
        matches!(self, Seen::Whole(_) | Seen::Known(_))
    }

    /// The request, if it is known without a body.
    pub(crate) fn known(self) -> Option<&'a KnownRequest<'a>> {
        match self {
            Seen::Known(known) => Some(known),
            _ => None,
        }
    }
}

/// The input of a decision.
#[derive(Debug)]
pub struct RequestView<'a> {
    /// The request's headers.
    pub head: &'a Head,
    /// Name of the request's pool; `None`: the pool follows from the request.
    pub pool: Option<&'a str>,
    /// The `:authority` of the gateway's own call.
    pub called: &'a str,
    /// The request's API.
    pub api: Api,
    /// The id of a stored response that the path names (Responses API).
    pub response_id: Option<&'a str>,
    /// The endpoints that the gateway allows.
    pub subset: Option<&'a Subset>,
    /// The request's body.
    pub body: Seen<'a>,
    /// The time of the decision.
    pub now: Timestamp,
    /// The time at which the request's headers arrived.
    pub opened: Timestamp,
    /// The last attempt: the decision does without prompt keys that are not computed yet.
    pub last: bool,
    /// The outcome of the background work on the prompt, if any was started.
    pub made: Option<&'a OnceLock<PromptOutcome>>,
    /// The gateway's body mode leaves time to queue the request.
    pub may_wait: bool,
    /// The decision is made at the headers, and a body or an upgraded connection follows.
    pub opens: bool,
    /// The queue has dequeued the request.
    pub has_turn: bool,
    /// The time for a prefill on another worker, if Attaché calls that worker.
    pub prefill_time: PrefillTime,
    /// Times the steps, if the request is sampled for traces.
    pub trace: Option<&'a dyn DecisionTrace>,
}

/// How long the gateway's body mode lets a prefill take before the request is dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillTime {
    /// No time: the body is not complete, or not shown.
    None,
    /// The gateway's message timeout runs.
    MessageTimeout,
    /// As long as the configuration allows.
    Unbounded,
}

impl RequestView<'_> {
    /// Whether a body follows that the gateway does not show before the decision, although its API has a model there.
    pub(crate) fn has_unshown_body(&self) -> bool {
        self.opens && self.head.method() == "POST" && self.api != Api::Other && matches!(self.body, Seen::Nothing)
    }
}
