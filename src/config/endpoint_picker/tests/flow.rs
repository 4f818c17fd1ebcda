//! What becomes of the gate, of `flowControl`, `saturationDetector`, policies and admitters.

use super::*;
use attache_types::limits::DEFAULT_MAX_BUFFERED_BYTES;

/// `flowControl` of the pool that a file describes, and how many warnings it gets.
fn flow(text: &str) -> (Value, usize) {
    let text = format!("{HEAD}{text}");
    let (settings, warnings) = full(&text, one_endpoint()).unwrap_or_else(|d| panic!("{}", show(&text, &d)));
    assert!(warnings.iter().all(|d| d.code == Code::NoEffect), "{}", show(&text, &warnings));
    let said = settings.pools[0].flow.as_ref().map_or(Value::Null, |flow| flow.said.clone());
    let trusts = text.contains("[flowControl]")
        || said["admitters"] != json!([])
        || text.contains("Threshold")
        || text.contains("pluginRef");
    assert_eq!(settings.exchange.trust_client_headers, trusts, "priorities and tenants come from headers");
    (said, warnings.len())
}

fn named(name: &str) -> Value {
    json!({"name": name, "parameters": null})
}

/// A band as both projects have it.
fn usual() -> Value {
    json!({
        "fairness": named("global-strict-fairness-policy"), "ordering": named("fcfs-ordering-policy"),
        "maxRequests": 5_000, "maxBytes": 1_000_000_000, "overflow": "newcomer", "ttl": null,
    })
}

/// Queues as both projects have them, but for what `changes` says.
fn queues(changes: Value) -> Value {
    let mut all = json!({
        "enabled": true, "queue": true, "detector": named("utilization-detector"), "ceiling": named("static-usage-limit-policy"), "admitters": [],
        "ttl": "1m", "emptyTtl": "1m", "maxRequests": null, "maxBytes": DEFAULT_MAX_BUFFERED_BYTES / 2, "evictSheddable": false, "evictRunning": "never", "shares": {},
        "defaultBand": usual(), "sheddableBand": null, "bands": [],
    });
    let Value::Object(changes) = changes else { panic!("no changes") };
    all.as_object_mut().unwrap().extend(changes);
    all
}

fn with(mut value: Value, key: &str, to: Value) -> Value {
    value[key] = to;
    value
}

#[test]
fn with_feature_gate_requests_are_queued_as_configured() {
    let cases: &[(&str, &str, Value)] = &[
        ("the gate alone", "", queues(json!({}))),
        (
            "limits",
            "flowControl: {maxBytes: 256Mi, maxRequests: '2k', defaultRequestTTL: 1m30s}",
            queues(json!({"maxBytes": 256u64 << 20, "maxRequests": 2_000, "ttl": "1m30s", "emptyTtl": "1m30s"})),
        ),
        ("no limit", "flowControl: {maxBytes: '0', maxRequests: 0}", queues(json!({}))),
        (
            "numbers of other kinds",
            "flowControl: {maxBytes: 1e3, maxRequests: '1500m'}",
            queues(json!({"maxBytes": 1_000, "maxRequests": 2})),
        ),
        (
            "0 of every spelling means the default of a band",
            "flowControl: {defaultPriorityBand: {maxRequests: '0k', maxBytes: '-0'}, \
             defaultNegativePriorityBand: {maxRequests: 0, maxBytes: '0e3'}}",
            queues(json!({"sheddableBand": usual()})),
        ),
        (
            "signed quantities",
            "flowControl: {maxBytes: '+1Ki', maxRequests: '+.5k', defaultPriorityBand: {maxRequests: '+2', maxBytes: '1E6'}}",
            queues(json!({
                "maxBytes": 1_024, "maxRequests": 500,
                "defaultBand": with(with(usual(), "maxRequests", json!(2)), "maxBytes", json!(1_000_000)),
            })),
        ),
        ("eviction", "flowControl: {enableEviction: true}", queues(json!({"evictRunning": "any"}))),
        ("no eviction", "flowControl: {enableEviction: false}", queues(json!({}))),
        (
            "a detector of the section",
            "plugins: [{type: concurrency-detector, parameters: {maxConcurrency: 132}}]\n\
             flowControl: {saturationDetector: {pluginRef: concurrency-detector}}",
            queues(json!({"detector": {"name": "concurrency-detector", "parameters": {"maxConcurrency": 132}}})),
        ),
        (
            "a detector of its own section",
            "plugins: [{name: d, type: utilization-detector, parameters: {queueDepthThreshold: 9}}]\nsaturationDetector: {pluginRef: d}",
            queues(json!({"detector": {"name": "utilization-detector", "parameters": {"queueDepthThreshold": 9}}})),
        ),
        (
            "thresholds inline",
            "saturationDetector: {queueDepthThreshold: 7, kvCacheUtilThreshold: 0.9, metricsStalenessThreshold: 200ms}",
            queues(json!({"detector": {"name": "utilization-detector", "parameters":
                {"queueDepthThreshold": 7, "kvCacheUtilThreshold": 0.9, "metricsStalenessThreshold": "200ms"}}})),
        ),
        (
            "a ceiling",
            "plugins: [{name: c, type: priority-holdback-policy, parameters: {minCeiling: 0.5}}]\nflowControl: {usageLimitPolicyPluginRef: c}",
            queues(json!({"ceiling": {"name": "priority-holdback-policy", "parameters": {"minCeiling": 0.5}}})),
        ),
        (
            "bands: those that are named do not follow the default one",
            "plugins: [{type: round-robin-fairness-policy}, {type: edf-ordering-policy}]\n\
             flowControl: {defaultPriorityBand: {maxRequests: 10, fairnessPolicyRef: round-robin-fairness-policy}, \
             priorityBands: [{priority: 100, orderingPolicyRef: edf-ordering-policy}, {priority: -1, maxRequests: '0', maxBytes: '0'}, {priority: -2, maxRequests: 0.0, maxBytes: 0Gi}]}",
            queues(json!({
                "defaultBand": with(with(usual(), "fairness", named("round-robin-fairness-policy")), "maxRequests", json!(10)),
                "bands": [
                    with(with(usual(), "ordering", named("edf-ordering-policy")), "priority", json!(100)),
                    with(usual(), "priority", json!(-1)),
                    with(usual(), "priority", json!(-2)),
                ],
            })),
        ),
        (
            "a pool that starts from zero, and less room for what is sheddable",
            "flowControl: {defaultRequestTTL: 20s, noEndpointRequestTTL: 5m, defaultNegativePriorityBand: {maxRequests: 7}}",
            queues(json!({"ttl": "20s", "emptyTtl": "5m", "sheddableBand": with(usual(), "maxRequests", json!(7))})),
        ),
        (
            "a band with a longer wait",
            "flowControl: {defaultRequestTTL: 20s, priorityBands: [{priority: -1, defaultRequestTTL: 9000s}, {priority: 0}]}",
            queues(json!({
                "ttl": "20s", "emptyTtl": "20s",
                "bands": [
                    with(with(usual(), "ttl", json!("150m")), "priority", json!(-1)),
                    with(usual(), "priority", json!(0)),
                ],
            })),
        ),
        (
            "admitters come along",
            "plugins: [{type: probabilistic-admitter, parameters: {k: 2}}, {type: latency-slo-admitter}]",
            queues(
                json!({"admitters": [{"name": "probabilistic-admitter", "parameters": {"k": 2}}, named("latency-slo-admitter")]}),
            ),
        ),
    ];
    for (case, text, want) in cases {
        assert_eq!(flow(&format!("featureGates: [flowControl]\n{text}")), (want.clone(), 0), "{case}");
    }
}

#[test]
fn wrong_quantity_error_names_field_value_and_what_is_allowed() {
    for (field, value, code, says) in [
        ("maxRequests", "'-1'", Code::OutOfRange, "`maxRequests` is `-1`, allowed: a quantity of 0 or more"),
        ("maxBytes", "-5", Code::OutOfRange, "`maxBytes` is -5, allowed"),
        ("maxBytes", "-4Gi", Code::OutOfRange, "`maxBytes` is `-4Gi`, allowed"),
        ("maxBytes", "4GiB", Code::WrongType, "`maxBytes` must be a quantity such as `4Gi`"),
        ("maxRequests", "'+-1'", Code::WrongType, "got the text `+-1`"),
        ("maxRequests", "many", Code::WrongType, "got the text `many`"),
    ] {
        for section in ["{FIELD}", "{defaultPriorityBand: {FIELD}}", "{priorityBands: [{priority: 1, FIELD}]}"] {
            let section = section.replace("FIELD", &format!("{field}: {value}"));
            let text = format!("{HEAD}featureGates: [flowControl]\nflowControl: {section}\n");
            let errors = full(&text, one_endpoint()).unwrap_err();
            let shown = show(&text, &errors);
            let found: Vec<_> = errors.iter().filter(|d| d.is_error()).map(|d| (d.code, &*d.message)).collect();
            assert!(matches!(found[..], [(got, message)] if got == code && message.contains(says)), "{shown}");
        }
    }
}

#[test]
fn every_policy_can_be_named() {
    for (slot, kinds) in [
        (
            "fairnessPolicyRef",
            &["global-strict-fairness-policy", "program-aware-fairness", "round-robin-fairness-policy"][..],
        ),
        ("orderingPolicyRef", &["edf-ordering-policy", "fcfs-ordering-policy", "slo-deadline-ordering-policy"]),
    ] {
        for kind in kinds {
            let (said, _) = flow(&format!(
                "featureGates: [flowControl]\nplugins: [{{name: p, type: {kind}}}]\nflowControl: {{defaultPriorityBand: {{{slot}: p}}}}"
            ));
            assert_eq!(said["defaultBand"][slot.trim_end_matches("PolicyRef")], named(kind));
        }
    }
    for kind in ["soft-reflective-ceiling-policy", "static-usage-limit-policy"] {
        let (said, _) = flow(&format!(
            "featureGates: [flowControl]\nplugins: [{{name: p, type: {kind}}}]\nflowControl: {{usageLimitPolicyPluginRef: p}}"
        ));
        assert_eq!(said["ceiling"], named(kind));
    }
}

#[test]
fn flow_settings_without_effect_are_warned_of() {
    let (said, warnings) = flow("featureGates: [flowControl]\nflowControl: {maxBytes: 4Gi}");
    assert_eq!((said, warnings), (queues(json!({"maxBytes": 4u64 << 30})), 1), "bodies may not hold as much");
    for (text, count) in [
        ("flowControl: {noEndpointRequestTTL: 0}", 1),
        ("flowControl: {defaultRequestTTL: 0}", 1),
        ("plugins: [{type: agent-identity}]", 0),
        ("flowControl: {defaultPriorityBand: {defaultRequestTTL: 0s}}", 1),
        ("plugins: [{type: sheddable-eviction-filter}, {type: priority-then-time-eviction-order-policy}]", 0),
        (
            "saturationDetector: {queueDepthThreshold: 7}\nflowControl: {saturationDetector: {pluginRef: utilization-detector}}",
            1,
        ),
    ] {
        let (said, warnings) = flow(&format!("featureGates: [flowControl]\n{text}"));
        assert_eq!((said, warnings), (queues(json!({})), count), "{text}");
    }
}

/// What holds without the gate: sheddable requests are refused while this detector says that the pool is saturated.
fn shedding(detector: Value, admitters: Value) -> Value {
    let Value::Object(band) = queues(json!({})) else { panic!("no object") };
    let mut said = Value::Object(band);
    let own = json!({
        "fairness": {"name": "vtc-fair", "parameters": {"burstTokens": 32_768}}, "ordering": named("least-work"),
        "maxRequests": 5_000, "maxBytes": 1_000_000_000, "overflow": "longest-flow", "ttl": null,
    });
    for (key, value) in
        [("queue", json!(false)), ("ttl", Value::Null), ("evictSheddable", json!(true)), ("defaultBand", own)]
    {
        said = with(said, key, value);
    }
    with(with(said, "detector", detector), "admitters", admitters)
}

#[test]
fn without_feature_gate_sheddable_rejected_none_queued() {
    let utilization = || named("utilization-detector");
    let at_seven = json!({"name": "utilization-detector", "parameters": {"queueDepthThreshold": 7}});
    let concurrency = json!({"name": "concurrency-detector", "parameters": {"maxConcurrency": 3}});
    for (text, want, warnings) in [
        ("plugins: [{type: queue-scorer}]", shedding(utilization(), json!([])), 0),
        ("saturationDetector: {}", shedding(utilization(), json!([])), 0),
        ("flowControl: {maxBytes: 1}", shedding(utilization(), json!([])), 1),
        ("saturationDetector: {queueDepthThreshold: 7}", shedding(at_seven, json!([])), 0),
        (
            "plugins: [{type: concurrency-detector, parameters: {maxConcurrency: 3}}]\nsaturationDetector: {pluginRef: concurrency-detector}",
            shedding(concurrency, json!([])),
            0,
        ),
        ("plugins: [{type: latency-slo-admitter}]", shedding(utilization(), json!([named("latency-slo-admitter")])), 0),
    ] {
        assert_eq!(flow(text), (want, warnings), "{text}");
    }
}
