//! The recording of a run, if one is requested, and explanations from it.

use attache_config::Settings;
use attache_config::settings::PoolSettings;
use attache_record::{RecordSettings, Recorder};
use attache_telemetry::decisions::Decisions;
use axum::http::StatusCode;
use prometheus_client::registry::Registry;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Why decisions by these settings can't be recorded; `None` if they can.
pub(super) fn unrecordable(settings: &Settings) -> Option<&'static str> {
    if settings.sync.is_some() {
        return Some("`sync` is on, and recordings hold nothing from other pickers");
    }
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

/// Explains the decision about the request with this `x-request-id`: with the explanation that `decisions` keeps, among
/// the `kept` latest ones, else by a replay of the recording up to it. The recording also finds a request by its
/// number.
///
/// # Errors
/// The status and text of the response: neither knows the request, or the recording can't be read.
pub(super) async fn explain(
    decisions: &Decisions,
    kept: usize,
    recorder: Option<Arc<Recorder>>,
    id: String,
) -> Result<Value, (StatusCode, String)> {
    if let Some(explanation) = decisions.explanation(kept, &id) {
        return serde_json::from_str(&explanation).map_err(|e| (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()));
    }
    let Some(recorder) = recorder else {
        return Err((StatusCode::NOT_FOUND, unknown(kept, &id)));
    };
    let explained = tokio::task::spawn_blocking(move || {
        recorder.flush();
        explain_in(recorder.path(), &id)
    });
    explained.await.unwrap_or_else(|error| Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())))
}

/// Why a picker without a recording does not explain the request `id`; it keeps `kept` explanations.
fn unknown(kept: usize, id: &str) -> String {
    if kept == 0 {
        return format!(
            "the request `{id}` can't be explained: this picker keeps no explanations and records no decisions. The \
             key `exchange.explain.kept` keeps the latest explanations, and `attache run --record FILE` records all \
             decisions"
        );
    }
    format!(
        "no explanation of a request with the x-request-id `{id}` is kept: the latest {kept} are \
         (`exchange.explain.kept`), as many as take a part of the time (`exchange.explain.timeRatio`), and none of \
         rejections by limits, queues or deadlines. `attache run --record FILE` records all decisions"
    )
}

fn explain_in(recording: &Path, id: &str) -> Result<Value, (StatusCode, String)> {
    let unreadable = |error: &dyn std::fmt::Display| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    match attache_replay::record::explain::explain(recording, Some(id), None, &crate::plugins::registry()) {
        Ok(Some(explained)) => serde_json::to_value(explained).map_err(|error| unreadable(&error)),
        Ok(None) => Err((StatusCode::NOT_FOUND, format!("the recording has no decision about the request `{id}`"))),
        Err(error) => Err(unreadable(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_config::{ConfigText, Sources};
    use attache_picker::event::KeptExplanation;
    use attache_picker::settings::ExplainSettings;
    use attache_types::clock::Clock;

    fn settings(text: &[u8]) -> Settings {
        let text = ConfigText { name: "test".into(), bytes: text.to_vec() };
        let registry = crate::plugins::registry();
        attache_config::load(&Sources { registry, text: Some(text), ..Sources::default() }).unwrap().0
    }

    #[test]
    fn only_strategies_that_read_redis_cannot_be_recorded() {
        let slo = settings(include_bytes!("../../examples/configs/slo.yaml"));
        assert!(unrecordable(&slo).is_some_and(|why| why.contains("profilesFromRedis")));
        let split = settings(include_bytes!("../../examples/configs/disaggregation.yaml"));
        assert_eq!(unrecordable(&split), None);
    }

    #[tokio::test]
    async fn explanation_that_is_neither_kept_nor_recorded_names_both_ways() {
        let clock = Clock::start();
        let decisions = Decisions::new(0, clock);
        let settings = ExplainSettings { kept: 2, ..ExplainSettings::default() };
        for i in 0..5 {
            let explanation = KeptExplanation { request_id: format!("r{i}").into(), json: i.to_string().into() };
            decisions.keep(&settings, clock.now(), explanation);
        }
        let ask = |kept, id: &str| explain(&decisions, kept, None, id.to_owned());
        assert_eq!(ask(2, "r4").await.unwrap(), 4);
        assert_eq!(ask(2, "r3").await.unwrap(), 3);
        let (status, text) = ask(2, "r2").await.unwrap_err();
        let names_bound = text.contains("`r2` is kept: the latest 2 are (`exchange.explain.kept`)");
        assert_eq!((status, names_bound), (StatusCode::NOT_FOUND, true), "{text}");
        assert!(ask(1, "r4").await.is_ok());
        // A reload has ended the keeping of explanations.
        let (status, text) = ask(0, "r4").await.unwrap_err();
        let names_both =
            ["keeps no explanations", "--record", "exchange.explain.kept"].iter().all(|w| text.contains(w));
        assert_eq!((status, names_both), (StatusCode::NOT_FOUND, true), "{text}");
    }
}
