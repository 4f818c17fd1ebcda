//! KV events: what engines publish about their caches, written into the prefix index.
//!
//! [`Feed`] is one task per pool that follows discovery. Each data-parallel rank of an endpoint has its own task: it
//! reads the live stream, requests replay of missed batches, checks the sequence and writes batches into the index.
//! With central bind, the engines connect to one socket instead. How far a cache is trusted is an atomic that requests
//! read ([`Residents`], [`Trust`]); each change is one log line.
//!
//! **Owns** subscriptions and their bounds ([`subscription`]), the ZMTP connection, sequence numbers and replay.
//! **Called by** `app`, which starts one feed for each pool with KV events.
//! **Must not** decide where a request goes, or keep block keys of its own.
//!
//! Read first: `feed.rs`, `lane.rs`, `cursor.rs` (what happens after a gap).

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod apply;
mod central;
mod cursor;
mod feed;
mod lane;
mod orphans;
pub mod probe;
mod replay;
mod size;
mod stats;
pub mod subscription;
mod uncounted;
mod zmtp;

pub use attache_prefix::residents::{Cache, Resident, Residents};
pub use attache_prefix::trust::{Doubt, EventUse, Trust, TrustCell};
pub use feed::{Destination, Feed};
pub use stats::{Count, KvEventStats};
pub use subscription::{MemoryLimits, Source, Subscription, Timing};
