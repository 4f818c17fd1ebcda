//! What the default strategy buys over others, in virtual time: simulated engines, the real strategies over the real prefix cache and the
//! real ledger, metrics that are 100 ms old. Deterministic, so the bounds leave room for later changes only.

use crate::world::{ENGINES, Latencies, NUM_BLOCKS, World, engine_config, text, trace};
use serde_json::Value;
use std::collections::BTreeMap;

/// Requests of the trace that are played: enough for caches to fill and speeds to be learned.
const REQUESTS: usize = 1_200;

/// Plays the trace, `pace` times as fast as it was recorded, to engines of these speeds.
fn play(strategy: &str, pace: f64, speeds: &[f64]) -> World {
    let config = |speed: &f64| {
        let mut config = engine_config(NUM_BLOCKS);
        config.latency.speed = *speed;
        config
    };
    let configs: Vec<_> = speeds.iter().map(config).collect();
    let mut world = World::of(strategy, Value::Null, &configs);
    world.play(&trace(pace)[..REQUESTS]);
    world
}

/// The predicted strategy's mean and 90th percentile of the time to the first token, and mean time between tokens, each as a part of every
/// other strategy's.
fn against(others: &[&str], pace: f64, speeds: &[f64]) -> BTreeMap<String, [f64; 3]> {
    let figures = |world: &World| {
        let l = &world.latencies;
        assert_eq!(l.first_token.len(), REQUESTS);
        [Latencies::mean(&l.first_token), Latencies::quantile(&l.first_token, 0.9), Latencies::mean(&l.per_token)]
    };
    let ours = figures(&play("predicted-latency", pace, speeds));
    let part = |name: &&str| {
        let theirs = figures(&play(name, pace, speeds));
        ((*name).to_owned(), std::array::from_fn(|i| ours[i] / theirs[i]))
    };
    others.iter().map(part).collect()
}

#[test]
fn on_equal_servers_first_tokens_come_in_well_under_the_time_of_the_others() {
    let parts = against(&["least-request", "prefix-cache", "pipeline"], 2.0, &[1.0; 8]);
    for (name, [mean, p90, per_token]) in &parts {
        assert!(*mean < 0.7 && *p90 < 0.7 && *per_token < 1.05, "of {name}: {mean:.2} {p90:.2} {per_token:.2}");
    }
}

#[test]
fn on_servers_of_unequal_speed_nobody_calibrates_anything() {
    let parts = against(&["least-request", "prefix-cache"], 1.7, &[1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 0.25]);
    for (name, [mean, p90, per_token]) in &parts {
        assert!(*mean < 0.65 && *p90 < 0.65 && *per_token < 1.05, "of {name}: {mean:.2} {p90:.2} {per_token:.2}");
    }
}

#[test]
fn a_burst_spreads_before_any_page_tells_of_it() {
    let mut world = World::new("predicted-latency", Value::Null, &[NUM_BLOCKS; ENGINES]);
    let now = world.next_scrape;
    let mut served = [0; ENGINES];
    for i in 0..3 * ENGINES as u32 {
        served[world.arrive(now, vec![text(i, 2_000)], 50)] += 1;
    }
    assert_eq!(served, [3; ENGINES], "at one moment, with the metrics of before");
}

#[test]
fn predictions_come_true() {
    let world = play("predicted-latency", 1.7, &[1.0, 1.0, 0.5, 2.0, 1.0, 1.0, 0.5, 0.25]);
    let errors: Vec<f64> =
        world.endpoints().iter().map(|e| e.speed.learned().expect("answers").first_token_error).collect();
    assert!(Latencies::mean(&errors) < 0.5, "{errors:.2?}");
    let speeds: Vec<f64> =
        world.endpoints().iter().map(|e| e.speed.learned().expect("answers").prefill_tokens_per_second).collect();
    // 25,000 tokens a second at speed 1, less what attention costs where it was taken for tokens. Differences are believed in part only.
    assert!(speeds[3] > 1.3 * speeds[0] && speeds[0] > 1.1 * speeds[2] && speeds[2] > 1.4 * speeds[7], "{speeds:.0?}");
}
