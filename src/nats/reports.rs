//! What happens to the connection, as log lines of a bounded number and as [`NatsStats`].

use crate::NatsStats;
use async_nats::Event;
use attache_types::clock::{Clock, Timestamp};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Equal lines are counted for this long.
const WINDOW: Duration = Duration::from_secs(60);
/// Most equal lines about an error in a window. The client tries to connect about every second.
const SAME_ERRORS: u32 = 1;
/// Most equal lines about a new or lost connection in a window.
const SAME_CHANGES: u32 = 5;
/// Most different lines in a window: an error may name a subject.
const DIFFERENT: usize = 20;

/// Counts the lines of the current window.
#[derive(Debug, Default)]
struct Window {
    since: Timestamp,
    lines: BTreeMap<String, u32>,
}

impl Window {
    /// Whether one more line `text` may be written, at most `most` times in this window.
    fn allows(&mut self, text: &str, most: u32, now: Timestamp) -> bool {
        if self.since.after(WINDOW) <= now {
            *self = Self { since: now, lines: BTreeMap::new() };
        }
        if let Some(count) = self.lines.get_mut(text) {
            *count += 1;
            return *count <= most;
        }
        let is_new = self.lines.len() < DIFFERENT;
        if is_new {
            self.lines.insert(text.to_owned(), 1);
        }
        is_new
    }
}

/// Writes the events of a connection.
#[derive(Debug)]
pub(crate) struct Reports {
    stats: Arc<NatsStats>,
    clock: Clock,
    window: Mutex<Window>,
}

impl Reports {
    pub(crate) fn new(stats: Arc<NatsStats>, clock: Clock) -> Self {
        Self { stats, clock, window: Mutex::default() }
    }

    pub(crate) fn event(&self, event: &Event) {
        match event {
            Event::Connected => self.stats.connected.store(true, Relaxed),
            Event::Disconnected => self.stats.connected.store(false, Relaxed),
            _ => {}
        }
        let text = event.to_string();
        let most = if matches!(event, Event::Connected | Event::Disconnected) { SAME_CHANGES } else { SAME_ERRORS };
        if !self.window.lock().allows(&text, most, self.clock.now()) {
            return;
        }
        match event {
            Event::Connected => tracing::info!("connected to NATS; state is shared with other pickers"),
            Event::Disconnected => {
                tracing::warn!("lost the connection to NATS; requests are routed by this picker's own view");
            }
            Event::SlowConsumer(_) => tracing::warn!("messages of other pickers were dropped: they arrive too fast"),
            Event::ClientError(error) => tracing::warn!(%error, "NATS can't be used; trying again"),
            Event::ServerError(error) => tracing::warn!(%error, "NATS server error"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lines_are_written_a_bounded_number_of_times_a_minute() {
        let mut window = Window::default();
        let mut written = |text: &str, second: u64| {
            let now = Timestamp(1_000_000_000 * second);
            (0..100).filter(|_| window.allows(text, 2, now)).count()
        };
        assert_eq!([written("refused", 61), written("timed out", 62), written("refused", 120)], [2, 2, 0]);
        assert_eq!(written("refused", 121), 2);
        let different: usize = (0..100).map(|i| written(&format!("to subject {i}"), 122)).sum();
        assert_eq!(different, 2 * (DIFFERENT - 1));
    }
}
