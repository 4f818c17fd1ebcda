//! Rates of the last minute: rejections by reason, degraded modes, requests and tokens of models and tenants. They are
//! differences of counters, of which one reading each five seconds is kept.

use attache_quota::Subject;
use attache_serving::tls::FailureCause;
use attache_telemetry::by_name::NamedTotals;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::rejections::RejectionCount;
use attache_types::clock::Timestamp;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Readings of a minute, and the one before them.
const READINGS: usize = 13;
/// 10 minutes: a gateway with few requests shows a wrong setting again in that time, and a corrected one is soon silent.
const LATELY: Duration = Duration::from_secs(600);

/// The counters at one time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) at: Timestamp,
    rejections: Vec<RejectionCount>,
    degraded: Vec<(&'static str, u64)>,
    models: Vec<NamedTotals>,
    tenants: Vec<NamedTotals>,
    /// Failed handshakes of the ext-proc port.
    handshakes: Vec<(FailureCause, u64)>,
}

impl Tally {
    /// Reads the counters.
    pub(crate) fn of(metrics: &Metrics, at: Timestamp) -> Self {
        Self {
            at,
            rejections: metrics.rejections(),
            degraded: metrics.degraded.occurred(),
            models: metrics.by_name.totals(Subject::Model),
            tenants: metrics.by_name.totals(Subject::Tenant),
            handshakes: metrics.handshakes.get().map(|failures| failures.counts().collect()).unwrap_or_default(),
        }
    }

    /// Rejections of one pool since the start.
    pub(crate) fn rejections_of(&self, pool: &str) -> u64 {
        let of_pool = self.rejections.iter().filter(|rejection| rejection.pool.as_deref() == Some(pool));
        of_pool.map(|rejection| rejection.count).sum()
    }
}

/// What is known from the readings so far.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    /// The readings of the last minute, the oldest first.
    readings: VecDeque<Tally>,
    /// When each degraded mode occurred last.
    degraded: Vec<(&'static str, Timestamp)>,
}

impl Rates {
    /// Adds a reading.
    pub(crate) fn add(&mut self, tally: Tally) {
        self.degraded = self.last_degraded(&tally).collect();
        if self.readings.len() == READINGS {
            self.readings.pop_front();
        }
        self.readings.push_back(tally);
    }

    /// When each degraded mode occurred last, as of `now`.
    fn last_degraded(&self, now: &Tally) -> impl Iterator<Item = (&'static str, Timestamp)> {
        let counted = self.readings.back().map_or(&[][..], |tally| tally.degraded.as_slice());
        now.degraded.iter().map(|(mode, count)| {
            let is_unchanged = counted.contains(&(*mode, *count));
            let known = self.degraded.iter().find(|(known, _)| known == mode && is_unchanged);
            (*mode, known.map_or(now.at, |(_, last)| *last))
        })
    }

    /// What was counted between the oldest reading and `now`.
    pub(crate) fn minute(&self, now: &Tally) -> Minute {
        let lately = self.last_degraded(now).filter(|(_, last)| now.at.since(*last) < LATELY);
        let degraded = lately.map(|(mode, _)| mode).collect();
        let Some(before) = self.readings.front() else { return Minute { degraded, ..Minute::default() } };
        let rejected = now.rejections.iter().map(|count| {
            let is_same = |earlier: &&RejectionCount| earlier.pool == count.pool && earlier.reason == count.reason;
            let earlier = before.rejections.iter().find(is_same).map_or(0, |earlier| earlier.count);
            (count.pool.clone(), count.reason, grown(count.count, earlier))
        });
        let tenants = now.tenants.iter().map(|totals| {
            let earlier = before.tenants.iter().find(|earlier| earlier.name == totals.name);
            (totals.name.clone(), grown(totals.requests, earlier.map_or(0, |earlier| earlier.requests)))
        });
        let handshakes = now.handshakes.iter().map(|(cause, count)| {
            let earlier = before.handshakes.iter().find(|(known, _)| known == cause).map_or(0, |(_, count)| *count);
            (*cause, grown(*count, earlier))
        });
        Minute {
            seconds: now.at.since(before.at).as_secs_f64(),
            rejected: rejected.filter(|(.., count)| *count > 0).collect(),
            tenants: tenants.collect(),
            handshakes: handshakes.filter(|(_, count)| *count > 0).collect(),
            degraded,
        }
    }

    /// Counts and rates of `now`, as JSON members.
    pub(crate) fn to_json(&self, now: &Tally) -> Map<String, Value> {
        let start = Tally { at: now.at, ..now.clone() };
        let before = self.readings.front().unwrap_or(&start);
        let seconds = now.at.since(before.at).as_secs_f64();
        let rate = |now: u64, before: Option<u64>| rate(now, before.unwrap_or(0), seconds);
        let rejection = |count: &RejectionCount| {
            let is_same = |earlier: &&RejectionCount| earlier.pool == count.pool && earlier.reason == count.reason;
            let earlier = before.rejections.iter().find(is_same).map(|earlier| earlier.count);
            json!({
                "pool": count.pool.as_deref(),
                "reason": count.reason,
                "requests": count.count,
                "requests_per_second": rate(count.count, earlier),
            })
        };
        let degraded = |(mode, count): &(&'static str, u64)| {
            let earlier = before.degraded.iter().find(|(known, _)| known == mode).map(|(_, count)| *count);
            json!({"mode": mode, "times": count, "times_per_second": rate(*count, earlier)})
        };
        let named = |now: &NamedTotals, before: &[NamedTotals]| {
            let earlier = before.iter().find(|earlier| earlier.name == now.name);
            json!({
                "name": &*now.name,
                "requests": now.requests,
                "requests_per_second": rate(now.requests, earlier.map(|e| e.requests)),
                "prompt_tokens": now.prompt_tokens,
                "prompt_tokens_per_second": rate(now.prompt_tokens, earlier.map(|e| e.prompt_tokens)),
                "completion_tokens": now.completion_tokens,
                "completion_tokens_per_second": rate(now.completion_tokens, earlier.map(|e| e.completion_tokens)),
                "refused": now.refused.iter().map(|(limit, count)| json!({"limit": limit, "requests": count}))
                    .collect::<Vec<_>>(),
            })
        };
        let all = [
            ("rejections", now.rejections.iter().map(rejection).collect::<Value>()),
            ("degraded", now.degraded.iter().map(degraded).collect()),
            ("models", now.models.iter().map(|totals| named(totals, &before.models)).collect()),
            ("tenants", now.tenants.iter().map(|totals| named(totals, &before.tenants)).collect()),
        ];
        all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// What was counted in the last minute, or since the start if that is later.
#[derive(Clone, Debug, Default)]
pub(crate) struct Minute {
    /// Its length, seconds.
    pub(crate) seconds: f64,
    /// Rejected requests by pool and reason.
    pub(crate) rejected: Vec<(Option<Arc<str>>, &'static str, u64)>,
    /// Requests that went to an endpoint, of all known tenants.
    pub(crate) tenants: Vec<(Arc<str>, u64)>,
    /// Failed handshakes by cause.
    pub(crate) handshakes: Vec<(FailureCause, u64)>,
    /// Degraded modes that occurred in the last ten minutes.
    pub(crate) degraded: Vec<&'static str>,
}

/// The growth of a counter. One that decreased was replaced.
fn grown(now: u64, before: u64) -> u64 {
    if now < before { now } else { now - before }
}

/// Events per second with three decimals; null until there is a first reading. A counter that decreased was replaced.
fn rate(now: u64, before: u64, seconds: f64) -> Value {
    if seconds <= 0.0 {
        return Value::Null;
    }
    let events = grown(now, before);
    json!((events as f64 / seconds * 1e3).round() / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn degraded_mode_is_known_for_ten_minutes_after_it_occurred() {
        let at = |seconds: u64| Timestamp(seconds * 1_000_000_000);
        let tally = |seconds: u64, count: u64| {
            let degraded = Some(("no_body", count)).filter(|(_, count)| *count > 0).into_iter().collect();
            Tally { at: at(seconds), degraded, ..Tally::default() }
        };
        let mut rates = Rates::default();
        assert!(rates.minute(&tally(0, 0)).degraded.is_empty());
        assert_eq!(rates.minute(&tally(1, 3)).degraded, ["no_body"], "before the first reading");
        (0..=200).for_each(|reading| rates.add(tally(5 * reading, if reading < 2 { 0 } else { 3 })));
        assert!(rates.minute(&tally(1_001, 3)).degraded.is_empty(), "it occurred 991 s ago");
        assert_eq!(rates.minute(&tally(1_001, 4)).degraded, ["no_body"], "again");
        rates.add(tally(1_005, 4));
        assert_eq!(rates.minute(&tally(1_604, 4)).degraded, ["no_body"]);
        assert!(rates.minute(&tally(1_605, 4)).degraded.is_empty());
    }
}
