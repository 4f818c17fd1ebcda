use super::*;
use crate::InFlight;
use crate::decide::tests::fixture::{Fixture, NOW, Parts, chat, head, view};
use crate::decide::{Plan, Seen};
use crate::event::End;
use crate::in_flight::OpenedRequest;
use crate::settings::ExchangeSettings;
use crate::tenant::Tenant;
use attache_protocol::Api;

/// The plan of a request with these headers.
fn plan(fixture: &Fixture, headers: &[(&str, &str)]) -> Box<Plan> {
    fixture.plan(&view(&head(headers), Seen::Whole(&chat("m", "hello")))).unwrap()
}

/// A request with these headers, whose response has not ended.
fn begin(fixture: &Fixture, headers: &[(&str, &str)]) -> InFlight {
    let mut plan = plan(fixture, headers);
    let (booked, settings) = (plan.booked.take().unwrap(), ExchangeSettings::default());
    let request = OpenedRequest {
        api: Api::ChatCompletions,
        opened: NOW,
        request_id: String::new(),
        tenant: &Tenant::Unconfigured,
        span: None,
        settings: &settings,
    };
    InFlight::begin(*plan, booked, request, NOW, &fixture.picker)
}

fn program(fixture: &Fixture, headers: &[(&str, &str)]) -> String {
    plan(fixture, headers).agent.unwrap().program.to_string()
}

const FINAL: (&str, &str) = ("x-dynamo-session-final", "true");

#[test]
fn session_ends_with_the_response_to_its_last_request() {
    let fixture = Parts::default().build();
    let (root, child) = (("x-dynamo-session-id", "root"), ("x-dynamo-session-id", "child"));
    let of_root = ("x-dynamo-parent-session-id", "root");
    begin(&fixture, &[root]).end(End::Complete, NOW, &fixture.picker);
    begin(&fixture, &[child, of_root]).end(End::Complete, NOW, &fixture.picker);
    let grandchild = [("x-dynamo-session-id", "grandchild"), ("x-dynamo-parent-session-id", "child")];
    assert_eq!(program(&fixture, &grandchild), "root");
    let last = begin(&fixture, &[child, of_root, FINAL]);
    assert_eq!(program(&fixture, &grandchild), "root", "the response has not ended");
    last.end(End::ClientGone, NOW, &fixture.picker);
    assert_eq!(program(&fixture, &grandchild), "child", "the chain has ended");
    let known = fixture.picker.end_session(None, Some("root"), SessionEnd::Admin, NOW).unwrap();
    assert!(known.known && known.was.is_program, "the program has not ended with its sub-agent");
    assert_eq!((known.was.requests, known.was.in_flight), (3, 0));
    begin(&fixture, &[root]).end(End::Complete, NOW, &fixture.picker);
    begin(&fixture, &[root, FINAL]).end(End::Complete, NOW, &fixture.picker);
    assert!(!fixture.picker.end_session(None, Some("root"), SessionEnd::Admin, NOW).unwrap().known);
    let ends = fixture.events.take().into_iter().filter(|event| event.starts_with("SessionEnd")).collect::<Vec<_>>();
    let by = ["SessionEnd(Header)", "SessionEnd(Admin)", "SessionEnd(Header)", "SessionEnd(Admin)"];
    assert_eq!(ends, by);
}

#[test]
fn sub_agents_of_claude_code_and_codex_are_ended_by_their_ids() {
    let fixture = Parts::default().build();
    let claude = [("x-claude-code-session-id", "ses"), ("x-claude-code-agent-id", "sub")];
    for headers in [claude, [("session-id", "root"), ("thread-id", "thread")]] {
        let [(_, program), (_, chain)] = headers;
        begin(&fixture, &headers).end(End::Complete, NOW, &fixture.picker);
        let ended = fixture.picker.end_session(None, Some(chain), SessionEnd::Admin, NOW).unwrap();
        assert!(ended.known && !ended.was.is_program, "{ended:?}");
        assert_eq!(ended.was.program.as_deref(), Some(program));
    }
}

#[test]
fn mark_without_a_session_ends_nothing() {
    let fixture = Parts::default().build();
    assert!(!plan(&fixture, &[FINAL]).ends_session);
    begin(&fixture, &[FINAL]).end(End::Complete, NOW, &fixture.picker);
    assert!(fixture.events.take().iter().all(|event| !event.starts_with("SessionEnd")));
}

#[test]
fn invalid_ids_are_refused_with_what_is_allowed() {
    let fixture = Parts::default().build();
    let long = "x".repeat(MAX_ID_BYTES + 1);
    for (id, got) in [(None, "is missing"), (Some(" "), "has 1 bytes"), (Some(&*long), "has 257 bytes")] {
        let error = fixture.picker.end_session(None, id, SessionEnd::Gateway, NOW).unwrap_err();
        let message = &*error.message;
        assert!(error.reason == Reason::InvalidSessionId && message.contains(got), "{message}");
        assert!(message.contains("`session_id`") && message.contains("1 to 256 bytes"), "{message}");
    }
}

#[test]
fn end_of_a_session_by_a_peer_counts_where_the_session_is_known() {
    let fixture = Parts::default().build();
    let picker = &fixture.picker;
    let (root, child) = (("x-dynamo-session-id", "root"), ("x-dynamo-session-id", "child"));
    let of_root = ("x-dynamo-parent-session-id", "root");
    begin(&fixture, &[root]).end(End::Complete, NOW, picker);
    begin(&fixture, &[child, of_root]).end(End::Complete, NOW, picker);
    fixture.events.take();
    let ends = || fixture.events.take().into_iter().filter(|event| event.starts_with("SessionEnd")).count();
    let grandchild = [("x-dynamo-session-id", "grandchild"), ("x-dynamo-parent-session-id", "child")];
    for (tenant, id) in [(None, "unknown"), (Some("a"), "root"), (Some("a"), "child")] {
        picker.end_session_of_peer(picker.programs.session(tenant, id));
    }
    assert_eq!((ends(), program(&fixture, &grandchild)), (0, "root".to_owned()));
    picker.end_session_of_peer(picker.programs.session(None, "child"));
    assert_eq!((ends(), program(&fixture, &grandchild)), (1, "child".to_owned()), "the chain has ended");
    picker.end_session_of_peer(picker.programs.session(None, "root"));
    assert_eq!(ends(), 1);
    assert!(!picker.end_session(None, Some("root"), SessionEnd::Admin, NOW).unwrap().known, "so has the program");
}
