//! Envoy gets its servers from Attaché, which finds them by a file: `envoy/inside-cluster.yaml`.

use super::waits::{Dynamic, replace};
use super::{CHAT, addresses, four, post};
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http};
use crate::support::envoy::EnvoyProcess;
use crate::support::inside::{Inside, cluster_bootstrap};
use crate::support::process::{eventually, scratch};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A pool that finds its servers by the file `endpoints.yaml`, and that file.
struct Found {
    files: tempfile::TempDir,
    configuration: PathBuf,
}

impl Found {
    fn new(strategy: &str, servers: &[SocketAddr]) -> Self {
        let files = scratch("inside-cluster");
        let configuration = files.path().join("attache.yaml");
        let found = Self { files, configuration };
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {{name: {strategy}}}\n  \
             destination: {{mode: list, max: 3}}\n  endpointsFile: {{path: {}, engine: none}}\n",
            Self::list(found.files.path()).display()
        );
        std::fs::write(&found.configuration, text).expect("writing");
        Self::write(found.files.path(), servers, "");
        found
    }

    fn list(folder: &Path) -> PathBuf {
        folder.join("endpoints.yaml")
    }

    /// Writes the list: these servers, and a further entry.
    fn write(folder: &Path, servers: &[SocketAddr], more: &str) {
        let entry = |at: &SocketAddr| format!("- {{name: s{0}, address: {1}, port: \"{0}\"}}\n", at.port(), at.ip());
        let entries: String = servers.iter().map(entry).collect();
        replace(&Self::list(folder), &format!("endpoints:\n{entries}{more}"));
    }
}

/// The servers that Envoy has.
async fn hosts(envoy: &EnvoyProcess) -> BTreeSet<SocketAddr> {
    let page = client::get(envoy.admin, "/clusters?format=json").await.expect("Envoy's clusters").json();
    let clusters = page["cluster_statuses"].as_array().expect("clusters").clone();
    let cluster = clusters.into_iter().find(|cluster| cluster["name"] == "model-servers").expect("the cluster");
    let hosts = cluster["host_statuses"].as_array().cloned().unwrap_or_default();
    let address = |host: serde_json::Value| {
        let at = &host["address"]["socket_address"];
        format!("{}:{}", at["address"].as_str().expect("an address"), at["port_value"]).parse().expect("an address")
    };
    hosts.into_iter().map(address).collect()
}

async fn until_hosts(envoy: &EnvoyProcess, servers: &[SocketAddr]) {
    let wanted: BTreeSet<SocketAddr> = servers.iter().copied().collect();
    eventually(&format!("Envoy to have {wanted:?}"), || async { (hosts(envoy).await == wanted).then_some(()) }).await;
}

/// Sends requests until `over`. All are served.
async fn play(to: SocketAddr, over: Arc<AtomicBool>) -> usize {
    let mut served = 0;
    while !over.load(Relaxed) {
        let reply = client::post(to, CHAT, chat(300, false, 1)).await.expect("an answer");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        served += 1;
    }
    served
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_of_envoy_follow_the_pool() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let Found { files, configuration } = Found::new("round-robin", &servers[..2]);
    let folder = files.path().to_owned();
    let inside = Inside::by(&cluster_bootstrap(&configuration), files).await;
    // The listener opens when Envoy has the servers, so no request finds none.
    assert_eq!(hosts(&inside.envoy).await, servers[..2].iter().copied().collect());
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..4).map(|_| tokio::spawn(play(inside.clients(), over.clone()))).collect();
    eventually("requests at both", || async { echoes[..2].iter().all(|e| e.requests() > 4).then_some(()) }).await;
    let (prefill, encode) = ("labels: {llm-d.ai/role: prefill}", "labels: {llm-d.ai/role: encode}");
    let of_other_roles: String = [(prefill, 1), (encode, 2)]
        .map(|(label, port)| format!("- {{name: p{port}, address: 127.0.0.1, port: \"{port}\", {label}}}\n"))
        .concat();
    Found::write(&folder, &servers[1..], &of_other_roles);
    until_hosts(&inside.envoy, &servers[1..]).await;
    eventually("requests at the new ones", || async { echoes[2..].iter().all(|e| e.requests() > 4).then_some(()) })
        .await;
    // The servers change all the time, and no request is lost.
    for number in 0..20 {
        let (first, last) = (number % 3, number % 3 + 2);
        Found::write(&folder, &servers[first..last], "");
        until_hosts(&inside.envoy, &servers[first..last]).await;
    }
    over.store(true, Relaxed);
    let mut served = 0;
    for client in clients {
        served += client.await.expect("a client that does not panic");
    }
    assert!(served > 50, "{served} requests say little");
    let books = inside.assert_settled().await;
    let fell_back = books.outcomes.get("fell_back").copied().unwrap_or_default();
    assert!(fell_back * 20 < served as u64, "the picker decides: {books:?}");
}

/// A request without a decision goes to a server that Envoy's own policy chooses among those of the pool.
#[tokio::test(flavor = "multi_thread")]
async fn request_without_a_decision_is_served_by_the_pool() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let Found { files, configuration } = Found::new("round-robin", &servers[..2]);
    let inside = Inside::by(&cluster_bootstrap(&configuration), files).await;
    for number in 0..8 {
        let headers = [("x-attache-fault", "request_headers")];
        let reply = post(inside.clients(), Http::H1, CHAT, Payload::sized(chat(300, false, number)), &headers).await;
        assert_eq!((reply.status.as_u16(), reply.header("x-echo-destination")), (200, ""));
    }
    assert_eq!(echoes.each_ref().map(|echo| echo.requests() > 0), [true, true, false, false]);
}

/// The first server of the list refuses connections: the next one of the list gets the request.
#[tokio::test(flavor = "multi_thread")]
async fn retry_takes_the_next_endpoint_of_the_list() {
    let echoes = four().await;
    let mut servers = addresses(&echoes);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    servers[0] = listener.local_addr().expect("an address");
    drop(listener);
    let Found { files, configuration } = Found::new("round-robin", &servers[..2]);
    let inside = Inside::by(&cluster_bootstrap(&configuration), files).await;
    for _ in 0..6 {
        let reply = client::post(inside.clients(), CHAT, chat(300, false, 1)).await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.header("x-echo-server")), (200, &*servers[1].to_string()));
    }
    inside.assert_settled().await;
}

/// Nothing is known of the servers: Envoy waits as long as its settings say, and serves as soon as there are some.
#[tokio::test(flavor = "multi_thread")]
async fn envoy_starts_without_servers_and_gets_them_later() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let Found { files, configuration } = Found::new("random", &[]);
    let folder = files.path().to_owned();
    std::fs::remove_file(Found::list(&folder)).expect("removing");
    let a_second = |text: String| {
        let text = text.replace("ready_timeout_seconds: 30", "ready_timeout_seconds: 1");
        text.replace("            # pool: default", "            ready_timeout_seconds: 1")
    };
    let inside = Inside::by(&a_second(cluster_bootstrap(&configuration)), files).await;
    assert!(inside.envoy.log().contains("has no servers yet"), "{}", inside.envoy.log());
    let reply = client::post(inside.clients(), CHAT, chat(300, false, 1)).await.expect("an answer");
    assert_eq!(reply.status, 503, "of Envoy, which has no server");
    Found::write(&folder, &servers[..1], "");
    eventually("a decision", || async {
        let reply = client::post(inside.clients(), CHAT, chat(300, false, 1)).await.expect("an answer");
        (reply.header("x-echo-destination") == servers[0].to_string()).then_some(())
    })
    .await;
}

/// Envoy replaces the cluster while requests come: the new one takes over when it has servers.
#[tokio::test(flavor = "multi_thread")]
async fn updates_of_the_cluster_lose_no_request() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let Found { files, configuration } = Found::new("round-robin", &servers);
    let folder = files.path().to_owned();
    let dynamic = Dynamic::of(&cluster_bootstrap(&configuration), &folder);
    let cluster = dynamic.cluster.replace("*library", "{name: attache_envoy, do_not_close: true}");
    for (kind, text) in [("cds", &cluster), ("rds", &dynamic.routes), ("lds", &dynamic.listener)] {
        replace(&folder.join(format!("{kind}.yaml")), text);
    }
    let inside = Inside::of(EnvoyProcess::start(&dynamic.bootstrap).await, files).await;
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..4).map(|_| tokio::spawn(play(inside.clients(), over.clone()))).collect();
    for number in 0..20 {
        let time = format!("connect_timeout: 2.{number:03}s");
        replace(&folder.join("cds.yaml"), &cluster.replace("connect_timeout: 2s", &time));
        let applied = number + 2;
        eventually("the update", || async {
            let count = inside.envoy.stat("cluster_manager.cds.update_success").await;
            (count >= applied && inside.envoy.stat("cluster_manager.warming_clusters").await == 0).then_some(())
        })
        .await;
    }
    over.store(true, Relaxed);
    for client in clients {
        assert!(client.await.expect("a client that does not panic") > 5);
    }
    inside.assert_settled().await;
    until_hosts(&inside.envoy, &servers).await;
}

/// The bootstrap that `attache envoy-config --inside` prints for a pool that finds its servers.
#[tokio::test(flavor = "multi_thread")]
async fn printed_bootstrap_of_a_pool_that_finds_servers_serves_requests() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let Found { files, configuration } = Found::new("round-robin", &servers[1..]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    let output = command.args(["envoy-config", "--inside"]).arg(&configuration).output().expect("running attache");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).expect("UTF-8");
    let ports = [("0.0.0.0, port_value: 8080", "127.0.0.1, port_value: 0"), ("port_value: 9901", "port_value: 0")];
    let bootstrap = ports.iter().fold(printed, |text, (old, new)| text.replace(old, new));
    let inside = Inside::by(&bootstrap.replace("admin: 127.0.0.1:9090", "admin: 127.0.0.1:0"), files).await;
    for _ in 0..6 {
        let reply = client::post(inside.clients(), CHAT, chat(300, false, 1)).await.expect("an answer");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    }
    inside.assert_settled().await;
    assert_eq!(echoes.each_ref().map(|echo| echo.requests()), [0, 2, 2, 2]);
}
