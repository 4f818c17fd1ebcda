//! Reads the configuration of an Envoy: from its admin port, or from its bootstrap file.

use super::config::EnvoyConfig;
use crate::finding::{Check, Finding};
use crate::http::Http;
use serde_json::{Map, Value};
use std::path::Path;

pub(super) const CHECKS: &[&Check] = &[&REACHABLE];

static REACHABLE: Check = Check {
    id: "envoy-reachable",
    about: "Envoy's admin port answers, or its file can be read",
    why: "Without Envoy's configuration, nothing about Envoy can be checked.",
};

/// Largest bootstrap file, 16 MiB.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// What the admin port or the file says.
#[derive(Debug)]
pub(super) struct EnvoySource {
    /// `Envoy` and the URL or the path.
    pub(super) name: String,
    pub(super) config: EnvoyConfig,
    /// What only a running Envoy says.
    pub(super) live: Option<Live>,
}

/// What only a running Envoy says.
#[derive(Debug)]
pub(super) struct Live {
    /// The page `/server_info`.
    pub(super) info: Value,
    /// The page `/clusters`, with its hosts.
    pub(super) clusters: Value,
    /// The page `/certs`; null if Envoy does not show it.
    pub(super) certificates: Value,
    /// Counters and gauges that were used since the start, by name.
    pub(super) statistics: Map<String, Value>,
}

/// Reads the pages of an admin port. `is_named` says whether the user named it.
///
/// # Errors
/// The finding that it does not answer.
pub(super) async fn from_admin(http: &Http, admin: &str, is_named: bool) -> Result<(EnvoySource, Finding), Finding> {
    let name = format!("Envoy {admin}");
    let pages = tokio::try_join!(
        http.json(admin, "/config_dump?include_eds"),
        http.json(admin, "/server_info"),
        http.json(admin, "/clusters?format=json"),
        http.json(admin, "/stats?format=json&usedonly"),
    );
    match pages {
        Ok((dump, info, clusters, statistics)) => {
            let certificates = http.json(admin, "/certs").await.unwrap_or_default();
            let live = Live { info, clusters, certificates, statistics: by_name(&statistics) };
            let reachable = REACHABLE.ok(&name, "the admin port answers");
            Ok((EnvoySource { name, config: EnvoyConfig::from_dump(&dump), live: Some(live) }, reachable))
        }
        Err(error) => {
            let found = format!("the admin port can't be read: {error}");
            let fix = "name the admin port with `--envoy-admin URL`, or a bootstrap file with `--envoy-config FILE`";
            Err(if is_named { REACHABLE.error(&name, found, fix) } else { REACHABLE.unknown(&name, found, fix) })
        }
    }
}

/// Values by name, from the page `/stats`.
fn by_name(page: &Value) -> Map<String, Value> {
    let stats = page["stats"].as_array().map_or(&[][..], Vec::as_slice);
    stats.iter().filter_map(|stat| Some((stat["name"].as_str()?.to_owned(), stat.get("value")?.clone()))).collect()
}

/// Reads a bootstrap file, YAML or JSON.
///
/// # Errors
/// The finding that it can't be read.
pub(super) async fn from_file(path: &Path) -> Result<(EnvoySource, Finding), Finding> {
    let name = format!("Envoy {}", path.display());
    match read(path).await {
        Ok(bootstrap) => {
            let reachable = REACHABLE.ok(&name, "the file can be read");
            Ok((EnvoySource { name, config: EnvoyConfig::from_bootstrap(&bootstrap), live: None }, reachable))
        }
        Err(error) => Err(REACHABLE.error(&name, error, "name a bootstrap file, such as `envoy/original-dst.yaml`")),
    }
}

async fn read(path: &Path) -> Result<Value, String> {
    let size = tokio::fs::metadata(path).await.map_err(|error| format!("the file can't be read: {error}"))?.len();
    if size > MAX_FILE_BYTES {
        return Err(format!("the file has {size} bytes, {MAX_FILE_BYTES} are allowed"));
    }
    let text = tokio::fs::read_to_string(path).await.map_err(|error| format!("the file can't be read: {error}"))?;
    parse(&text)
}

/// A bootstrap from its text.
fn parse(text: &str) -> Result<Value, String> {
    // Comments are skipped: the parser bounds how many lines of them it keeps.
    let options = serde_saphyr::options! { emit_comments: false };
    let value: Value = serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let whole = error.to_string();
        format!("the file is not YAML: {}", whole.lines().next().unwrap_or_default())
    })?;
    let is_bootstrap = ["static_resources", "staticResources", "dynamic_resources", "dynamicResources", "admin"];
    if is_bootstrap.iter().any(|key| value.get(key).is_some()) {
        Ok(value)
    } else {
        Err("the file is no bootstrap: `static_resources`, `dynamic_resources` and `admin` are missing".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bootstrap_may_have_any_number_of_comment_lines() {
        let text = format!("{0}admin:\n{0}  address: {{}}\n", "# a line\n".repeat(100));
        assert_eq!(parse(&text).map(|value| value["admin"].is_object()), Ok(true));
        assert!(parse("a: 1").is_err_and(|error| error.contains("no bootstrap")));
    }
}
