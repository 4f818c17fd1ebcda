//! Endpoints and model rules from the Kubernetes API: the pods of an `InferencePool` or of a label selector, and
//! the objects that define models.
//!
//! * `source` is the task of one pool. It applies updates of objects to [`state`] and [`rules`], and sends the results
//!   to the pool's writer and the router.
//! * `informer` sends the updates. It has one follower (`follow`: list, watch, retry) for each namespace, kind and
//!   selector, which all pools share.
//! * [`state`], [`rules`], [`table`] and [`objects`] (which parses objects) are pure, and exist
//!   without the feature `full` too.
//! * `finder` finds the `InferencePool`s that become pools at run time, by [`catalogue`].
//! * `lease` holds a Lease by the rules of [`election`], where one replica is the leader.
//! * `status` writes what `conditions` derives for objects; `reviews` asks who may see admin pages.
//!
//! The composition of the process starts the tasks.

pub mod catalogue;
#[cfg(feature = "full")]
pub mod client;
pub mod conditions;
pub mod election;
#[cfg(feature = "full")]
pub mod finder;
#[cfg(feature = "full")]
pub mod follow;
#[cfg(feature = "full")]
pub mod informer;
#[cfg(feature = "full")]
pub mod lease;
pub mod objects;
#[cfg(feature = "full")]
pub mod reviews;
pub mod rules;
#[cfg(feature = "full")]
pub mod source;
pub mod state;
mod stats;
#[cfg(feature = "full")]
pub mod status;
pub mod table;

pub use stats::KubeStats;
