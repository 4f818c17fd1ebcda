//! Discovery: finds the endpoints of pools, and turns events of all feeds into snapshots.
//!
//! Each source ([`static_source`], [`mod@file`], [`dns`], [`kube`]) is a task that sends
//! `PoolEvent::Endpoints` over the bounded channel of its pool. [`publish`] is the task at the other end,
//! the only one that writes the pool's snapshots.
//!
//! **Owns** the sources, InferencePools and rules for models ([`kube`]), and file watches
//! ([`watch`]).
//! **Called by** `app`, which starts the sources of each pool and watches files through it. `admin` shows its
//! counters.
//! **Must not** choose an endpoint, scrape it, or drop the last known endpoints after a failure.
//!
//! Read first: `publish.rs`, `static_source.rs`, `kube/mod.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod dns;
pub mod file;
pub mod kube;
pub mod publish;
pub mod static_source;
pub mod watch;
