//! Which strategies can be parts of a weighted sum.

use super::{build, candidates, registry};
use attache_scheduling::testing::{context, snapshot};
use attache_scheduling::weighted::{Weighted, WeightedPart};
use attache_scheduling::{Ranking, Signal};
use attache_types::rng::for_request;
use serde_json::Value;

#[test]
fn strategies_without_scores_are_rejected_in_sums() {
    let error = |name: &str, parameters: &str| {
        let parameters = serde_json::from_str(parameters).unwrap();
        registry().build(name, &parameters).unwrap_err().to_string()
    };
    assert!(error("least-request,random", "null").contains("`random` has no figure"));
    assert!(error("least-request,no-such", "null").contains("`no-such`"));
    for alone in ["pd", "slo", "slo-pack-load"] {
        assert!(registry().build(&format!("{alone}:1,least-request"), &Value::Null).is_ok(), "alone");
    }
    assert!(error("prefix-cache,least-request", r#"{"prefix-cache": {"imbalanse": 1}}"#).contains("imbalanse"));
    assert!(error("prefix-cache,least-request", r#"{"random": {}}"#).contains("`random`"));
    assert!(error("prefix-cache,least-request", "[]").contains("mapping"));
    assert!(error("", "null").contains("``"));
    let good = serde_json::json!({"prefix-cache": {"imbalance": 1}});
    assert!(registry().build("prefix-cache:2,least-request", &good).is_ok());
    assert!(registry().build("random:3", &Value::Null).is_ok(), "one alone needs no figure");
    assert!(registry().build("random:3,least-request:0", &Value::Null).is_ok());
}

/// Every strategy reports, without candidates, whether it has scores, and none fails.
#[test]
fn every_strategy_reports_whether_it_has_scores() {
    for plugin in registry().strategies() {
        let strategy = build(plugin.name).into();
        let _ = Weighted::of(vec![WeightedPart { name: plugin.name, weight: 1, strategy }]);
    }
}

#[test]
fn without_a_lookup_the_fewest_requests_decide_and_it_is_reported() {
    let prefix = build("prefix-cache:2,least-request");
    let pool = snapshot(&[(0, 4), (1, 1)]);
    let mut ranking = Ranking::new(1);
    prefix.rank(&context(&pool), &candidates(&pool), &mut for_request(0, 0), &mut ranking);
    let decision = ranking.decide().unwrap();
    assert_eq!((decision.lacking, decision.picks[0].id.0), (Some(Signal::Prefix), 1), "no lookup");
}
