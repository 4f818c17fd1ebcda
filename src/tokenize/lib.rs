//! Requests the tokens of a prompt from model servers, which have the tokenizer and the chat template, so the tokens
//! are exact.
//!
//! [`RemotePool`] exists once per pool of endpoints. A decision requests the tokens of a prompt and waits for a short
//! time; the result is cached, so that an equal prompt costs no call. Each model has a circuit breaker (`models`):
//! when its tokenizer fails, requests get an error at once, until a probe succeeds. There is no fallback to another
//! tokenizer: its tokens would be keys of another hash space, which match nothing or the wrong blocks.
//!
//! | module | owns |
//! |---|---|
//! | `settings` | settings with their defaults |
//! | `request` | conversion of a client's body to a tokenizer request |
//! | `client` | one call: limited in time and size |
//! | `list` | the token ids in a response |
//! | `files` | the files of a model's own tokenizer |
//! | `models` | models in use, and their circuit breakers; no I/O |
//! | `remote` | the combination of all of it |
//! | `port` | the implementation of the trait through which the picker calls it |
//! | [`stats`] | counters |
//!
//! **Owns** the calls to tokenizers, their cache, the circuit breaker of each model, and the reading of tokenizer files.
//! **Called by** `picker` (as [`RemoteTokens`](attache_prompt::remote::RemoteTokens)) for each request of a pool with a
//! `remote` tokenizer; `app` starts it, and reads tokenizer files. `live_check` compares both.
//! **Must not** decide where a request goes, or wait without a limit.
//!
//! Read first: `lib.rs`, `remote.rs`, `models.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod client;
mod errors;
mod files;
mod list;
mod models;
mod port;
mod remote;
mod request;
mod settings;
pub mod stats;

pub use errors::{SetupError, Unavailable};
pub use files::{FilesError, ModelFiles};
pub use list::TokenListError;
pub use remote::{CallError, RemotePool};
pub use settings::{RemoteApi, RemoteSettings};
pub use stats::{Reason, RemoteStats};
