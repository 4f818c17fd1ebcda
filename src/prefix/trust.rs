//! How far the index's entries for one KV cache can be trusted.

use attache_types::labels::Listed;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

attache_types::labels! {
    /// How a decision may use the index's entries for a holder.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Trust {
        /// No event was received yet.
        #[default]
        Unknown => "unknown",
        /// Missed events are being fetched.
        Syncing => "syncing",
        /// All events were received since the engine started, or since it cleared its cache.
        Exact => "exact",
        /// All events were received as far back as the engine can replay, or since events were lost and the index has
        /// refilled. What the index has is really held; older blocks may be missing, so estimated blocks are added. Only
        /// a cleared cache, another process or a replay from the first event makes it exact.
        Incomplete => "incomplete",
        /// All events were received, but blocks were reported again without an origin: as further copies, or because a
        /// request used them again. The index may list some of them after the engine has dropped them.
        Uncounted => "uncounted",
        ;
        /// Events were lost, so the index may lack most of what is held. Routing uses estimates instead.
        Suspect(Doubt),
    }
}

attache_types::labels! {
    /// How far routing uses the KV events of an endpoint, the best first. The status page, the live check and the
    /// alerts judge an endpoint by it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum EventUse {
        /// Events alone say what is cached: nothing is wrong.
        Full => "full",
        /// Estimates count until the first events or a running replay have arrived: nothing is known to be wrong.
        Pending => "pending",
        /// Events count together with estimates, because older blocks may be missing.
        Partial => "partial",
        /// Estimates alone count until the cause is removed.
        Unused => "unused",
    }
}

attache_types::labels! {
    /// The reason for which a holder is not trusted.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Doubt {
        /// The connection is broken, or it is new and no message has shown yet what was missed.
        Interrupted => "interrupted",
        /// The engine had published events before Attaché connected, and it has no replay.
        JoinedLate => "joined_late",
        /// Events are missing, and the engine has no replay.
        Gap => "gap",
        /// Events are missing, and the replay request failed.
        ReplayFailed => "replay_failed",
        /// An event could not be decoded.
        Undecodable => "undecodable",
        /// The events' blocks do not have the pool's block size.
        BlockSize => "block_size",
        /// The ports of the endpoint's events are no ports, or shared, so its events are not read.
        Ports => "ports",
    }
}

impl Trust {
    /// Whether everything that the index has of the holder is really held, except for blocks whose copies are not
    /// counted.
    #[must_use]
    pub fn is_certain(self) -> bool {
        matches!(self, Trust::Exact | Trust::Incomplete | Trust::Uncounted)
    }

    /// Whether the index has everything that the holder has.
    #[must_use]
    pub fn is_complete(self) -> bool {
        matches!(self, Trust::Exact | Trust::Uncounted)
    }

    /// How far routing uses the events of a holder in this state.
    #[must_use]
    pub fn event_use(self) -> EventUse {
        match self {
            Trust::Exact | Trust::Uncounted => EventUse::Full,
            Trust::Unknown | Trust::Syncing => EventUse::Pending,
            Trust::Incomplete => EventUse::Partial,
            Trust::Suspect(_) => EventUse::Unused,
        }
    }

    /// Returns the state with this name; `None` for a name of another version.
    #[must_use]
    pub fn with_label(label: &str) -> Option<Self> {
        Self::values().find(|trust| trust.label() == label)
    }

    fn to_bits(self) -> u8 {
        match self {
            Trust::Unknown => 0,
            Trust::Syncing => 1,
            Trust::Exact => 2,
            Trust::Incomplete => 3,
            Trust::Uncounted => 4,
            Trust::Suspect(doubt) => 5 + doubt as u8,
        }
    }

    fn from_bits(bits: u8) -> Self {
        match bits {
            1 => Trust::Syncing,
            2 => Trust::Exact,
            3 => Trust::Incomplete,
            4 => Trust::Uncounted,
            _ => bits
                .checked_sub(5)
                .and_then(|i| Doubt::ALL.get(usize::from(i)))
                .map_or(Trust::Unknown, |doubt| Trust::Suspect(*doubt)),
        }
    }
}

/// A [`Trust`] that one task writes and requests read, and the number of events that came.
#[derive(Debug, Default)]
pub struct TrustCell {
    trust: AtomicU8,
    frames: AtomicU64,
}

impl TrustCell {
    /// Returns the current state.
    #[must_use]
    pub fn get(&self) -> Trust {
        Trust::from_bits(self.trust.load(Relaxed))
    }

    /// Changes the state and returns the previous one.
    pub fn set(&self, trust: Trust) -> Trust {
        Trust::from_bits(self.trust.swap(trust.to_bits(), Relaxed))
    }

    /// Counts a message with events.
    pub fn heard(&self) {
        self.frames.fetch_add(1, Relaxed);
    }

    /// Returns the number of messages with events since the endpoint is known.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_keeps_every_state() {
        let cell = TrustCell::default();
        let mut before = cell.get();
        assert_eq!(before, Trust::Unknown);
        for state in Trust::values().chain([Trust::Unknown]) {
            assert_eq!(Trust::with_label(state.label()), Some(state), "two states have the same label");
            assert_eq!(cell.set(state), before);
            assert_eq!(cell.get(), state);
            before = state;
        }
    }

    #[test]
    fn event_use_says_what_routing_does() {
        for trust in Trust::values() {
            let (full, partial) = (trust.is_complete(), trust.is_certain() && !trust.is_complete());
            assert_eq!(trust.event_use() == EventUse::Full, full, "{trust:?}");
            assert_eq!(trust.event_use() == EventUse::Partial, partial, "{trust:?}");
        }
    }
}
