use super::*;
use std::collections::BTreeMap;

fn at(ttft: f64, tpot: f64) -> Option<PredictedHeadroom> {
    Some(PredictedHeadroom { headroom: Headroom { ttft_ms: ttft, tpot_ms: tpot }, idle: false })
}

fn idle(ttft: f64, tpot: f64) -> Option<PredictedHeadroom> {
    at(ttft, tpot).map(|e| PredictedHeadroom { idle: true, ..e })
}

const WEIGHTS: HeadroomWeights = HeadroomWeights { ttft: 0.8, tpot: 0.2 };

/// Name, endpoints, preferred headroom, scores.
type Row = (&'static str, Vec<Option<PredictedHeadroom>>, Prefer, &'static [f32]);

#[test]
fn scores_by_headroom() {
    use Prefer::{Least, Most};
    let rows: Vec<Row> = vec![
        ("least packs", vec![at(100.0, 10.0), at(300.0, 30.0), at(200.0, 20.0)], Least, &[1.0, 0.01, 0.51]),
        ("most spares", vec![at(100.0, 10.0), at(300.0, 30.0), at(200.0, 20.0)], Most, &[0.01, 1.0, 0.51]),
        ("met before late", vec![at(-1.0, 5.0), at(1.0, 5.0), at(1.0, -5.0)], Least, &[0.0, 0.51, 0.0]),
        ("late: idle first", vec![at(-1.0, 5.0), idle(-900.0, -5.0)], Least, &[0.0, 0.51]),
        ("late tokens before late start", vec![at(-1.0, 5.0), at(1.0, -900.0)], Least, &[0.0, 0.51]),
        ("late start before both", vec![at(-900.0, 5.0), at(-1.0, -1.0)], Least, &[0.51, 0.0]),
        ("deficits: the least, whatever is preferred", vec![at(-10.0, -1.0), at(-90.0, -1.0)], Most, &[1.0, 0.01]),
        ("equal values of all have no effect", vec![at(5.0, 10.0), at(5.0, 30.0)], Least, &[1.0, 0.01]),
        ("unknown endpoints get nothing", vec![None, at(-5.0, -1.0)], Least, &[0.0, 0.51]),
        ("alone", vec![at(5.0, 10.0)], Least, &[0.51]),
    ];
    for (name, endpoints, prefer, expected) in rows {
        let mut out = vec![f32::NAN; endpoints.len()];
        assert!(scores(&endpoints, WEIGHTS, prefer, &mut out), "{name}");
        assert_eq!(out, expected, "{name}");
    }
}

#[test]
fn zero_weights_count_only_the_first_token() {
    let endpoints = [at(10.0, 30.0), at(30.0, 10.0)];
    let mut out = [0.0; 2];
    for (ttft, tpot, expected) in [(0.0, 0.0, [1.0, 0.01]), (0.0, 3.0, [0.01, 1.0]), (2.0, 2.0, [0.51, 0.51])] {
        scores(&endpoints, HeadroomWeights { ttft, tpot }, Prefer::Least, &mut out);
        assert_eq!(out, expected, "{ttft} {tpot}");
    }
}

#[test]
fn without_a_prediction_there_are_no_scores() {
    let mut out = [7.0];
    assert!(!scores(&[None], WEIGHTS, Prefer::Least, &mut out));
    assert_eq!(out, [7.0]);
}

#[test]
fn targets_are_read_from_headers() {
    for (ttft, expected) in [("250", 250.0), (" 12.5 ", 12.5), ("-1", 0.0), ("NaN", 0.0), ("inf", 0.0), ("soon", 0.0)] {
        let headers = BTreeMap::from([(TTFT_HEADERS[0].to_owned(), ttft.to_owned())]);
        let headers = crate::plugin::Headers::of(&headers);
        let targets = Targets::of(&RequestFacts { headers, ..RequestFacts::default() });
        assert_eq!(targets, Targets { ttft_ms: expected, tpot_ms: 0.0 }, "{ttft}");
    }
    let headroom = Targets { ttft_ms: 100.0, tpot_ms: 10.0 }.headroom(Prediction { ttft_ms: 40.0, tpot_ms: 11.0 });
    assert_eq!(headroom, Headroom { ttft_ms: 60.0, tpot_ms: -1.0 });
    assert!(!headroom.is_met());
}
