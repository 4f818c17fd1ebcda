//! What the remote tokenizers of each model did.

use super::PoolView;
use attache_tokenize::stats::{LATENCY_BOUNDS_MS, ModelStats};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::Unit;
use std::fmt::Error;

type ModelCounter = (&'static str, &'static str, fn(&ModelStats) -> u64);

/// One counter a model: name, help, value.
const COUNTERS: [ModelCounter; 2] = [
    ("tokenizer_creations", "models whose remote tokenizer returned its first tokens", |stats| stats.creations),
    (
        "tokenizer_call_failures",
        "calls of the remote tokenizer that returned no tokens; `other` for models that never returned any",
        |stats| stats.failures,
    ),
];

/// The counters and times of each model, by pool.
pub(super) fn by_model(pools: &[PoolView], encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let all: Vec<_> = pools.iter().filter_map(|pool| Some((&*pool.name, pool.remote.as_ref()?.by_model()))).collect();
    for (name, help, value) in COUNTERS {
        let mut counters = encoder.encode_descriptor(name, help, None, ConstCounter::<u64>::TYPE)?;
        for (pool, models) in &all {
            for (model, stats) in models {
                let labels = [("pool", *pool), ("model", &**model)];
                ConstCounter::new(value(stats)).encode(counters.encode_family(&labels)?)?;
            }
        }
    }
    let help = "duration of calls of the remote tokenizer that returned tokens";
    let unit = Some(&Unit::Seconds);
    let mut times = encoder.encode_descriptor("tokenizer_call", help, unit, MetricType::Histogram)?;
    for (pool, models) in &all {
        for (model, stats) in models {
            let bounds = LATENCY_BOUNDS_MS.iter().map(|bound| *bound as f64 / 1e3).chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(stats.buckets).collect();
            let count = stats.buckets.iter().sum();
            let labels = [("pool", *pool), ("model", &**model)];
            let mut family = times.encode_family(&labels)?;
            family.encode_histogram::<NoLabelSet>(stats.took.as_secs_f64(), count, &buckets, None)?;
        }
    }
    Ok(())
}
