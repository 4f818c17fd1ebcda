//! Recording what a running picker sees and decides, so that every decision can be made again, exactly.
//!
//! | module | owns |
//! |---|---|
//! | [`line`] | the format |
//! | [`tape`] | the file: one order of all changes, a thread that writes, an end that never hurts serving |
//! | [`booked`] | a request's bookings, which tell the tape what they change |
//! | [`headers`] | which headers a decision asks for |
//!
//! Without `--record` it costs one look at an `Option`.
//!
//! **Owns** the recording format, the file and its order.
//! **Called by** `ext_proc` at each decision, by the publishers of pools, and by `app`; `replay` reads recordings.
//! **Must not** delay a request: a full disk ends the recording, and serving goes on. It holds no prompt text.
//!
//! Read first: `line.rs`, `tape.rs`, `booked.rs`.

pub mod booked;
pub mod headers;
pub mod line;
pub mod tape;

pub use booked::Booked;
pub use line::{Decided, Ended, FORMAT, Header, Line, Looked};
pub use tape::{DEFAULT_MAX_BYTES, PoolTape, RecordSettings, Recorder, Turn};
