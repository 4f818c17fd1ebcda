//! How streams, responses and splits end, as labels of metrics. Counted by [`super::metrics`].

/// How a stream ended; every stream has exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// An endpoint was named after the request had been understood.
    Routed,
    /// An endpoint was named by load alone: nothing to read, or nothing that can be read.
    Skipped,
    /// Refused for the client's fault.
    Rejected,
    /// Refused because the servers or the picker can't take it.
    Shed,
    /// The client (or Envoy) left before a decision.
    ClientAborted,
    /// The picker's own fault.
    FailedInternal,
    /// The picker knew the answer: the list of models.
    Answered,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Outcome; 7] = [
        Outcome::Routed,
        Outcome::Skipped,
        Outcome::Rejected,
        Outcome::Shed,
        Outcome::ClientAborted,
        Outcome::FailedInternal,
        Outcome::Answered,
    ];

    /// The label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Outcome::Routed => "routed",
            Outcome::Skipped => "skipped",
            Outcome::Rejected => "rejected",
            Outcome::Shed => "shed",
            Outcome::ClientAborted => "client_aborted",
            Outcome::FailedInternal => "failed_internal",
            Outcome::Answered => "answered",
        }
    }
}

/// How a routed request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The answer went by to its last byte.
    Complete,
    /// The gateway does not show the rest of the response: its body, or all of it where the gateway half-closes the stream behind the request.
    Unwatched,
    /// The stream ended before the answer did.
    ClientGone,
    /// The picker ended it: no prefill server computed the prompt.
    Aborted,
    /// The picker ended it: it gave way to a request that is more important.
    Evicted,
}

impl End {
    /// All of them.
    pub const ALL: [End; 5] = [End::Complete, End::Unwatched, End::ClientGone, End::Aborted, End::Evicted];

    /// The label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            End::Complete => "complete",
            End::Unwatched => "unwatched",
            End::ClientGone => "client_gone",
            End::Aborted => "aborted",
            End::Evicted => "evicted",
        }
    }
}

/// What became of a request that two servers might have shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitOutcome {
    /// They did.
    Split,
    /// One server served it: that was predicted to be better, or decided by rule.
    Whole,
    /// The server of the answer computed the prompt as well: no prefill server did.
    Local,
    /// It was refused: no prefill server computed the prompt.
    Refused,
}

impl SplitOutcome {
    /// All of them.
    pub const ALL: [SplitOutcome; 4] =
        [SplitOutcome::Split, SplitOutcome::Whole, SplitOutcome::Local, SplitOutcome::Refused];

    /// The label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            SplitOutcome::Split => "split",
            SplitOutcome::Whole => "whole",
            SplitOutcome::Local => "local",
            SplitOutcome::Refused => "refused",
        }
    }
}
