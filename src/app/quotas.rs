//! What tenants may have, and where it is counted: what they have had is kept over reloads.

use super::redis::Redis;
use crate::clock::Clock;
use crate::config::Settings;
use crate::config::settings::CountIn;
use crate::ext_proc::picker::Live;
use crate::ext_proc::quotas::{Quotas, Store};
use crate::quota::{Book, DEFAULT_MAX_TENANTS};
use crate::telemetry::metrics::Metrics;
use std::sync::Arc;

/// The limits that `settings` ask for, counted where those of `before` were unless that changes.
pub(super) fn limits(
    settings: &Settings,
    redis: Option<&Redis>,
    before: Option<&Live>,
    metrics: &Arc<Metrics>,
    clock: Clock,
) -> Option<Arc<Quotas>> {
    let tenants = settings.tenants.as_ref()?;
    let store = match (tenants.store, redis) {
        #[cfg(feature = "redis")]
        (CountIn::Redis, Some(redis)) => redis.store(),
        // A store in Redis has one, by the checks of the settings.
        (CountIn::Memory | CountIn::Redis, _) => in_memory(before.and_then(Live::quotas).map(|quotas| quotas.store())),
    };
    let quotas = Quotas::new(tenants.clone(), store, metrics.clone(), clock);
    #[cfg(feature = "redis")]
    let quotas = match redis.and_then(|redis| redis.shared(settings)) {
        Some(shared) => quotas.sharing(shared),
        None => quotas,
    };
    Some(Arc::new(quotas))
}

fn in_memory(old: Option<&Store>) -> Store {
    match old {
        Some(Store::Memory(book)) => Store::Memory(book.clone()),
        _ => Store::Memory(Arc::new(Book::new(DEFAULT_MAX_TENANTS))),
    }
}
