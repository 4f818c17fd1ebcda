//! The part of the picker that a reload replaces: the pools as requests see them.

use super::redis::Redis;
use super::{prompts, queues, quotas};
use anyhow::Context;
use attache_config::Settings;
use attache_config::pool::PoolStores;
use attache_config::settings::PoolSettings;
use attache_feeds::{Feeds, PoolFeeds};
use attache_picker::{ActiveConfig, PoolRuntime};
use attache_prompt::memo::SegmentCache;
use attache_scheduling::{Pool, Scheduler};
use attache_scrape::slo_profiles;
use attache_telemetry::Telemetry;
use attache_telemetry::metrics::Metrics;
use attache_types::clock::Clock;
use attache_types::rng;
use std::sync::Arc;

/// Everything that settings need and that may fail, created before any change.
pub(super) struct Prepared {
    schedulers: Vec<Scheduler>,
    redis: Option<Redis>,
}

impl Prepared {
    /// Strategies that the pool of the same name had in `before` are kept, and so is the
    /// connection of `redis` if possible.
    ///
    /// # Errors
    /// If profiles of a new strategy can't be read, or Redis can't be used with these settings.
    pub(super) fn of(
        settings: &Settings,
        before: Option<&ActiveConfig>,
        redis: Option<&Redis>,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let old = |pool: &PoolSettings| before.and_then(|config| config.pool(&pool.name));
        let schedulers = settings.pools.iter().map(|pool| scheduler(pool, old(pool).map(|runtime| &*runtime.pool)));
        Ok(Self { schedulers: schedulers.collect::<anyhow::Result<_>>()?, redis: Redis::of(settings, redis, metrics)? })
    }
}

/// The reloadable part of the picker, and the parts that use Redis from now on. The settings of pools have been
/// checked, so an error here is a bug, and must not end the process.
pub(super) fn config(
    settings: &Settings,
    Prepared { schedulers, redis }: Prepared,
    feeds: &Feeds,
    segments: &Arc<SegmentCache>,
    telemetry: &Arc<Telemetry>,
    clock: Clock,
    before: Option<&ActiveConfig>,
) -> anyhow::Result<(ActiveConfig, Option<Redis>)> {
    let metrics = &telemetry.metrics;
    let seed = settings.server.seed.unwrap_or_else(rng::system_seed);
    let runtime = |(p, scheduler): (&PoolSettings, Scheduler)| {
        let feeds = feeds_of(p, feeds)?;
        let stores =
            PoolStores { endpoints: feeds.store.clone(), rules: feeds.rules.clone(), models: feeds.models.clone() };
        let pool = Arc::new(p.pool(scheduler, stores));
        slo_profiles::follow(&pool.scheduler.choices);
        let prefix = prompts::prefix(p, feeds.prefix(), feeds.remote(), segments, clock).unwrap_or_else(|error| {
            let error = format!("{error:#}");
            tracing::error!(
                pool = %p.name, error,
                "tokenizer failed to load; prompts are compared as text until the next reload"
            );
            prompts::as_text(p, feeds.prefix(), clock)
        });
        let old = before.and_then(|config| config.pool(&p.name));
        let queue = queues::before_pool(p, feeds, old.map(|runtime| &**runtime), metrics, clock, seed)?;
        let observer = Arc::new(metrics.pool(&p.name));
        anyhow::Ok(Arc::new(PoolRuntime { pool, observer, prefix: Some(prefix), queue }))
    };
    let pools = settings.pools.iter().zip(schedulers).map(runtime).collect::<anyhow::Result<Vec<_>>>()?;
    let config = ActiveConfig::new(pools, settings.limits.clone(), settings.exchange.clone());
    let limits = quotas::limits(settings, redis.as_ref(), before, telemetry);
    for (p, pool) in settings.pools.iter().zip(config.router.pools()) {
        feeds_of(p, feeds)?.set_deciding(pool.clone());
    }
    // Nothing can fail from here on, so kept strategies may switch to the new profiles.
    if let Some(redis) = &redis {
        config.router.pools().iter().for_each(|pool| redis.share_profiles(&pool.scheduler.choices));
    }
    Ok((config.with_quotas(limits), redis))
}

fn feeds_of<'a>(settings: &PoolSettings, feeds: &'a Feeds) -> anyhow::Result<&'a PoolFeeds> {
    feeds.pool(&settings.name).with_context(|| format!("pool `{}` has no feeds", settings.name))
}

/// The scheduler of a pool, with strategies of `before` that are unchanged.
///
/// # Errors
/// If profiles of a new strategy can't be read.
pub(super) fn scheduler(settings: &PoolSettings, before: Option<&Pool>) -> anyhow::Result<Scheduler> {
    let previous = before.map(|pool| &pool.scheduler.choices);
    let scheduler = settings.scheduler(previous)?;
    let filled = slo_profiles::fill(&scheduler.choices).with_context(|| format!("pool `{}`", settings.name));
    match filled {
        // A found pool's own configuration may be invalid for a time, which must not affect other pools.
        Err(error) if settings.kubernetes.as_ref().is_some_and(|source| source.found) => {
            tracing::error!(
                pool = %settings.name, error = format!("{error:#}"),
                "SLO profiles can't be read; the pool has none"
            );
        }
        other => other?,
    }
    Ok(scheduler)
}
