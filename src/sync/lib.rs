//! State that several pickers share over a message bus: requests in flight, prompts and lost caches.
//!
//! Each picker sends what it books on endpoints, and books what its peers send on its own view of the same endpoints
//! ([`attache_scheduling::Booking`]). So ledgers, expected work, learned speeds, speculative entries and the prefix
//! index of all pickers agree, and the code that decides does not know that peers exist.
//!
//! | what | rule |
//! |---|---|
//! | requests in flight | Each picker writes only its own state. A receiver applies each batch once. Heartbeats find gaps. |
//! | prompts | They belong to requests in flight, and stay in the index when these end. Applying one twice has no effect. |
//! | lost caches | Announced once by each picker; a receiver drops what it has recorded for the endpoint. |
//! | prefix index | A picker that joins pulls the index of one peer in chunks, and of another one on failure. |
//! | records of strategies | They are part of bookings: prefixes of `prefix-affinity`, charges of `vtc-basic` (`records.rs`). |
//! | service of flows | Each picker sends the tokens of requests of queues that have ended. |
//! | stored responses | Each picker sends the endpoints of those that it sees. |
//! | ejected endpoints | Named in heartbeats. A receiver ejects such an endpoint when it can't connect to it either. |
//! | pressure of models | Each picker counts its own diversions; the largest number of each counts (`pressure.rs`). |
//! | policies of models | Changes by an admin API are sent to all; the last change of a model counts (`policies.rs`). |
//! | decisions at one moment | Each picker assumes those of the pickers before it in their order (`unknown_bookings.rs`). |
//! | silent pickers | After [`SILENT_AFTER`], a receiver drops the requests of a picker. Its heartbeat brings them back. |
//!
//! **Owns** the messages of `proto/attache/sync/v1`, the own state ([`Replica`]) and those of the peers.
//! **Called by** `record`, which reports bookings, by `picker` at each decision, by the transport, and by `replay`.
//! **Must not** do I/O, ask for the time, or choose an endpoint.
//!
//! Read first: `replica.rs`, `peer.rs`, `paths.rs`, `joining.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod bus;
mod generated;
mod identity;
mod joining;
mod own;
mod paths;
mod peer;
mod policies;
mod pools;
mod pressure;
mod rate;
mod received;
mod records;
mod remote_request;
mod replica;
mod seal;
mod serving;
mod snapshot;
mod stats;
mod transfer;
mod unknown_bookings;
mod wire;

pub use bus::{MemoryBus, MemoryBusSettings, Outbox};
pub use identity::{is_sender_of, sender_of, token_of};
pub use joining::{SnapshotProgress, SnapshotState};
pub use own::{BookedBlocks, OwnBooking};
pub use peer::SILENT_AFTER;
pub use pools::{CacheLossSink, EndpointKey, PoolView};
pub use pressure::{ModelCount, PRESSURE_WINDOW, SharedPressure};
pub use records::{OwnRecord, PeerRecord, QueueFlows, ServedFlow, Sessions, StoredResponses, StrategyRecords};
pub use replica::{PeerStatus, Replica, ReplicaSettings, SharedBooking};
pub use stats::SyncStats;
pub use wire::HEARTBEAT_EVERY;

#[cfg(test)]
mod tests;
