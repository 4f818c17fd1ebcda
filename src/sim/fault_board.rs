//! The faults of one running server: set by `POST /sim/faults`, read by all that can go wrong.

use crate::faults::Faults;
use tokio::sync::watch;

/// Notifies its watchers of every change.
#[derive(Debug)]
pub(super) struct FaultBoard {
    faults: watch::Sender<Faults>,
}

impl FaultBoard {
    pub(super) fn new(faults: Faults) -> Self {
        Self { faults: watch::Sender::new(faults) }
    }

    pub(super) fn current(&self) -> Faults {
        self.faults.borrow().clone()
    }

    pub(super) fn replace(&self, faults: Faults) {
        self.faults.send_replace(faults);
    }

    /// A receiver that sees every later change.
    pub(super) fn watch(&self) -> watch::Receiver<Faults> {
        self.faults.subscribe()
    }

    /// Status with which this request fails; `None` when it does not. Counts the failure.
    pub(super) fn take_failure(&self) -> Option<u16> {
        let mut status = None;
        self.faults.send_if_modified(|faults| {
            status = faults.take_failure();
            status.is_some()
        });
        status
    }

    /// Whether this message of KV events is dropped. Counts the drop.
    #[cfg(feature = "full")]
    pub(super) fn take_kv_drop(&self) -> bool {
        self.faults.send_if_modified(|faults| faults.kv_events.take_drop())
    }
}
