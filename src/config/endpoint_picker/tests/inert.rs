//! Parameters that another parameter of the same plugin switches off.

use super::*;

/// The paths and messages of the warnings about a plugin with these parameters.
fn warned(kind: &str, parameters: &str) -> Vec<(String, String)> {
    let text = format!("{HEAD}plugins:\n- type: {kind}\n  parameters: {parameters}\n");
    let (_, diagnostics) = read(&text);
    assert!(diagnostics.iter().all(|d| d.code == Code::NoEffect && d.span.is_some()), "{}", show(&text, &diagnostics));
    diagnostics.into_iter().map(|d| (d.path, d.message)).collect()
}

/// Type, parameters, and the keys that are warned of, each with a part of its message.
type Case = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

const CASES: &[Case] = &[
    ("session-affinity-scorer", "{}", &[]),
    ("session-affinity-scorer", "{strategy: session_id, sessionIdConfig: {sources: [{header: x-chat}]}}", &[]),
    ("session-affinity-filter", "{encodedEndpointHeaderConfig: {header: x-pin}}", &[]),
    (
        "session-affinity-scorer",
        "{sessionIdConfig: {sources: [{header: x-chat}]}}",
        &[("sessionIdConfig", "`strategy: session_id`")],
    ),
    (
        "session-affinity-filter",
        "{algorithm: session_id_header, encodedEndpointHeaderConfig: {header: x-pin}}",
        &[("encodedEndpointHeaderConfig", "`strategy: encoded_endpoint_header`")],
    ),
    (
        "multicluster-session-affinity-filter",
        "{evictionTtlSeconds: 30, headerName: x-pin, encodedEndpointHeaderConfig: {header: x-other}}",
        &[("evictionTtlSeconds", "session_id"), ("headerName", "names the header")],
    ),
    (
        "session-affinity-scorer",
        "{strategy: session_id, headerName: a, evictionTtlSeconds: 9, missThreshold: 2, profileName: decode, \
         sessionIdConfig: {sources: [{header: b}], evictionTtlSeconds: 8, evictionSweepSeconds: 1}}",
        &[
            ("headerName", "sources"),
            ("evictionTtlSeconds", "`sessionIdConfig.evictionTtlSeconds` says it"),
            ("sessionIdConfig.evictionSweepSeconds", "without a sweep"),
            ("profileName", "profiles that list it"),
            ("missThreshold", "at once"),
        ],
    ),
    ("concurrency-detector", "{maxTokenConcurrency: 9}", &[("maxTokenConcurrency", "`concurrencyMode: tokens`")]),
    (
        "concurrency-detector",
        "{concurrencyMode: tokens, maxConcurrency: 9}",
        &[("maxConcurrency", "`concurrencyMode: requests`")],
    ),
    ("concurrency-detector", "{concurrencyMode: hybrid, maxConcurrency: 9, maxTokenConcurrency: 9}", &[]),
    (
        "prefix-cache-affinity-filter",
        "{ttftSource: latencyPredictor, peakPrefillThroughput: 9}",
        &[("peakPrefillThroughput", "prefillThroughput")],
    ),
    (
        "prefix-cache-affinity-filter",
        "{maxTTFTPenaltyMs: 0, ttftSource: prefillThroughput, peakPrefillThroughput: 9}",
        &[("ttftSource", "no times"), ("peakPrefillThroughput", "no times")],
    ),
    ("prefix-cache-scorer", "{matchLengthScaleTokens: 9}", &[("matchLengthScaleTokens", "`matchLengthWeight`")]),
    ("prefix-cache-scorer", "{matchLengthScaleTokens: 9, matchLengthWeight: 0.1}", &[]),
    ("active-request-scorer", "{requestTimeout: 2m}", &[("requestTimeout", "until it ends")]),
    ("data-parallel-profile-handler", "{primaryPort: 8000}", &[("primaryPort", "endpoint of its own")]),
    (
        "program-aware-fairness",
        "{turnPriorityTimeWeight: 2, lasDecayFactor: 0.9}",
        &[("turnPriorityTimeWeight", "turn-priority"), ("lasDecayFactor", "`lasHalfLifeSeconds: 0`")],
    ),
    (
        "program-aware-fairness-policy",
        "{strategy: turn-priority, lasWeightService: 1, evictionTtlSeconds: 9}",
        &[("lasWeightService", "`strategy: las`"), ("evictionTtlSeconds", "fixed time")],
    ),
    ("program-aware-fairness", "{lasHalfLifeSeconds: 0, lasDecayFactor: 0.9}", &[]),
];

#[test]
fn parameter_without_effect_in_its_mode_is_warned_of() {
    for (kind, parameters, keys) in CASES {
        let warned = warned(kind, parameters);
        let paths: Vec<&str> =
            warned.iter().map(|(path, _)| path.trim_start_matches("plugins[0].parameters.")).collect();
        assert_eq!(paths, keys.iter().map(|(key, _)| *key).collect::<Vec<_>>(), "{kind} {parameters}: {warned:?}");
        for ((_, message), (key, says)) in warned.iter().zip(*keys) {
            assert!(message.contains(&format!("`{key}` has no effect")) && message.contains(says), "{message}");
        }
    }
}

#[test]
fn stage_parameters_without_a_decider_are_warned_of() {
    let staged = |parameters: &str| {
        let text = format!(
            "{HEAD}plugins:\n- {{type: queue-scorer}}\n- {{type: always-disagg-pd-decider}}\n\
             - type: disagg-profile-handler\n  parameters: {parameters}\n\
             schedulingProfiles:\n- {{name: decode, plugins: [{{pluginRef: queue-scorer}}]}}\n\
             - {{name: p, plugins: [{{pluginRef: queue-scorer}}]}}\n"
        );
        let (_, diagnostics) = read(&text);
        let of_parameters = diagnostics.into_iter().filter(|d| d.path.contains("parameters"));
        of_parameters.map(|d| d.path.trim_start_matches("plugins[2].parameters.").to_owned()).collect::<Vec<_>>()
    };
    let none: [&str; 0] = [];
    assert_eq!(staged("{profiles: {prefill: p}, deciders: {prefill: always-disagg-pd-decider}}"), none);
    assert_eq!(staged("{profiles: {prefill: p, encode: e}}"), ["profiles.prefill", "profiles.encode"]);
    assert_eq!(staged("{profiles: {prefill: p}, stageOrder: prefill-first}"), none);
    let both = "{profiles: {prefill: p}, stageOrder: prefill-first, deciders: {prefill: always-disagg-pd-decider}}";
    assert_eq!(staged(both), ["deciders.prefill"]);
    assert_eq!(staged("{prefillProfile: p, encodeProfile: ''}"), ["prefillProfile", "encodeProfile"]);
}
