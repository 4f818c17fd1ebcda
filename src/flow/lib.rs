//! Who goes next when a pool is full.
//!
//! ```text
//! request ─▶ band (its priority; a higher one always goes first)
//!              └▶ flow (its tenant; `fairness` says whose turn it is)
//!                   └▶ place in the flow's queue (`ordering`)
//! room    ─▶ saturation of the pool (`saturation`), compared with what the band may use (`ceiling`)
//! ```
//!
//! [`FlowControl`] is driven by events: a request that comes, an answer that ends or begins, a page of metrics, a client that leaves, a
//! moment that passes. Nothing polls. What was dispatched and is not in the ledger yet is counted here, so that no burst slips through
//! between two looks at the pool. Admitters turn requests away before they come here.
//!
//! Every policy is one file and one line in the [`registry`], named as GIE, llm-d and AIBrix name theirs.
//!
//! **Owns** queues, fairness between flows, order within a flow, saturation detectors, ceilings and admitters.
//! **Called by** `picker::queues` for real requests and by `replay` for simulated ones; `config` builds its settings.
//! **Must not** do I/O, wait, or ask for the time or for random numbers: both are arguments.
//!
//! Read first: `control.rs`, `registry.rs`, `saturation/backlog.rs`.

pub mod admitter;
pub mod asking;
mod band;
pub mod ceiling;
mod control;
pub mod drain;
pub mod fairness;
pub mod item;
pub mod ordering;
pub mod pace;
pub mod registry;
mod room;
pub mod running;
pub mod saturation;
pub mod settings;
mod slab;

pub use asking::Asking;
pub use control::FlowControl;
pub use item::{Arrival, Cause, Handle, Left, Load, Need, Passage, Refusal, Verdict, Way};
pub use room::SharedRoom;
pub use running::{EvictRunning, Seat};
pub use saturation::Gauge;
pub use settings::{BandSettings, Overflow, PoolFlow, Settings};

#[cfg(test)]
mod tests;
