//! Metrics and admin pages that require authorization by the cluster (TokenReview and SubjectAccessReview).

use super::members::NO_METRICS;
use crate::api::{FakeApi, STABLE, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use bytes::Bytes;
use http::{HeaderValue, header};

const SCRAPER: &str = "system:serviceaccount:monitoring:prometheus";

async fn get_page(picker: &AttacheProcess, path: &str, token: Option<&str>) -> Reply {
    let mut request = client::request("GET", picker.metrics, Http::H1, path, Payload::sized(Bytes::new()));
    if let Some(token) = token {
        let value = HeaderValue::from_str(&format!("Bearer {token}")).expect("a header value");
        request.headers_mut().insert(header::AUTHORIZATION, value);
    }
    client::send(picker.metrics, Http::H1, request).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_admin_pages_require_authorization() {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    api.account("scraper", SCRAPER);
    api.account("passer-by", "jane");
    api.grant(SCRAPER, "get", "/metrics");
    let arguments = ["--pool-name", "vllm", "--metrics-endpoint-auth", NO_METRICS];
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
    // Probes have no token.
    picker.until_ready().await;
    assert_eq!(get_page(&picker, "/live", None).await.status, 200);

    for path in ["/metrics", "/", "/config_dump", "/decisions", "/endpoints", "/api/nodes/scheduling"] {
        let nobody = get_page(&picker, path, None).await;
        assert_eq!((nobody.status.as_u16(), nobody.header("www-authenticate")), (401, "Bearer"), "{path}");
    }
    assert_eq!(api.request_count("create", "tokenreviews"), 0, "without a token there is nothing to ask");
    assert_eq!(get_page(&picker, "/metrics", Some("made-up")).await.status, 401);
    assert_eq!(
        api.request_count("create", "subjectaccessreviews"),
        0,
        "an unknown token has no user whose access could be reviewed"
    );

    let page = get_page(&picker, "/metrics", Some("scraper")).await;
    assert_eq!(page.status, 200);
    assert!(String::from_utf8_lossy(&page.body).contains("attache_streams_total"));
    let other = get_page(&picker, "/config_dump", Some("scraper")).await;
    assert_eq!(other.status, 403, "a right to one page is none to another");
    let denied = get_page(&picker, "/metrics", Some("passer-by")).await;
    assert_eq!((denied.status.as_u16(), &*denied.body), (403, &b"Authorization denied for user jane\n"[..]));
    assert_eq!(get_page(&picker, "/no-such-page", Some("passer-by")).await.status, 404);

    let asked = (api.request_count("create", "tokenreviews"), api.request_count("create", "subjectaccessreviews"));
    assert_eq!(asked, (4, 3), "made-up, scraper twice, passer-by");
    for _ in 0..5 {
        assert_eq!(get_page(&picker, "/metrics", Some("scraper")).await.status, 200);
        assert_eq!(get_page(&picker, "/metrics", Some("passer-by")).await.status, 403);
        assert_eq!(get_page(&picker, "/metrics", Some("made-up")).await.status, 401);
    }
    let still = (api.request_count("create", "tokenreviews"), api.request_count("create", "subjectaccessreviews"));
    assert_eq!(still, asked, "remembered");

    // Without the right to create reviews, new tokens are rejected and cached ones stay valid.
    api.forbid("create", "tokenreviews", true);
    assert_eq!(get_page(&picker, "/metrics", Some("another")).await.status, 500);
    assert_eq!(get_page(&picker, "/metrics", Some("scraper")).await.status, 200);
    let failure_lines = |log: String| log.lines().filter(|line| line.contains("token review failed")).count();
    assert_eq!(get_page(&picker, "/metrics", Some("a-third")).await.status, 500);
    assert_eq!(failure_lines(picker.process.stderr()), 1, "logged once");
    api.forbid("create", "tokenreviews", false);
    assert_eq!(
        get_page(&picker, "/metrics", Some("another")).await.status,
        401,
        "what could not be asked is not remembered"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn open_pages_send_no_token_reviews() {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--pool-name", "vllm", NO_METRICS]).await;
    for token in [None, Some("made-up")] {
        assert_eq!(get_page(&picker, "/metrics", token).await.status, 200);
    }
    assert_eq!(api.request_count("create", "tokenreviews"), 0);
}
