//! Requests in the shapes that published agents send, in `tests/data/agent_requests.json`.

use super::programs::MAX_IDS;
use super::*;
use crate::head::Header;
use attache_pool::{Endpoint, EndpointSpec};
use attache_protocol::{Api, parse};
use attache_types::ids::EndpointId;
use attache_types::limits::Limits;
use serde_json::{Value, json};

fn head(headers: &Value, tenant: Option<&str>) -> Head {
    let header = |(name, value): (&String, &Value)| Header {
        name: name.clone(),
        value: value.as_str().unwrap().as_bytes().to_vec(),
    };
    let mut head = Head::read(headers.as_object().into_iter().flatten().map(header).collect());
    head.belongs_to(tenant.map_or(Tenant::Unconfigured, |tenant| Tenant::Named(tenant.into())));
    head
}

/// A request with these headers and this body, as agents send it.
fn identify(programs: &Programs, path: &str, head: &Head, body: &Value) -> Option<Box<AgentIdentity>> {
    let body = serde_json::to_vec(body).unwrap();
    let request = parse(Api::from_path(path).0, Some("application/json"), &body, &Limits::default()).unwrap();
    let agent = programs.identify(head, Some(&request));
    agent.inspect(|agent| programs.booked(agent))
}

/// A chat with these headers and these members of the body.
fn chat(programs: &Programs, tenant: Option<&str>, headers: &Value, members: &Value) -> Option<Box<AgentIdentity>> {
    let mut body = json!({"model": "m", "input": "hi"});
    body.as_object_mut().unwrap().extend(members.as_object().cloned().unwrap_or_default());
    identify(programs, "/v1/responses", &head(headers, tenant), &body)
}

#[test]
fn requests_of_agents_name_program_chain_parent_and_kind() {
    let path = format!("{}/../../tests/data/agent_requests.json", env!("CARGO_MANIFEST_DIR"));
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(cases.len() >= 30);
    // The requests of one client follow each other, so that a sub-agent's sub-agent belongs to the same program.
    let programs = Programs::default();
    for case in &cases {
        let client = case["client"].as_str().unwrap();
        let agent = identify(&programs, case["path"].as_str().unwrap(), &head(&case["headers"], None), &case["body"]);
        let got = agent.as_deref().map_or(Value::Null, |agent| serde_json::to_value(agent).unwrap());
        assert_eq!(got, case["want"], "{client}");
    }
}

#[test]
fn ids_that_are_blank_long_or_have_control_characters_are_none() {
    let programs = Programs::default();
    let (longest, longer) = ("x".repeat(MAX_ID_BYTES), "x".repeat(MAX_ID_BYTES + 1));
    for (id, named) in
        [("", false), (" \t", false), ("a\u{7}b", false), (&longer, false), (&longest, true), (" a ", true)]
    {
        let by_header = chat(&programs, None, &json!({"x-claude-code-session-id": id}), &Value::Null);
        let by_body = chat(&programs, None, &Value::Null, &json!({"session_id": id}));
        for agent in [by_header, by_body] {
            let program = agent.map(|agent| agent.program.to_string());
            assert_eq!(program, named.then(|| id.trim().to_owned()), "{id:?}");
        }
    }
    let fallback = json!({"x-claude-code-session-id": longer, "x-session-id": "s"});
    let agent = chat(&programs, None, &fallback, &Value::Null).unwrap();
    assert_eq!((&*agent.program, agent.field), ("s", "x-session-id"), "the next header counts");
}

#[test]
fn sub_agents_of_sub_agents_have_the_program_of_the_first_agent() {
    let programs = Programs::default();
    let of = |tenant, chain: &str, parent: &str| {
        let headers = json!({"x-session-affinity": chain, "x-parent-session-id": parent});
        chat(&programs, tenant, &headers, &Value::Null).unwrap().program.to_string()
    };
    assert_eq!(of(Some("a"), "child", "root"), "root");
    assert_eq!(of(Some("a"), "grandchild", "child"), "root");
    assert_eq!(of(Some("b"), "grandchild", "child"), "child", "another tenant's chain is not known");
    assert_eq!(of(None, "grandchild", "child"), "child");
}

#[test]
fn turns_that_continue_responses_are_one_program() {
    let programs = Programs::default();
    let turn = |tenant, previous: &str, stored: &str| {
        let agent = chat(&programs, tenant, &Value::Null, &json!({"previous_response_id": previous})).unwrap();
        assert_eq!((agent.source, agent.field), (IdentitySource::Inferred, "previous_response_id"));
        programs.stored(&agent, stored);
        agent.program.to_string()
    };
    assert_eq!(turn(Some("a"), "resp_1", "resp_2"), "resp_1", "the first turn named nothing");
    assert_eq!(turn(Some("a"), "resp_2", "resp_3"), "resp_1");
    assert_eq!(turn(Some("b"), "resp_3", "resp_4"), "resp_3", "another tenant's response is not known");
    let first = chat(&programs, None, &Value::Null, &json!({"prompt_cache_key": "key"})).unwrap();
    programs.stored(&first, "resp_5");
    assert_eq!(turn(None, "resp_5", "resp_6"), "key", "the next turn names only the response");
}

#[test]
fn headers_of_other_clients_name_no_session() {
    let names = [
        "x-stainless-async",
        "x-forwarded-proto",
        "x-request-id",
        "user-agent",
        "accept",
        "x-app",
        "x-session-token",
        "session",
        "x-",
        "x-\u{e9}",
        "x-claude-code-session-idx",
        "anthropic-version",
        "x-amp-thread-ix",
    ];
    assert!(!names.iter().any(|name| may_name_session(name)));
    for SessionHeaders { session, .. } in SESSION_HEADERS {
        assert!(may_name_session(session), "{session}");
    }
}

#[test]
fn programs_that_are_remembered_are_bounded() {
    let programs = Programs::default();
    let agent = chat(&programs, None, &json!({"x-session-affinity": "c", "x-parent-session-id": "p"}), &Value::Null);
    let agent = agent.unwrap();
    (0..MAX_IDS * 2).for_each(|number| programs.learn_response(&agent, &number.to_string()));
    assert!(programs.len() <= MAX_IDS);
    let chain = |number: usize| AgentIdentity { chain: number.to_string().into(), ..(*agent).clone() };
    (0..MAX_IDS * 2).for_each(|number| programs.booked(&chain(number)));
    assert!(programs.len() <= MAX_IDS);
}

#[test]
fn ended_program_is_forgotten_with_all_its_chains_and_responses() {
    let programs = Programs::default();
    let of = |tenant, chain: &str, parent: &str| {
        let headers = json!({"x-session-affinity": chain, "x-parent-session-id": parent});
        chat(&programs, tenant, &headers, &Value::Null).unwrap()
    };
    let endpoint = |port| Endpoint::new(EndpointId(0), EndpointSpec::at(([10, 0, 0, 1], port).into()));
    let (first, second) = (endpoint(8000), endpoint(8001));
    let child = of(Some("a"), "child", "root");
    drop(programs.begin(&child, &first));
    drop(programs.begin(&child, &first));
    let running = programs.begin(&of(Some("a"), "grandchild", "child"), &second);
    drop(programs.begin(&of(Some("b"), "child", "root"), &first));
    assert_eq!(programs.end_program(Some("a"), "child"), None, "the id of a chain");
    assert_eq!(programs.end_program(None, "root"), None, "another tenant");
    let known = programs.end_program(Some("a"), "root").unwrap();
    let shown = json!({
        "program": "root", "is_program": true, "requests": 3, "in_flight": 1,
        "endpoints": {"10.0.0.1:8000": 2, "10.0.0.1:8001": 1},
    });
    assert_eq!(serde_json::to_value(known).unwrap(), shown);
    drop(running);
    assert_eq!(programs.end_program(Some("a"), "root"), None, "a second end changes nothing");
    assert_eq!(&*of(Some("a"), "late", "grandchild").program, "grandchild", "the chain is not known any more");
    assert_eq!(&*of(Some("b"), "late", "child").program, "root", "the other tenant's program goes on");
}

#[test]
fn ended_chain_leaves_its_program_as_it_is() {
    let programs = Programs::default();
    let of = |chain: &str, parent: &str| {
        let headers = json!({"x-session-affinity": chain, "x-parent-session-id": parent});
        chat(&programs, None, &headers, &Value::Null).unwrap()
    };
    ["one", "two"].iter().for_each(|chain| drop(of(chain, "root")));
    let known = programs.end_chain(None, "one").unwrap();
    assert_eq!((known.program.as_deref(), known.is_program), (Some("root"), false));
    assert_eq!((&*of("a", "one").program, &*of("b", "two").program), ("one", "root"));
    assert_eq!(programs.end_chain(None, "one"), None);
}

#[test]
fn chain_of_each_client_is_known_by_its_id() {
    let claude = json!({"x-claude-code-session-id": "root", "x-claude-code-agent-id": "chain"});
    let in_body = json!({
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}],
        "metadata": {"user_id": "user_h_account_a_session_root"},
    });
    let agent_alone = json!({"x-claude-code-agent-id": "chain"});
    for (headers, path, body) in [
        (claude, "/v1/responses", json!({"model": "m", "input": "hi"})),
        (json!({"session-id": "root", "thread-id": "chain"}), "/v1/responses", json!({"model": "m", "input": "hi"})),
        (agent_alone, "/v1/messages", in_body),
    ] {
        let programs = Programs::default();
        let turn = |tenant| identify(&programs, path, &head(&headers, tenant), &body).unwrap();
        let agent = turn(Some("a"));
        assert_eq!((&*agent.program, &*agent.chain), ("root", "chain"), "{headers}");
        assert_eq!(programs.end_chain(Some("b"), "chain"), None, "another tenant's chain");
        let known = programs.end_chain(Some("a"), "chain").unwrap();
        assert_eq!((known.program.as_deref(), known.is_program), (Some("root"), false), "{headers}");
        assert_eq!(programs.end_chain(Some("a"), "chain"), None, "a second end changes nothing");
        turn(Some("a"));
        assert!(programs.end_program(Some("a"), "root").is_some(), "{headers}");
        assert_eq!(programs.end_chain(Some("a"), "chain"), None, "it has ended with its program");
    }
}

#[test]
fn last_request_of_a_session_is_marked_by_a_header() {
    for (value, marked) in [("true", true), (" TRUE ", true), ("false", false), ("1", false), ("", false)] {
        assert_eq!(is_final(&head(&json!({"x-dynamo-session-final": value}), None)), marked, "{value:?}");
    }
    assert!(!is_final(&head(&json!({}), None)));
}
