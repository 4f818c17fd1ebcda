//! Traces in a build without the feature `full`: no span can exist.

use super::{Received, Step, TraceContexts};
use attache_pool::Endpoint;
use attache_request::event::{DecisionRecord, DecisionTrace, RequestTrace};
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// Creates no spans.
#[derive(Debug, Default)]
pub struct Tracing(());

impl Tracing {
    /// Starts no span.
    #[must_use]
    pub fn start(&self, _: TraceContexts<'_>, _: Timestamp) -> Option<RequestSpan> {
        None
    }
}

/// A span that can't exist.
#[derive(Debug)]
pub enum RequestSpan {}

impl RequestSpan {
    /// As in a build with traces.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        match *self {}
    }

    /// As in a build with traces.
    #[must_use]
    pub fn header(&self) -> Option<String> {
        match *self {}
    }

    /// As in a build with traces.
    pub fn received(&mut self, _: Received<'_>) {
        match *self {}
    }

    /// As in a build with traces.
    pub fn enter(&mut self, _: Step, _: Timestamp) {
        match *self {}
    }

    /// As in a build with traces.
    #[must_use]
    pub fn times(&self) -> Option<DecisionTimes> {
        match *self {}
    }

    /// As in a build with traces.
    pub fn decided(&mut self, _: DecisionTimes, _: Timestamp) {
        match *self {}
    }

    /// As in a build with traces.
    #[must_use]
    pub fn prefill(&self, _: Timestamp) -> Option<PrefillSpan> {
        match *self {}
    }

    /// As in a build with traces.
    #[must_use]
    pub fn sampled(self) -> Option<Box<dyn RequestTrace>> {
        match self {}
    }

    /// As in a build with traces.
    pub fn end_unrouted(self, _: &DecisionRecord) {
        match self {}
    }
}

/// Times that can't exist.
#[derive(Debug)]
pub enum DecisionTimes {}

impl DecisionTrace for DecisionTimes {
    fn entered(&self, _: &Arc<str>, _: &Arc<str>) {
        match *self {}
    }

    fn lookup_begins(&self) {
        match *self {}
    }

    fn lookup_ends(&self) {
        match *self {}
    }
}

/// A span that can't exist.
#[derive(Debug)]
pub enum PrefillSpan {}

impl PrefillSpan {
    /// As in a build with traces.
    #[must_use]
    pub fn traceparent(&self) -> String {
        match *self {}
    }

    /// As in a build with traces.
    pub fn end(self, _: Option<&Endpoint>, _: Option<&'static str>, _: Timestamp) {
        match self {}
    }
}
