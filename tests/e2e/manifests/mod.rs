//! The manifests in examples/kubernetes, without a cluster: kustomize and helm render them. The result must be valid
//! and consistent, and the picker's binary and the real Envoy must accept it.

mod agree;
mod charts;
mod idle;
mod inside_envoy;
pub(crate) mod live;
mod pages;
mod picker;
pub(crate) mod render;
mod replicas;
mod shape;
