//! Histograms of latencies that can be read back. The history of pools computes percentiles from the difference of two
//! readings, which the histograms of `prometheus_client` do not offer.

use attache_request::event::Exemplar;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, EncodeMetric, LabelValueEncoder, MetricEncoder};
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::{MetricType, TypedMetric};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the buckets for the time from request to first byte and to the end, seconds.
const BOUNDS: [f64; 17] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0, 300.0, 900.0];
/// The last bucket has no upper bound.
const BUCKETS: usize = BOUNDS.len() + 1;

/// A histogram of durations. Copies share their counts. Each bucket names the trace of its last sampled request.
#[derive(Clone, Debug, Default)]
pub struct LatencyHistogram(Arc<Buckets>);

#[derive(Debug)]
struct Buckets {
    counts: [AtomicU64; BUCKETS],
    encoded: HistogramWithExemplars<TraceLabel>,
}

impl Default for Buckets {
    fn default() -> Self {
        let counts = std::array::from_fn(|_| AtomicU64::default());
        Self { counts, encoded: HistogramWithExemplars::new(BOUNDS.into_iter()) }
    }
}

/// The label of exemplars, as Grafana expects it.
#[derive(Clone, Debug, EncodeLabelSet)]
struct TraceLabel {
    trace_id: HexTraceId,
}

/// A trace id, written as 32 hexadecimal digits.
#[derive(Clone, Debug)]
struct HexTraceId(u128);

impl EncodeLabelValue for HexTraceId {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        write!(encoder, "{:032x}", self.0)
    }
}

impl LatencyHistogram {
    /// Adds one duration, with the request's trace if it is sampled.
    pub fn observe(&self, duration: Duration, exemplar: Option<Exemplar>) {
        let seconds = duration.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        if let Some(count) = self.0.counts.get(bucket) {
            count.fetch_add(1, Relaxed);
        }
        let trace_id = |exemplar: Exemplar| HexTraceId(u128::from_be_bytes(exemplar.trace_id));
        let label = exemplar.map(|exemplar| TraceLabel { trace_id: trace_id(exemplar) });
        self.0.encoded.observe(seconds, label, exemplar.map(|exemplar| exemplar.at));
    }

    /// The number of durations in each bucket since the start.
    #[must_use]
    pub fn counts(&self) -> LatencyCounts {
        LatencyCounts(std::array::from_fn(|i| self.0.counts.get(i).map_or(0, |count| count.load(Relaxed))))
    }
}

impl EncodeMetric for LatencyHistogram {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.encoded.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

impl TypedMetric for LatencyHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

/// Number of durations in each bucket of a [`LatencyHistogram`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyCounts([u64; BUCKETS]);

impl LatencyCounts {
    /// The durations that were added after `earlier` was read. A histogram that restarted from zero counts as a whole.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let decreased = self.0.iter().zip(&earlier.0).any(|(now, before)| now < before);
        let before = if decreased { &[0; BUCKETS] } else { &earlier.0 };
        let mut counts = self.0;
        counts.iter_mut().zip(before).for_each(|(now, before)| *now -= before);
        Self(counts)
    }

    /// The duration, in seconds, that the fraction `quantile` (0 to 1) of durations does not exceed: interpolated
    /// linearly within its bucket, as Prometheus does. `None` without durations.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<f64> {
        let total: u64 = self.0.iter().sum();
        if total == 0 {
            return None;
        }
        let rank = quantile.clamp(0.0, 1.0) * total as f64;
        let (mut below, mut lower) = (0.0, 0.0);
        for (count, upper) in self.0.iter().zip(BOUNDS) {
            let count = *count as f64;
            if count > 0.0 && below + count >= rank {
                return Some(lower + (upper - lower) * ((rank - below) / count).clamp(0.0, 1.0));
            }
            (below, lower) = (below + count, upper);
        }
        BOUNDS.last().copied()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

    use super::*;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::metrics::histogram::Histogram;
    use prometheus_client::registry::Registry;

    fn of(milliseconds: impl IntoIterator<Item = u64>) -> LatencyHistogram {
        let histogram = LatencyHistogram::default();
        milliseconds.into_iter().for_each(|ms| histogram.observe(Duration::from_millis(ms), None));
        histogram
    }

    #[test]
    fn exposition_equals_that_of_the_library() {
        let text = |registry: &Registry| {
            let mut text = String::new();
            encode(&mut text, registry).unwrap();
            text
        };
        // Sums of these have no rounding.
        let observed = [0, 125, 250, 500, 900_000, 2_000_000];
        let (mut own, mut theirs) = (Registry::default(), Registry::default());
        own.register("times", "Times", of(observed));
        let library = Histogram::new(BOUNDS);
        observed.iter().for_each(|ms| library.observe(*ms as f64 / 1e3));
        theirs.register("times", "Times", library);
        assert_eq!(text(&own), text(&theirs));
    }

    #[test]
    fn quantiles_are_interpolated_within_their_bucket() {
        // Ten in (50, 100] ms, ten in (100, 200] ms.
        let counts = of((0..10).map(|_| 80).chain((0..10).map(|_| 150))).counts();
        for (quantile, seconds) in [(0.25, 0.075), (0.5, 0.1), (0.75, 0.15), (1.0, 0.2)] {
            let found = counts.quantile(quantile).unwrap();
            assert!((found - seconds).abs() < 1e-9, "{quantile}: {found}");
        }
        assert_eq!(of([2_000_000]).counts().quantile(0.5), Some(900.0), "the greatest bound");
        assert_eq!(LatencyCounts::default().quantile(0.5), None);
    }

    #[test]
    fn difference_has_only_later_durations_and_survives_a_restart() {
        let histogram = of([80, 80]);
        let before = histogram.counts();
        histogram.observe(Duration::from_millis(300), None);
        let since = histogram.counts().since(&before);
        assert_eq!(since, of([300]).counts());
        assert_eq!(of([80]).counts().since(&histogram.counts()), of([80]).counts());
    }
}
