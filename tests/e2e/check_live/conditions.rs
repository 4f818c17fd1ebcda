//! Planted conditions of the picker: prompts without tokens, and too few file descriptors.

use super::{Checked, PATIENT, until_scraped};
use crate::prefix;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::envoy::EnvoyProcess;
use crate::support::grpc::Connection;
use crate::support::process::{repository, scratch};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn chat_template_that_fails_is_found_by_prompts_without_tokens() {
    let (fleet, model) = (SimProcess::start(1, &["--model", "sim-8b"]).await, scratch("check-template"));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let from = repository().join("tests/data/chat_vectors").join(file);
        std::fs::copy(from, model.path().join(file)).expect("copying");
    }
    let template = "{{ raise_exception('a system message is missing') }}";
    std::fs::write(model.path().join("chat_template.jinja"), template).expect("writing");
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: chat\n  {PATIENT}\n  strategy: {}\n  \
         prefixCache: {{tokenizer: {{type: huggingface, directory: {}}}}}\n  endpoints: [\"{}\"]\n",
        prefix::BY_PREFIX,
        model.path().display(),
        fleet.servers[0]
    ))
    .await;
    until_scraped(&picker, 1).await;
    let check = || Checked::run(&["--admin", &picker.metrics.to_string()]);
    check().assert_faults("no prompt yet", "picker", &[]);
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let body = json!({"model": "sim-8b", "max_tokens": 1, "messages": [{"role": "user", "content": "Which sea?"}]});
    let reply = client::post(envoy.listener("inference"), "/v1/chat/completions", Bytes::from(body.to_string())).await;
    assert_eq!(reply.expect("a response").status, 200);
    let checked = check();
    checked.assert_faults("a template that fails", "picker", &[("picker-degraded", "log of the picker")]);
    checked.assert_faults("a template that fails", "pool-prompts", &[("pool-prompts", "chat template")]);
    let found = checked.of("pool-prompts")[0]["found"].clone();
    let names_both = |text: &str| text.contains("sim-8b") && text.contains("a system message is missing");
    assert!(found.as_str().is_some_and(names_both), "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn few_file_descriptors_are_found_before_they_run_out() {
    const DESCRIPTORS: u32 = 64;
    let fleet = SimProcess::start(1, &[]).await;
    let picker = AttacheProcess::with_open_files(DESCRIPTORS, &fleet.servers).await;
    let check = || Checked::run(&["--admin", &picker.metrics.to_string()]);
    check().assert_faults("few connections", "picker-file", &[]);
    let mut held = Vec::new();
    while picker.metric("process_open_fds").await < f64::from(DESCRIPTORS) * 0.9 {
        held.push(Connection::open(picker.grpc).await.expect("a connection"));
        assert!(held.len() < DESCRIPTORS as usize, "the picker holds few connections");
    }
    check().assert_faults("many connections", "picker-file", &[("picker-file-descriptors", "LimitNOFILE")]);
}
