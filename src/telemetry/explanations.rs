//! Explanations of decisions that are kept for `/explain`, and the limit of the time that they take.

use ahash::AHashMap;
use attache_request::event::KeptExplanation;
use attache_types::clock::Timestamp;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// 64 MiB: most memory of kept explanations, whatever their number. Those of 1,000 endpoints take some 200 KB each.
const MAX_EXPLANATION_BYTES: usize = 64 << 20;
/// Memory of an explanation besides its texts, bytes: its place in the queue and in the map.
const OVERHEAD_BYTES: usize = 128;
/// 1 s: unused time counts for so long, so a few requests after a pause are all explained.
const WINDOW: Duration = Duration::from_secs(1);

/// Explanations, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Explanations {
    kept: VecDeque<KeptExplanation>,
    /// The number of the oldest one: explanations are numbered in the order of their decisions.
    oldest: u64,
    /// The number of the latest explanation of each request.
    latest: AHashMap<Arc<str>, u64>,
    bytes: usize,
}

impl Explanations {
    /// Adds an explanation, and keeps at most `most`.
    pub(crate) fn keep(&mut self, most: usize, explanation: KeptExplanation) {
        self.bytes += bytes(&explanation);
        self.latest.insert(explanation.request_id.clone(), self.oldest + self.kept.len() as u64);
        self.kept.push_back(explanation);
        self.limit(most);
    }

    /// Drops the oldest until `most` are left, and their memory is within the limit.
    pub(crate) fn limit(&mut self, most: usize) {
        while self.kept.len() > most || self.bytes > MAX_EXPLANATION_BYTES {
            let Some(dropped) = self.kept.pop_front() else { return };
            self.bytes -= bytes(&dropped);
            if self.latest.get(&dropped.request_id) == Some(&self.oldest) {
                self.latest.remove(&dropped.request_id);
            }
            self.oldest += 1;
        }
    }

    /// The latest explanation of the request with this `x-request-id`, JSON.
    pub(crate) fn get(&self, request_id: &str) -> Option<&str> {
        let at = usize::try_from(self.latest.get(request_id)? - self.oldest).ok()?;
        self.kept.get(at).map(|kept| &*kept.json)
    }
}

/// Memory of an explanation.
fn bytes(explanation: &KeptExplanation) -> usize {
    explanation.json.len() + explanation.request_id.len() + OVERHEAD_BYTES
}

/// Limits the time of explanations to a part of the elapsed time: after one that took `t`, none begins for `t / part`.
/// Threads that begin at the same moment do not wait for each other.
#[derive(Debug, Default)]
pub(crate) struct TimeBudget {
    /// The time from which the next explanation may begin, nanoseconds.
    next: AtomicU64,
}

impl TimeBudget {
    /// Whether an explanation may begin at `now`.
    pub(crate) fn admits(&self, now: Timestamp) -> bool {
        self.next.load(Relaxed) <= now.0
    }

    /// Records that an explanation took `time`, of which explanations may take the part `ratio`, 0 to 1.
    pub(crate) fn spend(&self, time: Duration, ratio: f64, now: Timestamp) {
        let pause = Duration::try_from_secs_f64(time.as_secs_f64() / ratio).unwrap_or(Duration::MAX);
        let unused_since = now.0.saturating_sub(WINDOW.as_nanos() as u64);
        let after = |next: u64| Some(Timestamp(next.max(unused_since)).after(pause).0);
        let _ = self.next.fetch_update(Relaxed, Relaxed, after);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn explanation(id: &str, json: &str) -> KeptExplanation {
        KeptExplanation { request_id: id.into(), json: json.into() }
    }

    #[test]
    fn latest_explanation_of_a_request_is_found_until_it_is_dropped() {
        let mut explanations = Explanations::default();
        for (id, json) in [("a", "1"), ("b", "2"), ("a", "3"), ("c", "4")] {
            explanations.keep(3, explanation(id, json));
        }
        let found =
            |explanations: &Explanations| ["a", "b", "c", "d"].map(|id| explanations.get(id).map(str::to_owned));
        let text = |json: &str| Some(json.to_owned());
        assert_eq!(found(&explanations), [text("3"), text("2"), text("4"), None]);
        explanations.limit(1);
        assert_eq!(found(&explanations), [None, None, text("4"), None]);
        explanations.limit(0);
        assert_eq!((explanations.bytes, explanations.latest.len(), explanations.kept.len()), (0, 0, 0));
    }

    #[test]
    fn explanations_take_64_mib_at_most() {
        let (mut explanations, json) = (Explanations::default(), "x".repeat(1 << 20));
        for i in 0..100 {
            explanations.keep(1_000, explanation(&i.to_string(), &json));
        }
        assert_eq!(explanations.kept.len(), 63, "each takes a little more than 1 MiB");
        assert_eq!((explanations.get("36"), explanations.get("37").is_some()), (None, true));
        assert_eq!(explanations.latest.len(), 63);
    }

    #[test]
    fn time_of_explanations_without_a_ratio_is_none() {
        let budget = TimeBudget::default();
        budget.spend(Duration::from_nanos(1), 0.0, Timestamp(1));
        assert!(!budget.admits(Timestamp(u64::MAX - 1)));
    }

    proptest! {
        /// Requests at any rate, explanations that take any time: their sum is at most the part of the elapsed time,
        /// and of the window before, and one explanation.
        #[test]
        fn explanations_take_at_most_their_part_of_the_time(
            gaps in prop::collection::vec((0..20_000_000u64, 1..5_000_000u64), 1..400),
            ratio in 0.001..1.0f64,
        ) {
            let budget = TimeBudget::default();
            let begin = 10_000_000_000;
            let (mut now, mut spent, mut longest) = (begin, 0u64, 0u64);
            for (gap, takes) in gaps {
                now += gap;
                if budget.admits(Timestamp(now)) {
                    now += takes;
                    spent += takes;
                    longest = longest.max(takes);
                    budget.spend(Duration::from_nanos(takes), ratio, Timestamp(now));
                }
            }
            let allowed = ratio * (now - begin + WINDOW.as_nanos() as u64) as f64 + longest as f64;
            prop_assert!(spent as f64 <= allowed + 1_000.0, "{spent} of {allowed} ns");
        }
    }

    #[test]
    fn quiet_traffic_is_explained_completely() {
        let budget = TimeBudget::default();
        let second = |n: u64| Timestamp(n * 1_000_000_000);
        for at in 1..100 {
            for request in 0..50 {
                let now = Timestamp(second(at).0 + request);
                assert!(budget.admits(now), "request {request} of second {at}");
                budget.spend(Duration::from_micros(200), 0.01, now);
            }
        }
    }
}
