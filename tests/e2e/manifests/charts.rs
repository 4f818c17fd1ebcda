//! The Helm charts: every value has an effect, invalid values are rejected with a reason, and GIE's values are
//! understood.

use super::picker::{configuration, refused};
use super::render::{MTLS, POOL, STANDALONE, SYNC, examples, helm, lint, list, template, text};
use super::shape;
use crate::support::process::repository;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const CHARTS: [&str; 2] = ["inferencepool", "standalone"];

fn read(chart: &str, file: &str) -> String {
    let path = examples().join("helm").join(chart).join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn values(chart: &str) -> Value {
    serde_saphyr::from_str(&read(chart, "values.yaml")).expect("values")
}

/// The paths of all leaf values, `a.b.c`.
fn leaves(path: &str, value: &Value, all: &mut BTreeSet<String>) {
    match value.as_object().filter(|fields| !fields.is_empty()) {
        Some(fields) => fields.iter().for_each(|(key, value)| {
            leaves(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, value, all);
        }),
        None => {
            all.insert(path.to_owned());
        }
    }
}

/// The paths that templates use after `.Values.`.
fn used(chart: &str) -> BTreeSet<String> {
    let templates = std::fs::read_dir(examples().join("helm").join(chart).join("templates")).expect("templates");
    let text: String =
        templates.map(|file| std::fs::read_to_string(file.expect("an entry").path()).expect("a template")).collect();
    let after = text.split(".Values.").skip(1);
    let paths =
        after.map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '.').next().unwrap_or_default());
    paths.map(|path| path.trim_end_matches('.').to_owned()).collect()
}

#[test]
fn every_value_is_used_and_every_used_value_is_declared() {
    let inside = |inner: &str, outer: &str| {
        inner == outer || inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('.'))
    };
    for chart in CHARTS {
        let (mut leaves_of, used) = (BTreeSet::new(), used(chart));
        leaves("", &values(chart), &mut leaves_of);
        assert!(used.len() > 30 && leaves_of.len() > 40, "{chart}: {} {}", used.len(), leaves_of.len());
        for leaf in &leaves_of {
            assert!(used.iter().any(|path| inside(leaf, path)), "{chart}: {leaf} does nothing");
        }
        for path in &used {
            let mut value = &values(chart);
            for key in path.split('.') {
                value = value.get(key).unwrap_or_else(|| panic!("{chart}: values.yaml has no {path}"));
            }
        }
    }
}

/// How the schema describes accepted values of GIE's and llm-d's charts, which are not declared in this chart.
const FOREIGN: [&str; 2] = ["No effect: ", "In place of "];

fn description_of(schema: &Value) -> &str {
    schema["description"].as_str().unwrap_or_default()
}

/// The paths of all values that a schema describes as without effect.
fn ineffective(path: &str, schema: &Value, all: &mut Vec<String>) {
    for (key, schema) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        if description_of(schema).starts_with(FOREIGN[0]) {
            all.push(path);
        } else {
            ineffective(&path, schema, all);
        }
    }
}

/// Checks that the schema allows exactly the keys of the values.
fn same_keys(path: &str, schema: &Value, value: &Value) {
    let (Some(properties), Some(fields)) = (schema["properties"].as_object(), value.as_object()) else { return };
    assert_eq!(schema["additionalProperties"], false, "{path}");
    let foreign = |key: &str| FOREIGN.iter().any(|word| description_of(&properties[key]).starts_with(word));
    let allowed: BTreeSet<_> = properties.keys().filter(|key| *key != "global" && !foreign(key)).collect();
    assert_eq!(allowed, fields.keys().collect(), "{path}");
    for (key, value) in fields {
        same_keys(&format!("{path}.{key}"), &properties[key], value);
    }
}

#[test]
fn schemas_allow_exactly_the_declared_values() {
    for chart in CHARTS {
        let schema: Value = serde_json::from_str(&read(chart, "values.schema.json")).expect("a schema");
        same_keys(chart, &schema, &values(chart));
    }
}

#[test]
fn both_charts_share_the_picker_templates() {
    for file in ["templates/_picker.tpl", "templates/_compatibility.tpl", "templates/NOTES.txt"] {
        assert_eq!(read("inferencepool", file), read("standalone", file), "{file}");
    }
    let version = env!("CARGO_PKG_VERSION");
    for chart in CHARTS {
        let about: Value = serde_saphyr::from_str(&read(chart, "Chart.yaml")).expect("a chart");
        assert_eq!(about["appVersion"], version, "{chart}: the image's tag");
    }
}

#[test]
fn helm_lint_passes() {
    for (chart, values) in CHARTS.into_iter().zip([POOL, STANDALONE]) {
        let output = lint(chart, values);
        assert!(output.status.success(), "{chart}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn charts_install_the_shipped_rules_and_dashboards_where_asked() {
    let monitoring =
        "monitoring: {prometheus: {rules: {enabled: true, extraLabels: {release: a}}}, grafana: {enabled: true}}";
    for (chart, least) in CHARTS.into_iter().zip([POOL, STANDALONE]) {
        let off = helm(chart, least);
        assert_eq!(off.of("PrometheusRule").count(), 0, "{chart}");
        let values = match chart {
            "standalone" => least.replace("inferenceExtension: {", &format!("inferenceExtension: {{{monitoring}, ")),
            _ => format!("{least}inferenceExtension: {{{monitoring}}}\n"),
        };
        let on = helm(chart, &values);
        let rule = on.one("PrometheusRule");
        assert_eq!(rule["metadata"]["labels"]["release"], "a", "{chart}");
        let mut groups = Vec::new();
        for file in ["recording.yaml", "alerts.yaml"] {
            let text = std::fs::read_to_string(repository().join("examples/prometheus").join(file)).expect("rules");
            let rules: Value = serde_saphyr::from_str(&text).expect("YAML");
            groups.extend_from_slice(list(&rules["groups"]));
        }
        assert_eq!(list(&rule["spec"]["groups"]), groups, "{chart}");
        let name = json!("llm-epp-dashboards");
        let dashboards = on.named("ConfigMap", &name);
        assert_eq!(dashboards["metadata"]["labels"]["grafana_dashboard"], "1", "{chart}");
        let files = dashboards["data"].as_object().expect("files");
        assert!(files.len() >= 8 && off.of("ConfigMap").all(|map| map["metadata"]["name"] != name), "{chart}");
        for (file, content) in files {
            let shipped = std::fs::read_to_string(repository().join("examples/grafana").join(file));
            assert_eq!(shipped.expect("a dashboard").trim_end(), text(content).trim_end(), "{chart}: {file}");
        }
    }
}

#[test]
fn runbook_links_of_installed_rules_begin_with_the_base() {
    // With and without a slash at its end.
    for base in ["https://git.example.com/attache/blob/main/", "https://git.example.com/attache/blob/main"] {
        let monitoring = format!("monitoring: {{prometheus: {{rules: {{enabled: true, runbookBase: '{base}'}}}}}}");
        for (chart, least) in CHARTS.into_iter().zip([POOL, STANDALONE]) {
            let values = match chart {
                "standalone" => {
                    least.replace("inferenceExtension: {", &format!("inferenceExtension: {{{monitoring}, "))
                }
                _ => format!("{least}inferenceExtension: {{{monitoring}}}\n"),
            };
            let rendered = helm(chart, &values);
            let rules =
                list(&rendered.one("PrometheusRule")["spec"]["groups"]).iter().flat_map(|group| list(&group["rules"]));
            let mut alerts = 0;
            for rule in rules.filter(|rule| rule["alert"].is_string()) {
                let page = "https://git.example.com/attache/blob/main/docs/how-to/alerts.md";
                let link = format!("{page}#{}", text(&rule["alert"]).to_lowercase());
                assert_eq!(rule["annotations"]["runbook_url"], link, "{chart}");
                alerts += 1;
            }
            assert!(alerts > 40, "{chart}: {alerts}");
        }
    }
}

/// A configuration with a pool selector, and one that has it only in a comment. The first has a `#` inside a name.
const SEARCHING: &str = r#"pluginsCustomConfig: {
  a.yaml: "apiVersion: attache.dev/v1\nkind: Attache\npools: [{name: 'a # b', kubernetes: {poolSelector: a=b}}]",
  b.yaml: "apiVersion: attache.dev/v1\nkind: Attache\n# poolSelector: a=b\npools: [{name: b}]"}"#;

/// A file of GIE's picker.
pub(super) const PICKER_CONFIG: &str = r#"pluginsCustomConfig: {
  a.yaml: "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]"}"#;

/// The values of a configuration of Attaché with one more key.
fn configured(more: &str) -> String {
    let text = format!("apiVersion: attache.dev/v1\\nkind: Attache\\n{more}\\npools: [{{name: a}}]");
    format!("pluginsConfigFile: a.yaml, pluginsCustomConfig: {{a.yaml: \"{text}\"}}")
}

#[test]
fn unused_configurations_grant_no_rights() {
    for (chart, least, file) in [
        ("inferencepool", format!("{POOL}inferenceExtension: {{"), "b.yaml"),
        ("inferencepool", format!("{POOL}inferenceExtension: {{"), "default-plugins.yaml"),
        ("standalone", "inferenceExtension: {endpointsServer: {endpointSelector: a=b}, ".to_owned(), "b.yaml"),
    ] {
        let rendered = helm(chart, &format!("{least}pluginsConfigFile: {file}, {SEARCHING}}}\n"));
        let role = rendered.one("Role")["rules"].to_string();
        assert!(role.contains("pods") && !role.contains("configmaps"), "{chart} with {file}: {role}");
    }
    let searches = format!("inferenceExtension: {{poolSelector: a=b, pluginsConfigFile: a.yaml, {SEARCHING}}}\n");
    assert!(helm("inferencepool", &searches).one("Role")["rules"].to_string().contains("configmaps"));
}

#[test]
fn invalid_values_are_rejected_with_a_reason() {
    let pool =
        "  apiVersion: inference.networking.x-k8s.io/v1alpha2\n  targetPorts: [{number: 8000}, {number: 8001}]\n";
    let cases = [
        ("inferencepool", String::new(), "inferencePool.modelServers.matchLabels is empty"),
        ("standalone", String::new(), "inferenceExtension.endpointsServer.endpointSelector is empty"),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{pluginsConfigFile: other.yaml}}\n"),
            "which is not a key of",
        ),
        ("inferencepool", format!("{POOL}inferenceExtension: {{replica: 2}}\n"), "replica"),
        ("inferencepool", format!("{POOL}inferenceExtension: {{failureMode: failOpen}}\n"), "failureMode"),
        ("inferencepool", format!("{POOL}provider: {{name: nginx}}\n"), "name"),
        (
            "inferencepool",
            format!("inferencePool:\n  modelServers: {{matchLabels: {{a: b}}}}\n{pool}"),
            "use inference.networking.k8s.io/v1",
        ),
        (
            "standalone",
            "inferenceExtension: {endpointsServer: {endpointSelector: a=b, targetPorts: [0]}}\n".into(),
            "targetPorts",
        ),
        (
            "standalone",
            "inferenceExtension: {poolSelector: a=b, endpointsServer: {endpointSelector: a=b}}\n".into(),
            "give one of them",
        ),
        ("inferencepool", format!("{POOL}inferenceExtension: {{poolSelector: a=b}}\n"), "the chart makes none"),
        (
            "inferencepool",
            "inferenceExtension: {poolSelector: a=b}\nexperimentalHttpRoute: {enabled: true}\n".into(),
            "write them beside yours",
        ),
        ("inferencepool", format!("{POOL}inferenceExtension: {{poolServices: [Llama]}}\n"), "poolServices"),
        ("inferencepool", format!("{POOL}inferenceExtension: {{poolServices: [llm-epp]}}\n"), "which is there already"),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{pluginsConfigFile: a.yaml, pluginsCustomConfig: {{a.yaml: '['}}}}\n"),
            "can't be read",
        ),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{mtls: {{enabled: true}}}}\n"),
            "give a secret with tls.crt",
        ),
        ("inferencepool", format!("{POOL}{MTLS}provider: {{name: istio}}\n"), "credentialName is empty"),
        ("inferencepool", format!("{POOL}{MTLS}  flags: {{secure-serving: false}}\n"), "mtls sets the flag itself"),
        (
            "standalone",
            format!("{MTLS}  endpointsServer: {{endpointSelector: a=b}}\n  flags: {{cert-path: /a}}\n"),
            "mtls sets the flag itself",
        ),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{{SYNC}, flags: {{ha-enable-leader-election: true}}}}\n"),
            "with shared state all replicas route",
        ),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{{SYNC}, {}}}\n", configured("server: {leaderElection: true}")),
            "with shared state all replicas route",
        ),
        (
            "standalone",
            format!(
                "inferenceExtension: {{endpointsServer: {{endpointSelector: a=b}}, {SYNC}, {}}}\n",
                configured("sync: {}")
            ),
            "has the key sync",
        ),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{{SYNC}, pluginsConfigFile: a.yaml, {PICKER_CONFIG}}}\n"),
            "is an EndpointPickerConfig",
        ),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{{SYNC}, flags: {{sync-name: a}}}}\n"),
            "sync sets the flag itself",
        ),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{sync: {{keySecret: pickers}}}}\n"),
            "inferenceExtension.sync.nats.servers is empty",
        ),
        (
            "inferencepool",
            format!(
                "{POOL}inferenceExtension: {{sync: {{nats: {{servers: ['nats://nats:4222'], serversSecret: nats}}}}}}\n"
            ),
            "give one of them",
        ),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{sync: {{nats: {{servers: ['http://nats:4222']}}}}}}\n"),
            "does not match pattern",
        ),
        (
            "inferencepool",
            format!("{POOL}inferenceExtension: {{pluginsConfigFile: a.yaml, {SEARCHING}}}\n"),
            "give the labels as inferenceExtension.poolSelector",
        ),
        (
            "standalone",
            format!(
                "inferenceExtension: {{endpointsServer: {{endpointSelector: a=b}}, pluginsConfigFile: a.yaml, {SEARCHING}}}\n"
            ),
            "no effect beside inferenceExtension.endpointsServer.endpointSelector",
        ),
    ];
    for (chart, values, reason) in cases {
        let output = template(chart, &values);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{chart} takes {values}");
        assert!(said.contains(reason), "{chart} with {values}: {said}");
    }
}

/// A flag outranks the file, so a chart's default would override the configuration.
#[test]
fn unset_values_add_no_flags() {
    for (chart, least) in CHARTS.into_iter().zip([POOL, STANDALONE]) {
        let rendered = helm(chart, least);
        let arguments = rendered.picker()["args"].to_string();
        for flag in ["--engine", "--model-server-metrics", "--trust-client-headers"] {
            assert!(!arguments.contains(flag), "{chart}: {flag} in {arguments}");
        }
    }
    let set = format!("{POOL}inferenceExtension: {{metricsDataSource: {{scheme: https, path: /m}}}}\n");
    let arguments = helm("inferencepool", &set).picker()["args"].to_string();
    for flag in ["metrics-scheme=https", "metrics-path=/m", "metrics-https-insecure-skip-verify=true"] {
        assert!(arguments.contains(flag), "{flag}: {arguments}");
    }
}

#[test]
fn picker_of_many_pools_has_a_service_for_each() {
    let many = "inferenceExtension: {poolSelector: 'serving=attache,tier in (a)', poolServices: [llama-epp, qwen-epp]}\n\
                provider: {name: istio}\n";
    let rendered = helm("inferencepool", many);
    let arguments: Vec<&str> = list(&rendered.picker()["args"]).iter().map(text).collect();
    assert!(arguments.contains(&"--pool-selector=serving=attache,tier in (a)"), "{arguments:?}");
    assert!(!arguments.iter().any(|argument| argument.starts_with("--pool-name=")), "{arguments:?}");
    assert_eq!(refused(list(&rendered.picker()["args"])), None);
    assert_eq!(rendered.of("InferencePool").count(), 0, "they are the user's");
    let own = rendered.named("Service", &"llm-epp".into());
    for name in ["llama-epp", "qwen-epp"] {
        let service = rendered.named("Service", &name.into());
        assert_eq!(service["spec"]["selector"], own["spec"]["selector"], "{name}: the same pods");
        assert_eq!(list(&service["spec"]["ports"]), &list(&own["spec"]["ports"])[..1], "{name}: for gateways alone");
        let rule = rendered.named("DestinationRule", &name.into());
        assert_eq!(rule["spec"]["host"], format!("{name}.inference.svc.cluster.local"));
    }
    let patches = list(&rendered.one("EnvoyFilter")["spec"]["configPatches"]);
    let patched: Vec<_> = patches.iter().filter_map(|patch| patch["match"]["cluster"]["service"].as_str()).collect();
    let hosts = ["llm-epp", "llama-epp", "qwen-epp"].map(|name| format!("{name}.inference.svc.cluster.local"));
    assert_eq!(patched, hosts, "each connection to the picker takes any number of small frames");
    for object in &rendered.objects {
        shape::check(object).unwrap_or_else(|problem| panic!("{}: {problem}", object["kind"]));
    }
}

/// A values file for GIE's chart.
const GIE: &str = include_str!("../../data/kubernetes/gie-values.yaml");

#[test]
fn values_of_the_gie_chart_have_the_same_effect() {
    let rendered = helm("inferencepool", GIE);
    let picker = rendered.picker();
    assert_eq!(picker["image"], "registry.example.com/attache:0.1.0");
    let arguments: Vec<&str> = list(&picker["args"]).iter().map(text).collect();
    for expected in [
        "--pool-name=llm",
        "--pool-namespace=inference",
        "--config-file=/config/custom-plugins.yaml",
        "--v=1",
        "--engine=sglang",
        "--tracing=true",
        "--trust-client-headers=true",
    ] {
        assert!(arguments.contains(&expected), "{expected}: {arguments:?}");
    }
    assert_eq!(refused(list(&picker["args"])), None);
    let config = rendered.named("ConfigMap", &"llm-epp".into());
    configuration("GIE's values", text(&config["data"]["custom-plugins.yaml"]));
    let pool = rendered.one("InferencePool");
    assert_eq!(pool["spec"]["selector"]["matchLabels"], serde_json::json!({"app": "vllm-qwen3-32b"}));
    assert_eq!(pool["spec"]["endpointPickerRef"]["failureMode"], "FailClose");
    assert_eq!(rendered.one("Deployment")["spec"]["replicas"], 2);
    assert!(list(&rendered.one("Service")["spec"]["ports"]).iter().any(|port| port["name"] == "zmq"));
    let environment = list(&picker["env"]);
    assert!(environment.iter().any(|variable| variable["name"] == "FEATURE" && variable["value"] == "on"));
    assert_eq!(rendered.one("InferenceObjective")["spec"]["priority"], -1);
    assert_eq!(rendered.one("HTTPRoute")["spec"]["parentRefs"][0]["name"], "my-gateway");
    rendered.one("DestinationRule");
    rendered.one("ServiceMonitor");
}

#[test]
fn destination_rule_keeps_its_own_policy_and_gets_a_server_name() {
    let rule = |policy: &str| {
        let values =
            format!("{POOL}provider: {{name: istio}}\nistio: {{destinationRule: {{trafficPolicy: {policy}}}}}\n");
        helm("inferencepool", &values).one("DestinationRule")["spec"]["trafficPolicy"].clone()
    };
    let host = "llm-epp.inference.svc.cluster.local";
    let simple = serde_json::json!({"mode": "SIMPLE", "insecureSkipVerify": true, "sni": host});
    assert_eq!(rule("{}"), serde_json::json!({"tls": simple}));
    assert_eq!(rule("{tls: {mode: SIMPLE, sni: other}}")["tls"], serde_json::json!({"mode": "SIMPLE", "sni": "other"}));
    assert_eq!(rule("{tls: {mode: DISABLE}}")["tls"], serde_json::json!({"mode": "DISABLE"}));
    let connections = "{connectionPool: {tcp: {maxConnections: 5}}}";
    assert_eq!(rule(connections)["connectionPool"]["tcp"]["maxConnections"], 5);
    assert_eq!(rule(connections)["tls"], simple);
}

/// The values that the chart reports as without effect, in comments of its objects.
fn comments(chart: &str, values: &str) -> Vec<String> {
    let output = template(chart, values);
    assert!(output.status.success(), "{chart}: {}", String::from_utf8_lossy(&output.stderr));
    let all = String::from_utf8(output.stdout).expect("UTF-8");
    let from = all.split("# These values have no effect:").nth(1).unwrap_or_default();
    let lines = from.lines().skip_while(|line| line.is_empty()).map_while(|line| line.strip_prefix("# "));
    lines.filter_map(|line| line.split_once(": ")).map(|(path, _)| path.to_owned()).collect()
}

#[test]
fn every_value_without_effect_is_named() {
    for (chart, least) in CHARTS.into_iter().zip([POOL, STANDALONE]) {
        let schema: Value = serde_json::from_str(&read(chart, "values.schema.json")).expect("a schema");
        let mut all = Vec::new();
        ineffective("", &schema, &mut all);
        assert!(all.len() >= 12, "{chart}: {all:?}");
        let mut values: Value = serde_saphyr::from_str(least).expect("values");
        for path in &all {
            let mut at = &mut values;
            for key in path.split('.') {
                at = &mut at[key];
                if at.is_null() {
                    *at = serde_json::json!({});
                }
            }
        }
        let named = comments(chart, &values.to_string());
        for path in &all {
            assert!(named.contains(path), "{chart}: {path} is not among {named:?}");
        }
        assert_eq!(comments(chart, least), Vec::<String>::new(), "{chart}: nothing is given");
    }
}

/// Checks that all objects are valid and the picker accepts its arguments, and returns these.
fn checked_arguments(rendered: &super::render::Rendered) -> Vec<String> {
    for object in &rendered.objects {
        shape::check(object).unwrap_or_else(|problem| panic!("{}: {problem}", object["kind"]));
    }
    assert_eq!(refused(list(&rendered.picker()["args"])), None);
    list(&rendered.picker()["args"]).iter().map(|argument| text(argument).to_owned()).collect()
}

#[test]
fn gie_v1_5_values_are_mapped_or_named() {
    const VALUES: &str = include_str!("../../data/kubernetes/gie-v1.5-values.yaml");
    let rendered = helm("inferencepool", VALUES);
    let arguments = checked_arguments(&rendered);
    for expected in ["--engine=trtllm-serve", "--metrics-endpoint-auth=true"] {
        assert!(arguments.iter().any(|argument| argument == expected), "{expected}: {arguments:?}");
    }
    let rule = &rendered.one("DestinationRule")["spec"];
    assert_eq!(rule["host"], "picker.mesh.example");
    assert_eq!(rule["trafficPolicy"]["connectionPool"]["http"]["maxRequestsPerConnection"], 256_000);
    assert_eq!(rule["trafficPolicy"]["tls"]["mode"], "SIMPLE", "the chart's own stays");
    let route = &rendered.one("HTTPRoute")["spec"];
    assert_eq!(route["parentRefs"][0]["namespace"], "gateways");
    assert_eq!(route["rules"][0]["timeouts"]["request"], "300s");
    assert_eq!(route["rules"][0]["matches"][0]["headers"][0]["value"], "qwen");
    let secret = "inference-gateway-sa-metrics-reader-secret";
    let monitor = &rendered.one("ServiceMonitor")["spec"]["endpoints"][0];
    assert_eq!(monitor["authorization"]["credentials"]["name"], secret);
    assert_eq!(rendered.one("Secret")["metadata"]["name"], secret);
    let named = comments("inferencepool", VALUES);
    let expected = [
        "inferenceExtension.latencyPredictor",
        "inferenceExtension.monitoring.gke",
        "inferenceExtension.sidecar",
        "inferenceExtension.tracing.sampling.sampler",
        "inferencePool.modelServerProtocol",
        "inferencePool.parser",
        "provider.gke",
    ];
    assert_eq!(named, expected);
}

#[test]
fn gie_v1_5_standalone_values_are_mapped_or_named() {
    const VALUES: &str = include_str!("../../data/kubernetes/gie-v1.5-standalone-values.yaml");
    let rendered = helm("standalone", VALUES);
    let arguments = checked_arguments(&rendered);
    for expected in ["--endpoint-selector=app=vllm-qwen3-32b", "--endpoint-target-ports=8000", "--engine=vllm"] {
        assert!(arguments.iter().any(|argument| argument == expected), "{expected}: {arguments:?}");
    }
    let ports = list(&rendered.one("Service")["spec"]["ports"]);
    assert_eq!(ports.iter().filter(|port| port["port"] == 8081).count(), 1, "{ports:?}");
    let named = comments("standalone", VALUES);
    for path in ["inferenceExtension.sidecar.configMap", "inferenceExtension.latencyPredictor", "provider"] {
        assert!(named.iter().any(|name| name == path), "{path}: {named:?}");
    }
    // With an InferencePool in the values, its labels and ports are used for the model servers.
    let pool = "inferencePool: {modelServers: {matchLabels: {app: llm, tier: a}}, targetPorts: [{number: 8000}, {number: 8001}]}\n";
    let arguments = checked_arguments(&helm("standalone", pool));
    for expected in ["--endpoint-selector=app=llm,tier=a", "--endpoint-target-ports=8000,8001"] {
        assert!(arguments.iter().any(|argument| argument == expected), "{expected}: {arguments:?}");
    }
}

#[test]
fn llm_d_values_are_mapped_or_named() {
    const VALUES: &str = include_str!("../../data/kubernetes/llm-d-values.yaml");
    for (chart, source) in
        [("inferencepool", "--pool-name=llm"), ("standalone", "--endpoint-selector=llm-d.ai/guide=optimized-baseline")]
    {
        let rendered = helm(chart, VALUES);
        let arguments = checked_arguments(&rendered);
        for expected in [
            source,
            "--config-file=/config/guide-plugins.yaml",
            "--engine=vllm",
            "--ha-enable-leader-election=false",
            "--model-server-metrics-https-insecure-skip-verify=false",
            "--v=2",
        ] {
            assert!(arguments.iter().any(|argument| argument == expected), "{chart}: {expected}: {arguments:?}");
        }
        assert_eq!(rendered.picker()["image"], "registry.example.com/attache:0.1.0");
        assert_eq!(rendered.one("Deployment")["spec"]["replicas"], 2);
        assert_eq!(rendered.picker()["resources"]["limits"]["memory"], "16Gi");
        let ports = list(&rendered.one("Service")["spec"]["ports"]);
        let names: BTreeSet<&str> = ports.iter().map(|port| text(&port["name"])).collect();
        assert_eq!(names.len(), ports.len(), "{chart}: {ports:?}");
        rendered.one("ServiceMonitor");
        let named = comments(chart, VALUES);
        for path in
            ["router.epp.parsers", "router.latencyPredictor", "router.modelServers.protocol", "router.tokenizer"]
        {
            assert!(named.iter().any(|name| name == path), "{chart}: {path}: {named:?}");
        }
    }
    let pool = helm("inferencepool", VALUES);
    let pool = &pool.one("InferencePool")["spec"];
    assert_eq!(pool["endpointPickerRef"]["failureMode"], "FailClose");
    assert_eq!(list(&pool["targetPorts"]).len(), 2);
    assert_eq!(pool["selector"]["matchLabels"]["llm-d.ai/guide"], "optimized-baseline");
}
