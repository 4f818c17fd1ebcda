//! InferencePools that a selector finds. Each is served, by the template or by its own configuration, while the object
//! exists.

use super::members::NO_METRICS;
use super::picks::{Picked, pick};
use crate::api::{FakeApi, NAMESPACE, STABLE, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::grpc::{Connection, PROCESS, request_body, request_headers};
use crate::support::process::eventually;
use serde_json::{Value, json};

/// Applies a pool of the tier `gold` with one pod, which gateways reach by the Service `<name>-epp`.
fn serve(api: &FakeApi, name: &str, ip: &str) {
    api.pod(pod(name, name, ip));
    api.apply(STABLE, "inferencepools", labelled(name, "gold"));
}

/// A pool of this tier, which gateways reach by the Service `<name>-epp`.
pub(crate) fn labelled(name: &str, tier: &str) -> Value {
    let mut pool = pool(name, name, &[8000]);
    pool["metadata"]["labels"] = json!({"tier": tier});
    pool["spec"]["endpointPickerRef"]["name"] = json!(format!("{name}-epp"));
    pool
}

fn config_map(name: &str, pool: &str, text: &str) -> Value {
    json!({"metadata": {"name": name, "labels": {"attache.dev/pool": pool}}, "data": {"attache.yaml": text}})
}

/// A pool's own configuration that rewrites the model `alias` to `model`.
fn own(model: &str) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools: [{{name: any, strategy: random, \
         modelRewrites: [{{model: alias, targets: [{{model: {model}}}]}}]}}]\n"
    )
}

async fn cluster() -> FakeApi {
    let api = FakeApi::start().await;
    api.install("v1", "configmaps");
    serve(&api, "small", "10.0.0.1");
    serve(&api, "large", "10.0.0.2");
    api.pod(pod("other", "other", "10.0.0.9"));
    api.apply(STABLE, "inferencepools", labelled("other", "iron"));
    api
}

/// A gateway's connection to the picker under this authority.
pub(crate) async fn called(picker: &AttacheProcess, authority: &str) -> Connection {
    Connection::open(picker.grpc).await.expect("a connection").called(authority)
}

async fn started(api: &FakeApi, more: &[&str]) -> AttacheProcess {
    let arguments = [&["--pool-selector", "tier in (gold)", NO_METRICS], more].concat();
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
    picker.until_ready().await;
    picker
}

async fn pools(picker: &AttacheProcess) -> Vec<String> {
    let dump = client::get(picker.metrics, "/config_dump").await.expect("the settings").json();
    let name = |pool: &Value| pool["name"].as_str().expect("a name").to_owned();
    dump["pools"].as_array().expect("pools").iter().map(name).collect()
}

async fn until_pools(picker: &AttacheProcess, want: &[&str]) {
    eventually(&format!("the pools {want:?}"), || async { (pools(picker).await == want).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pools_follow_inference_pools_and_are_chosen_by_service() {
    let api = cluster().await;
    let picker = started(&api, &[]).await;
    assert_eq!(pools(&picker).await, ["large", "small"], "all that are there, as soon as it is ready");
    // The authority of Envoy AI Gateway, the full name of a Service, and its short name.
    let small = called(&picker, &format!("small-epp.{NAMESPACE}.svc:9002")).await;
    let large = called(&picker, &format!("large-epp.{NAMESPACE}.svc.cluster.local:9002")).await;
    assert_eq!(pick(&small, "m").await.destination(), "10.0.0.1:8000");
    assert_eq!(pick(&large, "m").await.destination(), "10.0.0.2:8000");
    assert_eq!(pick(&called(&picker, "large-epp").await, "m").await.destination(), "10.0.0.2:8000");
    // A pool that the selector does not match, a pool that does not exist yet, and a Service of no pool.
    let huge = called(&picker, &format!("huge-epp.{NAMESPACE}.svc:9002")).await;
    for stranger in [&huge, &called(&picker, "other-epp").await, &called(&picker, "small-epp.elsewhere").await] {
        let Picked::Refused(404, body) = pick(stranger, "m").await else { panic!("somebody has answered") };
        assert!(body.contains("the gateway calls the picker"), "{body}");
    }

    serve(&api, "huge", "10.0.0.3");
    until_pools(&picker, &["huge", "large", "small"]).await;
    assert!(picker.is_ready().await, "a pool that comes later keeps nobody waiting");
    eventually("a pod of the new pool", || async {
        matches!(pick(&huge, "m").await, Picked::Endpoint { destination, .. } if destination == "10.0.0.3:8000")
            .then_some(())
    })
    .await;
    // The body of `/explain` does not name the Service, so the caller must name the pool.
    let body = bytes::Bytes::from_static(br#"{"model":"m","prompt":"hello"}"#);
    let explained = async |more: &str| {
        let path = format!("/explain?path=/v1/completions{more}");
        client::post(picker.metrics, &path, body.clone()).await.expect("an answer")
    };
    let (unnamed, misspelt) = (explained("").await, explained("&pool=smal").await);
    for (refused, says) in [(unnamed, "name the pool"), (misspelt, "there is no pool `smal`")] {
        let text = String::from_utf8_lossy(&refused.body).into_owned();
        assert_eq!(refused.status, 404, "{text}");
        assert!(text.contains(says) && text.contains("`huge`, `large`, `small`"), "{text}");
    }
    let told = explained("&pool=small").await.json();
    assert_eq!((&told["pool"], &told["picks"][0]), (&json!("small"), &json!("10.0.0.1:8000")), "{told}");
    // A request in flight completes although its pool is deleted.
    let mut stream = large.stream(PROCESS, &[]).await.expect("a stream");
    stream.send(&request_headers(&[(":path", b"/v1/completions"), (":method", b"POST")], false)).expect("headers");
    // Later requests on the same connection are processed after it.
    assert_eq!(pick(&large, "m").await.destination(), "10.0.0.2:8000");
    api.delete(STABLE, "inferencepools", "large");
    until_pools(&picker, &["huge", "small"]).await;
    assert!(matches!(pick(&large, "m").await, Picked::Refused(404, _)));
    let counted = async |pool: &str| {
        let page = client::get(picker.metrics, "/metrics").await.expect("the metrics");
        String::from_utf8_lossy(&page.body).matches(&format!("pool=\"{pool}\"")).count()
    };
    assert!(counted("small").await > 20);
    assert_eq!(counted("large").await, 0, "series of a pool that has gone would stay for ever");
    stream.send(&request_body(br#"{"model":"m","prompt":"hello"}"#, true)).expect("a body");
    let answer = stream.answer().await.expect("an answer").expect("a message");
    assert!(format!("{answer:?}").contains("10.0.0.2:8000"), "{answer:?}");

    // A changed label removes a pool. A changed Service moves it to another gateway.
    api.apply(STABLE, "inferencepools", labelled("small", "iron"));
    until_pools(&picker, &["huge"]).await;
    let mut moved = labelled("huge", "gold");
    moved["spec"]["endpointPickerRef"]["name"] = json!("small-epp");
    api.apply(STABLE, "inferencepools", moved);
    eventually("the pool behind its new Service", || async {
        matches!(pick(&small, "m").await, Picked::Endpoint { destination, .. } if destination == "10.0.0.3:8000")
            .then_some(())
    })
    .await;
    assert!(matches!(pick(&huge, "m").await, Picked::Refused(404, _)));
    assert_eq!(
        (api.request_count("list", "inferencepools"), api.request_count("watch", "inferencepools")),
        (1, 1),
        "shared by all"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_config_map_is_applied_and_reloaded() {
    let api = cluster().await;
    api.apply("v1", "configmaps", config_map("of-small", "small", &own("first")));
    // ConfigMaps of no pool and of another pool.
    api.apply("v1", "configmaps", json!({"metadata": {"name": "stranger"}, "data": {"a": "b"}}));
    api.apply("v1", "configmaps", config_map("of-nobody", "nobody", "nonsense"));
    let picker = started(&api, &["--strategy", "least-request"]).await;
    let (small, large) = (called(&picker, "small-epp").await, called(&picker, "large-epp").await);
    assert_eq!(pick(&small, "alias").await.model(), "first", "from the first request on");
    assert_eq!(pick(&large, "alias").await.model(), "alias", "its own and nobody else's");
    let until_model = async |model: &str| {
        eventually(&format!("requests for {model}"), || async {
            (pick(&small, "alias").await.model() == model).then_some(())
        })
        .await;
    };
    api.apply("v1", "configmaps", config_map("of-small", "small", &own("second")));
    until_model("second").await;
    // An invalid ConfigMap changes nothing, and the log names the mistake.
    api.apply("v1", "configmaps", config_map("of-small", "small", &own("third").replace("strategy", "strateggy")));
    eventually("the mistake in the log", || async {
        picker.process.stderr().contains("unknown field `strateggy`").then_some(())
    })
    .await;
    assert_eq!(pick(&small, "alias").await.model(), "second");
    for odd in ["endpoints: ['127.0.0.1:1']", "kubernetes: {pool: large}"] {
        let text = own("third").replace("strategy: random", odd);
        api.apply("v1", "configmaps", config_map("of-small", "small", &text));
    }
    // An EndpointPickerConfig works as well. Process-wide settings have no effect, which a warning says.
    let gie = "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]\n\
               schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]\n";
    api.apply("v1", "configmaps", config_map("of-small", "small", gie));
    until_model("alias").await;
    let text = format!("server: {{grpcPort: 1}}\n{}", own("fourth"));
    api.apply("v1", "configmaps", config_map("of-small", "small", &text));
    until_model("fourth").await;
    assert!(picker.process.stderr().contains("`server` has no effect"), "{}", picker.process.stderr());
    // Without a ConfigMap the pool follows the template.
    api.delete("v1", "configmaps", "of-small");
    until_model("alias").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn file_may_mix_pools_and_templates_and_reloads_both() {
    let api = cluster().await;
    // Rights on ConfigMaps are missing: pools are served by the template.
    api.forbid("list", "configmaps", true);
    let text = |selector: &str, model: &str| {
        format!(
            "apiVersion: attache.dev/v1\nkind: Attache\npools:\n\
             - {{name: named, match: {{service: named-epp}}, kubernetes: {{pool: other, engine: none}}}}\n\
             - {{name: found, modelRewrites: [{{model: alias, targets: [{{model: {model}}}]}}], \
             kubernetes: {{poolSelector: '{selector}', engine: none}}}}\n"
        )
    };
    let directory = crate::support::process::scratch("kube-templates");
    let file = directory.path().join("attache.yaml");
    std::fs::write(&file, text("tier=gold", "first")).expect("writing the configuration");
    let path = file.display().to_string();
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-file", &path]).await;
    picker.until_ready().await;
    until_pools(&picker, &["named", "large", "small"]).await;
    let (named, small) = (called(&picker, "named-epp.any:9002").await, called(&picker, "small-epp").await);
    assert_eq!(
        pick(&named, "alias").await,
        Picked::Endpoint { destination: "10.0.0.9:8000".into(), model: "alias".into() }
    );
    assert_eq!(pick(&small, "alias").await.model(), "first");

    std::fs::write(&file, text("tier=gold", "second")).expect("writing the configuration");
    eventually("the other model", || async { (pick(&small, "alias").await.model() == "second").then_some(()) }).await;
    // After a change of the selector, the newly found pools are served.
    std::fs::write(&file, text("tier in (gold,iron)", "second")).expect("writing the configuration");
    until_pools(&picker, &["named", "large", "other", "small"]).await;
    // The missing right is logged once.
    let rule = "resources: [configmaps], verbs: [list, watch]";
    let log = picker.process.stderr();
    let told: Vec<&str> = log.lines().filter(|line| line.contains(rule)).collect();
    assert!(told.len() == 1 && told[0].contains("\"level\":\"WARN\""), "{log}");
    // A found pool with the name of a configured pool is not served, which the log says.
    serve(&api, "named", "10.0.0.4");
    let told = &format!("the InferencePool `named` in namespace `{NAMESPACE}` is not served");
    eventually("the name that is taken", || async { picker.process.stderr().contains(told).then_some(()) }).await;
    assert_eq!(pick(&named, "alias").await.destination(), "10.0.0.9:8000");
    assert_eq!(pools(&picker).await, ["named", "large", "other", "small"]);
}

/// A configuration with one pool by pod labels and one template for all InferencePools with a label.
fn named_and_found() -> String {
    "apiVersion: attache.dev/v1\nkind: Attache\npools:\n\
     - {name: named, match: {service: named-epp}, kubernetes: {selector: app=other, targetPorts: [8000], engine: none}}\n\
     - {name: found, kubernetes: {poolSelector: tier=gold, engine: none}}\n"
        .to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_profile_file_does_not_block_new_pools() {
    let api = cluster().await;
    let directory = crate::support::process::scratch("kube-profile");
    let profile = directory.path().join("a100.json");
    let measured = json!({"gpu": "a100", "indexes": [[4, 8], [128, 256]], "tputs": [[9.0, 5.0], [7.0, 0.0]],
                          "e2e": [[0.3, 0.4], [0.5, 0.9]]});
    std::fs::write(&profile, measured.to_string()).expect("writing the profile");
    let by_profile = format!("strategy: {{name: slo, parameters: {{profiles: ['{}']}}}}, match", profile.display());
    let text = named_and_found().replacen("match", &by_profile, 1);
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-text", &text]).await;
    picker.until_ready().await;
    until_pools(&picker, &["named", "large", "small"]).await;
    std::fs::remove_file(&profile).expect("removing the profile");
    serve(&api, "huge", "10.0.0.3");
    until_pools(&picker, &["named", "huge", "large", "small"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_reload_keeps_the_pool_searches() {
    let api = cluster().await;
    let mut distant = labelled("distant", "gold");
    distant["metadata"]["namespace"] = json!("elsewhere");
    api.apply(STABLE, "inferencepools", distant);
    let directory = crate::support::process::scratch("kube-searches");
    let file = directory.path().join("attache.yaml");
    let here = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n\
                - {name: here, kubernetes: {poolSelector: tier=gold, engine: none}}\n";
    let there = "- {name: there, kubernetes: {poolSelector: tier=gold, namespace: elsewhere, engine: none}}\n";
    std::fs::write(&file, [here, there].concat()).expect("writing the configuration");
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-file", &file.display().to_string()]).await;
    picker.until_ready().await;
    until_pools(&picker, &["inference/large", "inference/small", "elsewhere/distant"]).await;
    // A new search in this namespace would find nothing.
    api.forbid_in("elsewhere", "list", "inferencepools", true);
    let named =
        "- {name: named, strategy: {name: slo, parameters: {profiles: [/nowhere.json]}}, endpoints: ['127.0.0.1:1']}\n";
    std::fs::write(&file, [here, named].concat()).expect("writing the configuration");
    let refused = || picker.process.stderr().contains("configuration reload failed").then_some(());
    eventually("the reload to be refused", || async { refused() }).await;
    serve(&api, "huge", "10.0.0.3");
    until_pools(&picker, &["inference/huge", "inference/large", "inference/small", "elsewhere/distant"]).await;
    assert_eq!(api.request_count("list", "inferencepools"), 2, "one for each namespace");
}

#[tokio::test(flavor = "multi_thread")]
async fn forbidden_pool_search_affects_only_its_own_pools() {
    let api = cluster().await;
    api.forbid("list", "inferencepools", true);
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-text", &named_and_found()]).await;
    picker.until_ready().await;
    let named = called(&picker, "named-epp").await;
    assert_eq!(pick(&named, "m").await.destination(), "10.0.0.9:8000");
    let told = format!(
        "refuses `list` on `inferencepools` (group `inference.networking.k8s.io`) in namespace `{NAMESPACE}`; the service account's Role \
         there needs `{{apiGroups: [inference.networking.k8s.io], resources: [inferencepools], verbs: [list, watch]}}`"
    );
    let asked = api.request_count("list", "inferencepools");
    eventually("two more tries", || async { (api.request_count("list", "inferencepools") > asked + 1).then_some(()) })
        .await;
    let log = picker.process.stderr();
    assert_eq!(log.lines().filter(|line| line.contains(&told)).count(), 1, "{log}");
    api.forbid("list", "inferencepools", false);
    until_pools(&picker, &["named", "large", "small"]).await;
    assert!(picker.is_ready().await, "what comes later keeps nobody waiting");

    // A picker without another pool is not ready, as without rights to its only pool.
    api.forbid("list", "inferencepools", true);
    let alone = AttacheProcess::in_cluster(&api.kubeconfig(), &["--pool-selector", "tier=gold", NO_METRICS]).await;
    let refused = || alone.process.stderr().contains(&told).then_some(());
    eventually("the missing right in the log", || async { refused() }).await;
    assert!(!alone.is_ready().await);
    api.forbid("list", "inferencepools", false);
    alone.until_ready().await;
    until_pools(&alone, &["large", "small"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_adds_a_pool_while_the_search_is_forbidden() {
    let api = cluster().await;
    api.forbid("list", "inferencepools", true);
    let whole = named_and_found();
    let without =
        whole.lines().filter(|line| !line.contains("name: named")).fold(String::new(), |all, line| all + line + "\n");
    let directory = crate::support::process::scratch("kube-reload-refused");
    let file = directory.path().join("attache.yaml");
    std::fs::write(&file, without).expect("writing the configuration");
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-file", &file.display().to_string()]).await;
    let refused = || picker.process.stderr().contains("refuses `list` on `inferencepools`").then_some(());
    eventually("the missing right in the log", || async { refused() }).await;
    assert!(!picker.is_ready().await, "there is nothing to serve");
    std::fs::write(&file, whole).expect("writing the configuration");
    picker.until_ready().await;
    assert_eq!(pick(&called(&picker, "named-epp").await, "m").await.destination(), "10.0.0.9:8000");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_pool_does_not_affect_others() {
    let api = cluster().await;
    let mut broken = labelled("small", "gold");
    broken["spec"]["selector"] = json!({});
    api.apply(STABLE, "inferencepools", broken);
    let picker = started(&api, &[]).await;
    assert_eq!(pick(&called(&picker, "large-epp").await, "m").await.destination(), "10.0.0.2:8000");
    let small = called(&picker, "small-epp").await;
    assert!(matches!(pick(&small, "m").await, Picked::Refused(503, _)), "as a pool without pods");
    assert_eq!(picker.metric("attache_kube_pool_unreadable").await, 1.0);
    api.apply(STABLE, "inferencepools", labelled("small", "gold"));
    eventually("the pool that is mended", || async {
        matches!(pick(&small, "m").await, Picked::Endpoint { destination, .. } if destination == "10.0.0.1:8000")
            .then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn same_pool_name_in_two_namespaces_makes_two_pools() {
    let api = cluster().await;
    for (n, namespace) in ["team-a", "team-b"].iter().enumerate() {
        for (m, name) in ["small", "large"].iter().enumerate() {
            let within = |mut object: Value| {
                object["metadata"]["namespace"] = json!(namespace);
                object
            };
            api.pod(within(pod(name, name, &format!("10.{}.0.{}", n + 1, m + 1))));
            api.apply(STABLE, "inferencepools", within(labelled(name, "gold")));
        }
    }
    let text = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n\
                - {name: a, kubernetes: {poolSelector: tier=gold, namespace: team-a, engine: none}}\n\
                - {name: b, kubernetes: {poolSelector: tier=gold, namespace: team-b, engine: none}}\n";
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-text", text]).await;
    picker.until_ready().await;
    until_pools(&picker, &["team-a/large", "team-a/small", "team-b/large", "team-b/small"]).await;
    for (namespace, destination) in [("team-a", "10.1.0.1:8000"), ("team-b", "10.2.0.1:8000")] {
        let small = called(&picker, &format!("small-epp.{namespace}.svc:9002")).await;
        assert_eq!(pick(&small, "m").await.destination(), destination, "its own pods");
    }
    let page = client::get(picker.metrics, "/metrics").await.expect("the metrics");
    let page = String::from_utf8_lossy(&page.body).into_owned();
    for (name, endpoint) in [("team-a/small", "10.1.0.1:8000"), ("team-b/small", "10.2.0.1:8000")] {
        let series = format!("attache_endpoint_requests_total{{pool=\"{name}\",endpoint=\"{endpoint}\"}} 1");
        assert!(page.contains(&series), "{name} is counted by itself: {page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pools_behind_two_ports_of_one_service_are_distinguished() {
    let api = cluster().await;
    for (name, port) in [("small", 9002), ("large", 9012)] {
        let mut pool = labelled(name, "gold");
        pool["spec"]["endpointPickerRef"] = json!({"name": "shared-epp", "port": {"number": port}});
        api.apply(STABLE, "inferencepools", pool);
    }
    let picker = started(&api, &[]).await;
    let small = called(&picker, &format!("shared-epp.{NAMESPACE}.svc:9002")).await;
    let large = called(&picker, &format!("outbound~9012~~shared-epp.{NAMESPACE}.svc.cluster.local")).await;
    assert_eq!(pick(&small, "m").await.destination(), "10.0.0.1:8000");
    assert_eq!(pick(&large, "m").await.destination(), "10.0.0.2:8000");
}

#[tokio::test(flavor = "multi_thread")]
async fn config_map_with_several_keys_needs_an_annotation() {
    let api = cluster().await;
    // As in GIE's chart: the default file beside the file that is used.
    let two = |key: Option<&str>| {
        let mut map = config_map("of-small", "small", &own("chosen"));
        map["data"]["default-plugins.yaml"] = json!("of another picker");
        if let Some(key) = key {
            map["metadata"]["annotations"] = json!({"attache.dev/config-key": key});
        }
        map
    };
    api.apply("v1", "configmaps", two(Some("attache.yaml")));
    let picker = started(&api, &[]).await;
    let small = called(&picker, "small-epp").await;
    assert_eq!(pick(&small, "alias").await.model(), "chosen");
    for (odd, says) in [
        (
            two(None),
            "has 2 keys (`attache.yaml`, `default-plugins.yaml`): the annotation `attache.dev/config-key` must name",
        ),
        (two(Some("attache.yml")), "names `attache.yml`, which is no key of `data`; there are: `attache.yaml`"),
    ] {
        api.apply("v1", "configmaps", odd);
        eventually(says, || async { picker.process.stderr().contains(says).then_some(()) }).await;
        assert_eq!(pick(&small, "alias").await.model(), "chosen", "what was known of it stays");
    }
}

/// Envoy in the picker's pod, as in GIE's and llm-d's standalone charts, calls it `localhost:9002`.
#[tokio::test(flavor = "multi_thread")]
async fn sidecar_gateway_reaches_the_only_pool_by_localhost() {
    let api = FakeApi::start().await;
    api.install("v1", "configmaps");
    serve(&api, "small", "10.0.0.1");
    let picker = started(&api, &[]).await;
    let beside = called(&picker, "localhost:9002").await;
    assert_eq!(pick(&beside, "m").await.destination(), "10.0.0.1:8000");
    let Picked::Refused(404, _) = pick(&called(&picker, "other-epp").await, "m").await else { panic!("answered") };
    serve(&api, "large", "10.0.0.2");
    until_pools(&picker, &["large", "small"]).await;
    let Picked::Refused(404, _) = pick(&beside, "m").await else { panic!("which of the two is not known") };
}
