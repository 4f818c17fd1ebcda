//! What a file becomes, the files that llm-d ships, and what becomes of each plugin. Beside this file: the cases of the
//! loaders of GIE and llm-d, damaged files.

use super::catalogue::{self, CATALOGUE, IMPLICIT, PluginHandling};
use crate::schema::{File, Pool, TokenizerKind};
use crate::settings::{TokenizerSettings, UsageCount};
use crate::{ConfigText, KubernetesFlags, Overrides, Settings, Sources, load, registry};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{Code, Diagnostic, render_text};
use attache_config_schema::document;
use attache_disagg::Mode;
use attache_pool::Engine;
use attache_scheduling::Decider;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

mod flow;
mod hostile;
mod inert;
mod shipped;
mod upstream;

const HEAD: &str = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n";

/// The file alone, before it is merged with flags and defaults.
fn read(text: &str) -> (Option<File>, Vec<Diagnostic>) {
    let mut sink = Sink::default();
    let file = match document::parse(text.as_bytes(), &mut sink.diagnostics) {
        Ok(root) => File::read(&root, &registry(), &mut sink),
        Err(diagnostic) => {
            sink.push(diagnostic);
            None
        }
    };
    (file, sink.diagnostics)
}

fn body(text: &str) -> (Option<File>, Vec<Diagnostic>) {
    read(&format!("{HEAD}{text}"))
}

fn show(text: &str, diagnostics: &[Diagnostic]) -> String {
    render_text(diagnostics, Some(("f", text)), false)
}

fn pool(file: Option<File>) -> Pool {
    file.unwrap().pools.unwrap().value.remove(0).value
}

/// The parameters of the pipeline that a file without mistakes describes; `null` for its default.
fn pipeline(text: &str) -> Value {
    let (file, diagnostics) = body(text);
    assert!(!diagnostics.iter().any(Diagnostic::is_error), "{}", show(text, &diagnostics));
    let strategy = pool(file).strategy.unwrap().value;
    assert_eq!(strategy.name.value, "pipeline");
    strategy.parameters.map_or(Value::Null, |at| at.value)
}

/// Whether this version has what a plugin type stands for.
fn held(kind: &str) -> bool {
    match catalogue::entry(kind).map(|e| (e.name, e.fate)) {
        Some((name, PluginHandling::Part | PluginHandling::PartAnd(_))) => registry().plugin(name).is_some(),
        Some((_, PluginHandling::Absent(_))) => false,
        Some(_) => true,
        None => registry().plugin(kind).is_some(),
    }
}

fn full(text: &str, flags: Overrides) -> Result<(Settings, Vec<Diagnostic>), Vec<Diagnostic>> {
    let text = ConfigText { name: "f".into(), bytes: text.as_bytes().to_vec() };
    load(&Sources { registry: registry(), text: Some(text), overrides: flags, ..Sources::default() })
}

fn one_endpoint() -> Overrides {
    Overrides { endpoints: vec!["10.0.0.1:8000".into()], ..Overrides::default() }
}

#[test]
fn pipeline_follows_the_rules_for_omitted_parts() {
    let plugin = |kind: &str| json!({"name": kind, "type": kind, "parameters": null});
    assert_eq!(pipeline(""), Value::Null, "nothing at all: the pipeline's own default");
    assert_eq!(pipeline("plugins: [{type: approx-prefix-cache-producer}]"), Value::Null, "no part of the pipeline");
    let default = pipeline(
        "plugins: [{type: queue-scorer}, {type: openai-parser}, {name: kv, type: kv-cache-utilization-scorer}]",
    );
    let kv = json!({"name": "kv", "type": "kv-cache-utilization-scorer", "parameters": null});
    let entries = json!([{"pluginRef": "queue-scorer"}, {"pluginRef": "kv"}]);
    let want = json!({"plugins": [plugin("queue-scorer"), kv], "profiles": [{"name": "default", "plugins": entries}]});
    assert_eq!(default, want, "without profiles, all parts in the order of the file");
    let drift = pipeline(
        "plugins: [{type: queue-scorer}, {type: prefix-cache-scorer, parameters: {blockSize: 256, matchLengthWeight: 0.5}}]\n\
         schedulingProfiles: [{name: a, plugins: [{pluginRef: prefix-cache-scorer, weight: 3}]}]",
    );
    let prefix =
        json!({"name": "prefix-cache-scorer", "type": "prefix-cache-scorer", "parameters": {"matchLengthWeight": 0.5}});
    let entries = json!([{"pluginRef": "prefix-cache-scorer", "weight": 3.0}]);
    let want = json!({"plugins": [prefix], "profiles": [{"name": "a", "plugins": entries}]});
    assert_eq!(drift, want, "parameters that are settings are taken away, and what no profile names is left out");
    let picker = pipeline(
        "plugins: [{type: queue-scorer}, {type: random-picker}]\n\
         schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]",
    );
    let entries = json!([{"pluginRef": "queue-scorer"}, {"pluginRef": "random-picker"}]);
    let want = json!({"plugins": [plugin("queue-scorer"), plugin("random-picker")], "profiles": [{"name": "a", "plugins": entries}]});
    assert_eq!(picker, want, "a profile without a picker gets one that is declared");
}

#[test]
fn three_filters_keep_the_order_of_the_file() {
    let read = pipeline(
        "plugins: [{name: c, type: decode-filter}, {name: a, type: decode-filter}, {name: b, type: decode-filter}]\n\
         schedulingProfiles: [{name: p, plugins: [{pluginRef: b}, {pluginRef: c}, {pluginRef: a}]}]",
    );
    let order: Vec<&str> =
        read["profiles"][0]["plugins"].as_array().unwrap().iter().filter_map(|p| p["pluginRef"].as_str()).collect();
    assert_eq!(order, ["b", "c", "a"]);
}

#[test]
fn producers_and_sources_become_settings() {
    let text = "plugins:
- {type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 32}}
- {type: token-producer, parameters: {vllm: {url: 'https://render:8000', timeout: 2s}}}
- type: precise-prefix-cache-producer
  parameters: {kvEventsConfig: {topicFilter: 'kv@', podDiscoveryConfig: {socketPort: 5556, replaySocketPort: 5560}}}
- {type: metrics-data-source, parameters: {scheme: https, path: /stats, port: 9100, interval: 100ms}}
- {type: core-metrics-extractor, parameters: {defaultEngine: sglang}}
- type: request-attribute-reporter
  parameters: {attributes: [{key: {namespace: ns, name: k}, expression: usage.prompt_tokens + usage.completion_tokens}]}
";
    let (file, diagnostics) = body(text);
    assert_eq!(diagnostics, [], "{}", show(text, &diagnostics));
    let file = file.unwrap();
    let usage = file.exchange.report_usage.as_ref().unwrap();
    assert_eq!(
        (usage.value.namespace.as_ref().unwrap().value.as_str(), usage.value.count.unwrap().value),
        ("ns", UsageCount::Total)
    );
    let pool = pool(Some(file));
    let prefix = pool.prefix_cache.unwrap().value;
    assert_eq!(prefix.block_size.unwrap().value, 32);
    let tokenizer = prefix.tokenizer.unwrap().value;
    assert_eq!(
        (tokenizer.kind.value, tokenizer.url.unwrap().value.as_str()),
        (TokenizerKind::Remote, "https://render:8000")
    );
    assert_eq!((tokenizer.render.unwrap().value, tokenizer.timeout.unwrap().value), (true, Duration::from_secs(2)));
    let events = prefix.kv_events.unwrap().value;
    assert_eq!((events.port.unwrap().value, events.replay_port.unwrap().value, events.bind), (5556, 5560, None));
    assert_eq!(events.topic.unwrap().value, "kv@");
    let like = pool.from_flags.unwrap();
    assert_eq!((like.engine.unwrap().value, like.metrics.port.unwrap().value), (Engine::Sglang, 9100));
    assert!(pool.scrape.insecure_skip_verify.unwrap().value, "upstream looks at no certificate unless told to");
}

#[test]
fn token_source_follows_the_producer() {
    let cases: &[(&str, Option<&str>)] = &[
        ("{}", None),
        ("{estimate: {}}", None),
        ("{backend: estimate, modelName: m}", None),
        ("{udsTokenizerConfig: {socketFile: /tmp/s}}", None),
        ("{modelName: m}", Some("http://localhost:8000")),
        ("{backend: vllm}", Some("http://localhost:8000")),
        ("{modelName: m, vllm: {url: 'http://a:1'}}", Some("http://a:1")),
        ("{modelName: m, vllmHTTPRenderConfig: {url: 'http://b:1'}}", Some("http://b:1")),
    ];
    for (parameters, want) in cases {
        let (file, _) = body(&format!("plugins: [{{type: token-producer, parameters: {parameters}}}]"));
        let tokenizer = pool(file).prefix_cache.unwrap().value.tokenizer;
        assert_eq!(tokenizer.and_then(|t| t.value.url).map(|u| u.value).as_deref(), *want, "{parameters}");
    }
}

#[test]
fn kv_event_source_follows_the_producer() {
    /// The servers' port, or the socket that is bound.
    type Events = (Option<u16>, Option<&'static str>);
    let cases: &[(&str, Events)] = &[
        ("{}", (None, None)),
        ("{kvEventsConfig: {discoverPods: true}}", (None, None)),
        ("{kvEventsConfig: {zmqEndpoint: 'tcp://*:5557'}}", (None, Some("tcp://0.0.0.0:5557"))),
        (
            "{kvEventsConfig: {zmqEndpoint: 'tcp://0.0.0.0:5557', discoverPods: false}}",
            (None, Some("tcp://0.0.0.0:5557")),
        ),
        ("{kvEventsConfig: {zmqEndpoint: 'tcp://*:5557', podDiscoveryConfig: {socketPort: 5559}}}", (Some(5559), None)),
    ];
    for kind in ["precise-prefix-cache-producer", "precise-prefix-cache-scorer"] {
        for (parameters, want) in cases {
            let (file, diagnostics) = body(&format!(
                "plugins: [{{type: token-producer, parameters: {{vllm: {{}}}}}}, {{type: {kind}, parameters: {parameters}}}]"
            ));
            let events = pool(file).prefix_cache.unwrap().value.kv_events.unwrap().value;
            let got = (events.port.map(|at| at.value), events.bind.as_ref().map(|at| at.value.as_str()));
            assert_eq!(got, *want, "{kind} {parameters}: {diagnostics:?}");
        }
    }
    let (file, diagnostics) = body("plugins: [{type: precise-prefix-cache-producer}]");
    assert!(pool(file).prefix_cache.unwrap().value.kv_events.is_none());
    assert!(diagnostics[0].help.as_ref().unwrap().contains("token-producer"), "without tokens, events say nothing");
}

/// Nothing is dropped in silence: every parameter of these that changes nothing here is named by a warning.
#[test]
fn settings_without_effect_are_warned_of() {
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "approx-prefix-cache-producer",
            "{autoTune: true, blockSizeTokens: 16, blockSize: 64, maxPrefixBlocksToMatch: 256, maxPrefixTokensToMatch: 0, lruCapacityPerServer: 31250}",
            &["autoTune", "lruCapacityPerServer", "maxPrefixBlocksToMatch", "maxPrefixTokensToMatch", "blockSize"],
        ),
        (
            "inflight-load-producer",
            "{addEstimatedOutputTokens: true, outputRatio: 2}",
            &["addEstimatedOutputTokens", "outputRatio"],
        ),
        ("predicted-latency-producer", "{samplingMean: 1000, contextTTL: 5m}", &["contextTTL", "samplingMean"]),
        ("session-id-producer", "{cookieName: c}", &["cookieName"]),
        ("token-producer", "{modelName: m, vllm: {mmTimeout: 30s}}", &["mmTimeout", "modelName"]),
        (
            "metrics-data-source",
            "{caCertPath: /c, clientCertPath: /c, clientKeyPath: /k}",
            &["caCertPath", "clientCertPath", "clientKeyPath"],
        ),
        (
            "core-metrics-extractor",
            "{engineLabelKey: l, engineConfigs: [{name: x}]}",
            &["engineLabelKey", "engineConfigs"],
        ),
        ("agent-identity", "{additionalSessionHeaders: [a]}", &["agent-identity"]),
        (
            "disagg-profile-handler",
            "{threshold: 1, primaryPort: 8000, prefixPluginName: p}",
            &["prefixPluginName", "primaryPort", "threshold"],
        ),
        ("dcgm-data-source", "{port: 9400}", &["dcgm-data-source"]),
        (
            "burst-prefix-cache-producer",
            "{windowDurationMs: 100, maxPerReplica: -1, minColocateBlocks: 0}",
            &["windowDurationMs", "maxPerReplica", "minColocateBlocks"],
        ),
        ("mm-embeddings-cache-producer", "{cacheSizeInEmbeddingsPerServer: 8192}", &["cacheSizeInEmbeddingsPerServer"]),
        ("prefix-cache-affinity-filter", "{prefillCalibrationFile: /c}", &["prefillCalibrationFile"]),
        ("latency-scorer", "{samplingMean: 1000}", &["samplingMean"]),
        (
            "prefix-based-pd-decider",
            "{nonCachedTokens: 16, prefixPluginName: p, prefixPluginType: t}",
            &["prefixPluginType", "prefixPluginName", "prefix-based-pd-decider"],
        ),
        ("always-disagg-pd-decider", "", &["always-disagg-pd-decider"]),
        ("disagg-headers-handler", "{prefillProfile: p, encodeProfile: e}", &["prefillProfile", "encodeProfile"]),
        ("disaggregatedset-rollout-screener", "", &["disaggregatedset-rollout-screener"]),
        (
            "request-attribute-reporter",
            "{attributes: [{key: {namespace: n, name: k}, expression: size(usage), condition: 'true'}]}",
            &["condition", "expression"],
        ),
    ];
    for (kind, parameters, want) in cases {
        let (_, diagnostics) = body(&format!("plugins: [{{type: {kind}, parameters: {parameters}}}]"));
        let got: Vec<&str> = diagnostics.iter().map(|d| d.message.split('`').nth(1).unwrap()).collect();
        assert_eq!(got, *want, "{diagnostics:?}");
        assert!(diagnostics.iter().all(|d| d.code == Code::NoEffect && d.span.is_some()), "{diagnostics:?}");
    }
    let profile = |entry: &str| {
        body(&format!("plugins: [{{type: queue-scorer}}, {{type: openai-parser}}, {{type: prefix-cache-scorer}}]\nschedulingProfiles: [{{name: a, plugins: [{entry}]}}]")).1
    };
    let said = show("", &profile("{pluginRef: queue-scorer}, {pluginRef: openai-parser}"));
    assert!(said.contains("neither filters") && said.contains("no profile names it"), "{said}");
}

#[test]
fn catalogue_is_consistent() {
    let mut names = BTreeSet::new();
    for entry in CATALOGUE {
        for name in [entry.name].iter().chain(entry.aliases) {
            assert!(names.insert(*name), "{name} twice");
        }
        let part = matches!(entry.fate, PluginHandling::Part | PluginHandling::PartAnd(_));
        let policy = super::plugins::policy_error(entry.name, &json!({"noSuchParameter": 1})).is_some();
        assert_eq!(policy, matches!(entry.fate, PluginHandling::Policy), "{}", entry.name);
        assert!(part || registry().plugin(entry.name).is_none(), "{} is a part of the pipeline by now", entry.name);
    }
    let lacking = CATALOGUE
        .iter()
        .filter(|e| matches!(e.fate, PluginHandling::Part | PluginHandling::PartAnd(_)) && !held(e.name));
    assert_eq!(lacking.map(|e| e.name).collect::<Vec<_>>(), Vec::<&str>::new());
    for name in IMPLICIT {
        assert!(!catalogue::entry(name).unwrap().slots.is_empty(), "{name}");
    }
}

#[test]
fn endpoints_come_from_flags() {
    let text = format!(
        "{HEAD}plugins: [{{type: metrics-data-source, parameters: {{path: /stats}}}}, {{type: core-metrics-extractor, parameters: {{defaultEngine: sglang}}}}]\n"
    );
    let (settings, diagnostics) = full(&text, one_endpoint()).unwrap();
    assert_eq!(diagnostics, []);
    let pool = &settings.pools[0];
    assert_eq!(
        (&*pool.name, pool.strategy.as_str(), pool.endpoints[0].engine),
        ("default", "pipeline", Engine::Sglang)
    );
    assert_eq!(pool.endpoints[0].metrics_url().as_deref(), Some("http://10.0.0.1:8000/stats"));
    assert_eq!(pool.prefix.tokenizer, TokenizerSettings::Characters);

    let diagnostics = full(&text, Overrides::default()).unwrap_err();
    assert_eq!(diagnostics.iter().map(|d| d.code).collect::<Vec<_>>(), [Code::NothingToServe]);
    let alone = full(&text, Overrides { endpoints_follow: true, ..Overrides::default() });
    assert_eq!(alone.unwrap().1, [], "a check of the file alone misses no endpoints");

    let (settings, _) = full(&format!("{HEAD}dataLayer: {{injectDefaults: false}}\n"), one_endpoint()).unwrap();
    assert_eq!(settings.pools[0].endpoints[0].metrics_url(), None, "no data source, no metrics");
    let flags = Overrides { strategy: Some("random".into()), ..one_endpoint() };
    assert_eq!(full(&text, flags).unwrap().0.pools[0].strategy, "random", "one flag switches to something else");
}

/// The profiles of prefill and decode, with these plugins declared.
fn staged(plugins: &str) -> String {
    format!(
        "plugins:\n{plugins}- {{type: prefill-filter}}\n- {{type: decode-filter}}\nschedulingProfiles:\n\
         - {{name: prefill, plugins: [{{pluginRef: prefill-filter}}]}}\n- {{name: decode, plugins: [{{pluginRef: decode-filter}}]}}\n"
    )
}

#[test]
fn deciders_join_pipeline_with_their_handler() {
    let text = staged(
        "- {type: disagg-profile-handler, parameters: {deciders: {prefill: mine}}}\n\
         - {name: mine, type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}\n- {type: disagg-headers-handler}\n",
    );
    let (_, diagnostics) = body(&text);
    assert_eq!(diagnostics, [], "{}", show(&text, &diagnostics));
    let parameters = pipeline(&text);
    let declared = parameters["plugins"].as_array().unwrap();
    let types: Vec<&str> = declared.iter().map(|p| p["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["disagg-profile-handler", "prefix-based-pd-decider", "prefill-filter", "decode-filter"]);
    assert_eq!(declared[1]["parameters"], json!({"nonCachedTokens": 16}));
    let old =
        staged("- {type: pd-profile-handler}\n- {type: prefix-based-pd-decider}\n- {type: prefill-header-handler}\n");
    let (_, diagnostics) = body(&old);
    assert_eq!(diagnostics, [], "{}", show(&old, &diagnostics));
    assert_eq!(pipeline(&old)["plugins"].as_array().unwrap().len(), 4);
}

#[test]
fn stage_that_can_not_run_is_reported() {
    let handler = |parameters: &str| format!("- {{type: disagg-profile-handler, parameters: {parameters}}}\n");
    let always = "- {type: always-disagg-pd-decider}\n";
    for (case, plugins, code, says) in [
        ("no decider", handler("{deciders: {prefill: mine}}"), Code::UndefinedReference, "`mine`"),
        ("none of a decider's type", handler("{deciders: {prefill: decode-filter}}"), Code::WrongPlugin, "no decider"),
        ("nobody asks", handler("{}") + always, Code::NoEffect, "no profile handler asks it"),
        (
            "no such profile",
            handler("{profiles: {prefill: p}, deciders: {prefill: always-disagg-pd-decider}}") + always,
            Code::NoEffect,
            "no profile is called so",
        ),
    ] {
        let text = staged(&plugins);
        let (_, diagnostics) = body(&text);
        let [said] = diagnostics.as_slice() else { panic!("{case}: {}", show(&text, &diagnostics)) };
        assert!(said.code == code && said.message.contains(says) && said.span.is_some(), "{case}: {said:?}");
    }
    let listed = "plugins: [{type: always-disagg-pd-decider}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: always-disagg-pd-decider}]}]\n";
    assert!(show("", &body(listed).1).contains("neither filters"));
}

#[test]
fn prefill_or_encode_profile_means_sidecars() {
    let shipped = [
        ("pd-epp", include_str!("../../../tests/data/endpoint_picker/pd-epp.yaml"), true),
        ("sim-pd", include_str!("../../../tests/data/endpoint_picker/sim-pd.yaml"), true),
        ("sim-e-p-d", include_str!("../../../tests/data/endpoint_picker/sim-e-p-d.yaml"), true),
        ("sim-e-pd", include_str!("../../../tests/data/endpoint_picker/sim-e-pd.yaml"), true),
        (
            "pd-topology: no handler asks its decider",
            include_str!("../../../tests/data/endpoint_picker/pd-topology.yaml"),
            false,
        ),
        ("epp-config", include_str!("../../../tests/data/endpoint_picker/epp-config.yaml"), false),
    ];
    for (case, text, splits) in shipped {
        let (settings, _) = full(text, one_endpoint()).unwrap_or_else(|d| panic!("{case}: {}", show(text, &d)));
        let said = settings.pools[0].disaggregation.as_ref();
        assert_eq!(said.is_some(), splits, "{case}");
        assert!(said.is_none_or(|d| matches!(d.mode, Mode::Header { .. })), "{case}");
    }
}

#[test]
fn settings_for_sharing_state_and_sessions_are_named_with_what_is_done_instead() {
    let plugins = "plugins:\n- type: queue-scorer\n- {name: s, type: SYNCER, parameters: {address: 'redis:6379', stateTTL: 2s}}\n";
    for (syncer, layer, wanted) in [
        ("local-syncer", "{crossReplicaSyncerPluginRef: s, crossReplicaSyncInterval: 100ms}", 2),
        ("local-syncer", "{crossReplicaSyncerPluginRef: s, crossReplicaPublishTimeout: 1s}", 2),
        ("local-syncer", "{crossReplica: {syncerPluginRef: s, syncInterval: 100ms, publishTimeout: 50ms}}", 3),
        ("redis-syncer", "{crossReplica: {syncerPluginRef: s}}", 1),
        ("redis-state-store", "{crossReplica: {}}", 1),
    ] {
        let text = format!("{}dataLayer: {layer}\n", plugins.replace("SYNCER", syncer));
        let (_, told) = body(&text);
        assert_eq!(told.len(), wanted, "{}", show(&text, &told));
        let names_sync = |d: &Diagnostic| d.code == Code::NoEffect && d.message.contains("sync.nats.servers");
        assert!(told.iter().all(names_sync), "{}", show(&text, &told));
    }
    for (layer, code, says) in [
        ("{crossReplica: {syncerPluginRef: nobody}}", Code::UndefinedReference, "nobody"),
        ("{crossReplica: {syncerPluginRef: queue-scorer}}", Code::WrongPlugin, "no cross-replica syncer"),
        ("{crossReplica: {interval: 1s}}", Code::UnknownKey, "unknown field `interval`"),
        ("{crossReplicas: {}}", Code::UnknownKey, "did you mean `crossReplica`?"),
    ] {
        let text = format!("plugins: [{{type: queue-scorer}}]\ndataLayer: {layer}\n");
        let (_, told) = body(&text);
        let shown = show(&text, &told);
        assert!(told.iter().any(|d| d.code == code) && shown.contains(says), "{shown}");
    }
    let (_, told) = body("plugins: [{type: inflight-load-producer, parameters: {syncCrossReplicaState: false}}]");
    assert_eq!(told.iter().map(|d| d.code).collect::<Vec<_>>(), [Code::NoEffect]);
    for (kind, instead) in [
        ("reserve-endpoint", "`POST /reservations` of the admin port"),
        ("kv-cache-hint-v2", "their own rule decides"),
        ("kv-cache-retention", "their own rule decides"),
        ("session-interturn-latency-producer", "their own rule decides"),
        ("session-state-producer", "`session-affinity-filter`"),
        ("session-manager", "`session-affinity-filter`"),
        ("disaggregatedset-rollout-pod-extractor", "disaggregation.together"),
    ] {
        // Also where a profile lists it.
        let text = format!(
            "plugins:\n- type: queue-scorer\n- {{name: p, type: {kind}, parameters: {{any: [1, 2]}}}}\n\
             schedulingProfiles: [{{name: d, plugins: [{{pluginRef: queue-scorer}}, {{pluginRef: p}}]}}]\n"
        );
        let (file, told) = body(&text);
        let shown = show(&text, &told);
        assert!(file.is_some() && matches!(&told[..], [one] if one.code == Code::NoEffect), "{shown}");
        assert!(told[0].message.contains(kind) && told[0].message.contains(instead), "{shown}");
    }
}

#[test]
fn p2p_source_producer_names_endpoint_with_longer_prefix() {
    let read = |text: &str| full(&format!("{HEAD}{text}"), one_endpoint());
    let of = |text: &str| {
        let (settings, warnings) = read(text).unwrap_or_else(|d| panic!("{}", show(text, &d)));
        assert!(warnings.iter().all(|d| d.code == Code::NoEffect && d.span.is_some()), "{warnings:?}");
        let said = settings.pools[0].disaggregation.clone().unwrap();
        let Mode::Header { source_tokens } = said.mode else { panic!("{said:?}") };
        (source_tokens, said.split.decider, warnings.len())
    };
    assert_eq!(of("plugins: [{type: p2p-source-producer}]"), (Some(1), Decider::Never, 0), "llm-d's default");
    let given = "{minCachedTokenDelta: 2048, prefixMatchInfoProducerName: p, prefillProfileName: q}";
    let text = format!("plugins: [{{type: p2p-source-producer, parameters: {given}}}]");
    assert_eq!(of(&text), (Some(2048), Decider::Never, 2), "the names change nothing");
    let split = staged(
        "- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}\n\
         - {type: always-disagg-pd-decider}\n- {type: p2p-source-producer, parameters: {minCachedTokenDelta: 64}}\n",
    );
    assert_eq!(of(&split), (Some(64), Decider::Predicted, 0), "the handler says what is split");
    for (parameters, code, says) in [
        ("{minCachedTokenDelta: 0}", Code::OutOfRange, "1 or more"),
        ("{minCachedTokenDelta: -1}", Code::OutOfRange, "-1"),
        ("{minCachedTokens: 1}", Code::UnknownKey, "minCachedTokenDelta"),
    ] {
        let text = format!("plugins: [{{type: p2p-source-producer, parameters: {parameters}}}]");
        let errors = read(&text).unwrap_err();
        let shown = show(&text, &errors);
        assert!(errors.len() == 1 && errors[0].code == code && shown.contains(says), "{shown}");
    }
}

#[test]
fn rank_header_handler_chooses_ranks_with_and_without_kv_events() {
    let producers = |ranks: &str| {
        format!(
            "{HEAD}plugins:\n- {{type: dp-rank-header-handler}}\n- {{type: token-producer, parameters: {{vllm: {{url: 'http://a:1'}}}}}}\n\
             - type: precise-prefix-cache-producer\n  parameters: {{kvEventsConfig: {{discoverPods: true, podDiscoveryConfig: {{socketPort: 5557{ranks}}}}}}}\n"
        )
    };
    let events = |text: &str| {
        let (settings, warnings) = full(text, one_endpoint()).unwrap_or_else(|d| panic!("{}", show(text, &d)));
        let prefix = &settings.pools[0].prefix;
        assert!(prefix.choose_rank);
        (prefix.kv_events.as_ref().map(|e| e.ranks), warnings)
    };
    assert_eq!(events(&producers(", dataParallelSize: 8")), (Some(8), vec![]));
    // Then ranks are told apart by pages alone.
    assert_eq!(events(&producers("")), (Some(1), vec![]));
    assert_eq!(events(&format!("{HEAD}plugins: [{{type: dp-rank-header-handler}}]")), (None, vec![]));
    let errors = full(&producers(", dataParallelSize: 0"), one_endpoint()).unwrap_err();
    let errors: Vec<Code> = errors.iter().filter(|d| d.is_error()).map(|d| d.code).collect();
    assert_eq!(errors, [Code::OutOfRange]);
}

#[test]
fn flag_that_overrides_the_file_is_warned_of() {
    let text = format!(
        "{HEAD}plugins: [{{type: metrics-data-source, parameters: {{path: /stats, port: 9100}}}}, {{type: core-metrics-extractor, parameters: {{defaultEngine: sglang}}}}]\n"
    );
    let told = |engine, path: &str| {
        let kubernetes = KubernetesFlags {
            pool_name: Some("vllm".into()),
            engine: Some(engine),
            metrics_scheme: Some("http".into()),
            metrics_path: Some(path.into()),
            metrics_port: Some(0),
            ..KubernetesFlags::default()
        };
        let (_, diagnostics) = full(&text, Overrides { kubernetes, ..Overrides::default() }).unwrap();
        assert!(diagnostics.iter().all(|d| d.code == Code::Overridden && d.span.is_some()), "{diagnostics:?}");
        diagnostics.into_iter().map(|d| d.path).collect::<Vec<_>>()
    };
    assert_eq!(told(Engine::Vllm, "/metrics"), ["--model-server-metrics-path", "--engine"]);
    assert_eq!(told(Engine::Sglang, "/stats"), Vec::<String>::new(), "they say the same");
}
