//! Spans of requests, reported as vLLM exports them: one when a request has finished, none for a cancelled one. The
//! owner of the fleet exports them.

use attache_types::clock::{Clock, Timestamp};
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

/// Exports the spans of a fleet.
pub trait SpanSink: fmt::Debug + Send + Sync {
    /// A request has finished.
    fn finished(&self, request: ServedRequest);
}

/// A finished request. With several prompts or choices, tokens and times are those of the first.
#[derive(Clone, Debug)]
pub struct ServedRequest {
    /// The W3C context that came with it.
    pub traceparent: Option<String>,
    /// Its id in the engine.
    pub request_id: String,
    /// The model's name in the response.
    pub model: String,
    /// When the engine got it.
    pub arrived: SystemTime,
    /// When its first token was generated; `None` if it generates none.
    pub first_token: Option<SystemTime>,
    /// When it finished.
    pub ended: SystemTime,
    /// Length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// Generated tokens.
    pub generated_tokens: u32,
}

/// The span of a request that runs.
#[derive(Debug)]
pub(super) struct OpenSpan {
    sink: Arc<dyn SpanSink>,
    clock: Clock,
    request: ServedRequest,
}

impl OpenSpan {
    /// The engine gets a request now.
    pub(super) fn begin(
        sink: Arc<dyn SpanSink>,
        clock: Clock,
        traceparent: Option<String>,
        request_id: String,
        model: String,
    ) -> Self {
        let now = clock.wall(clock.now());
        let request = ServedRequest {
            traceparent,
            request_id,
            model,
            arrived: now,
            first_token: None,
            ended: now,
            prompt_tokens: 0,
            generated_tokens: 0,
        };
        Self { sink, clock, request }
    }

    /// The first token is generated.
    pub(super) fn first_token(&mut self, at: Timestamp) {
        self.request.first_token = Some(self.clock.wall(at));
    }

    /// The request has finished.
    pub(super) fn finish(mut self, at: Timestamp, prompt_tokens: u32, generated_tokens: u32) {
        let ended = self.clock.wall(at).max(self.request.arrived);
        self.request = ServedRequest { ended, prompt_tokens, generated_tokens, ..self.request };
        self.sink.finished(self.request);
    }
}
