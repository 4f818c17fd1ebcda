//! KV events: what engines publish about their caches, brought into the prefix index.
//!
//! [`Feed`] is one task per pool that follows discovery; each endpoint's data-parallel rank has a task of its own ([`lane`]) that reads
//! the live stream ([`zmtp`]), has what it missed replayed ([`replay`]), keeps the sequence ([`cursor`]) and puts batches into the
//! index ([`apply`]). With central bind the engines connect to one socket instead ([`central`]). How far each cache may be believed is
//! an atomic that requests read ([`Residents`], [`Trust`]); it changes with one log line.
//!
//! Started by the composition of the process. May import: `connections`, `prefix`, `pool`, `clock`, `rng`, `ids`,
//! tokio.

mod apply;
mod central;
mod cursor;
mod feed;
mod lane;
mod orphans;
mod replay;
mod size;
pub mod stats;
pub mod subscription;
mod zmtp;

pub use crate::prefix::residents::{Cache, Resident, Residents};
pub use crate::prefix::trust::{Doubt, Trust, TrustCell};
pub use feed::{Destination, Feed};
pub use stats::{Count, KvEventStats};
pub use subscription::{Bounds, Source, Subscription, Timing};
