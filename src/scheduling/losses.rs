//! Handles endpoints that left a pool or lost their cache.
//!
//! The pool's writer lists them in [`PoolSnapshot::lost`]:
//! - endpoints that discovery no longer reports
//! - endpoints whose address now belongs to another pod
//! - endpoints whose model server restarted or cleared its cache
//!
//! All records of their caches are dropped here, when the snapshot is published, so no decision on that snapshot uses
//! them. Called by the publisher and by replays. Pure.

use super::Choices;
use attache_pool::PoolSnapshot;
use attache_prefix::cache::PrefixCache;

/// Drops the records of lost endpoints from the prefix cache and the strategies of `choices`, before a decision uses
/// `snapshot`.
pub fn drop_lost(snapshot: &PoolSnapshot, cache: &PrefixCache, choices: Option<&Choices>) {
    cache.reconcile(snapshot);
    if let Some(choices) = choices {
        choices.forget(&snapshot.lost);
    }
}
