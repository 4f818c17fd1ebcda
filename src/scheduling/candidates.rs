//! The endpoints that a request may go to.

use super::booking;
use super::plugin::PickContext;
use crate::clock::Timestamp;
use crate::pool::speed::Work;
use crate::pool::{EndpointMetrics, EndpointState, ledger};
use std::time::Duration;

/// An endpoint that may serve the request, with the figure that most algorithms start from.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Identity, ledger, health and metrics.
    pub state: &'a EndpointState,
    /// What it reports, unless that is too old to say anything.
    pub metrics: Option<&'a EndpointMetrics>,
    /// Requests on it, [`ledger::requests`], raised while it is in slow start.
    pub requests: u32,
    /// Waiting requests, as it reports; without a fresh page all that this picker has in flight there.
    pub waiting: u32,
    /// Running requests, as it reports; without a fresh page all that this picker has in flight there.
    pub running: u32,
    /// KV cache in use, 0..=1, as it reports; NaN without a fresh page.
    pub kv_usage: f32,
    /// How much of the prompt it holds.
    pub cached: Cached,
}

/// How much of a prompt an endpoint holds or is about to hold, tokens from the start without a hole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cached {
    /// In GPU memory.
    pub gpu: u32,
    /// In GPU memory, host memory or behind them.
    pub any: u32,
}

impl<'a> Candidate<'a> {
    /// A candidate whose load counts `surcharge` percent (and at least that part of one request) more than it is.
    #[must_use]
    pub fn new(state: &'a EndpointState, now: Timestamp, stale_after: Duration, surcharge: u32) -> Self {
        let metrics = state.fresh_metrics(now, stale_after);
        let requests = ledger::requests(&state.endpoint, metrics);
        let extra = u64::from(requests.max(1)) * u64::from(surcharge) / 100;
        let requests = requests.saturating_add(u32::try_from(extra).unwrap_or(u32::MAX));
        let (waiting, running, kv_usage) = match metrics {
            Some(m) => (m.waiting, m.running, m.kv_usage),
            None => (state.endpoint.ledger.in_flight(), state.endpoint.ledger.in_flight(), f32::NAN),
        };
        Self { state, metrics, requests, waiting, running, kv_usage, cached: Cached::default() }
    }

    /// What the request would have it compute.
    #[must_use]
    pub fn work(&self, cx: &PickContext<'_>) -> Work {
        booking::work(cx.request.prompt_tokens, self.cached.any, self.metrics, cx.request.model)
    }

    /// The candidate with what `cx` has found of the prompt in its cache.
    #[must_use]
    pub fn holding(mut self, cx: &PickContext<'_>) -> Self {
        if let Some(found) = cx.prefix {
            let depth = found.depth(self.state.endpoint.id);
            let tokens = |blocks| found.tokens(blocks).min(cx.request.prompt_tokens);
            self.cached = Cached { gpu: tokens(depth.gpu), any: tokens(depth.any) };
        }
        self
    }
}
