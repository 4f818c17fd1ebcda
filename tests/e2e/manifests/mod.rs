//! What is in examples/kubernetes, without a cluster: kustomize and helm render it. The result must be valid, agree
//! with itself, and be accepted by the picker's own binary and the real Envoy.

mod agree;
mod charts;
mod live;
mod pages;
mod picker;
mod render;
mod shape;
