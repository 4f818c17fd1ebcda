//! Planted mistakes of the picker: its configuration, its endpoints, its certificate, its peers.

use super::{Checked, PATIENT, closed, until_scraped};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, scratch};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;

fn write(path: &Path, text: &str) -> String {
    std::fs::write(path, text).expect("writing");
    path.display().to_string()
}

fn of_admin(picker: &AttacheProcess, arguments: &[&str]) -> Checked {
    Checked::run(&[arguments, &["--admin", &picker.metrics.to_string()]].concat())
}

const HEAD: &str = "apiVersion: attache.dev/v1\nkind: Attache\n";

#[tokio::test(flavor = "multi_thread")]
async fn planted_mistakes_of_the_picker_are_found_with_their_fix() {
    let good = SimProcess::start(2, &[]).await;
    let garbage = SimProcess::start(1, &["--faults", r#"{"metrics": "garbage"}"#]).await;
    let directory = scratch("check-picker");
    let path = |name: &str| directory.path().join(name);
    let [a, b] = good.servers[..] else { panic!("two servers") };
    let limited = |bytes: u32| {
        format!(
            "{HEAD}limits: {{maxBodyBytes: {bytes}}}\n\
             pools: [{{name: good, {PATIENT}, endpoints: [\"{a}\", \"{b}\"]}}]\n"
        )
    };
    let file = write(&path("attache.yaml"), &limited(100_000));
    let picker = AttacheProcess::with_file(Path::new(&file), &[]).await;
    until_scraped(&picker, 2).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    // Without a name, the check reads any Envoy at port 9901 of this machine.
    let envoy_admin = envoy.admin.to_string();
    let of_both = |arguments: &[&str]| of_admin(&picker, &[arguments, &["--envoy-admin", &envoy_admin]].concat());
    let check = of_both(&[&file]);
    check.assert_faults("nothing is wrong", "", &[]);
    assert_eq!(check.code, 0);
    // Without the file, the configuration in effect counts.
    of_both(&[]).assert_faults("nothing is wrong, without the file", "", &[]);

    let other = write(&path("other.yaml"), &limited(200_000));
    of_both(&[&other]).assert_faults("another file", "", &[("picker-configuration", "flags")]);

    let body = json!({"model": "sim-8b", "prompt": "x".repeat(150_000)}).to_string();
    let reply =
        client::post(envoy.listener("inference"), "/v1/completions", Bytes::from(body)).await.expect("an answer");
    assert_eq!(reply.status, 413);
    of_admin(&picker, &[&file]).assert_faults(
        "a limit that is too low",
        "picker",
        &[("picker-limits", "limits"), ("picker-rejections", "limits.maxBodyBytes")],
    );

    std::fs::write(&file, format!("{HEAD}pools: [{{name: good, unknown: 1}}]\n")).expect("writing");
    picker.until_metric("attache_config_last_reload_successful", 0.0).await;
    of_admin(&picker, &[]).assert_faults(
        "a refused reload",
        "picker-reload",
        &[("picker-reload", "attache check FILE")],
    );

    let (down, odd) = (closed(), garbage.servers[0]);
    let broken = write(
        &path("broken.yaml"),
        &format!(
            "{HEAD}pools:\n- {{name: good, match: {{models: [a]}}, {PATIENT}, endpoints: [\"{a}\", \"{down}\"]}}\n\
             - {{name: odd, match: {{models: [b]}}, {PATIENT}, endpoints: [\"{odd}\"]}}\n"
        ),
    );
    let picker = AttacheProcess::with_file(Path::new(&broken), &[]).await;
    eventually("the picker to have scraped all servers", async || {
        let endpoints = picker.endpoints().await;
        let has_error = |address: SocketAddr| {
            let own = endpoints.iter().find(|endpoint| endpoint["address"] == address.to_string().as_str());
            own.is_some_and(|endpoint| endpoint["scrape_error"].is_string())
        };
        (has_error(down) && has_error(odd)).then_some(())
    })
    .await;
    of_admin(&picker, &[&broken]).assert_faults(
        "servers that are closed or have no metrics",
        "endpoint",
        &[("endpoint-health", "address"), ("endpoint-metrics", "metrics.path")],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn picker_that_is_not_ready_or_not_there_is_found() {
    let picker = AttacheProcess::unready(&["--endpoint".to_owned(), closed().to_string()]).await;
    let check = of_admin(&picker, &[]);
    check.assert_faults("no server", "picker", &[("picker-ready", "missing condition")]);
    assert_eq!(check.code, 1);
    let check = Checked::run(&["--admin", &closed().to_string()]);
    check.assert_faults("no picker", "picker", &[("picker-reachable", "--admin URL")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_server_is_found_by_its_learned_speed() {
    let good = SimProcess::start(3, &["--speed", "5"]).await;
    let slow = SimProcess::start(1, &["--speed", "2"]).await;
    let servers: Vec<SocketAddr> = good.servers.iter().chain(&slow.servers).copied().collect();
    let listed: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    let config =
        format!("{HEAD}pools: [{{name: a, strategy: round-robin, {PATIENT}, endpoints: [{}]}}]\n", listed.join(", "));
    let picker = AttacheProcess::configured(&config).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let is_slow = |endpoint: &Value| endpoint["slowdown"]["slow"] == true;
    // Times that a busy machine adds fade, since later responses count more.
    for number in 0.. {
        let body = json!({"model": "sim-8b", "prompt": format!("{number} {}", "word ".repeat(400)), "max_tokens": 8,
                          "stream": true});
        let reply = client::post(to, "/v1/completions", Bytes::from(body.to_string())).await.expect("an answer");
        assert_eq!(reply.status, 200);
        let found: Vec<Value> = picker.endpoints().await.into_iter().filter(is_slow).collect();
        if found.len() == 1 && found[0]["address"] == slow.servers[0].to_string().as_str() {
            break;
        }
        assert!(number < 2_000, "{found:#?}");
    }
    picker.assert_settled().await;
    let check = of_admin(&picker, &[]);
    check.assert_faults("a slow server", "endpoint", &[("endpoint-speed", "GPU")]);
    let faults = check.faults("endpoint-speed");
    let subject = format!("model server {}, pool a", slow.servers[0]);
    assert!(faults.iter().all(|fault| fault["subject"] == subject.as_str()), "{faults:#?}");
    let warnings = client::get(picker.metrics, "/endpoints").await.expect("the endpoints").json()["warnings"].clone();
    let message = warnings[0]["message"].as_str().expect("a warning");
    assert!(message.contains(&slow.servers[0].to_string()), "{message}");
    picker.until_metric("attache_warnings{pool=\"a\",code=\"slow_endpoints\"}", 1.0).await;
}
