//! `attache check --live` finds planted mistakes in real systems, names their fix, and finds nothing in shipped
//! configurations.

mod envoy;
mod fake;
mod incidents;
#[cfg(feature = "kube")]
mod kubernetes;
mod picker;
mod servers;
mod shipped;
#[cfg(all(feature = "nats", feature = "redis"))]
mod stores;

use serde_json::Value;
use std::process::Command;

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
    #[cfg(feature = "kube")]
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
