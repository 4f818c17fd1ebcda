//! Discovery: where endpoints come from, and the task that turns what feeds say into snapshots.
//!
//! Each source ([`static_source`], [`file`], [`dns`], [`kube`]) is a task that sends `PoolEvent::Endpoints` over the pool's bounded channel; [`publish`]
//! is the task at the other end, the only one that writes the pool's snapshots. [`watch`] tells when a file has changed, for whoever
//! reads files again: the configuration and the TLS pair.
//!
//! Started by the composition of the process. May import: `pool`, `config`, `clock`, `rng`, `scheduling`'s router and selectors, tokio, notify, kube.

pub mod dns;
pub mod file;
pub mod kube;
pub mod publish;
pub mod static_source;
pub mod watch;
