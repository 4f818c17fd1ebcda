//! Scraping: metrics and model lists that model servers report.
//!
//! [`Scraper`] is one task per pool. It keeps a schedule (`pace`), fetches metrics over reused connections with
//! limits on time, size and concurrency ([`attache_http_client`]), reads the few metric families that routing needs
//! ([`exposition`], [`engines`]), and sends `Scraped` and `Restarted` events. When a server fails, its last metrics
//! count until they are stale, and no other server is delayed.
//!
//! **Owns** metric names of each engine, the exposition parser, bearer tokens (`credentials`), lists of models
//! ([`models`]) and SLO profiles from files ([`slo_profiles`]).
//! **Called by** `app`, which starts one scraper for each pool, and by `live_check`, which reads pages once.
//! **Must not** decide what a metric means for routing, or write a snapshot: it sends events.
//!
//! Read first: `feed.rs`, `engines.rs`, `pace.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod credentials;
pub mod engines;
pub mod exposition;
pub mod feed;
pub mod models;
mod pace;
mod settings;
pub mod slo_profiles;
mod stats;

pub use credentials::BearerToken;
pub use feed::{Reach, Scraper};
pub use models::ModelFeed;
pub use settings::ScrapeSettings;
pub use stats::{ErrorReason, ScrapeStats};
