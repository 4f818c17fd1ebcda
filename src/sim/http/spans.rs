//! The span of a request, if the fleet exports spans.

use super::{Call, Generation, Server};
use crate::spans::OpenSpan;

impl Call {
    /// The W3C context of the client.
    pub(super) fn traceparent(&self) -> Option<String> {
        self.headers.get("traceparent")?.to_str().ok().map(str::to_owned)
    }
}

impl Server {
    /// Begins the span of a request.
    pub(super) fn span(&self, generation: &Generation) -> Option<OpenSpan> {
        let sink = self.config.spans.clone()?;
        let Generation { traceparent, request_id, model, .. } = generation;
        Some(OpenSpan::begin(sink, self.clock, traceparent.clone(), request_id.clone(), model.name.clone()))
    }
}
