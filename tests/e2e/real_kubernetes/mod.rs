//! The charts and manifests against a real kube-apiserver with the real CustomResourceDefinitions: strict validation of
//! all fields, the rights of the chart's service account, and requests through real Envoy.
//!
//! There is no kubelet: a test creates pods with their status, and starts the picker with the arguments of the
//! Deployment as the API server has it.

mod charts;
pub(crate) mod cluster;
mod manifests;
