//! HTTP/2 streams of a listener: how many are open, and how many of these have sent no message yet.
//!
//! A stream costs its opener 14 bytes and Attaché some kilobytes. Three limits apply to all connections together:
//!
//! * Open streams. One peer may have three quarters of them, so that one pod can't take those of all gateways.
//! * Silent streams, which have sent no message.
//! * The sum of the most streams that each connection had open at once. h2 keeps the memory of so many streams until
//!   the connection closes.
//!
//! Beyond the last two, the peer with most loses the connection with most.

use super::{Closed, ConnectionEntry};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::time::Instant;

/// The sum of the most streams that each connection had open at once, as a multiple of the open streams. Connections
/// of gateways have their peaks at different times.
const PEAKS: usize = 8;

/// An open stream of a connection.
#[derive(Debug)]
pub struct OpenStream {
    entry: Arc<ConnectionEntry>,
    silent: bool,
}

impl OpenStream {
    pub(super) fn of(entry: Arc<ConnectionEntry>) -> Option<Self> {
        let of = entry.of.clone();
        let most = of.limits.streams;
        let (all, own) = (of.streams.fetch_add(1, Relaxed), entry.of_peer.fetch_add(1, Relaxed));
        let open = entry.open.fetch_add(1, Relaxed) + 1;
        let stream = Self { entry, silent: false };
        if open > stream.entry.peak.load(Relaxed) {
            stream.raise_peak(open);
        }
        if all < most && own < share(most) {
            return Some(stream);
        }
        // Dropping the stream takes back what was added.
        if let Some(skipped) = of.refused.count(Instant::now()) {
            tracing::warn!(
                peer = %stream.entry.peer,
                streams_of_peer = own,
                streams = all,
                limit = most,
                skipped,
                "stream refused: too many are open (`limits.maxStreams`, of which one address may have three quarters)"
            );
        }
        None
    }

    /// Records that the stream has sent no message so far. That may close the connection.
    pub fn silent(&mut self) {
        if std::mem::replace(&mut self.silent, true) {
            return;
        }
        let (entry, of) = (&self.entry, &self.entry.of);
        entry.silent.fetch_add(1, Relaxed);
        if of.silent.fetch_add(1, Relaxed) >= of.limits.silent_streams {
            let mut table = of.table.lock();
            let excess = of.silent.load(Relaxed).saturating_sub(of.limits.silent_streams);
            let silent = |entry: &ConnectionEntry| entry.silent.load(Relaxed);
            table.close_largest(excess, None, silent, || of.count(Closed::Streams));
        }
    }

    /// Records that the stream has sent bytes of a message.
    pub fn heard(&mut self) {
        if std::mem::take(&mut self.silent) {
            self.entry.silent.fetch_sub(1, Relaxed);
            self.entry.of.silent.fetch_sub(1, Relaxed);
        }
    }

    /// The connection has more streams open than ever before.
    fn raise_peak(&self, open: usize) {
        let (entry, of) = (&self.entry, &self.entry.of);
        let more = open.saturating_sub(entry.peak.fetch_max(open, Relaxed));
        let (peaks, most) = (of.peaks.fetch_add(more, Relaxed) + more, of.limits.streams.saturating_mul(PEAKS));
        if peaks > most {
            let mut table = of.table.lock();
            let excess = of.peaks.load(Relaxed).saturating_sub(most);
            let peak = |entry: &ConnectionEntry| entry.peak.load(Relaxed);
            table.close_largest(excess, None, peak, || of.count(Closed::Streams));
        }
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let (entry, of) = (&self.entry, &self.entry.of);
        if self.silent {
            entry.silent.fetch_sub(1, Relaxed);
            of.silent.fetch_sub(1, Relaxed);
        }
        entry.open.fetch_sub(1, Relaxed);
        entry.of_peer.fetch_sub(1, Relaxed);
        of.streams.fetch_sub(1, Relaxed);
    }
}

/// The streams that one peer may have open, of `all`: three quarters, and at least one.
fn share(all: usize) -> usize {
    (all - all / 4).max(1)
}
