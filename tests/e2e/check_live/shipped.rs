//! Shipped configurations, with simulated servers at their addresses: nothing is wrong.

use super::Checked;
use crate::support::attache::AttacheProcess;
use crate::support::process::{eventually, repository, scratch};
#[cfg(feature = "redis")]
use crate::support::redis::RedisProcess;
use crate::support::sim::SimProcess;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

/// The text of a shipped configuration, with these servers at the addresses that it names, in their order.
fn with_servers(name: &str, addresses: &[&str], servers: &[SocketAddr]) -> String {
    let mut text = std::fs::read_to_string(repository().join(format!("examples/configs/{name}.yaml"))).expect("a file");
    for (address, server) in addresses.iter().zip(servers) {
        assert!(text.contains(address), "{name} names {address}");
        text = text.replace(address, &server.to_string());
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_wrong_with_shipped_configurations() {
    let plain = SimProcess::start(2, &[]).await;
    let adapters = SimProcess::start(6, &["--model", "llama-3.1-8b", "--lora", "llama-3.1-8b-lora"]).await;
    let split = SimProcess::with_roles("prefill=2,decode=2,both=1", 5, &[]).await;
    let directory = scratch("check-shipped");
    let two = ["10.0.0.11:8000", "10.0.0.12:8000"];
    for (name, addresses, servers) in [
        ("minimal", &["127.0.0.1:8001", "127.0.0.1:8002"][..], &plain.servers),
        ("overload", &two, &plain.servers),
        ("flow-control", &two, &plain.servers),
        (
            "disaggregation",
            &["10.0.0.11:8000", "10.0.0.12:8000", "10.0.0.21:8000", "10.0.0.22:8000", "10.0.0.23:8000"],
            &split.servers,
        ),
        (
            "several-pools",
            &["10.0.1.1:8000", "10.0.1.2:8000", "[fd00::7]:8000", "10.0.3.1:8000", "10.0.5.1:8000", "10.0.4.1:8000"],
            &adapters.servers,
        ),
    ] {
        let text = with_servers(name, addresses, servers);
        assert_nothing_is_wrong(name, &text, addresses.len(), directory.path()).await;
    }
}

/// Runs a picker with this text, and checks it when it has scraped this many endpoints.
async fn assert_nothing_is_wrong(name: &str, text: &str, endpoints: usize, directory: &Path) {
    let file = directory.join(format!("{name}.yaml"));
    std::fs::write(&file, text).expect("writing");
    let picker = AttacheProcess::with_file(&file, &[]).await;
    eventually("all servers to be scraped", async || {
        let known = picker.endpoints().await;
        let scraped = known.iter().filter(|endpoint| endpoint["metrics"].is_object()).count();
        (scraped == endpoints).then_some(())
    })
    .await;
    // Envoy does not run here, and nothing may answer at its default port.
    let checked = Checked::run(&[file.to_str().expect("a path"), "--admin", &picker.metrics.to_string()]);
    checked.assert_faults(name, "", &[]);
    assert_eq!(checked.code, 0, "{name}");
}

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_wrong_with_shipped_limits_and_a_redis_of_their_own() {
    const SHIPPED: &str = "redis://redis.default.svc:6379/0";
    let (redis, fleet) = (RedisProcess::start().await, SimProcess::start(2, &[]).await);
    let text = with_servers("limits", &["10.0.0.11:8000", "10.0.0.12:8000"], &fleet.servers);
    assert!(text.contains(SHIPPED));
    let text = text.replace(SHIPPED, &redis.url()).replace("timeout: 50ms", "timeout: 1s");
    assert_nothing_is_wrong("limits", &text, 2, scratch("check-limits").path()).await;
}

#[test]
fn system_that_does_not_run_has_another_exit_code_than_one_with_mistakes() {
    let closed = || TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").to_string();
    let checked = Checked::run(&["--admin", &closed(), "--envoy-admin", &closed()]);
    assert_eq!(checked.code, 69);
}
