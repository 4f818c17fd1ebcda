//! The recording of a run, if one is requested.

use crate::config::Settings;
use crate::config::settings::PoolSettings;
use crate::record::{RecordSettings, Recorder};
use prometheus_client::registry::Registry;
use std::sync::Arc;

/// Why decisions by these settings can't be recorded; `None` if they can.
pub(super) fn unrecordable(settings: &Settings) -> Option<&'static str> {
    let reads_redis = settings.pools.iter().any(PoolSettings::reads_redis);
    reads_redis.then_some("a strategy has `profilesFromRedis`, and recordings hold nothing from Redis")
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
    let recorder = Recorder::start(record, seed, settings.to_json())?;
    recorder.register(registry);
    Ok(Some(recorder))
}
