//! Checks of a running system: Envoy, Attaché, model servers, and what they use.
//!
//! **Owns** the checks of `attache check --live`, their ids, and the report of their findings.
//! **Called by** `cli/check.rs`.
//! **Must not** change anything in what it looks at, or end at a target that does not answer: that is a finding too.
//!
//! Read first: `finding.rs` (a check, its findings, the report), then `envoy.rs`. A new check is a `Check` in the file
//! of its subject, and a line in the list `CHECKS` of that file.

mod envoy;
mod finding;
mod http;
mod text;

pub use finding::{Check, Finding, Report, Severity};
pub use http::AdminUrl;
pub use text::TextStyle;

use attache_config::Settings;
use std::path::PathBuf;

/// What to look at.
#[derive(Debug, Default)]
pub struct Targets {
    /// Admin ports of Envoy.
    pub envoy_admins: Vec<AdminUrl>,
    /// Whether the user named `envoy_admins`. A default that does not answer is no error.
    pub is_envoy_named: bool,
    /// Bootstrap files of Envoy.
    pub envoy_files: Vec<PathBuf>,
    /// Admin port of Attaché.
    pub picker: AdminUrl,
    /// Whether the user named `picker`.
    pub is_picker_named: bool,
    /// The configuration file, if one was given and is correct.
    pub settings: Option<Settings>,
}

static CLIENT: Check = Check {
    id: "http-client",
    about: "HTTP requests can be made on this machine",
    why: "Without them, nothing can be checked.",
};

/// Runs all checks at the same time.
pub async fn check(targets: &Targets) -> Report {
    let mut report = Report::default();
    let http = match http::Http::new() {
        Ok(http) => http,
        Err(error) => {
            report.push(CLIENT.error(
                "this machine",
                format!("no HTTP client: {error}"),
                "check the system's TLS settings",
            ));
            return report;
        }
    };
    report.extend(envoy::check(targets, &http).await);
    report
}

/// All checks, in the order of the reference.
pub fn checks() -> impl Iterator<Item = &'static Check> {
    envoy::CHECKS.iter().copied().flatten().copied().chain([&CLIENT])
}

#[cfg(test)]
mod tests {
    use super::checks;
    use std::collections::BTreeSet;

    #[test]
    fn ids_are_kebab_case_and_unique() {
        let mut seen = BTreeSet::new();
        for check in checks() {
            let id = check.id;
            assert!(id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'), "{id}");
            assert!(seen.insert(id), "{id} twice");
            assert!(!check.about.is_empty() && check.why.ends_with('.'), "{id}");
        }
    }
}
