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
use crate::scheduling::{Pool, Router};
use crate::scrape::slo_profiles;
use crate::telemetry::metrics::Metrics;
use anyhow::Context;
use std::sync::Arc;

/// The reloadable part of the picker. Strategies that a pool of the same name had `before` stay. The pools' strategies have been checked with the settings, so an error here is a bug that must not take
/// the process down.
pub(super) fn live(
    settings: &Settings,
    feeds: &Feeds,
    segments: &Arc<SegmentCache>,
    metrics: &Arc<Metrics>,
    clock: Clock,
    before: Option<&Live>,
    redis: Option<&Redis>,
) -> anyhow::Result<Live> {
    let nothing = Router::default();
    let router = before.map_or(&nothing, |live| &live.router);
    let pool = |p: &PoolSettings| {
        let feeds = feeds_of(p, feeds)?;
        let pool = pool(p, feeds.store.clone(), (feeds.rules.clone(), feeds.models.clone()), router)?;
        slo_profiles::follow(&pool.scheduler.choices);
        anyhow::Ok(pool)
    };
    let pools = settings.pools.iter().map(pool).collect::<anyhow::Result<Vec<_>>>()?;
    let prefix = |p: &PoolSettings| {
        let feeds = feeds_of(p, feeds)?;
        let prefix = prompts::prefix(p, feeds.prefix(), feeds.remote(), segments, clock);
        anyhow::Ok(prefix.unwrap_or_else(|error| {
            let error = format!("{error:#}");
            tracing::error!(pool = %p.name, error, "the tokenizer can't be used; prompts are compared as text until a reload");
            prompts::as_text(p, feeds.prefix(), clock)
        }))
    };
    let prefix = settings.pools.iter().map(prefix).collect::<anyhow::Result<Vec<_>>>()?;
    let live = Live::new(Router::new(pools), settings.limits.clone(), settings.exchange.clone(), metrics);
    let seed = settings.server.seed.unwrap_or_else(rng::system_seed);
    let queues = |p: &PoolSettings| queues::before_pool(p, feeds_of(p, feeds)?, before, metrics, clock, seed);
    let queues = settings.pools.iter().map(queues).collect::<anyhow::Result<Vec<_>>>()?;
    let limits = quotas::limits(settings, redis, before, metrics);
    // When nothing can fail any more: strategies that stay read what is new from here on.
    if let Some(redis) = redis {
        live.router.pools().iter().for_each(|pool| redis.share_profiles(&pool.scheduler.choices));
    }
    Ok(live.with_prefix(prefix).with_queues(queues).with_quotas(limits))
}

fn feeds_of<'a>(settings: &PoolSettings, feeds: &'a Feeds) -> anyhow::Result<&'a PoolFeeds> {
    feeds.pool(&settings.name).with_context(|| format!("pool `{}` has no feeds", settings.name))
}

pub(super) fn pool(
    settings: &PoolSettings,
    store: Arc<SnapshotStore>,
    (rules, models): (Arc<RuleStore>, Arc<ModelStore>),
    before: &Router,
) -> anyhow::Result<Arc<Pool>> {
    let previous = before.pools().iter().find(|p| p.name == settings.name).map(|p| &p.scheduler.choices);
    let scheduler = settings.scheduler(previous)?;
    let filled = slo_profiles::fill(&scheduler.choices).with_context(|| format!("pool `{}`", settings.name));
    match filled {
        // One of many: its own configuration may come and go, and is no reason for the others to stay away.
        Err(error) if settings.kubernetes.as_ref().is_some_and(|source| source.found) => {
            tracing::error!(pool = %settings.name, error = format!("{error:#}"), "SLO profiles can't be read; the pool goes without");
        }
        other => other?,
    }
    Ok(Arc::new(Pool {
        name: settings.name.clone(),
        matches: settings.matches.clone(),
        store,
        scheduler,
        rewrites: settings.rewrites.clone(),
        reject_unknown_models: settings.reject_unknown_models,
        rules,
        deadline_admission: settings.deadline_admission,
        models,
        stale_after: settings.scrape.stale_after,
        destination: settings.destination,
        disagg: settings.disaggregation.as_ref().map(|d| Arc::new(d.mode.clone())),
    }))
}
