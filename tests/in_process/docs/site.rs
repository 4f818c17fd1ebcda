//! The site builds: no page, link or anchor is missing, and the search index exists.

use super::markdown::root;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn site_builds_offline_in_strict_mode() {
    let tools = std::env::var_os("ATTACHE_TOOLS").map_or_else(|| root().join("target/tools"), PathBuf::from);
    let docs = tools.join("docs");
    assert!(docs.join("mkdocs").is_dir(), "MkDocs is not in {}: run tests/install-docs-tools.sh", docs.display());
    let site = std::env::temp_dir().join(format!("attache-site-{}", std::process::id()));
    let output = Command::new(root().join("docs/build.sh"))
        .arg(&site)
        .env("ATTACHE_TOOLS", &tools)
        // Requests to other machines fail.
        .envs(["http_proxy", "https_proxy", "all_proxy"].map(|name| (name, "http://127.0.0.1:9")))
        .output()
        .expect("docs/build.sh");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let index = std::fs::read_to_string(site.join("search/search_index.json")).expect("the index of the search");
    assert!(index.contains("predicted-latency"), "the search finds no strategy");
    let start = std::fs::read_to_string(site.join("index.html")).expect("the first page");
    for part in start.split(['"', '\'']).filter(|part| part.starts_with("http")) {
        assert!(!part.ends_with(".js") && !part.ends_with(".css"), "the site loads {part} from elsewhere");
    }
    std::fs::remove_dir_all(site).expect("the site was there");
}
