//! What every listener of the process shares: TLS, limits on connections, readiness, and the phases of shutdown.
//!
//! **Owns** certificates and client authentication ([`tls`]), open connections and their bytes ([`connections`]),
//! readiness and the gRPC health service ([`health`]), and the phases from SIGTERM to the end ([`shutdown`]).
//! **Called by** `server` (gRPC), `admin`, `kv_events` (memory limits of subscriptions) and `app`.
//! **Must not** know of requests, pools, endpoints or configuration files.
//!
//! Read first: `tls.rs`, `connections.rs`, `shutdown.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod connections;
pub mod health;
mod log_counter;
pub mod shutdown;
pub mod tls;
