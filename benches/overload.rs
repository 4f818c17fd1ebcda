//! A pool at three times its capacity, through real Envoy, with `attache sim` behind it: what the important requests wait, who takes the loss, what
//! is still served, and what a tenant feels of another's flood. Then what a parked stream takes in memory.
//!
//! `cargo bench --bench overload -- [--rows classes,tenants,parked] [--seconds 60] [--servers 2] [--flow JSON]` prints a Markdown table. Loads are multiples of the capacity that
//! is measured first, and figures ratios of those without overload, so that they say something on any machine that keeps up.

#[allow(dead_code, reason = "shared with other benches, of which each uses a part")]
#[path = "support/load.rs"]
mod load;
#[allow(dead_code, reason = "shared with other benches, of which each uses a part")]
#[path = "support/measure.rs"]
mod measure;
#[allow(dead_code, reason = "shared with the end-to-end tests, which use all of it")]
#[path = "../tests/support/mod.rs"]
mod support;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::Error;
use support::attache::AttacheProcess;
use support::body::{Random, chat};
use support::envoy::{EnvoyProcess, shipped};
use support::sim::SimProcess;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Servers, unless said.
const SERVERS: usize = 2;
/// Bytes of a usual request: some two thousand tokens, so that a server is busy with its prompt for a tenth of a second. Requests are of half to one
/// and a half times as many: servers that compute equal prompts would keep in step for ever, which no traffic has them do.
const BODY: usize = 8_000;
/// Tokens of an answer.
const ANSWER: &str = "40";
/// Clients for each server that keep the pool busy while its capacity is measured.
const CLIENTS: usize = 16;
/// The load of those who are measured, of the capacity; they come alone first.
const IMPORTANT: f64 = 0.4;
/// The load of all together.
const OVERLOAD: f64 = 3.0;
/// Bytes that may wait for each server: some seconds' worth of requests.
const QUEUE: u64 = 1 << 19;
/// Streams that are parked at once, and connections that they come over.
const PARKED: usize = 10_000;
const CONNECTIONS: usize = 8;
/// Bytes of a parked body.
const PARKED_BODY: usize = 2_000;

/// Phases so far: no text comes twice, or it would be in a cache.
static PHASES: AtomicU64 = AtomicU64::new(1);

struct Options {
    rows: Vec<String>,
    seconds: f64,
    servers: usize,
    /// Settings of `flowControl`, by name.
    flows: Vec<(String, String)>,
}

fn main() -> Result<(), Error> {
    let mut options = Options {
        rows: ["classes", "tenants", "parked"].map(str::to_owned).to_vec(),
        seconds: 60.0,
        servers: SERVERS,
        flows: [("defaults", "{}"), ("short queues", SHORT)]
            .map(|(name, flow)| (name.to_owned(), flow.to_owned()))
            .to_vec(),
    };
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    for pair in arguments.chunks(2) {
        match pair {
            [name, value] if name == "--rows" => options.rows = value.split(',').map(str::to_owned).collect(),
            [name, value] if name == "--seconds" => options.seconds = value.parse()?,
            [name, value] if name == "--servers" => options.servers = value.parse()?,
            [name, value] if name == "--flow" => options.flows = vec![("as given".to_owned(), value.clone())],
            other => {
                return Err(
                    format!("unknown argument {other:?}: --rows a,b, --seconds n, --servers n, --flow JSON").into()
                );
            }
        }
    }
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(rows(&options))
}

async fn rows(options: &Options) -> Result<(), Error> {
    println!("| what | measured | ratio or figure | target |\n|---|---|---|---|");
    for row in &options.rows {
        match row.as_str() {
            "classes" => {
                for (name, flow) in &options.flows {
                    classes(name, flow, options).await?;
                }
            }
            "tenants" => {
                for (name, flow) in &options.flows {
                    tenants(name, flow, options).await?;
                }
            }
            "parked" => parked().await?,
            other => return Err(format!("unknown row {other:?}: classes, tenants, parked").into()),
        }
    }
    Ok(())
}

/// No more in front of a server than keeps it busy, and little of that for what is sheddable: what is important waits for less.
const SHORT: &str = r#"{"detector": {"name": "backlog-detector", "parameters": {"maxWaiting": 2}},
    "ceiling": {"name": "priority-holdback-policy", "parameters": {"minCeiling": 0.6}}}"#;

/// Bytes that may wait.
fn queue(servers: usize) -> u64 {
    QUEUE * servers as u64
}

/// A fleet, a picker with queues before it, and Envoy in front.
struct Pool {
    picker: AttacheProcess,
    envoy: EnvoyProcess,
    _fleet: SimProcess,
}

impl Pool {
    async fn start(flow: &str, servers: usize) -> Result<Self, Error> {
        let fleet = SimProcess::start(servers, &["--output-tokens", ANSWER, "--workers", "1"]).await;
        let mut flow: serde_json::Value = serde_json::from_str(flow)?;
        flow["enabled"] = true.into();
        flow["maxBytes"] = queue(servers).into();
        let endpoints: Vec<String> = fleet.servers.iter().map(SocketAddr::to_string).collect();
        let configuration = serde_json::json!({
            "apiVersion": "attache.dev/v1",
            "kind": "Attache",
            "server": {"workers": 1},
            "exchange": {"trustClientHeaders": true, "objectives": {"batch": -1, "urgent": 10}},
            "pools": [{"name": "default", "endpoints": endpoints, "flowControl": flow}],
        });
        let picker = AttacheProcess::configured(&configuration.to_string()).await;
        let ports = [(8080, 0), (9901, 0), (9002, picker.grpc.port()), (9003, picker.health.port())];
        let envoy = EnvoyProcess::with_workers(&shipped("original-dst.yaml", &ports), 1).await;
        Ok(Self { picker, envoy, _fleet: fleet })
    }

    fn address(&self) -> SocketAddr {
        self.envoy.listener("inference")
    }
}

/// One request and what came of it; times in seconds.
#[derive(Clone, Copy)]
struct Sample {
    /// From the beginning of the phase.
    sent: f64,
    /// Of its body.
    bytes: f64,
    status: u16,
    /// Until the first byte of the answer's body.
    first: f64,
    ended: f64,
    retry: Option<f64>,
}

async fn ask(to: SocketAddr, header: &str, seed: u64, began: Instant) -> Result<Sample, Error> {
    let body = chat(BODY / 2 + usize::try_from(seed % BODY as u64)?, true, seed);
    let bytes = body.len() as f64;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: inference\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n{header}\r\n\r\n",
        body.len()
    );
    let sent = began.elapsed().as_secs_f64();
    let mut stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    stream.write_all(&[head.as_bytes(), &body].concat()).await?;
    let (mut answer, mut body_at, mut first) = (Vec::with_capacity(4096), None, f64::NAN);
    while stream.read_buf(&mut answer).await? > 0 {
        body_at = body_at.or_else(|| memchr::memmem::find(&answer, b"\r\n\r\n").map(|at| at + 4));
        if first.is_nan() && body_at.is_some_and(|at| answer.len() > at) {
            first = began.elapsed().as_secs_f64() - sent;
        }
    }
    let head = String::from_utf8_lossy(&answer[..body_at.ok_or("no answer")?]).to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or("no status")?;
    if status == 200 && memchr::memmem::find(&answer, b"[DONE]").is_none() {
        return Err("an answer was cut".into());
    }
    let retry = head.split("retry-after: ").nth(1).and_then(|rest| rest.lines().next()?.parse().ok());
    Ok(Sample { sent, bytes, status, first, ended: began.elapsed().as_secs_f64(), retry })
}

/// Requests of one kind: their header, and how many come in a second.
#[derive(Clone, Copy)]
struct Kind {
    header: &'static str,
    rate: f64,
}

/// Sends all kinds for `seconds`, at random times that do not depend on answers; what came of each kind's requests.
async fn play(to: SocketAddr, kinds: &[Kind], seconds: f64) -> Result<Vec<Vec<Sample>>, Error> {
    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for (number, kind) in kinds.iter().copied().enumerate() {
        tasks.spawn(async move {
            let mut random = Random::new(PHASES.fetch_add(1, Ordering::Relaxed));
            let (mut asked, mut at) = (tokio::task::JoinSet::new(), 0.0);
            loop {
                let uniform = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
                at += -(1.0 - uniform).ln() / kind.rate;
                if at > seconds {
                    break;
                }
                tokio::time::sleep_until(began + Duration::from_secs_f64(at)).await;
                asked.spawn(ask(to, kind.header, random.next(), began));
            }
            let samples: Result<Vec<Sample>, Error> = asked.join_all().await.into_iter().collect();
            Ok::<_, Error>((number, samples?))
        });
    }
    let mut all = vec![Vec::new(); kinds.len()];
    for result in tasks.join_all().await {
        let (number, samples) = result?;
        all[number] = samples;
    }
    Ok(all)
}

/// Bytes of requests a second that the pool answers when it always has something to do.
async fn capacity(to: SocketAddr, servers: usize, seconds: f64) -> Result<f64, Error> {
    let began = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..CLIENTS * servers {
        clients.spawn(async move {
            let mut random = Random::new(1_000 + client as u64);
            let mut ended = Vec::new();
            while began.elapsed().as_secs_f64() < seconds {
                let sample = ask(to, "x-client: 1", random.next(), began).await?;
                assert_eq!(sample.status, 200, "nobody is refused here");
                ended.push((sample.ended, sample.bytes));
            }
            Ok::<_, Error>(ended)
        });
    }
    let ended: Result<Vec<_>, Error> = clients.join_all().await.into_iter().collect();
    // Past the beginning, when all come at once.
    let from = seconds / 4.0;
    let ended = ended?.concat();
    let bytes: f64 = ended.iter().filter(|(at, _)| (from..seconds).contains(at)).map(|(_, bytes)| bytes).sum();
    Ok(bytes / (seconds - from))
}

/// The value below which this part of all are.
fn quantile(mut values: Vec<f64>, part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (part * values.len() as f64).ceil() as usize;
    values.get(at.saturating_sub(1).min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

fn served(samples: &[Sample]) -> Vec<&Sample> {
    samples.iter().filter(|sample| sample.status == 200).collect()
}

fn first_bytes(samples: &[Sample]) -> Vec<f64> {
    served(samples).iter().map(|sample| sample.first).collect()
}

fn print(what: &str, measured: &str, figure: f64, unit: &str, at_most: bool, target: f64) {
    let met = if at_most { figure <= target } else { figure >= target };
    let (sign, verdict) = (if at_most { "≤" } else { "≥" }, if met { "" } else { ", not met" });
    println!("| {what} | {measured} | {figure:.2}{unit}{verdict} | {sign} {target}{unit} |");
}

/// Bytes of requests a second that were answered between the first seconds, in which queues fill, and the end of the load. Answers alone would
/// flatter a queue that lets short prompts go first.
fn goodput(all: &[Vec<Sample>], seconds: f64) -> f64 {
    let from = seconds / 10.0;
    let ended = all.iter().flatten().filter(|sample| sample.status == 200 && (from..seconds).contains(&sample.ended));
    ended.map(|sample| sample.bytes).sum::<f64>() / (seconds - from)
}

/// `retry-after` of those refused by what the last one that was let in before them has waited.
fn truth(samples: &[Sample]) -> Vec<f64> {
    let told = samples.iter().filter(|sample| sample.status != 200);
    let before = |sent: f64| {
        let earlier = served(samples).into_iter().filter(|sample| sample.sent <= sent);
        earlier.max_by(|a, b| a.sent.total_cmp(&b.sent)).map(|sample| sample.first)
    };
    told.filter_map(|sample| Some(sample.retry? / before(sample.sent)?)).collect()
}

async fn classes(name: &str, flow: &str, options: &Options) -> Result<(), Error> {
    let pool = Pool::start(flow, options.servers).await?;
    let to = pool.address();
    let capacity = capacity(to, options.servers, (options.seconds / 3.0).max(8.0)).await?;
    let urgent = Kind { header: "x-gateway-inference-objective: urgent", rate: capacity * IMPORTANT / BODY as f64 };
    let batch =
        Kind { header: "x-gateway-inference-objective: batch", rate: capacity * (OVERLOAD - IMPORTANT) / BODY as f64 };
    let alone = play(to, &[urgent], options.seconds).await?;
    let watched = watch(&pool);
    let kinds = [urgent, batch];
    let all = play(to, &kinds, options.seconds);
    let (all, peak) = tokio::select! { all = all => (all?, watched.peak()), never = watched.forever() => never };
    let lost = |samples: &[Sample]| samples.len() - served(samples).len();
    let (quiet, busy) = (quantile(first_bytes(&alone[0]), 0.99), quantile(first_bytes(&all[0]), 0.99));
    let usual = [&alone[0], &all[0]].map(|samples| quantile(first_bytes(samples), 0.5));
    let measured =
        format!("p99 of the first byte {busy:.3} s, alone {quiet:.3} s; p50 {:.3}, {:.3} s", usual[1], usual[0]);
    print(&format!("important, {name}"), &measured, busy / quiet, " ×", true, 1.5);
    let measured = format!(
        "{} of {} important, {} of {} sheddable refused",
        lost(&all[0]),
        all[0].len(),
        lost(&all[1]),
        all[1].len()
    );
    print(&format!("important ones lost, {name}"), &measured, lost(&all[0]) as f64, "", true, 0.0);
    let strange =
        all.iter().flatten().filter(|s| s.status != 200 && !(matches!(s.status, 429 | 503) && s.retry.is_some()));
    print(
        &format!("other answers than 200, 429, 503, {name}"),
        "with `retry-after` where refused",
        strange.count() as f64,
        "",
        true,
        0.0,
    );
    let ratios = truth(&all[1]);
    let spread = format!("p10 {:.2}, p90 {:.2}", quantile(ratios.clone(), 0.1), quantile(ratios.clone(), 0.9));
    print(
        &format!("`retry-after` by the wait of who came before, median, {name}"),
        &spread,
        quantile(ratios, 0.5),
        " ×",
        true,
        2.0,
    );
    let (good, limit) = (goodput(&all, options.seconds), queue(options.servers));
    let measured = format!("{:.0} kB/s of prompts, capacity {:.0}", good / 1e3, capacity / 1e3);
    print(&format!("goodput, {name}"), &measured, good / capacity, " ×", false, 0.95);
    print(
        &format!("most bytes that waited, {name}"),
        &format!("{peak}, limit {limit}"),
        peak as f64 / limit as f64,
        " ×",
        true,
        1.0,
    );
    pool.picker.assert_settled().await;
    pool.envoy.assert_picker_was_correct().await;
    Ok(())
}

/// Looks at the queue again and again.
fn watch(pool: &Pool) -> Watch<'_> {
    Watch { pool, peak: Default::default() }
}

struct Watch<'a> {
    pool: &'a Pool,
    peak: AtomicU64,
}

impl Watch<'_> {
    fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    async fn forever<T>(&self) -> T {
        loop {
            let held = self.pool.picker.metric("attache_queued_bytes").await as u64;
            self.peak.fetch_max(held, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// How many times its p90 alone a tenant's p90 is beside a flood where it is always next, and servers compute one prompt after the other and
/// interrupt none: no order of a queue comes below that.
fn uninterrupted(servers: usize) -> f64 {
    let p90 = |flooded: bool| {
        let mut random = Random::new(7);
        let mut uniform = || (random.next() >> 11) as f64 / (1u64 << 53) as f64;
        // When each is done.
        let mut done: Vec<f64> = (0..servers).map(|server| server as f64 / servers as f64).collect();
        let mut at = 0.0;
        let waits = (0..100_000).map(|_| {
            at -= (1.0 - uniform()).ln() / (IMPORTANT * servers as f64);
            loop {
                let first = done.iter_mut().min_by(|a, b| a.total_cmp(b)).expect("servers");
                let size = 0.5 + uniform();
                if !flooded || *first >= at {
                    *first = first.max(at) + size;
                    return *first - at;
                }
                *first += size;
            }
        });
        quantile(waits.collect(), 0.9)
    };
    p90(true) / p90(false)
}

async fn tenants(name: &str, flow: &str, options: &Options) -> Result<(), Error> {
    let pool = Pool::start(flow, options.servers).await?;
    let to = pool.address();
    let capacity = capacity(to, options.servers, (options.seconds / 3.0).max(8.0)).await?;
    let one = Kind { header: "x-gateway-inference-fairness-id: one", rate: capacity * IMPORTANT / BODY as f64 };
    let flood = Kind {
        header: "x-gateway-inference-fairness-id: flood",
        rate: capacity * (OVERLOAD - IMPORTANT) / BODY as f64,
    };
    let alone = play(to, &[one], options.seconds).await?;
    let all = play(to, &[one, flood], options.seconds).await?;
    let (quiet, busy) = (quantile(first_bytes(&alone[0]), 0.9), quantile(first_bytes(&all[0]), 0.9));
    let least = uninterrupted(options.servers);
    let measured = format!(
        "{} servers; p90 of the first byte {busy:.3} s, alone {quiet:.3} s; {least:.2} × where it is always next and no prompt is interrupted",
        options.servers
    );
    print(&format!("a tenant beside a flood, {name}"), &measured, busy / quiet, " ×", true, 1.3);
    let lost = all[0].len() - served(&all[0]).len();
    print(&format!("that tenant's requests lost, {name}"), &format!("of {}", all[0].len()), lost as f64, "", true, 0.0);
    let good = goodput(&all, options.seconds);
    print(
        "goodput, tenants",
        &format!("{:.0} kB/s of prompts, capacity {:.0}", good / 1e3, capacity / 1e3),
        good / capacity,
        " ×",
        false,
        0.95,
    );
    pool.picker.assert_settled().await;
    Ok(())
}

/// What a stream takes that waits for its turn, beside its body.
async fn parked() -> Result<(), Error> {
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nserver: {{workers: 1}}\npools:\n- name: default\n  endpoints: [{{address: \"127.0.0.1:9\", engine: none}}]\n  \
         flowControl:\n    enabled: true\n    detector: {{name: concurrency-detector, parameters: {{maxConcurrency: 1}}}}\n    ttl: 10m\n    \
         defaultBand: {{maxRequests: {}}}\n",
        PARKED * 2
    ))
    .await;
    let exchange = load::Exchange::new(chat(PARKED_BODY, true, 1), &[], "text/event-stream");
    // The first takes the only seat, and connections and threads take what they take.
    let first = load::open(picker.grpc, &exchange, CONNECTIONS, CONNECTIONS).await?;
    picker.until_metric("attache_queued_requests", (CONNECTIONS - 1) as f64).await;
    let before = measure::resident_mib(picker.process.id());
    let held = load::open(picker.grpc, &exchange, CONNECTIONS, PARKED).await?;
    picker.until_metric("attache_queued_requests", (PARKED + CONNECTIONS - 1) as f64).await;
    let took = measure::resident_mib(picker.process.id()) - before;
    let each = took * 1024.0 / PARKED as f64 - PARKED_BODY as f64 / 1024.0;
    print("a parked stream beside its body", &format!("{PARKED} streams, {took:.0} MiB"), each, " KiB", true, 8.0);
    drop((first, held));
    picker.assert_settled().await;
    Ok(())
}
