//! The page `/metrics`. Rendering takes a tenth of a second with thousands of endpoints, and every pod may ask for it.
//! All requesters therefore share one rendering once rendering has used its part of the time.

use attache_types::clock::Timestamp;
use axum::body::Bytes;
use parking_lot::Mutex;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use std::time::Duration;

/// Media type of the page.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Largest age of a page that is sent again. Scrape intervals are longer.
const MAX_AGE: Duration = Duration::from_secs(1);
/// Part of the time that rendering may take, as a divisor: half.
const PART: u32 = 2;
/// Time that rendering may take at once.
const BURST: Duration = Duration::from_secs(3);

/// Renders all metrics.
#[derive(Debug)]
pub struct MetricsPage {
    registry: Registry,
    last: Mutex<Option<Rendering>>,
}

/// The last rendering.
#[derive(Debug)]
struct Rendering {
    text: Bytes,
    begun: Timestamp,
    cost: Duration,
    /// Time that rendering may still take, and when that was.
    left: Duration,
    ended: Timestamp,
}

impl Rendering {
    fn left_at(&self, now: Timestamp) -> Duration {
        (self.left + now.since(self.ended) / PART).min(BURST)
    }

    /// Whether it is sent again at `now`.
    fn is_current(&self, now: Timestamp) -> bool {
        now.since(self.begun) < MAX_AGE && self.left_at(now) < self.cost
    }
}

impl MetricsPage {
    /// The page of these metrics.
    #[must_use]
    pub fn new(registry: Registry) -> Self {
        Self { registry, last: Mutex::default() }
    }

    /// The text: a new one, or one of the last second if rendering takes more than half of the time. `None` if a
    /// metric can't be encoded.
    pub(crate) fn text(&self, mut now: impl FnMut() -> Timestamp) -> Option<Bytes> {
        let mut last = self.last.lock();
        let begun = now();
        if let Some(current) = last.as_ref().filter(|last| last.is_current(begun)) {
            return Some(current.text.clone());
        }
        let left = last.as_ref().map_or(BURST, |last| last.left_at(begun));
        let mut text = String::with_capacity(16 << 10);
        encode(&mut text, &self.registry).ok()?;
        let (ended, text) = (now(), Bytes::from(text));
        let cost = ended.since(begun);
        *last = Some(Rendering { text: text.clone(), begun, cost, left: left.saturating_sub(cost), ended });
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::counter::Counter;

    /// A page that takes `cost` to render, and counts its renderings. Time advances by `step` between requests.
    fn renderings(cost: Duration, step: Duration, requests: u32) -> Vec<(u32, u64)> {
        let rendered = Counter::<u64>::default();
        let mut registry = Registry::default();
        registry.register("renderings", "Number of renderings", rendered.clone());
        let page = MetricsPage::new(registry);
        let mut now = Timestamp(0);
        (0..requests)
            .map(|request| {
                now = now.after(step);
                let mut times = 0;
                let clock = || {
                    times += 1;
                    if times == 2 {
                        rendered.inc();
                        now = now.after(cost);
                    }
                    now
                };
                assert!(page.text(clock).is_some());
                (request, rendered.get())
            })
            .collect()
    }

    #[test]
    fn cheap_pages_are_always_new() {
        let all = renderings(Duration::from_millis(1), Duration::from_millis(10), 1_000);
        assert!(all.iter().all(|(request, rendered)| *rendered == u64::from(*request) + 1));
    }

    #[test]
    fn costly_pages_are_shared_by_all_requests_of_a_second() {
        let (cost, step) = (Duration::from_millis(300), Duration::from_millis(1));
        let all = renderings(cost, step, 10_000);
        // 10 s of requests, and the time of rendering itself. The first ten use the time for bursts.
        let rendered = all.last().map_or(0, |(_, rendered)| *rendered);
        assert!((20..=30).contains(&rendered), "{rendered} renderings");
        let longest = all.chunk_by(|a, b| a.1 == b.1).map(|same| same.len()).max();
        assert!(longest <= Some(1_000), "an older page was sent: {longest:?} requests");
    }
}
