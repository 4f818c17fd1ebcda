//! The price of work, compared with the formula that it follows from.

use super::*;
use crate::objective::Slo;
use crate::testing::NOW;
use crate::testing::{TestServer, Trial, among, load, prefix_cache, reports, silent};
use crate::{Candidate, RequestFacts};
use attache_pool::EndpointMetrics;
use attache_pool::speed::{Reservation, Work};
use attache_prefix::key::BlockKey;
use attache_prefix::learning::PrefixUpdate;
use attache_types::clock::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// Seconds over which [`attache_pool::speed`] counts 60 simultaneous requests: the first 5 s of a mean with a half-life
/// of 60 s.
const ELAPSED: f64 = 4.86;

/// Servers with both roles and these KV cache usages. Each has learned its own speed; prices follow from that of the
/// last one.
fn pool(kv: &[f32]) -> Trial {
    let servers: Vec<TestServer> = kv.iter().map(|kv| load(0, *kv)).collect();
    among(servers)
}

/// Price of a second of waiting for the last `candidates` servers, after 60 requests with `tokens` uncached tokens.
fn behind(trial: &Trial, tokens: u32, candidates: usize) -> f64 {
    let cx = trial.context();
    let found = trial.candidates();
    let field: &[Candidate<'_>] = &found[found.len() - candidates..];
    let work = Work { prompt_tokens: tokens, uncached_tokens: tokens, ..Work::default() };
    let last = &found[found.len() - 1];
    for _ in 0..60 {
        drop(Reservation::begin(last.state.endpoint.clone(), None, work, true, cx.now));
    }
    let prices = Prices::learned(&cx, [field], Serving::OneOrTwoServers);
    // A second before the server is idle again, none of it by this request.
    prices.work(last, &Prediction { first_token: 1.0, per_token: 0.0, own_prefill: 0.0 }, 0.0)
}

#[track_caller]
fn assert_about(price: f64, expected: f64) {
    assert!((price / expected - 1.0).abs() < 0.01, "{price} {expected}");
}

#[test]
fn second_of_work_delays_requests_that_arrive_before_the_server_is_idle() {
    let rate = 60.0 / ELAPSED;
    assert_about(behind(&pool(&[0.5; 4]), 0, 4), rate / 4.0 / 0.5);
    assert_about(behind(&pool(&[0.2, 0.4]), 0, 2), rate / 2.0 / 0.7);
    assert_about(behind(&pool(&[0.0]), 0, 1), rate);
    assert_about(behind(&pool(&[1.0; 4]), 0, 4), rate / 4.0 / (1.0 - MAX_BUSY));
}

#[test]
fn utilization_follows_from_prompts_or_caches() {
    // 40 µs per token and 1 ns per pair: 500 tokens take 20 ms. 60 such prompts in 4.86 s are a quarter of one server's
    // time.
    let busy = 60.0 * (500.0 * 40e-6 + 500.0 * 250.0 * 1e-9) / ELAPSED;
    assert!((0.2..0.3).contains(&busy), "{busy}");
    let rate = 60.0 / ELAPSED;
    assert_about(behind(&pool(&[0.0]), 500, 1), rate / (1.0 - busy));
    assert_about(behind(&pool(&[0.1]), 500, 1), rate / (1.0 - busy));
    assert_about(behind(&pool(&[0.8]), 500, 1), rate / 0.2);
    assert_about(behind(&pool(&[0.0]), 50_000, 1), rate / (1.0 - MAX_BUSY));
}

#[test]
fn arrival_rate_counts_all_servers_even_if_a_request_may_not_use_some() {
    let all = behind(&pool(&[0.5; 4]), 500, 4);
    assert_about(behind(&pool(&[0.5; 4]), 500, 1), all);
    assert_about(behind(&pool(&[0.5; 4]), 500, 3), all);
}

#[test]
fn wait_counts_fully_and_the_requests_own_work_half() {
    let trial = pool(&[0.5]);
    let second = behind(&trial, 0, 1);
    let (cx, found) = (trial.context(), trial.candidates());
    let prices = Prices::learned(&cx, [&found[..]], Serving::OneOrTwoServers);
    let price = |prices: &Prices, first_token, own_prefill, room| {
        let predicted = Prediction { first_token, per_token: 0.0, own_prefill };
        prices.work(&found[0], &predicted, own_prefill + room)
    };
    assert_about(price(&prices, 3.0, 2.0, 0.0), 2.0 * second);
    assert_about(price(&prices, 2.0, 2.0, 0.0), second);
    assert_about(price(&prices, 2.0, 2.0, 4.0), 3.0 * second);
    assert_about(price(&prices.at(Some(7.0)), 3.0, 2.0, 4.0), 7.0);
}

/// A server with a cache of 1,000 blocks of 16 tokens and this usage.
fn cache(kv_usage: f32) -> TestServer {
    let (block_size, num_blocks) = (Some(16), Some(1_000));
    reports(EndpointMetrics { kv_usage, block_size, num_blocks, ..EndpointMetrics::default() })
}

/// A pool of such servers, and a request of 640 tokens.
fn caches(kv: &[f32]) -> Trial {
    among(kv.iter().map(|kv| cache(*kv)).collect()).long(640)
}

/// Cost of the request's cache blocks on the first server, if its prompt takes 2 s and each response token 50 ms.
fn room(trial: &Trial) -> f64 {
    let (cx, found) = (trial.context(), trial.candidates());
    Prices::learned(&cx, [&found[..]], Serving::OneOrTwoServers).room(&cx, &found[0], 2.0, 0.05)
}

#[test]
fn cache_blocks_cost_work_in_nearly_full_caches() {
    assert_about(room(&caches(&[1.0])), 640.0 / 16_000.0 * 2.0);
    // 25 such requests fit into the cache at once.
    let exponent = 52f64.sqrt() - 1.0;
    assert_about(room(&caches(&[0.9])), 640.0 / 16_000.0 * 2.0 * 0.9f64.powf(exponent));
    assert_about(room(&caches(&[1.0, 0.8])), 640.0 / 16_000.0 * 2.0 * 0.9f64.powf(exponent));
    assert!(room(&caches(&[0.5])) < 640.0 / 16_000.0 * 2.0 / 50.0);
    // A millionth of the cost in a full cache counts as nothing: 1e-6 = x ^ (√52 - 1).
    let nothing = 1e-6f64.powf(1.0 / exponent);
    assert!((0.10..0.12).contains(&nothing), "{nothing}");
    let nothing = nothing as f32;
    assert_eq!([0.0, nothing * 0.99].map(|kv| room(&caches(&[kv]))), [0.0; 2]);
    assert_about(room(&caches(&[nothing * 1.01])), 640.0 / 16_000.0 * 2.0 * 1e-6 * 1.01f64.powf(exponent));
    assert_eq!(room(&pool(&[1.0]).long(640)), 0.0, "a server that does not say how much it has room for");
}

#[test]
fn last_report_counts_and_an_unreported_cache_size_is_the_mean() {
    let said = |servers: [TestServer; 2]| room(&among(servers.into()).long(640));
    assert_about(said([cache(0.9).aged(4_000), cache(0.8)]), said([cache(0.9), cache(0.8)]));
    assert_about(said([silent(), cache(0.9)]), said([cache(0.9), cache(0.9)]));
    assert_about(said([load(0, 0.9), cache(0.9)]), said([cache(0.9), cache(0.9)]));
}

#[test]
fn number_of_concurrent_requests_depends_on_the_engine() {
    let ranked = |ranks: Vec<u32>, blocks| {
        let (block_size, num_blocks) = (Some(16), Some(blocks));
        let page = EndpointMetrics { kv_usage: 0.9, block_size, num_blocks, ranks, ..EndpointMetrics::default() };
        room(&among(vec![reports(page)]).long(640))
    };
    assert_about(ranked(vec![3; 4], 4_000), ranked(Vec::new(), 1_000) / 4.0);
}

/// Lets the pool observe responses of 400 tokens.
fn answered(trial: Trial) -> Trial {
    for _ in 0..8 {
        let mut asked = Reservation::begin(trial.pool.endpoints[0].endpoint.clone(), None, Work::default(), true, NOW);
        asked.first_token(true, Timestamp(NOW.0 + 1_000_000_000));
        asked.ended(Some(400), Timestamp(NOW.0 + 21_000_000_000));
    }
    trial
}

#[test]
fn response_takes_cache_blocks_as_it_is_generated() {
    let trial = answered(caches(&[1.0]));
    // 640 tokens for the 2 s of prefill and the 20 s of the response, plus half of its own 400 tokens on average.
    assert_about(room(&trial), (640.0 * 22.0 + 200.0 * 20.0) / 16_000.0);
}

#[test]
fn blocks_in_use_by_others_take_no_additional_cache() {
    let trial = caches(&[1.0, 1.0]);
    let cache = prefix_cache();
    cache.reconcile(&trial.pool);
    let keys: Vec<BlockKey> = (1..=40).map(BlockKey).collect();
    let [one, other] = [0, 1].map(|i: usize| trial.pool.endpoints[i].id());
    [one, other].iter().for_each(|id| cache.record(*id, &keys[..36], attache_prefix::TenantId(0), NOW));
    let _other_request =
        cache.claim(one, &PrefixUpdate { keys: Arc::new(keys[..20].to_vec()), ..PrefixUpdate::default() }, NOW);
    let found = cache.lookup(&mut &*keys, NOW);
    let cx = PickContext { prefix: Some(&found), ..trial.context() };
    let mut candidates = trial.candidates();
    Candidate::look_up(&mut candidates, &cx);
    assert_eq!(candidates.iter().map(|c| c.cached.any).collect::<Vec<_>>(), [36 * 16; 2]);
    // Speculative entries are visible at depths of a power of two: 16, since it is fewer than 32.
    assert_eq!(candidates.iter().map(|c| c.cached.in_use).collect::<Vec<_>>(), [32 * 16, 0]);
    let prices = Prices::learned(&cx, [&candidates[..]], Serving::OneOrTwoServers);
    let rooms = [0, 1].map(|i: usize| prices.room(&cx, &candidates[i], 2.0, 0.05));
    assert_about(rooms[0], 8.0 / 1_000.0 * 2.0);
    assert_about(rooms[1], 40.0 / 1_000.0 * 2.0);
}

#[test]
fn number_of_requests_that_fit_follows_from_their_own_blocks() {
    let trial = answered(caches(&[0.9]));
    let (cx, mut found) = (trial.context(), trial.candidates());
    found[0].cached.in_use = 240;
    let prices = Prices::learned(&cx, [&found[..]], Serving::OneOrTwoServers);
    let short = |own: f64| 0.9f64.powf((2.0 * (16_000.0 / own + 1.0)).sqrt() - 1.0);
    // 400 tokens of the prompt, for another server; plus half of 400 tokens of a response.
    assert_about(prices.room(&cx, &found[0], 2.0, 0.0), 400.0 * 2.0 / 16_000.0 * short(400.0));
    assert_about(prices.room(&cx, &found[0], 0.0, 0.05), 600.0 * 20.0 / 16_000.0 * short(600.0));
}

#[test]
fn each_part_of_a_request_pays_for_its_cache_blocks() {
    let trial = answered(caches(&[0.95]));
    let (cx, found) = (trial.context(), trial.candidates());
    let server = &found[0];
    let learned = Prices::learned(&cx, [&found[..]], Serving::OneOrTwoServers);
    let priced = |cost: fn(&PickContext<'_>, &Candidate<'_>, &Prices) -> f64| {
        (cost(&cx, server, &learned.at(Some(7.0))) - cost(&cx, server, &learned.at(Some(0.0)))) / 7.0
    };
    let (_, all) = forecast(&cx, server);
    let room = |seconds, per_token| learned.room(&cx, server, seconds, per_token);
    assert!(room(0.0, all.per_token) > 1e-3 && room(all.own_prefill, 0.0) > 1e-6, "what is left out would be seen");
    assert!((priced(whole) - all.own_prefill - room(all.own_prefill, all.per_token)).abs() < 1e-9);
    assert!((priced(prefill) - all.own_prefill - room(all.own_prefill, 0.0)).abs() < 1e-9);
    assert!((priced(decode) - room(0.0, all.per_token)).abs() < 1e-9);
}

#[test]
fn decoding_and_waiting_requests_are_delayed_by_another_prompt() {
    let metrics = |running, waiting| reports(EndpointMetrics { running, waiting, ..EndpointMetrics::default() });
    // No request was sent recently, so none is expected, and no response has been observed.
    let trial = among(vec![metrics(0, 0), metrics(3, 0), metrics(3, 4)]).long(8_000);
    let (cx, found) = (trial.context(), trial.candidates());
    let prices = Prices::learned(&cx, [&found[..]], Serving::OneServer);
    let beside_pairs = Prices::learned(&cx, [&found[..]], Serving::OneOrTwoServers);
    for (candidate, delayed) in found.iter().zip([0.0, 3.0, 7.0]) {
        let (_, predicted) = forecast(&cx, candidate);
        assert!(predicted.own_prefill > 0.3, "8,000 tokens");
        let others = whole(&cx, candidate, &prices) - predicted.first_token;
        assert!((others - delayed * predicted.own_prefill).abs() < 1e-9, "{delayed}: {others}");
        let others = whole(&cx, candidate, &beside_pairs) - predicted.first_token;
        assert!(others.abs() < 1e-9, "beside pairs, {delayed}: {others}");
    }
    // A cached prompt causes no delay.
    let mut cached = trial.candidates();
    cached[2].cached.any = 8_000;
    let (_, predicted) = forecast(&cx, &cached[2]);
    assert!((whole(&cx, &cached[2], &prices) - predicted.first_token).abs() < 1e-9);
}

#[test]
fn expected_requests_count_half_where_one_server_serves() {
    let trial = pool(&[0.5]).long(8_000);
    behind(&trial, 0, 1);
    let (cx, found) = (trial.context(), trial.candidates());
    let learned = Prices::learned(&cx, [&found[..]], Serving::OneServer);
    let (load, predicted) = forecast(&cx, &found[0]);
    let price = learned.work(&found[0], &predicted, predicted.own_prefill);
    assert!(price > 0.1, "{price}");
    let others = learned.others(&found[0], &load, &predicted, 0.0);
    assert!((others - predicted.own_prefill * (load.decoding + load.waiting + price / 2.0)).abs() < 1e-9);
    let set = learned.at(Some(7.0)).others(&found[0], &load, &predicted, 0.0);
    assert!((set - 7.0 * predicted.own_prefill).abs() < 1e-9, "a configured price is the whole price");
}

#[test]
fn response_counts_by_its_weight_and_the_batch() {
    let with = |running| answered(among(vec![reports(EndpointMetrics { running, ..EndpointMetrics::default() })]));
    let answer = |trial: &Trial, serving, weight| {
        let (cx, found) = (trial.context(), trial.candidates());
        let (_, predicted) = forecast(&cx, &found[0]);
        (predicted.per_token, Prices::learned(&cx, [&found[..]], serving).weighing(weight).answer(&predicted))
    };
    let (idle, busy) = (with(0), with(20));
    let (per_token, tenth) = answer(&busy, Serving::OneServer, None);
    assert_about(tenth, 40.0 * per_token);
    assert_about(answer(&busy, Serving::OneOrTwoServers, None).1, 8.0 * per_token);
    assert_about(answer(&busy, Serving::OneServer, Some(0.5)).1, 200.0 * per_token);
    assert!(tenth > answer(&idle, Serving::OneServer, None).1, "20 others decode there");
}

/// The context of `trial` with another objective.
fn aiming<'a>(cx: PickContext<'a>, objective: Objective) -> PickContext<'a> {
    PickContext { objective, ..cx }
}

/// What each way of serving costs on each server, tokens weighing alike in all: by one server alone, by one of several
/// ways, prefill and decode.
fn costs(cx: &PickContext<'_>, found: &[Candidate<'_>]) -> Vec<f64> {
    let prices = |serving| Prices::learned(cx, [found], serving).weighing(Some(TOKEN_WEIGHT));
    let (alone, shared) = (prices(Serving::OneServer), prices(Serving::OneOrTwoServers));
    let of = |c| [whole(cx, c, &alone), whole(cx, c, &shared), prefill(cx, c, &shared), decode(cx, c, &shared)];
    found.iter().flat_map(of).collect()
}

#[test]
fn objective_of_equal_weights_changes_no_cost() {
    let busy = |running, waiting| reports(EndpointMetrics { running, waiting, ..EndpointMetrics::default() });
    let trial = answered(among(vec![busy(0, 0), busy(20, 3), load(2, 0.8)])).long(3_000);
    let (cx, found) = (trial.context(), trial.candidates());
    let without = costs(&cx, &found);
    let equal = Objective { ttft: 3.0, tpot: 3.0, slo: None }.normalised();
    assert_eq!(costs(&aiming(cx, equal), &found), without);
}

#[test]
fn weights_apply_to_first_and_further_tokens_separately() {
    let busy = reports(EndpointMetrics { running: 20, waiting: 1, ..EndpointMetrics::default() });
    let trial = answered(among(vec![busy])).long(3_000);
    let (cx, found) = (trial.context(), trial.candidates());
    let of = |ttft, tpot| costs(&aiming(cx, Objective { ttft, tpot, slo: None }), &found);
    let (both, first, further) = (of(1.0, 1.0), of(1.0, 0.0), of(0.0, 1.0));
    for (way, ((both, first), further)) in
        ["alone", "whole", "prefill", "decode"].iter().zip(both.iter().zip(&first).zip(&further))
    {
        assert!((first + further - both).abs() < 1e-9, "{way}: {first} + {further}, not {both}");
        assert_eq!(*further > 0.0, *way != "prefill", "{way}: {further}");
        assert!(*first > 0.0, "{way}: {first}");
    }
    // Requests that decode there receive tokens later.
    let (_, predicted) = forecast(&cx, &found[0]);
    let delayed = further[0] - further[1];
    assert!((delayed - 21.0 * predicted.own_prefill).abs() < 1e-9, "{delayed}");
}

#[test]
fn risk_of_a_missed_target_costs_more_than_its_seconds() {
    let busy = |running| reports(EndpointMetrics { running, ..EndpointMetrics::default() });
    let trial = answered(among(vec![busy(40), busy(0)])).long(3_000);
    // Prices follow from the last server's learned speed.
    let mut asked = Reservation::begin(trial.pool.endpoints[1].endpoint.clone(), None, Work::default(), true, NOW);
    asked.first_token(true, Timestamp(NOW.0 + 20_000_000));
    asked.ended(Some(400), Timestamp(NOW.0 + 3_212_000_000));
    let (cx, found) = (trial.context(), trial.candidates());
    let predicted: Vec<Prediction> = found.iter().map(|c| forecast(&cx, c).1).collect();
    let between =
        |of: fn(&Prediction) -> f64| Duration::from_secs_f64(f64::midpoint(of(&predicted[0]), of(&predicted[1])));
    let risks = |cx: PickContext<'_>, slo| {
        let objective = Objective { slo: Some(slo), ..Objective::default() };
        let (with, without) = (aiming(cx, objective), cx);
        let (with, without) = (costs(&with, &found), costs(&without, &found));
        with.iter().zip(without).map(|(with, without)| with - without).collect::<Vec<f64>>()
    };
    let ttft = Slo { ttft: Some(between(|p| p.first_token)), tpot: None, share: 0.9 };
    let tpot = Slo { ttft: None, tpot: Some(between(|p| p.per_token)), share: 0.9 };
    for (row, slo, ways) in
        [("first token", ttft, [true, true, true, false]), ("further tokens", tpot, [true, true, false, true])]
    {
        let risks = risks(cx, slo);
        for (way, counts) in ways.into_iter().enumerate() {
            let (of_busy, of_idle) = (risks[way], risks[4 + way]);
            assert_eq!(of_idle > 0.0, counts, "{row}, {way}: {of_idle}");
            assert!(of_busy >= of_idle, "{row}, {way}: the busy server misses it more likely");
        }
    }
    // Time in the queue reduces the time that is left; a request without any misses its target everywhere.
    let waiting = |seconds| {
        let request = RequestFacts { waited: Duration::from_secs_f64(seconds), ..cx.request };
        risks(PickContext { request, ..cx }, ttft)
    };
    assert!(waiting(0.01)[0] > waiting(0.0)[0]);
    let late = waiting(60.0);
    assert!((late[0] - late[4]).abs() < 1e-9 && (late[0] - ttft.price(ttft.ttft.unwrap().as_secs_f64())).abs() < 1e-9);
}
