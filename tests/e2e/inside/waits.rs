//! What Attaché waits for inside Envoy: prefills by its own client. And what Envoy's configuration can do to it: subset
//! hints, updates while requests are served, a library that is missing.

use super::{CHAT, addresses, four, post};
use crate::disagg::{COURSE, request};
use crate::routing::{HINT_FROM_HEADERS, hint_list};
use crate::shipped::list_pool;
use crate::support::body::{Payload, chat, sha256};
use crate::support::client::{self, Http};
use crate::support::envoy::{EnvoyProcess, binary};
use crate::support::inside::{Inside, inside_bootstrap};
use crate::support::process::{eventually, scratch};
use crate::support::sim::SimProcess;
use serde_json::json;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

fn split_pool(servers: &[SocketAddr], disaggregation: &str) -> String {
    let roles = ["prefill", "prefill", "decode", "decode"];
    let endpoints: Vec<String> =
        servers.iter().zip(roles).map(|(at, role)| format!("{{address: \"{at}\", role: {role}}}")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  destination: {{mode: list}}\n  \
         disaggregation: {{{disaggregation}}}\n  health: {{ejection: 1s, maxEjectionPercent: 100}}\n  \
         endpoints: [{}]\n",
        endpoints.join(", ")
    )
}

/// Attaché's own client sends the prefill while Envoy holds the request.
#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_split_inside_envoy() {
    let sim = SimProcess::with_roles("prefill=2,decode=2", 4, &["--speed", "20"]).await;
    let servers: [SocketAddr; 4] = sim.servers.clone().try_into().expect("four servers");
    let inside = Inside::start(&split_pool(&servers, "decider: always, prefillTimeout: 2s"), servers).await;
    let to = inside.clients();
    let send =
        async |number: usize| client::post(to, "/v1/completions", request(number, number.is_multiple_of(2))).await;
    for number in 0..10 {
        let reply = send(number).await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.header(COURSE)), (200, "split"), "{number}");
    }
    let faults = async |faults: serde_json::Value| {
        for server in &servers[..2] {
            let reply = client::post(*server, "/sim/faults", faults.to_string().into()).await.expect("an answer");
            assert_eq!(reply.status, 200);
        }
    };
    // A prefill that fails, or that comes too late, costs no request.
    for (number, (fault, reason)) in
        [(json!({"refuse": true}), "prefill_failed"), (json!({"prefill": {"hang": true}}), "prefill_late")]
            .into_iter()
            .enumerate()
    {
        faults(fault).await;
        let reply = send(100 + number).await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.header(COURSE)), (200, &*format!("local; reason={reason}")));
        faults(json!({})).await;
        // The workers are used again when their ejection is over.
        eventually("a split request", || async {
            let reply = send(200 + number).await.expect("an answer");
            (reply.header(COURSE) == "split").then_some(())
        })
        .await;
    }
    // A client that leaves during its prefill.
    faults(json!({"prefill": {"hang": true}})).await;
    let left = tokio::spawn(async move { client::post(to, "/v1/completions", request(300, false)).await.is_ok() });
    let hanging = async || {
        let page = client::get(servers[0], "/sim/pd").await.expect("a page").json();
        let other = client::get(servers[1], "/sim/pd").await.expect("a page").json();
        page["hanging"].as_u64().unwrap_or_default() + other["hanging"].as_u64().unwrap_or_default()
    };
    eventually("a prefill", || async { (hanging().await == 1).then_some(()) }).await;
    left.abort();
    eventually("its end", || async { (hanging().await == 0).then_some(()) }).await;
    inside.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subset_hints_are_obeyed_inside_envoy() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let hinted = |bootstrap: String| {
        let filter = "          - name: attache\n";
        bootstrap.replace(filter, &format!("{HINT_FROM_HEADERS}{filter}"))
    };
    let inside = Inside::edited(&list_pool(&servers[..3], "round-robin"), servers, hinted).await;
    let (second, outside) = (servers[1].to_string(), servers[3].to_string());
    let ask = async |header: &'static str, hint: &str| {
        post(inside.clients(), Http::H1, CHAT, Payload::sized(chat(300, false, 1)), &[(header, hint)]).await
    };
    for (header, hint) in [
        ("x-hint-text", second.clone()),
        ("x-hint-text", format!(" {second} ,nonsense,,")),
        ("x-hint-value", hint_list(&[outside.clone(), second.clone()])),
    ] {
        for _ in 0..3 {
            let reply = ask(header, &hint).await;
            assert_eq!((reply.status.as_u16(), reply.header("x-echo-server")), (200, &*second), "{header} {hint}");
        }
    }
    for (header, hint) in [("x-hint-text", outside.clone()), ("x-hint-value", hint_list(&[]))] {
        let reply = ask(header, &hint).await;
        assert_eq!((reply.status.as_u16(), reply.header("x-attache-reason")), (503, "subset_empty"), "{header} {hint}");
    }
    assert_eq!(echoes[3].requests(), 0, "never an endpoint outside of the pool");
    inside.assert_settled().await;
}

/// A bootstrap whose listener, routes and cluster are in files that Envoy watches: `lds.yaml`, `rds.yaml`, `cds.yaml`.
pub(super) struct Dynamic {
    pub(super) bootstrap: String,
    pub(super) listener: String,
    pub(super) routes: String,
    pub(super) cluster: String,
}

impl Dynamic {
    /// The shipped bootstrap, with its files in `folder`.
    pub(super) fn of(bootstrap: &str, folder: &std::path::Path) -> Self {
        let (start, resources) = bootstrap.split_once("static_resources:\n").expect("static resources");
        let (listeners, clusters) = resources.split_once("\n  clusters:\n").expect("clusters");
        let resource = |text: &str, kind: &str| {
            let mut lines = text.lines().filter(|line| !line.trim().is_empty());
            let first = lines.next().expect("a resource").trim_start_matches("  - ");
            let rest: String = lines.map(|line| format!("{line}\n")).collect();
            format!("resources:\n  - \"@type\": type.googleapis.com/envoy.config.{kind}\n    {first}\n{rest}")
        };
        let listeners = listeners.split_once("  listeners:\n").expect("listeners").1;
        // Each file is a document of its own.
        let listeners = listeners.replace("*library", "{name: attache_envoy, do_not_close: true}");
        let source = |kind: &str| {
            let path = folder.join(format!("{kind}.yaml")).display().to_string();
            format!("{{resource_api_version: V3, path_config_source: {{path: {path}}}}}")
        };
        let watched = |kind: &str| format!("  {kind}_config: {}\n", source(kind));
        let (listeners, routes) = listeners.split_once("          route_config:\n").expect("routes");
        let listeners =
            format!("{listeners}          rds: {{route_config_name: inference, config_source: {}}}\n", source("rds"));
        let routes: String =
            routes.lines().map(|line| format!("{}\n", line.strip_prefix("        ").unwrap_or(line))).collect();
        let routes = format!(
            "resources:\n  - \"@type\": type.googleapis.com/envoy.config.route.v3.RouteConfiguration\n{routes}"
        );
        let bootstrap = format!(
            "node: {{id: envoy, cluster: envoy}}\n{start}dynamic_resources:\n{}{}",
            watched("lds"),
            watched("cds")
        );
        let (listener, cluster) =
            (resource(&listeners, "listener.v3.Listener"), resource(clusters, "cluster.v3.Cluster"));
        Self { bootstrap, listener, routes, cluster }
    }
}

/// Writes a file as Kubernetes does: Envoy sees it whole.
pub(super) fn replace(path: &std::path::Path, text: &str) {
    let next = path.with_extension("next");
    std::fs::write(&next, text).expect("writing");
    std::fs::rename(next, path).expect("renaming");
}

/// Sends streamed requests until `over`, each on a connection of its own. Returns how many were served; none may fail.
async fn stream(to: SocketAddr, seed: u64, over: Arc<AtomicBool>) -> u64 {
    let mut served = 0;
    while !over.load(Relaxed) {
        let body = chat(3_000, true, seed);
        let target = format!("{CHAT}?kind=sse&size=2000&events=4&pace_ms=5");
        let reply = client::post(to, &target, body.clone()).await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 2_000));
        assert_eq!(reply.header("x-echo-sha256"), sha256(&body));
        served += 1;
    }
    served
}

/// New listeners, with a new filter each, and new clusters, while clients send requests.
#[tokio::test(flavor = "multi_thread")]
async fn updates_of_listeners_and_clusters_lose_no_request() {
    const UPDATES: u64 = 60;
    let echoes = four().await;
    let servers = addresses(&echoes);
    let files = scratch("inside-updates");
    let configuration = files.path().join("attache.yaml");
    std::fs::write(&configuration, list_pool(&servers, "random")).expect("writing");
    let Dynamic { bootstrap, listener, routes, cluster } =
        Dynamic::of(&inside_bootstrap(&configuration, servers), files.path());
    let (lds, cds) = (files.path().join("lds.yaml"), files.path().join("cds.yaml"));
    replace(&files.path().join("rds.yaml"), &routes);
    replace(&cds, &cluster);
    replace(&lds, &listener);
    let inside = Inside::by(&bootstrap, files).await;
    let to = inside.clients();

    let over = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for seed in 0..4_u64 {
        clients.spawn(stream(to, seed, over.clone()));
    }
    let done = async |kind: &str| inside.envoy.stat(&format!("{kind}.update_success")).await;
    for number in 0..UPDATES {
        let before = (done("listener_manager.lds").await, done("cluster_manager.cds").await);
        if number % 3 == 2 {
            replace(&cds, &cluster.replace("connect_timeout: 2s", &format!("connect_timeout: 2.{number:03}s")));
        } else {
            replace(&lds, &listener.replace("stat_prefix: inference", &format!("stat_prefix: inference{number}")));
        }
        eventually("the update", || async {
            let now = (done("listener_manager.lds").await, done("cluster_manager.cds").await);
            (now.0 + now.1 > before.0 + before.1).then_some(())
        })
        .await;
    }
    over.store(true, Relaxed);
    let served: u64 = clients.join_all().await.into_iter().sum();
    assert!(served > UPDATES, "{served} requests say little");
    let books = inside.assert_settled().await;
    assert_eq!(books.outcomes.get("routed").copied(), Some(served), "{books:?}");
}

/// A new Envoy takes over the sockets of the old one, which ends after its last requests. Each has a picker of its own.
#[tokio::test(flavor = "multi_thread")]
async fn hot_restart_loses_no_request() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let files = scratch("inside-restart");
    let configuration = files.path().join("attache.yaml");
    std::fs::write(&configuration, list_pool(&servers, "random")).expect("writing");
    let id = files.path().join("base-id");
    let free_port =
        || std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    // Envoy finds the socket of the other process by its address. Both pickers want the same admin port, which the new
    // one opens when the old one has ended.
    let (port, admin) = (free_port(), free_port());
    let bootstrap = inside_bootstrap(&configuration, servers);
    assert!(bootstrap.contains("admin: 127.0.0.1:0\n"), "{bootstrap}");
    let bootstrap = bootstrap.replace("admin: 127.0.0.1:0\n", &format!("admin: 127.0.0.1:{admin}\n"));
    let listener = "socket_address: {address: 127.0.0.1, port_value: 0}\n    # Attaché raises";
    assert!(bootstrap.contains(listener), "{bootstrap}");
    let bootstrap = bootstrap.replace(listener, &listener.replace("port_value: 0", &format!("port_value: {port}")));
    let times = ["--drain-time-s", "1", "--parent-shutdown-time-s", "3"];
    let path = id.to_str().expect("UTF-8");
    let first = ["--restart-epoch", "0", "--use-dynamic-base-id", "--base-id-path", path];
    let mut old = EnvoyProcess::with(&bootstrap, 2, &[&first[..], &times].concat()).await;
    let to = old.listener("inference");

    let over = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for seed in 0..4_u64 {
        clients.spawn(stream(to, seed, over.clone()));
    }
    let id = std::fs::read_to_string(&id).expect("Envoy's base id");
    let second = ["--restart-epoch", "1", "--base-id", id.trim()];
    let new = old.beside_with(&bootstrap, &[&second[..], &times].concat()).await;
    let inside = Inside::of(new, files).await;
    assert_eq!((inside.clients(), inside.metrics.port()), (to, admin), "the same sockets");
    let status = old.ended().await;
    assert!(status.success(), "{status}: {}", old.log());
    let routed = async || inside.books().await.ok()?.outcomes.get("routed").copied();
    let before = routed().await.unwrap_or_default();
    eventually("requests of the new Envoy", || async { routed().await.filter(|&now| now > before + 20) }).await;
    over.store(true, Relaxed);
    let served: u64 = clients.join_all().await.into_iter().sum();
    let books = inside.assert_settled().await;
    let of_new = books.outcomes.get("routed").copied().unwrap_or_default();
    assert!(of_new > 20 && of_new < served, "{of_new} of {served}: {books:?}");
}

/// A recording is whole when Envoy has ended, and can be played again.
#[tokio::test(flavor = "multi_thread")]
async fn requests_are_recorded_inside_envoy() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let folder = scratch("inside-recording");
    let record = folder.path().join("run.jsonl");
    let recorded = |bootstrap: String| {
        let admin = "        admin: 127.0.0.1:0\n";
        assert!(bootstrap.contains(admin), "{bootstrap}");
        bootstrap.replace(admin, &format!("{admin}        record: {}\n", record.display()))
    };
    let mut inside = Inside::edited(&list_pool(&servers, "least-request"), servers, recorded).await;
    for seed in 0..20 {
        let reply = client::post(inside.clients(), CHAT, chat(300, false, seed)).await.expect("an answer");
        assert_eq!(reply.status, 200);
    }
    inside.assert_settled().await;
    let status = inside.envoy.end_by("TERM").await;
    assert!(status.success(), "{status}");
    let output = Command::new(env!("CARGO_BIN_EXE_attache")).arg("replay").arg("--from-record").arg(&record).output();
    let output = output.expect("an output");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{shown}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(shown.contains("20 decisions"), "{shown}");
}

/// Envoy does not start without the library, and says what it looked for.
#[test]
fn missing_library_is_named() {
    let files = scratch("inside-missing");
    let servers = [8001, 8002, 8003, 8004].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let (file, bootstrap) = (files.path().join("attache.yaml"), files.path().join("envoy.yaml"));
    std::fs::write(&file, list_pool(&servers, "random")).expect("writing");
    std::fs::write(&bootstrap, inside_bootstrap(&file, servers)).expect("writing");
    let mut command = Command::new(binary());
    command.env("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", files.path());
    // Envoy asks the loader next, and Cargo names its own folder of libraries to it.
    command.env_remove("LD_LIBRARY_PATH");
    let output = command.args(["--mode", "validate", "-l", "error", "-c"]).arg(&bootstrap).output();
    let output = output.expect("running Envoy");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && log.contains("libattache_envoy.so"), "{log}");
}
