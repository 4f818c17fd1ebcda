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
use attache_scheduling::plugin::{ParamError, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Signal};
use attache_types::{keywords, parameters};
use serde_json::Value;
use smallvec::SmallVec;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "endpoint-attribute-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Scores one reported number linearly.",
    source: "llm-d `endpoint-attribute-scorer`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

parameters! {
    struct Params {
        /// Name of the metric: `active-requests`, `active-tokens`, `running-requests`, `waiting-queue`,
        /// `kv-cache-utilization`, `num_gpu_blocks` or `gpu_busy_time_ratio`.
        "attributeKey" => attribute_key: String,
        /// Linear scale that maps the metric to a score of 0 to 1.
        "algorithm" => algorithm: LinearAlgorithm,
        ignored {
            /// Without effect: there is one source of metrics.
            "producer": Value,
        }
    }
    /// A linear scale.
    struct LinearAlgorithm {
        /// Whether a lower or a higher value scores better.
        "type" => direction: Direction,
        /// Ends of the scale: `adaptiveRange` or `fixedRange`, not both.
        "normalization" => normalization: Normalization,
    }
    /// Ends of a scale.
    struct Normalization {
        /// The scale ends at the least and the greatest value of the candidates. The mapping is empty.
        "adaptiveRange" => adaptive_range: Option<Adaptive> { absent: "applies without `fixedRange`"; },
        /// The scale ends at these values. Values beyond them count as the nearer end.
        "fixedRange" => fixed_range: Option<Range> { absent: "`adaptiveRange`"; },
    }
    /// The values of the candidates.
    struct Adaptive {}
    /// Ends of a scale.
    #[derive(Clone, Copy)]
    struct Range {
        /// The lower end, less than `max`.
        "min" => min: f64 { unit: "as the metric"; },
        /// The upper end.
        "max" => max: f64 { unit: "as the metric"; },
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    LinearLowerIsBetter,
    LinearHigherIsBetter,
}

keywords! {
    Direction: "linear_lower_is_better" => LinearLowerIsBetter, "linear_higher_is_better" => LinearHigherIsBetter;
}

impl Params {
    fn build(self) -> Result<EndpointAttribute, ParamError> {
        let figure = EndpointMetric::named("attributeKey", &self.attribute_key)?;
        let Normalization { adaptive_range, fixed_range } = self.algorithm.normalization;
        match (adaptive_range, fixed_range) {
            (Some(Adaptive {}), Some(_)) => {
                Err(ParamError::new("`normalization` has `adaptiveRange` and `fixedRange`; one of them is allowed")
                    .under("normalization")
                    .under("algorithm"))
            }
            (_, Some(Range { min, max })) if min >= max => {
                let message = format!("`fixedRange` is {min} to {max}; `min` must be less than `max`");
                Err(ParamError::new(message).under("fixedRange").under("normalization").under("algorithm"))
            }
            (_, fixed) => {
                let lower_wins = self.algorithm.direction == Direction::LinearLowerIsBetter;
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
