//! The model servers of a pool: identity, reported metrics, requests in flight, health and learned speed.
//!
//! One [`PoolSnapshot`] per pool holds identity, metrics and flags in a single `Arc` with a generation. One task writes
//! it ([`writer::PoolWriter`] holds the rules), and readers take no lock. What the picker itself causes is kept beside
//! it in atomics that every snapshot shares. Only pools with ranks take a lock for what is in flight on each rank.
//!
//! **Owns** `snapshot`, [`ledger`], [`health`], [`speed`], [`ranks`], SLO profiles ([`slo_profile`]) and the
//! settings of discovery ([`source`]).
//! **Called by** `scheduling` and `picker` for each request, by the feeds, which send [`PoolEvent`]s, and by
//! `discovery`, which writes the snapshots.
//! **Must not** do I/O, ask for the time, or choose an endpoint.
//!
//! Read first: `snapshot.rs`, `ledger.rs`, `health.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod endpoint;
pub mod health;
pub mod ledger;
pub mod metrics;
pub mod models;
pub mod place;
pub mod ports;
pub mod ranks;
pub mod rates;
pub mod role;
pub mod slo_profile;
mod snapshot;
pub mod source;
pub mod speed;
pub mod writer;

pub use endpoint::{Endpoint, EndpointSpec, Engine, Live, MetricsSource, Picks};
pub use metrics::{EndpointMetrics, LoraState, Reported};
pub use models::{ModelList, ModelStore};
pub use rates::{Counter, Counters, Histogram, Means, RateWindow, Rates};
pub use role::Roles;
pub use snapshot::{EndpointState, PoolSnapshot, Published, SnapshotStore};
pub use writer::{PoolEvent, PoolWriter};
