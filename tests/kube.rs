//! Discovery through Kubernetes: the picker's own binary against an API server over real HTTP. What it picks is asked as Envoy asks.

#![cfg(feature = "kube")]

#[path = "support/mod.rs"]
#[allow(dead_code, reason = "shared with the end-to-end tests, which use all of it")]
mod support;

#[path = "support/kube/mod.rs"]
mod api;
#[path = "kube/churn.rs"]
mod churn;
#[path = "kube/faults.rs"]
mod faults;
#[path = "kube/leases.rs"]
mod leases;
#[path = "kube/measure.rs"]
mod measure;
#[path = "kube/members.rs"]
mod members;
#[path = "kube/picks.rs"]
mod picks;
#[path = "kube/recording.rs"]
mod recording;
#[path = "kube/rules.rs"]
mod rules;
