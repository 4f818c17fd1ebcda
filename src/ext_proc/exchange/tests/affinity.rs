//! Prefix affinity: requests go to the endpoint that has their prefix, unless load or a model policy prevents it.

use super::*;
use attache_scheduling::policy::Document;

/// Sends a request with a prompt of this name, and returns its endpoint. It stays in flight until the exchange is
/// dropped.
fn ask(world: &World, name: &str) -> (Exchange, String) {
    let mut exchange = world.exchange();
    let path = (":path", "/v1/chat/completions");
    send(&mut exchange, request(Message::RequestHeaders(headers(&[path], false))));
    let content = format!("{name} {}", "and so on ".repeat(100));
    let sent = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": content}]}).to_string();
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    let first = got.set[DESTINATION].split(',').next().unwrap_or_default().to_owned();
    (exchange, first)
}

fn pool(strategy: &'static str) -> World {
    let parameters = serde_json::Value::Null;
    Setup { servers: vec![(0, 0.1, &[]); 3], strategy, parameters, ..Setup::default() }.build()
}

fn diverted(world: &World) -> u64 {
    world.processor.metrics.pool("pool").all_diverted()
}

#[test]
fn prompt_returns_to_its_endpoint_until_that_has_more_load() {
    for strategy in ["prefix-affinity", "chwbl", "prefix-hash"] {
        let world = pool(strategy);
        let (first, home) = ask(&world, "a");
        drop(first);
        let mut running = Vec::new();
        while running.last().is_none_or(|(_, to)| *to == home) {
            assert_eq!(diverted(&world), 0, "{strategy}");
            running.push(ask(&world, "a"));
            assert!(running.len() < 10, "{strategy}: nothing moves a hot prompt");
        }
        assert!(running.len() > 1, "{strategy}: one request does not move a prompt");
        assert_eq!(diverted(&world), 1, "{strategy}");
    }
}

#[test]
fn operator_disables_affinity_of_one_model_at_runtime() {
    let world = pool("prefix-affinity");
    let (_, home) = ask(&world, "a");
    assert_eq!(ask(&world, "a").1, home);
    let change = |policy| {
        let document = serde_json::json!({"model_name": "m", "route_policy": policy});
        world.processor.picker.policies.change(&Document::read(&document)?, 0)
    };
    change("round_robin").unwrap();
    let (running, turns): (Vec<_>, std::collections::BTreeSet<_>) = (0..3).map(|_| ask(&world, "a")).unzip();
    assert_eq!(turns.len(), 3);
    drop(running);
    change("").unwrap();
    assert_eq!(ask(&world, "a").1, home, "turns left no trace");
}

/// LocalAI records the replica that it picked; Envoy may have retried on another one.
#[test]
fn prompt_follows_the_endpoint_that_envoy_chose_on_retry() {
    let servers = vec![(0, 0.1, &[] as &[&str]); 3];
    let parameters = serde_json::Value::Null;
    let destination = Destination::List;
    let world = Setup { servers, strategy: "prefix-affinity", parameters, destination, ..Setup::default() }.build();
    let (mut exchange, picked) = ask(&world, "a");
    let served = if picked == "192.168.1.2:8000" { "192.168.1.3:8000" } else { "192.168.1.2:8000" };
    send(&mut exchange, answered_by(served, true));
    drop(exchange);
    assert_eq!(ask(&world, "a").1, served);
}
