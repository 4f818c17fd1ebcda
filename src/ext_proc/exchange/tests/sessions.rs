//! `POST /finish_session` through the gateway.

use super::*;
use attache_picker::event::SessionEnd;
use attache_picker::settings::{TenantRule, TenantSource};

/// The status and the body of Attaché's own response.
fn finish(world: &World, method: &str, path: &str, tenant: &str) -> Option<(i32, serde_json::Value)> {
    let pairs = [(":path", path), (":method", method), ("x-tenant", tenant)];
    let got = send(&mut world.exchange(), request(Message::RequestHeaders(headers(&pairs, true))));
    let (status, body) = Answered::of(&got).refused?;
    Some((status, serde_json::from_str(&body).unwrap()))
}

/// A request of the session `a` of this tenant, to its end.
fn turn(world: &World, tenant: &str) {
    let mut exchange = world.exchange();
    let pairs = [PATH, (":method", "POST"), ("x-tenant", tenant), ("x-claude-code-session-id", "a")];
    send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false))));
    send(&mut exchange, request(Message::RequestBody(body(br#"{"model": "m", "prompt": "hello"}"#, true))));
    assert!(exchange.is_routed());
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], true))));
}

#[test]
fn client_ends_sessions_of_its_own_tenant_through_the_gateway() {
    let tenant = TenantRule { source: TenantSource::Header("x-tenant".to_owned()), strip: None };
    let exchange = ExchangeSettings { tenant: Some(tenant), ..ExchangeSettings::default() };
    let world = Setup { exchange, ..Setup::default() }.build();
    ["one", "one", "two"].iter().for_each(|tenant| turn(&world, tenant));
    let path = "/finish_session?session_id=a";
    let said = |known: bool, requests: u64| {
        let body = serde_json::json!({
            "session_id": "a", "known": known, "is_program": known, "requests": requests, "in_flight": 0,
        });
        Some((200, body))
    };
    assert_eq!(finish(&world, "POST", path, "three"), said(false, 0), "a session of others");
    assert_eq!(finish(&world, "POST", path, "one"), said(true, 2));
    assert_eq!(finish(&world, "POST", path, "one"), said(false, 0), "it has ended");
    assert_eq!(finish(&world, "POST", path, "two"), said(true, 1));
    let (status, error) = finish(&world, "POST", "/finish_session", "one").unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("`session_id` is missing"), "{error}");
    assert_eq!(finish(&world, "GET", path, "one"), None, "another method is routed");
    assert_eq!(finish(&world, "POST", "/v1/finish_session?session_id=a", "one"), None, "another path is routed");
    assert_eq!(world.processor.metrics.session_ends.get(SessionEnd::Gateway), 4);
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Answered), 4);
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Rejected), 1);
}
