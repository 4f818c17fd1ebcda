use super::*;

fn settings() -> ScrapeSettings {
    ScrapeSettings {
        interval: Duration::from_millis(100),
        idle_interval: Duration::from_secs(1),
        timeout: Duration::from_secs(1),
        max_bytes: 1 << 20,
        stale_after: Duration::from_secs(2),
        insecure_skip_verify: false,
        bearer_token_file: None,
    }
}

/// The delays after a sequence of scrapes in milliseconds, without jitter.
fn delays(seen: &[Seen]) -> Vec<u128> {
    let mut pace = Pace::new(Timestamp(0));
    let mut at = |seen: &Seen| {
        let now = pace.due;
        pace.done(*seen, now, &settings(), 0.5);
        pace.due.since(now).as_millis()
    };
    seen.iter().map(&mut at).collect()
}

#[test]
fn busy_endpoints_are_scraped_often_and_idle_ones_less_and_less() {
    use Seen::{Busy, Failed, Idle};
    assert_eq!(delays(&[Busy, Busy, Busy]), [100, 100, 100]);
    assert_eq!(delays(&[Idle; 6]), [100, 200, 400, 800, 1000, 1000]);
    assert_eq!(delays(&[Idle, Idle, Idle, Busy, Idle]), [100, 200, 400, 100, 200]);
    assert_eq!(delays(&[Failed; 9]), [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
    // After a recovery, as after a start.
    assert_eq!(delays(&[Failed, Failed, Failed, Idle, Idle]), [100, 200, 400, 100, 200]);
    // After a failure, an idle endpoint is scraped again soon.
    assert_eq!(delays(&[Idle, Idle, Idle, Idle, Failed]), [100, 200, 400, 800, 100]);
}

#[test]
fn requests_on_an_idle_endpoint_advance_its_scrape() {
    let mut pace = Pace::new(Timestamp(0));
    for _ in 0..6 {
        pace.done(Seen::Idle, Timestamp(0), &settings(), 0.5);
    }
    let now = Timestamp(1_000);
    assert!(pace.hurry(now, &settings(), 0.3));
    assert_eq!(pace.due.since(now), Duration::from_millis(30));
    assert!(!pace.hurry(now, &settings(), 0.9), "the next scrape is soon anyway");
    for _ in 0..6 {
        pace.done(Seen::Failed, Timestamp(0), &settings(), 0.5);
    }
    assert!(!pace.hurry(now, &settings(), 0.3), "a failing endpoint keeps its backoff");
}

#[test]
fn jitter_and_extreme_settings_stay_within_limits() {
    for random in [-1.0, 0.0, 0.5, 1.0, 2.0] {
        let delay = spread(Duration::from_millis(1_000), random);
        assert!((900..=1_100).contains(&delay.as_millis()), "{random}");
    }
    let odd = ScrapeSettings { interval: Duration::ZERO, idle_interval: Duration::ZERO, ..settings() };
    let mut pace = Pace::new(Timestamp(0));
    for seen in [Seen::Busy, Seen::Idle, Seen::Failed, Seen::Failed] {
        pace.done(seen, Timestamp(0), &odd, 0.5);
        assert!(pace.due >= Timestamp(0).after(MIN_INTERVAL), "{seen:?}");
    }
}

fn page(start: Option<f64>, queries: Option<f64>, hits: Option<f64>) -> EndpointMetrics {
    EndpointMetrics { process_start: start, prefix_queries: queries, prefix_hits: hits, ..EndpointMetrics::default() }
}

fn restarts(pages: &[EndpointMetrics]) -> Vec<bool> {
    let mut process = Process::default();
    pages.iter().map(|p| process.observe(p)).collect()
}

#[test]
fn later_start_time_is_one_restart() {
    let at = |start: f64| page(Some(start), None, None);
    assert_eq!(restarts(&[at(100.0), at(100.0), at(105.0), at(105.0)]), [false, false, true, false]);
    assert_eq!(restarts(&[at(100.0), at(100.4), at(99.0)]), [false, false, false], "a corrected wall clock");
    assert_eq!(
        restarts(&[at(100.0), at(105.0), at(100.0), at(105.0)]),
        [false, true, false, false],
        "two workers, one port"
    );
}

#[test]
fn decreased_counters_are_a_restart_without_a_start_time() {
    let counted = |queries, hits| page(None, Some(queries), Some(hits));
    assert_eq!(restarts(&[counted(5.0, 2.0), counted(9.0, 3.0), counted(1.0, 0.0)]), [false, false, true]);
    assert_eq!(restarts(&[counted(5.0, 2.0), counted(9.0, 1.0)]), [false, true]);
    // Unreadable counters change nothing.
    assert_eq!(restarts(&[counted(5.0, 2.0), page(None, None, None), counted(6.0, 2.0)]), [false, false, false]);
    assert_eq!(restarts(&[page(Some(100.0), Some(5.0), None), page(Some(100.0), Some(1.0), None)]), [false, false]);
}
