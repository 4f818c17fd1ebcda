//! The `pipeline` strategy of GIE and llm-d, and its parts.
//!
//! Filters narrow the endpoints, scorers rate the rest, a picker orders them by the weighted sums. A profile handler
//! chooses among several such profiles.
//!
//! **Owns** the strategy ([`strategy`]), its parts ([`filter`], [`scorer`], [`picker`], [`profile`]), and the
//! parameters of all of them.
//! **Called by** `scheduling`, for pools whose configuration names `pipeline`; the composition root puts [`PLUGINS`]
//! into a registry.
//! **Must not** do I/O, or read the clock or draw random numbers on its own: both are arguments.
//!
//! Read first: `scorer/queue.rs` (a whole plugin), `strategy.rs`, `strategy/params.rs`.
//!
//! # Example: a scorer
//!
//! A scorer is a type, a descriptor, and one line in a list of plugins. This one prefers endpoints with free KV cache.
//!
//! ```
//! use attache_scheduling::plugin::{NoParams, Plugin, Scorer, params, section};
//! use attache_scheduling::registry::{PluginDescriptor, PluginList, Registry};
//! use attache_scheduling::{Candidate, PickContext, Ranking};
//! use std::sync::Arc;
//!
//! #[derive(Debug)]
//! struct FreeCache;
//!
//! impl Scorer for FreeCache {
//!     fn score(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
//!         for (score, candidate) in out.iter_mut().zip(candidates) {
//!             *score = candidate.state.metrics().map_or(0.0, |metrics| 1.0 - metrics.kv_usage);
//!         }
//!     }
//! }
//!
//! const PLUGIN: PluginDescriptor = PluginDescriptor {
//!     name: "free-cache-scorer",
//!     aliases: &[],
//!     kind: "scorer",
//!     summary: "Scores endpoints by the part of their KV cache that is free.",
//!     source: "this example",
//!     parameters: section::<NoParams>,
//!     build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Scorer(Arc::new(FreeCache))),
//! };
//! const MINE: PluginList = PluginList { strategies: &[], plugins: &[&PLUGIN], inert: &[] };
//!
//! let registry = Registry::new(&[attache_pipeline::PLUGINS, MINE]);
//! let parameters = serde_json::json!({"scorers": [{"type": "free-cache-scorer", "weight": 2}]});
//! let pipeline = registry.build("pipeline", &parameters)?;
//!
//! // Two servers without a queue. One has 90 % of its cache in use, the other 10 %.
//! use attache_scheduling::testing::{among, load};
//! let pool = among(vec![load(0, 0.9), load(0, 0.1)]);
//! let mut ranking = Ranking::new(1);
//! pipeline.rank(&pool.context(), &pool.candidates(), &mut attache_types::rng::for_request(0, 0), &mut ranking);
//! assert_eq!(ranking.decide().unwrap().picks[0].id.0, 1);
//! # Ok::<(), attache_scheduling::registry::BuildError>(())
//! ```

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod filter;
pub mod picker;
pub mod profile;
pub mod scorer;
pub mod strategy;

use attache_scheduling::facts::{concurrency, session};
use attache_scheduling::registry::PluginList;

/// The strategy and all its parts, sorted by the names that configurations use, not by module. A new part needs one
/// line here.
pub const PLUGINS: PluginList = PluginList {
    strategies: &[&strategy::PLUGIN],
    plugins: &[
        &scorer::active_request::PLUGIN,
        &profile::decider::ALWAYS_MULTIMODAL,
        &profile::decider::ALWAYS,
        &filter::concurrency_detector::PLUGIN,
        &filter::context_length_aware::PLUGIN,
        &profile::data_parallel::PLUGIN,
        &filter::role::DECODE,
        &profile::disagg::DISAGG,
        &filter::role::ENCODE,
        &filter::endpoint_attribute::PLUGIN,
        &scorer::endpoint_attribute::PLUGIN,
        &filter::header_based_testing::PLUGIN,
        &scorer::header_label_affinity::PLUGIN,
        &profile::header::PLUGIN,
        &scorer::kv_cache::PLUGIN,
        &filter::label_selector::PLUGIN,
        &scorer::latency::PLUGIN,
        &scorer::lmetric::PLUGIN,
        &scorer::load_aware::PLUGIN,
        &scorer::lora_affinity::PLUGIN,
        &picker::max_score::PLUGIN,
        &scorer::mm_embeddings_cache::PLUGIN,
        &scorer::no_hit_lru::PLUGIN,
        &profile::disagg::PD,
        &scorer::precise_prefix_cache::PLUGIN,
        &filter::role::PREFILL,
        &profile::decider::PREFIX_BASED,
        &filter::prefix_cache_affinity::PLUGIN,
        &scorer::prefix_cache::PLUGIN,
        &scorer::queue::PLUGIN,
        &picker::random::PLUGIN,
        &scorer::running_requests::PLUGIN,
        &filter::session_affinity::PLUGIN,
        &scorer::session_affinity::PLUGIN,
        &profile::single::PLUGIN,
        &filter::slo_headroom_tier::PLUGIN,
        &scorer::token_load::PLUGIN,
        &filter::topology_affinity::PLUGIN,
        &scorer::topology_affinity::PLUGIN,
        &filter::utilization_detector::PLUGIN,
        &filter::utilization::PLUGIN,
        &picker::weighted_random::PLUGIN,
    ],
    inert: &[
        scorer::active_request::INERT,
        concurrency::INERT,
        profile::data_parallel::INERT,
        profile::disagg::INERT,
        scorer::no_hit_lru::INERT,
        scorer::precise_prefix_cache::INERT,
        filter::prefix_cache_affinity::INERT,
        scorer::prefix_cache::INERT,
        session::INERT,
    ],
};

#[cfg(test)]
mod tests;
