//! A stream that does not go its way to the end: the picker fails in the middle of it, or it is gone.

use super::*;

impl Exchange {
    /// The picker's own code failed in the middle of this stream: what can still be told to the client.
    ///
    /// # Errors
    /// When the gateway has been told where the request goes, or has an answer. One that is cut can be told from one
    /// that is whole; one that ends early and well can't.
    pub fn fail(&mut self, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        self.processor.metrics.panics.inc();
        let undecided = match self.request {
            RequestSide::Opened | RequestSide::Collecting | RequestSide::Parked | RequestSide::Prefilling => true,
            RequestSide::Flowing | RequestSide::Ended | RequestSide::Refused | RequestSide::Observed => false,
        };
        if undecided && self.response == ResponseSide::Awaited {
            let error = RequestError::new(Reason::Internal, "the endpoint picker failed on this request");
            self.refuse(&error, now, out);
            return Ok(());
        }
        Err(ProtocolError("internal error while an answer was passing"))
    }

    /// The gateway sends no more messages on this stream and has not reset it. True while the request waits to be
    /// answered. A request that has been answered ends here: its response is not shown.
    pub fn half_closed(&mut self, now: Timestamp) -> bool {
        match self.request {
            RequestSide::Parked | RequestSide::Prefilling => return true,
            RequestSide::Ended if self.response == ResponseSide::Awaited && self.routed.is_some() => {
                self.split.goes_on = true;
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
