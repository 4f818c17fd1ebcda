//! The rules and dashboards in `examples`: promtool accepts the rules and their tests, and a real Prometheus that reads
//! two pickers with traffic has data for each query of each dashboard.

use crate::prefix;
use crate::replicas::Pair;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::nats::NatsProcess;
use crate::support::process::{eventually, repository, scratch};
use crate::support::prometheus::{PrometheusProcess, program};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use http::HeaderValue;
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use tokio::task::JoinSet;

#[test]
fn promtool_accepts_the_rules_and_their_unit_tests() {
    let directory = repository().join("examples/prometheus");
    for arguments in [
        ["check", "config", "prometheus.yaml"],
        ["check", "rules", "recording.yaml"],
        ["check", "rules", "alerts.yaml"],
        ["test", "rules", "tests/alerts.yaml"],
    ] {
        let output = Command::new(program("promtool")).args(arguments).current_dir(&directory).output();
        let output = output.expect("running promtool");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success() && said.contains("SUCCESS"), "{arguments:?}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn promtool_reads_the_metrics_in_the_older_text_format() {
    let servers = SimProcess::start(2, &[]).await;
    let picker = AttacheProcess::start(&servers.servers, &[]).await;
    let get = async |accept: &'static str| {
        let mut request = client::request("GET", picker.metrics, Http::H1, "/metrics", Payload::sized(Bytes::new()));
        request.headers_mut().insert("accept", HeaderValue::from_static(accept));
        client::send(picker.metrics, Http::H1, request).await.expect("the page")
    };
    let newer = get("application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5").await;
    assert!(newer.header("content-type").starts_with("application/openmetrics-text"));
    let plain = get("text/plain").await;
    assert_eq!(plain.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    let directory = scratch("metrics");
    let file = directory.path().join("metrics.txt");
    std::fs::write(&file, &plain.body).expect("writing the page");
    let page = std::fs::File::open(&file).expect("the page");
    let output = Command::new(program("promtool")).args(["check", "metrics"]).stdin(page).output();
    let output = output.expect("running promtool");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && said.is_empty(), "{said}");
}

/// The model servers of four pools: with KV events, with a queue, with prefill servers, and with a server that is down.
struct Servers {
    cached: SimProcess,
    queued: SimProcess,
    split: SimProcess,
    halved: SimProcess,
    down: SocketAddr,
}

impl Servers {
    async fn start() -> Self {
        let down = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
        Self {
            cached: SimProcess::start(2, prefix::SIM).await,
            queued: SimProcess::start(1, &["--model", "queued"]).await,
            split: SimProcess::with_roles("prefill=1,decode=1", 2, &["--model", "split"]).await,
            halved: SimProcess::start(1, &["--model", "halved"]).await,
            down,
        }
    }

    async fn configuration(&self) -> String {
        let cached = prefix::config(prefix::BY_PREFIX, "tiktoken", &self.cached.servers).await;
        let cached = cached.replace("- name: default\n", "- name: cached\n  match: {models: [sim-8b]}\n");
        let [prefill, decode] = self.split.servers[..] else { panic!("two servers") };
        let (queued, halved, down) = (self.queued.servers[0], self.halved.servers[0], self.down);
        format!(
            "{cached}- name: queued
  match: {{models: [queued]}}
  endpoints: [\"{queued}\"]
  flowControl:
    enabled: true
    detector: {{name: concurrency-detector, parameters: {{maxConcurrency: 1}}}}
    maxRequests: 2
- name: split
  match: {{models: [split]}}
  disaggregation: {{decider: always}}
  endpoints: [{{address: \"{prefill}\", role: prefill}}, {{address: \"{decode}\", role: decode}}]
- name: halved
  match: {{models: [halved]}}
  strategy: {{name: round-robin}}
  health: {{ejection: 100s}}
  endpoints: [\"{halved}\", \"{down}\"]
exchange: {{tenant: {{header: x-tenant}}, trustClientHeaders: true, objectives: {{urgent: 10}}}}
"
        )
    }
}

/// Sends a chat for `model` whose prompt repeats those before it in part.
async fn ask(to: SocketAddr, model: &str, number: usize) -> Reply {
    let system = "Answer briefly, politely and in plain words. ".repeat(40);
    let body = json!({
        "model": model, "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 8,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": format!("Question {number}?")}],
    });
    let payload = Payload::sized(body.to_string().into());
    let mut request = client::request("POST", to, Http::H1, "/v1/chat/completions", payload);
    request.headers_mut().insert("x-tenant", HeaderValue::from_static("team-a"));
    if number.is_multiple_of(2) {
        request.headers_mut().insert("x-gateway-inference-objective", HeaderValue::from_static("urgent"));
    }
    client::send(to, Http::H1, request).await.expect("an answer")
}

/// Clients of all pools, until they are told to stop.
struct Traffic {
    stop: Arc<AtomicBool>,
    clients: JoinSet<()>,
}

impl Traffic {
    fn start(to: [SocketAddr; 2]) -> Self {
        let (stop, mut clients) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
        // The pool with a queue has more clients than capacity and queue, so that some are rejected.
        let models = ["sim-8b", "split", "halved", "queued", "queued", "queued", "queued", "queued", "none"];
        for (client, model) in models.into_iter().enumerate() {
            for to in to {
                let stop = stop.clone();
                clients.spawn(async move {
                    for number in 0.. {
                        if stop.load(SeqCst) {
                            return;
                        }
                        let reply = ask(to, model, client * 1_000 + number % 50).await;
                        let expected: &[u16] = match model {
                            "none" => &[404],
                            "queued" => &[200, 429],
                            "halved" => &[200, 503],
                            _ => &[200],
                        };
                        let status = reply.status.as_u16();
                        assert!(
                            expected.contains(&status),
                            "{model}: {status} {}",
                            String::from_utf8_lossy(&reply.body)
                        );
                        // Clients wait before they repeat, so that the machine stays idle for the most part.
                        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    }
                });
            }
        }
        Self { stop, clients }
    }

    async fn end(self) {
        self.stop.store(true, SeqCst);
        self.clients.join_all().await;
    }
}

/// The shipped configuration, for these pickers and with a scrape each second.
async fn prometheus(pickers: &[&AttacheProcess]) -> (PrometheusProcess, tempfile::TempDir) {
    let shipped = repository().join("examples/prometheus");
    let mut text = std::fs::read_to_string(shipped.join("prometheus.yaml")).expect("the configuration");
    let targets: Vec<String> = pickers.iter().map(|picker| format!("\"{}\"", picker.metrics)).collect();
    for (from, to, times) in [
        ("10s", "1s".to_owned(), 2),
        ("\"127.0.0.1:9090\"", targets.join(", "), 1),
        ("recording.yaml", shipped.join("recording.yaml").display().to_string(), 1),
        ("alerts.yaml", shipped.join("alerts.yaml").display().to_string(), 1),
    ] {
        assert_eq!(text.matches(from).count(), times, "{from} in prometheus.yaml");
        text = text.replace(from, &to);
    }
    let directory = scratch("prometheus-config");
    let file = directory.path().join("prometheus.yaml");
    std::fs::write(&file, text).expect("writing");
    let prometheus = PrometheusProcess::start(&file).await;
    let known = pickers.len() as f64;
    eventually("all pickers to be scraped", async || {
        (prometheus.query("count(attache_build_info)").await == [known]).then_some(())
    })
    .await;
    (prometheus, directory)
}

/// The queries of all dashboards, each with its dashboard and panel. Variables select everything.
fn queries() -> Vec<(String, String)> {
    let mut all = Vec::new();
    let entries = std::fs::read_dir(repository().join("examples/grafana")).expect("dashboards").flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "json")) {
        let text = std::fs::read_to_string(&path).expect("a dashboard");
        let dashboard: Value = serde_json::from_str(&text).expect("JSON");
        for panel in dashboard["panels"].as_array().expect("panels") {
            for target in panel["targets"].as_array().expect("targets") {
                let mut query = target["expr"].as_str().expect("an expression").replace("$__rate_interval", "1m");
                for variable in ["job", "instance", "pool", "endpoint"] {
                    query = query.replace(&format!("\"${variable}\""), "\".*\"");
                }
                assert!(!query.contains('$'), "{query}");
                all.push((format!("{}: {}", dashboard["title"], panel["title"]), query));
            }
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn each_query_of_each_dashboard_has_data() {
    let (nats, servers) = (NatsProcess::start().await, Servers::start().await);
    let configuration = servers.configuration().await;
    let picker = async |name: &str| crate::replicas::picker(&configuration, name, &nats.url()).await;
    let pair = Pair::of([picker("a").await, picker("b").await]).await;
    pair.until_peers().await;
    // One that has TLS.
    let secure = AttacheProcess::start(&servers.queued.servers, &["--secure-serving=true"]).await;
    let [a, b] = &pair.pickers;
    let (prometheus, _directory) = prometheus(&[a, b, &secure]).await;
    let traffic = Traffic::start(pair.to);

    let queries = queries();
    assert!(queries.len() > 130, "{}", queries.len());
    for (panel, query) in &queries {
        let what = format!("data for {panel}\n{query}");
        eventually(&what, async || (!prometheus.query(query).await.is_empty()).then_some(())).await;
    }
    // The same traffic is counted by pool, reason, cause and priority.
    for query in [
        "sum(attache_rejections_total{pool=\"\",reason=\"model_not_found\"}) > 0",
        "sum(attache_rejections_total{pool=\"queued\",reason=\"queue_full\"}) > 0",
        "sum(attache_queued_band_requests{pool=\"queued\",priority=\"10\"}) > 0",
        &format!(
            "attache_ejections_total{{pool=\"halved\",endpoint=\"{}\",cause=\"connect_failure\"}} > 0",
            servers.down
        ),
        "sum(attache_disaggregation_total{course=\"split\"}) > 0",
        "attache:requests:rate5m{pool=\"cached\"} > 0",
    ] {
        eventually(query, async || (!prometheus.query(query).await.is_empty()).then_some(())).await;
    }
    let groups = prometheus.get("/api/v1/rules").await;
    let rules = groups["groups"].as_array().expect("groups").iter().flat_map(|group| group["rules"].as_array());
    for rule in rules.flatten() {
        assert_eq!(rule["health"], "ok", "{rule}");
    }
    // An endpoint without requests has at most these series, in every picker.
    let series =
        prometheus.query("max(count by (instance, pool, endpoint) ({endpoint!=\"\",__name__=~\"attache_.+\"}))").await;
    assert!(series[0] <= 13.0, "12 series, and the time until the probe of the ejected endpoint: {series:?}");
    traffic.end().await;
    pair.assert_settled().await;
}
