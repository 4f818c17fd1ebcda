//! Attaché inside the Envoy of a gateway: the parts of each manifest fit together, and real Envoy serves by them.

use super::picker::{attache, refused};
use super::render::{Rendered, documents, examples, list, text};
use crate::support::body::{Payload, chat};
use crate::support::client;
use crate::support::echo::Echo;
use crate::support::envoy::library_folder;
use crate::support::inside::{Inside, inside_bootstrap};
use crate::support::process::{eventually, scratch};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;

const TYPE: &str = "type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilter";

fn example(file: &str) -> Rendered {
    let text = std::fs::read_to_string(examples().join("inside-envoy").join(file)).expect("an example");
    Rendered { name: file.to_owned(), objects: documents(file, &text) }
}

/// Where Envoy's pods have the library and the configuration, and that configuration.
struct Mounted {
    library: String,
    file: String,
    configuration: String,
}

/// Checks the parts of a pod: the init container copies the library to where Envoy's container has it.
fn mounted(example: &Rendered, init: &Value, container: &Value, volumes: &Value) -> Mounted {
    let name = &example.name;
    assert_eq!(refused(list(&init["args"])), None, "{name}");
    let copied = &list(&init["volumeMounts"])[0];
    assert_eq!(init["args"], json!(["envoy-module", "--copy-to", copied["mountPath"]]), "{name}");
    let mount = |volume: &Value| {
        let mounts = list(&container["volumeMounts"]);
        let mount = mounts.iter().find(|mount| mount["name"] == *volume).unwrap_or_else(|| panic!("{name}: {volume}"));
        text(&mount["mountPath"]).to_owned()
    };
    let volume = |is: &dyn Fn(&Value) -> bool| {
        list(volumes).iter().find(|volume| is(volume)).unwrap_or_else(|| panic!("{name}: a volume is missing"))
    };
    let modules = volume(&|volume| volume["name"] == copied["name"] && volume["emptyDir"].is_object());
    let settings = volume(&|volume| volume["configMap"].is_object());
    let data = &example.named("ConfigMap", &settings["configMap"]["name"])["data"];
    let (key, configuration) = data.as_object().and_then(|data| data.iter().next()).expect("a file");
    Mounted {
        library: format!("{}/libattache_envoy.so", mount(&modules["name"])),
        file: format!("{}/{key}", mount(&settings["name"])),
        configuration: text(configuration).to_owned(),
    }
}

/// The route leads to the Service whose pods Attaché finds, and the picker accepts the configuration for this use.
fn assert_consistent(example: &Rendered, mounted: &Mounted) {
    let name = &example.name;
    let route = &example.one("HTTPRoute")["spec"];
    let backend = &route["rules"][0]["backendRefs"][0];
    let service = example.named("Service", &backend["name"]);
    assert_eq!(service["spec"]["clusterIP"], "None", "{name}: DNS names the pods");
    assert_eq!(service["spec"]["ports"][0]["port"], backend["port"], "{name}");
    assert_eq!(route["rules"][0]["timeouts"]["request"], "0s", "{name}");
    example.named("Gateway", &route["parentRefs"][0]["name"]);
    let pool = &documents(name, &mounted.configuration)[0]["pools"][0];
    let at = &service["metadata"];
    let host = format!("{}.{}.svc.cluster.local", text(&at["name"]), text(&at["namespace"]));
    assert_eq!(pool["dns"], json!([{"host": host, "port": backend["port"]}]), "{name}");
    let directory = scratch("inside-manifest");
    let file = directory.path().join("config.yaml");
    std::fs::write(&file, &mounted.configuration).expect("writing");
    let output = attache(&["check", "--inside", "--deny-warnings", file.to_str().expect("a path")]);
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Real Envoy serves by the shipped bootstrap with `edit`, which gets the filter list, the cluster and the whole. The
/// paths of the pod become those of this machine, and only the last one of four servers is in the pool.
async fn assert_serves(mounted: &Mounted, edit: impl FnOnce(&mut Value)) {
    let echoes = [Echo::start().await, Echo::start().await, Echo::start().await, Echo::start().await];
    let servers: [SocketAddr; 4] = [0, 1, 2, 3].map(|i: usize| echoes[i].address);
    let files = scratch("inside-gateway");
    let file = files.path().join("config.yaml");
    let mut configuration = documents("the pool", &mounted.configuration).remove(0);
    let pool = configuration["pools"][0].as_object_mut().expect("a pool");
    assert!(pool.remove("dns").is_some());
    pool.insert("endpoints".to_owned(), json!([servers[3].to_string()]));
    std::fs::write(&file, configuration.to_string()).expect("writing");
    let mut bootstrap = documents("inside.yaml", &inside_bootstrap(Path::new("unused"), servers)).remove(0);
    edit(&mut bootstrap);
    let library = library_folder().join("libattache_envoy.so");
    let text = bootstrap.to_string();
    assert!(text.contains(&mounted.library) && text.contains(&mounted.file), "{text}");
    let text = text.replace(&mounted.library, &library.display().to_string());
    let inside = Inside::by(&text.replace(&mounted.file, &file.display().to_string()), files).await;
    // Without the bootstrap extension, Envoy does not wait.
    eventually("a picker that decides", || async { inside.envoy.log().contains("requests are decided").then_some(()) })
        .await;
    let spoof = servers[0].to_string();
    for number in 0..6 {
        let body = Payload::sized(chat(300, false, number));
        let mut request = client::request("POST", inside.clients(), client::Http::H1, "/v1/chat/completions", body);
        request.headers_mut().insert("x-gateway-destination-endpoint", spoof.parse().expect("a header"));
        let reply = client::send(inside.clients(), client::Http::H1, request).await.expect("an answer");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        assert_eq!(reply.header("x-echo-server"), servers[3].to_string());
    }
    let books = inside.assert_settled().await;
    assert_eq!(books.outcomes.get("routed"), Some(&6), "{books:?}");
}

fn filters(bootstrap: &mut Value) -> &mut Value {
    &mut bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
}

/// Opens the admin port of Attaché, which tests read.
fn open_admin_port(settings: &mut Value) {
    settings["admin"] = json!("127.0.0.1:0");
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_gateway_manifest_fits_together_and_serves() {
    let example = example("envoy-gateway.yaml");
    let proxy = &example.one("EnvoyProxy")["spec"];
    let deployment = &proxy["provider"]["kubernetes"]["envoyDeployment"];
    let (init, container) = (&deployment["initContainers"][0], &deployment["container"]);
    let mounted = mounted(&example, init, container, &deployment["pod"]["volumes"]);
    assert_consistent(&example, &mounted);
    let module = &proxy["dynamicModules"][0];
    assert_eq!(module["source"], json!({"type": "Local", "local": {"path": mounted.library}}));
    assert_eq!(module["doNotClose"], true);
    let filter = &example.one("EnvoyExtensionPolicy")["spec"]["dynamicModule"][0];
    assert_eq!(filter["name"], module["name"]);
    let policy = &example.one("BackendTrafficPolicy")["spec"];
    assert_eq!(policy["timeout"]["http"]["connectionIdleTimeout"], "4s");
    let header = &policy["loadBalancer"]["endpointOverride"]["extractFrom"][0]["header"];
    let early = &example.one("ClientTrafficPolicy")["spec"]["headers"]["earlyRequestHeaders"]["remove"];
    assert_eq!(*early, json!([header]), "clients name no server");
    // As Envoy Gateway translates them.
    let mut settings = filter["config"].clone();
    open_admin_port(&mut settings);
    assert_serves(&mounted, |bootstrap| {
        bootstrap.as_object_mut().expect("a bootstrap").remove("bootstrap_extensions");
        filters(bootstrap)[0] = json!({"name": "attache", "typed_config": {
            "@type": TYPE,
            "dynamic_module_config": {
                "module": {"local": {"filename": module["source"]["local"]["path"]}},
                "do_not_close": module["doNotClose"],
            },
            "filter_name": filter["filterName"],
            "filter_config": {
                "@type": "type.googleapis.com/google.protobuf.StringValue", "value": settings.to_string(),
            },
        }});
        let policies = &mut bootstrap["static_resources"]["clusters"][0]["load_balancing_policy"]["policies"];
        let policy = policies[0]["typed_extension_config"]["typed_config"].as_object_mut().expect("a policy");
        policy.remove("selected_host_key");
        policy.insert("override_host_sources".to_owned(), json!([{"header": header}]));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn istio_manifest_fits_together_and_serves() {
    let example = example("istio.yaml");
    let gateway = example.one("Gateway");
    let overlay = example.named("ConfigMap", &gateway["spec"]["infrastructure"]["parametersRef"]["name"]);
    let overlay = documents("deployment", text(&overlay["data"]["deployment"])).remove(0);
    let pod = &overlay["spec"]["template"]["spec"];
    let mounted = mounted(&example, &pod["initContainers"][0], &pod["containers"][0], &pod["volumes"]);
    assert_eq!(pod["containers"][0]["name"], "istio-proxy");
    assert_consistent(&example, &mounted);
    let spec = &example.one("EnvoyFilter")["spec"];
    let name = &spec["workloadSelector"]["labels"]["gateway.networking.k8s.io/gateway-name"];
    assert_eq!(*name, gateway["metadata"]["name"]);
    let patch = |kind: &str| {
        let found = list(&spec["configPatches"]).iter().find(|patch| patch["applyTo"] == kind);
        found.unwrap_or_else(|| panic!("no patch of {kind}"))
    };
    let pool = &documents("the pool", &mounted.configuration)[0]["pools"][0]["dns"][0];
    assert_eq!(patch("CLUSTER")["match"]["cluster"], json!({"service": pool["host"], "portNumber": pool["port"]}));
    let merged = &patch("CLUSTER")["patch"]["value"];
    let options = &merged["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
    assert_eq!(options["common_http_protocol_options"]["idle_timeout"], "4s");
    assert_serves(&mounted, |bootstrap| {
        bootstrap["bootstrap_extensions"] = patch("BOOTSTRAP")["patch"]["value"]["bootstrap_extensions"].clone();
        let extension = &mut bootstrap["bootstrap_extensions"][0]["typed_config"]["value"];
        open_admin_port(&mut extension["extension_config"]["value"]);
        filters(bootstrap)[0] = patch("HTTP_FILTER")["patch"]["value"].clone();
        let cluster = bootstrap["static_resources"]["clusters"][0].as_object_mut().expect("a cluster");
        cluster.extend(merged.as_object().expect("keys").clone());
    })
    .await;
}
