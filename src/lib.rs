//! Attaché: an Envoy external-processing endpoint picker for LLM inference.
//!
//! `ARCHITECTURE.md` is the map; the life of a request begins in [`ext_proc`].

pub mod admin;
pub mod app;
pub mod cli;
pub mod clock;
pub mod config;
pub mod connections;
pub mod disagg;
pub mod discovery;
pub mod error;
pub mod ext_proc;
pub mod flow;
pub mod health;
pub mod ids;
pub mod kv_events;
pub mod limits;
pub mod pool;
pub mod prefix;
pub mod prompt;
pub mod protocol;
pub mod quota;
#[cfg(feature = "redis")]
pub mod quota_store;
pub mod record;
#[cfg(feature = "redis")]
pub mod redis_link;
pub mod replay;
pub mod rng;
pub mod scheduling;
pub mod scrape;
pub mod server;
pub mod shutdown;
pub mod sim;
pub mod spelling;
pub mod telemetry;
pub mod tls;
pub mod tokenize;
