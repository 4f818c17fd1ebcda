//! Named routing algorithms, one file each: AIBrix's, Dynamo's, SGLang's and Attaché's own.
//!
//! A strategy orders the endpoints that may serve a request. Its file describes the rule, and when another strategy is
//! the better choice.
//!
//! **Owns** the strategies and the state they keep about their decisions. Two are elsewhere: `pipeline` is a crate of
//! its own, and the scheduler itself uses `least-request`.
//! **Called by** `scheduling`, for the strategies that a configuration names; the composition root puts [`PLUGINS`]
//! into a registry.
//! **Must not** do I/O, or read the clock or draw random numbers on its own: both are arguments.
//!
//! Read first: `power_of_two.rs` (a whole strategy), `prefix_cache.rs`, `predicted_latency.rs` (the default).
//!
//! # Example: a strategy
//!
//! A strategy is a type, a descriptor, and one line in a list of plugins. This one picks the endpoint with the fewest
//! prompt tokens in flight that it has not computed yet.
//!
//! ```
//! use attache_scheduling::plugin::{Better, NoParams, params, section};
//! use attache_scheduling::registry::{Descriptor, PluginList, Registry};
//! use attache_scheduling::{Candidate, PickContext, Ranking, Strategy};
//! use serde_json::Value;
//!
//! #[derive(Debug)]
//! struct FewestTokens;
//!
//! impl Strategy for FewestTokens {
//!     fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
//!         for (score, candidate) in out.iter_mut().zip(candidates) {
//!             *score = candidate.state.endpoint.ledger.prefill_tokens() as f64;
//!         }
//!         Some(Better::Lower)
//!     }
//! }
//!
//! const PLUGIN: Descriptor = Descriptor {
//!     name: "fewest-tokens",
//!     summary: "Picks the endpoint with the fewest prompt tokens to compute.",
//!     source: "this example",
//!     parameters: section::<NoParams>,
//!     build: |value, _| params::<NoParams>(value).map(|NoParams {}| Box::new(FewestTokens) as Box<dyn Strategy>),
//! };
//! const MINE: PluginList = PluginList { strategies: &[&PLUGIN], plugins: &[], inert: &[] };
//!
//! let registry = Registry::new(&[attache_strategies::PLUGINS, MINE]);
//! // Two servers that report nothing. The first was sent a prompt of 5,000 tokens.
//! use attache_scheduling::testing::{among, silent};
//! let pool = among(vec![silent().sent(&[5_000]), silent()]);
//! // Alone, and in a weighted sum.
//! for name in ["fewest-tokens", "fewest-tokens:2,least-request"] {
//!     let strategy = registry.build(name, &Value::Null)?;
//!     let mut ranking = Ranking::new(1);
//!     strategy.rank(&pool.context(), &pool.candidates(), &mut attache_types::rng::for_request(0, 0), &mut ranking);
//!     assert_eq!(ranking.decide().unwrap().picks[0].id.0, 1);
//! }
//! # Ok::<(), attache_scheduling::registry::BuildError>(())
//! ```

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod cache_aware;
pub mod chwbl;
pub mod dynamo_kv;
pub mod fallback;
mod floor;
pub mod least_busy_time;
pub mod least_gpu_cache;
pub mod least_kv_cache;
pub mod least_latency;
pub mod least_utilization;
pub mod load_balance;
pub mod messages;
pub mod pd;
pub mod power_of_two;
pub mod predicted_latency;
pub mod prefix_affinity;
pub mod prefix_cache;
pub mod prefix_cache_preble;
pub mod prefix_hash;
pub mod random;
pub mod ring;
pub mod round_robin;
pub mod session_affinity;
pub mod slo;
pub mod throughput;
pub mod vtc_basic;
pub mod vtc_queue;

use attache_scheduling::registry::PluginList;

/// All strategies of this crate, by name.
pub const PLUGINS: PluginList = PluginList {
    strategies: &[
        &cache_aware::PLUGIN,
        &chwbl::PLUGIN,
        &chwbl::CONSISTENT_HASH,
        &dynamo_kv::PLUGIN,
        &fallback::PLUGIN,
        &least_busy_time::PLUGIN,
        &least_gpu_cache::PLUGIN,
        &least_kv_cache::PLUGIN,
        &least_latency::PLUGIN,
        &attache_scheduling::least_request::PLUGIN,
        &least_utilization::PLUGIN,
        &load_balance::PLUGIN,
        &pd::PLUGIN,
        &power_of_two::PLUGIN,
        &predicted_latency::PLUGIN,
        &prefix_affinity::PLUGIN,
        &prefix_cache::PLUGIN,
        &prefix_cache_preble::PLUGIN,
        &prefix_hash::PLUGIN,
        &random::PLUGIN,
        &round_robin::PLUGIN,
        &session_affinity::PLUGIN,
        &slo::PLUGIN,
        &slo::LEAST_LOAD,
        &slo::LEAST_LOAD_PULLING,
        &slo::PACK_LOAD,
        &throughput::PLUGIN,
        &vtc_basic::PLUGIN,
        &vtc_queue::FAIR,
        &vtc_queue::MAX_FAIR,
        &vtc_queue::PRED,
    ],
    plugins: &[],
    inert: &[chwbl::INERT, dynamo_kv::INERT, pd::INERT, prefix_cache_preble::INERT, vtc_basic::INERT],
};

#[cfg(test)]
mod metric_tests;
#[cfg(test)]
mod tests;
