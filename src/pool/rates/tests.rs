use super::*;
use proptest::prelude::{Strategy, any, prop, prop_assert, proptest};

const SECOND: u64 = 1_000_000_000;

fn at(seconds: u64) -> Timestamp {
    Timestamp(seconds * SECOND)
}

fn finished(n: f64) -> Counters {
    counters(&[(Counter::Finished, n)])
}

fn counters(list: &[(Counter, f64)]) -> Counters {
    let mut counters = Counters::default();
    for (counter, value) in list {
        counters.set(*counter, *value);
    }
    counters
}

/// The drain rate after each scrape; a scrape is its second and the finished requests.
fn drain(pages: &[(u64, f64)]) -> Vec<Option<f64>> {
    let mut window = RateWindow::default();
    pages.iter().map(|(second, n)| window.observe(at(*second), &finished(*n)).finished).collect()
}

#[test]
fn every_counter_has_its_own_slot() {
    use Histogram::{Decode, FirstToken, GenerationTokens, Latency, Prefill, PromptTokens, Queue};
    let histograms = [Queue, Prefill, Decode, FirstToken, Latency, PromptTokens, GenerationTokens];
    assert_eq!(histograms.len(), HISTOGRAMS);
    let plain = [Counter::PromptTokens, Counter::GenerationTokens, Counter::Finished];
    let all: Vec<Counter> =
        plain.into_iter().chain(histograms.map(Counter::Sum)).chain(histograms.map(Counter::Count)).collect();
    let places: Vec<usize> = all.iter().map(|c| c.index()).collect();
    assert_eq!(places, (0..COUNTERS).collect::<Vec<_>>());
}

/// The rule of AIBrix's drain rate: scrapes are kept every 5 s or more; the rate covers about a minute,
/// and at least 10 s.
#[test]
fn drain_rate_covers_a_minute() {
    for (pages, rate, why) in [
        (vec![(1, 0.0), (10, 90.0)], None, "9 s are too short"),
        (vec![(1, 0.0), (11, 90.0)], Some(9.0), "10 s suffice"),
        (vec![(1, 0.0), (31, 30.0), (61, 90.0)], Some(1.5), "a whole minute"),
        (vec![(1, 0.0), (31, 30.0), (61, 90.0), (91, 90.0)], Some(1.0), "the first 30 s are out"),
        (vec![(1, 0.0), (121, 60.0)], Some(0.5), "up to three minutes when scrapes are rare"),
        (vec![(1, 0.0), (182, 60.0)], None, "not after a longer outage"),
        (vec![(1, 0.0), (182, 60.0), (192, 70.0)], Some(1.0), "and the window starts again"),
        (vec![(1, 50.0), (31, 80.0), (41, 5.0)], None, "a decreased counter starts the window again"),
        (vec![(1, 50.0), (31, 80.0), (41, 5.0), (51, 15.0)], Some(1.0), "and only later increments count"),
        (vec![(1, 7.0), (61, 7.0)], Some(0.0), "nothing finished"),
    ] {
        assert_eq!(drain(&pages).last().copied().flatten(), rate, "{why}: {pages:?}");
    }
}

#[test]
fn frequent_scrapes_keep_the_window_small_and_exact() {
    let mut window = RateWindow::default();
    let mut rate = None;
    // Ten scrapes a second for five minutes; 2 requests a second, then 4.
    let mut n = 0.0;
    for tick in 0..3_000 {
        n += if tick < 1_500 { 0.2 } else { 0.4 };
        rate = window.observe(Timestamp(tick * SECOND / 10), &finished(n)).finished;
        assert!(window.kept.len() <= 14, "{}", window.kept.len());
        if tick == 1_499 {
            assert!((rate.unwrap() - 2.0).abs() < 1e-6);
        }
    }
    assert!((rate.unwrap() - 4.0).abs() < 1e-6, "{rate:?}");
}

#[test]
fn reset_clears_the_window() {
    let mut window = RateWindow::default();
    window.observe(at(1), &finished(0.0));
    assert_eq!(window.observe(at(21), &finished(20.0)).finished, Some(1.0));
    window.reset();
    assert_eq!(window.observe(at(41), &finished(40.0)), Rates::default());
}

#[test]
fn means_cover_the_window_and_not_the_lifetime() {
    let page = |sum, count, tokens| {
        counters(&[
            (Counter::Sum(Histogram::Prefill), sum),
            (Counter::Count(Histogram::Prefill), count),
            (Counter::PromptTokens, tokens),
        ])
    };
    let mut window = RateWindow::default();
    // A thousand requests of 1 s each earlier; now 10 requests of 3 s each.
    let old = page(1_000.0, 1_000.0, 5e6);
    window.observe(at(1), &old);
    let rates = window.observe(at(21), &page(1_030.0, 1_010.0, 5e6 + 400.0));
    assert_eq!((rates.means.prefill_seconds, rates.prompt_tokens), (Some(3.0), Some(20.0)));
    assert_eq!(Means::of(&old).prefill_seconds, Some(1.0));
    // Without requests there is a rate, but no mean.
    let rates = window.observe(at(141), &page(1_030.0, 1_010.0, 5e6 + 400.0));
    assert_eq!((rates.means.prefill_seconds, rates.prompt_tokens), (None, Some(0.0)));
    // A counter that is new has no rate yet.
    assert_eq!((rates.generation_tokens, rates.means.queue_seconds), (None, None));
}

#[test]
fn phases_and_lengths_are_derived_from_available_counters() {
    let histogram = |h, sum, count| [(Counter::Sum(h), sum), (Counter::Count(h), count)];
    let sglang = counters(
        &[
            &histogram(Histogram::Queue, 2.0, 2.0)[..],
            &histogram(Histogram::FirstToken, 8.0, 2.0),
            &histogram(Histogram::Latency, 20.0, 2.0),
            &[(Counter::PromptTokens, 600.0), (Counter::GenerationTokens, 50.0), (Counter::Finished, 2.0)],
        ]
        .concat(),
    );
    let expected = Means {
        queue_seconds: Some(1.0),
        prefill_seconds: Some(3.0),
        decode_seconds: Some(6.0),
        prompt_tokens: Some(300.0),
        generation_tokens: Some(25.0),
    };
    assert_eq!(Means::of(&sglang), expected);
    let mut both = sglang;
    for (h, mean) in [(Histogram::Prefill, 2.5), (Histogram::Decode, 5.5), (Histogram::PromptTokens, 299.0)] {
        both.set(Counter::Sum(h), mean * 4.0);
        both.set(Counter::Count(h), 4.0);
    }
    let means = Means::of(&both);
    let measured = (means.prefill_seconds, means.decode_seconds, means.prompt_tokens);
    assert_eq!(measured, (Some(2.5), Some(5.5), Some(299.0)));
    assert_eq!(Means::of(&Counters::default()), Means::default());
    // The window may contain the first token of a request and not its end; the time must not be negative.
    both.set(Counter::Sum(Histogram::Latency), 2.0);
    both.set(Counter::Count(Histogram::Decode), 0.0);
    assert_eq!(Means::of(&both).decode_seconds, Some(0.0));
}

/// Values of hostile metrics: any number of at least 0, including infinity.
fn values() -> impl Strategy<Value = Option<f64>> {
    prop::option::of(prop::sample::select(vec![0.0, 1e-300, 1.0, 1e6, 1e17, f64::MAX, f64::INFINITY]))
}

proptest! {
    #[test]
    fn rates_of_any_metrics_are_finite_and_not_negative(
        pages in prop::collection::vec((0u64..400 * SECOND, prop::array::uniform17(values())), 1..40), back in any::<u64>(),
    ) {
        let mut window = RateWindow::default();
        let mut now = 0;
        for (step, page) in pages {
            // Time may stand still, or go back by mistake.
            now = if back % 7 == 0 { step } else { now + step / 10 };
            let rates = window.observe(Timestamp(now), &Counters(page));
            let Means { queue_seconds, prefill_seconds, decode_seconds, prompt_tokens, generation_tokens } = rates.means;
            let means = [queue_seconds, prefill_seconds, decode_seconds, prompt_tokens, generation_tokens];
            for figure in means.into_iter().chain([rates.prompt_tokens, rates.generation_tokens, rates.finished]).flatten() {
                prop_assert!(figure.is_finite() && figure >= 0.0, "{figure}");
            }
            prop_assert!(window.kept.len() <= 40);
        }
    }
}
