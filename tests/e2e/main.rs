//! End-to-end tests: clients, the real Envoy, the `attache` binary and model servers, all over 127.0.0.1.

#[path = "../support/mod.rs"]
mod support;

#[path = "../support/kube/mod.rs"]
mod api;
#[path = "../attacks/mod.rs"]
mod attacks;
mod check_live;
mod choosing;
mod cli;
mod coming_from;
mod conformance;
mod connectors;
mod conversations;
mod deadlines;
mod disagg;
mod disagg_faults;
mod discovery;
mod faults;
mod fleet;
mod flow;
mod forms;
mod inputs;
mod inside;
mod istio;
mod keep_alive;
mod limits;
mod llm_d_files;
mod load;
mod logs;
mod manifests;
mod matrix;
mod models;
mod monitoring;
mod operation;
mod parity;
mod prefill_losses;
mod prefix;
mod profiles;
mod quickstart;
mod real_kubernetes;
mod reasons;
mod record;
mod refusals;
mod release;
mod replay_live;
mod replicas;
mod reservations;
mod routing;
mod secure;
mod sessions;
mod shipped;
mod sidecar;
mod status_page;
mod top;
mod traces;
mod traffic;
mod versions;
mod wire;
