//! The price of work, beside the formula that it follows from.

use super::*;
use crate::pool::speed::{Reservation, Work};
use crate::scheduling::Candidate;
use crate::scheduling::tests::trial::{Server, Trial, among, load};

/// Seconds that 60 requests of one moment count as, by [`crate::pool::speed`]: the first 5 s of a mean that forgets half in 60.
const ELAPSED: f64 = 4.86;

/// Servers for both whose caches are used so far. Each has learned for itself; prices follow from what the last one knows.
fn pool(kv: &[f32]) -> Trial {
    let servers: Vec<Server> = kv.iter().map(|kv| load(0, *kv)).collect();
    among(servers)
}

/// What comes behind a second of waiting, by the first so many servers; 60 requests with `tokens` to be computed have been sent.
fn behind(trial: &Trial, tokens: u32, candidates: usize) -> f64 {
    let cx = trial.context();
    let found = trial.candidates();
    let field: &[Candidate<'_>] = &found[found.len() - candidates..];
    let work = Work { prompt_tokens: tokens, uncached_tokens: tokens, ..Work::default() };
    let last = &found[found.len() - 1];
    for _ in 0..60 {
        drop(Reservation::begin(last.state.endpoint.clone(), None, work, true, cx.now));
    }
    let prices = Prices::learned(&cx, [field], DEFAULT_TOKEN_WEIGHT);
    // A second before the server is idle again, none of it by this request.
    prices.work(last, &Prediction { first_token: 1.0, per_token: 0.0, own_prefill: 0.0 })
}

#[track_caller]
fn assert_about(price: f64, expected: f64) {
    assert!((price / expected - 1.0).abs() < 0.01, "{price} {expected}");
}

#[test]
fn a_second_costs_those_who_come_before_the_server_is_idle() {
    let rate = 60.0 / ELAPSED;
    assert_about(behind(&pool(&[0.5; 4]), 0, 4), rate / 4.0 / 0.5);
    assert_about(behind(&pool(&[0.2, 0.4]), 0, 2), rate / 2.0 / 0.7);
    assert_about(behind(&pool(&[0.0]), 0, 1), rate);
    assert_about(behind(&pool(&[1.0; 4]), 0, 4), rate / 4.0 / (1.0 - FULLEST));
}

#[test]
fn servers_are_as_busy_as_their_prompts_or_their_caches_make_them() {
    // 40 µs a token and 1 ns a pair: 500 tokens are 20 ms, 60 prompts of them in 4.86 s a quarter of one server's time.
    let busy = 60.0 * (500.0 * 40e-6 + 500.0 * 250.0 * 1e-9) / ELAPSED;
    assert!((0.2..0.3).contains(&busy), "{busy}");
    let rate = 60.0 / ELAPSED;
    assert_about(behind(&pool(&[0.0]), 500, 1), rate / (1.0 - busy));
    assert_about(behind(&pool(&[0.1]), 500, 1), rate / (1.0 - busy));
    assert_about(behind(&pool(&[0.8]), 500, 1), rate / 0.2);
    assert_about(behind(&pool(&[0.0]), 50_000, 1), rate / (1.0 - FULLEST));
}

#[test]
fn what_comes_is_for_all_though_a_request_may_not_go_to_some() {
    let all = behind(&pool(&[0.5; 4]), 500, 4);
    assert_about(behind(&pool(&[0.5; 4]), 500, 1), all);
    assert_about(behind(&pool(&[0.5; 4]), 500, 3), all);
}

#[test]
fn the_wait_counts_whole_and_what_the_request_brings_half() {
    let trial = pool(&[0.5]);
    let second = behind(&trial, 0, 1);
    let (cx, found) = (trial.context(), trial.candidates());
    let prices = Prices::learned(&cx, [&found[..]], DEFAULT_TOKEN_WEIGHT);
    let price =
        |first_token, own_prefill| prices.work(&found[0], &Prediction { first_token, per_token: 0.0, own_prefill });
    assert_about(price(3.0, 2.0), 2.0 * second);
    assert_about(price(2.0, 2.0), second);
    let set = prices.at(Some(7.0));
    assert_about(set.work(&found[0], &Prediction { first_token: 3.0, per_token: 0.0, own_prefill: 2.0 }), 7.0);
}
