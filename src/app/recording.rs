//! The recording of a run, if one is requested, and explanations from it.

use crate::config::Settings;
use crate::config::settings::PoolSettings;
use crate::record::{RecordSettings, Recorder};
use axum::http::StatusCode;
use prometheus_client::registry::Registry;
use serde_json::Value;
use std::path::Path;
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

/// Explains the recorded decision about the request with this number or `x-request-id`: replays the recording up to it.
///
/// # Errors
/// The status and text of the response: nothing is recorded, there is no such request, or the recording can't be read.
pub(super) async fn explain(recorder: Option<Arc<Recorder>>, id: String) -> Result<Value, (StatusCode, String)> {
    let Some(recorder) = recorder else {
        return Err((
            StatusCode::NOT_FOUND,
            "decisions are not recorded; `attache run --record FILE` records them".into(),
        ));
    };
    let explained = tokio::task::spawn_blocking(move || {
        recorder.flush();
        explain_in(recorder.path(), &id)
    });
    explained.await.unwrap_or_else(|error| Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())))
}

#[cfg(feature = "simulator")]
fn explain_in(recording: &Path, id: &str) -> Result<Value, (StatusCode, String)> {
    let unreadable = |error: &dyn std::fmt::Display| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    match crate::replay::record::explain::explain(recording, Some(id), None, &crate::plugins::registry()) {
        Ok(Some(explained)) => serde_json::to_value(explained).map_err(|error| unreadable(&error)),
        Ok(None) => Err((StatusCode::NOT_FOUND, format!("the recording has no decision about the request `{id}`"))),
        Err(error) => Err(unreadable(&error)),
    }
}

#[cfg(not(feature = "simulator"))]
fn explain_in(_: &Path, _: &str) -> Result<Value, (StatusCode, String)> {
    Err((StatusCode::NOT_IMPLEMENTED, "this build has no replay (Cargo feature `simulator`)".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, ConfigText, Sources};

    fn settings(text: &[u8]) -> Settings {
        let text = ConfigText { name: "test".into(), bytes: text.to_vec() };
        let registry = crate::plugins::registry();
        config::load(&Sources { registry, text: Some(text), ..Sources::default() }).unwrap().0
    }

    #[test]
    fn only_strategies_that_read_redis_cannot_be_recorded() {
        let slo = settings(include_bytes!("../../examples/configs/slo.yaml"));
        assert!(unrecordable(&slo).is_some_and(|why| why.contains("profilesFromRedis")));
        let split = settings(include_bytes!("../../examples/configs/disaggregation.yaml"));
        assert_eq!(unrecordable(&split), None);
    }

    #[tokio::test]
    async fn explanation_of_an_unrecorded_decision_says_how_to_record() {
        let (status, text) = explain(None, "17".to_owned()).await.unwrap_err();
        assert_eq!((status, text.contains("--record")), (StatusCode::NOT_FOUND, true), "{text}");
    }
}
