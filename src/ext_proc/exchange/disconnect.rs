//! Streams that end early: Attaché fails while it handles one, or the gateway closes it.

use super::{Actions, Exchange, ProtocolError, RequestSide, ResponseSide};
use attache_picker::event::End;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};

impl Exchange {
    /// Attaché's own code panicked while it handled this stream. Before the decision, the client gets an error
    /// response.
    ///
    /// # Errors
    /// When the gateway has the destination or a response already. The error resets the stream, so the client sees
    /// that the response was cut off; a regular end would look complete.
    pub fn fail(&mut self, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        self.processor.metrics.panics.inc();
        let undecided = match self.request {
            RequestSide::Opened | RequestSide::Collecting | RequestSide::Queued | RequestSide::Prefilling => true,
            RequestSide::Flowing | RequestSide::Ended | RequestSide::Refused | RequestSide::Observed => false,
        };
        if undecided && self.response == ResponseSide::Awaited {
            let error = RequestError::new(Reason::Internal, "the endpoint picker failed on this request");
            self.refuse(&error, now, out);
            return Ok(());
        }
        Err(ProtocolError("internal error during a response"))
    }

    /// The gateway sends no more messages on this stream and has not reset it. True while the request waits to be
    /// answered. A request that has been answered ends here: its response is not shown.
    pub fn half_closed(&mut self, now: Timestamp) -> bool {
        match self.request {
            RequestSide::Queued | RequestSide::Prefilling => return true,
            RequestSide::Ended if self.response == ResponseSide::Awaited && self.in_flight.is_some() => {
                self.split.is_unshown = true;
                self.end_response(End::Unwatched, now);
            }
            _ => {}
        }
        false
    }

    /// The stream is gone, and what is open ends at this moment.
    pub fn gone(&mut self, now: Timestamp) {
        self.last_seen = now;
    }
}
