//! Recordings of the inputs and results of decisions in a running Attaché, so that every decision can be repeated
//! exactly.
//!
//! | module | owns |
//! |---|---|
//! | [`mod@line`] | the format |
//! | `file` | creation of the file, which never replaces another file |
//! | [`tape`] | the file: one order of all changes, a writer thread, failures that never affect requests |
//! | [`booked`] | a request's booking, which records its changes |
//! | [`headers`] | the headers that a decision reads |
//! | [`kv`] | changes of what engines cache |
//!
//! Without `--record`, it costs one check of an `Option`.
//!
//! **Owns** the recording format, the file and its order.
//! **Called by** `picker` at each decision, by `discovery::publish` for each snapshot, by `kv_events`, and by `app`;
//! `replay` and `workload` read recordings.
//! **Must not** delay a request, or contain prompt text. A full disk ends the recording, and requests are still
//! served.
//!
//! Read first: `line.rs`, `tape.rs`, `booked.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod booked;
mod file;
pub mod headers;
pub mod kv;
pub mod line;
pub mod tape;

pub use booked::{Booked, RequestTape};
pub use kv::KvChange;
pub use line::{Decided, Ended, FORMAT, Header, Kept, Line, Looked, RecordedAgent, RequestLeg};
pub use tape::{DEFAULT_MAX_BYTES, KvTape, PoolTape, RecordSettings, Recorder, Turn};
