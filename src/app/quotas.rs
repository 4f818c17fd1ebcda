//! Rate limits of tenants and models, and where usage is counted. The counts are kept over reloads.

use super::redis::Redis;
use attache_config::Settings;
use attache_config::settings::{CountIn, TenantSettings};
use attache_picker::ActiveConfig;
use attache_picker::quotas::{Quotas, Store};
use attache_quota::{Book, DEFAULT_MAX_TENANTS, Subject};
use attache_telemetry::Telemetry;
use attache_types::clock;
use std::sync::Arc;

/// The limits in `settings`, with the counts of `before` unless their store changes.
pub(super) fn limits(
    settings: &Settings,
    redis: Option<&Redis>,
    before: Option<&ActiveConfig>,
    telemetry: &Arc<Telemetry>,
) -> Vec<Arc<Quotas>> {
    let wanted = [(Subject::Tenant, &settings.tenants), (Subject::Model, &settings.models)];
    let quotas = |(subject, limits): (Subject, &Option<TenantSettings>)| {
        let limits = limits.as_ref()?;
        let old = before.and_then(|config| config.quotas.iter().find(|quotas| quotas.subject() == subject));
        let store = match (limits.store, redis) {
            (CountIn::Redis, Some(_)) => Store::Shared,
            // The checks of the settings ensure that a store in Redis has a connection.
            (CountIn::Memory | CountIn::Redis, _) => in_memory(old.map(|quotas| quotas.store())),
        };
        let quotas = Quotas::new(subject, limits.clone(), store, telemetry.clone(), clock::wall_now);
        let quotas = match redis.and_then(|redis| redis.shared(subject, settings, &telemetry.metrics)) {
            Some(shared) => quotas.sharing(shared),
            None => quotas,
        };
        Some(Arc::new(quotas))
    };
    wanted.into_iter().filter_map(quotas).collect()
}

fn in_memory(old: Option<&Store>) -> Store {
    match old {
        Some(Store::Memory(book)) => Store::Memory(book.clone()),
        _ => Store::Memory(Arc::new(Book::new(DEFAULT_MAX_TENANTS))),
    }
}
