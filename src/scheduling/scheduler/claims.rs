//! Probes of half-open prefill and encode servers: a decision claims at most one of each.

use super::Round;
use crate::decision::Decision;
use crate::split;
use attache_pool::Endpoint;
use attache_pool::health::Availability;
use std::sync::Arc;

impl Round<'_> {
    /// Whether this request is the probe of an endpoint that is half open. A dry run would be, and takes no probe.
    pub(super) fn claim_probe(&self, endpoint: &Endpoint) -> bool {
        self.cx.dry_run || endpoint.health.claim_probe(self.cx.now, &self.scheduler.health)
    }

    /// Returns the probes of encode and prefill servers that a dropped decision has claimed.
    pub(super) fn return_probes(&self, decision: &Decision) {
        let unprobed = [
            decision.encode.first().filter(|_| decision.encode_probe),
            decision.split.as_ref().filter(|split| split.probe).and_then(|split| split.prefill.first()),
        ];
        if !self.cx.dry_run {
            unprobed.into_iter().flatten().for_each(|endpoint| endpoint.health.probe_lost());
        }
    }

    /// Drops prefill servers from the front of `picks` that are ejected or whose probe another request has. Returns
    /// true if this request is the probe of the first one left.
    pub(super) fn claim(&self, picks: &mut split::Picks) -> bool {
        while let Some(first) = picks.first() {
            match first.health.availability(self.cx.now, &self.scheduler.health) {
                Availability::Open | Availability::SlowStart(_) => return false,
                Availability::HalfOpen if self.claim_probe(first) => return true,
                Availability::HalfOpen | Availability::Ejected => drop(picks.remove(0)),
            }
        }
        false
    }

    /// Keeps at most one half-open server in `encoders`, and puts it first. Returns true if this request is its probe.
    pub(super) fn claim_one(&self, encoders: &mut Vec<Arc<Endpoint>>) -> bool {
        let mut probed = None;
        encoders.retain(|encoder| {
            let half_open = encoder.health.availability(self.cx.now, &self.scheduler.health) == Availability::HalfOpen;
            if !half_open {
                return true;
            }
            let claimed = probed.is_none() && self.claim_probe(encoder);
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
