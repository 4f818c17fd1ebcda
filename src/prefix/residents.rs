//! The KV caches of each endpoint whose engine publishes KV events. Lookups read this table.

use super::adapters::Adapters;
use super::by_endpoint::ByEndpoint;
use super::index::HolderId;
use super::trust::{Doubt, Trust, TrustCell};
use arc_swap::{ArcSwap, Guard};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::sync::Arc;

/// One KV cache of an endpoint.
#[derive(Clone, Debug)]
pub struct Cache {
    /// The cache's number in the index.
    pub holder: HolderId,
    /// Whether the index's entries for this cache can be trusted.
    pub trust: Arc<TrustCell>,
}

/// The KV caches of one endpoint, one for each data-parallel rank in order.
#[derive(Clone, Debug, Default)]
pub struct Resident {
    /// The caches, in the order of ranks.
    pub caches: SmallVec<[Cache; 1]>,
    /// The reason for which the events of the endpoint are not read; it has no caches then.
    pub refused: Option<Doubt>,
}

impl Resident {
    /// Whether the index knows exactly what all caches of the endpoint hold.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        !self.caches.is_empty() && self.caches.iter().all(|c| c.trust.get() == Trust::Exact)
    }

    /// Whether everything that the index has of the endpoint's caches is really there.
    #[must_use]
    pub fn is_certain(&self) -> bool {
        !self.caches.is_empty() && self.caches.iter().all(|c| c.trust.get().is_certain())
    }

    /// Whether the index has everything that the caches of the endpoint hold.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        !self.caches.is_empty() && self.caches.iter().all(|c| c.trust.get().is_complete())
    }

    /// Returns the number of messages with events of all caches.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.caches.iter().map(|cache| cache.trust.frames()).sum()
    }

    /// Returns the worst state of the caches: the first one of those with the least use of events that is not exact.
    #[must_use]
    pub fn trust(&self) -> Trust {
        let states = self.caches.iter().map(|cache| cache.trust.get());
        let worst = states.min_by_key(|trust| Reverse((trust.event_use(), *trust != Trust::Exact)));
        worst.unwrap_or_else(|| self.refused.map_or(Trust::Unknown, Trust::Suspect))
    }
}

/// The endpoints of a pool with their caches: one writer, any number of readers that never block.
#[derive(Debug, Default)]
pub struct Residents {
    table: ArcSwap<ResidentTable>,
    adapters: Adapters,
}

/// The endpoints at one moment.
pub type ResidentTable = ByEndpoint<Resident>;

impl Residents {
    /// Returns the current endpoints, for the duration of one decision.
    pub fn load(&self) -> Guard<Arc<ResidentTable>> {
        self.table.load()
    }

    /// Replaces all endpoints at once.
    pub fn publish(&self, residents: ResidentTable) {
        self.table.store(Arc::new(residents));
    }

    /// The names of LoRA adapters that servers report.
    #[must_use]
    pub fn adapters(&self) -> &Adapters {
        &self.adapters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_of_an_endpoint_is_the_worst_of_its_ranks() {
        let of = |states: &[Trust]| {
            let cell = |trust: &Trust| {
                let cell = TrustCell::default();
                cell.set(*trust);
                Cache { holder: HolderId(0), trust: Arc::new(cell) }
            };
            Resident { caches: states.iter().map(cell).collect(), refused: None }.trust()
        };
        let gap = Trust::Suspect(Doubt::Gap);
        assert_eq!(of(&[]), Trust::Unknown);
        assert_eq!(of(&[Trust::Exact, Trust::Exact]), Trust::Exact);
        assert_eq!(of(&[Trust::Exact, Trust::Uncounted]), Trust::Uncounted);
        assert_eq!(of(&[Trust::Uncounted, gap, Trust::Incomplete]), gap);
        assert_eq!(
            Resident { refused: Some(Doubt::Ports), ..Resident::default() }.trust(),
            Trust::Suspect(Doubt::Ports)
        );
    }
}
