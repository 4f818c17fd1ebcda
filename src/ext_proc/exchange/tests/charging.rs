//! What flows are charged for their responses, and the dequeue order that follows.

use super::queueing::{One, flow, setup, world};
use super::*;
use attache_flow::registry::{FAIRNESS, find};
use attache_flow::{BandSettings, Settings};

/// Ends `running` and each request that is dequeued after it. Returns the names of `waiting` in dequeue order.
fn order_of_turns(mut running: One, mut waiting: Vec<(&str, One)>) -> Vec<&str> {
    let mut order = Vec::new();
    while !waiting.is_empty() {
        running.ends();
        waiting.iter_mut().for_each(|(_, one)| one.wakes(NOW));
        let at = waiting.iter().position(|(_, one)| one.goes()).expect("one goes");
        let (name, one) = waiting.remove(at);
        order.push(name);
        running = one;
    }
    running.ends();
    order
}

#[test]
fn tenants_are_dequeued_by_tokens_used() {
    let world = world(by_tokens());
    let tenant = |name: &str| One::tenant(&world, name);
    let running = tenant("flood");
    let mut waiting: Vec<(&str, One)> = (0..3).map(|_| ("flood", tenant("flood"))).collect();
    waiting.extend((0..2).map(|_| ("other", tenant("other"))));
    assert_eq!(order_of_turns(running, waiting), ["other", "flood", "other", "flood", "flood"]);
    world.assert_books_closed(6);
}

fn by_tokens() -> PoolFlow {
    let fairness = (find(FAIRNESS, "vtc-fair").unwrap().build)(&serde_json::Value::Null).unwrap().into();
    let default_band = BandSettings { fairness, ..BandSettings::default() };
    flow(Settings { default_band, ..Settings::default() })
}

/// The pool's `vtc-*` strategy names the user header, and no tenant rule is configured.
#[test]
fn users_by_header_are_dequeued_fairly_without_tenant_rule() {
    for (user_header, expected) in [(Some("user"), ["other", "flood"]), (None, ["flood", "other"])] {
        let by_tokens = by_tokens();
        let settings = Settings { user_header, ..by_tokens.settings };
        let exchange = ExchangeSettings::default();
        let world = Setup { exchange, ..setup(PoolFlow { settings, ..by_tokens }) }.build();
        let of = |name| One::of(&world, &[("user", name)], BodySendMode::FullDuplexStreamed);
        let running = of("flood");
        let waiting = ["flood", "other"].map(|name| (name, of(name))).into_iter().collect::<Vec<_>>();
        assert_eq!(order_of_turns(running, waiting), expected, "{user_header:?}");
    }
}

/// Requests of the agent with this session, in a band whose order is `fairness`.
fn order_of_agents(fairness: &str, exchange: ExchangeSettings) -> Vec<&'static str> {
    let fairness = (find(FAIRNESS, fairness).unwrap().build)(&serde_json::Value::Null).unwrap().into();
    let default_band = BandSettings { fairness, ..BandSettings::default() };
    let flow = flow(Settings { default_band, ..Settings::default() });
    let world = Setup { exchange, ..setup(flow) }.build();
    let of = |session: &str, agent: &str| {
        let extra = [("x-claude-code-session-id", session), ("x-claude-code-agent-id", agent)];
        One::of(&world, &extra, BodySendMode::FullDuplexStreamed)
    };
    let running = of("served", "");
    let waiting =
        vec![("served", of("served", "")), ("its sub-agent", of("served", "sub")), ("other", of("other", ""))];
    let order = order_of_turns(running, waiting);
    let records = world.processor.decisions.snapshot();
    let agents = records.iter().map(|record| record.agent.as_ref().unwrap());
    let shown: Vec<_> = agents.map(|agent| (&*agent.program, &*agent.chain, agent.kind.label())).collect();
    assert!(
        shown.contains(&("served", "sub", "sub_agent")) && shown.contains(&("other", "other", "main")),
        "{shown:?}"
    );
    order
}

#[test]
fn programs_of_agents_are_flows_of_the_order_that_is_made_for_them() {
    let trusted = || ExchangeSettings { trust_client_headers: true, ..ExchangeSettings::default() };
    let by_arrival = ["served", "its sub-agent", "other"];
    assert_eq!(order_of_agents("program-aware-fairness", trusted()), ["other", "served", "its sub-agent"]);
    assert_eq!(order_of_agents("program-aware-fairness", ExchangeSettings::default()), by_arrival, "untrusted");
    assert_eq!(order_of_agents("vtc-fair", trusted()), by_arrival, "another order is not changed");
    let named = ExchangeSettings { session_headers: vec!["x-unsent".into()], ..trusted() };
    assert_eq!(order_of_agents("program-aware-fairness", named), by_arrival, "the operator names other headers");
}

#[test]
fn tenant_without_reported_usage_gets_no_more_than_its_share() {
    let world = world(by_tokens());
    let mut running = One::tenant(&world, "flood");
    let mut waiting: Vec<(&str, One)> =
        ["flood", "flood", "other", "other", "other"].map(|name| (name, One::tenant(&world, name))).into();
    let (mut name, mut order) = ("flood", Vec::new());
    while !waiting.is_empty() {
        running.streams(if name == "flood" { 100 } else { 1 });
        running.closes();
        waiting.iter_mut().for_each(|(_, one)| one.wakes(NOW));
        let at = waiting.iter().position(|(_, one)| one.goes()).expect("one goes");
        (name, running) = waiting.remove(at);
        order.push(name);
    }
    running.ends();
    assert_eq!(order, ["other", "other", "other", "flood", "flood"]);
    world.assert_books_closed(6);
}

#[test]
fn long_response_is_charged_while_it_streams() {
    // Whether or not the client disconnects.
    for leaves in [false, true] {
        let world = Setup { servers: vec![(0, 0.1, &[]), (0, 0.1, &[])], ..setup(by_tokens()) }.build();
        let mut long = One::tenant(&world, "flood");
        let short = One::tenant(&world, "flood");
        let mut flood = One::tenant(&world, "flood");
        let mut other = One::tenant(&world, "other");
        long.streams(100);
        let held = if leaves {
            drop(long);
            Some(short)
        } else {
            drop(short);
            Some(long)
        };
        flood.wakes(NOW);
        other.wakes(NOW);
        assert!(other.goes() && !flood.goes(), "leaves: {leaves}");
        drop((held, other, flood));
        world.assert_books_closed(4);
    }
}

#[test]
fn usage_reported_at_the_start_is_not_the_final_charge() {
    let world = world(by_tokens());
    let mut running = One::tenant(&world, "flood");
    let mut waiting: Vec<(&str, One)> =
        ["flood", "flood", "other", "other", "other"].map(|name| (name, One::tenant(&world, name))).into();
    let (mut name, mut order) = ("flood", Vec::new());
    while !waiting.is_empty() {
        if name == "flood" {
            // Fewer tokens than one charging step.
            running.streams(30);
            let told = b"data: {\"usage\": {\"output_tokens\": 1}}\n\n";
            send(&mut running.exchange, request(Message::ResponseBody(body(told, false))));
            drop(running);
        } else {
            running.streams(5);
            running.closes();
        }
        waiting.iter_mut().for_each(|(_, one)| one.wakes(NOW));
        let at = waiting.iter().position(|(_, one)| one.goes()).expect("one goes");
        (name, running) = waiting.remove(at);
        order.push(name);
    }
    drop(running);
    assert_eq!(order, ["other", "other", "other", "flood", "flood"]);
    world.assert_books_closed(6);
}
