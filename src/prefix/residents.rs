//! Which KV caches stand behind which endpoint, as engines' own events tell: what requests look up.

use super::by_endpoint::ByEndpoint;
use super::index::HolderId;
use super::trust::{Trust, TrustCell};
use ahash::AHashSet;
use arc_swap::{ArcSwap, Guard};
use smallvec::SmallVec;
use std::sync::Arc;

/// One KV cache of an endpoint.
#[derive(Clone, Debug)]
pub struct Cache {
    /// Its number in the index.
    pub holder: HolderId,
    /// Whether what the index says of it may be believed.
    pub trust: Arc<TrustCell>,
}

/// The KV caches of one endpoint, one for each data-parallel rank in order.
#[derive(Clone, Debug, Default)]
pub struct Resident {
    /// The caches.
    pub caches: SmallVec<[Cache; 1]>,
}

impl Resident {
    /// Whether all of the endpoint's caches are known exactly.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        !self.caches.is_empty() && self.caches.iter().all(|c| c.trust.get() == Trust::Exact)
    }

    /// Whether what is known of all of the endpoint's caches is held.
    #[must_use]
    pub fn is_certain(&self) -> bool {
        !self.caches.is_empty() && self.caches.iter().all(|c| c.trust.get().is_certain())
    }

    /// The first state that is not exact, or exact.
    #[must_use]
    pub fn trust(&self) -> Trust {
        let mut states = self.caches.iter().map(|c| c.trust.get());
        states.find(|t| *t != Trust::Exact).unwrap_or(if self.caches.is_empty() {
            Trust::Unknown
        } else {
            Trust::Exact
        })
    }
}

/// The endpoints of a pool with their caches: one writer, any number of readers, none of whom waits.
#[derive(Debug, Default)]
pub struct Residents {
    table: ArcSwap<Table>,
    adapters: ArcSwap<AHashSet<Box<str>>>,
}

/// The endpoints of one moment.
pub type Table = ByEndpoint<Resident>;

impl Residents {
    /// The endpoints of now, for the length of one decision.
    pub fn load(&self) -> Guard<Arc<Table>> {
        self.table.load()
    }

    /// Replaces the endpoints.
    pub fn publish(&self, residents: Table) {
        self.table.store(Arc::new(residents));
    }

    /// An engine has told of blocks under this LoRA adapter.
    pub fn learn_adapter(&self, name: &str) {
        if !self.is_adapter(name) {
            self.adapters.rcu(|known| {
                let mut next = AHashSet::clone(known);
                next.insert(name.into());
                next
            });
        }
    }

    /// Whether an engine has told of blocks under a LoRA adapter of this name.
    #[must_use]
    pub fn is_adapter(&self, name: &str) -> bool {
        self.adapters.load().contains(name)
    }
}
