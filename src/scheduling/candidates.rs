//! The endpoints that a request may go to.

use super::booking;
use super::plugin::PickContext;
use attache_pool::speed::Work;
use attache_pool::{EndpointMetrics, EndpointState, LoraState, Reported};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::time::Duration;

/// An endpoint that may serve the request, with the figure that most algorithms start from.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Identity, ledger, health and metrics.
    pub state: &'a EndpointState,
    /// Its number in the pool.
    pub id: EndpointId,
    /// What it reports is not too old to say anything.
    pub is_fresh: bool,
    /// That names its adapters.
    pub has_adapters: bool,
    /// Requests on it, [`EndpointLedger::requests`](attache_pool::ledger::EndpointLedger::requests), raised while it is in slow start.
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
    /// Of those, what other requests use there, or will, at most: it has its room in any case.
    pub in_use: u32,
}

impl<'a> Candidate<'a> {
    /// A candidate whose load counts `surcharge` percent (and at least that part of one request) more than it is.
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

    /// Requests that this picker has in flight there, whatever the server reports.
    #[inline]
    #[must_use]
    pub fn own_requests(&self) -> u32 {
        self.state.live().ledger.in_flight()
    }

    /// What it reports, unless that is too old to say anything.
    #[inline]
    #[must_use]
    pub fn metrics(&self) -> Option<&'a EndpointMetrics> {
        if self.is_fresh { self.state.metrics() } else { None }
    }

    /// The figures of it that every decision reads.
    #[inline]
    #[must_use]
    pub fn reported(&self) -> Option<&'a Reported> {
        if self.is_fresh { self.state.reported() } else { None }
    }

    /// Its adapters, when it reports them.
    #[inline]
    #[must_use]
    pub fn lora(&self) -> Option<&'a LoraState> {
        // Most report none: their pages need not be touched to see that.
        if self.has_adapters { self.state.metrics()?.lora.as_ref() } else { None }
    }

    /// What the request would have it compute.
    #[inline]
    #[must_use]
    pub fn work(&self, cx: &PickContext<'_>) -> Work {
        booking::work(cx.request.prompt_tokens, self.cached.any, self.lora(), cx.request.model)
    }

    /// The same when `more` tokens than it holds come from elsewhere.
    #[must_use]
    pub fn work_with(&self, cx: &PickContext<'_>, more: u32) -> Work {
        let cached = self.cached.any.saturating_add(more).min(cx.request.prompt_tokens);
        booking::work(cx.request.prompt_tokens, cached, self.lora(), cx.request.model)
    }

    /// Says in all `candidates` what `cx` has found of the prompt in their caches.
    pub fn look_up(candidates: &mut [Self], cx: &PickContext<'_>) {
        let Some(found) = cx.prefix else { return };
        let tokens = |blocks| found.tokens(blocks).min(cx.request.prompt_tokens);
        for candidate in candidates {
            let depth = found.depth(candidate.id);
            // Most hold nothing.
            if depth.any > 0 {
                let in_use = depth.any.min(found.in_use(candidate.id));
                candidate.cached = Cached { gpu: tokens(depth.gpu), any: tokens(depth.any), in_use: tokens(in_use) };
            }
        }
    }
}
