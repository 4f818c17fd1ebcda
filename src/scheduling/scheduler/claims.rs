//! Probes of half-open prefill and encode servers: a decision claims at most one of each.

use super::Scheduler;
use crate::plugin::PickContext;
use crate::split;
use attache_pool::Endpoint;
use attache_pool::health::Availability;
use std::sync::Arc;

impl Scheduler {
    /// Drops prefill servers from the front of `picks` that are ejected or whose probe another request has. Returns
    /// true if this request is the probe of the first one left.
    pub(super) fn claim(&self, cx: &PickContext<'_>, picks: &mut split::Picks) -> bool {
        while let Some(first) = picks.first() {
            match first.health.availability(cx.now, &self.health) {
                Availability::Open | Availability::SlowStart(_) => return false,
                Availability::HalfOpen if self.claim_probe(cx, first) => return true,
                Availability::HalfOpen | Availability::Ejected => drop(picks.remove(0)),
            }
        }
        false
    }

    /// Keeps at most one half-open server in `encoders`, and puts it first. Returns true if this request is its probe.
    pub(super) fn claim_one(&self, cx: &PickContext<'_>, encoders: &mut Vec<Arc<Endpoint>>) -> bool {
        let mut probed = None;
        encoders.retain(|encoder| {
            let half_open = encoder.health.availability(cx.now, &self.health) == Availability::HalfOpen;
            if !half_open {
                return true;
            }
            let claimed = probed.is_none() && self.claim_probe(cx, encoder);
            if claimed {
                probed = Some(encoder.id);
            }
            claimed
        });
        if let Some(at) = encoders.iter().position(|encoder| Some(encoder.id) == probed) {
            encoders.swap(0, at);
        }
        probed.is_some()
    }
}
