//! Hooks of Envoy in any order, with any bytes: the filter does not panic, a client never names its server, a body that
//! is passed on is the one that arrived, and nothing is held when the stream is over.

#![no_main]

use attache_envoy::callbacks::{Callbacks, Chunk};
use attache_envoy::filter::{Filter, FilterConfig};
use attache_envoy::pickers::{Picker, Process};
use attache_envoy::script::Script;
use attache_envoy::settings::{FilterSettings, Outputs};
use attache_envoy::stream::{Flow, StreamFilter};
use attache_ext_proc::exchange::GatewayCall;
use attache_picker::event::StreamOutcome;
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

const SERVER: &str = "127.0.0.1:9";
const DESTINATION: &str = "x-gateway-destination-endpoint";
const PATHS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/audio/transcriptions", "/unknown"];
const CONFIGURATION: &str = "apiVersion: attache.dev/v1\nkind: Attache\nlimits: {maxBodyBytes: 4KiB}\npools:\n- name: \
                             default\n  strategy: {name: random}\n  endpoints: [{address: \"127.0.0.1:9\", engine: none}]\n";

/// One picker for all inputs, since it has threads, and its filters: one that fails open, and one that does not.
static WORLD: LazyLock<(Arc<Picker>, [Arc<FilterConfig>; 2])> = LazyLock::new(|| {
    let config_file = std::env::temp_dir().join(format!("attache-fuzz-{}.yaml", std::process::id()));
    std::fs::write(&config_file, CONFIGURATION).unwrap();
    let process = Process { validates: false, block_signals: || {}, write_log: |_, _| {} };
    let picker = Picker::open(&config_file, Outputs::default(), process).unwrap();
    assert!(picker.wait_until_ready(Duration::from_secs(30)));
    let filters = [true, false].map(|fail_open| {
        let config_file = config_file.clone();
        let settings = FilterSettings { config_file, call: GatewayCall::default(), fail_open, admin: None, record: None };
        Arc::new(FilterConfig::new(picker.clone(), &settings))
    });
    (picker, filters)
});

fn byte(data: &mut &[u8]) -> u8 {
    let Some((first, rest)) = data.split_first() else { return 0 };
    *data = rest;
    *first
}

fn bytes<'a>(data: &mut &'a [u8]) -> &'a [u8] {
    let length = usize::from(byte(data)) * 8;
    let (head, tail) = data.split_at(length.min(data.len()));
    *data = tail;
    head
}

/// Streams that have ended, and bytes of bodies that are held.
fn books() -> (u64, u64) {
    let processor = &WORLD.0.serving().unwrap().processor;
    let outcomes = &processor.metrics.outcomes;
    (StreamOutcome::ALL.iter().map(|outcome| outcomes.get(*outcome)).sum(), processor.picker.buffered.bytes())
}

fuzz_target!(|data: &[u8]| {
    let mut data = data;
    let setup = byte(&mut data);
    let before = books().0;
    let script = Script::new(PATHS[usize::from(setup & 3)], &[(DESTINATION, "127.0.0.1:1"), ("content-type", "text/plain")]);
    let filter = Filter::new(WORLD.1[usize::from(setup >> 7)].clone());
    // Envoy always calls this one first.
    let mut flow = filter.request_headers(&script, setup & 4 != 0);
    let (mut arrived, mut forwarded) = (Vec::new(), Vec::new());
    while !data.is_empty() {
        let named = script.header(DESTINATION);
        assert!(named.as_deref().is_none_or(|named| named == SERVER), "{named:?}");
        let op = byte(&mut data);
        let end = op & 8 != 0;
        match op & 7 {
            0 | 1 => {
                let chunk = bytes(&mut data);
                arrived.extend_from_slice(chunk);
                flow = script.chunk(&filter, chunk, end);
                if flow == Flow::Continue {
                    forwarded.extend(script.received.take());
                }
            }
            2 => flow = filter.request_trailers(&script),
            3 => _ = filter.scheduled(&script),
            4 => _ = filter.response_headers(&script, end),
            5 => _ = filter.response_body(&script, end),
            6 => _ = filter.response_trailers(&script),
            _ if end => break,
            _ => flow = filter.panicked(&script),
        }
        assert!(flow != Flow::Discard || !script.sent.borrow().is_empty(), "a request is dropped without a response");
    }
    // What is still held is forwarded by a hook without new bytes.
    forwarded.extend(script.body(Chunk::BufferedRequest));
    if script.sent.borrow().is_empty() {
        assert_eq!(forwarded, arrived, "another body is forwarded");
    }
    filter.complete();
    drop(filter);
    let (ended, held) = books();
    assert_eq!((ended - before, held), (1, 0));
});
