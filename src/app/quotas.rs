//! What tenants may have, and where it is counted: what they have had is kept over reloads.

use crate::clock::Clock;
use crate::config::settings::TenantSettings;
use crate::ext_proc::picker::Live;
use crate::ext_proc::quotas::{Quotas, Store};
use crate::quota::{Book, DEFAULT_MAX_TENANTS};
use crate::telemetry::metrics::Metrics;
use std::sync::Arc;

/// The limits that `settings` ask for, counted where those of `before` were unless that changes.
pub(super) fn limits(
    settings: Option<&TenantSettings>,
    before: Option<&Live>,
    metrics: &Arc<Metrics>,
    clock: Clock,
) -> anyhow::Result<Option<Arc<Quotas>>> {
    let Some(settings) = settings else { return Ok(None) };
    let old = before.and_then(Live::quotas).map(|quotas| quotas.store());
    let store = store(settings, old, metrics)?;
    Ok(Some(Quotas::new(settings.clone(), store, metrics.clone(), clock)))
}

#[cfg(feature = "redis")]
fn store(settings: &TenantSettings, old: Option<&Store>, metrics: &Arc<Metrics>) -> anyhow::Result<Store> {
    use crate::ext_proc::quotas::Shared;
    use crate::quota_store::RedisStore;
    use crate::rng;
    use anyhow::Context;

    let Some(wanted) = &settings.redis else { return Ok(in_memory(old)) };
    let redis = match old {
        Some(Store::Redis(old)) if old.redis.is_at(&wanted.url) => old.redis.clone(),
        _ => {
            let connected = metrics.store_connected.clone();
            let count = move |one_more: bool| {
                if one_more {
                    connected.inc()
                } else {
                    connected.dec()
                };
            };
            RedisStore::start(&wanted.url, rng::system_seed(), count)
                .context("`limits.tenants.redis.url` can't be used")?
        }
    };
    Ok(Store::Redis(Arc::new(Shared { redis, timeout: wanted.timeout, on_failure: wanted.on_failure })))
}

#[cfg(not(feature = "redis"))]
fn store(settings: &TenantSettings, old: Option<&Store>, _: &Arc<Metrics>) -> anyhow::Result<Store> {
    anyhow::ensure!(settings.redis.is_none(), "this build can't ask Redis (feature `redis`)");
    Ok(in_memory(old))
}

fn in_memory(old: Option<&Store>) -> Store {
    match old {
        Some(Store::Memory(book)) => Store::Memory(book.clone()),
        _ => Store::Memory(Arc::new(Book::new(DEFAULT_MAX_TENANTS))),
    }
}
