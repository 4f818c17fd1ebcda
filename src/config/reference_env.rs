//! Environment variables that GIE's and llm-d's manifests set for their pickers and that have no counterpart here: each is told of, with what is there in its
//! place, so that a Deployment that is taken over loses nothing in silence.
//!
//! Read with the flags (`cli`), used by `validate`.

use super::decode::Sink;
use super::diagnostic::{Code, Diagnostic};
use std::collections::BTreeMap;

/// Each variable, the values that ask for nothing else than what is done anyway, and what is there in its place.
const VARIABLES: [(&str, &[&str], &str); 7] = [
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
];

/// Those among them that are set, by name; blank ones count as not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReferenceEnv(BTreeMap<String, String>);

impl ReferenceEnv {
    /// Those among `variables`.
    #[must_use]
    pub fn of(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let set = |(name, value): &(String, String)| {
            !value.trim().is_empty() && VARIABLES.iter().any(|(known, _, _)| known == name)
        };
        Self(variables.into_iter().filter(set).collect())
    }

    /// Tells of each that asks for something.
    pub(super) fn tell(&self, sink: &mut Sink) {
        for (name, as_it_is, instead) in VARIABLES {
            let asks = |value: &&String| !as_it_is.contains(&value.trim().to_ascii_lowercase().as_str());
            if self.0.get(name).filter(asks).is_some() {
                sink.push(Diagnostic::new(Code::NoEffect, name, format!("`{name}` has no effect: {instead}")));
            }
        }
    }
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
    fn what_asks_for_something_else_is_told_of() {
        for (name, _, instead) in VARIABLES {
            assert_eq!(told(&[(name, "5")]), [format!("`{name}` has no effect: {instead}")]);
            assert!(told(&[(name, " ")]).is_empty(), "{name}: as if it were not set");
        }
        let as_it_is = [("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_EXPORTER", "otlp")];
        assert!(told(&as_it_is).is_empty());
        assert!(told(&[("SD_CARD", "5"), ("PATH", "/bin")]).is_empty(), "nobody's business");
    }
}
