//! The part of the picker that a reload replaces: the pools as requests see them.

use super::feeds::{Feeds, PoolFeeds};
use super::redis::Redis;
use super::{prompts, queues, quotas};
use crate::clock::Clock;
use crate::config::Settings;
use crate::config::settings::PoolSettings;
use crate::ext_proc::Live;
use crate::pool::{ModelStore, SnapshotStore};
use crate::prompt::memo::SegmentCache;
use crate::rng;
use crate::scheduling::router::RuleStore;
use crate::scheduling::{Pool, Router, Scheduler};
use crate::scrape::slo_profiles;
use crate::telemetry::Telemetry;
use crate::telemetry::metrics::Metrics;
use anyhow::Context;
use std::sync::Arc;

/// What settings ask for and might not get, had before anything is changed that is served.
pub(super) struct Prepared {
    schedulers: Vec<Scheduler>,
    redis: Option<Redis>,
}

impl Prepared {
    /// Strategies that a pool of the same name had `before` stay, and so does the connection of `redis` where it may.
    ///
    /// # Errors
    /// When profiles can't be read that a new strategy decides by, or Redis can't be asked by these settings.
    pub(super) fn of(
        settings: &Settings,
        before: Option<&Live>,
        redis: Option<&Redis>,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let nothing = Router::default();
        let router = before.map_or(&nothing, |live| &live.router);
        let schedulers = settings.pools.iter().map(|pool| scheduler(pool, router));
        Ok(Self { schedulers: schedulers.collect::<anyhow::Result<_>>()?, redis: Redis::of(settings, redis, metrics)? })
    }
}

/// The reloadable part of the picker, and what asks Redis from now on. The pools' settings have been checked, so an error here is a bug that must not take
/// the process down.
pub(super) fn live(
    settings: &Settings,
    Prepared { schedulers, redis }: Prepared,
    feeds: &Feeds,
    segments: &Arc<SegmentCache>,
    telemetry: &Arc<Telemetry>,
    clock: Clock,
    before: Option<&Live>,
) -> anyhow::Result<(Live, Option<Redis>)> {
    let pool = |(p, scheduler): (&PoolSettings, Scheduler)| {
        let feeds = feeds_of(p, feeds)?;
        let pool = pool(p, scheduler, feeds.store.clone(), (feeds.rules.clone(), feeds.models.clone()));
        slo_profiles::follow(&pool.scheduler.choices);
        anyhow::Ok(pool)
    };
    let pools = settings.pools.iter().zip(schedulers).map(pool).collect::<anyhow::Result<Vec<_>>>()?;
    let prefix = |p: &PoolSettings| {
        let feeds = feeds_of(p, feeds)?;
        let prefix = prompts::prefix(p, feeds.prefix(), feeds.remote(), segments, clock);
        anyhow::Ok(prefix.unwrap_or_else(|error| {
            let error = format!("{error:#}");
            tracing::error!(pool = %p.name, error, "tokenizer failed to load; prompts are compared as text until the next reload");
            prompts::as_text(p, feeds.prefix(), clock)
        }))
    };
    let prefix = settings.pools.iter().map(prefix).collect::<anyhow::Result<Vec<_>>>()?;
    let live = Live::new(Router::new(pools), settings.limits.clone(), settings.exchange.clone(), &telemetry.metrics);
    let seed = settings.server.seed.unwrap_or_else(rng::system_seed);
    let queues =
        |p: &PoolSettings| queues::before_pool(p, feeds_of(p, feeds)?, before, &telemetry.metrics, clock, seed);
    let queues = settings.pools.iter().map(queues).collect::<anyhow::Result<Vec<_>>>()?;
    let limits = quotas::limits(settings, redis.as_ref(), before, telemetry);
    for (p, pool) in settings.pools.iter().zip(live.router.pools()) {
        feeds_of(p, feeds)?.deciding.store(Some(pool.clone()));
    }
    // When nothing can fail any more: strategies that stay read what is new from here on.
    if let Some(redis) = &redis {
        live.router.pools().iter().for_each(|pool| redis.share_profiles(&pool.scheduler.choices));
    }
    Ok((live.with_prefix(prefix).with_queues(queues).with_quotas(limits), redis))
}

fn feeds_of<'a>(settings: &PoolSettings, feeds: &'a Feeds) -> anyhow::Result<&'a PoolFeeds> {
    feeds.pool(&settings.name).with_context(|| format!("pool `{}` has no feeds", settings.name))
}

/// What decides for a pool, by the strategies that it had `before` where they stay.
///
/// # Errors
/// When profiles can't be read that a new strategy decides by.
pub(super) fn scheduler(settings: &PoolSettings, before: &Router) -> anyhow::Result<Scheduler> {
    let previous = before.pools().iter().find(|p| p.name == settings.name).map(|p| &p.scheduler.choices);
    let scheduler = settings.scheduler(previous)?;
    let filled = slo_profiles::fill(&scheduler.choices).with_context(|| format!("pool `{}`", settings.name));
    match filled {
        // One of many: its own configuration may come and go, and is no reason for the others to stay away.
        Err(error) if settings.kubernetes.as_ref().is_some_and(|source| source.found) => {
            tracing::error!(pool = %settings.name, error = format!("{error:#}"), "SLO profiles can't be read; the pool has none");
        }
        other => other?,
    }
    Ok(scheduler)
}

pub(super) fn pool(
    settings: &PoolSettings,
    scheduler: Scheduler,
    store: Arc<SnapshotStore>,
    (rules, models): (Arc<RuleStore>, Arc<ModelStore>),
) -> Arc<Pool> {
    Arc::new(Pool {
        name: settings.name.clone(),
        matches: settings.matches.clone(),
        store,
        scheduler,
        rewrites: settings.rewrites.clone(),
        reject_unknown_models: settings.reject_unknown_models,
        default_model: settings.default_model.clone(),
        rules,
        deadline_admission: settings.deadline_admission,
        models,
        stale_after: settings.scrape.stale_after,
        destination: settings.destination,
        disagg: settings.disaggregation.as_ref().map(|d| Arc::new(d.mode.clone())),
    })
}
