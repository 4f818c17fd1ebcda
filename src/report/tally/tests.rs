//! Figures against exact ones, and joining that loses nothing.

use super::batches::{Batches, MAX_BATCHES, RequestTimes};
use super::latency::Latency;
use super::timeline::{MAX_POINTS, Timeline};
use super::*;
use proptest::prelude::*;

/// An answered request with round figures; the fields that a test is about are set by it.
fn served(number: u64) -> Served {
    Served {
        number,
        pair: number,
        at: Timestamp(0),
        endpoint: Some(0),
        prompt_tokens: 1_000,
        expected_cached_tokens: 0,
        cached_tokens: 0,
        generated_tokens: 11,
        first_token: Some(Duration::from_millis(500)),
        total: Duration::from_millis(1_500),
        preemptions: 0,
        ending: Ending::Answered,
        handover: None,
        fell_back: false,
        turn: None,
        alone: None,
    }
}

#[test]
fn counts_and_parts_are_exact() {
    let mut tally = Tally::new(3);
    tally.add(&Served { at: Timestamp(1_000_000_000), cached_tokens: 250, expected_cached_tokens: 300, ..served(0) });
    tally.add(&Served { endpoint: Some(1), preemptions: 2, ..served(1) });
    tally.add(&Served { ending: Ending::Lost, endpoint: Some(1), generated_tokens: 0, first_token: None, ..served(2) });
    let refused =
        Served { endpoint: None, ending: Ending::Refused, first_token: None, generated_tokens: 0, ..served(3) };
    tally.add(&Served { total: Duration::ZERO, ..refused });
    assert_eq!(tally.endings(), EndingCounts { answered: 2, refused: 1, lost: 1 });
    assert_eq!(tally.error_rate(), Some(0.5));
    assert_eq!(tally.tokens(), TokenCounts { prompt: 3_000, expected_cached: 300, cached: 250, generated: 22 });
    assert_eq!(tally.hit_rate(), Some(250.0 / 3_000.0), "what nobody took does not count");
    assert_eq!(tally.preemptions(), 2);
    assert_eq!(tally.endpoints().iter().map(EndpointCounts::work).collect::<Vec<_>>(), [750, 2_000, 0]);
    assert_eq!(tally.first_token().count(), 2);
    assert_eq!(tally.per_token().mean(), Some(0.1));
    assert_eq!(tally.duration(), Duration::from_millis(2_500), "from the first coming at 0 s to the last end at 2.5 s");
    assert_eq!(tally.throughput(), Some(0.8));
    assert_eq!(tally.output_rate(), Some(8.8));
    assert_eq!(tally.goodput(), None, "there are no targets");
}

#[test]
fn a_lost_answer_counts_for_its_first_token_only() {
    let mut tally = Tally::new(1);
    tally.add(&Served { ending: Ending::Lost, ..served(0) });
    assert_eq!((tally.first_token().count(), tally.per_token().count(), tally.total().count()), (1, 0, 0));
}

#[test]
fn nothing_has_no_figures() {
    let tally = Tally::new(4);
    let figures = [tally.error_rate(), tally.hit_rate(), tally.goodput(), tally.throughput(), tally.output_rate()];
    assert_eq!(figures, [None; 5]);
    assert_eq!((tally.first_token().mean(), tally.first_token().quantile(0.5)), (None, None));
    assert!(tally.spread().is_none());
    assert_eq!(tally.duration(), Duration::ZERO);
}

#[test]
fn goodput_wants_all_targets_and_an_answer() {
    let targets =
        Targets { first_token: Some(Duration::from_millis(500)), per_token: Some(Duration::from_millis(100)) };
    let mut tally = Tally::new(1).with_targets(targets);
    tally.add(&served(0));
    assert_eq!(tally.goodput(), Some(1.0), "the targets themselves are kept");
    tally.add(&Served { first_token: Some(Duration::from_millis(501)), ..served(1) });
    tally.add(&Served { total: Duration::from_millis(1_501), ..served(2) });
    tally.add(&Served { ending: Ending::Lost, ..served(3) });
    assert_eq!(tally.goodput(), Some(0.25));
    tally.add(&Served { generated_tokens: 1, ..served(4) });
    assert_eq!(tally.goodput(), Some(0.4), "one token has no time between tokens");
    let refused = Served { endpoint: None, ending: Ending::Refused, first_token: None, ..served(5) };
    tally.add(&refused);
    assert_eq!(tally.goodput(), Some(2.0 / 6.0), "what was rejected was not good");
}

#[test]
fn short_answers_have_gaps_but_no_time_per_output_token() {
    let mut tally = Tally::new(1);
    // Seven tokens in a second, eight in 700 ms, and 101 in a second.
    for (number, tokens, millis) in [(0, 7, 1_500), (1, 8, 1_200), (2, 101, 1_500)] {
        tally.add(&Served { generated_tokens: tokens, total: Duration::from_millis(millis), ..served(number) });
    }
    assert_eq!((tally.per_token().count(), tally.inter_token().count()), (2, 6 + 7 + 100));
    assert!((tally.per_token().mean().unwrap() - (0.1 + 0.01) / 2.0).abs() < 1e-9, "each answer counts once");
    let mean = tally.inter_token().mean().unwrap();
    assert!((mean - 2.7 / 113.0).abs() < 1e-8, "each gap counts once: {mean}");
    assert!((tally.inter_token().quantile(0.5).unwrap() - 0.01).abs() < 1e-4, "most gaps are of the long answer");
}

#[test]
fn spread_of_known_loads() {
    let even = LoadSpread::of([5, 5, 5, 5]).unwrap();
    assert_eq!((even.max_over_mean, even.variation, even.jain), (1.0, 0.0, 1.0));
    let one = LoadSpread::of([8, 0, 0, 0]).unwrap();
    assert_eq!((one.max_over_mean, one.jain), (4.0, 0.25));
    assert!((one.variation - 3f64.sqrt()).abs() < 1e-12);
    assert!(LoadSpread::of([0, 0]).is_none() && LoadSpread::of([]).is_none());
}

#[test]
fn an_endpoint_that_was_not_foreseen_is_added() {
    let mut tally = Tally::new(1);
    tally.add(&Served { endpoint: Some(4), ..served(0) });
    assert_eq!(tally.endpoints().len(), 5);
    assert_eq!(tally.endpoints().last().unwrap().requests, 1);
}

/// The same figure from all values: the least that the part `q` of them does not exceed.
fn exact(sorted: &[u64], q: f64) -> u64 {
    let rank = ((q * sorted.len() as f64).ceil() as usize).clamp(1, sorted.len());
    sorted[rank - 1]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn quantiles_and_means_are_those_of_all_values(
        mut micros in prop::collection::vec(prop_oneof![1u64..1_000, 1u64..1_000_000, 1u64..30_000_000_000], 1..400),
        q in 0.0f64..=1.0
    ) {
        let mut latency = Latency::default();
        micros.iter().for_each(|micros| latency.add(Duration::from_micros(*micros)));
        micros.sort_unstable();
        for q in [q, 0.5, 0.9, 0.99, 1.0] {
            let (got, want) = (latency.quantile(q).unwrap() * 1e6, exact(&micros, q) as f64);
            // Rounding of `q * n` may differ by one rank in the two calculations.
            let near = [q - 1e-9, q + 1e-9].map(|q| exact(&micros, q) as f64);
            let right = [want, near[0], near[1]].iter().any(|want| (got - want).abs() <= want * 1e-3 + 1e-6);
            prop_assert!(right, "quantile {} is {} us, not {} us", q, got, want);
        }
        let mean = micros.iter().map(|m| *m as f64).sum::<f64>() / micros.len() as f64 / 1e6;
        prop_assert!((latency.mean().unwrap() - mean).abs() <= mean * 1e-9);
    }

    #[test]
    fn joined_batches_keep_all_sums(
        requests in prop::collection::vec((0u64..20_000, 0u64..10_000_000_000, any::<bool>()), 1..500)
    ) {
        let mut batches = Batches::default();
        for (number, nanos, answered) in &requests {
            let time = Duration::from_nanos(*nanos);
            let per_token = answered.then_some(time);
            batches.add(*number, RequestTimes { first_token: Some(time), per_token, total: Some(time * 2) });
        }
        let most = requests.iter().map(|r| r.0).max().unwrap();
        prop_assert!(batches.batches().len() <= MAX_BATCHES);
        prop_assert!(most < batches.width() * MAX_BATCHES as u64);
        for (at, batch) in batches.batches().iter().enumerate() {
            let mine = requests.iter().filter(|r| r.0 / batches.width() == at as u64);
            let sums = mine.clone().fold((0, 0), |(n, sum), r| (n + 1, sum + r.1));
            let answered = mine.filter(|r| r.2).fold((0, 0), |(n, sum), r| (n + 1, sum + r.1));
            prop_assert_eq!((batch.first_token.count, batch.first_token.nanos), sums);
            prop_assert_eq!((batch.per_token.count, batch.per_token.nanos), answered);
            prop_assert_eq!((batch.total.count, batch.total.nanos), (sums.0, sums.1 * 2));
        }
        let wide = batches.at_width(64);
        prop_assert!(wide.width() >= 64 && wide.batches().len() == (most / wide.width() + 1) as usize);
    }

    #[test]
    fn the_order_of_requests_does_not_matter(numbers in prop::collection::vec(0u64..5_000, 1..200)) {
        let of = |numbers: &[u64]| {
            let mut batches = Batches::default();
            let times = |n: u64| RequestTimes { first_token: Some(Duration::from_nanos(n * 7 + 1)), ..RequestTimes::default() };
            numbers.iter().for_each(|n| batches.add(*n, times(*n)));
            batches
        };
        let mut backwards = numbers.clone();
        backwards.reverse();
        prop_assert_eq!(of(&numbers), of(&backwards));
    }

    #[test]
    fn a_long_timeline_keeps_all_sums_in_few_points(samples in 1usize..3_000, endpoints in 1u32..4) {
        let mut timeline = Timeline::default();
        let second = |n: usize| Timestamp(n as u64 * 1_000_000_000);
        for n in 0..samples {
            // The last endpoint comes when half of the time is over.
            let there = if n * 2 < samples { endpoints - 1 } else { endpoints };
            let of = |e: u32| Sample {
                running: n as u32 % 7 + e,
                waiting: e,
                kv_usage: 0.25,
                prefix_queries: 100 * n as u64,
                prefix_hits: 40 * n as u64,
            };
            timeline.add(second(n), &(0..there).map(of).collect::<Vec<_>>());
        }
        let points = timeline.points();
        prop_assert!(points.len() <= MAX_POINTS);
        prop_assert!(samples < MAX_POINTS || points.len() >= MAX_POINTS / 2);
        prop_assert_eq!(points.iter().map(|p| p.samples as usize).sum::<usize>(), samples);
        prop_assert_eq!(points.first().unwrap().from, second(0));
        prop_assert_eq!(points.last().unwrap().until, second(samples - 1));
        prop_assert!(points.windows(2).all(|pair| pair[0].until < pair[1].from));
        for e in 0..endpoints {
            let there = |n: &usize| e + 1 < endpoints || *n * 2 >= samples;
            let spans = || points.iter().filter_map(|p| p.endpoints.get(e as usize));
            let in_flight: u64 = (0..samples).filter(there).map(|n| (n % 7) as u64 + 2 * u64::from(e)).sum();
            prop_assert_eq!(spans().map(|s| s.in_flight).sum::<u64>(), in_flight);
            prop_assert_eq!(spans().map(|s| s.queries).sum::<u64>(), 100 * (samples as u64 - 1));
            prop_assert_eq!(spans().map(|s| s.hits).sum::<u64>(), 40 * (samples as u64 - 1));
        }
    }
}

#[test]
fn counters_that_began_anew_are_counted_from_there() {
    let mut timeline = Timeline::default();
    for (second, queries, hits) in [(0, 1_000, 500), (1, 1_100, 550), (2, 30, 10), (3, 50, 20)] {
        let sample = Sample { prefix_queries: queries, prefix_hits: hits, ..Sample::default() };
        timeline.add(Timestamp(second * 1_000_000_000), &[sample]);
    }
    let sums: Vec<(u64, u64)> = timeline.points().iter().map(|point| (point.queries(), point.hits())).collect();
    assert_eq!(sums, [(1_000, 500), (100, 50), (30, 10), (20, 10)]);
    assert_eq!(timeline.points().last().unwrap().hit_rate(), Some(0.5));
}

#[test]
fn numbers_and_times_without_bounds_are_borne() {
    let mut tally = Tally::new(1);
    tally.add(&Served { first_token: Some(Duration::MAX), total: Duration::MAX, ..served(u64::MAX) });
    tally.add(&served(0));
    assert_eq!(tally.first_token().count(), 2);
    assert_eq!(tally.batches().batches().iter().map(|batch| batch.first_token.count).sum::<u64>(), 2);
    assert!((tally.first_token().quantile(1.0).unwrap() - 36_000.0).abs() < 36.0);
}

#[test]
fn tokens_of_an_answer_count_though_nobody_says_whose_it_is() {
    let mut tally = Tally::new(2);
    tally.add(&Served { endpoint: None, ..served(0) });
    tally.add(&Served { endpoint: None, ending: Ending::Refused, ..served(1) });
    let one = served(0);
    assert_eq!(tally.tokens().prompt, u64::from(one.prompt_tokens));
    assert_eq!(tally.tokens().generated, u64::from(one.generated_tokens));
    assert!(tally.endpoints().iter().all(|endpoint| endpoint.requests == 0));
}

#[test]
fn encode_servers_do_not_count_in_the_spread_of_prompts() {
    let spread = |roles: &[Roles]| {
        let mut tally = Tally::new(3).with_roles(roles.to_vec());
        (0..4).for_each(|number| tally.add(&Served { endpoint: Some(number as u32 % 2), ..served(number) }));
        tally.spread().unwrap().variation
    };
    assert!(spread(&[Roles::DECODE; 3]) > 0.5, "the third server computed nothing");
    assert_eq!(spread(&[Roles::DECODE, Roles::DECODE, Roles::ENCODE]), 0.0);
}
