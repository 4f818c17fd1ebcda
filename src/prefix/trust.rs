//! How far the index's word about one KV cache may be believed.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// What the picker may make of what the index says about a holder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// Nothing was heard yet.
    #[default]
    Unknown,
    /// What was missed is being fetched.
    Syncing,
    /// Every event was heard since the engine started, or since it cleared its cache.
    Exact,
    /// Every event was heard as far back as the engine can replay, or since events were lost and as much is known again as before: what is
    /// known is held, but what it has held for longer is not known. What was learned by routing is added. Only a cleared cache, another
    /// process or a replay from the beginning makes it exact: how much is known says nothing about what is not.
    Incomplete,
    /// Events were lost: what is known may be much less than what is held. Approximate routing takes over.
    Suspect(Doubt),
}

/// Why a holder is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// The connection is broken, or is new and has carried nothing that shows what was missed.
    Interrupted,
    /// The engine had published before we came, and has no replay.
    JoinedLate,
    /// Events are missing, and there is no replay.
    Gap,
    /// Events are missing, and the replay does not answer.
    ReplayFailed,
    /// An event could not be read.
    Undecodable,
    /// Its blocks are not of the pool's size.
    BlockSize,
}

impl Doubt {
    /// All of them.
    pub const ALL: [Doubt; 6] =
        [Doubt::Interrupted, Doubt::JoinedLate, Doubt::Gap, Doubt::ReplayFailed, Doubt::Undecodable, Doubt::BlockSize];

    /// The name in logs and labels.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Doubt::Interrupted => "interrupted",
            Doubt::JoinedLate => "joined_late",
            Doubt::Gap => "gap",
            Doubt::ReplayFailed => "replay_failed",
            Doubt::Undecodable => "undecodable",
            Doubt::BlockSize => "block_size",
        }
    }
}

impl Trust {
    /// Whether what is known of the holder is held.
    #[must_use]
    pub fn is_certain(self) -> bool {
        matches!(self, Trust::Exact | Trust::Incomplete)
    }

    /// The name in logs and labels; a doubt goes by its own.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Trust::Unknown => "unknown",
            Trust::Syncing => "syncing",
            Trust::Exact => "exact",
            Trust::Incomplete => "incomplete",
            Trust::Suspect(doubt) => doubt.label(),
        }
    }

    fn to_bits(self) -> u8 {
        match self {
            Trust::Unknown => 0,
            Trust::Syncing => 1,
            Trust::Exact => 2,
            Trust::Incomplete => 3,
            Trust::Suspect(doubt) => 4 + doubt as u8,
        }
    }

    fn from_bits(bits: u8) -> Self {
        match bits {
            1 => Trust::Syncing,
            2 => Trust::Exact,
            3 => Trust::Incomplete,
            _ => bits
                .checked_sub(4)
                .and_then(|i| Doubt::ALL.get(usize::from(i)))
                .map_or(Trust::Unknown, |doubt| Trust::Suspect(*doubt)),
        }
    }
}

/// A [`Trust`] that one task writes and requests read.
#[derive(Debug, Default)]
pub struct TrustCell(AtomicU8);

impl TrustCell {
    /// The state of now.
    #[must_use]
    pub fn get(&self) -> Trust {
        Trust::from_bits(self.0.load(Relaxed))
    }

    /// Changes it; what it was before.
    pub fn set(&self, trust: Trust) -> Trust {
        Trust::from_bits(self.0.swap(trust.to_bits(), Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_keeps_every_state() {
        let cell = TrustCell::default();
        let mut before = cell.get();
        assert_eq!(before, Trust::Unknown);
        let doubts = Doubt::ALL.map(Trust::Suspect);
        let states = [Trust::Syncing, Trust::Exact, Trust::Incomplete, Trust::Unknown];
        let labels: std::collections::BTreeSet<_> = doubts.iter().chain(&states).map(|t| t.label()).collect();
        assert_eq!(labels.len(), doubts.len() + states.len());
        for state in doubts.into_iter().chain(states) {
            assert_eq!(cell.set(state), before);
            assert_eq!(cell.get(), state);
            before = state;
        }
    }
}
