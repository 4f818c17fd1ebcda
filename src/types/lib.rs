//! Types that the crates of Attaché share: request errors, ids, time, limits, random numbers, units, plugin parameters.
//!
//! **Owns** the list of rejection reasons ([`error`]), the two places where real time enters ([`clock`]), the limits of
//! a request ([`limits`]), and how configuration keys ([`declare`]) and parameters of plugins ([`parameter`]) are
//! declared.
//! **Called by** every crate that handles requests, endpoints or time.
//! **Must not** use another crate of the workspace, open files or sockets, or know of pools and requests.
//!
//! Read first: `error.rs`, `clock.rs`, `limits.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod buffered;
pub mod certificate;
pub mod clock;
pub mod declare;
pub mod error;
pub mod ids;
pub mod labels;
pub mod limits;
pub mod log_filter;
pub mod param_error;
pub mod parameter;
pub mod params;
pub mod program;
pub mod rng;
pub mod spelling;
pub mod throttle;
pub mod units;
