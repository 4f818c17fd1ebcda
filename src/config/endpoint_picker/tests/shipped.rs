//! Every file that llm-d ships or GIE's versions used, written anew: it loads, and what of it has no effect is named.

use super::*;
use std::path::PathBuf;

fn folder() -> PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/endpoint_picker")
}

/// The names between backquotes with which the warnings of a file begin.
fn named(warnings: &[Diagnostic]) -> Vec<&str> {
    warnings.iter().map(|d| d.message.split('`').nth(1).unwrap_or(&d.message)).collect()
}

#[test]
fn every_shipped_file_loads_and_equals_its_attache_form() {
    let mut seen = 0;
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let loaded = full(&text, one_endpoint());
        let (settings, warnings) = loaded.unwrap_or_else(|d| panic!("{name}: {}", show(&text, &d)));
        assert_eq!(settings.pools[0].strategy, "pipeline", "{name}");
        assert!(warnings.iter().all(|d| d.code == Code::NoEffect), "{name}: {}", show(&text, &warnings));
        assert!(warnings.iter().all(|d| d.span.is_some()), "{name}: a warning points nowhere: {warnings:?}");
        let dump = settings.to_json();
        let again = full(&dump.to_string(), Overrides::default());
        let (again, _) = again.unwrap_or_else(|d| panic!("{name}: {}", show(&dump.to_string(), &d)));
        assert_eq!(again.to_json(), dump, "{name} in Attaché's own words");
        seen += 1;
    }
    assert!(seen >= 48, "{seen}");
}

/// The files that did not load once: each with what its warnings name, in order.
#[test]
fn formerly_rejected_files_warn_of_settings_without_effect() {
    const DCGM: &[&str] = &["dcgm-data-source", "dcgm-extractor"];
    let cases: &[(&str, &[&str])] = &[
        ("sim-epp-gpu", &["models-data-source", "models-data-extractor", DCGM[0], DCGM[1]]),
        ("dcgm-v1", DCGM),
        ("epp-mm-embeddings-cache", &["modelName", "kvBlockIndexConfig"]),
        ("guide-e-p-d", &["estimate"]),
        ("guide-precise-affinity", &["modelName"]),
        ("epp-burst-prefix-cache", &["modelName", "windowDurationMs", "maxPerReplica", "minColocateBlocks"]),
        (
            "epp-precise-prefix-cache-v0.8",
            &[
                "modelName",
                "udsTokenizerConfig",
                "speculativeIndexing",
                "tokenizersPoolConfig",
                "kvBlockIndexConfig",
                "concurrency",
            ],
        ),
        (
            "sim-epp-kvcache-v0.5",
            &[
                "KV events have no effect: they name blocks by tokens, and nothing says where tokens come from",
                "prefixStoreConfig",
                "hashSeed",
                "tokenizersPoolConfig",
                "kvBlockIndexConfig",
            ],
        ),
        ("file-discovery", &[]),
        ("file-discovery-v1", &[]),
        ("file-discovery-old", &[]),
        ("guide-hub-load", &["multicluster-metrics-data-source", "multicluster-metrics-extractor"]),
        (
            "guide-hub-latency",
            &["latency-observer-producer-hub", "explorationRate", "minInflightGap", "ttftPercentilesProducerName"],
        ),
        ("multicluster", &["multicluster-metrics-data-source", "multicluster-metrics-extractor"]),
        ("gie-v1.5-latency-troubleshooting", &["samplingMean"]),
        ("session-affinity-agents", &[]),
        ("guide-context-length-aware-pd", &["estimate"]),
        ("guide-pd-multi-tier", &["modelName", "kvBlockIndexConfig", "kvCacheBackendConfigs", "speculativeIndexing"]),
        (
            "guide-lmetric",
            &["modelName", "prefixMatchInfoProducerName", "speculativeIndexing", "kvBlockIndexConfig", "concurrency"],
        ),
        ("guide-turn-priority-fairness", &[]),
        ("guide-optimized-baseline-tokens", &["maxPrefixTokensToMatch"]),
    ];
    for (name, want) in cases {
        let text = std::fs::read_to_string(folder().join(format!("{name}.yaml"))).unwrap();
        let (_, warnings) = full(&text, one_endpoint()).unwrap_or_else(|d| panic!("{name}: {}", show(&text, &d)));
        assert_eq!(named(&warnings), *want, "{name}: {}", show(&text, &warnings));
    }
}

#[test]
fn flat_parameters_of_the_handler_are_the_nested_ones() {
    let text = include_str!("../../../../tests/data/endpoint_picker/guide-pd-multi-tier.yaml");
    let (settings, _) = full(text, one_endpoint()).unwrap_or_else(|d| panic!("{}", show(text, &d)));
    let handler = settings.pools[0].strategy_parameters["plugins"][1].clone();
    assert_eq!(handler["type"], "disagg-profile-handler");
    assert!(settings.pools[0].disaggregation.is_some(), "the prefill profile is run");
    let mixed = staged(
        "- {type: disagg-profile-handler, parameters: {deciderPluginName: always-disagg-pd-decider, profiles: {decode: decode}}}\n\
         - {type: always-disagg-pd-decider}\n",
    );
    let (_, diagnostics) = body(&mixed);
    let errors: Vec<&Diagnostic> = diagnostics.iter().filter(|d| d.is_error()).collect();
    assert!(errors[0].code == Code::BadParameters && errors[0].message.contains("one spelling"), "{errors:?}");
}

#[test]
fn agent_sessions_are_flows_and_affinity_sources() {
    let text = include_str!("../../../../tests/data/endpoint_picker/session-affinity-agents.yaml");
    let (settings, _) = full(text, one_endpoint()).unwrap_or_else(|d| panic!("{}", show(text, &d)));
    assert!(settings.exchange.session_headers.is_empty(), "no queues, no flows");
    let agents = ["x-my-agent", "x-claude-code-session-id", "x-session-affinity", "session-id", "session_id"];
    let sources = &settings.pools[0].strategy_parameters["plugins"][0]["parameters"]["sessionIdConfig"]["sources"];
    let named: Vec<&str> = sources.as_array().unwrap().iter().filter_map(|s| s["header"].as_str()).collect();
    assert_eq!(named, [&["x-session-id"], &agents[..]].concat());
    let queued = format!("{text}featureGates: [flowControl]\n");
    let (settings, _) = full(&queued, one_endpoint()).unwrap();
    let headers: Vec<&str> = settings.exchange.session_headers.iter().map(|name| &**name).collect();
    assert_eq!((headers, settings.exchange.trust_client_headers), (agents.to_vec(), true));
    for (attribute, says) in [("other-plugin", "agent-identity"), ("", "agent-identity")] {
        let text = format!(
            "plugins: [{{type: session-affinity-filter, parameters: {{strategy: session_id, sessionIdConfig: {{sources: [{{attribute: '{attribute}'}}]}}}}}}]"
        );
        let (_, diagnostics) = body(&text);
        assert!(diagnostics[0].code == Code::BadParameters && diagnostics[0].message.contains(says), "{diagnostics:?}");
    }
}

#[test]
fn encoder_cache_size_of_the_producer_goes_to_the_scorer() {
    for (parameters, want) in [
        ("{cacheSizeInMBPerServer: 1000}", json!({"itemsPerServer": 500})),
        ("{cacheSizeInMB: 1}", json!({"itemsPerServer": 1})),
        ("{cacheSize: 10000}", json!({"itemsPerServer": 10_000})),
        ("{}", Value::Null),
    ] {
        let read = pipeline(&format!(
            "plugins: [{{type: mm-embeddings-cache-scorer}}, {{type: mm-embeddings-cache-producer, parameters: {parameters}}}]"
        ));
        assert_eq!(read["plugins"][0]["parameters"], want, "{parameters}");
    }
    let (_, diagnostics) = body("plugins: [{type: mm-embeddings-cache-producer, parameters: {cacheSize: 0}}]");
    assert_eq!(diagnostics[0].code, Code::OutOfRange);
}

#[test]
fn endpoints_file_is_the_one_that_discovery_names() {
    let alone = |text: &str| full(text, Overrides::default());
    let text = include_str!("../../../../tests/data/endpoint_picker/file-discovery-v1.yaml");
    let (settings, warnings) = alone(text).unwrap_or_else(|d| panic!("{}", show(text, &d)));
    let file = settings.pools[0].file.as_ref().unwrap();
    assert_eq!((file.path.to_str(), file.watch, file.engine), (Some("/etc/epp/endpoints.yaml"), true, Engine::Sglang));
    assert_eq!(warnings, [], "no flag has to name an endpoint");
    let engine = KubernetesFlags { engine: Some(Engine::Vllm), ..KubernetesFlags::default() };
    let (settings, warnings) = full(text, Overrides { kubernetes: engine, ..Overrides::default() }).unwrap();
    assert_eq!(
        (settings.pools[0].file.as_ref().unwrap().engine, warnings),
        (Engine::Vllm, vec![]),
        "a flag outranks it"
    );
    let text = include_str!("../../../../tests/data/endpoint_picker/file-discovery-old.yaml");
    assert!(!alone(text).unwrap().0.pools[0].file.as_ref().unwrap().watch, "llm-d's default");
    let text = include_str!("../../../../tests/data/endpoint_picker/guide-hub-load.yaml");
    assert_eq!(alone(text).unwrap().0.pools[0].file.as_ref().unwrap().engine, Engine::None, "a cluster's gateway");
    let unnamed = format!("{HEAD}plugins: [{{type: file-discovery, parameters: {{path: /e}}}}]\n");
    let (settings, warnings) = full(&unnamed, one_endpoint()).unwrap();
    assert!(settings.pools[0].file.is_none() && warnings[0].message.contains("discovery"), "{warnings:?}");
    for (parameters, code) in [("{}", Code::MissingKey), ("{path: /e, watch: true}", Code::UnknownKey)] {
        let (_, diagnostics) = body(&format!(
            "plugins: [{{type: file-discovery, parameters: {parameters}}}]\ndataLayer: {{discovery: {{endpoints: {{pluginRef: file-discovery}}}}}}"
        ));
        assert_eq!(diagnostics[0].code, code, "{parameters}");
    }
}
