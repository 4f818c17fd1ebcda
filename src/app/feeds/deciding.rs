//! The strategies that decide for a pool, for its feeds: they hear of lost caches before requests
//! see the pool without them.

use crate::pool::PoolSnapshot;
use crate::prefix::cache::PrefixCache;
use crate::scheduling::{Pool, losses};
use arc_swap::{ArcSwap, ArcSwapOption};
use std::sync::Arc;

/// The pool as requests see it; none before the first configuration is in effect.
pub(crate) type Deciding = Arc<ArcSwapOption<Pool>>;

/// What sees each snapshot before any request does.
pub(super) fn prepare(prefix: Arc<ArcSwap<PrefixCache>>, deciding: Deciding) -> impl Fn(&PoolSnapshot) + Send {
    move |snapshot| {
        let deciding = deciding.load();
        losses::drop_lost(snapshot, &prefix.load(), deciding.as_ref().map(|pool| &pool.scheduler.choices));
    }
}
