//! A picker whose admin pages need a bearer token: `attache check --live --token-file FILE`.

use super::Checked;
use crate::api::{FakeApi, STABLE, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::process::scratch;
use crate::support::sim::SimProcess;
use std::process::Command;

/// The pages that the check reads, and that need a token.
const PAGES: [&str; 5] = ["/endpoints", "/config_dump", "/metrics", "/api/peers", "/api/status"];

/// Checks that these pages could not be read, each with this status and this fix.
fn assert_unread(checked: &Checked, pages: &[&str], status: &str, fix: &str) {
    let unread = checked.of("picker-pages");
    assert_eq!(unread.len(), pages.len(), "{unread:#?}");
    for page in pages {
        let found = format!("`{page}` is refused with status {status}");
        let finding = unread.iter().find(|finding| finding["found"] == found.as_str());
        let finding = finding.unwrap_or_else(|| panic!("no `{found}`: {unread:#?}"));
        assert!(finding["fix"].as_str().is_some_and(|text| text.contains(fix)), "{finding}");
        assert_eq!(finding["severity"], "unknown", "{finding}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn token_of_a_file_opens_the_pages_of_the_picker() {
    let (api, fleet) = (FakeApi::start().await, SimProcess::start(1, &[]).await);
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[fleet.servers[0].port()]));
    api.pod(pod("a", "vllm", "127.0.0.1"));
    api.account("operators-token", "jane");
    api.account("viewers-token", "max");
    for (number, page) in PAGES.iter().enumerate() {
        api.grant("jane", "get", page);
        if number > 0 {
            api.grant("max", "get", page);
        }
    }
    let arguments = ["--pool-name", "vllm", "--metrics-endpoint-auth"];
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
    picker.until_ready().await;
    let directory = scratch("check-token");
    let file = directory.path().join("token");
    let (admin, token) = (picker.metrics.to_string(), file.display().to_string());
    let with_token = || Checked::run(&["--admin", &admin, "--token-file", &token]);

    assert_unread(&Checked::run(&["--admin", &admin]), &PAGES, "401", "`--token-file FILE`");

    let missing = Command::new(env!("CARGO_BIN_EXE_attache"))
        .args(["check", "--live", "--admin", &admin, "--token-file", &token])
        .output()
        .expect("attache");
    let text = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert_eq!(missing.status.code(), Some(64), "{text}");
    assert!(text.contains(&format!("`--token-file`: can't read {token}")), "{text}");

    std::fs::write(&file, "made-up\n").expect("a token");
    assert_unread(&with_token(), &PAGES, "401", "the token in `--token-file` is not valid");

    std::fs::write(&file, "viewers-token\n").expect("a token");
    assert_unread(&with_token(), &PAGES[..1], "403", "give the user of the token the right `get` on `/endpoints`");
    std::fs::write(&file, "operators-token\n").expect("a token");
    let checked = with_token();
    assert_unread(&checked, &[], "", "");
    assert_eq!(checked.of("picker-version")[0]["severity"], "ok");
    checked.assert_faults("a token with all rights", "picker", &[]);
}
