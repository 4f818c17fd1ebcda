//! Lost caches: the strategies and the prefix cache of a pool drop their entries before requests see the snapshot.

use arc_swap::{ArcSwap, ArcSwapOption};
use attache_pool::PoolSnapshot;
use attache_prefix::cache::PrefixCache;
use attache_scheduling::{Pool, losses};
use attache_sync::Replica;
use attache_types::clock::Clock;
use std::sync::Arc;

/// The pool as requests see it; none before the first configuration is in effect.
pub(crate) type Deciding = Arc<ArcSwapOption<Pool>>;

/// Announces the lost caches of a pool to other pickers.
pub(crate) struct Announced {
    replica: Arc<Replica>,
    pool: Arc<str>,
    clock: Clock,
}

impl Announced {
    /// `None` without other pickers.
    pub(crate) fn of(replica: Option<&Arc<Replica>>, pool: &Arc<str>, clock: Clock) -> Option<Self> {
        Some(Self { replica: replica?.clone(), pool: pool.clone(), clock })
    }
}

/// What sees each snapshot before any request does.
pub(crate) fn prepare(
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
