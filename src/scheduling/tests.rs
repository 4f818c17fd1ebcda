//! Candidates and rankings; and test doubles for the strategies of other crates.

use super::least_request::{self, LeastRequest};
use super::plugin::{Better, NoParams, params, section};
use super::registry::{Descriptor, PluginList, Registry};
use super::testing::{NOW, STALE_AFTER, snapshot};
use super::{Candidate, PickContext, Ranking, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use serde_json::Value;

/// Ranks in the order of the pool, and has no scores.
#[derive(Debug)]
struct InOrder;

impl Strategy for InOrder {
    fn rank(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, ranking: &mut Ranking) {
        candidates.iter().for_each(|c| ranking.push(&c.state.endpoint));
    }
}

parameters! {
    /// Decides by requests. Each instance has its own address in memory, so tests can distinguish instances.
    struct Remembering {
        /// Without effect.
        "imbalance" => imbalance: u32 { default: 0; },
        /// Without effect.
        "windowSize" => window_size: u32 { default: 0; },
    }
}

impl Strategy for Remembering {
    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        LeastRequest.scores(cx, candidates, out)
    }
}

/// A test double that ranks in the order of the pool.
const fn in_order(name: &'static str) -> Descriptor {
    Descriptor {
        name,
        summary: "",
        source: "",
        parameters: section::<NoParams>,
        build: |value, _| params::<NoParams>(value).map(|NoParams {}| Box::new(InOrder) as Box<dyn Strategy>),
    }
}

/// A test double that decides by requests.
const fn remembering(name: &'static str) -> Descriptor {
    Descriptor {
        name,
        summary: "",
        source: "",
        parameters: section::<Remembering>,
        build: |value, _| params::<Remembering>(value).map(|own| Box::new(own) as Box<dyn Strategy>),
    }
}

const STAND_INS: &[&Descriptor] = &[
    &in_order("pipeline"),
    &in_order("random"),
    &in_order("round-robin"),
    &least_request::PLUGIN,
    &remembering("power-of-two"),
    &remembering("prefix-cache"),
    &remembering("prefix-cache-preble"),
    &remembering("session-affinity"),
    &remembering("vtc-basic"),
];

/// `least-request`, and test doubles under the names of other strategies: the choice of a strategy does not depend on
/// how it decides.
pub(crate) fn registry() -> Registry {
    Registry::new(&[PluginList { strategies: STAND_INS, ..PluginList::default() }])
}

pub(crate) fn build(name: &str) -> Box<dyn Strategy> {
    registry().build(name, &Value::Null).unwrap()
}

#[test]
fn slow_start_counts_at_least_part_of_a_request() {
    let pool = snapshot(&[(0, 0), (1, 10)]);
    let requests = |i: usize, surcharge| Candidate::new(&pool.endpoints[i], NOW, STALE_AFTER, surcharge).requests;
    assert_eq!((requests(0, 0), requests(0, 300), requests(0, 99)), (0, 3, 0));
    assert_eq!((requests(1, 0), requests(1, 300), requests(1, 50)), (10, 40, 15));
    let full = snapshot(&[(0, u32::MAX)]);
    assert_eq!(Candidate::new(&full.endpoints[0], NOW, STALE_AFTER, 300).requests, u32::MAX);
}

#[test]
fn ranking_takes_the_wanted_number_of_endpoints_once() {
    let pool = snapshot(&[(0, 0), (1, 0), (2, 0)]);
    let endpoint = |i: usize| &pool.endpoints[i].endpoint;
    assert!(Ranking::new(3).decide().is_none());
    let mut ranking = Ranking::new(2);
    for i in [1, 1, 0, 2] {
        ranking.push(endpoint(i));
    }
    ranking.because("so");
    assert!(ranking.is_full());
    let decision = ranking.decide().unwrap();
    assert_eq!(decision.picks.iter().map(|e| e.id.0).collect::<Vec<_>>(), [1, 0]);
    assert_eq!((decision.reason, decision.probe), ("so", false));
    let mut one = Ranking::new(0);
    one.push_lowest([(5, endpoint(0)), (4, endpoint(1)), (4, endpoint(2))].into_iter());
    assert_eq!(one.decide().unwrap().picks[0].id.0, 1, "the first of equals");
}

#[test]
fn names_of_other_products_are_known_in_every_spelling() {
    use crate::registry::canonical;
    for (own, spellings) in [
        (
            "round-robin",
            &["roundrobin", "round_robin", "RoundRobin", "roundRobin", "ROUND-ROBIN", "round-robin", "Round Robin"][..],
        ),
        ("consistent-hash", &["consistent_hash", "consistenthash", "ConsistentHash", "static_hash", "StaticHash"]),
        ("power-of-two", &["pow2", "POW2", "pow_2", "power_of_two", "PowerOfTwo"]),
        ("least-request", &["leastconn", "least_conn", "LeastConn"]),
        ("prefix-cache", &["prefix-aware", "prefix_aware"]),
    ] {
        for spelling in spellings {
            assert_eq!(canonical(spelling), own, "{spelling}");
        }
    }
    for other in ["round-robins", "least-request", "", "-", "prefix_cache", "pd"] {
        assert_eq!(canonical(other), other);
    }
}

#[test]
#[should_panic(expected = "two plugins are called `least-request`")]
fn two_plugins_of_one_name_are_rejected() {
    let twice = PluginList { strategies: &[&least_request::PLUGIN], ..PluginList::default() };
    let _ = Registry::new(&[twice, twice]);
}
