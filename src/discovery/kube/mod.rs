//! Endpoints and rules from the Kubernetes API: the pods of an `InferencePool` or of a label selector, and what objects beside them say of models.
//!
//! `source` is the task of one pool. It puts what it is told of each kind of object into [`state`] and [`rules`], and tells the pool's writer and the
//! router what came of it. `informer` tells: it has one follower (`follow`: list, watch, repetition) for each namespace, kind and selector, which
//! all pools share. [`state`] and [`rules`], [`table`] beneath them and [`objects`], which reads what objects say, are pure, and are there without
//! the feature `kube` too. `finder` tells which `InferencePool`s become pools while the process runs, by [`catalogue`]. `lease` holds a Lease by the rules of [`election`], where one replica
//! is to lead; `status` writes what `conditions` says of objects while it does; `reviews` asks who may see the pages.
//!
//! Started by the composition of the process.

pub mod catalogue;
#[cfg(feature = "kube")]
pub mod client;
pub mod conditions;
pub mod election;
#[cfg(feature = "kube")]
pub mod finder;
#[cfg(feature = "kube")]
pub mod follow;
#[cfg(feature = "kube")]
pub mod informer;
#[cfg(feature = "kube")]
pub mod lease;
pub mod objects;
#[cfg(feature = "kube")]
pub mod reviews;
pub mod rules;
#[cfg(feature = "kube")]
pub mod source;
pub mod state;
mod stats;
#[cfg(feature = "kube")]
pub mod status;
pub mod table;

pub use stats::KubeStats;
