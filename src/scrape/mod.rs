//! Scraping: asks every model server for its metrics and tells the pool's writer what they say.
//!
//! [`Scraper`] is one task per pool: it keeps a timetable ([`pace`]), fetches pages over reused connections with bounded time, size
//! and concurrency ([`fetch`]), shows them the token that they ask for ([`credentials`]), reads the few families that routing needs ([`exposition`], [`engines`]) and sends `Scraped` and
//! `Restarted` events. [`ModelFeed`] asks them what they serve, where the picker is to tell clients ([`models`]). It counts what it did in [`ScrapeStats`], which telemetry reads. A server that fails keeps its last page until
//! that is stale; the ledger decides from then on, and no other server's turn is delayed.
//!
//! [`slo_profiles`] and `redis_profiles` read what servers were measured to do beforehand.
//!
//! Started by the composition of the process. May import: `pool`, `scheduling`, `config`, `clock`, `rng`, `ids`, `redis_link`, tokio, reqwest.

pub mod credentials;
pub mod engines;
pub mod exposition;
pub mod feed;
pub mod fetch;
pub mod models;
pub mod pace;
#[cfg(feature = "redis")]
pub mod redis_profiles;
pub mod slo_profiles;
pub mod stats;

pub use feed::Scraper;
pub use models::ModelFeed;
pub use stats::{ErrorReason, ScrapeStats};
