//! What is in examples/kubernetes, without a cluster: kustomize and helm render it, and what comes out must be valid, agree with itself, and be
//! what the picker's own binary and the real Envoy accept.

mod agree;
#[allow(dead_code, unused_imports, reason = "shared with the tests of discovery, which use all of it")]
#[path = "../support/kube/mod.rs"]
mod api;
mod charts;
mod live;
mod pages;
mod picker;
mod render;
mod shape;

#[allow(dead_code, reason = "shared with the end-to-end tests, which use all of it")]
#[path = "../support/mod.rs"]
mod support;
