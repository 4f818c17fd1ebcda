//! Parts of the end-to-end tests: processes (Envoy, the picker, simulated servers), an echo server, an HTTP client,
//! and bodies with known bytes.

pub(crate) mod attache;
pub(crate) mod body;
pub(crate) mod client;
#[allow(dead_code, reason = "only the end-to-end tests have one")]
pub(crate) mod collector;
pub(crate) mod echo;
pub(crate) mod envoy;
#[allow(dead_code, reason = "only the end-to-end tests have one")]
pub(crate) mod gateway;
pub(crate) mod grpc;
#[allow(dead_code, reason = "only the end-to-end tests have one")]
pub(crate) mod inside;
pub(crate) mod modes;
#[allow(dead_code, reason = "only the end-to-end tests have one")]
pub(crate) mod nats;
#[path = "../../benches/support/noop.rs"]
pub(crate) mod noop;
#[allow(dead_code, reason = "only the end-to-end tests have certificates")]
pub(crate) mod pki;
pub(crate) mod process;
#[allow(dead_code, reason = "only the end-to-end tests have one")]
pub(crate) mod prometheus;
#[allow(dead_code, reason = "only the end-to-end tests have one")]
pub(crate) mod redis;
#[allow(dead_code, reason = "only the end-to-end tests have one")]
pub(crate) mod sidecar;
pub(crate) mod sim;
#[allow(dead_code, reason = "only the end-to-end tests have one")]
pub(crate) mod terminal;

/// The error of every operation in a test.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;
