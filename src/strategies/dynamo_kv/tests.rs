use super::*;
use crate::cache_aware::tests::nothing_found;
use attache_pool::ledger::Ticket;
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
use attache_scheduling::Registry;
use attache_scheduling::candidates::Cached;
use attache_scheduling::testing::{NOW, STALE_AFTER, context};
use attache_types::ids::EndpointId;
use attache_types::rng::for_request;
use std::sync::Arc;

/// An endpoint in a row of a table: prompt tokens queued, blocks in use (`None`: not reported), tokens cached in GPU
/// memory and in lower tiers.
type Row = (u32, Option<u32>, u32, u32);

fn pool(rows: &[Row]) -> (PoolSnapshot, Vec<Ticket>) {
    let mut tickets = Vec::new();
    let mut state = |(id, (queued, used, ..)): (u16, &Row)| {
        let spec = EndpointSpec::at(([10, 0, 0, 1], 8000 + id).into());
        let endpoint = Arc::new(Endpoint::new(EndpointId(id.into()), spec));
        tickets.push(Ticket::book(endpoint.clone(), *queued));
        let page = |used: u32| EndpointMetrics {
            scraped_at: NOW,
            kv_usage: used as f32 / 1_024.0,
            num_blocks: Some(1_024),
            block_size: Some(16),
            ..EndpointMetrics::default()
        };
        EndpointState::new(endpoint, used.map(|used| Arc::new(page(used))))
    };
    let states = (0u16..).zip(rows).map(&mut state).collect();
    (PoolSnapshot::new(1, true, states), tickets)
}

/// Costs of a prompt of 160 tokens, and the pick with this seed.
fn decide(parameters: serde_json::Value, rows: &[Row], seed: u64) -> (Vec<f64>, u32, Option<Signal>) {
    let strategy = (PLUGIN.build)(&parameters, &Registry::default()).unwrap();
    let (pool, _tickets) = pool(rows);
    let found = nothing_found();
    let mut cx = context(&pool);
    cx.request.prompt_tokens = 160;
    cx.prefix = Some(&found);
    let hold = |(s, (.., gpu, below)): (_, &Row)| Candidate {
        cached: Cached { gpu: *gpu, any: gpu + below, in_use: 0 },
        ..Candidate::new(s, NOW, STALE_AFTER, 0)
    };
    let candidates: Vec<_> = pool.endpoints.iter().zip(rows).map(hold).collect();
    let mut costs = vec![f64::NAN; rows.len()];
    assert_eq!(strategy.scores(&cx, &candidates, &mut costs), Some(Better::Lower));
    let mut ranking = Ranking::new(1);
    strategy.rank(&cx, &candidates, &mut for_request(seed, 0), &mut ranking);
    let decision = ranking.decide().unwrap();
    (costs, decision.picks[0].id.0, decision.lacking)
}

#[test]
fn cost_is_dynamos() {
    let cost = |parameters, row| decide(parameters, &[row], 0).0[0];
    let default = || serde_json::Value::Null;
    for (name, row, wanted) in [
        ("an empty endpoint: the prompt's blocks", (0, Some(0), 0, 0), 10.0),
        ("what is queued", (320, Some(0), 0, 0), 30.0),
        ("what is in use", (0, Some(7), 0, 0), 17.0),
        ("in GPU memory", (0, Some(7), 128, 0), 9.0),
        ("below it: three quarters", (0, Some(0), 0, 128), 4.0),
        ("both", (0, Some(0), 64, 64), 3.0),
        ("all of it", (0, Some(0), 160, 0), 0.0),
    ] {
        assert_eq!(cost(default(), row), wanted, "dynamo 2.3 {name}");
    }
    let weights = serde_json::json!({
        "overlapScoreCredit": 0.5, "prefillLoadScale": 2, "decodeActiveRequestWeight": 3, "blockSize": 16,
    });
    assert_eq!(cost(weights, (0, Some(4), 160, 0)), 2.0 * (10.0 - 5.0) + 4.0 + 3.0, "one request is booked");
    assert_eq!(cost(serde_json::json!({"blockSize": 32}), (0, Some(8), 0, 0)), 5.0 + 4.0, "its blocks are of 16");
    // Ten blocks more than the endpoint with the fewest, and a prompt of ten: the credit is halved.
    let decay = serde_json::json!({"overlapScoreCreditDecay": 1});
    let (costs, ..) = decide(decay, &[(160, Some(0), 160, 0), (0, Some(0), 0, 0)], 0);
    assert_eq!(costs, [20.0 - 5.0, 10.0]);
}

#[test]
fn least_cost_wins_and_an_endpoint_without_one_comes_last() {
    let pick = |rows: &[Row]| decide(serde_json::Value::Null, rows, 0).1;
    assert_eq!(pick(&[(0, Some(9), 0, 0), (0, Some(0), 0, 0)]), 1);
    assert_eq!(pick(&[(0, Some(9), 160, 0), (0, Some(0), 0, 0)]), 0, "cached outweighs blocks in use");
    assert_eq!(pick(&[(0, None, 160, 0), (0, Some(900), 0, 0)]), 1);
    let ties = [(0, Some(1), 0, 0); 4];
    let drawn: std::collections::BTreeSet<u32> = (0..60).map(|s| decide(serde_json::Value::Null, &ties, s).1).collect();
    assert_eq!(drawn.len(), 4);
    let (_, _, lacking) = decide(serde_json::Value::Null, &[(0, None, 0, 0), (0, None, 0, 0)], 0);
    assert_eq!(lacking, Some(Signal::Metrics));
}

/// Scaled costs 0, 1/2, 1 at a temperature of 0.5: weights 1, e^-1, e^-2.
#[test]
fn temperature_draws_by_softmax() {
    let rows = [(0, Some(0), 0, 0), (0, Some(10), 0, 0), (0, Some(20), 0, 0), (0, None, 0, 0)];
    let mut counts = [0u32; 4];
    for seed in 0..6_000 {
        counts[decide(serde_json::json!({"routerTemperature": 0.5}), &rows, seed).1 as usize] += 1;
    }
    let weights = [1.0, (-1.0f64).exp(), (-2.0f64).exp(), 0.0];
    let sum: f64 = weights.iter().sum();
    for (count, weight) in counts.iter().zip(weights) {
        let expected = 6_000.0 * weight / sum;
        assert!((f64::from(*count) - expected).abs() < 150.0, "{counts:?}");
    }
}

#[test]
fn parameters_are_checked() {
    for (bad, word) in [
        (r#"{"overlapScoreCredit": -1}"#, "at least 0"),
        (r#"{"routerTemperature": -0.1}"#, "at least 0"),
        (r#"{"blockSize": 0}"#, "at least 1"),
        (r#"{"temperature": 1}"#, "temperature"),
    ] {
        let error = (PLUGIN.build)(&serde_json::from_str(bad).unwrap(), &Registry::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{bad}: {error}");
    }
}
