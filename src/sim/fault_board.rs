//! The faults of one running server: set by `POST /sim/faults`, read by all that can go wrong.

use crate::faults::Faults;
use tokio::sync::watch;

/// Tells who waits for it of every change.
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

    /// To be told of changes.
    pub(super) fn watch(&self) -> watch::Receiver<Faults> {
        self.faults.subscribe()
    }

    /// The status with which the request at hand fails, if it does; counts it.
    pub(super) fn take_failure(&self) -> Option<u16> {
        let mut status = None;
        self.faults.send_if_modified(|faults| {
            status = faults.take_failure();
            status.is_some()
        });
        status
    }

    /// Whether the message of KV events at hand is lost; counts it.
    #[cfg(feature = "zmq")]
    pub(super) fn take_kv_drop(&self) -> bool {
        self.faults.send_if_modified(|faults| faults.kv_events.take_drop())
    }
}
