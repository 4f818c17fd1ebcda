//! `endpoint-attribute-filter`: endpoints whose metric passes a comparison.
//!
//! `attribute` is one of the metrics of [`facts::figure`](attache_scheduling::facts::figure); attributes of other
//! plugins are not available. `algorithm: {type: threshold, threshold: {operator, value}}` gives the comparison.
//! A server that does not report the metric stays unless `onMissing: Fail`. With `fallbackOnEmpty`, all stay if none
//! passes. When not: servers differ in size, so one threshold does not fit all. Source: llm-d v0.10
//! `endpoint-attribute-filter`.

use super::keep_or_all;
use attache_scheduling::facts::figure::EndpointMetric;
use attache_scheduling::plugin::{Filter, ParamError, Plugin, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "endpoint-attribute-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints whose reported metric passes a comparison.",
    source: "llm-d `endpoint-attribute-filter`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Filter(Arc::new(p))),
};

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    attribute: String,
    on_missing: OnMissing,
    fallback_on_empty: bool,
    algorithm: Option<ThresholdAlgorithm>,
    // Accepted without effect: there is one source of metrics.
    #[serde(rename = "producer")]
    _producer: Option<IgnoredAny>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
enum OnMissing {
    #[default]
    Pass,
    Fail,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ThresholdAlgorithm {
    #[serde(rename = "type")]
    _type: AlgorithmType,
    threshold: Threshold,
}

#[derive(Debug, Deserialize)]
enum AlgorithmType {
    #[serde(rename = "threshold")]
    Threshold,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Threshold {
    operator: Operator,
    value: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum Operator {
    LessThan,
    LessThanOrEqual,
    GreaterThan,
    GreaterThanOrEqual,
    Equal,
    NotEqual,
}

impl Threshold {
    fn admits(self, number: f64) -> bool {
        match self.operator {
            Operator::LessThan => number < self.value,
            Operator::LessThanOrEqual => number <= self.value,
            Operator::GreaterThan => number > self.value,
            Operator::GreaterThanOrEqual => number >= self.value,
            Operator::Equal => number == self.value,
            Operator::NotEqual => number != self.value,
        }
    }
}

impl Params {
    fn build(self) -> Result<EndpointAttribute, ParamError> {
        if self.attribute.is_empty() {
            return Err(ParamError::new("`attribute` is missing"));
        }
        let figure = EndpointMetric::named("attribute", &self.attribute)?;
        let algorithm = self.algorithm.ok_or_else(|| ParamError::new("`algorithm` is missing"))?;
        let (threshold, missing_stays) = (algorithm.threshold, self.on_missing == OnMissing::Pass);
        Ok(EndpointAttribute { figure, threshold, missing_stays, fallback: self.fallback_on_empty })
    }
}

#[derive(Debug)]
struct EndpointAttribute {
    figure: EndpointMetric,
    threshold: Threshold,
    missing_stays: bool,
    fallback: bool,
}

impl EndpointAttribute {
    fn admits(&self, candidate: &Candidate<'_>) -> bool {
        self.figure.of(candidate).map_or(self.missing_stays, |number| self.threshold.admits(number))
    }
}

impl Filter for EndpointAttribute {
    fn keep(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        if self.fallback {
            keep_or_all(keep, |i| candidates.get(i).is_some_and(|c| self.admits(c)));
        } else {
            keep.iter_mut().zip(candidates).for_each(|(keep, c)| *keep = self.admits(c));
        }
    }
}
