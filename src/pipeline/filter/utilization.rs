//! `utilization-filter`: endpoints within all given limits.
//!
//! `conditions: [{metric, maxValue}]`; metrics are `active-requests` (in flight, routed by Attaché),
//! `running-requests`, `waiting-queue` and `kv-cache-utilization` (0..=1). A metric that a server does not report
//! counts as 0.
//! If all endpoints exceed a limit, none stays, unless `fallbackOnEmpty`. When not: limits differ between servers of
//! one pool. Source: llm-d `utilization-filter`.

use super::keep_or_all;
use attache_scheduling::facts::figure::EndpointMetric;
use attache_scheduling::plugin::{Filter, ParamError, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::parameters;
use attache_types::rng::PickRng;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "utilization-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints below limits of requests, queue or KV cache.",
    source: "llm-d `utilization-filter`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Filter(Arc::new(p))),
};

parameters! {
    struct Params {
        /// Limits, all of which an endpoint must meet to stay; at least one.
        "conditions" => conditions: Vec<Condition> { absent: "required"; },
        /// Whether all endpoints stay if none is within the limits.
        "fallbackOnEmpty" => fallback_on_empty: bool { default: false; },
        ignored {
            /// Without effect: there is one ledger.
            "inFlightLoadProducerName": Value,
        }
    }
    /// A limit of a metric.
    struct Condition {
        /// Name of the metric: `active-requests`, `active-tokens`, `running-requests`, `waiting-queue`,
        /// `kv-cache-utilization`, `num_gpu_blocks` or `gpu_busy_time_ratio`. A metric that is not reported counts as
        /// 0.
        "metric" => metric: String,
        /// Highest value at which an endpoint stays. For `kv-cache-utilization` it is at most 1.
        "maxValue" => max_value: f64 { range: 0.0..; unit: "as the metric"; },
    }
}

impl Params {
    fn build(self) -> Result<Utilization, ParamError> {
        if self.conditions.is_empty() {
            return Err(ParamError::new("`conditions` is empty; at least one is needed").under("conditions"));
        }
        let limit = |(index, c): (usize, Condition)| {
            let here = |error: ParamError| error.in_item(index).under("conditions");
            let figure = EndpointMetric::named("metric", &c.metric).map_err(here)?;
            if figure == EndpointMetric::KvUsage && c.max_value > 1.0 {
                let message = format!("`maxValue` of `{}` is {}; 0 to 1 is allowed", c.metric, c.max_value);
                return Err(here(ParamError::new(message).under("maxValue")));
            }
            Ok((figure, c.max_value))
        };
        let limits = self.conditions.into_iter().enumerate().map(limit).collect::<Result<_, _>>()?;
        Ok(Utilization { limits, fallback: self.fallback_on_empty })
    }
}

#[derive(Debug)]
struct Utilization {
    limits: Vec<(EndpointMetric, f64)>,
    fallback: bool,
}

impl Utilization {
    fn is_below(&self, candidate: &Candidate<'_>) -> bool {
        self.limits.iter().all(|(figure, most)| figure.of(candidate).unwrap_or(0.0) <= *most)
    }
}

impl Filter for Utilization {
    fn keep(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        if self.fallback {
            keep_or_all(keep, |i| candidates.get(i).is_some_and(|c| self.is_below(c)));
        } else {
            keep.iter_mut().zip(candidates).for_each(|(keep, c)| *keep = self.is_below(c));
        }
    }
}
