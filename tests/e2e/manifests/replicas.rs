//! Pickers that share their state: what the charts and the components give them, and the NATS servers of the component
//! `nats`.

use super::agree::selects;
use super::charts::PICKER_CONFIG;
use super::picker::configuration;
use super::render::{POOL, Rendered, SYNC, all, helm, list, text};
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::echo::Echo;
use crate::support::nats;
use crate::support::process::{Process, eventually, repository, scratch};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

/// The base with this component.
fn component(name: &str) -> &'static Rendered {
    let name = format!("base with {name}");
    all().iter().find(|rendered| rendered.name == name).unwrap_or_else(|| panic!("no {name}"))
}

/// A chart with its required values, and with more values of `inferenceExtension`.
fn chart(chart: &str, more: &str) -> Rendered {
    match chart {
        "standalone" => {
            helm(chart, &format!("inferenceExtension: {{endpointsServer: {{endpointSelector: app=llm}}, {more}}}\n"))
        }
        _ => helm(chart, &format!("{POOL}inferenceExtension: {{{more}}}\n")),
    }
}

fn arguments(rendered: &Rendered) -> Vec<&str> {
    list(&rendered.picker()["args"]).iter().map(text).collect()
}

/// The text of the configuration that the picker reads.
fn config(rendered: &Rendered) -> &str {
    let mut files = arguments(rendered).into_iter().filter_map(|flag| flag.strip_prefix("--config-file=/config/"));
    let file = files.next().expect("a file");
    text(&rendered.named("ConfigMap", &rendered.one("Deployment")["metadata"]["name"])["data"][file])
}

fn read(config: &str) -> Value {
    serde_saphyr::from_str(config).unwrap_or_else(|error| panic!("{config}: {error}"))
}

/// The environment variable of a container with this name.
fn variable<'a>(container: &'a Value, name: &str) -> &'a Value {
    let found = list(&container["env"]).iter().find(|variable| variable["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {}", container["env"]))
}

/// The Secrets that the picker mounts, by their directories.
fn mounted_secrets(rendered: &Rendered) -> BTreeMap<&str, &str> {
    let volumes = list(&rendered.one("Deployment")["spec"]["template"]["spec"]["volumes"]);
    let mut found = BTreeMap::new();
    for mount in list(&rendered.picker()["volumeMounts"]) {
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).expect("its volume");
        if let Some(secret) = volume["secret"]["secretName"].as_str() {
            found.insert(text(&mount["mountPath"]), secret);
        }
    }
    found
}

#[test]
fn pickers_that_share_state_are_named_by_their_pods_and_all_route() {
    let mut shared = 0;
    for rendered in all() {
        let (name, arguments) = (&rendered.name, arguments(rendered));
        let named: Vec<_> = arguments.iter().filter(|argument| argument.starts_with("--sync-name")).collect();
        let [named] = named[..] else {
            assert!(named.is_empty() && !config(rendered).contains("\nsync:"), "{name}: {arguments:?}");
            continue;
        };
        assert_eq!(*named, "--sync-name=$(POD_NAME)", "{name}");
        let field = &variable(rendered.picker(), "POD_NAME")["valueFrom"]["fieldRef"]["fieldPath"];
        assert_eq!(*field, "metadata.name", "{name}");
        assert!(!arguments.iter().any(|argument| argument.contains("leader-election")), "{name}: {arguments:?}");
        shared += 1;
    }
    assert!(shared >= 6, "by two components, and by both charts: {shared}");
}

#[test]
fn chart_values_of_sync_reach_the_configuration() {
    let expected = json!({
        "keyFile": "/sync/key/sync.key",
        "waitForSnapshot": "10s",
        "nats": {
            "servers": ["tls://nats-0.nats:4222", "tls://nats-1.nats:4222"],
            "subjectPrefix": "attache.inference.llm",
            "credentials": "/sync/credentials/nats.creds",
            "tls": {"caFile": "/sync/ca/ca.crt", "certFile": "/sync/cert/tls.crt", "keyFile": "/sync/cert/tls.key"},
        },
    });
    let secrets = BTreeMap::from([
        ("/sync/ca", "nats-ca"),
        ("/sync/cert", "picker"),
        ("/sync/credentials", "nats-user"),
        ("/sync/key", "pickers"),
    ]);
    for name in ["inferencepool", "standalone"] {
        let rendered = chart(name, SYNC);
        assert_eq!(read(config(&rendered))["sync"], expected, "{name}");
        assert_eq!(mounted_secrets(&rendered), secrets, "{name}");
        let prefix = chart(name, "sync: {nats: {servers: ['nats://nats:4222'], subjectPrefix: prod.chat}}");
        assert_eq!(read(config(&prefix))["sync"]["nats"]["subjectPrefix"], "prod.chat", "{name}");
        assert!(mounted_secrets(&prefix).is_empty(), "{name}");
    }
}

#[test]
fn change_of_sync_replaces_the_pods() {
    let annotations = |more: &str| {
        let rendered = chart("inferencepool", more);
        rendered.one("Deployment")["spec"]["template"]["metadata"]["annotations"].clone()
    };
    assert_eq!(annotations("replicas: 2"), Value::Null);
    let (one, other) = (annotations(SYNC), annotations(&SYNC.replace("nats-1", "nats-2")));
    assert!(one["checksum/sync"].is_string() && one != other, "{one} {other}");
}

#[test]
fn sync_is_added_to_a_configuration_in_any_form() {
    let pool = "{name: a, kubernetes: {pool: llm}}";
    let forms = [
        format!("# Comment\napiVersion: attache.dev/v1\nkind: Attache\npools: [{pool}]"),
        format!("apiVersion: attache.dev/v1\nkind: Attache\npools:\n- {pool}\n...\n"),
        format!("{{apiVersion: attache.dev/v1, kind: Attache, server: {{seed: 4000000}}, pools: [{pool}]}}\n"),
    ];
    for form in forms {
        let values = json!({
            "inferencePool": {"modelServers": {"matchLabels": {"app": "llm"}}},
            "inferenceExtension": {
                "pluginsConfigFile": "a.yaml",
                "pluginsCustomConfig": {"a.yaml": form, "b.yaml": form},
                "sync": {"nats": {"servers": ["nats://nats:4222"]}},
            },
        });
        let rendered = helm("inferencepool", &values.to_string());
        configuration(&form, config(&rendered));
        let (before, mut after) = (read(&form), read(config(&rendered)));
        let sync = after.as_object_mut().and_then(|keys| keys.remove("sync")).unwrap_or_default();
        assert_eq!(sync["nats"]["servers"], json!(["nats://nats:4222"]), "{form}");
        assert_eq!(after, before);
        let other = &rendered.named("ConfigMap", &"llm-epp".into())["data"]["b.yaml"];
        assert_eq!(read(text(other)), before, "a configuration that is not used");
    }
}

#[test]
fn endpoint_picker_config_gets_nats_servers_by_flags_or_a_secret() {
    let file = format!("pluginsConfigFile: a.yaml, {PICKER_CONFIG}");
    let servers = "sync: {nats: {servers: ['nats://a:4222', 'nats://b:4222']}}";
    let secret = "sync: {nats: {serversSecret: nats}}";
    for name in ["inferencepool", "standalone"] {
        let rendered = chart(name, &format!("{servers}, {file}"));
        let arguments = arguments(&rendered);
        for flag in ["--sync-nats-url=nats://a:4222", "--sync-nats-url=nats://b:4222"] {
            assert!(arguments.contains(&flag), "{name}: {arguments:?}");
        }
        for file in [file.as_str(), "replicas: 2"] {
            let rendered = chart(name, &format!("{secret}, {file}"));
            assert!(!rendered.picker()["args"].to_string().contains("--sync-nats-url"), "{name}");
            let key = &variable(rendered.picker(), "ATTACHE_SYNC_NATS_URL")["valueFrom"]["secretKeyRef"];
            assert_eq!(*key, json!({"name": "nats", "key": "url"}), "{name}");
        }
    }
}

#[test]
fn sync_component_mounts_the_secret_that_names_the_servers() {
    let rendered = component("sync");
    let key = &variable(rendered.picker(), "ATTACHE_SYNC_NATS_URL")["valueFrom"]["secretKeyRef"];
    assert_eq!(*key, json!({"name": "llm-epp-sync", "key": "url"}));
    assert_eq!(mounted_secrets(rendered), BTreeMap::from([("/sync", "llm-epp-sync")]));
}

/// The NATS container of the component.
fn server() -> &'static Value {
    &list(&component("nats").one("StatefulSet")["spec"]["template"]["spec"]["containers"])[0]
}

/// The port of the NATS container with this name.
fn port(name: &Value) -> &'static Value {
    let port = list(&server()["ports"]).iter().find(|port| port["name"] == *name);
    &port.unwrap_or_else(|| panic!("no port {name}"))["containerPort"]
}

#[test]
fn nats_objects_refer_to_each_other() {
    let rendered = component("nats");
    let set = rendered.one("StatefulSet");
    let (name, selector) = (&set["metadata"]["name"], &set["spec"]["selector"]["matchLabels"]);
    let pod = &set["spec"]["template"];
    assert!(selects(selector, &pod["metadata"]["labels"]));
    assert!(!selects(selector, &rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"]));
    let budget = json!({"maxUnavailable": 1, "selector": {"matchLabels": selector}});
    assert_eq!(rendered.named("PodDisruptionBudget", name)["spec"], budget);
    let constraints = list(&pod["spec"]["topologySpreadConstraints"]);
    let keys: Vec<&str> = constraints.iter().map(|constraint| text(&constraint["topologyKey"])).collect();
    assert_eq!(keys, ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]);
    assert!(constraints.iter().all(|constraint| constraint["labelSelector"]["matchLabels"] == *selector));
    let (client, headless) = (rendered.named("Service", name), rendered.named("Service", &set["spec"]["serviceName"]));
    assert_eq!(headless["spec"]["clusterIP"], "None");
    // Otherwise servers that start together would wait for each other.
    assert_eq!(headless["spec"]["publishNotReadyAddresses"], true);
    for service in [client, headless] {
        assert_eq!(service["spec"]["selector"], *selector);
        for entry in list(&service["spec"]["ports"]) {
            assert_eq!(&entry["port"], port(&entry["targetPort"]));
        }
    }
    for probe in ["livenessProbe", "readinessProbe"] {
        assert_eq!(port(&server()[probe]["httpGet"]["port"]), 8222);
    }
    let mount = &server()["volumeMounts"][0];
    assert_eq!(*mount, json!({"name": "config", "mountPath": "/etc/nats", "readOnly": true}));
    let volume = &pod["spec"]["volumes"][0];
    assert!(rendered.named("ConfigMap", &volume["configMap"]["name"])["data"]["nats.conf"].is_string());
    let routes = text(&variable(server(), "NATS_ROUTES")["value"]);
    let replicas = set["spec"]["replicas"].as_u64().expect("a number");
    assert_eq!(routes.matches("nats-route://").count() as u64, replicas);
    for n in 0..replicas {
        let host = format!("@{}-{n}.{}:{}\"", text(name), text(&set["spec"]["serviceName"]), port(&json!("cluster")));
        assert!(routes.contains(&host), "{host} is not in {routes}");
    }
    let url = text(&variable(rendered.picker(), "ATTACHE_SYNC_NATS_URL")["value"]);
    assert!(url.ends_with(&format!("@{}:{}", text(name), port(&json!("client")))), "{url}");
    let password = |container: &Value, name: &str| variable(container, name)["valueFrom"]["secretKeyRef"].clone();
    assert_eq!(password(rendered.picker(), "NATS_PASSWORD"), password(server(), "PICKER_PASSWORD"));
    assert!(!config(rendered).contains("password"));
}

#[test]
fn only_pickers_and_nats_servers_reach_nats() {
    let rendered = component("nats");
    let set = rendered.one("StatefulSet");
    let policy = &rendered.named("NetworkPolicy", &set["metadata"]["name"])["spec"];
    let servers = &set["spec"]["selector"]["matchLabels"];
    let pickers = &rendered.one("Deployment")["spec"]["selector"]["matchLabels"];
    assert_eq!(policy["podSelector"]["matchLabels"], *servers);
    assert_eq!(policy["policyTypes"], json!(["Ingress"]));
    // Without a selector of namespaces, a rule is for the policy's own.
    let rule = |labels: &Value, port: &str| {
        let ports = json!([{"port": port, "protocol": "TCP"}]);
        json!({"from": [{"podSelector": {"matchLabels": labels}}], "ports": ports})
    };
    assert_eq!(policy["ingress"], json!([rule(pickers, "client"), rule(servers, "cluster")]));
    assert_eq!([port(&json!("client")), port(&json!("cluster"))], [&json!(4222), &json!(6222)]);
    for rendered in all() {
        for policy in rendered.of("NetworkPolicy") {
            assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress"]), "{}: the picker needs NATS", rendered.name);
        }
    }
}

#[test]
fn nats_image_is_the_tested_version() {
    let tested = std::fs::read_to_string(repository().join("tests/nats-requirements.txt")).expect("the version");
    let (_, tested) = tested.trim().split_once("==").expect("a version");
    assert_eq!(server()["image"], format!("docker.io/library/nats:{tested}-alpine"));
}

/// The Secret of the component. A password of digits must not be read as a number.
const SECRET: &[(&str, &str)] = &[("password", "20261127"), ("route-password", "1234567890")];

/// A value with the variables in it replaced, as the kubelet does.
fn expanded(value: &str, variables: &[(String, String)]) -> String {
    variables.iter().fold(value.to_owned(), |value, (name, with)| value.replace(&format!("$({name})"), with))
}

/// The environment of a container, as the kubelet sets it.
fn environment(container: &Value, pod: &str) -> Vec<(String, String)> {
    let mut out: Vec<(String, String)> = Vec::new();
    for variable in list(&container["env"]) {
        let from = &variable["valueFrom"];
        let value = match (variable["value"].as_str(), from["secretKeyRef"]["key"].as_str()) {
            (Some(value), _) => expanded(value, &out),
            (None, Some(key)) => {
                let found = SECRET.iter().find(|(name, _)| *name == key);
                found.unwrap_or_else(|| panic!("no {key} in the Secret")).1.to_owned()
            }
            (None, None) => match text(&from["fieldRef"]["fieldPath"]) {
                "metadata.name" => pod.to_owned(),
                "metadata.namespace" => "default".to_owned(),
                other => panic!("a field called {other}"),
            },
        };
        out.push((text(&variable["name"]).to_owned(), value));
    }
    out
}

/// The NATS servers of the component, on ports of this machine, with the ports of their clients.
async fn start_servers() -> Vec<(Process, SocketAddr)> {
    let rendered = component("nats");
    let set = rendered.one("StatefulSet");
    let (name, headless) = (text(&set["metadata"]["name"]), text(&set["spec"]["serviceName"]));
    let replicas = set["spec"]["replicas"].as_u64().expect("a number") as usize;
    let config = rendered.of("ConfigMap").find_map(|map| map["data"]["nats.conf"].as_str()).expect("nats.conf");
    let listeners: Vec<_> = (0..3 * replicas).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    let free: Vec<SocketAddr> = listeners.iter().map(|listener| listener.local_addr().expect("its address")).collect();
    drop(listeners);
    let (clients, others) = free.split_at(replicas);
    let (routes, monitors) = others.split_at(replicas);
    let mut servers = Vec::new();
    for (n, ((client, route), monitor)) in clients.iter().zip(routes).zip(monitors).enumerate() {
        let directory = scratch("nats");
        let mut config = config.to_owned();
        for (from, key, to) in
            [("port: 4222", "listen", client), ("port: 6222", "listen", route), ("http: 8222", "http", monitor)]
        {
            assert!(config.contains(from), "nats.conf has no `{from}`");
            config = config.replace(from, &format!("{key}: \"{to}\""));
        }
        std::fs::write(directory.path().join("nats.conf"), config).expect("writing");
        let here = |value: String| {
            let hosts =
                routes.iter().enumerate().map(|(n, to)| (format!("{name}-{n}.{headless}:6222"), to.to_string()));
            hosts.fold(value, |value, (host, to)| value.replace(&host, &to))
        };
        let variables = environment(server(), &format!("{name}-{n}"));
        let variables = variables.into_iter().map(|(variable, value)| (variable, here(value)));
        let [program, flag] = list(&server()["command"]) else { panic!("{}", server()["command"]) };
        assert_eq!(*program, "nats-server");
        let mut command = Command::new(nats::binary());
        command.arg(text(flag).replace("/etc/nats", &directory.path().display().to_string())).envs(variables);
        let mut process = Process::spawn("nats-server", &mut command, directory);
        process
            .wait_for("line that it is ready", |process| process.stderr().contains("Server is ready").then_some(()))
            .await;
        servers.push((process, *client));
    }
    servers
}

/// The picker of the component, as in a pod with this name, at this NATS server.
async fn start_picker(pod: &str, nats: SocketAddr, model_server: SocketAddr) -> AttacheProcess {
    let picker = component("nats").picker();
    let variables = environment(picker, pod);
    let named = list(&picker["args"]).iter().map(text).filter(|argument| argument.starts_with("--sync-"));
    let mut arguments: Vec<String> = named.map(|argument| expanded(argument, &variables)).collect();
    arguments.extend(["--endpoint".to_owned(), model_server.to_string()]);
    let service = format!("@{}:4222", text(&component("nats").one("StatefulSet")["metadata"]["name"]));
    let here = |(name, value): &(String, String)| (name.clone(), value.replace(&service, &format!("@{nats}")));
    let variables: Vec<(String, String)> = variables.iter().map(here).collect();
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    AttacheProcess::with_variables(&arguments, &variables).await
}

/// What a NATS server replies to a client with this `CONNECT` that subscribes to a subject that is not the pickers'.
fn refusal(server: SocketAddr, connect: &Value) -> String {
    let mut connection = TcpStream::connect(server).expect("a connection");
    connection.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    let mut lines = BufReader::new(connection.try_clone().expect("a reader")).lines();
    let info = lines.next().expect("a line").expect("its text");
    assert!(info.starts_with("INFO "), "{info}");
    connection.write_all(format!("CONNECT {connect}\r\nSUB other.> 1\r\nPING\r\n").as_bytes()).expect("sending");
    lines.next().expect("a line").expect("its text")
}

#[tokio::test(flavor = "multi_thread")]
async fn nats_component_connects_pickers_at_different_servers() {
    let (servers, echo) = (start_servers().await, Echo::start().await);
    let (first, last) = (servers[0].1, servers[servers.len() - 1].1);
    let pickers =
        [start_picker("llm-epp-a", first, echo.address).await, start_picker("llm-epp-b", last, echo.address).await];
    for (picker, peer) in pickers.iter().zip(["llm-epp-b", "llm-epp-a"]) {
        eventually(&format!("the peer {peer}"), async || {
            let page = client::get(picker.metrics, "/api/peers").await.expect("the picker's peers").json();
            let names: Vec<&Value> = list(&page["peers"]).iter().map(|peer| &peer["name"]).collect();
            (names == [peer]).then_some(())
        })
        .await;
    }
    let stranger = refusal(first, &json!({"verbose": false}));
    assert_eq!(stranger, "-ERR 'Authorization Violation'");
    let allowed = refusal(first, &json!({"verbose": false, "user": "picker", "pass": SECRET[0].1}));
    assert_eq!(allowed, "-ERR 'Permissions Violation for Subscription to \"other.>\"'");
}
