//! The queues before pools, kept over reloads that do not change them.

use super::feeds::PoolFeeds;
use crate::clock::Clock;
use crate::config::settings::PoolSettings;
use crate::ext_proc::picker::Live;
use crate::ext_proc::queues::Queues;
use crate::rng;
use crate::telemetry::metrics::Metrics;
use anyhow::Context;
use std::sync::Arc;

/// The queues that `settings` ask for: those of `before` where nothing has changed. Whoever waits is told of every new snapshot of the pool.
pub(super) fn before_pool(
    settings: &PoolSettings,
    feeds: &PoolFeeds,
    before: Option<&Live>,
    metrics: &Metrics,
    clock: Clock,
    seed: u64,
) -> anyhow::Result<Option<Arc<Queues>>> {
    let Some(flow) = &settings.flow else { return Ok(None) };
    let stale_after = settings.scrape.stale_after;
    let old = before.and_then(|live| {
        let position = live.router.pools().iter().position(|pool| pool.name == settings.name)?;
        live.queues(position).cloned()
    });
    if let Some(old) = old.filter(|old| old.are(flow, &feeds.store, stale_after)) {
        return Ok(Some(old));
    }
    let metrics = metrics.queues(&settings.name);
    let queues = Queues::new(flow.clone(), feeds.store.clone(), stale_after, metrics, rng::for_request(seed, 0))
        .with_context(|| format!("pool `{}`: `flowControl.ceiling`", settings.name))?;
    let (follower, mut published) = (Arc::downgrade(&queues), feeds.published());
    tokio::spawn(async move {
        while published.changed().await.is_ok() {
            // Gone with the last stream that began before a reload.
            let Some(queues) = follower.upgrade() else { return };
            queues.freed(clock.now());
        }
    });
    Ok(Some(queues))
}
