//! The recording of a run, if one is requested.

use crate::config::Settings;
use crate::config::settings::PoolSettings;
use crate::record::{RecordSettings, Recorder};
use prometheus_client::registry::Registry;
use std::sync::Arc;

/// Why decisions by these settings can't be recorded; `None` if they can.
pub(super) fn unrecordable(settings: &Settings) -> Option<&'static str> {
    let any = |has: fn(&PoolSettings) -> bool| settings.pools.iter().any(has);
    if any(|pool| pool.prefix.kv_events.is_some()) {
        return Some("a pool has `prefixCache.kvEvents`, and recordings hold no KV events");
    }
    if any(PoolSettings::reads_redis) {
        return Some("a strategy has `profilesFromRedis`, and recordings hold nothing from Redis");
    }
    any(|pool| asks_for_split(pool, pool.strategies()))
        .then_some("a pool splits requests (`disaggregation`, `pd`), and recordings hold no prefill requests")
}

/// Whether requests of `strategies` may be split.
fn asks_for_split<'s>(
    pool: &PoolSettings,
    mut strategies: impl Iterator<Item = (&'s str, &'s serde_json::Value)>,
) -> bool {
    pool.disaggregation.as_ref().is_some_and(|d| strategies.any(|(name, _)| d.split.asks(name)))
}

/// Opens the recording, if one is requested.
pub(super) fn recorder(
    record: Option<RecordSettings>,
    settings: &Settings,
    seed: u64,
    registry: &mut Registry,
) -> anyhow::Result<Option<Arc<Recorder>>> {
    let Some(record) = record else { return Ok(None) };
    if let Some(why) = unrecordable(settings) {
        anyhow::bail!("--record can't be had here: {why}");
    }
    for pool in settings.pools.iter().filter(|pool| asks_for_split(pool, pool.allowed_strategies())) {
        tracing::warn!(
            pool = %pool.name,
            "requests may name the strategy `pd`; what prefill servers do for them is not recorded \
             (`requestStrategy.allow` of the pool says what they may name)"
        );
    }
    let recorder = Recorder::start(record, seed, settings.to_json())?;
    recorder.register(registry);
    Ok(Some(recorder))
}
