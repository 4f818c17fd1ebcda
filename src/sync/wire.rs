//! What all messages have in common: version, size, digests. Pure.

use crate::generated::v1;
use crate::paths::mix;
use prost::Message as _;
use std::time::Duration;
use v1::message::Body;

/// Time between two heartbeats.
pub const HEARTBEAT_EVERY: Duration = Duration::from_millis(500);
/// Most senders with a full state.
pub(crate) const MAX_PEERS: usize = 64;
/// Messages above this size are dropped before they are read, bytes.
const MAX_MESSAGE: usize = 1 << 20;
/// What a stored response costs, bytes: a picker that announces too many would displace those of others.
const STORED_COST: usize = 4 << 10;
/// What the policy of a model costs, bytes: the map of all policies is copied.
const POLICY_COST: usize = 16 << 10;
/// What an event costs beside its bytes and those of its keys, bytes.
const EVENT_COST: usize = 128;
/// Version of the messages.
const VERSION: u32 = 1;

/// A message to the picker `to`, or to all.
pub(crate) fn encode(sender: u64, to: Option<u64>, body: Body) -> Vec<u8> {
    v1::Message { version: VERSION, sender, receiver: to.unwrap_or(0), body: Some(body) }.encode_to_vec()
}

/// Reads a message. `None` if it is too large, not readable, or of another version.
pub(crate) fn decode(message: &[u8]) -> Option<v1::Message> {
    let read = (message.len() <= MAX_MESSAGE).then(|| v1::Message::decode(message).ok()).flatten();
    read.filter(|read| read.version == VERSION && read.sender != 0)
}

/// What it costs to apply a message, as bytes: keys that bookings name by a prefix that the receiver knows, and events,
/// which have two bytes at least and many more when they are read.
pub(crate) fn cost(body: &Body) -> usize {
    let of = |booked: &v1::Booked| booked.blocks.as_ref().map_or(0, |blocks| blocks.base_blocks as usize * 8);
    let of_event = |event: &v1::Event| match &event.kind {
        Some(v1::event::Kind::Booked(booked)) => EVENT_COST + of(booked),
        Some(v1::event::Kind::Stored(_)) => STORED_COST,
        Some(v1::event::Kind::Policy(_)) => POLICY_COST,
        _ => EVENT_COST,
    };
    match body {
        Body::Batch(batch) => batch.events.iter().map(of_event).sum(),
        Body::Column(state) => state.requests.iter().map(|booked| EVENT_COST + of(booked)).sum(),
        _ => 0,
    }
}

/// Digest of one request in flight.
pub(crate) fn digest(request: u64, endpoint: u64, begun: bool) -> u64 {
    mix(request ^ mix(endpoint ^ u64::from(begun)))
}
