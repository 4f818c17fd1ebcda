//! Environment variables of Neutree, GIE and llm-d that have no counterpart in Attaché. Each is a warning that names
//! the alternative, so that a Deployment taken over from another picker loses no setting silently. AIBrix's variables
//! are in [`super::aibrix_env`], LocalAI's in [`super::localai_env`].
//!
//! Read with the flags (`cli`), used by `validate`.

use super::decode::Sink;
use super::diagnostic::{Code, Diagnostic};
use super::variables::{is_of_service, unread};
use std::collections::BTreeMap;

/// Prefixes of other pickers' variables. `LATENCY_` and `SD_` are absent, since variables of other programs begin so
/// too; those of pickers are among [`VARIABLES`].
const PREFIXES: [(&str, &str); 6] = [
    ("ENABLE_EXPERIMENTAL_", "GIE"),
    ("EPP_", "GIE"),
    ("GIE_", "GIE"),
    ("LLMD_", "llm-d"),
    ("LLM_D_", "llm-d"),
    ("NEUTREE_", "Neutree"),
];
/// The predictor's parameters, which `predicted-latency` learns by itself.
const LEARNED: &str = "the strategy `predicted-latency` learns inside the picker, without a server of its own";

/// Each variable, the values that equal Attaché's behaviour, and the alternative.
const VARIABLES: [(&str, &[&str], &str); 19] = [
    ("ENABLE_EXPERIMENTAL_DATALAYER_V2", &["false"], "there is one way to read metrics, and nothing to switch"),
    (
        "ENABLE_EXPERIMENTAL_FLOW_CONTROL_LAYER",
        &["false"],
        "`flowControl: {enabled: true}` of a pool has its requests wait their turn",
    ),
    ("OTEL_TRACES_EXPORTER", &["otlp"], "traces go to `--otlp-endpoint` (OTEL_EXPORTER_OTLP_ENDPOINT), or nowhere"),
    (
        "OTEL_TRACES_SAMPLER",
        &["parentbased_traceidratio"],
        "the caller decides, and for others the part that `--trace-ratio` (OTEL_TRACES_SAMPLER_ARG) says",
    ),
    (
        "SD_KV_CACHE_UTIL_THRESHOLD",
        &[],
        "`kvCacheUtilThreshold` of the detector `utilization-detector` (`flowControl.detector`) says it",
    ),
    ("SD_METRICS_STALENESS_THRESHOLD", &[], "`--metrics-staleness-threshold` says it"),
    (
        "SD_QUEUE_DEPTH_THRESHOLD",
        &[],
        "`queueDepthThreshold` of the detector `utilization-detector` (`flowControl.detector`) says it",
    ),
    ("LATENCY_COALESCE_WINDOW_MS", &[], LEARNED),
    ("LATENCY_FLUSH_INTERVAL_SEC", &[], LEARNED),
    ("LATENCY_HTTP_TIMEOUT_SEC", &[], LEARNED),
    ("LATENCY_MAX_BULK_SIZE", &[], LEARNED),
    ("LATENCY_MAX_COALESCED_ROWS", &[], LEARNED),
    ("LATENCY_MAX_CONCURRENT_DISPATCHES", &[], LEARNED),
    ("LATENCY_MAX_SAMPLE_SIZE", &[], LEARNED),
    ("LATENCY_METRICS_INTERVAL_SEC", &[], LEARNED),
    ("LATENCY_USE_NATIVE_XGBOOST", &[], LEARNED),
    ("PREDICTION_SERVER_URL", &[], LEARNED),
    ("TRAINING_SERVER_URL", &[], LEARNED),
    ("DYNAMIC_LORA_ROLLOUT_CONFIG", &[], "adapters are loaded by servers, and found by their metrics"),
];

/// The variables among [`VARIABLES`] that are set, by name; blank ones count as not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReferenceEnv(BTreeMap<String, String>);

impl ReferenceEnv {
    /// Selects the known ones among `variables`.
    #[must_use]
    pub fn of(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let concerns = |name: &str, value: &str| {
            let is_known = VARIABLES.iter().any(|(known, _, _)| *known == name);
            is_known || (product(name).is_some() && !is_of_service(name, value))
        };
        let set = |(name, value): &(String, String)| !value.trim().is_empty() && concerns(name, value);
        Self(variables.into_iter().filter(set).collect())
    }

    /// Warns of each variable that asks for another behaviour.
    pub(super) fn tell(&self, sink: &mut Sink) {
        for (name, value) in &self.0 {
            sink.push(match VARIABLES.iter().find(|(known, _, _)| known == name) {
                Some((_, as_it_is, _)) if as_it_is.contains(&value.trim().to_ascii_lowercase().as_str()) => continue,
                Some((.., instead)) => {
                    Diagnostic::new(Code::NoEffect, name, format!("`{name}` has no effect: {instead}"))
                }
                None => {
                    let of = product(name).unwrap_or_default();
                    let why = format!("no setting of {of} that is read here has this name");
                    unread(name, &why, VARIABLES.iter().map(|(known, ..)| *known))
                }
            });
        }
    }
}

/// The product that a variable's prefix stands for.
fn product(name: &str) -> Option<&'static str> {
    PREFIXES.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, product)| *product)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(variables: &[(&str, &str)]) -> Vec<String> {
        let mut sink = Sink::default();
        ReferenceEnv::of(variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))).tell(&mut sink);
        sink.diagnostics.into_iter().map(|d| d.message).collect()
    }

    #[test]
    fn variables_asking_for_other_behaviour_are_warned_of() {
        for (name, _, instead) in VARIABLES {
            assert_eq!(told(&[(name, "5")]), [format!("`{name}` has no effect: {instead}")]);
            assert!(told(&[(name, " ")]).is_empty(), "{name}: as if it were not set");
        }
        let as_it_is = [("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_EXPORTER", "otlp")];
        assert!(told(&as_it_is).is_empty());
        let others = [("HOME", "/root"), ("PATH", "/bin"), ("SD_MODEL", "xl"), ("LATENCY_TARGET_MS", "50")];
        assert!(told(&others).is_empty(), "another program's");
    }

    #[test]
    fn unknown_variables_with_picker_prefix_are_warned_of() {
        for (prefix, product) in PREFIXES {
            let name = format!("{prefix}SOMETHING_NEW");
            let [message] = &told(&[(&name, "1")])[..] else { panic!("{name}") };
            assert!(message.contains(&name) && message.contains(product), "{message}");
        }
        let services = [
            ("EPP_SERVICE_HOST", "10.0.0.1"),
            ("LLM_D_PORT_9002_TCP", "tcp://10.0.0.1:9002"),
            ("EPP_PORT", "tcp://10.0.0.1:9002"),
        ];
        assert!(told(&services).is_empty(), "Kubernetes sets them for a Service");
    }
}
