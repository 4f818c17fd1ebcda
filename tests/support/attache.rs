//! The `attache` binary, started as an operator starts it, and its counters.

use super::process::{Process, eventually, scratch};
use super::{Error, client};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::Path;
use std::process::Command;

/// A running picker.
pub(crate) struct AttacheProcess {
    pub(crate) process: Process,
    pub(crate) grpc: SocketAddr,
    pub(crate) health: SocketAddr,
    pages: AdminPages,
}

/// The admin pages of a picker.
pub(crate) struct AdminPages {
    pub(crate) metrics: SocketAddr,
}

impl Deref for AttacheProcess {
    type Target = AdminPages;

    fn deref(&self) -> &AdminPages {
        &self.pages
    }
}

/// Counters of the picker from its metrics page.
#[derive(Debug, Default)]
pub(crate) struct Books {
    pub(crate) opened: u64,
    pub(crate) outcomes: BTreeMap<String, u64>,
    pub(crate) in_flight: u64,
}

impl AttacheProcess {
    /// Starts the picker for `endpoints` on ports of the system's choice and waits until it listens and is ready.
    pub(crate) async fn start(endpoints: &[SocketAddr], more: &[&str]) -> Self {
        let mut arguments: Vec<String> = Vec::new();
        for endpoint in endpoints {
            arguments.extend(["--endpoint".to_owned(), endpoint.to_string()]);
        }
        arguments.extend(more.iter().map(|&argument| argument.to_owned()));
        Self::with_arguments(&arguments).await
    }

    /// Starts the picker by a configuration file of this text.
    pub(crate) async fn configured(text: &str) -> Self {
        Self::with_arguments(&["--config-text".to_owned(), text.to_owned()]).await
    }

    /// Starts the picker by a configuration file of this text, with these variables in its environment.
    pub(crate) async fn configured_with<V: AsRef<OsStr>>(text: &str, variables: &[(&str, V)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        Self::with_command(command, &["--config-text".to_owned(), text.to_owned()]).await
    }

    /// Starts the picker with a configuration file, which it watches.
    pub(crate) async fn with_file(file: &Path, more: &[&str]) -> Self {
        let mut arguments = vec!["--config-file".to_owned(), file.display().to_string()];
        arguments.extend(more.iter().map(|&argument| argument.to_owned()));
        Self::with_arguments(&arguments).await
    }

    /// Starts the picker with a limit of this many open files.
    pub(crate) async fn with_open_files(count: u32, endpoints: &[SocketAddr]) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {count}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_attache")]);
        let endpoints = endpoints.iter().flat_map(|endpoint| ["--endpoint".to_owned(), endpoint.to_string()]);
        Self::with_command(command, &endpoints.collect::<Vec<_>>()).await
    }

    /// Starts the picker with these arguments.
    pub(crate) async fn with_arguments(arguments: &[String]) -> Self {
        Self::with_command(Command::new(env!("CARGO_BIN_EXE_attache")), arguments).await
    }

    /// Starts the picker with these arguments and these variables in its environment.
    pub(crate) async fn with_variables(arguments: &[String], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        command.envs(variables.iter().copied());
        Self::with_command(command, arguments).await
    }

    /// Starts the picker in the cluster that this kubeconfig names, and waits until it listens. It
    /// may not be ready yet.
    pub(crate) async fn in_cluster(kubeconfig: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        command.env("KUBECONFIG", kubeconfig);
        Self::listening(command, &arguments.iter().map(|&word| word.to_owned()).collect::<Vec<_>>()).await
    }

    /// Starts the picker by `command`, which runs its binary.
    pub(crate) async fn with_command(command: Command, arguments: &[String]) -> Self {
        let started = Self::listening(command, arguments).await;
        started.until_ready().await;
        started
    }

    /// Starts the picker with these arguments and waits until it listens. It may not be ready yet.
    #[allow(dead_code, reason = "only the end-to-end tests start pickers that are not ready")]
    pub(crate) async fn unready(arguments: &[String]) -> Self {
        Self::listening(Command::new(env!("CARGO_BIN_EXE_attache")), arguments).await
    }

    async fn listening(mut command: Command, arguments: &[String]) -> Self {
        command.args(["run", "--bind", "127.0.0.1", "--log-format", "json"]);
        if !arguments.iter().any(|argument| argument.starts_with("--secure-serving")) {
            command.arg("--secure-serving=false");
        }
        command.args(["--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"]);
        command.args(arguments);
        let mut process = Process::spawn("attache", &mut command, scratch("attache"));
        let line = process
            .wait_for("line with its listeners", |process| {
                let log = process.stderr();
                let mut lines = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
                lines.find(|line| field(line, "message").as_deref() == Some("listening"))
            })
            .await;
        let address = |name: &str| -> SocketAddr {
            let text = field(&line, name).unwrap_or_else(|| panic!("no {name} in {line}"));
            text.parse().unwrap_or_else(|_| panic!("{name} is not an address in {line}"))
        };
        Self {
            grpc: address("grpc"),
            health: address("health"),
            pages: AdminPages { metrics: address("metrics") },
            process,
        }
    }
}

impl AdminPages {
    /// Whether its readiness page reports ready.
    pub(crate) async fn is_ready(&self) -> bool {
        client::get(self.metrics, "/ready").await.is_ok_and(|reply| reply.status.is_success())
    }

    /// Waits until it reports ready.
    pub(crate) async fn until_ready(&self) {
        eventually("the picker to be ready", || async { self.is_ready().await.then_some(()) }).await;
    }

    /// The sum of all metrics with this name, or the metric with this name and these labels. 0 if there is none.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let page = client::get(self.metrics, "/metrics").await.expect("the picker's metrics");
        let text = String::from_utf8_lossy(&page.body).into_owned();
        let series = text.lines().filter_map(|line| line.rsplit_once(' '));
        series
            .filter(|(series, _)| *series == name || series.split('{').next() == Some(name))
            .filter_map(|(_, v)| v.parse::<f64>().ok())
            .sum()
    }

    /// Waits until a metric has this value.
    pub(crate) async fn until_metric(&self, name: &str, value: f64) {
        eventually(&format!("{name} to be {value}"), || async { (self.metric(name).await == value).then_some(()) })
            .await;
    }

    /// The content of the page `/endpoints` for each endpoint.
    pub(crate) async fn endpoints(&self) -> Vec<serde_json::Value> {
        let page = client::get(self.metrics, "/endpoints").await.expect("the picker's endpoints").json();
        let mut all = Vec::new();
        collect("endpoints", &page, &mut all);
        all
    }

    /// Reads the counters.
    pub(crate) async fn books(&self) -> Result<Books, Error> {
        let page = client::get(self.metrics, "/metrics").await?;
        let mut books = Books::default();
        for line in String::from_utf8_lossy(&page.body).lines() {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let value = value.parse::<f64>().unwrap_or(0.0) as u64;
            let name = series.split('{').next().unwrap_or("");
            match name {
                "attache_streams_opened_total" => books.opened += value,
                "attache_streams_total" => *books.outcomes.entry(label(series, "outcome")).or_default() += value,
                _ => {}
            }
        }
        books.in_flight = in_flight(&client::get(self.metrics, "/endpoints").await?.json());
        Ok(books)
    }

    /// Waits for the end of all streams and checks the totals: each opened stream has one outcome, and
    /// no endpoint holds a request.
    pub(crate) async fn assert_settled(&self) -> Books {
        let mut last = Books::default();
        for _ in 0..1000 {
            last = self.books().await.expect("the picker's metrics and endpoints");
            if last.opened == last.outcomes.values().sum::<u64>() && last.in_flight == 0 {
                return last;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("the picker's books do not close: {last:?}");
    }
}

/// A field of a log line, at its top or under `fields`.
fn field(line: &serde_json::Value, name: &str) -> Option<String> {
    line.get(name).or_else(|| line.get("fields")?.get(name))?.as_str().map(str::to_owned)
}

fn label(series: &str, name: &str) -> String {
    let value = series.split(&format!("{name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
    value.unwrap_or("").to_owned()
}

/// The elements of all lists under this key, at any depth.
fn collect(key: &str, value: &serde_json::Value, into: &mut Vec<serde_json::Value>) {
    match value {
        serde_json::Value::Object(map) => {
            into.extend(map.get(key).and_then(|list| list.as_array()).into_iter().flatten().cloned());
            map.values().for_each(|inner| collect(key, inner, into));
        }
        serde_json::Value::Array(list) => list.iter().for_each(|inner| collect(key, inner, into)),
        _ => {}
    }
}

/// Requests and tokens that all endpoints of all pools hold. A page without these fields proves nothing,
/// so it fails the test.
fn in_flight(page: &serde_json::Value) -> u64 {
    let list = |value: &serde_json::Value, name: &str| -> Vec<serde_json::Value> {
        value[name].as_array().unwrap_or_else(|| panic!("no {name} in {value}")).clone()
    };
    let pools = list(page, "pools");
    assert!(!pools.is_empty(), "no pool in {page}");
    let endpoints = pools.iter().flat_map(|pool| list(pool, "endpoints"));
    endpoints
        .map(|endpoint| endpoint["in_flight"].as_u64().unwrap_or_else(|| panic!("no in_flight in {endpoint}")))
        .sum()
}
