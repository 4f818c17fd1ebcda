//! `utilization-filter`: endpoints within all given limits.
//!
//! `conditions: [{metric, maxValue}]`; metrics are `active-requests` (in flight, routed by Attaché),
//! `running-requests`, `waiting-queue` and `kv-cache-utilization` (0..=1). A metric that a server does not report
//! counts as 0.
//! If all endpoints exceed a limit, none stays, unless `fallbackOnEmpty`. When not: limits differ between servers of
//! one pool. Source: llm-d `utilization-filter`.

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
    name: "utilization-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints below limits of requests, queue or KV cache.",
    source: "llm-d `utilization-filter`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Filter(Arc::new(p))),
};

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    conditions: Vec<Condition>,
    fallback_on_empty: bool,
    #[serde(rename = "inFlightLoadProducerName")]
    _load: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Condition {
    metric: String,
    max_value: f64,
}

impl Params {
    fn build(self) -> Result<Utilization, ParamError> {
        if self.conditions.is_empty() {
            return Err(ParamError::new("`conditions` is empty; at least one is needed").under("conditions"));
        }
        let limit = |(index, c): (usize, Condition)| {
            let here = |error: ParamError| error.in_item(index).under("conditions");
            let figure = EndpointMetric::named("metric", &c.metric).map_err(here)?;
            let most = if figure == EndpointMetric::KvUsage { 1.0 } else { f64::MAX };
            if !(0.0..=most).contains(&c.max_value) {
                let allowed = if figure == EndpointMetric::KvUsage { "0 to 1" } else { "0 or more" };
                let Condition { metric, max_value } = c;
                let message = format!("`maxValue` of `{metric}` is {max_value}; {allowed} is allowed");
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
