//! `attache check --live` finds planted mistakes in real systems, names their fix, and finds nothing in shipped
//! configurations.

mod conditions;
mod envoy;
mod fake;
mod full;
mod incidents;
mod kubernetes;
mod picker;
mod servers;
mod shipped;
mod stores;
mod token;

use crate::support::attache::AttacheProcess;
use crate::support::process::eventually;
use serde_json::Value;
use std::net::SocketAddr;
use std::process::Command;
use tokio::net::TcpSocket;

/// Keys of a pool whose metrics are not late, however busy the machine is. By default, a scrape fails after 500 ms, and
/// metrics are stale after 2 s: both are findings.
const PATIENT: &str = "scrape: {timeout: 30s, staleAfter: 60s}";

/// Starts a picker with these flags and a pool of these servers, and waits for their metrics, which are then not late.
async fn patient_picker(servers: &[SocketAddr], more: &[&str]) -> AttacheProcess {
    let listed: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools: [{{name: a, {PATIENT}, endpoints: [{}]}}]\n",
        listed.join(", ")
    );
    let arguments: Vec<String> =
        [&["--config-text", text.as_str()][..], more].concat().iter().map(|&a| a.to_owned()).collect();
    let picker = AttacheProcess::with_arguments(&arguments).await;
    until_scraped(&picker, servers.len()).await;
    picker
}

/// Waits until the picker warns of this. It looks at itself every five seconds.
async fn until_warned(picker: &AttacheProcess, pool: &str, code: &str) {
    picker.until_metric(&format!("attache_warnings{{pool=\"{pool}\",code=\"{code}\"}}"), 1.0).await;
}

/// Waits until the picker shows metrics of this many endpoints. An endpoint is ready slightly before that.
async fn until_scraped(picker: &AttacheProcess, endpoints: usize) {
    eventually("all servers to be scraped", async || {
        let known = picker.endpoints().await;
        (known.iter().filter(|endpoint| endpoint["metrics"].is_object()).count() == endpoints).then_some(())
    })
    .await;
}

/// An address at which nothing listens. Its port stays bound until the tests end, so that no other process gets it.
fn closed() -> SocketAddr {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
    let address = socket.local_addr().expect("its address");
    std::mem::forget(socket);
    address
}

/// What `attache check --live` printed.
pub(crate) struct Checked {
    pub(crate) code: i32,
    findings: Vec<Value>,
}

impl Checked {
    /// Runs `attache check --live --output json` with these arguments.
    pub(crate) fn run(arguments: &[&str]) -> Self {
        Self::by(Command::new(env!("CARGO_BIN_EXE_attache")), arguments)
    }

    /// As [`run`](Self::run), in the cluster that this kubeconfig names.
    pub(crate) fn with_kubeconfig(kubeconfig: &std::path::Path, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        command.env("KUBECONFIG", kubeconfig);
        Self::by(command, arguments)
    }

    fn by(mut command: Command, arguments: &[&str]) -> Self {
        let output = command.args(["check", "--live", "--output", "json"]).args(arguments).output().expect("attache");
        let shown = || String::from_utf8_lossy(&output.stderr).into_owned();
        let printed: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", shown()));
        let findings = printed["live"]["findings"].as_array().expect("findings").clone();
        Self { code: output.status.code().expect("an exit code"), findings }
    }

    /// Findings about what is wrong, of checks whose id begins with `prefix`.
    pub(crate) fn faults(&self, prefix: &str) -> Vec<&Value> {
        let is_fault = |finding: &&Value| ["warning", "error"].contains(&finding["severity"].as_str().unwrap_or(""));
        let of_subject = |finding: &&Value| finding["id"].as_str().is_some_and(|id| id.starts_with(prefix));
        self.findings.iter().filter(is_fault).filter(of_subject).collect()
    }

    /// The findings of the check with this id, also those without a fault.
    pub(crate) fn of(&self, id: &str) -> Vec<&Value> {
        self.findings.iter().filter(|finding| finding["id"] == id).collect()
    }

    /// Whether any finding is an error.
    pub(crate) fn has_error(&self) -> bool {
        self.findings.iter().any(|finding| finding["severity"] == "error")
    }

    /// Checks that exactly these are wrong, among the checks whose id begins with `prefix`. Each is an id and a word
    /// of its fix.
    pub(crate) fn assert_faults(&self, row: &str, prefix: &str, wanted: &[(&str, &str)]) {
        let faults = self.faults(prefix);
        let mut ids: Vec<&str> = faults.iter().filter_map(|fault| fault["id"].as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut expected: Vec<&str> = wanted.iter().map(|(id, _)| *id).collect();
        expected.sort_unstable();
        assert_eq!(ids, expected, "{row}: {faults:#?}");
        for (id, word) in wanted {
            let has_word = |fault: &&&Value| fault["id"] == *id && fault["fix"].as_str().unwrap_or("").contains(word);
            assert!(faults.iter().any(|fault| has_word(&fault)), "{row}: no fix of {id} with {word:?}: {faults:#?}");
        }
        for fault in faults {
            assert!(fault["why"].as_str().is_some_and(|why| !why.is_empty()), "{row}: {fault}");
        }
    }
}
