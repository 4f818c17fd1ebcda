//! The queues of pools, which are kept over reloads that do not change them.

use anyhow::Context;
use attache_config::settings::PoolSettings;
use attache_ext_proc::queue_timer::QueueTimer;
use attache_feeds::PoolFeeds;
use attache_picker::PoolRuntime;
use attache_picker::queues::Queues;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::queues::BandDepths;
use attache_types::clock::Clock;
use attache_types::rng;
use std::sync::Arc;

/// The queues for `settings`: those of `before` if nothing has changed.
pub(super) fn before_pool(
    settings: &PoolSettings,
    feeds: &PoolFeeds,
    before: Option<&PoolRuntime>,
    metrics: &Metrics,
    clock: Clock,
    seed: u64,
) -> anyhow::Result<Option<Arc<Queues>>> {
    let Some(flow) = &settings.flow else { return Ok(None) };
    let stale_after = settings.scrape.stale_after;
    let split = settings.disaggregation.as_ref().map(|disaggregation| &disaggregation.split);
    let old = before.and_then(|runtime| runtime.queue.clone());
    if let Some(old) = old.as_ref().filter(|old| old.matches(flow, &feeds.store, &settings.health, split, stale_after))
    {
        return Ok(Some(old.clone()));
    }
    let observer = Box::new(metrics.queues(&settings.name));
    let (flow, store, health, split) = (flow.clone(), feeds.store.clone(), settings.health.clone(), split.cloned());
    let (timer, rng) = (QueueTimer::default(), rng::for_request(seed, 0));
    let queues = Queues::new(flow, store, health, split, stale_after, observer, rng, timer.waker())
        .with_context(|| format!("pool `{}`: `flowControl.ceiling`", settings.name))?;
    old.iter().for_each(|old| queues.replace(old));
    if queues.hold_requests() {
        tokio::spawn(timer.follow(Arc::downgrade(&queues), feeds.published(), clock));
    }
    Ok(Some(queues))
}

/// Reads the bands of the queue of a pool.
pub(super) fn band_depths(runtime: &PoolRuntime) -> BandDepths {
    let queue = runtime.queue.clone();
    BandDepths::new(move || queue.as_ref().map(|queue| queue.band_depths()).unwrap_or_default())
}
