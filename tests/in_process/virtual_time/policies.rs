//! The default strategy compared with others, in virtual time: simulated engines, the real picker, and metrics that are
//! 100 ms old. Runs are deterministic, so the bounds only allow for later changes.

use super::play::{ENGINES, Open, Played, Pool, SCRAPE, conversations, request, text};
use attache_report::served::{Ending, Served};
use attache_types::clock::Timestamp;
use std::collections::BTreeMap;

/// Requests of the trace in a run: enough to fill caches and learn speeds.
const REQUESTS: u64 = 1_200;

/// Runs the trace, sped up by `pace`, on engines of these speeds.
fn play(strategy: &str, pace: f64, speeds: &[f64]) -> Played {
    Pool::of_speeds(speeds).play(strategy, &mut *conversations(pace, REQUESTS))
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The quantile `part` of the values.
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

/// Time to first token, and mean time between tokens of each response, seconds.
fn latencies(served: &[Served]) -> (Vec<f64>, Vec<f64>) {
    let first = |s: &Served| s.first_token.expect("an answer").as_secs_f64();
    let per_token = |s: &Served| (s.total.as_secs_f64() - first(s)) / f64::from(s.generated_tokens - 1);
    let several = served.iter().filter(|s| s.generated_tokens > 1);
    (served.iter().map(first).collect(), several.map(per_token).collect())
}

/// Mean and 90th percentile of the time to first token and mean time between tokens of the default strategy, each
/// relative to the other strategy.
fn against(others: &[&str], pace: f64, speeds: &[f64]) -> BTreeMap<String, [f64; 3]> {
    let figures = |played: &Played| {
        assert!(played.served.len() as u64 == REQUESTS && played.served.iter().all(|s| s.ending == Ending::Answered));
        let (first_token, per_token) = latencies(&played.served);
        [mean(&first_token), quantile(&first_token, 0.9), mean(&per_token)]
    };
    let ours = figures(&play("predicted-latency", pace, speeds));
    let part = |name: &&str| {
        let theirs = figures(&play(name, pace, speeds));
        ((*name).to_owned(), std::array::from_fn(|i| ours[i] / theirs[i]))
    };
    others.iter().map(part).collect()
}

#[test]
fn default_strategy_lowers_ttft_on_equal_servers() {
    let parts = against(&["least-request", "prefix-cache", "pipeline"], 2.0, &[1.0; 8]);
    for (name, [mean, p90, per_token]) in &parts {
        assert!(*mean < 0.7 && *p90 < 0.7 && *per_token < 1.05, "of {name}: {mean:.2} {p90:.2} {per_token:.2}");
    }
}

#[test]
fn default_strategy_lowers_ttft_on_unequal_servers_without_tuning() {
    let parts = against(&["least-request", "prefix-cache"], 1.7, &[1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 0.25]);
    for (name, [mean, p90, per_token]) in &parts {
        assert!(*mean < 0.65 && *p90 < 0.65 && *per_token < 1.05, "of {name}: {mean:.2} {p90:.2} {per_token:.2}");
    }
}

#[test]
fn burst_is_spread_before_metrics_are_scraped() {
    let at = Timestamp(0).after(SCRAPE / 2);
    let burst = (0..3 * ENGINES as u32).map(|i| request(i.into(), at, &[text(i, 2_000)], 50)).collect();
    let played = Pool::of_speeds(&[1.0; ENGINES]).play("predicted-latency", &mut Open::new(burst));
    let mut served = [0; ENGINES];
    played.served.iter().for_each(|s| served[s.endpoint.expect("a server") as usize] += 1);
    assert_eq!(served, [3; ENGINES], "at one moment, with the metrics of before");
}

#[test]
fn learned_speeds_predict_the_time_to_first_token() {
    // Servers with few requests give noisy results, so four loads are averaged.
    let loads = [1.5, 1.6, 1.7, 1.8];
    let shown = loads.map(|load| {
        let played = play("predicted-latency", load, &[1.0, 1.0, 0.5, 2.0, 1.0, 1.0, 0.5, 0.25]);
        let learned: Vec<_> = played.endpoints.iter().map(|e| e.speed.learned().expect("answers")).collect();
        let errors: Vec<f64> = learned.iter().map(|l| l.first_token_error).collect();
        assert!(mean(&errors) < 0.5, "{load}: {errors:.2?}");
        let speeds: Vec<f64> = learned.iter().map(|l| l.prefill_tokens_per_second).collect();
        let (usual, half) = (mean(&[speeds[0], speeds[1], speeds[4], speeds[5]]), mean(&[speeds[2], speeds[6]]));
        assert!(speeds[3] > 1.2 * usual && usual > 1.3 * speeds[7], "{load}: {speeds:.0?}");
        [speeds[3] / usual, usual / half, half / speeds[7]]
    });
    // 25,000 tokens a second at speed 1, minus attention cost that is counted as tokens. Differences between servers
    // are learned only in part.
    let [fast, half, slow] = std::array::from_fn(|i| mean(&shown.map(|ratios| ratios[i])));
    assert!(fast > 1.4 && half > 1.05 && slow > 1.5, "{shown:.2?}");
}
