//! Discovery through Kubernetes: the picker's own binary against an API server over real HTTP. What it picks is asked as Envoy asks.

#![cfg(feature = "kube")]

#[path = "support/mod.rs"]
#[allow(dead_code, reason = "shared with the end-to-end tests, which use all of it")]
mod support;

#[path = "support/kube/mod.rs"]
#[allow(dead_code, reason = "shared with the bench, which asks for more")]
mod api;
use api::picks;
#[path = "kube/churn.rs"]
mod churn;
#[path = "kube/faults.rs"]
mod faults;
#[path = "kube/leases.rs"]
mod leases;
#[path = "kube/members.rs"]
mod members;
#[path = "kube/models.rs"]
mod models;
#[path = "kube/pools.rs"]
mod pools;
#[path = "kube/recording.rs"]
mod recording;
#[path = "kube/reviews.rs"]
mod reviews;
#[path = "kube/rules.rs"]
mod rules;
#[path = "kube/status.rs"]
mod status;
