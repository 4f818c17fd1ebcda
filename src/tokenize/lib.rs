//! Asking model servers for the tokens of a prompt: they have the tokenizer and the chat template, so what they say is exact.
//!
//! [`RemotePool`] is one per pool of endpoints. A decision asks it for the tokens of a request and waits a short while; the answer is
//! kept, so that an equal prompt costs no call. Each model has a circuit ([`models`]): when its tokenizer fails, requests are told so at
//! once, until a probe succeeds. There are tokens, or a reason why there are none, and never another tokenizer's tokens: those would be
//! keys of another hash space, which match nothing or, worse, something else.
//!
//! | module | owns |
//! |---|---|
//! | [`settings`] | what is configurable, with the defaults |
//! | `request` | from a client's body to what the tokenizer is asked |
//! | `client` | one call: bounded in time and size |
//! | `list` | the token ids in an answer |
//! | [`models`] | which models are in use and whose tokenizer fails; pure |
//! | `remote` | all of it together |
//! | `port` | the same as the picker knows it |
//! | [`stats`] | counters |
//!
//!
//! **Owns** the calls to tokenizers, their cache, and the circuit of each model.
//! **Called by** `picker` (as [`RemoteTokens`](attache_prompt::remote::RemoteTokens)) for each request of a pool with a `remote` tokenizer; `app` starts it.
//! **Must not** decide where a request goes, or wait without a limit.
//!
//! Read first: `lib.rs`, `remote.rs`, `models.rs`.

mod client;
mod list;
pub mod models;
mod port;
mod remote;
mod request;
pub mod settings;
pub mod stats;

pub use list::TokenListError;
pub use remote::{Ask, CallError, RemotePool, SetupError, Unavailable};
pub use settings::{RemoteApi, RemoteSettings};
pub use stats::{Reason, RemoteStats};
