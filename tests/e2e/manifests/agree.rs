//! Consistency of the rendered objects: references have targets, and rights are minimal.

use super::render::{POOL, Rendered, STANDALONE, all, helm, list, text};
use crate::support::process::repository;
use attache_config::schema::Drain;
use attache_config::settings::PoolGroup;
use attache_discovery::kube::objects::ObjectKind;
use attache_serving::health::{LIVENESS, READINESS};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Whether the labels have everything that a selector requires.
pub(super) fn selects(selector: &Value, labels: &Value) -> bool {
    let selector = selector.as_object().filter(|selector| !selector.is_empty());
    selector.is_some_and(|selector| selector.iter().all(|(key, value)| labels.get(key) == Some(value)))
}

fn pod(rendered: &Rendered) -> &Value {
    &rendered.one("Deployment")["spec"]["template"]
}

/// The picker's Service.
fn service(rendered: &Rendered) -> &Value {
    rendered.named("Service", &rendered.one("Deployment")["metadata"]["name"])
}

/// The objects of a kind that have the picker's name. NATS servers have some of the same kinds.
fn of_picker<'a>(rendered: &'a Rendered, kind: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    let name = &rendered.one("Deployment")["metadata"]["name"];
    rendered.of(kind).filter(move |object| object["metadata"]["name"] == *name)
}

/// The picker's PodDisruptionBudget.
fn budget(rendered: &Rendered) -> &Value {
    rendered.named("PodDisruptionBudget", &rendered.one("Deployment")["metadata"]["name"])
}

fn containers(rendered: &Rendered) -> impl Iterator<Item = &Value> {
    let spec = &pod(rendered)["spec"];
    list(&spec["containers"]).iter().chain(list(&spec["initContainers"]))
}

/// The container port with this name or number. Kubernetes before 1.32 looks up names only in `containers`, not in
/// sidecars.
fn port(rendered: &Rendered, called: &Value) -> i64 {
    let mut named = list(&pod(rendered)["spec"]["containers"]).iter().flat_map(|container| list(&container["ports"]));
    let mut all = containers(rendered).flat_map(|container| list(&container["ports"]));
    let found = match called {
        Value::Number(_) => all.find(|port| port["containerPort"] == *called),
        name => named.find(|port| port["name"] == *name),
    };
    let found = found.unwrap_or_else(|| panic!("{}: no port {called}", rendered.name));
    found["containerPort"].as_i64().expect("a number")
}

#[test]
fn selectors_match_the_picker_pods_by_stable_labels() {
    for rendered in all() {
        let (name, labels) = (&rendered.name, &pod(rendered)["metadata"]["labels"]);
        let deployment = rendered.one("Deployment");
        let selector = &deployment["spec"]["selector"]["matchLabels"];
        assert!(selects(selector, labels), "{name}: the Deployment does not find its pods");
        // A Deployment's selector is immutable, so a version in it would block every upgrade.
        assert!(!selector.to_string().contains("version"), "{name}: {selector}");
        assert_eq!(&service(rendered)["spec"]["selector"], selector, "{name}");
        assert_eq!(&budget(rendered)["spec"]["selector"]["matchLabels"], selector, "{name}");
        for policy in of_picker(rendered, "NetworkPolicy") {
            assert_eq!(&policy["spec"]["podSelector"]["matchLabels"], selector, "{name}");
        }
        for constraint in list(&pod(rendered)["spec"]["topologySpreadConstraints"]) {
            assert_eq!(&constraint["labelSelector"]["matchLabels"], selector, "{name}");
        }
        for autoscaler in rendered.of("HorizontalPodAutoscaler") {
            let target = &autoscaler["spec"]["scaleTargetRef"];
            assert_eq!(target["name"], deployment["metadata"]["name"], "{name}");
            // Otherwise each `apply` would undo the autoscaler's change.
            assert!(deployment["spec"].get("replicas").is_none(), "{name}: both say how many replicas");
        }
        for monitor in rendered.of("ServiceMonitor") {
            let service = service(rendered);
            assert!(selects(&monitor["spec"]["selector"]["matchLabels"], &service["metadata"]["labels"]), "{name}");
            let metrics = &list(&monitor["spec"]["endpoints"])[0]["port"];
            assert!(list(&service["spec"]["ports"]).iter().any(|port| port["name"] == *metrics), "{name}: {metrics}");
        }
    }
}

#[test]
fn ports_match_from_the_pool_to_the_picker() {
    for rendered in all() {
        let name = &rendered.name;
        let service = service(rendered);
        for entry in list(&service["spec"]["ports"]) {
            let target = port(rendered, &entry["targetPort"]);
            assert_eq!(entry["port"].as_i64(), Some(target), "{name}: one number on both sides is easier to find");
        }
        for policy in of_picker(rendered, "NetworkPolicy") {
            let ports = list(&policy["spec"]["ingress"]).iter().flat_map(|rule| list(&rule["ports"]));
            let named: Vec<_> = ports.map(|entry| port(rendered, &entry["port"])).collect();
            assert!(named.len() >= 2, "{name}: {named:?}");
            if rendered.of("Service").count() > 1 {
                assert!(named.contains(&port(rendered, &json!("grpc"))), "{name}: Services that lead nowhere");
            }
            let bound = configuration_contains(rendered, "tcp://0.0.0.0:5557");
            assert!(!bound || named.contains(&5557), "{name}: publishers of KV events are kept out");
        }
        let flag = |flag: &str, default: i64| {
            let mut given =
                list(&rendered.picker()["args"]).iter().filter_map(|a| text(a).strip_prefix(flag)?.strip_prefix('='));
            given.next_back().map_or(default, |text| text.parse().expect("a port"))
        };
        let grpc = flag("--grpc-port", 9002);
        let named =
            [port(rendered, &json!("grpc")), port(rendered, &json!("grpc-health")), port(rendered, &json!("metrics"))];
        assert_eq!(named, [grpc, flag("--grpc-health-port", 9003), flag("--metrics-port", 9090)], "{name}");
        for pool in rendered.of("InferencePool") {
            let reference = [&pool["spec"]["endpointPickerRef"], &pool["spec"]["extensionRef"]];
            let reference = reference.into_iter().find(|r| !r.is_null()).unwrap_or_else(|| panic!("{name}: no picker"));
            assert_eq!(reference["name"], service["metadata"]["name"], "{name}");
            let number = reference["port"]["number"].as_i64().or(reference["portNumber"].as_i64());
            assert_eq!(number, Some(grpc), "{name}");
            // The pool is selected by a flag or the configuration, by its name or its labels.
            let (args, called) = (rendered.picker()["args"].to_string(), text(&pool["metadata"]["name"]));
            let config_map_contains = |what: &str| rendered.of("ConfigMap").any(|map| map.to_string().contains(what));
            let by_name = config_map_contains(&format!("{{pool: {called}}}"))
                || args.contains(&format!("--pool-name={called}\""));
            let by_label = config_map_contains("{poolSelector: serving=attache}")
                && pool["metadata"]["labels"]["serving"] == "attache";
            assert!(by_name != by_label, "{name}: {args}");
            assert_eq!(pool["metadata"]["namespace"], rendered.one("Deployment")["metadata"]["namespace"], "{name}");
        }
        for rule in rendered.of("DestinationRule") {
            let at = &service["metadata"];
            let host = format!("{}.{}.svc.cluster.local", text(&at["name"]), text(&at["namespace"]));
            assert_eq!(rule["spec"]["host"], host, "{name}");
            // Otherwise the TLS server name is `outbound|9002||…`, which is no DNS name.
            assert_eq!(rule["spec"]["trafficPolicy"]["tls"]["sni"], host, "{name}");
        }
        for route in rendered.of("HTTPRoute") {
            for backend in list(&route["spec"]["rules"]).iter().flat_map(|rule| list(&rule["backendRefs"])) {
                rendered.named("InferencePool", &backend["name"]);
            }
        }
        for objective in rendered.of("InferenceObjective") {
            rendered.named("InferencePool", &objective["spec"]["poolRef"]["name"]);
            assert!(rendered.picker()["args"].to_string().contains("--trust-client-headers=true"), "{name}: no effect");
        }
        for policy in rendered.of("GCPBackendPolicy").chain(rendered.of("HealthCheckPolicy")) {
            let (target, pool) = (&policy["spec"]["targetRef"], rendered.one("InferencePool"));
            assert_eq!(target["name"], pool["metadata"]["name"], "{name}");
            let group = text(&pool["apiVersion"]).split('/').next();
            assert_eq!(target["group"].as_str(), group, "{name}");
        }
    }
}

#[test]
fn probes_name_health_services_of_the_picker() {
    for rendered in all() {
        let picker = rendered.picker();
        let health = port(rendered, &json!("grpc-health"));
        let (liveness, readiness) = (&picker["livenessProbe"]["grpc"], &picker["readinessProbe"]["grpc"]);
        assert_eq!(liveness["service"], LIVENESS, "{}: readiness as liveness would restart what waits", rendered.name);
        assert!(READINESS.contains(&text(&readiness["service"])), "{}: {readiness}", rendered.name);
        assert_eq!([liveness["port"].as_i64(), readiness["port"].as_i64()], [Some(health); 2], "{}", rendered.name);
        let grace = pod(rendered)["spec"]["terminationGracePeriodSeconds"].as_u64().expect("a number");
        assert!(
            grace > Drain::default().deadline().as_secs(),
            "{}: killed after {grace} s, while draining",
            rendered.name
        );
        // The image has no shell for a hook, and draining needs none.
        assert!(picker.get("lifecycle").is_none(), "{}", rendered.name);
        for sidecar in list(&pod(rendered)["spec"]["initContainers"]) {
            assert_eq!(
                sidecar["restartPolicy"], "Always",
                "{}: a sidecar, or the picker would never start",
                rendered.name
            );
        }
    }
}

#[test]
fn mounts_secrets_and_role_bindings_refer_to_existing_objects() {
    for rendered in all() {
        let name = &rendered.name;
        let spec = &pod(rendered)["spec"];
        rendered.named("ServiceAccount", &spec["serviceAccountName"]);
        let volumes: BTreeSet<&str> = list(&spec["volumes"]).iter().map(|volume| text(&volume["name"])).collect();
        for certificate in rendered.of("Certificate") {
            let secret = &certificate["spec"]["secretName"];
            let mut mounted = list(&spec["volumes"]).iter().map(|volume| &volume["secret"]["secretName"]);
            assert!(mounted.any(|name| name == secret), "{name}: the secret {secret} is not mounted");
            let at = &service(rendered)["metadata"];
            let namespace = at["namespace"].as_str().unwrap_or("default");
            let host = format!("{}.{namespace}.svc.cluster.local", text(&at["name"]));
            assert!(list(&certificate["spec"]["dnsNames"]).contains(&json!(host)), "{name}: gateways ask for {host}");
        }
        for volume in list(&spec["volumes"]) {
            match &volume["configMap"]["name"] {
                Value::Null => assert!(volume.get("secret").is_some(), "{name}: {volume}"),
                map => assert!(rendered.named("ConfigMap", map)["data"].is_object(), "{name}: {map} is empty"),
            }
        }
        for mount in containers(rendered).flat_map(|container| list(&container["volumeMounts"])) {
            assert!(volumes.contains(text(&mount["name"])), "{name}: {mount}");
            assert_eq!(mount["readOnly"], true, "{name}: {mount}");
        }
        for (binding, role) in [("RoleBinding", "Role"), ("ClusterRoleBinding", "ClusterRole")] {
            assert_eq!(rendered.of(binding).count(), rendered.of(role).count(), "{name}");
            for bound in rendered.of(binding) {
                assert_eq!(bound["roleRef"]["kind"], role, "{name}");
                rendered.named(role, &bound["roleRef"]["name"]);
                for subject in list(&bound["subjects"]) {
                    let account = rendered.named("ServiceAccount", &subject["name"]);
                    // Without a namespace, a RoleBinding's subject is in the binding's namespace. The API server
                    // rejects such a ClusterRoleBinding.
                    let (named, own) = (&subject["namespace"], &account["metadata"]["namespace"]);
                    if binding == "RoleBinding" {
                        assert_eq!(named, own, "{name}");
                    } else {
                        assert_eq!(named, own.as_str().unwrap_or("default"), "{name}");
                    }
                }
            }
        }
    }
}

/// Group and resource of these kinds, as the picker's source names them.
fn watched(kinds: &[ObjectKind]) -> BTreeSet<(&'static str, &'static str)> {
    kinds.iter().map(|kind| (kind.naming().group, kind.naming().plural)).collect()
}

/// Whether the picker selects InferencePools by their labels.
fn has_pool_selector(rendered: &Rendered) -> bool {
    let by_flag = rendered.picker()["args"].to_string().contains("--pool-selector=");
    by_flag || configuration_contains(rendered, "poolSelector")
}

/// Whether a mounted configuration contains this text.
fn configuration_contains(rendered: &Rendered, what: &str) -> bool {
    rendered.of("ConfigMap").any(|map| map["data"].to_string().contains(what))
}

/// Whether a flag or a field of the configuration enables something.
fn is_enabled(rendered: &Rendered, flag: &str, field: &str) -> bool {
    let arguments = rendered.picker()["args"].to_string();
    let by_flag = [format!("\"{flag}\""), format!("\"{flag}=true\"")].iter().any(|on| arguments.contains(on));
    by_flag || configuration_contains(rendered, &format!("{field}: true"))
}

fn has_leader_election(rendered: &Rendered) -> bool {
    is_enabled(rendered, "--ha-enable-leader-election", "leaderElection")
}

#[test]
fn roles_grant_exactly_what_the_picker_needs() {
    let (mut search, mut reviews) = (0, 0);
    let read = ["list", "watch"].map(Value::from).to_vec();
    for rendered in all() {
        let (mut watches, mut others) = (BTreeSet::new(), BTreeSet::new());
        for rule in rendered.of("Role").chain(rendered.of("ClusterRole")).flat_map(|role| list(&role["rules"])) {
            for group in list(&rule["apiGroups"]).iter().map(text) {
                let resources = list(&rule["resources"]).iter().map(|resource| (group, text(resource)));
                if list(&rule["verbs"]) == read { watches.extend(resources) } else { others.extend(resources) }
            }
        }
        let mut needs = watched(&ObjectKind::OF_RULES);
        needs.extend(watched(&[ObjectKind::Pod]));
        if has_pool_selector(rendered) {
            search += 1;
            needs.extend(watched(&[ObjectKind::ConfigMap]));
        }
        if has_pool_selector(rendered)
            || rendered.of("InferencePool").count() > 0
            || configuration_contains(rendered, "{pool: ")
        {
            needs.extend(watched(&[ObjectKind::Pool(PoolGroup::Stable), ObjectKind::Pool(PoolGroup::Experimental)]));
        }
        assert_eq!(watches, needs, "{}", rendered.name);
        let mut asked = BTreeSet::new();
        if !rendered.picker()["args"].to_string().contains("--model-status=false") {
            asked.insert((ObjectKind::Model.naming().group, "inferencemodels/status"));
        }
        if has_leader_election(rendered) || is_enabled(rendered, "--model-status", "modelStatus") {
            asked.insert(("coordination.k8s.io", "leases"));
        }
        if is_enabled(rendered, "--metrics-endpoint-auth", "metricsAuth") {
            reviews += 1;
            asked.insert(("authentication.k8s.io", "tokenreviews"));
            asked.insert(("authorization.k8s.io", "subjectaccessreviews"));
        }
        assert_eq!(others, asked, "{}: the picker writes nothing else", rendered.name);
    }
    assert!(search >= 4, "by kustomize, and by both charts");
    assert!(reviews >= 3, "by kustomize, by a flag of a chart and by a configuration");
}

#[test]
fn unready_standby_pickers_block_neither_rollout_nor_drain() {
    let mut elect = 0;
    for rendered in all() {
        let rollout = &rendered.one("Deployment")["spec"]["strategy"]["rollingUpdate"];
        let budget = &budget(rendered)["spec"]["maxUnavailable"];
        if has_leader_election(rendered) {
            assert_eq!((&rollout["maxUnavailable"], budget), (&json!("100%"), &json!("100%")), "{}", rendered.name);
            elect += 1;
        } else {
            assert_eq!((&rollout["maxUnavailable"], budget), (&json!(0), &json!(1)), "{}", rendered.name);
        }
    }
    assert!(elect >= 3, "by kustomize, by a flag of a chart and by a configuration");
}

#[test]
fn pods_have_a_restricted_security_context() {
    for rendered in all() {
        for workload in rendered.of("Deployment").chain(rendered.of("StatefulSet")) {
            let spec = &workload["spec"]["template"]["spec"];
            let name = format!("{}: {}", rendered.name, workload["metadata"]["name"]);
            assert_eq!(spec["securityContext"]["runAsNonRoot"], true, "{name}");
            assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{name}");
            // Environment variables of Services must not be read as the picker's settings.
            assert_eq!(spec["enableServiceLinks"], false, "{name}");
            for container in list(&spec["containers"]).iter().chain(list(&spec["initContainers"])) {
                let (name, inner) = (format!("{name}: {}", container["name"]), &container["securityContext"]);
                assert_eq!(inner["allowPrivilegeEscalation"], false, "{name}");
                assert_eq!(inner["readOnlyRootFilesystem"], true, "{name}");
                assert_eq!(inner["capabilities"]["drop"], json!(["ALL"]), "{name}");
                assert!(container["resources"]["requests"]["memory"].is_string(), "{name}");
                assert!(container["resources"]["limits"].get("cpu").is_none(), "{name}: throttled");
                assert!(!text(&container["image"]).ends_with(":latest"), "{name}: {}", container["image"]);
            }
        }
    }
}

#[test]
fn image_matches_user_ports_and_entrypoint_of_the_manifests() {
    let dockerfile = std::fs::read_to_string(repository().join("Dockerfile")).expect("the Dockerfile");
    let line = |word: &str| {
        let mut lines = dockerfile.lines().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
        lines.next_back().unwrap_or_else(|| panic!("no {word} in the Dockerfile"))
    };
    let exposed: BTreeSet<i64> = line("EXPOSE").split(' ').map(|port| port.parse().expect("a port")).collect();
    for rendered in all().iter().filter(|rendered| rendered.name.starts_with("kustomize")) {
        let security = &pod(rendered)["spec"]["securityContext"];
        assert_eq!(line("USER"), format!("{}:{}", security["runAsUser"], security["runAsGroup"]), "{}", rendered.name);
        let ports = list(&rendered.picker()["ports"]).iter().filter_map(|port| port["containerPort"].as_i64());
        assert_eq!(ports.collect::<BTreeSet<_>>(), exposed, "{}", rendered.name);
        // `args` replace CMD after the entry point.
        assert!(rendered.picker().get("command").is_none(), "{}", rendered.name);
        assert_eq!(list(&rendered.picker()["args"])[0], "run", "{}", rendered.name);
    }
    assert_eq!(line("ENTRYPOINT"), r#"["/usr/local/bin/attache"]"#);
    assert_eq!(line("CMD"), r#"["run"]"#);
}

/// The number of peers that the rule of this port allows. 0 means every address, and `None` means no rule.
fn peers(policy: &Value, port: &Value) -> Option<usize> {
    let rules = list(&policy["spec"]["ingress"]).iter();
    let mut rules = rules.filter(|rule| list(&rule["ports"]).iter().any(|entry| entry["port"] == *port));
    let rule = rules.next()?;
    assert!(rules.next().is_none(), "one rule for a port");
    Some(list(&rule["from"]).len())
}

#[test]
fn chart_network_policy_allows_only_gateways_to_ext_proc_port() {
    for (chart, least) in [("inferencepool", POOL), ("standalone", STANDALONE)] {
        let rendered = helm(chart, least);
        let policy = rendered.one("NetworkPolicy");
        // Envoy in the same pod needs no rule.
        let expected = if chart == "standalone" { None } else { Some(2) };
        assert_eq!(peers(policy, &json!("grpc")), expected, "{chart}");
        assert_eq!(peers(policy, &json!("metrics")), Some(1), "{chart}");
        let servers = if chart == "standalone" { "endpointsServer: {endpointSelector: a=b}, " } else { "" };
        let pool = if chart == "standalone" { "" } else { least };
        let off = format!("{pool}inferenceExtension: {{{servers}networkPolicy: {{enabled: false}}}}\n");
        assert_eq!(helm(chart, &off).of("NetworkPolicy").count(), 0, "{chart}");
    }
    let beside = "inferenceExtension: {endpointsServer: {endpointSelector: app=llm}, poolServices: [a-epp]}\n";
    assert_eq!(peers(helm("standalone", beside).one("NetworkPolicy"), &json!("grpc")), Some(2));
    // GKE's load balancer connects from addresses outside of the cluster that the chart can't know.
    let gke = |more: &str| {
        helm(
            "inferencepool",
            &format!("{POOL}provider: {{name: gke}}\ninferenceExtension: {{networkPolicy: {{{more}}}}}\n"),
        )
    };
    assert_eq!(peers(gke("").one("NetworkPolicy"), &json!("grpc")), Some(0));
    assert_eq!(peers(gke("gatewayCIDRs: [10.129.0.0/23]").one("NetworkPolicy"), &json!("grpc")), Some(1));
    let labelled = "gatewayNamespaceLabels: {a: b}, gatewayPodLabels: {c: d}";
    let policy = gke(labelled);
    let from = &policy.one("NetworkPolicy")["spec"]["ingress"][0]["from"];
    let both = json!([{"namespaceSelector": {"matchLabels": {"a": "b"}}, "podSelector": {"matchLabels": {"c": "d"}}}]);
    assert_eq!(*from, both, "pods with these labels in namespaces with those");
}

#[test]
fn picker_with_mtls_reads_the_certificates_that_are_mounted() {
    let mut with = 0;
    for rendered in all() {
        let arguments: Vec<&str> = list(&rendered.picker()["args"]).iter().map(text).collect();
        let mounted = list(&rendered.picker()["volumeMounts"]).iter().any(|mount| mount["mountPath"] == "/tls");
        let asked = arguments.iter().filter(|argument| argument.starts_with("--client-ca-file=")).count();
        assert_eq!(asked, usize::from(mounted), "{}: {arguments:?}", rendered.name);
        if mounted {
            with += 1;
            for flag in ["--client-ca-file=/tls/ca.crt", "--cert-path=/tls", "--enable-cert-reload=true"] {
                assert!(arguments.contains(&flag), "{}: no {flag}", rendered.name);
            }
            assert!(!arguments.contains(&"--secure-serving=false"), "{}", rendered.name);
            for rule in rendered.of("DestinationRule") {
                let tls = &rule["spec"]["trafficPolicy"]["tls"];
                assert_eq!((&tls["mode"], &tls["credentialName"]), (&json!("MUTUAL"), &json!("gateway-to-picker")));
                assert_eq!(tls["subjectAltNames"], json!([rule["spec"]["host"]]), "{}", rendered.name);
            }
        }
    }
    assert!(with >= 4, "by kustomize and by both charts: {with}");
}

#[test]
fn base_sets_no_namespace() {
    let base = super::render::kustomize(&super::render::examples().join("base"));
    for object in &base.objects {
        let bound = list(&object["subjects"]).iter().map(|subject| &subject["namespace"]);
        for namespace in bound.chain([&object["metadata"]["namespace"]]) {
            assert!(namespace.is_null(), "{}: `kubectl apply -n` refuses {namespace}", object["kind"]);
        }
    }
}
