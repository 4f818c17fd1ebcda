//! What is known about the model servers: who they are, what they report, how they fare.
//!
//! One [`PoolSnapshot`] per pool is the one truth: identity, metrics and flags in a single `Arc` with a generation. It is written
//! by one task ([`writer::PoolWriter`] holds the rules) and read without locks. What the picker itself causes lives beside it as
//! atomics that every snapshot shares: the [`ledger`] (requests in flight), the passive [`health`] and the learned [`speed`]; and, behind a lock
//! that only pools with ranks take, what is under way on each of its [`ranks`].
//!
//! May import: `ids`, `clock`. No I/O.

pub mod endpoint;
pub mod health;
pub mod ledger;
pub mod metrics;
pub mod models;
pub mod place;
pub mod ranks;
pub mod rates;
pub mod role;
pub mod slo_profile;
pub mod snapshot;
pub mod speed;
pub mod writer;

pub use endpoint::{Endpoint, EndpointSpec, Engine, Live, MetricsSource};
pub use metrics::{EndpointMetrics, LoraState, Reported};
pub use models::{ModelList, ModelStore};
pub use rates::{Counter, Counters, Histogram, Means, RateWindow, Rates};
pub use role::Roles;
pub use snapshot::{EndpointState, PoolSnapshot, Published, SnapshotStore};
pub use writer::{PoolEvent, PoolWriter};
