//! What happens when a pool loses a replica, or a replica its cache.
//!
//! The pool's writer names the endpoints in [`PoolSnapshot::lost`]: those that discovery no longer names, those whose
//! address belongs to another pod now, and those whose model server has restarted or cleared its cache. Every store of
//! what servers hold drops their entries here, in the publication of the snapshot, so that no decision on that snapshot
//! sees them. Called by the publisher and by replays. Pure.

use super::Choices;
use attache_pool::PoolSnapshot;
use attache_prefix::cache::PrefixCache;

/// Brings the pool's prefix cache and the strategies of `choices` in line with `snapshot`, before a decision sees it.
pub fn take_in(snapshot: &PoolSnapshot, cache: &PrefixCache, choices: Option<&Choices>) {
    cache.reconcile(snapshot);
    if let Some(choices) = choices {
        choices.forget(&snapshot.lost);
    }
}
