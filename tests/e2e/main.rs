//! End to end: clients, the real Envoy, the picker's own binary and servers, all over 127.0.0.1.

#[path = "../support/mod.rs"]
mod support;

mod choosing;
mod disagg;
mod faults;
mod fleet;
mod flow;
mod inputs;
mod load;
mod matrix;
mod operation;
mod prefix;
mod record;
mod refusals;
mod replay_live;
mod routing;
mod secure;
mod shipped;
#[cfg(feature = "otlp")]
mod traces;
mod traffic;
mod wire;
