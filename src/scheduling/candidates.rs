//! The endpoints that may serve a request.

use super::booking;
use super::plugin::PickContext;
use attache_pool::speed::Work;
use attache_pool::{EndpointMetrics, EndpointState, LoraState, Reported};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::time::Duration;

/// An endpoint that may serve the request, with the metrics that most algorithms use.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Endpoint, ledger, health and metrics.
    pub state: &'a EndpointState,
    /// Id of the endpoint in the pool.
    pub id: EndpointId,
    /// Whether its metrics are fresh.
    pub is_fresh: bool,
    /// Whether its metrics list LoRA adapters.
    pub has_adapters: bool,
    /// Number of requests, [`EndpointLedger::requests`](attache_pool::ledger::EndpointLedger::requests), increased
    /// during slow start.
    pub requests: u32,
    /// Reported waiting requests; without fresh metrics, [`Candidate::own_requests`].
    pub waiting: u32,
    /// Reported running requests; without fresh metrics, [`Candidate::own_requests`].
    pub running: u32,
    /// Reported KV cache usage, 0..=1; NaN without fresh metrics.
    pub kv_usage: f32,
    /// Cached prefix of the prompt.
    pub cached: Cached,
}

/// Prefix of a prompt that an endpoint has cached or will have, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cached {
    /// In GPU memory.
    pub gpu: u32,
    /// In any tier: GPU memory, host memory or below.
    pub any: u32,
    /// Part of `any` that other requests use or will use, at most. These blocks take no additional cache.
    pub in_use: u32,
}

impl<'a> Candidate<'a> {
    /// A candidate whose requests are increased by `surcharge` percent, and by at least that part of one request.
    #[inline]
    #[must_use]
    pub fn new(state: &'a EndpointState, now: Timestamp, stale_after: Duration, surcharge: u32) -> Self {
        let (fresh, ledger) = (state.fresh(now, stale_after), &state.live().ledger);
        let mut requests = ledger.requests(fresh);
        if surcharge > 0 {
            let extra = u64::from(requests.max(1)) * u64::from(surcharge) / 100;
            requests = requests.saturating_add(u32::try_from(extra).unwrap_or(u32::MAX));
        }
        let (waiting, running, kv_usage) = match fresh {
            Some(m) => (m.waiting, m.running, m.kv_usage),
            None => (ledger.in_flight(), ledger.in_flight(), f32::NAN),
        };
        Self {
            state,
            id: state.id(),
            is_fresh: fresh.is_some(),
            has_adapters: fresh.is_some_and(|m| m.has_adapters),
            requests,
            waiting,
            running,
            kv_usage,
            cached: Cached::default(),
        }
    }

    /// Requests that Attaché has in flight there, whatever the server reports; with `sync`, those of all pickers.
    #[inline]
    #[must_use]
    pub fn own_requests(&self) -> u32 {
        self.state.live().ledger.in_flight()
    }

    /// Its metrics, unless they are stale.
    #[inline]
    #[must_use]
    pub fn metrics(&self) -> Option<&'a EndpointMetrics> {
        if self.is_fresh { self.state.metrics() } else { None }
    }

    /// The metrics that every decision reads, unless they are stale.
    #[inline]
    #[must_use]
    pub fn reported(&self) -> Option<&'a Reported> {
        if self.is_fresh { self.state.reported() } else { None }
    }

    /// Its LoRA adapters, if its fresh metrics list them.
    #[inline]
    #[must_use]
    pub fn lora(&self) -> Option<&'a LoraState> {
        // Most endpoints list none; the flag avoids a memory access to their metrics.
        if self.has_adapters { self.state.metrics()?.lora.as_ref() } else { None }
    }

    /// Work of the request on this endpoint.
    #[inline]
    #[must_use]
    pub fn work(&self, cx: &PickContext<'_>) -> Work {
        booking::work(cx.request.prompt_tokens, self.cached.any, self.lora(), cx.request.model)
    }

    /// Work of the request if `more` tokens beyond the cached ones are transferred to it.
    #[must_use]
    pub fn work_with(&self, cx: &PickContext<'_>, more: u32) -> Work {
        let cached = self.cached.any.saturating_add(more).min(cx.request.prompt_tokens);
        booking::work(cx.request.prompt_tokens, cached, self.lora(), cx.request.model)
    }

    /// Sets the cached prefix of all `candidates` from `cx`.
    pub fn look_up(candidates: &mut [Self], cx: &PickContext<'_>) {
        let Some(found) = cx.prefix else { return };
        let tokens = |blocks| found.tokens(blocks).min(cx.request.prompt_tokens);
        for candidate in candidates {
            let depth = found.depth(candidate.id);
            // Most endpoints hold nothing.
            if depth.any > 0 {
                let in_use = depth.any.min(found.in_use(candidate.id));
                candidate.cached = Cached { gpu: tokens(depth.gpu), any: tokens(depth.any), in_use: tokens(in_use) };
            }
        }
    }
}
