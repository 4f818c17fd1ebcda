//! Limits of a request body during its upload: memory, and the lowest rate.

use super::{Actions, Exchange, ProtocolError, RequestSide, ResponseSide};
use crate::mode::BodyMode;
use crate::reply::{self, Direction};
use crate::uploads::{Evicted, Owner, Progress, Standing};
use attache_picker::body::too_large;
use attache_picker::event::{End, Limit};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;
use envoy_types::pb::envoy::service::ext_proc::v3::HttpBody;

/// 1 MiB in addition to the body, for headers, metadata and attributes in Envoy's message.
const MESSAGE_OVERHEAD_BYTES: u64 = 1 << 20;
/// 4 MiB: least limit of a message, also if the limit of bodies is lower. Response chunks arrive in messages as well,
/// as large as Envoy's buffers (1 MiB by default).
const LEAST_MESSAGE_BYTES: u64 = 4 << 20;
/// 65,536: most chunks of a STREAMED body. Each needs a reply of some hundred bytes, and Attaché creates all replies at
/// once.
const MAX_ANSWERED_MESSAGES: usize = 65_536;

impl Exchange {
    /// The limits of this request.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.config.limits
    }

    /// Largest message of Envoy that is buffered, bytes. A larger one is [`Event::TooLarge`](super::Event::TooLarge).
    #[must_use]
    pub fn max_message_bytes(&self) -> usize {
        let body = self.config.limits.max_body_bytes.saturating_add(MESSAGE_OVERHEAD_BYTES);
        usize::try_from(body.max(LEAST_MESSAGE_BYTES)).unwrap_or(usize::MAX)
    }

    /// Whether more of a body is awaited.
    #[must_use]
    pub fn collects(&self) -> bool {
        match self.request {
            RequestSide::Collecting => !self.waits.is_waiting(),
            RequestSide::Queued => self.queueing.is_late(),
            _ => false,
        }
    }

    /// What the unfinished upload holds: the body so far, and `unfinished` bytes of a message that began at `begun`.
    /// `None` if it holds nothing.
    #[must_use]
    pub fn upload(&self, unfinished: u64, begun: Timestamp) -> Option<Standing> {
        let (memory, bytes, progress) = if self.collects() {
            (self.body.memory(), self.body.len(), self.progress)
        } else {
            (0, 0, Progress::begin(begun))
        };
        let memory = memory + unfinished;
        (memory > 0).then_some(Standing { memory, bytes: bytes + unfinished, progress })
    }

    /// Whose share of the memory the upload uses: that of its tenant, otherwise that of its connection, if Envoy
    /// reports it.
    #[must_use]
    pub fn owner(&self) -> Option<Owner> {
        let tenant = self.head.tenant().name().map(|name| Owner::Tenant(name.into()));
        tenant.or(self.connection.map(Owner::Connection))
    }

    /// Buffers a chunk of the body.
    pub(super) fn collect(&mut self, part: Vec<u8>, now: Timestamp) {
        if self.body.is_empty() {
            self.progress = Progress::begin(now);
        }
        self.body.push(part);
        self.progress.came(now);
        self.progress.advance(self.body.len(), now, self.config.limits.min_upload_rate);
    }

    pub(super) fn refusal_by_size(&self, now: Timestamp) -> Option<RequestError> {
        let (limits, metrics) = (&self.config.limits, &self.processor.metrics);
        if self.body.len() > limits.max_body_bytes && self.form.is_none() {
            metrics.limits.count(Limit::BodyBytes);
            return Some(too_large(self.body.len(), limits.max_body_bytes));
        }
        if self.modes().request == BodyMode::Streamed && self.body.messages() > MAX_ANSWERED_MESSAGES {
            metrics.limits.count(Limit::BodyMessages);
            let message = format!("the request's body has more than {MAX_ANSWERED_MESSAGES} chunks");
            return Some(RequestError::new(Reason::BodyTooLarge, message));
        }
        if !self.processor.uploads.make_way(&self.processor.picker.buffered, limits, now) {
            metrics.limits.count(Limit::BufferedBytes);
            return Some(RequestError::new(Reason::Overloaded, "the limit of buffered request bodies is reached"));
        }
        None
    }

    /// When the upload is rejected as too slow. In modes in which Envoy buffers the body, this never applies: the
    /// body is empty until it is complete.
    pub(super) fn upload_ends(&self) -> Option<Timestamp> {
        (!self.body.is_empty()).then(|| self.progress.ends(self.config.limits.upload_grace))
    }

    /// Rejects an upload that is slower than the lowest rate.
    pub(super) fn refusal_by_speed(&mut self, now: Timestamp) -> Option<RequestError> {
        let (rate, grace) = (self.config.limits.min_upload_rate, self.config.limits.upload_grace);
        self.progress.advance(self.body.len(), now, rate);
        if self.upload_ends().is_none_or(|at| at > now) {
            return None;
        }
        self.processor.metrics.limits.count(Limit::UploadRate);
        let message =
            format!("the request's body arrived at less than {rate} bytes a second for {} s", grace.as_secs());
        Some(RequestError::new(Reason::UploadTooSlow, message))
    }

    /// A message of `bytes` bytes was discarded instead of buffered.
    pub(super) fn on_too_large(&mut self, bytes: u64, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        match self.request {
            RequestSide::Refused | RequestSide::Observed => {}
            RequestSide::Collecting | RequestSide::Queued => {
                self.processor.metrics.limits.count(Limit::BodyBytes);
                self.refuse(&too_large(bytes, self.config.limits.max_body_bytes), now, out);
            }
            // A whole response passes unchanged. Only its token usage stays unknown.
            _ if self.response == ResponseSide::Streaming && self.modes().response == BodyMode::Buffered => {
                out.push_back(reply::echo(Direction::Response, BodyMode::Buffered, HttpBody::default()));
                self.end_response(End::Complete, now);
            }
            _ => {
                self.processor.metrics.limits.count(Limit::BodyBytes);
                return Err(ProtocolError("message larger than the limit of a body"));
            }
        }
        Ok(())
    }

    /// The upload is evicted: other uploads need the memory, or its owner exceeds its share.
    pub(super) fn on_upload_evicted(
        &mut self,
        why: Evicted,
        now: Timestamp,
        out: &mut Actions,
    ) -> Result<(), ProtocolError> {
        let (limit, message) = match why {
            Evicted::Full => {
                (Limit::BufferedBytes, "the limit of buffered request bodies is reached, and this one is slow or large")
            }
            Evicted::Share => {
                (Limit::UploadBytesPerClient, "the uploads of this client hold more than their share of memory")
            }
        };
        self.processor.metrics.limits.count(limit);
        match self.request {
            RequestSide::Refused | RequestSide::Observed => Ok(()),
            RequestSide::Collecting | RequestSide::Queued => {
                self.refuse(&RequestError::new(Reason::UploadEvicted, message), now, out);
                Ok(())
            }
            _ => Err(ProtocolError("unfinished message evicted: memory is needed for other requests")),
        }
    }
}
