//! Attaché inside Envoy: a dynamic module with the decisions of the ext-proc service. Experimental.
//!
//! [`filter`] is the HTTP filter: it gives headers and body chunks to the same [`Exchange`](attache_ext_proc::Exchange)
//! that serves ext-proc, and applies its replies ([`replies`]) through [`Callbacks`](callbacks::Callbacks).
//! [`bootstrap`] is the bootstrap extension: readiness and shutdown. [`cluster`] gives Envoy the servers of a pool.
//! [`attempt`] is the upstream filter, from which the HTTP filter learns which servers failed before a retry. [`pickers`]
//! has the picker of each configuration file.
//!
//! **Owns** the library `libattache_envoy.so`, its settings in Envoy's configuration, and every `unsafe` block of the
//! program (`ffi.rs`).
//! **Called by** Envoy.
//! **Must not** let a panic reach Envoy, block a worker of Envoy, or hold a borrow over a callback that can end a
//! stream.
//!
//! Read first: `filter.rs`, `pickers.rs`, `ffi.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod attempt;
pub mod bootstrap;
pub mod callbacks;
pub mod cluster;
// Its functions call Envoy, so programs without Envoy can't be linked with it.
#[cfg(not(any(test, fuzzing)))]
mod ffi;
pub mod filter;
pub mod filters;
pub mod log;
pub mod messages;
pub mod pickers;
pub mod replies;
#[cfg(any(test, fuzzing))]
pub mod script;
pub mod settings;
pub mod stream;
