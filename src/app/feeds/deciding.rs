//! The strategies that decide for a pool, for its feeds: they hear of lost caches before requests
//! see the pool without them.

use crate::clock::Clock;
use crate::pool::PoolSnapshot;
use crate::prefix::cache::PrefixCache;
use crate::scheduling::{Pool, losses};
use arc_swap::{ArcSwap, ArcSwapOption};
use attache_sync::Replica;
use std::sync::Arc;

/// The pool as requests see it; none before the first configuration is in effect.
pub(crate) type Deciding = Arc<ArcSwapOption<Pool>>;

/// Announces the lost caches of a pool to other pickers.
pub(super) struct Announced {
    replica: Arc<Replica>,
    pool: Arc<str>,
    clock: Clock,
}

impl Announced {
    /// `None` without other pickers.
    pub(super) fn of(replica: Option<&Arc<Replica>>, pool: &Arc<str>, clock: Clock) -> Option<Self> {
        Some(Self { replica: replica?.clone(), pool: pool.clone(), clock })
    }
}

/// What sees each snapshot before any request does.
pub(super) fn prepare(
    prefix: Arc<ArcSwap<PrefixCache>>,
    deciding: Deciding,
    announced: Option<Announced>,
) -> impl Fn(&PoolSnapshot) + Send {
    move |snapshot| {
        if let Some(Announced { replica, pool, clock }) = &announced {
            replica.announce_losses(pool, &snapshot.lost, clock.now());
        }
        let deciding = deciding.load();
        losses::drop_lost(snapshot, &prefix.load(), deciding.as_ref().map(|pool| &pool.scheduler.choices));
    }
}
