//! The status page in a real browser: a picker with simulated servers and traffic through Envoy, and one with three
//! hundred endpoints.

mod browser;

use crate::operation::replace;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::scratch;
use crate::support::sim::SimProcess;
use browser::Browser;
use std::fmt::Write;
use std::net::{SocketAddr, TcpListener};

/// An address at which nothing listens.
fn unused() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port")
}

fn config(servers: &[SocketAddr]) -> String {
    let servers: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{explain: {{kept: 64, timeRatio: 1}}}}\npools:\n- name: chat\n  \
         strategy: {{name: predicted-latency}}\n  endpoints: [{}]\n",
        servers.join(", ")
    )
}

/// Sends a streamed request of this id.
async fn request(envoy: &EnvoyProcess, id: &str) -> Reply {
    let body = format!(
        r#"{{"model": "sim-8b", "stream": true, "max_tokens": 4, "messages": [{{"role": "user", "content": "{id}"}}]}}"#
    );
    let to = envoy.listener("inference");
    let mut request = client::request("POST", to, Http::H1, "/v1/chat/completions", Payload::sized(body.into()));
    request.headers_mut().insert("x-request-id", id.parse().expect("a header"));
    client::send(to, Http::H1, request).await.expect("a response")
}

/// Checks what holds for every page: nothing is wider than the window, nothing complains, no other host is asked.
async fn assert_sound(browser: &mut Browser, picker: &AttacheProcess, width: u32) {
    let wide = browser.value("document.documentElement.scrollWidth").await;
    assert_eq!(wide, width, "horizontal overflow");
    assert_eq!(browser.complaints(), Vec::<String>::new());
    let own = format!("http://{}/", picker.metrics);
    let others: Vec<_> =
        browser.requested().into_iter().filter(|url| !url.starts_with(&own) && url != "about:blank").collect();
    assert!(others.is_empty() && !browser.requested().is_empty(), "{others:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn trouble_comes_first_and_a_decision_opens_to_its_candidates() {
    let sim = SimProcess::start(2, &["--model", "sim-8b"]).await;
    let down = unused();
    let directory = scratch("config");
    let file = directory.path().join("attache.yaml");
    replace(&file, &config(&sim.servers));
    let picker = AttacheProcess::with_file(&file, &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let mut browser = Browser::start().await;
    browser.look(1440, false).await;
    browser.open(picker.metrics).await;
    browser.until("document.querySelector('#decisions .empty:not([hidden])')").await;

    for number in 0..20 {
        let reply = request(&envoy, &format!("request-{number}")).await;
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    }
    replace(&file, &config(&[sim.servers[0], sim.servers[1], down]));
    let line = "document.getElementById('trouble-line').textContent";
    browser.until(&format!("/^1 of 3 endpoints (ejected|unreachable)/.test({line})")).await;
    replace(&file, "apiVersion: attache.dev/v1\nkind: Attache\npools: [{name: chat, endpoints: [nonsense]}]\n");
    browser.until(&format!("{line}.includes('configuration refused')")).await;
    browser.until("document.querySelector('.trouble.bad li').textContent.includes('1 of 3')").await;
    browser.until("document.getElementById('card-configuration').textContent.includes('nonsense')").await;
    let first = browser.value("document.querySelector('.endpoints tbody tr').innerText").await;
    assert!(first.as_str().is_some_and(|row| row.contains(&down.to_string())), "{first}");
    assert!(browser.value("document.title").await.as_str().is_some_and(|title| title.starts_with('(')));

    // Two readings of the counters later there is a line, with the values of a time in reach of the keyboard.
    browser.until("document.querySelector('.tile path.line').getAttribute('d')?.includes('L')").await;
    browser.value("document.querySelector('.plot').focus()").await;
    browser.press("ArrowLeft").await;
    let spoken = browser.value("document.querySelector('.plot').getAttribute('aria-valuetext')").await;
    assert!(spoken.as_str().is_some_and(|text| text.contains(": requests ") && !text.starts_with("now")), "{spoken}");

    // The speed of the pool is learned, and both servers have a cost.
    for label in ["Predicted TTFT", "Actual TTFT", "Margin"] {
        let has_label =
            format!("part.firstChild.textContent === '{label}' && part.lastChild.textContent.endsWith('s')");
        browser.until(&format!("[...document.querySelectorAll('.decision .part')].some(part => {has_label})")).await;
    }
    browser.value("document.getElementById('decision-filter').focus()").await;
    browser.write("request-13").await;
    browser.until("document.querySelectorAll('.decision').length === 1").await;
    browser.value("document.querySelector('.decision summary').focus()").await;
    browser.press("Enter").await;
    browser.until("document.querySelector('.explanation .badge.good')?.textContent === 'chosen'").await;
    assert_eq!(browser.value("document.querySelectorAll('.explanation tbody tr').length").await, 2);
    // What was opened stays open while the page is refreshed.
    let heard = picker.metric("attache_streams_total").await;
    request(&envoy, "request-after").await;
    picker.until_metric("attache_streams_total", heard + 1.0).await;
    browser.until("document.querySelector('#decision-kinds b').textContent === '21'").await;
    assert_eq!(browser.value("document.querySelector('.decision').open").await, true);
    assert_sound(&mut browser, &picker, 1440).await;

    browser.look(390, true).await;
    browser.until("getComputedStyle(document.querySelector('.endpoints tbody tr')).display === 'grid'").await;
    assert_sound(&mut browser, &picker, 390).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_endpoints_are_folded_and_found_by_the_filter() {
    let mut config = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: large\n  endpoints:\n".to_owned();
    for number in 0..300 {
        let (zone, host) = (number % 3, 1 + number % 250);
        let address = format!("127.9.{}.{host}:8000", number / 250);
        writeln!(config, "  - {{address: \"{address}\", engine: none, labels: {{zone: z{zone}}}}}").expect("text");
    }
    let picker = AttacheProcess::configured(&config).await;
    let mut browser = Browser::start().await;
    browser.look(1440, true).await;
    browser.open(picker.metrics).await;
    browser.until("document.getElementById('trouble-line').textContent.startsWith('No trouble: 300 endpoints')").await;
    let rows = "document.querySelectorAll('.endpoints tbody tr').length";
    let height = "document.documentElement.scrollHeight";
    assert_eq!(browser.value(rows).await, 20);
    assert!(browser.value(height).await.as_u64().is_some_and(|pixels| pixels < 2_500));
    assert_sound(&mut browser, &picker, 1440).await;

    browser.press("/").await;
    browser.until("document.activeElement.id === 'filter'").await;
    browser.write("127.9.1.17:").await;
    browser.until(&format!("{rows} === 1")).await;
    assert_eq!(browser.value("document.getElementById('matches').textContent").await, "1 of 300 shown");
    browser.value("document.getElementById('filter').select()").await;
    browser.write("zone=z1").await;
    browser.until("document.getElementById('matches').textContent === '100 of 300 shown'").await;
    browser.value("document.getElementById('filter').select()").await;
    browser.press("Backspace").await;
    browser.until("document.getElementById('matches').textContent === ''").await;

    let more = "document.querySelector('.endpoints .more')";
    assert_eq!(browser.value(&format!("{more}.textContent")).await, "Show 280 more healthy endpoints");
    browser.value(&format!("{more}.click()")).await;
    browser.until(&format!("{rows} === 300")).await;
    browser.value(&format!("{more}.click()")).await;
    browser.look(390, false).await;
    browser.until(&format!("{rows} === 5")).await;
    assert!(browser.value(height).await.as_u64().is_some_and(|pixels| pixels < 3_000));
    assert_sound(&mut browser, &picker, 390).await;
}
