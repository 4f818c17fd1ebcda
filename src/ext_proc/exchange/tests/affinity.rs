//! Requests go where their beginnings went, until load or the operator's word on their model says otherwise.

use super::*;
use attache_scheduling::policy::Document;

/// Asks with a prompt of this name and tells where it goes; the request stays in flight as long as the exchange is
/// kept.
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
fn a_prompt_goes_home_until_its_home_has_more_to_do_than_others() {
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
fn an_operator_turns_affinity_off_for_one_model_while_requests_run() {
    let world = pool("prefix-affinity");
    let (_, home) = ask(&world, "a");
    assert_eq!(ask(&world, "a").1, home);
    let change = |policy| {
        let document = serde_json::json!({"model_name": "m", "route_policy": policy});
        world.processor.picker.policies.change(&Document::read(&document)?)
    };
    change("round_robin").unwrap();
    let (running, turns): (Vec<_>, std::collections::BTreeSet<_>) = (0..3).map(|_| ask(&world, "a")).unzip();
    assert_eq!(turns.len(), 3);
    drop(running);
    change("").unwrap();
    assert_eq!(ask(&world, "a").1, home, "turns left no trace");
}

/// LocalAI notes the replica that it locked; here Envoy may have tried another one of the list.
#[test]
fn prompt_that_envoy_serves_elsewhere_comes_home_there() {
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
