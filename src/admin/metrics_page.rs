//! The page `/metrics`. Rendering takes a tenth of a second with thousands of endpoints, and every pod may ask for it.
//! All requesters therefore share one rendering once rendering has used its part of the time.
//!
//! The page is OpenMetrics text, or Prometheus's older text format for clients that only ask for `text/plain`.

use attache_types::clock::Timestamp;
use axum::body::Bytes;
use parking_lot::Mutex;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use std::fmt::Write as _;
use std::time::Duration;

/// Media type of OpenMetrics text.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Media type of Prometheus's older text format.
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";
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

    /// The same in Prometheus's text format 0.0.4.
    pub fn plain(&self, now: impl FnMut() -> Timestamp) -> Option<String> {
        self.text(now).as_deref().and_then(|text| std::str::from_utf8(text).ok()).map(plain)
    }
}

/// The page in the format for a client with these values of `accept`, and its media type. A client that names no format
/// gets OpenMetrics text.
pub(crate) fn for_client(text: Bytes, accept: &[&str]) -> (&'static str, Bytes) {
    let ranges = || accept.iter().flat_map(|value| value.split(',')).filter_map(|range| range.split(';').next());
    let asks_for = |media: &str| ranges().any(|range| range.trim().eq_ignore_ascii_case(media));
    let is_plain = asks_for("text/plain") && !asks_for("application/openmetrics-text");
    match std::str::from_utf8(&text) {
        Ok(open_metrics) if is_plain => (PLAIN, plain(open_metrics).into()),
        _ => (OPEN_METRICS, text),
    }
}

/// The same metrics in Prometheus's text format 0.0.4: families have the names of their samples, and there are neither
/// units nor exemplars.
fn plain(open_metrics: &str) -> String {
    let (mut out, mut help) = (String::with_capacity(open_metrics.len()), None);
    for line in open_metrics.lines() {
        let mut words = line.splitn(4, ' ');
        match [words.next(), words.next(), words.next(), words.next()] {
            [Some("#"), Some("HELP"), Some(_), text] => help = text,
            [Some("#"), Some("TYPE"), Some(family), Some(metric_type)] => {
                let (suffix, metric_type) = match metric_type {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    other => ("", other),
                };
                let help = help.take().unwrap_or_default();
                // Writing to a string does not fail.
                let _ = writeln!(out, "# HELP {family}{suffix} {help}\n# TYPE {family}{suffix} {metric_type}");
            }
            [Some("#"), ..] => {}
            _ => {
                out.push_str(without_exemplar(line));
                out.push('\n');
            }
        }
    }
    out
}

/// A sample without the exemplar behind its value. Values of labels, in quotes, may have any characters.
fn without_exemplar(sample: &str) -> &str {
    let (mut quoted, mut escaped) = (false, false);
    let end = sample.bytes().position(|byte| {
        if !escaped {
            quoted ^= byte == b'"';
        }
        escaped = byte == b'\\' && !escaped;
        byte == b'#' && !quoted
    });
    end.and_then(|end| sample.get(..end)).unwrap_or(sample).trim_end()
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

    #[test]
    fn plain_text_is_for_clients_that_only_ask_for_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
        for (accept, media) in [
            (&[][..], OPEN_METRICS),
            (&["*/*"][..], OPEN_METRICS),
            (&[prometheus][..], OPEN_METRICS),
            (&["text/html", "Text/Plain; version=0.0.4"][..], PLAIN),
            (&["text/plain", "application/openmetrics-text"][..], OPEN_METRICS),
            (&["text/plainer"][..], OPEN_METRICS),
        ] {
            assert_eq!(for_client(Bytes::from_static(b"# EOF\n"), accept).0, media, "{accept:?}");
        }
    }

    #[test]
    fn plain_text_has_families_by_the_names_of_their_samples_and_no_exemplars() {
        let open_metrics = r#"# HELP requests Number of requests.
# TYPE requests counter
requests_total{path="a \" # {b\\"} 3
# HELP wait_seconds Time.
# TYPE wait_seconds histogram
# UNIT wait_seconds seconds
wait_seconds_sum 0.5
wait_seconds_bucket{le="+Inf"} 2 # {trace_id="00ab"} 0.25
# HELP build Version.
# TYPE build info
build_info{version="1"} 1
# HELP x A value.
# TYPE x unknown
x NaN
# EOF
"#;
        let expected = r#"# HELP requests_total Number of requests.
# TYPE requests_total counter
requests_total{path="a \" # {b\\"} 3
# HELP wait_seconds Time.
# TYPE wait_seconds histogram
wait_seconds_sum 0.5
wait_seconds_bucket{le="+Inf"} 2
# HELP build_info Version.
# TYPE build_info gauge
build_info{version="1"} 1
# HELP x A value.
# TYPE x untyped
x NaN
"#;
        assert_eq!(plain(open_metrics), expected);
    }
}
