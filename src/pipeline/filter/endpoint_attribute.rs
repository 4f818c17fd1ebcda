//! `endpoint-attribute-filter`: endpoints whose metric passes a comparison.
//!
//! `attribute` is one of the metrics of [`facts::figure`](attache_scheduling::facts::figure); attributes of other
//! plugins are not available. `algorithm: {type: threshold, threshold: {operator, value}}` gives the comparison.
//! A server that does not report the metric stays unless `onMissing: Fail`. With `fallbackOnEmpty`, all stay if none
//! passes. When not: servers differ in size, so one threshold does not fit all. Source: llm-d v0.10
//! `endpoint-attribute-filter`.

use super::keep_or_all;
use attache_scheduling::facts::figure::EndpointMetric;
use attache_scheduling::plugin::{Filter, ParamError, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use attache_types::{keywords, parameters};
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "endpoint-attribute-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints whose reported metric passes a comparison.",
    source: "llm-d `endpoint-attribute-filter`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Filter(Arc::new(p))),
};

parameters! {
    struct Params {
        /// Name of the metric: `active-requests`, `active-tokens`, `running-requests`, `waiting-queue`,
        /// `kv-cache-utilization`, `num_gpu_blocks` or `gpu_busy_time_ratio`.
        "attribute" => attribute: String,
        /// Whether an endpoint that does not report the metric stays (`Pass`) or is dropped (`Fail`).
        "onMissing" => on_missing: OnMissing { default: OnMissing::Pass; },
        /// Whether all endpoints stay if none passes the comparison.
        "fallbackOnEmpty" => fallback_on_empty: bool { default: false; },
        /// Comparison that an endpoint must pass to stay.
        "algorithm" => algorithm: ThresholdAlgorithm,
        ignored {
            /// Without effect: there is one source of metrics.
            "producer": Value,
        }
    }
    /// A comparison with a threshold.
    struct ThresholdAlgorithm {
        /// Type of the comparison.
        "type" => _type: AlgorithmType,
        /// Operator and value of the comparison.
        "threshold" => threshold: Threshold,
    }
    /// A comparison.
    #[derive(Clone, Copy)]
    struct Threshold {
        /// Operator with the metric on its left side.
        "operator" => operator: Operator,
        /// Value on the right side of the operator.
        "value" => value: f64 { unit: "as the metric"; },
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnMissing {
    Pass,
    Fail,
}

#[derive(Clone, Copy, Debug)]
enum AlgorithmType {
    Threshold,
}

#[derive(Clone, Copy, Debug)]
enum Operator {
    LessThan,
    LessThanOrEqual,
    GreaterThan,
    GreaterThanOrEqual,
    Equal,
    NotEqual,
}

keywords! {
    OnMissing: "Pass" => Pass, "Fail" => Fail;
    AlgorithmType: "threshold" => Threshold;
    Operator: "LessThan" => LessThan, "LessThanOrEqual" => LessThanOrEqual, "GreaterThan" => GreaterThan,
        "GreaterThanOrEqual" => GreaterThanOrEqual, "Equal" => Equal, "NotEqual" => NotEqual;
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
        let figure = EndpointMetric::named("attribute", &self.attribute)?;
        let (threshold, missing_stays) = (self.algorithm.threshold, self.on_missing == OnMissing::Pass);
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
