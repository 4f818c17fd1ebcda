//! AIBrix's own tables of weighted strategies, and rules for every sum.

use super::*;
use crate::Decision;
use crate::digest::Digest;
use crate::plugin::ResponseHeaders;
use crate::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_types::rng::for_request;
use parking_lot::Mutex;
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
use std::collections::BTreeSet;

#[test]
fn names_are_parsed_as_in_aibrix() {
    for (row, text, expected) in [
        ("aibrix 10.9", "prefix-cache", &[("prefix-cache", 1)][..]),
        ("aibrix 10.9", "prefix-cache,least-latency", &[("prefix-cache", 1), ("least-latency", 1)]),
        ("aibrix 10.9", "prefix-cache:6,least-latency:4", &[("prefix-cache", 6), ("least-latency", 4)]),
        ("aibrix 10.9", "prefix-cache:3,least-latency", &[("prefix-cache", 3), ("least-latency", 1)]),
        ("aibrix 10.9", "prefix-cache:0,least-latency:10", &[("least-latency", 10)]),
        ("aibrix 10.9", "least-request:2,pd:1,throughput:3", &[("pd", 1)]),
        ("aibrix 10.9", "slo-least-load:1,least-latency:2", &[("slo-least-load", 1)]),
        ("aibrix 2.4", " prefix-cache : 2 , least-latency ", &[("prefix-cache", 2), ("least-latency", 1)]),
        ("aibrix 2.4", "a:1000000,b", &[("a", 1_000_000), ("b", 1)]),
        ("ours: twice is the sum", "a:2,b,a:3", &[("a", 5), ("b", 1)]),
    ] {
        assert_eq!(parse(text).unwrap().as_slice(), expected, "{row}: {text}");
    }
    for text in
        ["", "a,,b", "a:1:2", "a:0.5,b:0.5", "a:-1", "a:1000001", "a:0,b:0", ",", "a:", ":1", "a:+1", "a:99999999999"]
    {
        assert!(parse(text).is_err(), "aibrix 10.9: {text:?}");
    }
    assert!(parse(&vec!["a"; 1_000].join(",")).is_ok());
    let many: Vec<String> = (0..=MAX_PARTS).map(|i| format!("s{i}")).collect();
    assert!(parse(&many.join(",")).is_err());
}

/// Figures by endpoint id.
#[derive(Debug)]
struct Figures(Better, Vec<f64>, Mutex<Vec<u32>>);

impl Strategy for Figures {
    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        for (score, c) in out.iter_mut().zip(candidates) {
            *score = self.1[c.state.endpoint.id.0 as usize];
        }
        Some(self.0)
    }

    fn picked(&self, _: &PickContext<'_>, endpoint: &Endpoint) -> Option<Digest> {
        self.2.lock().push(endpoint.id.0);
        None
    }

    fn response_headers(&self, _: &Endpoint, out: &mut ResponseHeaders) {
        out.push(("x-figures".into(), self.1.len().to_string()));
    }

    fn reads(&self) -> Reads {
        Reads::PROMPT
    }
}

type Row = (u32, Better, Vec<f64>);

fn sum(rows: &[Row]) -> Weighted {
    let part = |(weight, better, figures): &Row| WeightedPart {
        name: "figures",
        weight: *weight,
        strategy: Arc::new(Figures(*better, figures.clone(), Mutex::default())),
    };
    Weighted::of(rows.iter().map(part).collect()).unwrap()
}

fn decide(strategy: &dyn Strategy, loads: &[(u32, u32)], reversed: bool, seed: u64) -> (Decision, Vec<f64>) {
    let pool = snapshot(loads);
    let mut candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    if reversed {
        candidates.reverse();
    }
    let mut ranking = Ranking::new(loads.len()).explained();
    strategy.rank(&context(&pool), &candidates, &mut for_request(seed, 0), &mut ranking);
    let mut totals = vec![f64::NAN; candidates.len()];
    strategy.scores(&context(&pool), &candidates, &mut totals);
    (ranking.decide().unwrap(), totals)
}

fn first(strategy: &dyn Strategy, loads: &[(u32, u32)]) -> BTreeSet<u32> {
    (0..50).map(|seed| decide(strategy, loads, seed % 2 == 0, seed).0.picks[0].id.0).collect()
}

#[test]
fn totals_and_winners_match_aibrix() {
    use Better::{Higher, Lower};
    let (a, b, c, nan) = (0, 1, 2, f64::NAN);
    let three = |x: f64, y: f64, z: f64| vec![x, y, z];
    for (rows, totals, winners) in [
        (vec![(1, Higher, three(10.0, 20.0, 30.0))], [0.0, 0.5, 1.0], vec![c]),
        (vec![(1, Lower, three(10.0, 20.0, 30.0))], [1.0, 0.5, 0.0], vec![a]),
        (vec![(2, Higher, three(100.0, 50.0, 0.0)), (8, Lower, three(30.0, 20.0, 10.0))], [0.2, 0.5, 0.8], vec![c]),
        // AIBrix takes the first of a shuffled list.
        (
            vec![(1, Higher, three(100.0, 50.0, nan)), (1, Higher, three(10.0, 20.0, 30.0))],
            [0.5, 0.25, 0.5],
            vec![a, c],
        ),
        (vec![(1, Higher, three(nan, nan, nan)), (1, Higher, three(10.0, 30.0, 20.0))], [0.0, 0.5, 0.25], vec![b]),
        (vec![(1, Higher, three(10.0, 10.0, nan))], [1.0, 1.0, 0.0], vec![a, b]),
        (vec![(1, Higher, three(10.0, 20.0, 30.0)), (3, Lower, three(10.0, 20.0, 30.0))], [0.75, 0.5, 0.25], vec![a]),
        (vec![(1, Higher, three(f64::INFINITY, 1.0, 0.0))], [0.0, 1.0, 0.0], vec![b]),
        (vec![(1, Higher, three(f64::MAX, 0.0, f64::MIN))], [1.0, 0.5, 0.0], vec![a]),
    ] {
        let (strategy, loads) = (sum(&rows), [(0, 0), (1, 0), (2, 0)]);
        let (decision, got) = decide(&strategy, &loads, false, 0);
        for (got, expected) in got.iter().zip(totals) {
            assert!((got - expected).abs() < 1e-9, "aibrix 10.9 {rows:?}: {got} is not {expected}");
        }
        assert_eq!(first(&strategy, &loads), winners.into_iter().collect(), "aibrix 10.9 {rows:?}");
        assert_eq!(decision.parts.unwrap().len(), rows.len());
    }
}

/// "sweet spot": two endpoints each win by one figure alone, and lose to one that is good at both.
#[test]
fn endpoint_good_at_both_wins_the_sum() {
    let (requests, tokens) = ((1, Better::Lower, vec![1.0, 50.0, 10.0]), (1, Better::Lower, vec![1500.0, 15.0, 150.0]));
    let loads = [(0, 0), (1, 0), (2, 0)];
    assert_eq!(first(&sum(std::slice::from_ref(&requests)), &loads), [0].into(), "aibrix 10.9");
    assert_eq!(first(&sum(std::slice::from_ref(&tokens)), &loads), [1].into(), "aibrix 10.9");
    let both = sum(&[requests, tokens]);
    assert_eq!(first(&both, &loads), [2].into(), "aibrix 10.9");
    let totals = decide(&both, &loads, false, 0).1;
    for (got, expected) in totals.iter().zip([0.5, 0.5, 0.863]) {
        assert!((got - expected).abs() < 1e-3, "aibrix 10.9: {totals:?}");
    }
}

#[test]
fn without_any_figure_the_fewest_requests_decide_and_it_is_reported() {
    let strategy = sum(&[(1, Better::Higher, vec![f64::NAN; 3]), (2, Better::Lower, vec![f64::NAN; 3])]);
    let (decision, totals) = decide(&strategy, &[(0, 5), (1, 2), (2, 9)], false, 0);
    assert_eq!(decision.picks.iter().map(|e| e.id.0).collect::<Vec<_>>(), [1, 0, 2]);
    assert_eq!(decision.lacking, Some(Signal::Metrics));
    assert!(totals.iter().all(|t| t.is_nan()));
    let partly = sum(&[(1, Better::Higher, vec![f64::NAN; 3]), (1, Better::Lower, vec![3.0, 2.0, 1.0])]);
    let (decision, _) = decide(&partly, &[(0, 0), (1, 0), (2, 0)], false, 0);
    assert_eq!((decision.lacking, decision.picks[0].id.0), (Some(Signal::Metrics), 2), "the other part decides");
}

#[test]
fn every_part_records_and_adds_headers() {
    let strategy = sum(&[(1, Better::Higher, vec![1.0]), (1, Better::Lower, vec![1.0])]);
    let pool = snapshot(&[(0, 0)]);
    strategy.picked(&context(&pool), &pool.endpoints[0].endpoint);
    let mut headers = Vec::new();
    strategy.response_headers(&pool.endpoints[0].endpoint, &mut headers);
    assert_eq!((headers.len(), strategy.reads()), (2, Reads::PROMPT));
    for part in &strategy.parts {
        assert!(format!("{:?}", part.strategy).contains("[0]"), "{part:?}");
    }
}

proptest! {
    #[test]
    fn totals_are_in_0_to_1_and_independent_of_the_order(
        rows in prop::collection::vec((1u32..10, any::<bool>(), prop::collection::vec(any::<f64>(), 6)), 1..4),
        seed in any::<u64>(),
    ) {
        let rows: Vec<Row> = rows
            .into_iter()
            .map(|(w, higher, figures)| (w, if higher { Better::Higher } else { Better::Lower }, figures))
            .collect();
        let strategy = sum(&rows);
        let loads: Vec<(u32, u32)> = (0..6).map(|i| (i, 0)).collect();
        let (forwards, totals) = decide(&strategy, &loads, false, seed);
        let (_, mut backwards) = decide(&strategy, &loads, true, seed);
        backwards.reverse();
        for (a, b) in totals.iter().zip(&backwards) {
            prop_assert!(a.to_bits() == b.to_bits(), "{totals:?} {backwards:?}");
            prop_assert!(a.is_nan() || (-1e-9..=1.0 + 1e-9).contains(a), "{totals:?}");
        }
        prop_assert_eq!(forwards.picks.len(), 6);
    }

    #[test]
    fn parsed_parts_have_names_and_weights(text in "[ab:,0-9 .-]{0,24}") {
        if let Ok(parts) = parse(&text) {
            prop_assert!(!parts.is_empty());
            prop_assert!(parts.iter().all(|(name, weight)| !name.is_empty() && *weight > 0), "{parts:?}");
        }
    }
}
