//! Flow control: queues requests while a pool is saturated, and decides which one is dispatched next.
//!
//! ```text
//! request ─▶ band (its priority; a higher one always goes first)
//!              └▶ flow (its tenant; `fairness` selects the flow that is next)
//!                   └▶ position in the flow's queue (`ordering`)
//! capacity ─▶ saturation of the pool (`saturation`), compared with the band's `ceiling`
//! ```
//!
//! [`FlowControl`] is driven by events: a request arrives, a response begins or ends, metrics are scraped, a client
//! disconnects, a timer fires. Nothing polls. Dispatched requests that are not in the ledger yet are counted here, so a
//! burst between two gauges of the pool does not overshoot. Admitters reject requests before they reach the queue.
//!
//! Each policy is one file and one line in the [`registry`]. Policies of GIE, llm-d and AIBrix keep their names.
//!
//! **Owns** queues, fairness between flows, order within a flow, saturation detectors, ceilings and admitters.
//! **Called by** `picker::queues` for real requests and by `replay` for simulated ones; `config` builds its settings.
//! **Must not** do I/O, wait, or ask for the time or for random numbers: both are arguments.
//!
//! Read first: `control.rs`, `registry.rs`, `saturation/backlog.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod admitter;
pub mod asking;
mod band;
mod capacity;
pub mod ceiling;
mod control;
pub mod drain;
pub mod fairness;
pub mod item;
pub mod ordering;
pub mod pace;
pub mod registry;
pub mod running;
pub mod saturation;
pub mod settings;
mod slab;

pub use asking::Asking;
pub use capacity::SharedCapacity;
pub use control::FlowControl;
pub use item::{Arrival, Cause, Handle, Left, Load, Need, Passage, Refusal, SharedFlow, Verdict, Way};
pub use running::{EvictRunning, Seat};
pub use saturation::Gauge;
pub use settings::{BandSettings, Overflow, PoolFlow, Queueing, Settings};

#[cfg(test)]
mod tests;
