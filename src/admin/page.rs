//! The status page. Its files are in `page/`: a document, a style sheet and modules that the browser loads by their
//! paths, so that the policy of the page allows no inline script.

use super::AdminState;
use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// The page loads only its own files, asks only this port, and can't be framed. Trusted Types make the browser refuse
/// text as HTML.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
);

/// A file of the page.
pub(super) struct PageFile {
    pub(super) name: &'static str,
    kind: &'static str,
    pub(super) text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const DOCUMENT: PageFile = PageFile { name: "index.html", kind: HTML, text: include_str!("page/index.html") };

/// The files that the document loads.
pub(super) const FILES: [PageFile; 14] = [
    PageFile { name: "icon.svg", kind: "image/svg+xml", text: include_str!("page/icon.svg") },
    PageFile { name: "base.css", kind: STYLE, text: include_str!("page/base.css") },
    PageFile { name: "parts.css", kind: STYLE, text: include_str!("page/parts.css") },
    PageFile { name: "main.js", kind: SCRIPT, text: include_str!("page/main.js") },
    PageFile { name: "data.js", kind: SCRIPT, text: include_str!("page/data.js") },
    PageFile { name: "dom.js", kind: SCRIPT, text: include_str!("page/dom.js") },
    PageFile { name: "format.js", kind: SCRIPT, text: include_str!("page/format.js") },
    PageFile { name: "trouble.js", kind: SCRIPT, text: include_str!("page/trouble.js") },
    PageFile { name: "charts.js", kind: SCRIPT, text: include_str!("page/charts.js") },
    PageFile { name: "pools.js", kind: SCRIPT, text: include_str!("page/pools.js") },
    PageFile { name: "endpoints.js", kind: SCRIPT, text: include_str!("page/endpoints.js") },
    PageFile { name: "process.js", kind: SCRIPT, text: include_str!("page/process.js") },
    PageFile { name: "decisions.js", kind: SCRIPT, text: include_str!("page/decisions.js") },
    PageFile { name: "explanation.js", kind: SCRIPT, text: include_str!("page/explanation.js") },
];

/// The routes of the page and its files.
pub(super) fn pages() -> Router<AdminState> {
    Router::new().route("/", get(async || served(&DOCUMENT))).route("/page/{file}", get(file))
}

async fn file(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|file| file.name == name) {
        Some(file) => served(file),
        None => (StatusCode::NOT_FOUND, "the status page has no such file\n").into_response(),
    }
}

fn served(file: &PageFile) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(file.kind)),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // The next version of the picker has other files under the same names.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, file.text).into_response()
}

#[cfg(test)]
mod tests {
    use super::FILES;
    use attache_prefix::trust::EventUse;

    #[test]
    fn page_shows_kv_events_as_trouble_that_are_not_used_alone() {
        let script = FILES.iter().find(|file| file.name == "trouble.js").expect("the script").text;
        let list = script.lines().find_map(|line| line.strip_prefix("const KV_TROUBLE = ")).expect("the list");
        for event_use in EventUse::ALL {
            let is_trouble = matches!(event_use, EventUse::Partial | EventUse::Unused);
            assert_eq!(list.contains(&format!("\"{}\": ", event_use.label())), is_trouble, "{event_use:?}");
        }
    }
}
