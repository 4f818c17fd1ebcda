//! A real Prometheus for one test.

use super::client;
use super::process::{Process, eventually, repository, scratch};
use serde_json::Value;
use std::fmt::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

/// `prometheus` or `promtool`, as tests/run.sh installs them. A missing program fails the test, so that it is not skipped
/// silently.
pub(crate) fn program(name: &str) -> PathBuf {
    let tools = std::env::var_os("ATTACHE_TOOLS").map_or_else(|| repository().join("target/tools"), PathBuf::from);
    let path = tools.join("prometheus").join(name);
    assert!(path.exists(), "no {name} at {}: run `tests/install-prometheus.sh {}`", path.display(), tools.display());
    path
}

/// A Prometheus that reads targets each second.
pub(crate) struct PrometheusProcess {
    address: SocketAddr,
    _process: Process,
}

impl PrometheusProcess {
    /// Starts one with a configuration file, and waits until it answers.
    pub(crate) async fn start(config: &Path) -> Self {
        Self::start_with(config, &[]).await
    }

    /// As `start`, with further arguments.
    pub(crate) async fn start_with(config: &Path, more: &[&str]) -> Self {
        let address = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
        let directory = scratch("prometheus");
        let mut command = Command::new(program("prometheus"));
        command.arg("--config.file").arg(config).arg("--storage.tsdb.path").arg(directory.path().join("data"));
        command.args(["--web.listen-address", &address.to_string()]).args(more);
        let process = Process::spawn("prometheus", &mut command, directory);
        eventually("Prometheus to be ready", async || {
            client::get(address, "/-/ready").await.is_ok_and(|reply| reply.status.is_success()).then_some(())
        })
        .await;
        Self { address, _process: process }
    }

    /// The `data` of a response of its API.
    pub(crate) async fn get(&self, path: &str) -> Value {
        let reply = client::get(self.address, path).await.expect("an answer of Prometheus");
        let answer = reply.json();
        assert_eq!((reply.status.as_u16(), &answer["status"]), (200, &Value::from("success")), "{path}: {answer}");
        answer["data"].clone()
    }

    /// The numbers that a query returns now, one for each series; NaN is left out.
    pub(crate) async fn query(&self, expression: &str) -> Vec<f64> {
        let encoded = expression.bytes().fold(String::new(), |mut text, byte| {
            write!(text, "%{byte:02x}").expect("text");
            text
        });
        let data = self.get(&format!("/api/v1/query?query={encoded}")).await;
        let results = data["result"].as_array().unwrap_or_else(|| panic!("{expression}: {data}"));
        let value = |result: &Value| result["value"][1].as_str().and_then(|number| number.parse::<f64>().ok());
        results.iter().filter_map(value).filter(|number| !number.is_nan()).collect()
    }
}
