//! Intervals that hold what they promise.

use super::*;
use crate::tally::batches::RequestTimes;
use proptest::prelude::*;
use std::time::Duration;

fn batches(times: &[f64]) -> Batches {
    let mut batches = Batches::default();
    for (number, seconds) in times.iter().enumerate() {
        let times = RequestTimes { first_token: Some(Duration::from_secs_f64(*seconds)), ..RequestTimes::default() };
        batches.add(number as u64, times);
    }
    batches
}

/// Standard normal, by Box and Muller.
fn normal(rng: &mut PickRng) -> f64 {
    let (u, v): (f64, f64) = (rng.random_range(f64::MIN_POSITIVE..1.0), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// A series with mean 0, variance 1 and the correlation `phi` of neighbours.
fn autoregressive(rng: &mut PickRng, phi: f64, length: usize) -> Vec<f64> {
    let mut value = normal(rng);
    let series = std::iter::repeat_with(|| {
        value = phi * value + (1.0 - phi * phi).sqrt() * normal(rng);
        value
    });
    series.take(length).collect()
}

#[test]
fn equal_runs_show_no_difference() {
    let mut rng = for_request(1, 0);
    let times: Vec<f64> = autoregressive(&mut rng, 0.9, 3_000).iter().map(|x| x.exp()).collect();
    let run = batches(&times);
    let change = compare(&run, &run, Quantity::FirstToken).unwrap();
    assert_eq!((change.ratio, change.difference_seconds, change.verdict), (1.0, 0.0, ComparisonVerdict::NotShown));
    assert_eq!(change.difference_interval_seconds, Some(Interval { low: 0.0, high: 0.0 }));
    assert_eq!(compare(&run, &run, Quantity::PerToken), None, "there is no such time");
}

#[test]
fn a_shift_is_found_through_noise_that_both_share() {
    let mut rng = for_request(2, 0);
    let noise = autoregressive(&mut rng, 0.95, 20_000);
    let base: Vec<f64> = noise.iter().map(|x| 5.0 + x).collect();
    let shifted: Vec<f64> = base.iter().map(|x| x + 0.05 + 0.01 * normal(&mut rng)).collect();
    let change = compare(&batches(&shifted), &batches(&base), Quantity::FirstToken).unwrap();
    let Interval { low, high } = change.difference_interval_seconds.unwrap();
    assert!(low < 0.05 && 0.05 < high, "{low} .. {high}");
    assert!(high - low < 0.002, "the noise of 1 s, which both share, is cancelled out: {low} .. {high}");
    assert_eq!(change.verdict, ComparisonVerdict::Worse);
    let back = compare(&batches(&base), &batches(&shifted), Quantity::FirstToken).unwrap();
    assert_eq!(back.verdict, ComparisonVerdict::Better);
    assert!((back.difference_seconds + change.difference_seconds).abs() < 1e-9);
    let Interval { low, high } = back.ratio_interval.unwrap();
    assert!(low < back.ratio && back.ratio < high && high < 1.0);
    // The same two without their pairing: the difference drowns.
    let mut elsewhere = shifted.clone();
    elsewhere.rotate_left(9_000);
    let loose = compare(&batches(&elsewhere), &batches(&base), Quantity::FirstToken).unwrap();
    assert_eq!(loose.verdict, ComparisonVerdict::NotShown);
}

#[test]
fn equal_input_gives_equal_intervals() {
    let mut rng = for_request(3, 0);
    let of = |rng: &mut PickRng| batches(&autoregressive(rng, 0.5, 2_000).iter().map(|x| x.exp()).collect::<Vec<_>>());
    let (run, base) = (of(&mut rng), of(&mut rng));
    let once = compare(&run, &base, Quantity::FirstToken);
    assert!(once.is_some());
    assert_eq!(once, compare(&run, &base, Quantity::FirstToken));
}

/// How many of 200 intervals of the difference hold the true one, 0.3.
fn covered(phi: f64, length: usize) -> usize {
    let holds = |case: &u64| {
        let mut rng = for_request(4, *case);
        let base: Vec<f64> = autoregressive(&mut rng, phi, length).iter().map(|x| 10.0 + x).collect();
        let own: Vec<f64> = autoregressive(&mut rng, phi, length).iter().map(|x| 10.3 + x).collect();
        let change = compare_with(&batches(&own), &batches(&base), Quantity::FirstToken, 400).unwrap();
        let Interval { low, high } = change.difference_interval_seconds.unwrap();
        low <= 0.3 && 0.3 <= high
    };
    (0..200).filter(holds).count()
}

#[test]
fn intervals_hold_the_truth_as_often_as_they_promise() {
    // 95 % of 200 are 190, give or take 6 (two standard errors); what is left is for series as short as these.
    for (phi, length) in [(0.0, 300), (0.5, 500), (0.7, 900), (0.95, 4_000)] {
        let covered = covered(phi, length);
        assert!((176..=200).contains(&covered), "neighbours correlated by {phi}: {covered} of 200");
    }
}

#[test]
fn blocks_are_as_long_as_the_memory_of_the_series() {
    let length = |phi| block_length(&autoregressive(&mut for_request(5, 0), phi, 1_000));
    assert!(length(0.0) <= 3, "{}", length(0.0));
    assert!(length(0.5) > 3 && length(0.9) > 2 * length(0.5), "{} and {}", length(0.5), length(0.9));
    assert_eq!(block_length(&[2.0; 50]), 1);
}

#[test]
fn few_requests_have_a_ratio_but_no_verdict() {
    let change = compare(&batches(&[1.0; MIN_BATCHES - 1]), &batches(&[2.0; MIN_BATCHES - 1]), Quantity::FirstToken);
    let change = change.unwrap();
    assert_eq!((change.ratio, change.ratio_interval, change.verdict), (0.5, None, ComparisonVerdict::NotShown));
    let enough = compare(&batches(&[1.0; MIN_BATCHES]), &batches(&[2.0; MIN_BATCHES]), Quantity::FirstToken).unwrap();
    assert_eq!(enough.verdict, ComparisonVerdict::Better);
    assert_eq!(compare(&Batches::default(), &batches(&[1.0]), Quantity::FirstToken), None);
}

proptest! {
    #[test]
    fn runs_of_any_lengths_compare_over_what_both_have(a in 1usize..3_000, b in 1usize..3_000, each in 0.001f64..9.0) {
        let change = compare_with(&batches(&vec![each; a]), &batches(&vec![1.0; b]), Quantity::FirstToken, 20).unwrap();
        prop_assert!((change.ratio - each).abs() < 1e-6);
        let width = a.max(b).div_ceil(1_024).next_power_of_two();
        prop_assert_eq!(change.batches, a.min(b).div_ceil(width));
        prop_assert!(change.block >= 1 && change.block <= change.batches);
    }
}

#[test]
fn a_run_that_answers_fewer_requests_is_not_called_better() {
    let endings = |refused, lost| EndingCounts { answered: 10_000 - refused - lost, refused, lost };
    let change = |verdict| MeanChange {
        ratio: 0.5,
        ratio_interval: None,
        difference_seconds: -1.0,
        difference_interval_seconds: None,
        verdict,
        batches: 100,
        block: 1,
    };
    let of = |verdict, run, base| change(verdict).with_endings(run, base).verdict;
    let (none, many) = (endings(0, 0), endings(300, 20));
    for (verdict, fewer, more) in [
        (ComparisonVerdict::Better, ComparisonVerdict::AnswersFewer, ComparisonVerdict::Better),
        (ComparisonVerdict::NotShown, ComparisonVerdict::AnswersFewer, ComparisonVerdict::AnswersMore),
        (ComparisonVerdict::Worse, ComparisonVerdict::Worse, ComparisonVerdict::AnswersMore),
    ] {
        assert_eq!((of(verdict, many, none), of(verdict, none, many)), (fewer, more));
        assert_eq!(of(verdict, many, many), verdict);
        assert_eq!(of(verdict, endings(320, 25), many), verdict, "25 more of 320 can be chance");
    }
    assert!(is_more(5, 0) && !is_more(4, 0) && !is_more(0, 5));
}
