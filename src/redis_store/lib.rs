//! State that several Attaché processes share in Redis: quotas of tenants and models, AIBrix's user records, SLO
//! profiles.
//!
//! **Owns** the connection ([`redis_link`]), the counting scripts ([`quota_store`]), the reading of profiles
//! ([`redis_profiles`]), and what `attache check --live` asks ([`redis_probe`]).
//! **Called by** `ext_proc::redis_quotas` before and after requests, by `app`, which connects, and by `live_check`.
//! **Must not** decide what happens while Redis is unavailable: the caller does, by its configuration.
//!
//! Read first: `redis_link.rs`, `quota_store.rs`, `redis_profiles.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod quota_store;
pub mod redis_link;
pub mod redis_probe;
pub mod redis_profiles;
