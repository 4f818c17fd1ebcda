//! Checks of a running system: Envoy, Attaché, model servers, and what they use.
//!
//! **Owns** the checks of `attache check --live`, their ids, and the report of their findings.
//! **Called by** `cli/check.rs`.
//! **Must not** change anything in what it looks at, or end at a target that does not answer: that is a finding too.
//!
//! Read first: `finding.rs` (a check, its findings, the report), then `envoy.rs`. A new check is a `Check` in the file
//! of its subject, and a line in the list `CHECKS` of that file.

mod clock;
mod envoy;
mod finding;
mod http;
mod kubernetes;
mod nats;
mod picker;
mod redis;
mod servers;
mod text;

pub use finding::{Check, Finding, Report, Severity};
pub use text::TextStyle;

use attache_config::Settings;
use attache_scheduling::Registry;
use reqwest::header::HeaderValue;
use std::path::PathBuf;

/// What to look at.
#[derive(Debug, Default)]
pub struct Targets {
    /// URLs of Envoy's admin ports, without a slash at the end.
    pub envoy_admins: Vec<String>,
    /// Whether the user named `envoy_admins`. A default that does not answer is no error.
    pub is_envoy_named: bool,
    /// Bootstrap files of Envoy.
    pub envoy_files: Vec<PathBuf>,
    /// URL of Attaché's admin port, without a slash at the end.
    pub picker: String,
    /// Whether the user named `picker`.
    pub is_picker_named: bool,
    /// The header `authorization` for the picker, if its pages need one.
    pub token: Option<HeaderValue>,
    /// The configuration file, if one was given and is correct. Without it, the configuration in effect counts, as the
    /// picker shows it.
    pub settings: Option<Settings>,
    /// The plugins that configurations may name.
    pub registry: Registry,
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
    let (envoy, (picker, view)) = tokio::join!(envoy::check(targets, &http), picker::check(&http, targets));
    report.extend(envoy);
    report.extend(picker);
    let ((servers, mut clocks), cluster, nats, redis) = tokio::join!(
        servers::check(&http, targets, &view),
        kubernetes::check(targets, &view),
        nats::check(targets, &view),
        redis::check(targets, &view),
    );
    report.extend(servers);
    clocks.extend(view.clock);
    clock::judge(&clocks, &mut report);
    for part in [cluster, nats, redis] {
        report.extend(part);
    }
    report
}

/// All checks, in the order of the reference.
pub fn checks() -> impl Iterator<Item = &'static Check> {
    let mut lists: Vec<&[&Check]> = [envoy::CHECKS, picker::CHECKS, servers::CHECKS].concat();
    lists.extend(kubernetes::CHECKS);
    lists.push(nats::CHECKS);
    lists.push(redis::CHECKS);
    lists.push(clock::CHECKS);
    lists.into_iter().flatten().copied().chain([&CLIENT])
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
