//! Envoy: each row plants a mistake in a shipped bootstrap, and a real Envoy runs it.

mod rows;
mod tls;

use super::{Checked, closed};
use crate::shipped::{by_header, by_list, list_pool};
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::envoy::{EnvoyProcess, shipped};
use crate::support::inside::{Inside, cluster_bootstrap};
use crate::support::process::scratch;
use crate::support::sim::SimProcess;
use rows::{ROWS, Row};
use std::net::SocketAddr;

/// The shipped bootstraps; those with lists know four servers.
const BY_HEADER: [&str; 3] = ["original-dst.yaml", "buffered.yaml", "target-pod.yaml"];
const BY_LIST: [&str; 2] = ["override-host.yaml", "fail-open.yaml"];
/// Envoys that run at the same time.
const AT_ONCE: usize = 4;

fn render(file: &str, picker: &AttacheProcess, servers: &[SocketAddr]) -> String {
    if BY_LIST.contains(&file) {
        by_list(file, picker, servers.try_into().expect("four servers"))
    } else {
        by_header(file, picker)
    }
}

fn check(envoy: SocketAddr, picker: &AttacheProcess) -> Checked {
    Checked::run(&["--envoy-admin", &envoy.to_string(), "--admin", &picker.metrics.to_string()])
}

#[tokio::test(flavor = "multi_thread")]
async fn check_live_finds_nothing_in_shipped_bootstraps() {
    let fleet = SimProcess::start(4, &[]).await;
    let picker = AttacheProcess::start(&fleet.servers, &[]).await;
    let lists = AttacheProcess::configured(&list_pool(&fleet.servers, "round-robin")).await;
    for file in BY_HEADER.iter().chain(&BY_LIST) {
        let picker = if BY_LIST.contains(file) { &lists } else { &picker };
        let envoy = EnvoyProcess::start(&render(file, picker, &fleet.servers)).await;
        if *file != "target-pod.yaml" {
            let reply = client::get(envoy.listener("inference"), "/v1/models").await.expect("a response");
            assert_eq!(reply.status, 200, "{file}");
        }
        let checked = check(envoy.admin, picker);
        checked.assert_faults(file, "envoy-", &[]);
        assert_eq!(checked.code, 0, "{file}: {:#?}", checked.faults(""));
        let config = scratch("bootstrap");
        let path = config.path().join("envoy.yaml");
        std::fs::write(&path, shipped(file, &[])).expect("writing");
        let checked = Checked::run(&["--envoy-config", path.to_str().expect("UTF-8")]);
        checked.assert_faults(&format!("{file} as a file"), "envoy-", &[]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn check_live_finds_each_mistake_in_a_bootstrap() {
    let fleet = SimProcess::start(4, &[]).await;
    let picker = AttacheProcess::start(&fleet.servers, &[]).await;
    let lists = AttacheProcess::configured(&list_pool(&fleet.servers, "round-robin")).await;
    let of = |row: &Row| if BY_LIST.contains(&row.file) { &lists } else { &picker };
    let first = EnvoyProcess::start(&render("original-dst.yaml", &picker, &fleet.servers)).await;
    for rows in ROWS.chunks(AT_ONCE) {
        let each = rows.iter().map(|row| async {
            let envoy = first.beside(&row.plant(&render(row.file, of(row), &fleet.servers))).await;
            let checked = check(envoy.admin, of(row));
            checked.assert_faults(row.name, "envoy-", row.faults);
            assert_eq!(checked.code == 1, checked.has_error(), "{}", row.name);
        });
        futures_util::future::join_all(each).await;
    }
    assert!(ROWS.len() >= 25, "{}", ROWS.len());
}

/// Attaché inside Envoy, with servers that Envoy lists or that it gets from Attaché.
#[tokio::test(flavor = "multi_thread")]
async fn check_live_finds_nothing_where_attache_is_inside_envoy() {
    let fleet = SimProcess::start(4, &[]).await;
    let servers: [SocketAddr; 4] = fleet.servers.clone().try_into().expect("four servers");
    let files = scratch("check-inside");
    let file = files.path().join("attache.yaml");
    let text = list_pool(&fleet.servers, "round-robin");
    std::fs::write(&file, &text).expect("writing");
    let by_list = Inside::start(&text, servers).await;
    let by_cluster = Inside::of(by_list.envoy.beside(&cluster_bootstrap(&file)).await, files).await;
    for (inside, name) in [(&by_list, "inside.yaml"), (&by_cluster, "inside-cluster.yaml")] {
        let reply = client::get(inside.clients(), "/v1/models").await.expect("a response");
        assert_eq!(reply.status, 200, "{name}");
        let admins = [inside.envoy.admin, inside.metrics].map(|address| address.to_string());
        let checked = Checked::run(&["--envoy-admin", &admins[0], "--admin", &admins[1]]);
        checked.assert_faults(name, "envoy-", &[]);
        assert_eq!(checked.code, 0, "{name}");
        let shipped = crate::support::process::repository().join("envoy").join(name);
        let checked = Checked::run(&["--envoy-config", shipped.to_str().expect("UTF-8")]);
        checked.assert_faults(&format!("{name} as a file"), "envoy-", &[]);
    }
}

#[test]
fn check_live_finds_each_mistake_in_a_bootstrap_with_attache_inside() {
    const ROUTER: &str = "          - name: envoy.filters.http.router\n";
    let directory = scratch("bootstrap");
    let path = directory.path().join("envoy.yaml");
    let text = shipped("inside-cluster.yaml", &[]);
    let (before, policy) = text.split_once("    load_balancing_policy:\n").expect("the policy");
    assert!(policy.contains("override_host"), "the last part");
    let filter = |kind: &str| {
        let config = format!("\"@type\": type.googleapis.com/envoy.extensions.filters.http.{kind}");
        text.replace(ROUTER, &format!("          - name: other\n            typed_config: {{{config}}}\n{ROUTER}"))
    };
    let with_picker = filter("ext_proc.v3.ExternalProcessor, grpc_service: {envoy_grpc: {cluster_name: picker}}");
    let (disabled, other) = ("          - name: attache\n            disabled: true\n", "/etc/attache/other.yaml");
    let of_cluster = "          value:\n            config_file: /etc/attache/config.yaml\n            # The name";
    for (mistake, text, faults) in [
        ("unloaded", text.replace("do_not_close: true", "do_not_close: false"), &["envoy-inside-loaded"][..]),
        (
            "two files",
            text.replace(of_cluster, &of_cluster.replace("/etc/attache/config.yaml", other)),
            &["envoy-inside-pickers"],
        ),
        (
            "no policy",
            format!("{before}    lb_policy: CLUSTER_PROVIDED\n"),
            &["envoy-destination", "envoy-inside-policy"],
        ),
        ("switched off", text.replace("          - name: attache\n", disabled), &["envoy-filter-disabled"]),
        ("rejecting", filter("local_ratelimit.v3.LocalRateLimit"), &["envoy-filter-order"]),
        ("compressed", filter("compressor.v3.Compressor"), &["envoy-compressor-order"]),
    ] {
        std::fs::write(&path, &text).expect("writing");
        let checked = Checked::run(&["--envoy-config", path.to_str().expect("UTF-8")]);
        let faults: Vec<_> = faults.iter().map(|id| (*id, "")).collect();
        checked.assert_faults(mistake, "envoy-", &faults);
    }
    std::fs::write(&path, with_picker).expect("writing");
    let checked = Checked::run(&["--envoy-config", path.to_str().expect("UTF-8")]);
    assert!(checked.faults("envoy-inside-twice").len() == 1, "{:#?}", checked.faults("envoy-"));
}

/// What only TLS, traffic or a file shows.
#[tokio::test(flavor = "multi_thread")]
async fn check_live_finds_a_picker_with_tls_behind_an_envoy_without() {
    let fleet = SimProcess::start(1, &[]).await;
    let picker = AttacheProcess::start(&fleet.servers, &["--secure-serving=true"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let checked = check(envoy.admin, &picker);
    checked.assert_faults("TLS", "envoy-", &[("envoy-picker-tls", "--secure-serving=false")]);
    let reply = client::get(envoy.listener("inference"), "/v1/models").await.expect("a response");
    assert_eq!(reply.status, 500);
    let checked = check(envoy.admin, &picker);
    let failed = ("envoy-stat-streams-failed", "transport_socket");
    checked.assert_faults("TLS, after a request", "envoy-", &[("envoy-picker-tls", "UpstreamTlsContext"), failed]);
}

#[tokio::test(flavor = "multi_thread")]
async fn check_live_finds_a_list_for_an_envoy_that_takes_one_address() {
    let fleet = SimProcess::start(4, &[]).await;
    let picker = AttacheProcess::configured(&list_pool(&fleet.servers, "round-robin")).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let reply = client::get(envoy.listener("inference"), "/v1/models").await.expect("a response");
    assert_eq!(reply.status, 503);
    let wanted = ("envoy-stat-invalid-destination", "destination: {mode: single}");
    check(envoy.admin, &picker).assert_faults("a list", "envoy-", &[wanted]);
}

#[test]
fn check_live_finds_mistakes_in_the_admin_port_of_a_file() {
    let directory = scratch("bootstrap");
    let path = directory.path().join("envoy.yaml");
    let text = shipped("original-dst.yaml", &[]);
    let check = |text: &str| {
        std::fs::write(&path, text).expect("writing");
        Checked::run(&["--envoy-config", path.to_str().expect("UTF-8")])
    };
    let open = text.replace("{address: 127.0.0.1, port_value: 9901}", "{address: 0.0.0.0, port_value: 9901}");
    check(&open).assert_faults("open admin port", "envoy-", &[("envoy-admin-address", "127.0.0.1")]);
    let (before, rest) = text.split_once("admin:").expect("the admin port");
    let none = format!("{before}static_resources:{}", rest.split_once("static_resources:").expect("resources").1);
    check(&none).assert_faults("no admin port", "envoy-", &[("envoy-admin-address", "admin:")]);
    check("a: [").assert_faults("no YAML", "envoy-", &[("envoy-reachable", "bootstrap")]);
    check("a: 1").assert_faults("no bootstrap", "envoy-", &[("envoy-reachable", "bootstrap")]);
}

#[test]
fn check_live_without_any_target_exits_69() {
    let closed = closed().to_string();
    let checked = Checked::run(&["--envoy-admin", &closed, "--admin", &closed]);
    assert_eq!(checked.code, 69);
    checked.assert_faults("nothing runs", "envoy-", &[("envoy-reachable", "--envoy-admin")]);
}
