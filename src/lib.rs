//! Attaché: an Envoy external-processing endpoint picker for LLM inference.
//!
//! `ARCHITECTURE.md` is the map; requests arrive in [`ext_proc`].

pub use attache_admin as admin;
pub use attache_config as config;
pub use attache_disagg as disagg;
pub use attache_discovery as discovery;
pub use attache_ext_proc as ext_proc;
pub use attache_feeds as feeds;
pub use attache_flow as flow;
pub use attache_kv_events as kv_events;
#[cfg(feature = "live-check")]
pub use attache_live_check as live_check;
#[cfg(feature = "simulator")]
pub use attache_loadgen as loadgen;
pub use attache_picker as picker;
pub use attache_pipeline as pipeline;
pub use attache_pool as pool;
pub use attache_prefix as prefix;
pub use attache_prompt as prompt;
pub use attache_protocol as protocol;
#[cfg(feature = "simulator")]
pub use attache_quickstart as quickstart;
pub use attache_quota as quota;
pub use attache_record as record;
#[cfg(feature = "redis")]
pub use attache_redis_store::{quota_store, redis_link};
#[cfg(feature = "simulator")]
pub use attache_replay as replay;
#[cfg(feature = "simulator")]
pub use attache_report as report;
pub use attache_scheduling as scheduling;
pub use attache_scrape as scrape;
pub use attache_serving::{connections, health, shutdown, tls};
#[cfg(feature = "simulator")]
pub use attache_sim as sim;
pub use attache_strategies as strategies;
pub use attache_telemetry as telemetry;
pub use attache_tokenize as tokenize;
#[cfg(feature = "top")]
pub use attache_top as top;
pub use attache_types::{clock, error, ids, limits, rng, spelling};
#[cfg(feature = "simulator")]
pub use attache_workload as workload;

pub mod app;
pub mod cli;
pub mod plugins;
