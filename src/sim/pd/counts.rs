//! Counters of prefill and decode legs, shown at `/sim/pd` for tests of routers.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a prompt could not be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadError {
    /// No living server of the fleet has this engine id.
    UnknownEngine,
    /// The engine is not at this host and port.
    WrongAddress,
    /// It keeps nothing under this request id.
    UnknownRequest,
    /// It did, until the lease ended.
    LeaseExpired,
    /// The server keeps other blocks.
    UnknownBlocks,
    /// They hold other tokens than this prompt's.
    OtherTokens,
    /// They were gone before they had been read.
    Lost,
    /// The other leg did not come in time.
    NoBootstrap,
}

impl LoadError {
    const ALL: [(Self, &'static str); 8] = [
        (Self::UnknownEngine, "unknown_engine"),
        (Self::WrongAddress, "wrong_address"),
        (Self::UnknownRequest, "unknown_request"),
        (Self::LeaseExpired, "lease_expired"),
        (Self::UnknownBlocks, "unknown_blocks"),
        (Self::OtherTokens, "other_tokens"),
        (Self::Lost, "lost"),
        (Self::NoBootstrap, "no_bootstrap"),
    ];
}

/// Counters of one server since its start.
#[derive(Debug, Default)]
pub(crate) struct PeerCounts {
    /// Requests that carry no transfer parameters.
    pub(crate) whole: AtomicU64,
    pub(crate) prefills: AtomicU64,
    pub(crate) decodes: AtomicU64,
    /// Prefills that fetched the conversation's past from a decode server.
    pub(crate) pulls: AtomicU64,
    /// Blocks of other servers that were read to the end.
    pub(crate) transfers: AtomicU64,
    /// Blocks of other servers that were given back unread: the client had gone.
    pub(crate) abandoned: AtomicU64,
    /// Decode legs that had to compute the prompt, because parameters were missing or by policy.
    pub(crate) local_recomputes: AtomicU64,
    failed: [AtomicU64; LoadError::ALL.len()],
}

impl PeerCounts {
    pub(crate) fn add(count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn fail(&self, error: LoadError) {
        let failed = LoadError::ALL.iter().zip(&self.failed).find(|((kind, _), _)| *kind == error);
        if let Some((_, count)) = failed {
            Self::add(count);
        }
    }

    /// Number of failures by name of the failure.
    pub(crate) fn failed(&self) -> impl Iterator<Item = (&'static str, u64)> {
        LoadError::ALL.iter().zip(&self.failed).map(|((_, name), count)| (*name, count.load(Ordering::Relaxed)))
    }

    /// Number of failures of all kinds.
    pub(crate) fn failures(&self) -> u64 {
        self.failed().map(|(_, count)| count).sum()
    }

    /// Blocks that had gone before they had been read.
    pub(crate) fn lost(&self) -> u64 {
        let lost = LoadError::ALL.iter().zip(self.failed()).find(|((kind, _), _)| *kind == LoadError::Lost);
        lost.map_or(0, |(_, (_, count))| count)
    }

    /// Number of legs by name of the leg.
    pub(crate) fn legs(&self) -> [(&'static str, u64); 7] {
        [
            ("whole", &self.whole),
            ("prefills", &self.prefills),
            ("decodes", &self.decodes),
            ("pulls", &self.pulls),
            ("transfers", &self.transfers),
            ("abandoned", &self.abandoned),
            ("local_recomputes", &self.local_recomputes),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
    }
}
