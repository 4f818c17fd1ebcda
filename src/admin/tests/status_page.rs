use super::*;
use crate::page::FILES;

/// The text of a file of the page.
async fn file(address: SocketAddr, name: &str) -> String {
    let (status, _, text) = call(address, "GET", &format!("/page/{name}")).await;
    assert_eq!(status, 200, "{name}");
    text
}

/// The names of members that a script reads from the variable `owner`.
fn members<'s>(script: &'s str, owner: &str) -> Vec<&'s str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (at, _) in script.match_indices(owner) {
        let before = script[..at].chars().next_back().unwrap_or(' ');
        let Some(rest) = script[at + owner.len()..].strip_prefix("?.").or(script[at + owner.len()..].strip_prefix('.'))
        else {
            continue;
        };
        if is_name(before) || before == '.' || before == '/' {
            continue;
        }
        let name = rest.split(|c| !is_name(c)).next().unwrap_or_default();
        // A sentence may end with the word.
        found.extend(Some(name).filter(|name| !name.is_empty()));
    }
    found
}

#[tokio::test]
async fn page_reads_only_existing_json_keys() {
    let (mut state, endpoints) = state();
    state.degraded = Arc::new(|| vec![("no_body", 1)]);
    let clock = state.clock;
    (0..2).for_each(|_| {
        _ = endpoints[1].health.record(HealthOutcome::ConnectFailure, clock.now(), &HealthPolicy::default())
    });
    state.parts.metrics.rejection(Some("default"), attache_types::error::Reason::QueueFull);
    let now = state.clock.now();
    state.parts.metrics.by_name.model("m", now).routed();
    state.warnings.update(&(state.pools)(), &state.parts.metrics, &state.history, clock);
    let address = start(state).await;
    let mut known = Vec::new();
    for page in ["/endpoints", "/decisions", "/api/status", "/api/history"] {
        known.extend(keys(&get_json(address, page).await));
    }
    let scripts = FILES.iter().filter(|file| file.name.ends_with(".js")).map(|file| file.text).collect::<String>();
    let owners = "record agent endpoint metrics ejection pool status model rejection certificate warning";
    for owner in owners.split(' ') {
        let read = members(&scripts, owner);
        assert!(!read.is_empty(), "{owner}");
        for key in read {
            assert!(known.iter().any(|known| known == key), "{owner}.{key} is in no JSON page");
        }
    }
}

#[tokio::test]
async fn page_loads_only_its_own_files_which_fit_into_120_kb() {
    let (state, _) = state();
    let address = start(state).await;
    let (status, kind, document) = call(address, "GET", "/").await;
    assert_eq!((status, kind.as_str()), (200, "text/html; charset=utf-8"));
    let mut bytes = document.len();
    for name in FILES.iter().map(|file| file.name) {
        let text = file(address, name).await;
        bytes += text.len();
        assert!(text.lines().count() <= 600, "{name}");
        for outside in ["https://", "@import", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval("] {
            assert!(!text.contains(outside), "{name} has {outside}");
        }
        let named = document.contains(&format!("/page/{name}"))
            || FILES.iter().any(|other| other.text.contains(&format!("\"./{name}\"")));
        assert!(named, "nothing loads {name}");
    }
    assert!(bytes <= 120 << 10, "{bytes} bytes");
    assert_eq!(call(address, "GET", "/page/none.js").await.0, 404);
}

#[tokio::test]
async fn policy_of_the_page_allows_no_inline_script_and_no_other_host() {
    let (state, _) = state();
    let address = start(state).await;
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<axum::body::Bytes>>();
    for path in ["/", "/page/main.js"] {
        let response = client.get(format!("http://{address}{path}").parse().unwrap()).await.unwrap();
        let policy = response.headers()["content-security-policy"].to_str().unwrap().to_owned();
        assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe") && policy.contains("require-trusted-types-for 'script'"), "{policy}");
    }
    let (_, _, document) = call(address, "GET", "/").await;
    assert!(!document.contains("style=") && !document.contains("<style") && !document.contains("onclick"));
}
