//! The site builds: no page, link or anchor is missing, and the search index exists.

use super::markdown::root;
use crate::tools;
use std::process::Command;

/// What operators type into the search, and the page that must be among the results.
const SEARCHED: [(&str, &str); 20] = [
    ("503", "how-to/troubleshooting.html"),
    ("503 upstream connect error", "how-to/troubleshooting.html"),
    ("no healthy upstream", "how-to/troubleshooting.html"),
    ("load only", "how-to/troubleshooting.html"),
    ("no_ready_endpoint", "reference/rejections.html"),
    ("grafana", "how-to/monitor.html"),
    ("attache_ejections_total", "reference/metrics.html"),
    ("ejections", "how-to/alerts.html"),
    ("otlp-endpoint", "reference/command-line.html"),
    ("trustClientHeaders", "reference/configuration.html"),
    ("x-gateway-destination-endpoint", "reference/headers.html"),
    // Messages of the log.
    ("KV event connection failed", "reference/log-messages.html"),
    ("TLS handshake failed", "reference/log-messages.html"),
    ("lost the connection to NATS", "reference/log-messages.html"),
    ("configuration refused", "reference/log-messages.html"),
    ("endpoint ejected", "reference/log-messages.html"),
    ("InferencePool not found", "reference/log-messages.html"),
    // In blocks of code.
    ("histogram_quantile", "how-to/monitor.html"),
    ("apt-get install", "how-to/install.html"),
    ("logRatio", "how-to/explain.html"),
];

/// Checks the index for [`SEARCHED`]: a page is found if one of its sections has all words, as the search splits them.
fn every_search_finds_its_page(index: &str) {
    let index: serde_json::Value = serde_json::from_str(index).expect("the index of the search");
    let separator = index["config"]["separator"].as_str().expect("the separator of words");
    assert!(separator.starts_with("[\\s\\-.") && !separator.contains('_'), "names are single words: {separator}");
    let words = |text: &str| -> Vec<String> {
        let parts = text.split(|character: char| !character.is_alphanumeric() && character != '_');
        parts.filter(|part| !part.is_empty()).map(str::to_lowercase).collect()
    };
    let sections = index["docs"].as_array().expect("sections");
    for (query, page) in SEARCHED {
        let found = sections.iter().any(|section| {
            let text = |key: &str| words(section[key].as_str().unwrap_or_default());
            let all = [text("title"), text("text")].concat();
            let here = section["location"].as_str().is_some_and(|location| location.starts_with(page));
            here && words(query).iter().all(|word| all.contains(word))
        });
        assert!(found, "a search for `{query}` does not find {page}");
    }
}

#[test]
fn site_builds_offline_in_strict_mode() {
    // The build itself is offline, and finds MkDocs installed.
    tools::installed("docs-tools");
    let site = std::env::temp_dir().join(format!("attache-site-{}", std::process::id()));
    let output = Command::new(root().join("docs/build.sh"))
        .arg(&site)
        .env("ATTACHE_TOOLS", tools::directory())
        // Requests to other machines fail.
        .envs(["http_proxy", "https_proxy", "all_proxy"].map(|name| (name, "http://127.0.0.1:9")))
        .output()
        .expect("docs/build.sh");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let index = std::fs::read_to_string(site.join("search/search_index.json")).expect("the index of the search");
    every_search_finds_its_page(&index);
    let start = std::fs::read_to_string(site.join("index.html")).expect("the first page");
    for part in start.split(['"', '\'']).filter(|part| part.starts_with("http")) {
        assert!(!part.ends_with(".js") && !part.ends_with(".css"), "the site loads {part} from elsewhere");
    }
    std::fs::remove_dir_all(site).expect("the site was there");
}
