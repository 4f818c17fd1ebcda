//! The filter without Envoy: a script of hooks, and what the filter asks for.

use super::*;
use crate::pickers::Process;
use crate::script::Script;
use crate::settings::Outputs;
use std::sync::mpsc;
use std::time::Duration;

const BODY: &[u8] = br#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;

/// A filter of a pool with one server, and the rest of its description.
fn filter(more: &str, ready: bool, fail_open: bool) -> Filter {
    let folder = tempfile::tempdir().unwrap();
    let config_file = folder.path().join("attache.yaml");
    // Without an engine, the server counts as reached. With one, nothing listens there.
    let engine = if ready { "engine: none" } else { "engine: vllm" };
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {{name: random}}\n  \
         endpoints: [{{address: \"127.0.0.1:9\", {engine}}}]\n{more}"
    );
    std::fs::write(&config_file, text).unwrap();
    let process = Process { validates: false, block_signals: || {}, write_log: |_, _| {} };
    let picker = Picker::open(&config_file, Outputs::default(), process).unwrap();
    assert_eq!(picker.wait_until_ready(Duration::from_secs(if ready { 20 } else { 0 })), ready);
    let settings = FilterSettings { config_file, authority: String::new(), fail_open, admin: None, record: None };
    Filter::new(Arc::new(FilterConfig::new(picker, &settings)))
}

#[test]
fn request_is_decided_in_the_hook_of_its_last_bytes() {
    for last in [&b""[..], &BODY[20..]] {
        let filter = filter("", true, true);
        let script = Script::new("/v1/chat/completions", &[(DESTINATION, "127.0.0.1:1")]);
        assert_eq!(filter.request_headers(&script, false), Flow::Hold);
        assert_eq!((script.header(DESTINATION), script.destination()), (None, None));
        assert!(script.limit.get() > 1 << 20);
        let first = if last.is_empty() { BODY } else { &BODY[..20] };
        assert_eq!(script.chunk(&filter, first, false), Flow::Hold);
        assert_eq!(script.chunk(&filter, last, true), Flow::Continue);
        assert_eq!(script.received.borrow().as_slice(), BODY, "unchanged");
        assert_eq!(script.destination().as_deref(), Some("127.0.0.1:9"));
        assert_eq!(script.header(DESTINATION).as_deref(), Some("127.0.0.1:9"));
        filter.complete();
        assert!(filter.passes());
    }
}

#[test]
fn changed_body_takes_the_place_of_held_and_received_bytes() {
    let rewrite = "  modelRewrites: [{model: m, targets: [{model: another-name}]}]\n";
    for last in [&b""[..], &BODY[20..]] {
        let filter = filter(rewrite, true, true);
        let length = BODY.len().to_string();
        let script = Script::new("/v1/chat/completions", &[("content-length", &length)]);
        filter.request_headers(&script, false);
        let first = if last.is_empty() { BODY } else { &BODY[..20] };
        script.chunk(&filter, first, false);
        assert_eq!(script.chunk(&filter, last, true), Flow::Continue);
        let sent = String::from_utf8(script.received.take()).unwrap();
        assert!(sent.contains("another-name") && sent.ends_with("]}"), "{sent}");
        assert_eq!(script.header("content-length").unwrap(), sent.len().to_string());
    }
}

#[test]
fn trailers_end_a_request() {
    let filter = filter("", true, true);
    let script = Script::new("/v1/chat/completions", &[]);
    filter.request_headers(&script, false);
    assert_eq!(script.chunk(&filter, BODY, false), Flow::Hold);
    assert_eq!(filter.request_trailers(&script), Flow::Continue);
    assert_eq!(script.destination().as_deref(), Some("127.0.0.1:9"));
}

#[test]
fn rejection_is_sent_and_ends_the_exchange() {
    let filter = filter("", true, true);
    let script = Script::new("/v1/chat/completions", &[]);
    filter.request_headers(&script, false);
    assert_eq!(script.chunk(&filter, b"{", true), Flow::Discard);
    let sent = script.sent.borrow();
    assert_eq!(sent.iter().map(|answer| answer.status).collect::<Vec<_>>(), [400]);
    assert_eq!(sent[0].details, "attache_invalid_json");
    assert_eq!(filter.response_headers(&script, false), Flow::Continue);
    assert!(filter.passes());
}

#[test]
fn picker_that_is_not_ready_names_nothing() {
    let spoofed = [(DESTINATION, "127.0.0.1:1"), ("x-prefiller-host-port", "127.0.0.1:1")];
    let script = Script::new("/v1/chat/completions", &spoofed);
    assert_eq!(filter("", false, true).request_headers(&script, false), Flow::Continue);
    let named = [DESTINATION, "x-prefiller-host-port"].map(|name| script.header(name));
    assert_eq!((named, script.destination(), script.sent.borrow().len()), ([None, None], None, 0));
    assert_eq!(filter("", false, false).request_headers(&script, false), Flow::Discard);
    assert_eq!(script.sent.borrow()[0].status, 503);
}

#[test]
fn queued_request_is_resumed_when_its_waker_is_woken() {
    let flow = "  flowControl:\n    enabled: true\n    detector: {name: concurrency-detector, parameters: \
                {maxConcurrency: 1}}\n    maxRequests: 10\n    ttl: 60s\n";
    let first = filter(flow, true, true);
    let (wakes, woken) = mpsc::channel();
    let ask = |filter: &Filter| {
        let script = Script { wakes: Some(wakes.clone()), ..Script::new("/v1/chat/completions", &[]) };
        filter.request_headers(&script, false);
        (script.chunk(filter, BODY, true), script)
    };
    assert_eq!(ask(&first).0, Flow::Continue);
    let second = Filter::new(first.config.clone());
    let (flow, script) = ask(&second);
    assert_eq!((flow, second.holds()), (Flow::Hold, true));
    let third = Filter::new(first.config.clone());
    let (flow, _) = ask(&third);
    assert_eq!(flow, Flow::Hold);
    drop(third);
    while woken.try_recv().is_ok() {}
    first.complete();
    woken.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!((second.scheduled(&script), second.holds()), (Flow::Continue, false));
    assert_eq!(script.buffered.borrow().as_slice(), BODY);
    assert_eq!(script.destination().as_deref(), Some("127.0.0.1:9"));
}
