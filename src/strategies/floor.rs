//! Fallback order of `prefix-affinity`: LocalAI's order of replicas for prompts without a known prefix.
//!
//! 1. fewest requests
//! 2. the endpoint that was used the longest ago
//! 3. the least KV cache in use, where that is known
//! 4. the lowest id
//!
//! Requests are counted as in [`attache_pool::ledger::requests`], so an idle endpoint always comes before a busy one.
//! Idle endpoints are used in rotation: the one used last comes last.
//! This order has no strategy name of its own; `prefix-affinity` with `routePolicy: round_robin` selects it. Source:
//! LocalAI, `FindAndLockNodeWithModel` (`in_flight ASC, last_used ASC, available_vram DESC`).

use attache_scheduling::{Candidate, PickContext, Ranking, Strategy};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;

/// Ranks candidates by [`FloorKey`]; has no parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floor;

/// Sort key of a candidate; the lowest comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FloorKey {
    requests: u32,
    /// When this Attaché replica last sent a request there.
    last_used: Timestamp,
    /// KV cache in use, in thousandths; above 1000 where it is not known.
    kv_cache: u16,
    id: EndpointId,
}

/// Sorts after every endpoint that reports its KV cache usage.
const UNKNOWN: u16 = 1_001;

impl FloorKey {
    pub(super) fn of(candidate: &Candidate<'_>) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 0..=1000")]
        let thousandths = |usage: f32| (usage.clamp(0.0, 1.0) * 1e3).round() as u16;
        let kv_cache = if candidate.kv_usage.is_nan() { UNKNOWN } else { thousandths(candidate.kv_usage) };
        let last_used = candidate.state.live().ledger.last_used();
        Self { requests: candidate.requests, last_used, kv_cache, id: candidate.id }
    }

    /// Sort key that compares ids alone, as `compat: true` does.
    pub(super) fn of_id(candidate: &Candidate<'_>) -> Self {
        Self { requests: 0, last_used: Timestamp(0), kv_cache: 0, id: candidate.id }
    }
}

impl Strategy for Floor {
    fn rank(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, ranking: &mut Ranking) {
        ranking.because("fewest requests, then used the longest ago");
        ranking.push_lowest(candidates.iter().map(|c| (FloorKey::of(c), &c.state.endpoint)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_pool::ledger::Ticket;
    use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
    use attache_scheduling::testing::{NOW, STALE_AFTER, context};
    use attache_types::rng::for_request;
    use std::sync::Arc;

    /// Requests, time of last use and KV cache usage of each endpoint.
    fn order(endpoints: &[(u32, u64, Option<f32>)]) -> Vec<u32> {
        let state = |(id, (waiting, used, kv_usage)): (u32, &(u32, u64, Option<f32>))| {
            let spec = EndpointSpec::at(([10, 0, 0, 1], 8000 + u16::try_from(id).unwrap()).into());
            let endpoint = Arc::new(Endpoint::new(EndpointId(id), spec));
            drop(Ticket::book(endpoint.clone(), 0).used_at(Timestamp(*used)));
            let metrics = kv_usage.map(|kv_usage| {
                let metrics = EndpointMetrics { scraped_at: NOW, waiting: *waiting, kv_usage, ..Default::default() };
                Arc::new(metrics)
            });
            EndpointState::new(endpoint, metrics)
        };
        let pool = PoolSnapshot::new(1, true, (0..).zip(endpoints).map(state).collect());
        let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
        let mut ranking = Ranking::new(endpoints.len());
        Floor.rank(&context(&pool), &candidates, &mut for_request(0, 0), &mut ranking);
        ranking.decide().unwrap().picks.iter().map(|e| e.id.0).collect()
    }

    #[test]
    fn floor_orders_by_requests_then_last_use_then_free_memory() {
        for (name, endpoints, wanted) in [
            ("in_flight ASC", vec![(1, 0, Some(0.0)), (0, 9, Some(0.9))], vec![1, 0]),
            ("last_used ASC", vec![(0, 3, Some(0.0)), (0, 2, Some(0.9)), (0, 1, Some(0.9))], vec![2, 1, 0]),
            ("available_vram DESC", vec![(0, 1, Some(0.5)), (0, 1, Some(0.1)), (0, 1, None)], vec![1, 0, 2]),
            ("full tie: the first", vec![(0, 1, None), (0, 1, None)], vec![0, 1]),
        ] {
            assert_eq!(order(&endpoints), wanted, "{name}");
        }
    }
}
