//! The filter without Envoy: a script of hooks, and what the filter asks for.

use super::*;
use crate::pickers::Process;
use crate::script::Script;
use crate::settings::Outputs;
use attache_ext_proc::metadata::{SUBSET_KEY, SUBSET_NAMESPACE};
use std::sync::mpsc;
use std::time::Duration;

const BODY: &[u8] = br#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;

/// A filter of a pool with one server, and the rest of its description.
fn filter(more: &str, ready: bool, fail_open: bool) -> Filter {
    // Without an engine, the server counts as reached. With one, nothing listens there.
    filter_of(if ready { "engine: none" } else { "engine: vllm" }, more, ready, fail_open)
}

/// The same with more about the server.
fn filter_of(server: &str, more: &str, ready: bool, fail_open: bool) -> Filter {
    let folder = tempfile::tempdir().unwrap();
    let config_file = folder.path().join("attache.yaml");
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {{name: random}}\n  \
         endpoints: [{{address: \"127.0.0.1:9\", {server}}}]\n{more}"
    );
    std::fs::write(&config_file, text).unwrap();
    let process = Process { validates: false, block_signals: || {}, write_log: |_, _| {} };
    let picker = Picker::open(&config_file, Outputs::default(), process).unwrap();
    assert_eq!(picker.wait_until_ready(Duration::from_secs(if ready { 20 } else { 0 })), ready);
    let settings = FilterSettings { config_file, call: GatewayCall::default(), fail_open, admin: None, record: None };
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

/// A subset of the pool's servers, as a filter in front sets it.
fn in_subset(script: Script) -> Script {
    let key = (SUBSET_NAMESPACE.to_owned(), SUBSET_KEY.to_owned());
    script.metadata.borrow_mut().insert(key, "127.0.0.1:8".to_owned());
    script
}

#[test]
fn request_for_some_servers_only_is_rejected_where_others_are_passed_on() {
    let by_label = "  requestStrategy: {filterHeader: external-filter}\n";
    let request = |more: &[(&str, &str)]| Script::new("/v1/chat/completions", more);
    let sent = |filter: &Filter, script: &Script| {
        filter.request_headers(script, false);
        assert_eq!(script.chunk(filter, BODY, true), Flow::Discard);
        script.sent.borrow().iter().map(|answer| (answer.status, answer.details.clone())).collect::<Vec<_>>()
    };
    let none_left = [(503, "attache_subset_empty".to_owned())];
    let labelled = request(&[("external-filter", "zone=nowhere")]);
    assert_eq!(sent(&filter(by_label, true, true), &labelled), none_left);
    assert_eq!(sent(&filter("", true, true), &in_subset(request(&[]))), none_left);
    // The pool is known to be empty, or is not known yet.
    let draining = |script: &Script| {
        let filter = filter_of("draining: true", by_label, true, true);
        filter.request_headers(script, false);
        script.chunk(&filter, BODY, true)
    };
    assert_eq!(draining(&request(&[])), Flow::Continue);
    assert_eq!(draining(&request(&[("external-filter", "zone=nowhere")])), Flow::Discard);
    assert_eq!(draining(&in_subset(request(&[]))), Flow::Discard);
    let unready = filter("", false, true);
    assert_eq!(unready.request_headers(&in_subset(request(&[])), false), Flow::Discard);
    assert_eq!(unready.request_headers(&request(&[]), false), Flow::Continue);
}

#[test]
fn panic_of_a_held_request_is_a_rejection_unless_it_may_pass() {
    let named = "  destination: {headers: [x-to]}\n";
    let steering = [("x-to", "127.0.0.1:1"), ("x-prefiller-host-port", "127.0.0.1:1"), ("x-other", "stays")];
    for (fail_open, flow, statuses) in [(true, Flow::Continue, vec![]), (false, Flow::Discard, vec![500])] {
        let filter = filter(named, true, fail_open);
        let script = Script::new("/v1/chat/completions", &steering);
        assert_eq!(filter.request_headers(&script, false), Flow::Hold);
        assert_eq!(filter.panicked(&script), flow);
        assert_eq!(script.sent.borrow().iter().map(|answer| answer.status).collect::<Vec<_>>(), statuses);
        let left = steering.map(|(name, _)| script.header(name));
        assert_eq!(left, [None, None, Some("stays".to_owned())]);
        assert!(filter.passes() && !filter.holds());
        // A response that is under way goes on.
        assert_eq!(filter.panicked(&script), Flow::Continue);
    }
    let script = in_subset(Script::new("/v1/chat/completions", &[]));
    let filter = filter("", true, true);
    filter.request_headers(&script, false);
    assert_eq!(filter.panicked(&script), Flow::Discard);
}

/// The client announces the length of the body, sends it, and never ends it.
#[test]
fn http2_request_that_does_not_end_is_rejected_in_time() {
    let limits = "limits: {requestTimeout: 100ms}\n";
    for body in [&b""[..], BODY] {
        let filter = filter(limits, true, true);
        let (wakes, woken) = mpsc::channel();
        let length = body.len().to_string();
        let script = Script {
            wakes: Some(wakes),
            protocol: Some("HTTP/2".to_owned()),
            ..Script::new("/v1/chat/completions", &[("content-length", &length)])
        };
        filter.request_headers(&script, false);
        if !body.is_empty() {
            assert_eq!(script.chunk(&filter, body, false), Flow::Hold);
        }
        while filter.holds() {
            woken.recv_timeout(Duration::from_secs(20)).expect("a timer");
            filter.scheduled(&script);
        }
        assert_eq!(script.sent.borrow().iter().map(|answer| answer.status).collect::<Vec<_>>(), [408]);
    }
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
