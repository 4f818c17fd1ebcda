//! `endpoint-attribute-scorer`: one metric, scaled to 0..=1.
//!
//! ```text
//! linear_higher_is_better: (value − min) / (max − min); linear_lower_is_better: 1 minus that; clamped
//! min and max: of the candidates (`adaptiveRange`, all equal score 1) or as given (`fixedRange`)
//! ```
//!
//! `attributeKey` is one of the metrics of [`facts::figure`](attache_scheduling::facts::figure); attributes of other
//! plugins are not available. A server that does not report it scores 0. When not: the metric has a scorer of its
//! own. Source: llm-d v0.10.

use super::no_metrics;
use attache_scheduling::facts::figure::EndpointMetric;
use attache_scheduling::plugin::{ParamError, Plugin, Scorer, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Signal};
use serde::Deserialize;
use serde::de::IgnoredAny;
use smallvec::SmallVec;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "endpoint-attribute-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Scores one reported number linearly.",
    source: "llm-d `endpoint-attribute-scorer`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    attribute_key: String,
    algorithm: Option<LinearAlgorithm>,
    // Accepted without effect: there is one source of metrics.
    #[serde(rename = "producer")]
    _producer: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinearAlgorithm {
    r#type: Direction,
    #[serde(default)]
    normalization: Normalization,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Direction {
    LinearLowerIsBetter,
    LinearHigherIsBetter,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Normalization {
    adaptive_range: Option<Adaptive>,
    fixed_range: Option<Range>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Adaptive {}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Range {
    min: f64,
    max: f64,
}

impl Params {
    fn build(self) -> Result<EndpointAttribute, ParamError> {
        if self.attribute_key.is_empty() {
            return Err(ParamError::new("`attributeKey` is missing"));
        }
        let figure = EndpointMetric::named("attributeKey", &self.attribute_key)?;
        let algorithm = self.algorithm.ok_or_else(|| ParamError::new("`algorithm` is missing"))?;
        let Normalization { adaptive_range, fixed_range } = algorithm.normalization;
        match (adaptive_range, fixed_range) {
            (Some(Adaptive {}), Some(_)) => {
                Err(ParamError::new("`normalization` has `adaptiveRange` and `fixedRange`; one of them is allowed")
                    .under("normalization")
                    .under("algorithm"))
            }
            (_, Some(Range { min, max })) if !(min < max && min.is_finite() && max.is_finite()) => {
                let message = format!("`fixedRange` is {min} to {max}; `min` must be less than `max`");
                Err(ParamError::new(message).under("fixedRange").under("normalization").under("algorithm"))
            }
            (_, fixed) => {
                let lower_wins = algorithm.r#type == Direction::LinearLowerIsBetter;
                Ok(EndpointAttribute { figure, lower_wins, fixed })
            }
        }
    }
}

#[derive(Debug)]
struct EndpointAttribute {
    figure: EndpointMetric,
    lower_wins: bool,
    fixed: Option<Range>,
}

impl Scorer for EndpointAttribute {
    fn score(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let numbers: SmallVec<[Option<f64>; 32]> = candidates.iter().map(|c| self.figure.of(c)).collect();
        let known = || numbers.iter().flatten().copied();
        let Range { min, max } = self.fixed.unwrap_or_else(|| Range {
            min: known().fold(f64::INFINITY, f64::min),
            max: known().fold(f64::NEG_INFINITY, f64::max),
        });
        for (score, number) in out.iter_mut().zip(&numbers) {
            *score = match number {
                None => 0.0,
                Some(_) if min >= max => 1.0,
                Some(number) => {
                    let height = ((number - min) / (max - min)).clamp(0.0, 1.0);
                    (if self.lower_wins { 1.0 - height } else { height }) as f32
                }
            };
        }
    }

    fn lacks(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>]) -> Option<Signal> {
        no_metrics(candidates)
    }
}
