//! The cases of the loaders of GIE and llm-d: what they accept and what they refuse.

use super::*;

/// The reference's cases that the loaders accept, each with the codes of the warnings that it gets here.
#[test]
fn files_accepted_upstream_are_accepted() {
    let cases: &[(&str, &str, &[Code])] = &[
        ("4.3 empty", "", &[]),
        ("4.3 plugins without profiles", "plugins: [{type: queue-scorer}]", &[]),
        (
            "4.3 scorer without weight",
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]",
            &[],
        ),
        (
            "4.3 handler omitted with one profile",
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: p, plugins: [{pluginRef: queue-scorer, weight: 2}]}]",
            &[],
        ),
        (
            "4.3 picker by its type, declared by nobody",
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: p, plugins: [{pluginRef: max-score-picker}, {pluginRef: queue-scorer}]}]",
            &[],
        ),
        (
            "4.3 flowControl with the gate",
            "featureGates: [flowControl]\nflowControl: {maxBytes: '1024', defaultRequestTTL: 1m}",
            &[],
        ),
        (
            "4.3 flowControl without the gate",
            "flowControl: {maxBytes: 4Gi, usageLimitPolicyPluginRef: nobody}",
            &[Code::NoEffect],
        ),
        (
            "4.3 band 100 with named policies",
            "featureGates: [flowControl]\nplugins: [{name: f, type: round-robin-fairness-policy}, {name: o, type: edf-ordering-policy}]\n\
             flowControl: {priorityBands: [{priority: 100, maxBytes: 1Gi, fairnessPolicyRef: f, orderingPolicyRef: o}]}",
            &[],
        ),
        ("4.3 parser by type", "plugins: [{type: openai-parser}]\nparser: {pluginRef: openai-parser}", &[]),
        ("4.3 parser by name", "plugins: [{name: p, type: vllmgrpc-parser}]\nparser: {pluginRef: p}", &[]),
        (
            "parser that makes itself",
            "requestHandler: {parsers: [{pluginRef: anthropic-parser}, {pluginRef: openai-parser}]}",
            &[],
        ),
        ("4.3 no feature gates", "featureGates: []", &[]),
        ("4.3 enableLegacyMetrics", "featureGates: [enableLegacyMetrics]", &[]),
        ("gate switched off", "featureGates: ['flowControl=false', dataLayer=true]", &[]),
        ("gate switched on, without a section", "featureGates: ['flowControl=true']", &[]),
        ("4.3 dataLayer empty", "dataLayer: {}", &[]),
        (
            "4.3 explicit source and extractor",
            "plugins: [{name: s, type: metrics-data-source}, {name: e, type: core-metrics-extractor}]\n\
             dataLayer: {sources: [{pluginRef: s, extractors: [{pluginRef: e}]}]}",
            &[],
        ),
        ("saturation detector that makes itself", "saturationDetector: {pluginRef: utilization-detector}", &[]),
        ("drift: data for dataLayer", "data: {sources: [{pluginRef: metrics-data-source}]}", &[]),
        (
            "drift: thresholds inline",
            "saturationDetector: {queueDepthThreshold: 5, kvCacheUtilThreshold: 0.8, metricsStalenessThreshold: 200ms}",
            &[],
        ),
        (
            "drift: maxBytes a number",
            "featureGates: [flowControl]\nflowControl: {maxBytes: 1024, maxRequests: 1e3}",
            &[],
        ),
        ("drift: extractor renamed", "plugins: [{type: model-server-protocol-metrics}]", &[]),
        ("drift: producer renamed", "plugins: [{type: tokenizer, parameters: {estimate: {}}}]", &[Code::NoEffect]),
        (
            "drift: scorer's own block of 64 characters",
            "plugins: [{type: prefix-cache-scorer, parameters: {hashBlockSize: 64, lruCapacityPerServer: 31250}}]",
            &[Code::NoEffect],
        ),
        (
            "scorer fed by the producer that makes itself",
            "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: approx-prefix-cache-producer}}]",
            &[],
        ),
    ];
    for (name, text, warnings) in cases {
        let (file, diagnostics) = body(text);
        assert!(!diagnostics.iter().any(Diagnostic::is_error), "{name}: {}", show(text, &diagnostics));
        assert!(file.is_some(), "{name}");
        let got: Vec<Code> = diagnostics.iter().map(|d| d.code).collect();
        assert_eq!(got, *warnings, "{name}: {}", show(text, &diagnostics));
        let loaded =
            full(&format!("{HEAD}{text}"), one_endpoint()).unwrap_or_else(|d| panic!("{name}: {}", show(text, &d)));
        assert_eq!(loaded.1.len(), warnings.len(), "{name}: {}", show(text, &loaded.1));
    }
    for version in ["inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1alpha1", "config.x-k8s.io/v1alpha1"] {
        let (file, diagnostics) = read(&format!("apiVersion: {version}\nkind: EndpointPickerConfig\n"));
        assert!(file.is_some() && diagnostics.is_empty(), "{version}: {diagnostics:?}");
    }
}

/// The reference's cases that the loaders refuse, each with its code and a word of the message or of the help.
#[test]
fn files_rejected_upstream_are_rejected() {
    let two = "plugins: [{type: queue-scorer}, {type: HANDLER}]\n\
               schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}, {name: b, plugins: [{pluginRef: queue-scorer}]}]";
    let handlers = "plugins: [{type: single-profile-handler}, {type: header-profile-handler}]";
    let pickers = "plugins: [{type: max-score-picker}, {type: random-picker}]\n\
                   schedulingProfiles: [{name: a, plugins: [{pluginRef: max-score-picker}, {pluginRef: random-picker}]}]";
    let single = two.replace("HANDLER", "single-profile-handler");
    let none = two.replace(", {type: HANDLER}", "");
    let cases: &[(&str, &str, Code, &str)] = &[
        ("4.3 malformed", "plugins:\n- testing 1 2 3", Code::WrongType, "plugins[0]"),
        ("4.3 plugins no list", "plugins: testing", Code::WrongType, "must be a list"),
        ("4.3 unknown feature gate", "featureGates: [flowControll]", Code::OutOfRange, "did you mean `flowControl`?"),
        ("gate with a value that is none", "featureGates: ['flowControl=perhaps']", Code::OutOfRange, "perhaps"),
        ("4.3 plugin without type", "plugins: [{name: a}]", Code::MissingKey, "`type` is missing"),
        ("4.3 unknown type", "plugins: [{type: queu-scorer}]", Code::UnknownPlugin, "did you mean `queue-scorer`?"),
        ("unknown type like nothing else", "plugins: [{type: zzz}]", Code::UnknownPlugin, "docs/reference/plugins.md"),
        (
            "4.3 bad parameter type",
            "plugins: [{type: approx-prefix-cache-producer, parameters: {blockSizeTokens: asdf}}]",
            Code::WrongType,
            "asdf",
        ),
        (
            "4.3 bad parameter type, older key",
            "plugins: [{type: prefix-cache-scorer, parameters: {blockSize: asdf}}]",
            Code::WrongType,
            "asdf",
        ),
        (
            "parameter of a part",
            "plugins: [{type: prefix-cache-scorer, parameters: {matchLengthWeight: 7}}]",
            Code::BadParameters,
            "matchLengthWeight",
        ),
        (
            "unknown parameter of a part",
            "plugins: [{type: queue-scorer, parameters: {treshold: 7}}]",
            Code::BadParameters,
            "treshold",
        ),
        (
            "unknown parameter of a producer",
            "plugins: [{type: approx-prefix-cache-producer, parameters: {blockSizeToken: 7}}]",
            Code::UnknownKey,
            "did you mean `blockSizeTokens`?",
        ),
        (
            "unknown parameter of a policy",
            "plugins: [{type: static-usage-limit-policy, parameters: {treshold: 1}}]",
            Code::BadParameters,
            "treshold",
        ),
        (
            "block of nothing",
            "plugins: [{type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 0}}]",
            Code::OutOfRange,
            "1 to 4096",
        ),
        (
            "4.3 duplicate plugin name",
            "plugins: [{name: a, type: queue-scorer}, {name: a, type: prefix-cache-scorer}]",
            Code::DuplicateName,
            "two plugins are called `a`",
        ),
        (
            "duplicate by type",
            "plugins: [{type: queue-scorer}, {type: queue-scorer}]",
            Code::DuplicateName,
            "a `name` of its own",
        ),
        (
            "4.3 profile without name",
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{plugins: [{pluginRef: queue-scorer}]}]",
            Code::MissingKey,
            "`name` is missing",
        ),
        (
            "4.3 entry without pluginRef",
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a, plugins: [{weight: 2}]}]",
            Code::MissingKey,
            "`pluginRef` is missing",
        ),
        (
            "4.3 undefined pluginRef",
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorr}]}]",
            Code::UndefinedReference,
            "did you mean `queue-scorer`?",
        ),
        (
            "weight no number",
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer, weight: two}]}]",
            Code::WrongType,
            "two",
        ),
        (
            "weight below nothing",
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer, weight: -1}]}]",
            Code::OutOfRange,
            "0 or more",
        ),
        (
            "4.3 duplicate profile name",
            "plugins: [{type: queue-scorer}, {type: header-profile-handler}]\nschedulingProfiles: [{name: decode, plugins: [{pluginRef: queue-scorer}]}, {name: decode}]",
            Code::DuplicateName,
            "two profiles are called `decode`",
        ),
        ("4.3 two pickers in a profile", pickers, Code::Contradiction, "`random-picker`"),
        ("4.3 two profile handlers", handlers, Code::Contradiction, "`header-profile-handler`"),
        ("4.3 two profiles and no handler", &none, Code::Contradiction, "2 profiles and no profile handler"),
        ("4.3 two profiles with single-profile-handler", &single, Code::Contradiction, "it works with one profile"),
        (
            "4.3 source ref to a non-source",
            "plugins: [{type: queue-scorer}]\ndataLayer: {sources: [{pluginRef: queue-scorer}]}",
            Code::WrongPlugin,
            "no data source",
        ),
        (
            "4.3 extractor ref undefined",
            "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: e}]}]}",
            Code::UndefinedReference,
            "`e`",
        ),
        (
            "4.3 extractor ref to a source",
            "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: metrics-data-source}]}]}",
            Code::WrongPlugin,
            "no extractor",
        ),
        (
            "4.3 flow-control policy undefined",
            "featureGates: [flowControl]\nflowControl: {defaultPriorityBand: {fairnessPolicyRef: f}}",
            Code::UndefinedReference,
            "`f`",
        ),
        (
            "4.3 policy ref of the wrong kind",
            "featureGates: [flowControl]\nflowControl: {priorityBands: [{priority: 1, orderingPolicyRef: global-strict-fairness-policy}]}",
            Code::WrongPlugin,
            "no ordering policy",
        ),
        (
            "usage limit ref of the wrong kind",
            "featureGates: [flowControl]\nflowControl: {usageLimitPolicyPluginRef: fcfs-ordering-policy}",
            Code::WrongPlugin,
            "no usage limit policy",
        ),
        (
            "4.3 parser ref of the wrong kind",
            "plugins: [{type: queue-scorer}]\nparser: {pluginRef: queue-scorer}",
            Code::WrongPlugin,
            "no parser",
        ),
        ("4.3 parser ref undefined", "parser: {pluginRef: nobody}", Code::UndefinedReference, "`nobody`"),
        (
            "4.3 saturationDetector ref undefined",
            "saturationDetector: {pluginRef: nobody}",
            Code::UndefinedReference,
            "`nobody`",
        ),
        (
            "saturationDetector ref of the wrong kind",
            "plugins: [{type: queue-scorer}]\nsaturationDetector: {pluginRef: queue-scorer}",
            Code::WrongPlugin,
            "no saturation detector",
        ),
        ("unknown section", "schedulingProfile: []", Code::UnknownKey, "did you mean `schedulingProfiles`?"),
        (
            "unknown key of a band",
            "flowControl: {defaultPriorityBand: {maxByte: 1}}",
            Code::UnknownKey,
            "did you mean `maxBytes`?",
        ),
        (
            "band without a priority",
            "flowControl: {priorityBands: [{maxBytes: 1}]}",
            Code::MissingKey,
            "`priority` is missing",
        ),
        ("bytes that are none", "flowControl: {maxBytes: 4Q}", Code::WrongType, "a quantity"),
        (
            "scorer fed by nobody",
            "plugins: [{name: mine, type: approx-prefix-cache-producer}, {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: mime}}]",
            Code::UndefinedReference,
            "did you mean `mine`?",
        ),
        (
            "renderer's address",
            "plugins: [{type: token-producer, parameters: {vllm: {url: '${RENDER}'}}}]",
            Code::OutOfRange,
            "http or https URL",
        ),
        (
            "socket that can't be bound",
            "plugins: [{type: precise-prefix-cache-producer, parameters: {kvEventsConfig: {zmqEndpoint: 'ipc://x'}}}]",
            Code::OutOfRange,
            "tcp://",
        ),
        ("not in this version", "plugins: [{type: thunder-agent}]", Code::UnknownPlugin, "programs of agents"),
    ];
    for (name, text, code, word) in cases {
        let (_, diagnostics) = body(text);
        let errors: Vec<&Diagnostic> = diagnostics.iter().filter(|d| d.is_error()).collect();
        let shown = show(&format!("{HEAD}{text}"), &diagnostics);
        assert_eq!(errors.len(), 1, "{name}: {shown}");
        assert_eq!(errors[0].code, *code, "{name}: {shown}");
        assert!(errors[0].span.is_some(), "{name} points nowhere: {shown}");
        assert!(shown.contains(word), "{name}: no `{word}` in {shown}");
    }
    for version in ["apiVersion: attache.dev/v1\n", "apiVersion: 1\n", ""] {
        let (file, diagnostics) = read(&format!("{version}kind: EndpointPickerConfig\nplugins: 1\n"));
        assert!(file.is_none() && diagnostics.len() == 1 && diagnostics[0].code == Code::Version, "{diagnostics:?}");
    }
}
