//! Idle connections to model servers end before the servers close them, in every shipped configuration of a gateway.

use super::render::{POOL, STANDALONE, documents, examples, helm, list, text};
use crate::support::process::repository;
use attache_http_client::SHORTEST_KEEP_ALIVE;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

const OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
/// Clusters that are no model servers.
const OTHERS: [&str; 2] = ["picker", "admin"];

/// Panics unless `time`, such as `4s`, is shorter than every supported engine's.
fn assert_short(time: &Value, place: &str) {
    let seconds = time.as_str().and_then(|time| time.strip_suffix('s')?.parse().ok());
    let time = seconds.map(Duration::from_secs_f64).unwrap_or_else(|| panic!("{place}: no idle time-out"));
    assert!(!time.is_zero() && time < SHORTEST_KEEP_ALIVE, "{place}: {time:?}");
}

fn assert_short_options(options: &Value, place: &str) {
    assert_short(&options[OPTIONS]["common_http_protocol_options"]["idle_timeout"], place);
}

/// Checks the clusters of model servers in a bootstrap.
fn assert_bootstrap(bootstrap: &str, place: &str) {
    let mut checked = 0;
    for document in documents(place, bootstrap) {
        for cluster in list(&document["static_resources"]["clusters"]) {
            let name = text(&cluster["name"]);
            if !OTHERS.contains(&name) {
                assert_short_options(&cluster["typed_extension_protocol_options"], &format!("{place}, {name}"));
                checked += 1;
            }
        }
    }
    assert!(checked > 0, "{place}: no cluster of model servers");
}

/// Checks patches of an EnvoyFilter; returns how many are about model servers.
fn assert_filter(filter: &Value, place: &str) -> usize {
    let of_servers = |patch: &&Value| !patch["match"]["cluster"]["portNumber"].is_null();
    let patches: Vec<_> = list(&filter["spec"]["configPatches"]).iter().filter(of_servers).collect();
    for patch in &patches {
        assert_short_options(&patch["patch"]["value"]["typed_extension_protocol_options"], place);
    }
    patches.len()
}

fn files(directory: &Path, extension: &str) -> Vec<(String, String)> {
    let entries = std::fs::read_dir(directory).expect("a directory").flatten().map(|entry| entry.path());
    let files = entries.filter(|path| path.extension().is_some_and(|e| e == extension));
    files.map(|path| (path.display().to_string(), std::fs::read_to_string(&path).expect("a file"))).collect()
}

#[test]
fn bootstraps_close_idle_connections_before_model_servers() {
    let bootstraps = files(&repository().join("envoy"), "yaml");
    assert!(bootstraps.len() >= 4);
    for (place, bootstrap) in bootstraps {
        assert_bootstrap(&bootstrap, &place);
    }
    let chart = helm("standalone", STANDALONE);
    let maps = chart.of("ConfigMap").filter_map(|map| map["data"]["envoy.yaml"].as_str());
    let maps: Vec<&str> = maps.collect();
    assert_eq!(maps.len(), 1);
    assert_bootstrap(maps[0], "the chart standalone");
}

/// A gateway that can't close them first needs a longer keep-alive of the servers, which its manifest names.
#[test]
fn gateways_close_idle_connections_before_model_servers() {
    let gateways = files(&examples().join("gateways"), "yaml");
    let mut checked = 0;
    for (place, manifest) in gateways {
        let objects = documents(&place, &manifest);
        if !objects.iter().any(|object| object["kind"] == "Gateway") {
            continue;
        }
        let mut policies = 0;
        for object in &objects {
            match text(&object["kind"]) {
                "EnvoyFilter" => policies += assert_filter(object, &place),
                "BackendTrafficPolicy" => {
                    assert_short(&object["spec"]["timeout"]["http"]["connectionIdleTimeout"], &place);
                    policies += 1;
                }
                _ => {}
            }
        }
        let by_servers = ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE=620", "SGLANG_TIMEOUT_KEEP_ALIVE=620"];
        assert!(policies == 1 || by_servers.iter().all(|name| manifest.contains(name)), "{place}");
        checked += 1;
    }
    assert!(checked >= 4, "only {checked} gateways");
    let istio = helm("inferencepool", &format!("{POOL}provider: {{name: istio}}\n"));
    assert_eq!(assert_filter(istio.one("EnvoyFilter"), "the chart inferencepool"), 1);
}

/// Clusters in pages of migrations too.
#[test]
fn pages_with_clusters_of_model_servers_name_the_idle_timeout() {
    let directories = [examples().join("migrate"), examples(), repository().join("docs/how-to")];
    let pages: Vec<_> = directories.iter().flat_map(|directory| files(directory, "md")).collect();
    let with_cluster: Vec<_> = pages.iter().filter(|(_, page)| page.contains("type: ORIGINAL_DST")).collect();
    assert!(!with_cluster.is_empty());
    for (place, page) in with_cluster {
        assert!(page.contains("idle_timeout: 4s"), "{place}");
    }
}
